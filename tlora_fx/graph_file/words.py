"""Words that printer and parser of graph files share: names of objects, texts, keywords, calls."""

from __future__ import annotations

import ast
import hashlib
from keyword import iskeyword
from typing import Any

import torch

from tlora_fx.errors import GraphFileNotReadable
from tlora_fx.ir.graph import AdapterSite, LayerPlan, OpenSlots, TensorRef
from tlora_fx.ir.lora_sites import BranchNumbers

# Formats 1 and 2 were JSON.
FORMAT = 3
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


def text_digest(text: str) -> str:
    """Digest of a text, as the line `fingerprint` before it has it."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def quoted(text: str) -> str:
    """A text in double quotes where nothing in it needs an escape, on one line in any case."""
    plain = text.isascii() and text.isprintable() and not {'"', "\\"}.intersection(text)
    return f'"{text}"' if plain else ascii(text)


def keyword(name: str, text: str) -> str:
    """A keyword argument, of any name."""
    return (
        f"{name}={text}"
        if name.isidentifier() and not iskeyword(name)
        else (f"**{{{quoted(name)}: {text}}}")
    )


def keywords(facts: dict[str, Any]) -> str:
    """Keyword arguments behind others, of what is not None."""
    return "".join(f", {keyword(k, str(v))}" for k, v in facts.items() if v is not None)


def strange(item: ast.AST) -> GraphFileNotReadable:
    """Error for what no graph file says."""
    return GraphFileNotReadable(
        "a line of the graph file says what no graph file says",
        found=ast.unparse(item)[:200],
        help="docs/graph-files.md has the grammar; else the file is damaged",
    )


def called(call: ast.Call) -> str:
    """Name of the operator that a node calls: "aten.linear.default"."""
    parts: list[str] = []
    item: ast.expr = call.func
    while isinstance(item, ast.Attribute):
        parts.append(item.attr)
        item = item.value
    if not isinstance(item, ast.Name):
        raise strange(call)
    return ".".join([item.id, *reversed(parts)])
