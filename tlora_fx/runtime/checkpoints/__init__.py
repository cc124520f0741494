"""Checkpoints on disk: directories, tensor files, digests."""
