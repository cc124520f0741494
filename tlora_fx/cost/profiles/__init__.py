"""Measured profiles that are shipped: one JSON file for a model shape on a GPU."""
