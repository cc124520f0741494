"""Find equal layers of a model, so that few of them need to be built and traced.

Two layers are equal when their modules agree in class, plain attributes, shapes, dtypes and
buffers. An attribute that holds the layer's own index, or that of a part of it, is left out of the
comparison, and armed: if the layer's forward reads it, the index is part of what the layer
computes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tlora_fx.ir.graph import LayerPlan
from tlora_fx.model.backbone import Backbone
from tlora_fx.tracing.layer_calls import LayerCalls, StandIn

SMALLEST_LIST = 2
LIBRARY = "transformers.models."
_MODULE_STATE = frozenset(vars(nn.Module()))


class LayerIndex(int):
    """A layer's index that remembers whether anybody computed with it."""

    read: list[int]


def _armed(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: LayerIndex, *args: Any) -> Any:
        self.read.append(1)
        return plain(self, *args)

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_READS = ("neg", "abs", "int", "float", "index", "bool", "eq", "ne", "lt", "le", "gt", "ge")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_READS):
    setattr(LayerIndex, f"__{_name}__", _armed(f"__{_name}__"))
LayerIndex.__hash__ = int.__hash__  # type: ignore[method-assign]


def layer_list(model: nn.Module) -> list[str]:
    """Paths of the layers: the children of the longest outermost ModuleList, in order."""
    lists: list[list[str]] = []
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not path.startswith(inside or ("\0",)):
            inside = (*inside, path + ".")
            lists.append([f"{path}.{name}" for name in module._modules])
    longest = max(lists, key=len, default=[])
    return longest if len(longest) >= SMALLEST_LIST else []


def plan_layers(
    backbone: Backbone, signature: Callable[[str], Hashable] = lambda layer: None, fold: bool = True
) -> LayerPlan:
    """Group a base's layers by structure and by what a job puts on them.

    Two layers of each structure are traced where the model's code is transformers' own. Other code
    may treat its fifth layer otherwise from outside, so there all are.

    signature    what else tells layers apart, by layer path
    fold         False: every layer stands for itself
    """
    layers = layer_list(backbone.model)
    index_names = index_attributes(backbone.model, layers)
    first: dict[Hashable, str] = {}
    representative = {}
    for layer in layers:
        key = (structure_key(backbone, layer, index_names), signature(layer))
        representative[layer] = first.setdefault(key, layer) if fold else layer
    whole = not type(backbone.model).__module__.startswith(LIBRARY)
    return LayerPlan(tuple(layers), representative, whole)


def index_attributes(model: nn.Module, layers: list[str]) -> set[tuple[str, str]]:
    """Attributes (path inside the layer, name) that count the layers or equal parts of them.

    A layer with two attentions numbers them 2i and 2i + 1.
    """
    if len(layers) < SMALLEST_LIST:
        return set()
    numbers = [
        {
            (path, name): int.__add__(value, 0)  # one that is armed stays unread
            for path, module in model.get_submodule(layer).named_modules()
            for name, value in vars(module).items()
            if type(value) in (int, LayerIndex)
        }
        for layer in layers
    ]
    common = set(numbers[0]).intersection(*numbers[1:])
    steps = {key: numbers[1][key] - numbers[0][key] for key in common}
    return {
        key
        for key, step in steps.items()
        if 0 <= numbers[0][key] < step
        and all(after[key] - own[key] == step for own, after in pairwise(numbers))
    }


def structure_key(backbone: Backbone, layer: str, skipped: set[tuple[str, str]]) -> Hashable:
    """Key of what a layer computes, as far as its modules tell."""
    rows: list[Hashable] = []
    for path, module in backbone.model.get_submodule(layer).named_modules():
        kind = type(module)
        attributes = tuple(
            (name, _plain(value, module))
            for name, value in sorted(vars(module).items())
            if name not in _MODULE_STATE and (path, name) not in skipped
        )
        parameters = tuple(
            (name, tuple(p.shape), p.dtype)
            for name, p in module._parameters.items()
            if p is not None
        )
        buffers = tuple(
            (name, _content(backbone, b)) for name, b in module._buffers.items() if b is not None
        )
        rows.append((path, kind.__module__, kind.__qualname__, attributes, parameters, buffers))
    return tuple(rows)


def _plain(value: Any, owner: nn.Module) -> Hashable:
    """A value as a key; what cannot be compared by value is compared by identity."""
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype)):
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, owner) for item in value)
    if isinstance(value, dict):
        return tuple((str(name), _plain(item, owner)) for name, item in value.items())
    if isinstance(value, functools.partial):
        return ("partial", *(_plain(x, owner) for x in (value.func, value.args, value.keywords)))
    if isinstance(value, types.MethodType) and value.__self__ is owner:
        return ("method", id(value.__func__))
    return id(value)


def _content(backbone: Backbone, buffer: torch.Tensor) -> Hashable:
    value = backbone.values.get(backbone.names.get(id(buffer), ""))
    if value is None:
        return (tuple(buffer.shape), buffer.dtype)
    content = value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return (tuple(value.shape), value.dtype, content)


def pruned_copy(backbone: Backbone, plan: LayerPlan) -> tuple[nn.Module, list[int], LayerCalls]:
    """A throw-away copy of a base in which stand-ins take the place of layers that are not traced.

    Returns the copy, the list that grows when its forward computes with a layer's index, and the
    calls that its forward makes.
    """
    traced = set(plan.traced())
    calls = LayerCalls(plan)
    used = {id(backbone.model.get_submodule(layer)) for layer in traced}
    left_out = {
        layer: StandIn(layer, backbone.model.get_submodule(layer), calls)
        for layer in plan.layers
        if layer not in traced
    }
    model = backbone.copy_model(
        {k: s for k, s in left_out.items() if id(backbone.model.get_submodule(k)) not in used}
    )
    for layer, stand_in in left_out.items():
        parent, _, name = layer.rpartition(".")
        model.get_submodule(parent)._modules[name] = stand_in
    read: list[int] = []
    for path, name in index_attributes(backbone.model, list(plan.layers)):
        for layer in traced:
            module = model.get_submodule(f"{layer}.{path}" if path else layer)
            armed = LayerIndex(getattr(module, name))
            armed.read = read
            setattr(module, name, armed)
    for layer in traced if left_out else ():
        calls.watch(layer, model.get_submodule(layer))
    return model, read, calls
