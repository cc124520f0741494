"""How long a step takes under a plan, from a profile's times and a model's facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tlora_fx.cost.fit import Curve, LayerTimes, Work
from tlora_fx.cost.hardware import Tier, gpu_of_device, wants_peer_copies
from tlora_fx.cost.load import Load
from tlora_fx.cost.model_facts import LayerFacts, ModelFacts
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.planners.collective_times import CollectiveTimes
from tlora_fx.planners.nonnegative import fit
from tlora_fx.planners.scaling import carried

GPUS_PER_NODE = 8
#: Reached part of a memory's bandwidth in copies.
COPY = 0.8


class LayerCost(NamedTuple):
    """One layer on one row, in milliseconds and bytes.

    again    its forward once more, where layers are computed again in the backward
    saved    what it leaves until its backward
    """

    forward: float
    backward: float
    again: float
    saved: float
    forward_peak: float
    backward_peak: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where processes stand; ranks count along tp first, then dp, then pp."""

    gpus_per_node: int = GPUS_PER_NODE

    def tier(self, shape: MeshShape, dimension: str) -> Tier:
        """The furthest that two neighbours along a dimension are apart."""
        span = {"tp": shape.tp, "dp": shape.tp * shape.dp, "pp": shape.size}[dimension]
        return "node" if span <= self.gpus_per_node else "network"


@dataclass(slots=True)
class CostModel:
    """Costs of a model's parts on one kind of hardware.

    estimated   whether anything that was asked for was not measured as it is
    kinds       for each layer the place of the first one that costs the same
    """

    facts: ModelFacts
    profile: Profile
    cluster: Cluster = Cluster()
    estimated: bool = False
    collectives: CollectiveTimes = field(init=False)
    kinds: tuple[int, ...] = field(init=False)
    _times: dict[tuple[str, int], LayerTimes] = field(init=False, default_factory=dict)
    _costs: dict[tuple[int, Load, int], LayerCost] = field(init=False, default_factory=dict)
    _curves: dict[str, Curve] = field(init=False, default_factory=dict)
    _captured: CostModel | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.collectives = CollectiveTimes(self.profile)
        self.estimated = self.profile.estimated
        first: dict[object, int] = {}
        layers = enumerate(self.facts.layers)
        alike = [(one.structure, one.sites, self._role(place)) for place, one in layers]
        self.kinds = tuple(first.setdefault(key, place) for place, key in enumerate(alike))

    @property
    def captured(self) -> CostModel:
        """The costs where rows run as CUDA graphs; collectives are the same."""
        if self._captured is None:
            self._captured = CostModel(self.facts, self.profile.as_captured(), self.cluster)
        return self._captured

    def layer(self, place: int, load: Load, tp: int = 1) -> LayerCost:
        """One layer on one row, without what processes say to each other.

        place   in the running order of layers
        """
        key = (self.kinds[place], load, tp)
        found = self._costs.get(key)
        if found is None:
            layer, role = self.facts.layers[place], self._role(place)
            found = self._costs[key] = self._layer(layer, role, load, tp)
        return found

    def summed(self, layers: Sequence[int], each: Callable[[int], float]) -> float:
        """Something of each layer, summed; asked once for layers that cost the same."""
        counts = Counter(self.kinds[place] for place in layers)
        return sum(count * each(place) for place, count in counts.items())

    def _role(self, place: int) -> str:
        """Whether a layer's input needs a gradient ("above"), its adapters alone, or nothing."""
        lowest = self.facts.lowest
        return "below" if place < lowest else "first" if place == lowest else "above"

    def root_ms(self, load: Load) -> float:
        """Embedding, positions and last norm, forward and backward."""
        return self._curve("root")(load.total) + self._curve("root backward")(load.total)

    def loss_ms(self, load: Load, mesh: MeshShape | None = None) -> tuple[float, float]:
        """Head and loss: forward, backward.

        mesh   where tp cuts the vocabulary, and sums the gradient of the head's input
        """
        there, back = (self._curve(name)(load.targets) for name in ("loss", "loss backward"))
        if mesh is None or mesh.tp == 1:
            return there, back
        payload = load.targets * self.facts.hidden * self.facts.itemsize
        tier = self.cluster.tier(mesh, "tp")
        talk = self.collectives.ms("all-reduce", tier, mesh.tp, payload)
        return there / mesh.tp, back / mesh.tp + talk

    def root_bytes(self, load: Load) -> float:
        """What embedding, positions and last norm leave until the backward."""
        return self._curve("root saved")(load.total)

    def loss_bytes(self, load: Load, tp: int = 1) -> float:
        """The most that head and loss take at once."""
        saved, peak = self._curve("loss saved"), self._curve("loss peak")
        return saved(load.targets) + peak(load.targets) / tp

    def host_ms(self, tokens: int) -> float:
        """Packing rows of so many tokens."""
        return self._curve("host")(tokens)

    def optimizer_ms(self, tensors: Sequence[int], parameters: Sequence[int]) -> float:
        """The end of a step, one job after the other.

        tensors, parameters   of each job in this process
        """
        points = self.profile.optimizer
        rows = np.array([[1.0, one.tensors, one.parameters] for one in points])
        values = np.array([one.ms for one in points])
        start, tensor, number = fit(rows, values) if points else (0.0, 0.0, 0.0)
        pairs = zip(tensors, parameters, strict=True)
        return float(sum(start + t * tensor + p * number for t, p in pairs if p))

    def gathers_by_copies(self, mesh: MeshShape) -> bool:
        """Whether weights are copied from peers to where layers read them (`peer_copies`).

        GPUs of one node are taken to reach each other's memory.
        """
        return wants_peer_copies() and self.cluster.tier(mesh, "dp") == "node"

    def copy_ms(self, size: float) -> float:
        """What copying so many bytes within a device takes, one read and one write."""
        gpu = gpu_of_device(self.profile.hardware.gpu)
        return 2 * size / (gpu.memory_gbps * 1e6 * COPY) if gpu else 0.0

    def _layer(self, layer: LayerFacts, role: str, load: Load, tp: int) -> LayerCost:
        times = self._times_of(layer, tp)
        work = work_of(layer, load, self.facts.hidden, tp)
        if role == "below":
            forward = times.frozen(work)
            return LayerCost(forward, 0.0, 0.0, 0.0, times.forward_peak(work), 0.0)
        backward = times.first(work) if role == "first" else times.backward(work)
        return LayerCost(
            forward=times.forward(work),
            backward=backward,
            again=times.forward(work),
            saved=times.saved(work),
            forward_peak=times.forward_peak(work),
            backward_peak=times.backward_peak(work),
        )

    def _times_of(self, layer: LayerFacts, tp: int) -> LayerTimes:
        key = (layer.structure, tp)
        if key not in self._times:
            found = carried(self.profile, layer, self.facts, tp)
            self.estimated = self.estimated or not found.exact
            self._times[key] = LayerTimes.of(
                found.profile, carried(self.profile, layer, self.facts, 1).profile
            )
        return self._times[key]

    def _curve(self, name: str) -> Curve:
        if name not in self._curves:
            profile = self.profile
            points = {
                "root": [(one.tokens, one.forward_ms) for one in profile.root],
                "root backward": [(one.tokens, one.backward_ms) for one in profile.root],
                "root saved": [(one.tokens, one.saved_bytes) for one in profile.root],
                "loss": [(one.targets, one.forward_ms) for one in profile.loss],
                "loss backward": [(one.targets, one.backward_ms) for one in profile.loss],
                "loss saved": [(one.targets, one.saved_bytes) for one in profile.loss],
                "loss peak": [(one.targets, one.peak_bytes) for one in profile.loss],
                "host": [(one.tokens, one.ms) for one in profile.host],
            }[name]
            self._curves[name] = Curve.through([(float(x), y) for x, y in points])
        return self._curves[name]


