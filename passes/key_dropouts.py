"""Give every dropout that is left the masks of the job that it serves.

Reads   aten.dropout nodes of the base and of branches that run as they are, and attention with
        dropout.
Writes  keyed_dropout and, on attention, a site; get_attr nodes of rates and sites.
Keeps   which element a job drops: it depends on the job's seed, step, site, token and column only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.errors import BaseRefused
from tlora_fx.ir.graph import GroupGraph, TensorRef, is_call, placeholders
from tlora_fx.ir.shapes import segment_size
from tlora_fx.passes.token_parallel.walk import is_random
from tlora_fx.pipeline import GroupPass, Numerics, register
from tlora_fx.rewriting import Maker, Rewriter

aten = torch.ops.aten
ops = torch.ops.tlora_fx
ATTENTION_SITE, ATTENTION_RATE = 8, 14


@register
@dataclass(frozen=True, slots=True)
class KeyDropouts(GroupPass):
    """Replace dropout by dropout keyed to its job."""

    name: ClassVar[str] = "key-dropouts"
    requires: ClassVar[frozenset[str]] = frozenset({"lower-adapters"})
    preserves_numerics: ClassVar[Numerics] = "exact"

    def run(self, group: GroupGraph) -> None:
        for graph in group.graphs():
            taken: dict[str, int] = {}
            for node in list(graph.nodes):
                if is_call(node, aten.dropout.default) and node.args[1] and node.args[2]:
                    _Keyed(group, graph, node, taken).replace()
                elif is_call(node, ops.packed_attention.default) and node.args[ATTENTION_RATE]:
                    make = Rewriter(graph).at(node)
                    site = _Keyed(group, graph, node, taken).table(make, "site", (), torch.int64)
                    node.update_arg(ATTENTION_SITE, site)
                elif is_random(node):
                    raise BaseRefused(
                        "a job's own part of the model draws random numbers without keyed masks",
                        operator=node.target,
                        module=node.meta.get("path"),
                        source=node.meta.get("source"),
                        help="train no copy of this module",
                    )


def _number(node: fx.Node, taken: dict[str, int]) -> int:
    """How many dropouts of the same module and job came before this one."""
    key = f"{node.meta['path']} {node.meta['jobs'] if node.meta['role'] == 'adapter' else ''}"
    taken[key] = taken.get(key, -1) + 1
    return taken[key]


class _Keyed:
    """Writes what one keyed dropout needs."""

    def __init__(
        self, group: GroupGraph, graph: fx.Graph, node: fx.Node, taken: dict[str, int]
    ) -> None:
        self.group, self.graph, self.node = group, graph, node
        self.tables = placeholders(graph)
        self.number = _number(node, taken)
        self.path = node.meta["path"].removesuffix(".default")
        # Counted over the whole graph: no two dropouts share a table, whatever they are called.
        number = sum(taken.values()) + len(taken) - 1
        self.attribute = f"keyed.dropout_{number}_{re.sub('[^A-Za-z0-9]', '_', self.path)}"

    def replace(self) -> None:
        """Put keyed_dropout in place of dropout."""
        what = f"keyed_dropout at {self.node.meta['path']}"
        Rewriter(self.graph).replace(self.node, self._keyed, what)

    def _keyed(self, make: Maker) -> fx.Node:
        x: Any = self.node.args[0]
        names = self.group.job_names
        alone = self.node.meta.get("role") == "adapter"
        job = names.index(self.node.meta["jobs"][0]) if alone else 0
        jobs = 1 if alone else len(names)
        rate = float(self.node.args[1])  # type: ignore[arg-type]
        rates = self.table(make, "rates", (jobs,), torch.float64, rate=rate)
        site = self.table(make, "site", (), torch.int64)
        segments, keys, index = self._tables_of(make, job) if alone else self._tables()
        dims = self._token_dims(x)
        return make(ops.keyed_dropout.default, x, rates, segments, keys, index, site, dims)

    def table(
        self, make: Maker, name: str, shape: tuple[int, ...], dtype: torch.dtype, **meta: Any
    ) -> fx.Node:
        """A table of this dropout, stored beside the module that it belongs to."""
        ref = TensorRef("buffer", f"{self.attribute}.{name}", shape, dtype)
        location = {"site_path": self.path, "site_number": self.number}
        return make.tagged(role="table", jobs=()).tensor(ref, **location, **meta)

    def _tables(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        return self.tables["segments"], self.tables["keys"], self.tables["token_index"]

    def _tables_of(self, make: Maker, job: int) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The row's tables as the job's segment alone has them."""
        segments, keys, index = self._tables()
        dim = 1 if self.group.form == "packed" else 0
        call = make.tagged(role="table", path="", source="")
        bounds = call(aten.slice.Tensor, segments, 0, job, job + 2)
        start = call(aten.slice.Tensor, segments, 0, job, job + 1)
        return (
            call(aten.sub.Tensor, bounds, start),
            call(aten.slice.Tensor, keys, 0, job, job + 1),
            call(ops.segment_read.default, index, segments, job, dim),
        )

    def _token_dims(self, x: fx.Node) -> int:
        """How many leading dimensions enumerate tokens."""
        value = x.meta["val"]
        if self.group.form == "packed":
            own = {segment_size(job) for job in range(len(self.group.jobs))}
            return 1 + next(
                d for d, size in enumerate(value.shape) if not isinstance(size, int) or size in own
            )
        width = placeholders(self.group.root)["input_ids"].meta["val"].shape[1]
        if value.dim() < 2 or str(value.shape[1]) != str(width):
            raise BaseRefused(
                "the base drops values that no single token owns",
                module=self.node.meta["path"],
                source=self.node.meta.get("source"),
                help="set this dropout of the base's config to 0",
            )
        return 2
