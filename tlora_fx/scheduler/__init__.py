"""Which jobs train together, on which GPUs, and for how long: decided anew at each horizon."""
