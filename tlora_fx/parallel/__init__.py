"""What runs a plan: meshes, sharding, stages, nano-batches, CUDA graphs."""
