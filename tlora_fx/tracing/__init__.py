"""Trace a job to its graph: transformers' and PEFT's own modules, without weights."""
