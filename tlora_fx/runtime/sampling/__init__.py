"""Completions that jobs draw with their adapters as they are now, on the base that trains."""
