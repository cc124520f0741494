"""One emitter a kernel kind: `codegen/emit/<kind>.py` writes the Triton source of a spec.

An emitter is a module with the functions of `Emitter`; the first line of its docstring says what
the kernel does. `source` builds text with `codegen.source.module` and `fill`; see pack.py.

A generated module has

    SIGNATURE   {argument of the kernel: Triton's type}, such as "*bf16", "i32",
                "tensordesc<bf16[128, 64]>", for compiling without a GPU, in the kernel's order
    META        {"num_warps": 8, "num_stages": 3}, given to every launch
    kernel      the @triton.jit function
    launch      the Python function that computes the grid and starts the kernel

Integers that change from step to step are named in the kernel's `do_not_specialize`; all others,
and all pointers, count as divisible by 16 when a kernel is compiled without a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from tlora_fx.codegen.spec import KernelSpec, Kind, Tile


class Emitter(Protocol):
    """What a module in codegen/emit offers."""

    __doc__: str | None

    def default_tile(self, spec: KernelSpec) -> Tile:
        """The rule: how to cut the work of this spec where nothing was measured."""

    def candidates(self, spec: KernelSpec) -> tuple[Tile, ...]:
        """What tuning tries, the rule's tile first."""

    def source(self, spec: KernelSpec) -> str:
        """The module's text for a settled spec: `spec.cut` is its tile."""

    def flops(self, spec: KernelSpec) -> str:
        """The FLOP of a call as a formula in M, I, O, r (mean rank), R (rows of a and b)."""

    def bytes_moved(self, spec: KernelSpec) -> str:
        """The bytes that a call reads and writes in device memory, as a formula."""

    def cost(self, spec: KernelSpec, tokens: int, rank_rows: int) -> tuple[int, int]:
        """FLOP and bytes; rank_rows is the sum of tokens times rank over the jobs."""


def emitter(kind: Kind) -> Emitter:
    """The emitter of a kind, imported when it is asked for."""
    return cast(Emitter, import_module(f"tlora_fx.codegen.emit.{kind}"))
