"""Replace plain LoRA branches by one operator a site.

Reads   the segment writes that fuse-backbone chained behind each frozen linear.
Writes  one multi_lora_linear for the linear and all its plain branches; get_attr nodes of the
        site's AdapterBank.
Keeps   every number up to rounding; branches of other kinds (DoRA, embeddings, trained copies)
        stay as they are, and the report says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.errors import NotFoldable
from tlora_fx.graph import GroupGraph, TensorRef, placeholders
from tlora_fx.passes.lora_pattern import (
    WRITE,
    Frozen,
    LoraBranch,
    NoMatch,
    match_branch,
    match_frozen,
)
from tlora_fx.pipeline import GroupPass, register
from tlora_fx.shapes import fake_like, fake_mode_of

aten = torch.ops.aten
BANK = "lora"
BANK_TENSORS = ("a", "b", "ranks", "scales", "rates", "site")


@register
@dataclass(frozen=True, slots=True)
class LowerAdapters(GroupPass):
    """Replace LoRA branches by tlora_fx::multi_lora_linear."""

    name: ClassVar[str] = "lower-adapters"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})

    compute: str = "base"

    def run(self, group: GroupGraph) -> None:
        for where, graph in [("", group.root), *((b.name, b.graph) for b in group.blocks.values())]:
            for anchor, writes in _chains(graph).items():
                self._lower(group, graph, where, anchor, writes)
            _erase_dead(graph)

    def _lower(
        self, group: GroupGraph, graph: fx.Graph, where: str, anchor: fx.Node, writes: list[fx.Node]
    ) -> None:
        site = str(writes[0].meta["site"])
        try:
            frozen = match_frozen(anchor)
        except NoMatch as reason:
            for write in writes:
                self._keep(group, where, site, write, str(reason))
            return
        found: list[tuple[fx.Node, LoraBranch]] = []
        for write in writes:
            try:
                found.append((write, match_branch(write, anchor, frozen.x)))
            except NoMatch as reason:
                self._keep(group, where, site, write, str(reason))
        if found:
            self._replace(group, graph, anchor, frozen, site, found)

    def _keep(self, group: GroupGraph, where: str, site: str, write: fx.Node, reason: str) -> None:
        place = f"{where}.{site}" if where else site
        (job,) = write.meta["jobs"]
        if not group.exact and _is_plain(group, job, where, site):
            raise NotFoldable(
                "a plain LoRA branch cannot be lowered",
                site=place,
                job=job,
                found=reason,
            )
        write.meta["as_it_is"] = reason
        group.notes.append((self.name, f"{place} of job '{job}' runs as it is: {reason}"))

    def _replace(
        self,
        group: GroupGraph,
        graph: fx.Graph,
        anchor: fx.Node,
        frozen: Frozen,
        site: str,
        found: list[tuple[fx.Node, LoraBranch]],
    ) -> None:
        mode = fake_mode_of(graph)
        jobs = tuple(write.meta["jobs"][0] for write, _ in found)
        tables = placeholders(graph)
        dtype = found[0][1].a.meta["tensor"].dtype
        compute = anchor.meta["val"].dtype if self.compute == "base" else dtype
        tag = {"role": "adapter", "jobs": jobs, "site": site, "path": site, "made_by": self.name}
        with graph.inserting_after(anchor):
            lowered = graph.call_function(torch.ops.tlora_fx.multi_lora_linear.default)
        with graph.inserting_before(lowered):
            weight = frozen.weight
            if frozen.transposed:
                weight = graph.call_function(aten.t.default, (frozen.weight,))
                weight.meta = {**frozen.weight.meta, "path": site}
                weight.meta.pop("tensor", None)
            bank = {}
            for name, shape, kind in _bank_shapes(group, found, frozen):
                node = graph.create_node("get_attr", f"{site}.{BANK}.{name}")
                ref = TensorRef("buffer", f"{site}.{BANK}.{name}", shape, kind or dtype)
                node.meta = {**tag, "tensor": ref, "val": fake_like(mode, shape, ref.dtype)}
                bank[name] = node
        lowered.args = (
            frozen.x, weight, frozen.bias,
            *(bank[name] for name in ("a", "b", "ranks", "scales", "rates")),
            tables["segments"], tables["keys"], tables["token_index"], bank["site"], compute,
        )  # fmt: skip
        lowered.meta = {**anchor.meta, **tag, "val": anchor.meta["val"]}
        lowered.meta["branches"] = {jobs[i]: branch for i, (_, branch) in enumerate(found)}
        for write, _ in found:
            write.replace_all_uses_with(write.args[0])  # type: ignore[arg-type]
            graph.erase_node(write)
        anchor.replace_all_uses_with(lowered)


def _is_plain(group: GroupGraph, job: str, where: str, site: str) -> bool:
    """Whether rank, scaling and rate of a branch may be another job's or layer's."""
    graph = next(graph for graph in group.jobs if graph.name == job)
    prefix = f"{group.blocks[where].instances[0]}." if where else ""
    return graph.sites[prefix + site].kind == "lora"


def _chains(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each replaced value the segment writes behind it, in order."""
    chains: dict[fx.Node, list[fx.Node]] = {}
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is WRITE:
            before: Any = node.args[0]
            anchor = first.get(before, before)
            first[node] = anchor
            chains.setdefault(anchor, []).append(node)
    return chains


def _bank_shapes(
    group: GroupGraph, found: list[tuple[fx.Node, LoraBranch]], frozen: Frozen
) -> list[tuple[str, tuple[int, ...], torch.dtype | None]]:
    rank = sum(branch.a.meta["tensor"].shape[0] for _, branch in found)
    a, b = found[0][1].a.meta["tensor"], found[0][1].b.meta["tensor"]
    jobs = len(group.jobs)
    return [
        ("a", (rank, a.shape[1]), None),
        ("b", (rank, b.shape[0]), None),
        ("ranks", (jobs + 1,), torch.int32),
        ("scales", (jobs,), torch.float64),
        ("rates", (jobs,), torch.float64),
        ("site", (), torch.int64),
    ]


def _erase_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
