"""Make the rows of a listing: what each module computes, costs and reads, and whom it serves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tlora_fx.inspect.cost import total
from tlora_fx.inspect.meter import Meter
from tlora_fx.inspect.rows import ModuleNodes, owner_of, tensor_bytes
from tlora_fx.inspect.schema import Attention, Branch, Row
from tlora_fx.ir.graph import LOSS, AdapterSite, Block, JobGraph, is_call, output_of
from tlora_fx.model.source import SHORT, size_names
from tlora_fx.model.supermodel import SuperModel

ops = torch.ops.tlora_fx
# Operations a logit: the largest, the difference, the exponential and the sum.
SOFTMAX = 4


class RowMaker:
    """Makes rows from one model's graphs."""

    def __init__(self, model: SuperModel) -> None:
        self.model, self.group = model, model.group
        self.sizes = size_names(self.group)
        self.meter = Meter(self.group.form, self.sizes)

    def row(self, module: ModuleNodes, layers: Sequence[str]) -> Row:
        """One module's row.

        layers    paths of the layers that the module's graph stands for, ("",) for the root
        """
        branches = [
            found
            for job in self.group.jobs
            if (found := self._branch(module, job, layers)) is not None
        ]
        cost = total(map(self.meter.node, module.nodes))
        own = [branch.flop_per_token for branch in branches]
        known = [flop for flop in own if flop is not None]
        flop = cost.flop_per_token
        if flop is not None:
            whole = len(known) == len(own)
            flop = flop + sum(known) / len(self.group.jobs) if whole else None
        alone = total(self.meter.node(n) for nodes in module.branches.values() for n in nodes)
        value = module.value
        return Row(
            module=module.module,
            operator=module.operator(),
            detail=self._detail(module),
            shape=self._shape(value),
            dtype="" if value is None else _dtype(value),
            flop_per_token=flop,
            flop_per_length=cost.length,
            flop_per_row=cost.row + alone.row,
            weight_bytes=tensor_bytes(module.reads("base")),
            adapter_bytes=self._adapter_bytes(module, layers),
            role="shared",
            nodes=len(module.nodes),
            source=module.source,
            branches=branches,
        )

    def _branch(self, module: ModuleNodes, job: JobGraph, layers: Sequence[str]) -> Branch | None:
        """What a job has at a module; layers are those that the module's graph stands for."""
        sites = [site for path in _full(module.module, layers) if (site := job.sites.get(path))]
        lowered = module.lowered
        if lowered is not None and job.name in lowered.meta["jobs"]:
            bank = self.model.banks[sites[0].path]
            widths = bank.a.shape[1] + bank.b.shape[1]
            numbers = widths * sum(site.rank for site in sites) / len(sites)
            own = (self.meter.adapter(lowered, site.rank) for site in sites)
            flop = total(own).times(1 / len(sites)).flop_per_token
            return Branch(job.name, _ranks(sites), "lora", True, None, numbers, flop)
        if job.name not in module.branches:
            return None
        nodes = module.branches[job.name]
        cost = total(map(self.meter.node, nodes))
        tensors = {
            source
            for node in nodes
            for source in node.all_input_nodes
            if source.op == "get_attr" and owner_of(source) == "job"
        }
        return Branch(
            job=job.name,
            ranks=_ranks(sites),
            kind=sites[0].kind if sites else "",
            lowered=False,
            as_it_is=module.reasons.get(job.name, ""),
            parameters=float(sum(torch.Size(n.meta["tensor"].shape).numel() for n in tensors)),
            flop_per_token=cost.flop_per_token,
        )

    def _adapter_bytes(self, module: ModuleNodes, layers: Sequence[str]) -> float:
        banks = [self.model.banks[p] for p in _full(module.module, layers) if p in self.model.banks]
        stored = sum(t.numel() * t.dtype.itemsize for bank in banks for t in (bank.a, bank.b))
        return stored / max(1, len(banks)) + tensor_bytes(module.reads("job"))

    def _detail(self, module: ModuleNodes) -> str:
        node = next((n for n in module.nodes if is_call(n, ops.packed_attention.default)), None)
        return "" if node is None else _attention_detail(attention_of(node, []))

    def _shape(self, value: torch.Tensor | None) -> list[int | str]:
        shape = () if value is None else value.shape
        return [
            size if isinstance(size, int) else self.sizes.get(str(size), str(size))
            for size in shape
        ]

    def loss(self, head: Block) -> Row:
        """The operator that turns logits into each job's loss sum."""
        node = next(n for n in self.group.root.nodes if n.op == "call_module" and n.target == LOSS)
        logits = output_of(head.graph)
        shape = logits.args[0].meta["val"].shape  # type: ignore[union-attr]
        value = node.meta["val"]
        return Row(
            LOSS, "cross_entropy", "in chunks, on rows with a target only", self._shape(value),
            _dtype(value), float(SOFTMAX * shape[-1]), 0.0, 0.0, 0, 0.0, "loss", 1, "", [],
        )  # fmt: skip


def attention_of(node: fx.Node, layers: list[str]) -> Attention:
    """What kind of attention a packed_attention node is."""
    args: Any = node.args
    query, key = args[0].meta["val"], args[1].meta["val"]
    causal, window, softcap, sinks, dropout = args[10:15]
    return Attention(
        layers, query.shape[-2], key.shape[-2], query.shape[-1], bool(causal), int(window),
        float(softcap), sinks is not None, float(dropout),
    )  # fmt: skip


def _attention_detail(found: Attention) -> str:
    heads = f"{found.heads} heads of {found.head_dim}"
    if found.key_value_heads != found.heads:
        heads += f", {found.key_value_heads} for K and V"
    parts = ["causal" if found.causal else "both ways", heads]
    parts += [f"window {found.window}"] if found.window >= 0 else []
    parts += [f"soft cap {found.softcap:g}"] if found.softcap else []
    parts += ["sinks"] if found.sinks else []
    return ", ".join(parts + ([f"dropout {found.dropout:g}"] if found.dropout else []))


def _full(module: str, layers: Sequence[str]) -> list[str]:
    """A module's path in the base for each layer; the layer "" is the root."""
    return [".".join(filter(None, (layer, module))) for layer in layers or ("",)]


def _ranks(sites: Iterable[AdapterSite]) -> list[int]:
    return sorted({site.rank for site in sites if site.rank})


def _dtype(value: torch.Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    return SHORT.get(name, name)
