"""Names that printer and parser of graph files share: of types, objects and functions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.utils._sympy.functions as sizes
from torch._subclasses.fake_tensor import FakeTensor

from tlora_fx.ir.graph import AdapterSite, LayerPlan, OpenSlots, TensorRef
from tlora_fx.ir.lora_sites import BranchNumbers

# Formats 1 and 2 were JSON.
FORMAT = 3
FUNCTIONS: dict[str, Any] = {
    **{name: getattr(sympy, name) for name in ("Add", "Mul", "Pow", "Rational")},
    **{
        name: getattr(sizes, name)
        for name in ("FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing",
                     "Max", "Min")
        if hasattr(sizes, name)
    },
}  # fmt: skip
#: Names of torch's constants: `torch.float32`.
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
OBJECTS: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (TensorRef, AdapterSite, LayerPlan, BranchNumbers, OpenSlots)
}
# Passes leave objects of their own on nodes.
PASSES = "tlora_fx.passes."
#: Roles that stand before a node's tags; `tags` where it has none of these.
ROLES = ("backbone", "adapter", "shared", "table", "loss")
ABSENT: Any = object()
SHORT = {
    "float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64",
    "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8",
}  # fmt: skip
LONG = {short: name for name, short in SHORT.items()}


def text_digest(text: str) -> str:
    """What the line `fingerprint` says of the text behind it."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def contiguous(shape: Sequence[Any]) -> list[Any]:
    """The strides of a tensor without gaps, of numbers or expressions."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (1 if size == 0 else size)
    return strides[::-1]


def owner_of(value: FakeTensor) -> Any:
    """Owner of a value's symbols: its mode's environment, or a mode without symbols itself."""
    return value.fake_mode.shape_env or value.fake_mode
