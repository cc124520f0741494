"""Compile generated kernels for architectures that need not be there, and look for faults.

    python scripts/check_kernels.py kinds forward --arch 90
    python scripts/check_kernels.py one forward --in 4096 --out 14336 --dtype bf16

Triton compiles without a GPU, and its wheel brings NVIDIA's disassembler. So registers, spills,
shared memory and the instructions that matter are known before a kernel ever runs. `few`, `forms`
and `everything` are the specs that stand for all: what CI compiles for every architecture.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from tlora_fx.cli.arguments.options import command_group, takes_options
from tlora_fx.cli.kernels import KernelOptions, require_architecture
from tlora_fx.codegen.kernels import stem
from tlora_fx.codegen.loading import GeneratedModule, load
from tlora_fx.codegen.spec import KINDS, SHARED_BYTES, KernelSpec, Kind
from tlora_fx.errors import KernelToolMissing, TloraError, UnknownKernel, nearest

CHECKED_ARCHITECTURES = (80, 90, 100)
MAX_REGISTERS = 255
TENSOR_MEMORY_COLUMNS = 512

_MULTIPLYING = {
    "shrink",
    "forward",
    "input_gradient",
    "lora_b_backward",
    "lora_a_backward",
    "expand",
}
_BULK_LOADING = {"forward", "input_gradient"}
_WORD = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_TENSOR_CORE = re.compile(r"(HMMA|HGMMA|QGMMA|IMMA|IGMMA|DMMA|OMMA|UTC\w*MMA)\b")

#: Shapes of the linears of a Llama-3-8B layer: square, widening, narrowing, keys and values.
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024))

_JOINED: dict[str, object] = {"sites": 3, "beside": (1024, 1024)}
#: By kind, what else a spec may be besides plain: each entry is one spec.
_FORMS: dict[Kind, tuple[dict[str, object], ...]] = {
    "pack": ({"extend": "tail"}, {"rank_block": 64}, {"extend": "tail", **_JOINED}),
    "shrink": (
        {"dropout": True},
        {"rank_block": 64},
        {"sites": 3, "dropout": True},
        {"gated": "silu", "extend": "tail"},
        {"gated": "gelu_tanh", "extend": "tail", "dropout": True},
    ),
    "forward": ({"bias": True}, {"rank_block": 64}, {"weight_layout": "in_out"}),
    "input_gradient": (
        {"dropout": True},
        {"dropout": True, "rank_block": 64},
        {"weight_layout": "in_out"},
        {"dropout": True, "accumulate": True},
    ),
    "lora_b_backward": (
        {"rank_block": 64},
        {"extend": "copy"},
        _JOINED,
        {"accumulate": True, **_JOINED},
        {"accumulate": True, "rank_block": 64, **_JOINED},
    ),
    "sum_ds": ({"rank_block": 64}, {"extend": "tail"}, {"extend": "tail", **_JOINED}),
    "sum_s": ({"rank_block": 64}, {"extend": "tail"}, {"extend": "tail", **_JOINED}),
    "lora_a_backward": (
        {"dropout": True},
        {"rank_block": 64},
        {"sites": 3, "dropout": True},
        {"whole": True, **_JOINED},
        {"whole": True, "accumulate": True, **_JOINED},
    ),
    "sum_gradients": (
        {"rank_block": 64},
        {"adapter_dtype": "bfloat16"},
        {"accumulate": True},
        _JOINED,
    ),
    "expand": (
        {"dropout": True, "accumulate": True},
        {"rank_block": 64},
        {"bias": True},
        {"sites": 3, "dropout": True},
        {"sites": 4, "dropout": True, "accumulate": True, "rank_block": 64},
    ),
}


class KernelNotCompilable(Exception):
    """Triton does not compile a generated kernel for an architecture; another tile may do."""


def forms(kind: Kind) -> Iterator[KernelSpec]:
    """The plain spec of a kind for a widening linear, then its other forms."""
    plain = KernelSpec(kind, 4096, 14336)
    yield plain
    for form in _FORMS[kind]:
        yield replace(plain, **form)  # type: ignore[arg-type]


def everything(kind: Kind) -> Iterator[KernelSpec]:
    """All forms of a kind for all shapes, in bf16 and fp16."""
    for spec in forms(kind):
        for inner, outer in SHAPES:
            for dtype in ("bfloat16", "float16"):
                yield replace(spec, inner=inner, outer=outer, dtype=dtype)


def few() -> Iterator[KernelSpec]:
    """Two specs a kind: the plain one and the first other form."""
    for kind in KINDS:
        plain, form, *_ = forms(kind)
        yield plain
        yield form


def specs_of(extent: str) -> list[KernelSpec]:
    """`few`, all `forms`, or `everything`, of all kinds."""
    if extent == "few":
        return list(few())
    each = forms if extent == "forms" else everything
    return [spec for kind in KINDS for spec in each(kind)]


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel needs.

    registers      of a thread
    stack_bytes    of a thread
    shared_bytes   of a program
    tensor_memory  columns of a program, where the architecture has such memory
    instructions   by opcode with its modifiers, such as {"LDG.E.128": 4}, as they stand in the code
    """

    arch: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: dict[str, int]
    tensor_memory: int = 0

    def count(self, pattern: str) -> int:
        """How many instructions have an opcode that begins like the regular expression."""
        begins = re.compile(pattern)
        return sum(n for opcode, n in self.instructions.items() if begins.match(opcode))

    @property
    def total(self) -> int:
        """All instructions."""
        return sum(self.instructions.values())

    @property
    def spills(self) -> int:
        """Loads from and stores to local memory."""
        return self.count(r"(LDL|STL)\b")

    @property
    def tensor_core(self) -> int:
        """Matrix instructions."""
        return self.count(_TENSOR_CORE.pattern)

    @property
    def bulk_loads(self) -> int:
        """Copies of whole tiles into shared memory by the tensor memory accelerator."""
        return self.count(r"UTMALDG\b")

    @property
    def wide_loads(self) -> int:
        """Loads of 16 bytes a thread from device memory, into registers or shared memory."""
        return self.count(r"(LDG|LDGSTS)\b.*\.128\b")


