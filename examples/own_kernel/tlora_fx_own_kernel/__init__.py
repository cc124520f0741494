"""LoRA of all jobs at a site by two Triton kernels, as a package outside tlora-fx brings them."""
