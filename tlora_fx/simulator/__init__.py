"""The scheduler over a simulated clock: traces, replay, metrics and reports."""
