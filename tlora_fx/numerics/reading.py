"""Tensors of get_attr nodes, and the numbers of branches, at one location of a model.

It follows the Shared Super-Model's own rules (supermodel.py), but takes nothing from passes: what
a pass wrote into the graphs is what is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tlora_fx.ir.graph import (
    PEFT_PREFIX,
    AdapterSite,
    GroupGraph,
    JobGraph,
    TensorRef,
    is_call,
)
from tlora_fx.ir.lora_sites import lowered_sites
from tlora_fx.ir.storage import stored_value
from tlora_fx.model.adapter_bank import AdapterBank
from tlora_fx.numerics.tensors import Seeded, Unchecked
from tlora_fx.ops import site_id
from tlora_fx.tracing.export import SOME_RATE, SOME_SCALING

BANK = ".lora."
DOWN, UP, DROPOUT = ".lora_A.default.weight", ".lora_B.default.weight", ".lora_dropout"


@dataclass(frozen=True, slots=True)
class GraphLocation:
    """Location where a graph runs.

    layer    path of the layer, "" for the root and the head
    first    path of the first layer of its block, whose numbers the code carries
    """

    layer: str
    first: str
    graph: fx.Graph

    def path(self, inside: str) -> str:
        """A path of this place in the base's own naming."""
        return f"{self.layer}.{inside}".strip(".")


