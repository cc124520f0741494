"""Dropouts that are not yet keyed to their jobs draw the masks that key-dropouts gives them.

So every state drops the same elements, and a pass that gives a dropout another rate, site or job
is found like one that changes any other number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tlora_fx.ir.graph import Form, is_call
from tlora_fx.ir.shapes import FIRST_SEGMENT_SIZE
from tlora_fx.model.batch import PackedBatch
from tlora_fx.numerics.reading import Place, Reader
from tlora_fx.ops import site_id

ATTENTION = torch.ops.tlora_fx.packed_attention.default
ATTENTION_SITE, ATTENTION_RATE = 8, 14


def is_dropout(node: fx.Node) -> bool:
    """Whether a node drops by torch's own generator."""
    return is_call(node, torch.ops.aten.dropout.default)


class Dropouts:
    """Runs dropouts of the graphs of one row.

    row      the row that the graphs run on
    names    its jobs
    """

    def __init__(self, row: PackedBatch, names: list[str], form: Form, reader: Reader) -> None:
        self.row, self.names, self.form, self.reader = row, names, form, reader
        self._numbers: dict[fx.Graph, dict[fx.Node, int]] = {}

    def drop(self, node: fx.Node, args: tuple[Any, ...], place: Place) -> Tensor:
        """What an aten.dropout node gives."""
        x: Tensor = args[0]
        rate = self.reader.rate(node, float(args[1]), place)
        dims = self._token_dims(node)
        if rate == 0.0 or not args[2] or dims is None:
            return x
        jobs: list[str] = list(node.meta.get("jobs") or ())
        alone = node.meta.get("role") == "adapter" and len(self.names) > 1
        segments, keys, index = self._tables(self.names.index(jobs[0]) if alone else None)
        rates = torch.full((len(keys),), rate, dtype=torch.float64)
        site = torch.tensor(self._site(node, place), dtype=torch.int64)
        dropped: Tensor = torch.ops.tlora_fx.keyed_dropout(
            x, rates, segments, keys, index, site, dims
        )
        return dropped

    def with_site(self, node: fx.Node, args: tuple[Any, ...], place: Place) -> tuple[Any, ...]:
        """The arguments of an attention with dropout, its site among them."""
        if (
            len(args) <= ATTENTION_RATE
            or not args[ATTENTION_RATE]
            or args[ATTENTION_SITE] is not None
        ):
            return args
        site = torch.tensor(self._site(node, place), dtype=torch.int64)
        return (*args[:ATTENTION_SITE], site, *args[ATTENTION_SITE + 1 :])

    def _tables(self, job: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Segments, keys and token indices of the row, or of one job's segment of it."""
        row = self.row
        if job is None:
            return row.segments, row.keys, row.token_index
        start, stop = row.segments[job : job + 2].tolist()
        dim = 1 if self.form == "packed" else 0
        own = torch.tensor([0, stop - start], dtype=torch.int32)
        return own, row.keys[job : job + 1], row.token_index.narrow(dim, start, stop - start)

    def _token_dims(self, node: fx.Node) -> int | None:
        """How many leading dimensions enumerate tokens; None where no token owns the values."""
        shape = node.meta["val"].shape
        if self.form == "batch":
            return 2 if len(shape) > 1 else None
        held = (d for d, size in enumerate(shape) if _is_row(size))
        return next((d + 1 for d in held), None)

    def _site(self, node: fx.Node, place: Place) -> int:
        if place.graph not in self._numbers:
            self._numbers[place.graph] = _number_all(place.graph)
        number = self._numbers[place.graph].get(node, 0)
        path = place.path(str(node.meta.get("path", "")).removesuffix(".default"))
        return site_id(path + (f"#{number}" if number else ""))


def _is_row(size: Any) -> bool:
    return not isinstance(size, int) or size >= FIRST_SEGMENT_SIZE


def _number_all(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many dropouts of the same module and job come before each, as key-dropouts counts."""
    taken: dict[str, int] = {}
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        drops = (is_dropout(node) and node.args[1] and node.args[2]) or (
            is_call(node, ATTENTION) and node.args[ATTENTION_RATE]
        )
        if drops:
            job = node.meta.get("jobs") if node.meta.get("role") == "adapter" else ""
            key = f"{node.meta.get('path')} {job}"
            taken[key] = taken.get(key, -1) + 1
            found[node] = taken[key]
    return found
