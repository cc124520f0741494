"""Triton's interpreter where there is no GPU: Triton chooses it when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
