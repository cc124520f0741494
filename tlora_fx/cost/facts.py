"""Read from a model what planning needs: its layers, their weights, sites and attention.

All of it comes from the graphs, so no weights and no hardware are needed. Sizes are those of the
whole model, also where a pass has cut its tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod

import torch
from torch import fx

from tlora_fx.cost.model_facts import Attention, LayerFacts, ModelFacts, SiteFacts, structure_of
from tlora_fx.ir.graph import HEAD, GroupGraph, TensorRef, arguments_of, is_call, placeholders
from tlora_fx.ir.lora_sites import lowered_sites
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.host_tables import reads_on_host
from tlora_fx.ops.job_operator import find_operator
from tlora_fx.ops.kernels.packed import tail_columns_of

ATTENTION = torch.ops.tlora_fx.packed_attention.default
# Place of the window among the operator's arguments.
WINDOW = 11
ADAM_STATES = 2
#: Tensors of a parameter's size that an optimizer keeps; all others keep two.
STATES = {
    "sgd": 0, "adagrad": 1, "rmsprop": 1, "adafactor": 0, "lion": 1, "muon": 1, "adamw_8bit": 1,
}  # fmt: skip


def facts_of(model: SuperModel) -> ModelFacts:
    """The facts of a compiled model, materialized or not."""
    group = model.group
    layers = tuple(_layer(group, path) for path in model.layer_order())
    root = _base_tensors(group.root)
    head = _base_tensors(group.blocks[HEAD].graph) if HEAD in group.blocks else {}
    outside = [_trained(group.root, group)]
    if HEAD in group.blocks:
        outside.append(_trained(group.blocks[HEAD].graph, group))
    return ModelFacts(
        title=model.backbone.title,
        dtype=str(model.backbone.dtype).removeprefix("torch."),
        hidden=_hidden(model),
        vocabulary=group.vocabulary,
        layers=layers,
        jobs=tuple(group.job_names),
        root_bytes=sum(map(_bytes, root.values())),
        head_bytes=sum(_bytes(ref) for name, ref in head.items() if name not in root),
        root_trained=tuple(map(sum, zip(*outside, strict=True))),
        tensors=tuple(2 * len(job.sites) for job in group.jobs),
        trained_bytes=2 if any(job.adapter_dtype == "bfloat16" for job in model.jobs) else 4,
        states=tuple(STATES.get(str(job.optim), ADAM_STATES) for job in model.jobs),
        launched=why_launched(group),
    )


def why_launched(group: GroupGraph) -> tuple[str, ...]:
    """Reasons why no row of a model runs as a CUDA graph; empty where rows may."""
    found = set() if group.form == "packed" else {"batch form"}
    for graph in group.graphs():
        found |= {_name_of(node) for node in graph.nodes if _reads_on_host(node)}
    return tuple(sorted(found))


#: Operators whose products libraries compute, which order sums by how many tokens there are.
_LIBRARY_PRODUCTS = frozenset(
    {
        *("aten.linear", "aten.addmm", "aten.mm", "aten.matmul", "aten.bmm", "aten.baddbmm"),
        *("aten.einsum", "aten._grouped_mm", "aten._scaled_mm", "aten.convolution"),
        *("aten.conv1d", "aten.conv2d", "aten.conv3d", "multi_lora_add", "multi_lora_experts"),
        *("expert_linear", "quantized_linear", "float8_linear"),
    }
)


def library_products(group: GroupGraph) -> tuple[str, ...]:
    """Operators of a model whose products libraries compute on a GPU, not generated kernels.

    Products that add nothing up, as those of positions and frequencies, do not count.
    """
    nodes = (node for graph in group.graphs() for node in graph.nodes)
    named = {_name_of(node) for node in nodes if not _is_outer(node)}
    return tuple(sorted(named & _LIBRARY_PRODUCTS))


def _is_outer(node: fx.Node) -> bool:
    """Whether a product's inner dimension is 1."""
    if _name_of(node) not in ("aten.mm", "aten.matmul", "aten.bmm"):
        return False
    left, right = (each.meta["val"] for each in node.args[:2] if isinstance(each, fx.Node))
    inner = left.shape[-1]
    return left.dim() > 1 and right.dim() > 1 and isinstance(inner, int) and inner == 1


def _reads_on_host(node: fx.Node) -> bool:
    """Whether a node calls an operator that there reads a table of jobs on the host."""
    target = node.target
    if registered := find_operator(target):
        return registered.on_host
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "tlora_fx":
        return False
    given = fx.map_arg(arguments_of(node), lambda one: one.meta.get("val"))
    return reads_on_host(_name_of(node), given)