class Reader:
    """Reads tensors and numbers for the graphs of one job, or of a fused group.

    traced_with   sites of the job that the graphs were traced for: their numbers stand in the code
    silent        every dropout rate is 0
    leaves        what was read of jobs' own tensors that learn, by job and name
    vectors       the base's vectors that were read, as leaves: a base alone trains nothing else
    """

    def __init__(
        self,
        owner: JobGraph | GroupGraph,
        tensors: Seeded,
        traced_with: Mapping[str, AdapterSite],
        *,
        silent: bool = False,
    ) -> None:
        self.owner, self.tensors, self.traced_with = owner, tensors, traced_with
        self.silent = silent
        self.leaves: dict[tuple[str, str], Tensor] = {}
        self.vectors: dict[str, Tensor] = {}
        self._lowered: dict[fx.Graph, dict[str, Mapping[str, Any]]] = {}
        self._sites = {
            job.name: job.sites
            for job in (owner.jobs if isinstance(owner, GroupGraph) else [owner])
        }

    def tensor(self, node: fx.Node, place: GraphLocation) -> Tensor:
        """Tensor that a get_attr node reads.

        raises    Unchecked for a table that nobody knows how to fill
        """
        ref: TensorRef = node.meta["tensor"]
        if ref.owner == "constant":
            return self.owner.constants[ref.name]
        if ref.owner == "buffer":
            return self._buffer(node, ref, place)
        if ref.owner == "job":
            return self._own(self._job_of(node), ref, place)
        value = stored_value(
            ref,
            *(self.tensors.base(place.path(original.name), original.shape, original.dtype)
              for original in ref.originals or (ref,)),
        )  # fmt: skip
        if isinstance(self.owner, JobGraph) and not self.owner.name:
            return self._vector(place.path(ref.name), value)
        return value

    def scales(self, node: fx.Node) -> bool:
        """Whether an operator multiplies a branch by its scaling, which is a number in the code.

        Before tag-roles the operator's module says so.
        """
        if len(node.args) < 2 or isinstance(node.args[1], fx.Node):
            return False
        if "role" in node.meta:
            return node.meta.get("part") == "scale"
        sites = self._sites.get(self._job_of(node), {})
        if not is_call(node, torch.ops.aten.mul.Tensor) or node.meta.get("path") not in sites:
            return False
        return bool(node.args[1] == SOME_SCALING)

    def scaling(self, node: fx.Node, place: GraphLocation) -> Any:
        """Factor of a branch: the site's number where the code has the traced one."""
        site = str(node.meta.get("site") or node.meta.get("path", ""))
        traced, own = self._numbers(node, site, place)
        written = node.args[1]
        if own and traced and written in (traced.scaling, SOME_SCALING):
            return own.scaling
        return written

    def rate(self, node: fx.Node, written: float, place: GraphLocation) -> float:
        """The rate of a dropout, likewise; that of a branch may be a placeholder."""
        if self.silent:
            return 0.0
        path = str(node.meta.get("path", "")).removesuffix(".default")
        if not path.endswith(DROPOUT):
            return written
        traced, own = self._numbers(node, path.removesuffix(DROPOUT), place)
        if own and traced and written in (traced.dropout, SOME_RATE):
            return own.dropout
        return written

    def _numbers(
        self, node: fx.Node, site: str, place: GraphLocation
    ) -> tuple[AdapterSite | None, AdapterSite | None]:
        """The site that the code was written for, and the one that runs."""
        job, inside = self._job_of(node), f"{place.first}.{site}".strip(".")
        return self._written_for(job).get(inside), self._sites.get(job, {}).get(place.path(site))

    def _written_for(self, job: str) -> Mapping[str, AdapterSite]:
        """The sites whose numbers and shapes stand in the code of a job."""
        return self._sites.get(job, {}) if isinstance(self.owner, GroupGraph) else self.traced_with

    def _job_of(self, node: fx.Node) -> str:
        if isinstance(self.owner, JobGraph):
            return self.owner.name
        jobs = node.meta.get("jobs") or ("",)
        return str(jobs[0])

    def _own(self, job: str, ref: TensorRef, place: GraphLocation) -> Tensor:
        inside, shape = ref.name.removeprefix(PEFT_PREFIX), ref.shape
        name = place.path(inside)
        for part, axis in ((DOWN, 0), (UP, 1)):
            site = self._sites[job].get(name.removesuffix(part))
            if not name.endswith(part) or site is None or not site.rank or len(shape) < 2:
                continue
            # Of experts all ranks lie along one axis, and PEFT keeps them in a wrapper.
            traced = self._written_for(job).get(
                f"{place.first}.{inside}".removesuffix(part).strip(".")
            )
            times = shape[axis] // traced.rank if site.kind == "experts" and traced else 1
            shape = tuple(times * site.rank if d == axis else n for d, n in enumerate(shape))
            name = site.wrapper + part
            break
        return self._leaf(job, name, shape, ref.dtype)

    def _leaf(self, job: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        leaf = self.tensors.own(job, name, shape, dtype)
        if leaf.requires_grad:
            self.leaves[job, name] = leaf
        return leaf

    def _vector(self, name: str, value: Tensor) -> Tensor:
        if value.dim() > 1 or not value.is_floating_point() or name in self.tensors.buffers:
            return value
        if name not in self.vectors:
            self.vectors[name] = value.detach().requires_grad_()
        return self.vectors[name]

    def _buffer(self, node: fx.Node, ref: TensorRef, place: GraphLocation) -> Tensor:
        target = str(node.target)
        site, found, name = target.rpartition(BANK)
        if found:
            return self._bank(site, name, ref, place)
        if "rate" in node.meta:
            rate = 0.0 if self.silent else node.meta["rate"]
            return torch.full(ref.shape, rate, dtype=ref.dtype)
        if "site_path" in node.meta:
            number = int(node.meta["site_number"])
            path = place.path(str(node.meta["site_path"])) + (f"#{number}" if number else "")
            return torch.tensor(site_id(path), dtype=ref.dtype)
        raise Unchecked(f"nobody knows the values of the table {target}")

    def _bank(self, site: str, name: str, ref: TensorRef, place: GraphLocation) -> Tensor:
        """A table of a site's AdapterBank, or all jobs' A or B as one tensor."""
        assert isinstance(self.owner, GroupGraph)
        lowered = self._lowered_at(place.graph, site)
        path = place.path(site)
        sites = [job.sites.get(path) if job.name in lowered else None for job in self.owner.jobs]
        if name not in ("a", "b"):
            key = site_id(path + DROPOUT)
            table = AdapterBank(sites, (1, 1), torch.float32, key).get_buffer(name)
            return torch.zeros_like(table) if self.silent and name == "rates" else table
        parts = []
        for job, own in zip(self.owner.jobs, sites, strict=True):
            if own is not None and name == "a":
                shape = (own.rank, ref.shape[1])
                parts.append(self._leaf(job.name, own.wrapper + DOWN, shape, ref.dtype))
            elif own is not None:
                shape = (ref.shape[1], own.rank)
                parts.append(self._leaf(job.name, own.wrapper + UP, shape, ref.dtype).t())
        # Of an open model nobody may have an adapter here now.
        return torch.cat(parts) if parts else torch.zeros(0, ref.shape[1], dtype=ref.dtype)

    def _lowered_at(self, graph: fx.Graph, site: str) -> Mapping[str, Any]:
        """The branches that the lowered operator at a site serves, by job."""
        if graph not in self._lowered:
            found = reversed(list(lowered_sites(graph)))
            self._lowered[graph] = {lowered.path: lowered.branches for lowered in found}
        if site not in self._lowered[graph]:
            raise Unchecked(f"no operator reads the adapters of {site}")
        return self._lowered[graph][site]