def work_of(layer: LayerFacts, load: Load, hidden: int, tp: int = 1) -> Work:
    """What a layer has to do for a row, as profiles measure it.

    hidden   the columns that stay whole under tp; a site's other side is cut
    """
    sites = layer.sites
    widths = [_width(site.inner, site.outer, hidden, tp) for site in sites]
    per_rank = [sum(width * site.ranks[job] for width, site in zip(widths, sites, strict=True))
                for job in range(len(load.tokens))]  # fmt: skip
    attention = layer.attention[0] if layer.attention else None
    squares = load.squares
    if attention is not None and attention.window > 0:
        squares = min(squares, float(2 * load.total * attention.window))
    return Work(
        tokens=load.total,
        squares=squares,
        sites=len(sites),
        job_sites=sum(
            rank > 0 and n > 0
            for site in sites
            for n, rank in zip(load.tokens, site.ranks, strict=True)
        ),
        site_tokens=load.total * sum(widths),
        rank_tokens=sum(n * rank for n, rank in zip(load.tokens, per_rank, strict=True)),
    )


def _width(inner: int, outer: int, hidden: int, tp: int) -> float:
    if tp == 1:
        return inner + outer
    return hidden + (inner + outer - hidden) / tp


def trained_in(facts: ModelFacts, plan: Plan, layers: range) -> list[float]:
    """Numbers of each job that one process trains in some layers.

    Of a site's two halves the one that tp cuts is a part, the other one whole.
    """
    tp = plan.mesh.tp
    share = 1.0 if tp == 1 else 0.5 + 0.5 / tp
    every = [facts.layers[place].trained for place in layers]
    return [share * sum(own) for own in zip(*every, strict=True)]
