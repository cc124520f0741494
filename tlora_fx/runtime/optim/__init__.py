"""Optimizers, schedules and clipping, of one job and of all jobs of a round."""
