"""Groups as processes of this machine: real trainers, real checkpoints between groups."""
