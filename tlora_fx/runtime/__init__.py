"""Run a fused model: data, weights, steps, optimizers, checkpoints."""
