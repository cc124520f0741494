"""From a job to its graph: transformers' and PEFT's own modules, traced without weights."""
