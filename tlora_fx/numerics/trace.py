"""Every value of one run, in order, with its gradient: what is compared once numbers differ."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from tlora_fx.ir.graph import HEAD, JobGraph, Origin, origin_of
from tlora_fx.numerics.evaluate import State
from tlora_fx.numerics.interpreter import Watch
from tlora_fx.numerics.reading import GraphLocation


@dataclass(slots=True, eq=False)
class Step:
    """One node that ran.

    part        the job whose graphs run alone, "" for a fused group
    values      what it gave: one tensor, or several
    gradients   theirs, None where there are none
    inputs      the steps that it read
    """

    part: str
    place: GraphLocation
    node: fx.Node
    values: list[Tensor]
    inputs: list[Step]
    gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def origin(self) -> Origin:
        """Where the node comes from."""
        found = origin_of(self.node)
        assert found is not None
        return found

    @property
    def role(self) -> str:
        """The node's role, "" before it is known."""
        return str(self.node.meta.get("role") or "")


class StepTrace:
    """The steps of one run of a state."""

    def __init__(self, state: State) -> None:
        self.steps: list[Step] = []
        self.head = state.blocks[HEAD].graph if HEAD in state.blocks else None
        self._known: dict[tuple[str, str, fx.Node], Step] = {}
        # By identity; the tensor is kept so that no other gets its number.
        self._makers: dict[int, tuple[Tensor, Step]] = {}
        jobs = [state] if isinstance(state, JobGraph) else [] if state.fused else state.jobs
        self.parts = [job.name for job in jobs] or [""]

    def watches(self) -> dict[str, Watch]:
        """What `evaluate` is to tell."""
        return {part: self._watch(part) for part in self.parts}

    def _watch(self, part: str) -> Watch:
        def take(node: fx.Node, place: GraphLocation, value: Any) -> None:
            key = (part, place.layer, node)
            # The head runs once a chunk, and again in the backward: its first run counts.
            if key in self._known or origin_of(node) is None:
                return
            given = value if isinstance(value, (tuple, list)) else [value]
            live = [item for item in given if isinstance(item, Tensor)]
            inputs = self._inputs(key, live)
            step = Step(part, place, node, [item.detach().clone() for item in live], inputs)
            for item in live:
                self._makers.setdefault(id(item), (item, step))
            step.gradients = [None] * len(live)
            for slot, item in enumerate(live):
                if item.requires_grad:
                    item.register_hook(_keeper(step, slot))  # type: ignore[no-untyped-call]
            self.steps.append(step)
            self._known[key] = step

        return take

    def _inputs(self, key: tuple[str, str, fx.Node], live: list[Tensor]) -> list[Step]:
        """What a step reads; for an input of a layer, what the root calls the layer with."""
        part, layer, node = key
        if node.op == "placeholder":
            makers = (self._makers.get(id(item)) for item in live)
            return [maker[1] for maker in makers if maker is not None]
        found = (self._known.get((part, layer, source)) for source in node.all_input_nodes)
        return [step for step in found if step is not None]


def _keeper(step: Step, slot: int) -> Any:
    def keep(gradient: Tensor) -> None:
        step.gradients[slot] = gradient.detach().clone()

    return keep


class Index:
    """Steps by part, layer and key of their origin; the backbone's also by the base's key."""

    def __init__(self, trace: StepTrace) -> None:
        self.order = {step: place for place, step in enumerate(trace.steps)}
        self._by_key: dict[tuple[str, str, str], Step] = {}
        self._by_base: dict[tuple[str, str, str], Step] = {}
        for step in trace.steps:
            where = (step.part, step.place.layer)
            key = step.origin.key
            self._by_key[*where, key] = step
            if step.role == "backbone":
                plain = _plain(key)
                # Inside PEFT's wrapper the base's own node is the one of its base layer.
                if (*where, plain) not in self._by_base or ".base_layer" in key:
                    self._by_base[*where, plain] = step

    def find(self, part: str, place: GraphLocation, key: str) -> Step | None:
        """The step of a node at a place; a layer's in a graph without layers, too."""
        moved = key
        if place.layer != place.first:
            moved = re.sub(rf"/{re.escape(place.first)}(?=[.:])", f"/{place.layer}", key)
        for where in ((place.layer, key), ("", moved), ("", key)):
            if (found := self._by_key.get((part, *where))) is not None:
                return found
        return None

    def find_base(self, part: str, place: GraphLocation, key: str) -> Step | None:
        """The step of a job's own graphs that repeats a node of the base."""
        return self._by_base.get((part, place.layer, _plain(key)))


def _plain(key: str) -> str:
    """A key without whose graph it is from and without PEFT's wrapper."""
    return key.partition("/")[2].replace(".base_layer", "")