def resources(
    spec: KernelSpec, arch: int | None = None, *, tokens_divisible: bool = True
) -> Resources:
    """Compile the kernel of a spec and say what it needs.

    arch               instead of the spec's
    tokens_divisible   integers that the kernel specialises on count as multiples of 16

    raises   KernelNotCompilable, KernelToolMissing, and what `load` raises
    """
    if arch is not None:
        spec = replace(spec, arch=arch)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise KernelToolMissing(
            "Triton interprets kernels in this process, so it cannot compile them",
            help="unset TRITON_INTERPRET",
        )
    return needs_of(_compiled(spec, load(spec), tokens_divisible), spec.arch)


def needs_of(compiled: Any, arch: int) -> Resources:
    """What a kernel needs that Triton compiled for an architecture; raises KernelToolMissing."""
    listing = _disassembled(compiled.asm["cubin"])
    usage = _USAGE.search(listing)
    assert usage is not None, "the disassembler gives the resources of a kernel"
    return Resources(
        arch=arch,
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        shared_bytes=int(compiled.metadata.shared),
        instructions=dict(Counter(_WORD.findall(listing))),
        # Where it does not suffice, Triton compiles the kernel to a trap and says nothing.
        tensor_memory=int(getattr(compiled.metadata, "tmem_size", 0) or 0),
    )


def faults(spec: KernelSpec, needs: Resources) -> list[str]:
    """What is wrong with a compiled kernel, each as a line; empty where nothing is."""
    limit = SHARED_BYTES.get(needs.arch, 99 << 10)
    half = spec.dtype in ("bfloat16", "float16")
    bulk = spec.kind in _BULK_LOADING and needs.arch >= 90
    checks = {
        f"{needs.registers} registers of at most {MAX_REGISTERS}": (
            needs.registers > MAX_REGISTERS
        ),
        f"{needs.spills} loads and stores of spilled registers": needs.spills > 0,
        f"{needs.shared_bytes} bytes of shared memory of at most {limit}": (
            needs.shared_bytes > limit
        ),
        f"{needs.tensor_memory} columns of tensor memory of at most {TENSOR_MEMORY_COLUMNS}": (
            needs.tensor_memory > TENSOR_MEMORY_COLUMNS
        ),
        "no tensor-core instructions": (
            spec.kind in _MULTIPLYING and half and not needs.tensor_core
        ),
        "no bulk loads (UTMALDG)": bulk and not needs.bulk_loads,
        "it lets the next kernel start and does not wait for the one before": (
            needs.count("PREEXIT") > 0 and not needs.count("ACQBULK")
        ),
    }
    return [fault for fault, wrong in checks.items() if wrong]