def _name_of(node: fx.Node) -> str:
    """An operator's name without its namespace and overload."""
    return str(node.target).removeprefix("tlora_fx.").removesuffix(".default")


def _layer(group: GroupGraph, path: str) -> LayerFacts:
    graph = group.block_of(path).graph
    sites = tuple(_sites(graph, group, path))
    base = next((b.graph for b in group.base.blocks.values() if path in b.instances), graph)
    matrices, attention = _matrices(base), _attention(base)
    return LayerFacts(
        path=path,
        structure=structure_of(matrices, attention),
        weight_bytes=sum(map(_bytes, _base_tensors(graph).values())),
        tail_bytes=sum(_tail_bytes(site, _itemsize(graph)) for site in sites),
        matrices=matrices,
        attention=attention,
        sites=sites,
        trained=_trained(graph, group, sites),
    )


def _base_tensors(graph: fx.Graph) -> dict[str, TensorRef]:
    """Frozen tensors that a graph reads, by name."""
    refs = (node.meta["tensor"] for node in graph.nodes if node.op == "get_attr")
    return {ref.name: ref for ref in refs if ref.owner == "base"}


def _full(ref: TensorRef) -> tuple[int, ...]:
    """The shape of the whole tensor, where processes hold pieces."""
    cut = ref.shard
    if cut is None:
        return ref.shape
    return tuple(n * cut[1] if place == cut[0] else n for place, n in enumerate(ref.shape))


def _bytes(ref: TensorRef) -> int:
    return prod(_full(ref)) * ref.dtype.itemsize


def _itemsize(graph: fx.Graph) -> int:
    sizes = [ref.dtype.itemsize for ref in _base_tensors(graph).values() if len(ref.shape) == 2]
    return max(sizes, default=1)


def _matrices(graph: fx.Graph) -> tuple[tuple[int, int], ...]:
    refs = _base_tensors(graph).values()
    # What several matrices are stored as is one product.
    shapes = [_full(ref if len(ref.originals) != 1 else ref.originals[0]) for ref in refs]
    return tuple(sorted((shape[1], shape[0]) for shape in shapes if len(shape) == 2))


def _attention(graph: fx.Graph) -> tuple[Attention, ...]:
    found = []
    for node in graph.nodes:
        if is_call(node, ATTENTION):
            q, k = (node.args[place].meta["val"].shape for place in (0, 1))
            heads, groups, width = int(q[1]), int(k[1]), int(q[2])
            found.append(Attention(heads, groups, width, int(node.args[WINDOW])))
    return tuple(found)


def _sites(graph: fx.Graph, group: GroupGraph, layer: str) -> Iterable[SiteFacts]:
    for site in lowered_sites(graph):
        path = f"{layer}.{site.path}"
        a, b = (site.arguments[name].meta["tensor"] for name in ("a", "b"))
        ranks = tuple(
            job.sites[path].rank if job.name in site.branches and path in job.sites else 0
            for job in group.jobs
        )
        yield SiteFacts(_full(a)[1], _full(b)[1], ranks)


def _tail_bytes(site: SiteFacts, itemsize: int) -> int:
    """What a buffer around an adapted weight has more than the weight: see ops/kernels/packed."""
    tail = tail_columns_of(sum(site.ranks))
    return itemsize * tail * (site.width + tail)


def _trained(
    graph: fx.Graph, group: GroupGraph, sites: Iterable[SiteFacts] = ()
) -> tuple[int, ...]:
    """Numbers that each job trains in a graph, in shared operators or in branches of its own."""
    found = Counter[str]()
    for site in sites:
        for job, rank in zip(group.job_names, site.ranks, strict=True):
            found[job] += rank * site.width
    seen = set()
    for node in graph.nodes:
        ref = node.meta.get("tensor") if node.op == "get_attr" else None
        if ref is not None and ref.owner == "job" and str(node.target) not in seen:
            seen.add(str(node.target))
            found[node.meta["jobs"][0]] += prod(_full(ref))
    return tuple(found[job] for job in group.job_names)


def _hidden(model: SuperModel) -> int:
    """Columns between layers: of what the last of them gives, or of the head's input."""
    order = model.layer_order()
    if order:
        called = (n for n in model.group.root.nodes if n.op == "call_module")
        last = next(node for node in called if str(node.target) == order[-1])
        return int(last.meta["val"].shape[-1])
    if HEAD in model.group.blocks:
        first = next(iter(placeholders(model.group.blocks[HEAD].graph).values()))
        return int(first.meta["val"].shape[-1])
    return 0
