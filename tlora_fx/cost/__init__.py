"""One model of a step's time and memory, which planners and the scheduler ask."""
