"""Fill a kernel's template: the text of a module for one spec.

A template reads like the kernel. `fill` turns it into the code of one spec, so a generated file
holds only the branches that its spec needs; `module` puts imports and constants above it. Functions
that kernels share stand in the device library alone.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from tlora_fx.codegen.spec import Dtype, KernelSpec

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_MARK = re.compile(r"\s*#(?P<kind>[?*]) (?P<what>[\w ]*\w)(?P<opens> \[)?$")
LIBRARY = "tlora_fx.codegen.device_library"
_DESCRIPTOR = ["from triton.tools.tensor_descriptor import TensorDescriptor"]
_NAME = re.compile(r"\$(?:(\w+)|\{(\w+)\})")

# What arguments of kernels are by their names, without the number of a site.
_SITE = re.compile(r"_\d+$")
_TABLES = ("segments", "slots", "ranks", "keys", "thresholds", "token_index")
_POINTERS = dict.fromkeys(_TABLES, "*i32") | {"flags": "*fp32", "scales": "*fp32", "bits": "*u8"}
_VALUES = (
    *("x", "dy", "y", "before", "dx", "s", "ds", "a", "b", "gate", "up"),
    *("a_packed", "b_packed", "weight", "bias", "extended"),
)
_SHARES = ("ds_parts", "da_parts", "db_parts")
_GRADIENTS = ("da", "db")


def module(
    spec: KernelSpec,
    *,
    constants: Mapping[str, object],
    body: str,
    functions: Sequence[str] = (),
    types: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A module's text: imports, constants, then the kernel and its launch.

    constants  become `NAME = tl.constexpr(value)`, the only globals that a kernel may read
    body       as `fill` returns it
    functions  names in the device library, which are imported
    types      of arguments whose names do not tell them, as Triton writes it (see `_signature`)
    """
    meta: dict[str, object] = {"num_warps": spec.cut.warps, "num_stages": spec.cut.stages}
    if overlaps(spec):
        functions = ["start_next", "await_previous", *functions]
    imports = ["import triton", "import triton.language as tl"]
    imports += _DESCRIPTOR if "TensorDescriptor" in body else []
    imports[:0] = ["import torch"] if "torch." in body else []
    if functions:
        imports += ["", f"from {LIBRARY} import (", *(f"    {n}," for n in sorted(functions)), ")"]
    lines = [f"{name} = tl.constexpr({value!r})" for name, value in constants.items()]
    if overlaps(spec):
        lines += ["# Triton's interpreter runs one kernel after the other."]
        lines += ["OVERLAP = tl.constexpr(not triton.knobs.runtime.interpret)"]
    if "COMPILED" in body:
        lines += ["# Triton's interpreter knows no assembly."]
        lines += ["COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)"]
    signature = _signature(spec, body, types).items()
    lines += ["", "SIGNATURE = {", *(f'    "{name}": "{kind}",' for name, kind in signature), "}"]
    lines += [f"META = {json.dumps(meta)}"]
    if overlaps(spec):
        lines += ["if OVERLAP:", '    META["launch_pdl"] = True']
    # Profilers show the function's name; `launch` starts what stands in `kernel`.
    body = body.strip("\n").replace("\ndef kernel(", f"\ndef {spec.kind}(")
    body = body.replace("\n\n\ndef launch(", f"\n\n\nkernel = {spec.kind}\n\n\ndef launch(")
    return "\n".join([*imports, "", *lines]) + f"\n\n\n{body}\n"


def _signature(spec: KernelSpec, body: str, types: Mapping[str, str]) -> dict[str, str]:
    """The type of each argument of a body's kernel, in order; what is no pointer is an int32."""
    known = _POINTERS | dict.fromkeys(_VALUES, f"*{short(spec.dtype)}")
    known |= dict.fromkeys(_SHARES, part_type(spec)) | dict(types)
    known |= dict.fromkeys(_GRADIENTS, f"*{short(spec.adapter_dtype)}")
    functions = (node for node in ast.parse(body).body if isinstance(node, ast.FunctionDef))
    arguments = [node.args.args for node in functions if node.name == "kernel"]
    names = [argument.arg for listed in arguments for argument in listed]
    return {name: known.get(_SITE.sub("", name), "i32") for name in names}


def part_type(spec: KernelSpec) -> str:
    """A pointer to sums that other kernels add up, as Triton writes it."""
    return "*fp64" if spec.dtype == "float64" else "*fp32"


