"""Measure layers, kernels and collectives on the device at hand."""
