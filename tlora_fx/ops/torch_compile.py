"""Workarounds for torch.compile on our operators.

Keys of torch's caches hold the names of operators, not what their fake implementations give. Those
depend on which implementation serves (see kernels/support.py), so code that was compiled under
another mode, or by another version, would be called with results that it does not expect. Nor do
they hold which processes a tensor-parallel graph sums over (see parallel.py), or the width of the
CPU's vectors, for which Inductor writes its loops: where a machine with AVX2 finds a cache of one
with AVX-512, in an image or on a shared disk, it compiles those loops for its own, and they compute
NaN (torch 2.13).
"""

from __future__ import annotations

import functools
import re
import sys
from hashlib import sha256
from typing import Any

import torch
import torch.compiler.config as settings

from tlora_fx.host.environment import kernel_mode, wants_strict_kernels
from tlora_fx.host.version import __version__
from tlora_fx.ops.parallel import facts as groups

_OURS = re.compile(r";?tlora_fx=[0-9a-f]+")


def mark_compile_caches() -> None:
    """Write our part into `torch.compiler.config.cache_key_tag`, behind what the user has there.

    To be called where something is about to be compiled: the environment may have changed.
    """
    users = _OURS.sub("", settings.cache_key_tag)
    settings.cache_key_tag = f"{users};{_part()}" if users else _part()


def _part() -> str:
    modes = kernel_mode(), wants_strict_kernels(), torch.backends.cpu.get_cpu_capability()
    facts = (__version__, *_schemas(), *modes, holds_rows(), *groups())
    return f"tlora_fx={sha256(repr(facts).encode()).hexdigest()[:16]}"


@functools.cache
def _schemas() -> tuple[str, ...]:
    """The signatures of all our operators; asked for when all of them are there."""
    every = map(str, torch._C._jit_get_all_schemas())
    return tuple(sorted(schema for schema in every if schema.startswith("tlora_fx::")))


def keep_kernels() -> None:
    """Make Inductor keep kernels where ours are kept; nothing to do without CUDA."""
    if torch.cuda.is_available():
        from tlora_fx.codegen.loading import keep_triton_cache

        keep_triton_cache()


#: Numbers of a row that compiled code holds while it sums them.
HELD = 8192


def hold_rows() -> None:
    """Make compiled code sum rows of up to HELD numbers in one read, once a process.

    Inductor does so up to 1,024 and reads longer ones twice; all that it compiles in this process
    from then on changes, the user's own code too. In the rounds of a Llama-3-8B shape
    on an H200, 8,192 tokens, the norms' kernels took 103, 82, 76 and 45 microseconds so, and take
    67, 64, 62 and 34. There is nothing to do without CUDA.

    source   torch 2.11 and 2.13, `InductorChoices` in _inductor/choices.py
    """
    if not torch.cuda.is_available():
        return
    from torch._inductor.choices import InductorChoices

    widen(InductorChoices)


def widen(choices: Any) -> None:
    """Make a class's `should_use_persistent_reduction` accept rows of up to HELD numbers."""
    usual = getattr(choices, "should_use_persistent_reduction", None)
    if usual is None or hasattr(usual, "holds_rows"):
        return

    @functools.wraps(usual)
    def holding(features: Any, cooperative_reduction: bool) -> bool:
        if usual(features, cooperative_reduction):
            return True
        return not cooperative_reduction and _is_held(features)

    holding.holds_rows = True  # type: ignore[attr-defined]
    choices.should_use_persistent_reduction = staticmethod(holding)


def holds_rows() -> bool:
    """Whether `hold_rows` has changed what is compiled."""
    module = sys.modules.get("torch._inductor.choices")
    rule = getattr(
        getattr(module, "InductorChoices", None), "should_use_persistent_reduction", None
    )
    return hasattr(rule, "holds_rows")


def _is_held(features: Any) -> bool:
    from torch._inductor import config
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    inner = features.get_reduction_hint() == ReductionHint.INNER
    allowed = inner and config.triton.persistent_reductions
    return allowed and V.graph.sizevars.statically_known_leq(features.reduction_numel, HELD)


LAYERS = "y_grid_div_"


def allow_empty_grids() -> None:
    """Make compiled code run on tensors without rows, once a process; nothing to do without CUDA.

    In torch 2.11 a kernel over two dimensions has so many layers of blocks as its second dimension
    needs; with none it divides by zero. A job without tokens in a row is such a case. Later
    versions ask first.

    source   torch 2.11 and 2.13, `Grid2DWithYZOverflow` in _inductor/runtime/triton_heuristics.py
    """
    if not torch.cuda.is_available():
        return
    from torch._inductor.runtime import triton_heuristics

    grid = getattr(triton_heuristics, "Grid2DWithYZOverflow", None)
    if grid is not None:
        mend(grid)


def mend(grid: Any) -> None:
    """Make a class's `generate` check that there are layers before it divides by their number."""
    generate = grid.generate
    if hasattr(generate, "__wrapped__"):
        return

    @functools.wraps(generate)
    def asking(self: Any, *arguments: Any, **options: Any) -> None:
        generate(self, *arguments, **options)
        launch = str(self.y_grid)
        if self.mode == "python" and LAYERS in launch and " if " not in launch:
            self.y_grid = f"(0 if {LAYERS} == 0 else {launch})"

    grid.generate = asking