def constants_of(spec: KernelSpec, names: str, **own: object) -> dict[str, object]:
    """The constants of these names, in this order.

    own   those that a spec and its tile do not tell
    """
    tile = spec.cut
    known = {
        "INNER": spec.inner,
        "OUTER": spec.outer,
        "RANK_BLOCK": spec.rank_block,
        "JOBS": spec.job_capacity,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "CHUNK": tile.chunk,
        "SLAB": tile.slab,
        **own,
    }
    return {name: known[name] for name in names.split()}


def of_sites(**values: Sequence[object]) -> dict[str, object]:
    """Constants that each site has for itself, with its number behind the name."""
    return {
        f"{name}_{number}": value
        for name, items in values.items()
        for number, value in enumerate(items)
    }


def common_values(spec: KernelSpec) -> dict[str, object]:
    """Values that templates of all kinds share, for `fill`."""
    wide = accumulator(spec.dtype)
    return {
        "dtype": spec.dtype,
        "adapter_dtype": spec.adapter_dtype,
        "wide": wide,
        "adapter_wide": accumulator(spec.adapter_dtype),
        "part": wide.removeprefix("tl."),
        "precision": precision(spec.dtype),
        "inner": spec.inner,
        "outer": spec.outer,
        "outers": either(spec.outers),
        "count": f"{spec.sites} sites" if spec.sites > 1 else "one site",
        "rank_block": spec.rank_block,
        "rows": spec.cut.rows,
        "chunk": spec.cut.chunk,
        "sites": spec.sites,
        "several": spec.sites > 1,
        "dropout": spec.dropout,
        "bias": spec.bias,
        "accumulate": spec.accumulate,
        "whole": spec.whole,
        "extend": spec.extend,
        "copy": spec.extend == "copy",
        "gated": spec.gated,
        "overlap": overlaps(spec),
    }


def written(spec: KernelSpec) -> dict[str, object]:
    """Words of docstrings about gradients that leave whole."""
    if spec.accumulate:
        return {"fills": "Add to da and db", "written": "added to"}
    return {"fills": "Fill da and db", "written": "written whole"}


def either(numbers: Sequence[int]) -> str:
    """A size at each site, as text for a docstring: one number where all sites are equal."""
    return " or ".join(str(number) for number in dict.fromkeys(numbers))


def overlaps(spec: KernelSpec) -> bool:
    """Whether a kernel may start before the one ahead of it is done: from Hopper on."""
    return spec.arch >= 90


def fill(text: str, values: Mapping[str, object]) -> str:
    """The code of one spec out of a template.

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
    index = 0
    while index < len(lines):
        line, index = lines[index], index + 1
        if not (mark := _MARK.search(line)):
            yield line
            continue
        inner = [line[: mark.start()]]
        if mark["opens"]:
            close = _closing(lines, index)
            inner, index = list(lines[index:close]), close + 1
        if mark["kind"] == "?":
            holds = all(_true(term, values) for term in mark["what"].split(" and "))
            yield from _chosen(inner, values) if holds else ()
            continue
        for number in range(int(str(values[mark["what"]]))):
            numbered = [re.sub(r"\$(k\b|\{k\})", str(number), line) for line in inner]
            yield from _chosen(numbered, values)


def _closing(lines: Sequence[str], start: int) -> int:
    depth = 1
    for index in range(start, len(lines)):
        mark = _MARK.search(lines[index])
        depth += bool(mark and mark["opens"]) - (lines[index].strip() == "#]")
        if depth == 0:
            return index
    raise AssertionError("a block of a template has no #]")


def _true(term: str, values: Mapping[str, object]) -> bool:
    name = term.removeprefix("not ")
    return bool(values[name]) != (name != term)


def _named(line: str, values: Mapping[str, object]) -> str:
    return _NAME.sub(lambda name: str(values[name[1] or name[2]]), line)


def mask_word(width: int, columns: int) -> int:
    """Bits of the words in which a mask is read: int32 where rows and tiles have whole ones."""
    return 32 if width % 32 == 0 and columns % 32 == 0 else 8


def short(dtype: Dtype) -> str:
    """bf16, fp16, fp32 or fp64: what file names and Triton's signatures say."""
    return _SHORT[dtype]


def accumulator(dtype: Dtype) -> str:
    """The type in which products of this type are summed, as Triton writes it."""
    return "tl.float64" if dtype == "float64" else "tl.float32"


def precision(dtype: Dtype) -> str:
    """Arguments of a `tl.dot` of this type behind its operands: fp32 must not become tf32."""
    exact = {"float32": ', input_precision="ieee"', "float64": ", out_dtype=tl.float64"}
    return exact.get(dtype, "")


def size(dtype: Dtype) -> int:
    """Bytes of an element."""
    return {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[dtype]
