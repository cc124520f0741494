"""Let compiled code run on tensors without rows, where torch divides by their number of blocks.

In torch 2.11 a kernel over two dimensions has so many layers of blocks as its second dimension
needs; with none it divides by zero. A job without tokens in a row is such a case. Later versions
ask first.

source   torch 2.11 and 2.13, `Grid2DWithYZOverflow` in _inductor/runtime/triton_heuristics.py
"""

from __future__ import annotations

import functools
from typing import Any

import torch

LAYERS = "y_grid_div_"


def allow_empty_grids() -> None:
    """Mend the class that writes such launches, once a process; nothing to do without CUDA."""
    if not torch.cuda.is_available():
        return
    from torch._inductor.runtime import triton_heuristics

    grid = getattr(triton_heuristics, "Grid2DWithYZOverflow", None)
    if grid is not None:
        mend(grid)


def mend(grid: Any) -> None:
    """Let a class's `generate` ask whether there are layers before it divides by their number."""
    generate = grid.generate
    if hasattr(generate, "__wrapped__"):
        return

    @functools.wraps(generate)
    def asking(self: Any, *given: Any, **options: Any) -> None:
        generate(self, *given, **options)
        launch = str(self.y_grid)
        if self.mode == "python" and LAYERS in launch and " if " not in launch:
            self.y_grid = f"(0 if {LAYERS} == 0 else {launch})"

    grid.generate = asking
