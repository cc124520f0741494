"""Find PEFT's LoRA layers in a graph that Dynamo recorded.

Module names guide the search; whether a site can be lowered is for the pattern to say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from tlora_fx.ir.graph import under

PEFT_PREFIX = "base_model.model."
_START = re.compile(r"^L\['\w+'\]")
_ITEM = re.compile(r"(?:\.__dict__)?(?:\['_modules'\])?\['?([^\]']+)'?\]")
_CASTS = ("to", "float", "half", "bfloat16", "double", "type_as")
# An adapter's first matrix as Dynamo names the graph's input.
_ADAPTER = re.compile(r"lora_(?:embedding_)?A_")
FIRST = "lora_A."
REGION = "tag_activation_checkpoint"


@dataclass(slots=True)
class LoraCalls:
    """The calls of one LoRA layer.

    nodes      the layer's calls in order, those of the frozen module included
    """

    path: str
    nodes: list[fx.Node] = field(default_factory=list)
    frozen: set[fx.Node] = field(default_factory=set)
    adapters: set[str] = field(default_factory=set)

    @property
    def active(self) -> bool:
        """Whether there is a branch: merged and disabled adapters leave none."""
        return any(node not in self.frozen and node.target not in _CASTS for node in self.nodes)

    def results(self) -> list[fx.Node]:
        """Results of the layer that nodes outside it read."""
        return _read_outside(self.nodes, set(self.nodes))

    def anchors(self) -> list[fx.Node]:
        """Results of the frozen module that its layer reads."""
        return _read_outside([node for node in self.nodes if node in self.frozen], self.frozen)


@dataclass(frozen=True, slots=True)
class GraphRegion:
    """One graph module: the one that Dynamo hands over, or a checkpointed region in it.

    stored   nodes that are parameters or buffers of the model
    """

    module: fx.GraphModule
    stored: frozenset[fx.Node]


def regions_of(root: fx.GraphModule) -> list[GraphRegion]:
    """The whole graph and its checkpointed regions, outer before inner."""
    stored = {
        node
        for node in root.graph.nodes
        if node.op == "get_attr" or isinstance(node.meta.get("example_value"), nn.Parameter)
    }
    regions = [GraphRegion(root, frozenset(stored))]
    for region in regions:
        regions.extend(_inner(region))
    return regions


def _inner(region: GraphRegion) -> Iterator[GraphRegion]:
    """The checkpointed regions of one graph module; a region takes parameters as arguments."""
    for node in region.module.graph.nodes:
        if not _is_region(node):
            continue
        name, *given = node.args
        body = getattr(region.module, str(name.target))
        taken = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        if len(taken) == len(given):
            pairs = zip(taken, given, strict=True)
            yield GraphRegion(
                body, frozenset(mine for mine, outer in pairs if outer in region.stored)
            )


def sites_of(graph: fx.Graph) -> list[LoraCalls]:
    """The LoRA layers whose calls stand in a graph, in the order in which they run."""
    peft = sys.modules.get("peft.tuners.lora.layer")
    if peft is None:
        return []
    sites: dict[str, LoraCalls] = {}
    for node in graph.nodes:
        if not node.op.startswith("call_"):
            continue
        modules = [(readable(path), kind) for path, kind in _modules(node)]
        owner = next(
            (
                path
                for path, kind in modules
                if isinstance(kind, type) and issubclass(kind, peft.LoraLayer)
            ),
            None,
        )
        if owner is None:
            continue
        site = sites.setdefault(owner, LoraCalls(owner))
        site.nodes.append(node)
        inside = [path.removeprefix(f"{owner}.") for path, _ in modules if under(path, owner)]
        if "base_layer" in inside:
            site.frozen.add(node)
        site.adapters |= {path.removeprefix(FIRST) for path in inside if path.startswith(FIRST)}
    return list(sites.values())


def strays(region: GraphRegion, sites: list[LoraCalls]) -> dict[str, fx.Node]:
    """Calls outside of all LoRA layers that read an adapter's first matrix, by its Dynamo name."""
    known = {node for site in sites for node in site.nodes}
    return {
        str(node.target): user
        for node in region.module.graph.nodes
        if node.op == "placeholder" and _ADAPTER.search(str(node.target))
        for user in node.users
        if user not in known and not _is_region(user)
    }


def running_modules() -> list[nn.Module]:
    """Modules that Python runs while Dynamo compiles, inner before outer."""
    modules: dict[int, nn.Module] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            modules.setdefault(id(owner), owner)
        frame = frame.f_back
    return list(modules.values())


def has_active_branch(model: nn.Module) -> bool:
    """Whether a model has a LoRA layer that is neither merged nor disabled."""
    peft = sys.modules.get("peft.tuners.lora.layer")
    layers = (m for m in model.modules() if peft is not None and isinstance(m, peft.LoraLayer))
    return any(
        not (layer.merged or layer.disable_adapters) and layer.active_adapters for layer in layers
    )


def running_layer() -> str:
    """Path of the LoRA layer whose forward Dynamo compiles in parts, "" where it is none.

    After a graph break Dynamo compiles what the layer calls without naming the layer.
    """
    peft = sys.modules.get("peft.tuners.lora.layer")
    running = running_modules()
    layer = next((m for m in running if peft is not None and isinstance(m, peft.LoraLayer)), None)
    if layer is None:
        return ""
    paths = (name for name, module in running[-1].named_modules() if module is layer)
    return readable(next(paths, "").removeprefix("_orig_mod."))


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target) == REGION


def readable(path: str) -> str:
    """A module path as the base has it: `L['self'].model.layers.0` is `model.layers.0`."""
    path = _ITEM.sub(r".\1", _START.sub("", path))
    return path.removeprefix(".").removeprefix(PEFT_PREFIX)


def _modules(node: fx.Node) -> list[tuple[str, Any]]:
    """Path and class of every module that a call stands in, outer before inner."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return [(str(path), kind) for path, kind in stack.values()]


def _read_outside(nodes: list[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if any(user not in inside for user in node.users)]


def value_of(node: fx.Node) -> Any:
    """The fake value that Dynamo keeps of a node: tensor, size, or None."""
    return node.meta.get("example_value")


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that Dynamo keeps of a node."""
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    return value


def is_number(node: fx.Node) -> bool:
    """Whether a call reads a float of the model that Dynamo made an input, a float64 0-d tensor.

    Dynamo does that with the second value of a float that it meets, as a second model's scaling.
    """
    if node.op != "call_method" or node.target != "item":
        return False
    value = value_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is torch.float64
        and value.dim() == 0
        and value.device.type == "cpu"
        and not value.requires_grad
    )
