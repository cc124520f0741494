"""State that a forward leaves behind for the next one.

A graph is the same for every row, so a forward may not change what the next one reads: counters,
buffers, generators. A value that is kept and not read again, or computed again from nothing but
sizes and weights, changes nothing and may stay.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from tlora_fx.tracing.layer_calls import StandIn

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, range)
MODULE_STATE = frozenset(vars(nn.Module())) - {"training"}
LIBRARIES = ("torch", "transformers", "peft", "tlora_fx", "torchao", "bitsandbytes")
DEEP = 4
# What holds data; all else that a class or a Python module has is code.
DATA = (*PLAIN, list, dict, set, Tensor, random.Random, torch.Generator)


@dataclass(frozen=True, slots=True)
class Slot:
    """One attribute.

    owner   the module, class or Python module that has it
    name    its name there
    form    a key that changes when its value does
    value   its value
    """

    owner: Any
    name: str
    form: Hashable
    value: Any

    @property
    def is_registered(self) -> bool:
        """Whether it is a buffer or a parameter."""
        stores = (getattr(self.owner, name, {}) for name in ("_buffers", "_parameters"))
        return any(self.name in store for store in stores)

    def put(self, value: Any) -> None:
        """Give the attribute a value."""
        setattr(self.owner, self.name, value)


State = Mapping[str, Slot]


def state_of(model: nn.Module) -> State:
    """Attributes of a model's modules, and of the classes and Python modules of its own code."""
    forms = _Forms()
    return {
        where: Slot(owner, name, forms.of(value), value)
        for where, owner, name, value in _attributes(model)
    }


def changed(before: State, after: State) -> State:
    """The attributes that are new or have another value."""
    return {
        where: slot
        for where, slot in after.items()
        if where not in before or before[where].form != slot.form
    }


def generators() -> dict[str, Hashable]:
    """The states of the generators that every process has."""
    with _disable_current_modes():  # else the state would be a constant of the graph
        of_torch = bytes(torch.get_rng_state().tolist())
    states: dict[str, Hashable] = {"Python's random": random.getstate(), "torch": of_torch}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        inner = numpy.random.get_state(legacy=False)["state"]
        states["NumPy"] = (inner["key"].tobytes(), inner["pos"])
    return states


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any, str, Any]]:
    """Path, owner, name and value of each."""
    owners: dict[str, Any] = {}
    for path, module in model.named_modules():
        kind = type(module)
        if isinstance(module, StandIn):
            continue
        for name, value in _own_attributes(module):
            if name not in MODULE_STATE:
                yield f"{path}.{name}".lstrip("."), module, name, value
        if is_own(kind):
            owners[kind.__qualname__] = kind
            owners[kind.__module__] = sys.modules[kind.__module__]
    for where, owner in owners.items():
        for name, value in list(vars(owner).items()):
            if isinstance(value, DATA) and not name.startswith("__"):
                yield f"{where}.{name}", owner, name, value


def _own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    stores = (vars(module), module._buffers, module._parameters)
    return [(name, value) for store in stores for name, value in store.items()]


def is_own(kind: type) -> bool:
    """Whether a class is a base's own code: no library's."""
    return kind.__module__.partition(".")[0] not in LIBRARIES


def reads(value: Any, inputs: Sequence[Tensor]) -> bool:
    """Whether a value that a traced forward made may depend on more than sizes and weights.

    inputs    tensors that the forward was given
    """
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return False
    mode = get_proxy_mode()
    if not isinstance(value, Tensor) or mode is None:
        return True
    nodes = [_node(tensor, mode.tracer) for tensor in (value, *inputs)]
    stack, seen = [nodes[0]], set()
    while stack:
        node = stack.pop()
        if node is None or node in nodes[1:]:
            return True
        if node not in seen and "sym_size" not in str(node.target):
            stack.extend(node.all_input_nodes)
        seen.add(node)
    return False


def _node(tensor: Tensor, tracer: Any) -> Any:
    slot = get_proxy_slot(tensor, tracer, None)
    return slot.proxy.node if slot is not None else None


def meta_copy(value: Any) -> Any:
    """A value that a traced forward left behind, for a forward that is traced anew."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint
    if isinstance(value, Tensor):
        shape = [meta_copy(size) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")
    return value


class _Forms:
    """Keys of values; what cannot be compared by value is compared by identity."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def of(self, value: Any, depth: int = 0) -> Hashable:
        """The key of a value."""
        if isinstance(value, PLAIN):
            return (type(value).__name__, repr(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return (type(value).__name__, str(value))
        if isinstance(value, Tensor):
            return ("tensor", id(value), 0 if value.is_inference() else value._version)
        if isinstance(value, (random.Random, torch.Generator)):
            return _generator_state(value)
        if isinstance(value, nn.Module) or callable(value) or depth == DEEP:
            return id(value)
        return self._inside(value, depth + 1)

    def _inside(self, value: Any, depth: int) -> Hashable:
        """The key of a container, or of an object's attributes, which are read once."""
        if isinstance(value, (list, tuple)):
            return tuple(self.of(item, depth) for item in value)
        if isinstance(value, dict):
            return tuple((str(key), self.of(item, depth)) for key, item in value.items())
        if isinstance(value, (set, frozenset)):
            return tuple(sorted(map(str, value)))
        if id(value) in self.seen:
            return id(value)
        self.seen.add(id(value))
        return (id(value), self._inside(getattr(value, "__dict__", {}), depth))


def _generator_state(generator: random.Random | torch.Generator) -> Hashable:
    if isinstance(generator, random.Random):
        return generator.getstate()
    with _disable_current_modes():
        return bytes(generator.get_state().tolist())
