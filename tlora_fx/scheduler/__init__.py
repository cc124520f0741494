"""Scheduler: which jobs train together, on which GPUs, for how long, decided at each horizon."""