def _compiled(spec: KernelSpec, module: GeneratedModule, tokens_divisible: bool) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    kernel = getattr(module.kernel, "function", module.kernel)
    source = ASTSource(kernel, module.SIGNATURE, {}, _aligned(module, tokens_divisible))
    try:
        target = GPUTarget("cuda", spec.arch, 32)
        return triton.compile(source, target=target, options=dict(module.META))
    except (TritonError, RuntimeError) as error:
        raise KernelNotCompilable(
            f"Triton {triton.__version__} does not compile a {spec.kind} kernel for "
            f"sm_{spec.arch}\n{module.__file__}\n{spec.text()}\n" + "\n".join(_messages(error))
        ) from error


def _messages(error: BaseException | None) -> Iterator[str]:
    """An error and what led to it: Triton says where first, and why in the cause."""
    while error is not None:
        yield str(error)
        error = error.__cause__


def _aligned(module: GeneratedModule, tokens_divisible: bool) -> dict[tuple[int], list[list[Any]]]:
    """Which arguments are multiples of 16: pointers, and integers that are specialised on."""
    aligned: dict[tuple[int], list[list[Any]]] = {}
    kinds = module.SIGNATURE.values()
    for number, (kind, parameter) in enumerate(zip(kinds, module.kernel.params, strict=True)):
        known = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if known and (kind.startswith("*") or (kind.startswith("i") and tokens_divisible)):
            aligned[number,] = [["tt.divisibility", 16]]
    return aligned


def _disassembled(cubin: bytes) -> str:
    """Resource usage and instructions of a compiled kernel, as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = _disassembler()
        done = subprocess.run(
            [tool, "-sass", "-res-usage", str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise KernelToolMissing(
            "Triton's disassembler cannot read a compiled kernel",
            tool=tool,
            found=done.stderr.strip() or f"exit status {done.returncode}",
        )
    return done.stdout


def _disassembler() -> str:
    import triton

    # Where Triton's wheel keeps the tool; TRITON_CUOBJDUMP_PATH, as Triton has it, goes first.
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = os.environ.get("TRITON_CUOBJDUMP_PATH", str(own))
    if not Path(tool).is_file():
        raise KernelToolMissing(
            "the disassembler that reads compiled kernels is missing",
            expected=tool,
            help="Triton's wheels for Linux bring cuobjdump; or set TRITON_CUOBJDUMP_PATH",
        )
    return tool


app = command_group("Compile generated kernels without a GPU and look for faults.")
Architectures = Annotated[list[int] | None, typer.Option(help="80, 90 and 100 where none.")]


@app.command()
def kinds(
    names: Annotated[list[str] | None, typer.Argument(help="Kinds; all where none.")] = None,
    arch: Architectures = None,
    extent: Annotated[
        Literal["few", "forms", "everything"],
        typer.Option("--extent", help="Two specs a kind, all forms, or all forms and shapes."),
    ] = "forms",
) -> None:
    """Compile specs that stand for all of a kind; exits with 1 where a kernel has a fault."""
    if wrong := [name for name in names or () if name not in KINDS]:
        raise UnknownKernel(
            f"there is no kernel kind {wrong[0]!r}",
            nearest=nearest(wrong[0], KINDS),
            help="`tlora-fx kernels list` lists them",
        )
    _check([spec for spec in specs_of(extent) if not names or spec.kind in names], arch)


@app.command()
@takes_options
def one(kernel: KernelOptions) -> None:
    """Compile one kernel for its --arch; exits with 1 where it has a fault."""
    _check([kernel.spec()], [kernel.arch])


def _check(specs: list[KernelSpec], architectures: list[int] | None) -> None:
    """Print a line for each spec and architecture."""
    for arch in architectures or ():
        require_architecture(arch)
    broken = 0
    console = Console()
    for spec in specs:
        for arch in architectures or CHECKED_ARCHITECTURES:
            line, good = _checked(spec, arch)
            broken += not good
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(f"{len(specs)} specs, {broken} faults", highlight=False)
    if broken:
        raise typer.Exit(1)


def _checked(spec: KernelSpec, arch: int) -> tuple[str, bool]:
    name = stem(spec).removesuffix(f"_sm{spec.arch}")
    head = f"{name:<48} sm_{arch:<4}"
    try:
        used = resources(spec, arch)
    except KernelToolMissing:
        raise
    except (TloraError, KernelNotCompilable) as error:
        return f"{head} {error}", False
    wrong = faults(spec, used)
    sizes = (
        f"{used.registers:>4} registers {used.shared_bytes:>7} shared {used.total:>6} instr. "
        f"{used.tensor_core:>4} tensor core {used.bulk_loads:>3} bulk {used.wide_loads:>3} 16-byte"
    )
    return f"{head}{sizes}  {'; '.join(wrong) or 'ok'}", not wrong


if __name__ == "__main__":
    try:
        app()
    except TloraError as error:
        sys.exit(str(error))
