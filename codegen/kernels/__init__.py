"""From a spec to the text of its kernel: one emitter a kind, one file a family of kernels.

`codegen/kernels/<kind>.py` is the emitter of a kind; `gemm.py` holds two, `sums.py` three. The
first line of an emitter's docstring says what the kernel does. `source` fills a template with
`codegen.template`; see pack.py.

A generated module has

    SIGNATURE   {argument of the kernel: Triton's type}, such as "*bf16", "i32",
                "tensordesc<bf16[128, 64]>", for compiling without a GPU, in the kernel's order
    META        {"num_warps": 8, "num_stages": 3}, given to every launch
    kernel      the @triton.jit function
    launch      the Python function that computes the grid and starts the kernel

Integers that change from step to step are named in the kernel's `do_not_specialize`; all others,
and all pointers, count as divisible by 16 when a kernel is compiled without a GPU. At the top of a
generated file stand its spec, its costs and the command that prints it again.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Protocol, cast

from tlora_fx.codegen.spec import KernelSpec, Kind, Tile
from tlora_fx.codegen.template import short

#: Goes up when generated text changes its meaning for a spec.
GENERATOR = "1"

#: The files that hold several kinds.
_FAMILIES: dict[Kind, str] = {
    "forward": "gemm",
    "input_gradient": "gemm",
    "sum_ds": "sums",
    "sum_s": "sums",
    "sum_gradients": "sums",
}
_SUM = re.compile(r"^# sha256 of what follows: (?P<digest>[0-9a-f]{64})\n", re.MULTILINE)


class Emitter(Protocol):
    """What writes the kernels of one kind: a module, or an object in the module of a family."""

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
    module = import_module(f"{__name__}.{_FAMILIES.get(kind, kind)}")
    return cast(Emitter, getattr(module, kind) if kind in _FAMILIES else module)


@dataclass(frozen=True, slots=True)
class Generated:
    """A kernel's module: its spec with the tile filled in, its file name, its text."""

    spec: KernelSpec
    name: str
    text: str


def build(spec: KernelSpec) -> Generated:
    """Generate the module of a spec; raises KernelSpecError where its kind cannot do it."""
    spec = settled(spec)
    # Blocks that are left out leave their blank lines behind.
    body = re.sub(r"\n{4,}", "\n\n\n", emitter(spec.kind).source(spec).strip("\n")) + "\n"
    digest = hashlib.sha256(f"{spec.text()}\n{body}".encode()).hexdigest()
    name = f"{stem(spec)}_{digest[:8]}"
    return Generated(spec, name, f"{header(spec, body)}\n{body}")


def settled(spec: KernelSpec) -> KernelSpec:
    """The spec with the tile that its kind's rule gives, where it has none of its own."""
    if spec.tile is not None:
        return spec
    return replace(spec, tile=emitter(spec.kind).default_tile(spec))


def stem(spec: KernelSpec) -> str:
    """The readable part of a kernel's file name."""
    outers = "_".join(map(str, (spec.outer, *spec.beside)))
    parts = [spec.kind, f"{spec.inner}x{outers}", short(spec.dtype)]
    parts += [f"a{short(spec.adapter_dtype)}"] if spec.adapter_dtype != "float32" else []
    parts += [f"r{spec.rank_block}"]
    parts += ["drop"] if spec.dropout else []
    parts += ["bias"] if spec.bias else []
    parts += ["conv1d"] if spec.weight_layout == "in_out" else []
    parts += ["add"] if spec.accumulate else []
    parts += [f"x{spec.sites}"] if spec.sites > 1 else []
    parts += [spec.extend] if spec.extend else []
    parts += ["whole"] if spec.whole else []
    parts += [spec.gated] if spec.gated else []
    parts += [f"j{spec.job_capacity}"] if spec.job_capacity != 64 else []
    return "_".join([*parts, f"sm{spec.arch}"])


def header(spec: KernelSpec, body: str) -> str:
    """The comment block of a settled spec's module whose text after it is `body`."""
    kind = emitter(spec.kind)
    rows = {
        "spec": spec.text(),
        "generator": GENERATOR,
        "FLOP": kind.flops(spec),
        "bytes": kind.bytes_moved(spec),
        "again": command(spec),
    }
    lines = [f"{spec.kind}: {first_line(kind.__doc__)}", "", "Generated by tlora-fx; do not edit."]
    for name, text in rows.items():
        lines += textwrap.wrap(
            text,
            98,
            initial_indent=f"{name:<10} ",
            subsequent_indent=" " * 11,
            break_long_words=False,
            break_on_hyphens=False,
        )
    comment = "\n".join(f"# {line}".rstrip() for line in lines)
    return f"{comment}\n#\n# sha256 of what follows: {_digest(body)}\n"


def intact(text: str) -> bool:
    """Whether a file's text is what the generator once wrote, of whichever version."""
    stated = _SUM.search(text)
    return stated is not None and stated["digest"] == _digest(text[stated.end() :].lstrip("\n"))


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def first_line(doc: str | None) -> str:
    """What a kind does, in one line, from its emitter's docstring."""
    return (doc or "").strip().partition("\n")[0]


#: Options of `tlora-fx kernels show` that are not called as the field of the spec that they set.
_OPTIONS = {"inner": "--in", "outer": "--out"}


def command(spec: KernelSpec) -> str:
    """The command that prints this kernel."""
    words = ["tlora-fx kernels show", spec.kind]
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name == "kind" or value == field.default:
            continue
        words.append(_OPTIONS.get(field.name, f"--{field.name.replace('_', '-')}"))
        if field.name == "tile":
            words.append(",".join(str(getattr(value, part.name)) for part in fields(value)))
        elif field.name == "beside":
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(str(value))
    return " ".join(words)
