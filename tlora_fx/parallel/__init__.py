"""Execution of plans: meshes, sharding, stages, nano-batches, CUDA graphs."""
