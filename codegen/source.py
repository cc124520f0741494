"""From a spec to the text of its module: the emitter's source below a header.

An emitter writes its kernel as text that reads like the kernel. `fill` turns that text into the
code of one spec, so a generated file holds only the branches that its spec needs.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from tlora_fx.codegen.emit import emitter
from tlora_fx.codegen.header import header
from tlora_fx.codegen.spec import Dtype, KernelSpec

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_MARK = re.compile(r"\s*#(?P<kind>[?*]) (?P<what>[\w ]*\w)(?P<opens> \[)?$")
_DESCRIPTOR = ["from triton.tools.tensor_descriptor import TensorDescriptor"]
_NAME = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


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
    parts = [spec.kind, f"{spec.inner}x{spec.outer}", short(spec.dtype)]
    parts += [f"a{short(spec.adapter_dtype)}"] if spec.adapter_dtype != "float32" else []
    parts += [f"r{spec.rank_block}"]
    parts += ["drop"] if spec.dropout else []
    parts += ["bias"] if spec.bias else []
    parts += ["conv1d"] if spec.weight_layout == "in_out" else []
    parts += ["add"] if spec.accumulate else []
    parts += [f"x{spec.sites}"] if spec.sites > 1 else []
    parts += [spec.extend] if spec.extend else []
    parts += [f"j{spec.job_capacity}"] if spec.job_capacity != 64 else []
    return "_".join([*parts, f"sm{spec.arch}"])


def module(
    spec: KernelSpec,
    *,
    constants: Mapping[str, object],
    signature: Mapping[str, str],
    body: str,
    pieces: Sequence[str] = (),
) -> str:
    """A module's text: imports, constants, named pieces, then the kernel and its launch.

    constants  become `NAME = tl.constexpr(value)`, the only globals that a kernel may read
    signature  type of each argument of the kernel, in order, as Triton writes it
    body       as `fill` returns it
    pieces     names in codegen/pieces; pieces that these use come along
    """
    meta: dict[str, object] = {"num_warps": spec.cut.warps, "num_stages": spec.cut.stages}
    if overlaps(spec):
        pieces = ["start_next", "await_previous", *pieces]
        constants = {**constants, "OVERLAP": True}
        meta["launch_pdl"] = True
    imports = ["import triton", "import triton.language as tl"]
    imports += _DESCRIPTOR if "TensorDescriptor" in body else []
    imports[:0] = ["import torch"] if "torch." in body else []
    lines = [f"{name} = tl.constexpr({value!r})" for name, value in constants.items()]
    lines += ["", "SIGNATURE = {", *(f'    "{a}": "{kind}",' for a, kind in signature.items()), "}"]
    lines += [f"META = {json.dumps(meta).replace('true', 'True')}"]
    # Profilers show the function's name; `launch` starts what stands in `kernel`.
    body = body.strip("\n").replace("\ndef kernel(", f"\ndef {spec.kind}(")
    body = body.replace("\n\n\ndef launch(", f"\n\n\nkernel = {spec.kind}\n\n\ndef launch(")
    parts = [*(piece(name) for name in _with_used(pieces)), body]
    return "\n".join([*imports, "", *lines]) + "\n\n\n" + "\n\n\n".join(parts) + "\n"


def overlaps(spec: KernelSpec) -> bool:
    """Whether a kernel may start before the one ahead of it is done: from Hopper on."""
    return spec.arch >= 90


@cache
def piece(name: str) -> str:
    """The text of the function `name` in codegen/pieces/<name>.py, decorators included."""
    text = (files("tlora_fx.codegen.pieces") / f"{name}.py").read_text("utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min(node.lineno, *(mark.lineno for mark in node.decorator_list))
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise AssertionError(f"codegen/pieces/{name}.py holds no function {name}")


def _with_used(names: Iterable[str]) -> list[str]:
    """Pieces with those that they call, each once, callees first."""
    ordered: dict[str, None] = {}
    for name in names:
        ordered.update(dict.fromkeys([*_with_used(sorted(_called(name))), name]))
    return list(ordered)


@cache
def _called(name: str) -> frozenset[str]:
    folder = files("tlora_fx.codegen.pieces")
    calls = (node for node in ast.walk(ast.parse(piece(name))) if isinstance(node, ast.Call))
    called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    return frozenset(other for other in called - {name} if (folder / f"{other}.py").is_file())


def fill(text: str, values: Mapping[str, object]) -> str:
    """The code of one spec out of an emitter's text.

    $name  ${name}        the value of that name
    line  #? dropout      stays where the value is true; also `not dropout`, `dropout and bias`
    line  #* sites        repeated for k = 0, 1, ... below the value, with that number for `$k`
    #? dropout [          a line of its own: opens a block of lines that stay, up to the line `#]`
    #* sites [            the same for lines that are repeated together
    """
    lines = _chosen(text.strip("\n").split("\n"), values)
    return "\n".join(_named(line, values) for line in lines) + "\n"


def _chosen(lines: Sequence[str], values: Mapping[str, object]) -> Iterator[str]:
    """The lines that stay, repeated as their marks say; marks are gone."""
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        if not (mark := _MARK.search(line)):
            yield line
            continue
        inner = [line[: mark.start()]]
        if mark["opens"]:
            close = _closing(lines, at)
            inner, at = list(lines[at:close]), close + 1
        if mark["kind"] == "?":
            holds = all(_true(term, values) for term in mark["what"].split(" and "))
            yield from _chosen(inner, values) if holds else ()
            continue
        for number in range(int(str(values[mark["what"]]))):
            numbered = [re.sub(r"\$(k\b|\{k\})", str(number), line) for line in inner]
            yield from _chosen(numbered, values)


def _closing(lines: Sequence[str], start: int) -> int:
    depth = 1
    for at in range(start, len(lines)):
        mark = _MARK.search(lines[at])
        depth += bool(mark and mark["opens"]) - (lines[at].strip() == "#]")
        if depth == 0:
            return at
    raise AssertionError("a block of an emitter's text has no #]")


def _true(term: str, values: Mapping[str, object]) -> bool:
    name = term.removeprefix("not ")
    return bool(values[name]) != (name != term)


def _named(line: str, values: Mapping[str, object]) -> str:
    return _NAME.sub(lambda found: str(values[found[1] or found[2]]), line)


def short(dtype: Dtype) -> str:
    """bf16, fp16, fp32 or fp64: what file names and Triton's signatures say."""
    return _SHORT[dtype]


def accumulator(dtype: Dtype) -> str:
    """The type in which products of this type are summed, as Triton writes it."""
    return "tl.float64" if dtype == "float64" else "tl.float32"


def precision(dtype: Dtype) -> str:
    """What a `tl.dot` of this type needs after its operands: fp32 must not become tf32."""
    exact = {"float32": ', input_precision="ieee"', "float64": ", out_dtype=tl.float64"}
    return exact.get(dtype, "")


def size(dtype: Dtype) -> int:
    """Bytes of an element."""
    return {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[dtype]
