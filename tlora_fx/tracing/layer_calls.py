"""Calls of a model's layers, those that are not traced included.

A layer that another one stands for is not built. In its place a stand-in hands its input on, so the
model's own loop runs over all layers, with their true numbers, and looks up in its config what it
gives to each. Layers of equal modules are one structure only if they are called alike: the running
value in the same place, everything else the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tlora_fx.ir.graph import LayerPlan

PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer.

    leaves    its arguments, flat
    form      how they were nested
    running   which of them are what the layer before it returned
    out       what it returned
    """

    layer: str
    leaves: list[Any]
    form: Any
    running: tuple[int, ...]
    out: Any = None

    def is_like(self, other: LayerCall) -> bool:
        """Whether two layers are given the same, besides the running value."""
        running = self.running or other.running
        if self.form != other.form or (other.running or running) != running:
            return False
        return all(
            index in running or _is_same(mine, theirs)
            for index, (mine, theirs) in enumerate(zip(self.leaves, other.leaves, strict=True))
        )


def _is_same(left: Any, right: Any) -> bool:
    return left is right or (
        type(left) is type(right) and isinstance(left, PLAIN) and left == right
    )


class LayerCalls:
    """The calls of one forward.

    stood_in    whether a stand-in was called
    """

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self.calls: list[LayerCall] = []
        self.last: Tensor | None = None
        self.stood_in = False

    def clear(self) -> None:
        """Begin a forward."""
        self.calls.clear()
        self.last, self.stood_in = None, False

    def watch(self, layer: str, module: nn.Module) -> None:
        """Note the calls of a layer that is traced."""

        def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self.calls.append(self._call(layer, args, kwargs, out))
            leaves = pytree.tree_leaves(out)
            self.last = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)

        module.register_forward_hook(note, with_kwargs=True)

    def pass_on(self, layer: str, args: Any, kwargs: Any) -> Any:
        """Result of a stand-in: its running value, returned as its representative does."""
        self.stood_in = True
        first = self.plan.representative[layer]
        known = next((call for call in self.calls if call.layer == first), None)
        if known is None or self.last is None:
            raise RuntimeError("the model calls a layer by another way than its list of layers")
        leaves, form = pytree.tree_flatten(known.out)
        index = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        leaves[index] = self.last
        out = pytree.tree_unflatten(leaves, form)
        self.calls.append(self._call(layer, args, kwargs, out))
        return out

    def _call(self, layer: str, args: Any, kwargs: Any, out: Any) -> LayerCall:
        leaves, form = pytree.tree_flatten((args, kwargs))
        running = tuple(
            index
            for index, leaf in enumerate(leaves)
            if self.last is not None and leaf is self.last
        )
        return LayerCall(layer, leaves, form, running, out)

    def structures(self) -> dict[str, str] | None:
        """Map from each layer to the first equal one that is called alike; None for no chain."""
        if [call.layer for call in self.calls] != list(self.plan.layers):
            return None
        if any(not call.running for call in self.calls[1:]):
            return None
        firsts: list[LayerCall] = []
        representative: dict[str, str] = {}
        for call in self.calls:
            planned = self.plan.representative[call.layer]
            like = next(
                (
                    first
                    for first in firsts
                    if self.plan.representative[first.layer] == planned and call.is_like(first)
                ),
                call,
            )
            representative[call.layer] = like.layer
            if like is call:
                firsts.append(call)
        return representative


class StandIn(nn.Module):
    """Stands for a layer that is not traced: runs none of its code, and answers what it is."""

    def __init__(self, layer: str, original: nn.Module, calls: LayerCalls) -> None:
        super().__init__()
        self.__dict__["original"] = original  # no submodule: its tensors are not this model's
        self.layer, self.calls = layer, calls

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The running value, unchanged."""
        return self.calls.pass_on(self.layer, args, kwargs)
