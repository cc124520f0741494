"""Processes that train a group for a scheduler: their body, and the files that they share."""
