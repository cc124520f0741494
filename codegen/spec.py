"""All that a generated kernel is specialised on.

What is not here is run-time data: token counts, segments, ranks, scales, seeds, dropout rates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from tlora_fx.errors import KernelSpecError, UnknownKernel, nearest

Kind = Literal[
    "pack",
    "shrink",
    "forward",
    "input_gradient",
    "lora_b_backward",
    "sum_ds",
    "sum_s",
    "lora_a_backward",
    "sum_gradients",
    "expand",
]
Dtype = Literal["bfloat16", "float16", "float32", "float64"]
Layout = Literal["out_in", "in_out"]
Extend = Literal["", "tail", "copy"]
Gated = Literal["", "silu", "gelu_tanh"]

KINDS: tuple[Kind, ...] = get_args(Kind)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
MAX_SITES = 4
#: Shared memory that one program may have, in bytes, by compute capability.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
SHARED_BYTES |= {103: 227 << 10, 120: 99 << 10}


def shared_bytes(arch: int) -> int:
    """Shared memory of a program; of an unknown architecture as much as all have."""
    return SHARED_BYTES.get(arch, min(SHARED_BYTES.values()))


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes by which a kernel cuts its work; each kind says which fields it reads.

    rows      tokens of one tile
    columns   output columns of one tile
    depth     elements of the summed dimension that one step of a loop reads
    warps     of 32 threads
    stages    depth of the software pipeline
    chunk     tokens of a segment whose gradients are summed in one program
    slab      columns of one program that takes a whole slab of a wide matrix
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    chunk: int = 0
    slab: int = 0


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel of one frozen linear y[M, O] = x[M, I] Wᵀ with adapters.

    kind            which of the kernels
    inner, outer    I and O of the frozen linear
    dtype           of x, W and every product's operands
    adapter_dtype   of the stored a and b and of their gradients
    rank_block      ranks are padded to a multiple of this many rows
    dropout         masks are drawn or read
    bias            the frozen linear has one
    weight_layout   "out_in": W is stored [O, I]; "in_out": [I, O], as GPT-2's Conv1D has it
    accumulate      add to what the output holds
    sites           linears that share this input
    beside          O of the second and later sites; (): all are as wide as the first
    extend          concat-K: "" not, "tail" writes behind existing rows, "copy" copies them too
    whole           no job has more than a chunk of tokens: gradients leave whole, not as shares
    gated           x is this activation of a gate, times a value beside it, and is made here
    job_capacity    a power of two, at least the number of jobs of any row
    arch            compute capability, 90 for Hopper
    tile            None: the kind's rule for this spec

    raises          UnknownKernel, KernelSpecError
    """

    kind: Kind
    inner: int
    outer: int
    dtype: Dtype = "bfloat16"
    adapter_dtype: Dtype = "float32"
    rank_block: int = 16
    dropout: bool = False
    bias: bool = False
    weight_layout: Layout = "out_in"
    accumulate: bool = False
    sites: int = 1
    beside: tuple[int, ...] = ()
    extend: Extend = ""
    whole: bool = False
    gated: Gated = ""
    job_capacity: int = 64
    arch: int = 90
    tile: Tile | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownKernel(
                f"there is no kernel kind {self.kind!r}",
                nearest=nearest(str(self.kind), KINDS),
                help="`tlora-fx kernels list` lists them",
            )
        _need(self, "dtype", self.dtype in DTYPES, "one of " + ", ".join(DTYPES))
        _need(self, "adapter_dtype", self.adapter_dtype in DTYPES, "one of " + ", ".join(DTYPES))
        _need(self, "weight_layout", self.weight_layout in get_args(Layout), "out_in or in_out")
        _need(self, "extend", self.extend in get_args(Extend), "'', tail or copy")
        _need(self, "gated", self.gated in get_args(Gated), "'', silu or gelu_tanh")
        alone = not self.gated or (self.kind, self.sites) == ("shrink", 1)
        _need(
            self,
            "gated",
            alone and not (self.gated and self.extend == "copy"),
            "'', except for a shrink of one site whose x is not copied",
        )
        _need(self, "inner", self.inner >= 1, "at least 1")
        _need(self, "outer", self.outer >= 1, "at least 1")
        _need(self, "sites", 1 <= self.sites <= MAX_SITES, f"1 to {MAX_SITES}")
        widths = f"nothing, or {self.sites - 1} widths"
        fits = len(self.beside) in (0, self.sites - 1) and min(self.beside, default=1) >= 1
        _need(self, "beside", fits, widths)
        capacity, block = self.job_capacity, self.rank_block
        _need(self, "rank_block", _is_power(block) and block >= 16, "a power of two from 16 on")
        _need(self, "job_capacity", _is_power(capacity), "a power of two")

    @property
    def outers(self) -> tuple[int, ...]:
        """O of every site."""
        return (self.outer, *(self.beside or (self.outer,) * (self.sites - 1)))

    @property
    def cut(self) -> Tile:
        """The tile of a spec that has been settled, which is what emitters get."""
        assert self.tile is not None, "an emitter gets a settled spec: see source.settled"
        return self.tile

    def text(self) -> str:
        """The spec as Python, without what is as by default."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        usual = {field.name: field.default for field in fields(self)}
        shown = {name: value for name, value in given.items() if value != usual[name]}
        return f"KernelSpec({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _is_power(number: int) -> bool:
    return number >= 1 and number & (number - 1) == 0


def _need(spec: KernelSpec, field: str, holds: bool, expected: str) -> None:
    if not holds:
        raise KernelSpecError(
            f"kernel {spec.kind} cannot be generated with this value of {field}",
            expected=expected,
            found=repr(getattr(spec, field)),
        )
