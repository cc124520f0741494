"""Looking into a Shared Super-Model: what is shared, what it costs, and why the rest is not."""
