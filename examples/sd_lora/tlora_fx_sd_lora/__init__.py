"""SD-LoRA for tlora-fx: magnitudes and directions apart, over a sequence of tasks."""
