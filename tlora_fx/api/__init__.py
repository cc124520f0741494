"""Training from Python in one call: jobs in, a table of results out."""
