"""How long one round takes under a plan.

Replicas run their parts of a round one after the other, or as a pipeline, whose schedule is
simulated event by event. Sharded weights are gathered while the layer before computes, in a
pipeline by each micro-batch anew unless they are kept for the round; what tensor parallelism says
is not hidden but for nano-batches. Then gradients are summed and optimizers step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tlora_fx.cost.demand import Array
from tlora_fx.cost.fit import UNFUSED_MS, BaseFit, CollectiveTimes, Curve, LayerTimes, Work, fit
from tlora_fx.cost.hardware import Tier, gpu_of_device, wants_peer_copies
from tlora_fx.cost.layouts import Groups, Layouts, Pairs, Places
from tlora_fx.cost.load import Load, Round
from tlora_fx.cost.model_facts import CAPTURED_TOKENS, LayerFacts, ModelFacts
from tlora_fx.cost.pipeline_simulation import Order, Times, schedule_order, simulate
from tlora_fx.cost.plan import MeshShape, Plan, Schedule
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import carried

# How long a step takes under a plan, from a profile's times and a model's facts.


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


#: Hidden columns times this many: where attention costs as much as all else (see rows.Cutting).
SQUARE = 12.0
#: What Python does for one gather, on the hosts of two and of four H200: a layer of Llama-3-8B's
#: shape took 1.8 and 2.0 ms more than a whole one, forward and backward, where the host was slower.
GATHER_HOST_MS = 0.95
#: Rows so small that a layer's time is the host's, where layers are not captured.
HOST_BOUND_TOKENS = 512


@dataclass(frozen=True, slots=True)
class StepTime:
    """Milliseconds of one round, in parts that add up.

    host        packing rows
    compute     the busiest process's work, communication of tp and waiting for weights included
    bubble      waiting of a pipeline
    reduce      sums of gradients
    optimizer   of all jobs
    """

    host: float
    compute: float
    bubble: float
    reduce: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """The whole round."""
        return (self.host + self.compute + self.bubble + self.reduce + self.optimizer) * 1e-3


def step_time(cost: CostModel, plan: Plan, work: Round) -> StepTime:
    """The time of a round; the same plan and round give the same number everywhere."""
    parts = work.parts(plan.parts, SQUARE * cost.facts.hidden)
    replicas = [parts[place :: plan.mesh.dp] for place in range(plan.mesh.dp)]
    busiest = max(replicas, key=lambda own: sum(_measure(load, cost) for load in own))
    if plan.mesh.pp > 1:
        compute, bubble = _pipeline_ms(cost, plan, busiest)
    else:
        compute, bubble = sum(row_ms(cost, plan, load) for load in busiest), 0.0
    stages = [_held(cost, plan, process) for process in range(plan.mesh.pp)]
    per_stage = [trained_in(cost.facts, plan, layers) for layers in stages]
    shares = [len(layers) / max(len(cost.facts.layers), 1) for layers in stages]
    return StepTime(
        host=cost.host_ms(work.load.total),
        compute=compute,
        bubble=bubble,
        reduce=max(_reduce_ms(cost, plan, sum(own)) for own in per_stage),
        optimizer=max(
            cost.optimizer_ms([round(n * share) for n in cost.facts.tensors], list(map(int, own)))
            for own, share in zip(per_stage, shares, strict=True)
        ),
    )


def row_ms(cost: CostModel, plan: Plan, load: Load) -> float:
    """Forward and backward of one row by a process that runs all layers.

    As a CUDA graph where it is small, both the plan and the model let rows run so, and a sharded
    base lies in one node, where processes reach each other's memory.
    """
    if load.total == 0:
        return 0.0
    sharded = plan.shard_base and plan.mesh.dp > 1
    near = not sharded or cost.gathers_by_copies(plan.mesh)
    small = load.total <= CAPTURED_TOKENS * plan.mesh.tp
    captured = small and plan.captures and cost.facts.captures and near
    times = cost.captured if captured else cost
    if sharded:
        host = None if captured else cost
        layers = range(len(cost.kinds))
        return sum(_gathered_ms(times, plan, layers, load, host, first=True, last=True))
    loss_forward, loss_backward = times.loss_ms(load, plan.mesh)
    return _layers_ms(times, plan, load) + times.root_ms(load) + loss_forward + loss_backward


def _gathered_ms(
    cost: CostModel,
    plan: Plan,
    layers: range,
    load: Load,
    launched: CostModel | None,
    *,
    first: bool,
    last: bool,
    kept: bool = False,
) -> tuple[float, float]:
    """A run of layers whose weights are gathered, on one row: forward, backward.

    launched      has the times of layers that the host launches; None where it launches none
    first, last   whether embeddings, and the loss, belong to it
    kept          what was gathered for a row before is still there; embeddings never are
    """
    kinds = {cost.kinds[place] for place in layers}
    each = {kind: forward_ms(cost, plan, kind, load) for kind in kinds}
    home = {kind: backward_ms(cost, plan, kind, load) for kind in kinds}
    loss_forward, loss_backward = cost.loss_ms(load, plan.mesh) if last else (0.0, 0.0)
    own = [cost.kinds[place] for place in layers]
    forward = [cost.root_ms(load) if first else 0.0, *(each[kind] for kind in own), loss_forward]
    backward = [0.0, *(home[kind] for kind in own), loss_backward]
    root, *every, head = _gathers(cost, plan)
    nothing = (0.0, 0.0)
    weights = [*(every[place] for place in layers), head if last else nothing]
    ahead = [root if first else nothing, *([nothing] * len(weights) if kept else weights)]
    there = _overlapped(forward, ahead, cost.profile.slowdown)
    host = (0.0, 0.0) if launched is None else _host_ms(launched, plan, own, load)
    hooks = 0.0 if launched is None else GATHER_HOST_MS
    there = max(there, host[0] + (0.0 if kept else hooks * len(own)))
    if plan.keep_gathered:
        return there, max(sum(backward), host[1])
    used = [(ms, gather) for ms, gather in zip(backward[1:], weights, strict=True) if ms > 0]
    back = [list(one) for one in zip(*reversed(used), strict=True)] or [[], []]
    learning = sum(home[kind] > 0 for kind in own)
    return there, max(
        _overlapped(back[0], back[1], cost.profile.slowdown),
        host[1] + hooks * learning,
    )


def _host_ms(cost: CostModel, plan: Plan, kinds: Sequence[int], load: Load) -> tuple[float, float]:
    """What the host takes to launch layers, forward and backward: their time on a small row."""
    small = _split(load, max(1, load.total // HOST_BOUND_TOKENS))
    each = {kind: cost.layer(kind, small, plan.mesh.tp) for kind in set(kinds)}
    forward = sum(each[kind].forward for kind in kinds)
    backward = sum(each[kind].backward for kind in kinds)
    again = sum(each[kind].again for kind in kinds if each[kind].backward) if plan.recompute else 0
    return forward, backward + again


def _layers_ms(cost: CostModel, plan: Plan, load: Load) -> float:
    """All layers, forward and backward, one after the other."""

    def both(place: int) -> float:
        return forward_ms(cost, plan, place, load) + backward_ms(cost, plan, place, load)

    return cost.summed(range(len(cost.kinds)), both)


def forward_ms(cost: CostModel, plan: Plan, place: int, load: Load) -> float:
    """One layer's forward, with what tp says in it."""
    return _with_talk(cost, plan, place, load, "forward")


def backward_ms(cost: CostModel, plan: Plan, place: int, load: Load) -> float:
    """One layer's backward; with its forward again where the plan computes layers again."""
    if cost.layer(place, load, plan.mesh.tp).backward == 0:
        return 0.0
    once = _with_talk(cost, plan, place, load, "backward")
    return once + (_with_talk(cost, plan, place, load, "again") if plan.recompute else 0.0)


def _with_talk(cost: CostModel, plan: Plan, place: int, load: Load, direction: str) -> float:
    """Compute and two sums of the hidden state; nano-batches hide the shorter of both.

    source   field notes on nano-batching: T = max(C, M) + min(C, M) / N, C of N smaller rows
    """
    tp, count = plan.mesh.tp, plan.nano_batches
    if tp == 1:
        return float(getattr(cost.layer(place, load), direction))
    tier = cost.cluster.tier(plan.mesh, "tp")
    payload = load.total * cost.facts.hidden * cost.facts.itemsize
    part = _split(load, count)
    compute = count * float(getattr(cost.layer(place, part, tp), direction))
    talk = 2 * count * cost.collectives.ms("all-reduce", tier, tp, payload / count)
    if count == 1:
        return compute + talk
    return max(compute, talk) + min(compute, talk) / count


def _split(load: Load, count: int) -> Load:
    """One of so many equal parts."""
    if count == 1:
        return load
    tokens = tuple(-(-n // count) for n in load.tokens)
    return Load(
        tokens, load.squares / count, -(-load.sequences // count), -(-load.targets // count)
    )


def _gathers(cost: CostModel, plan: Plan) -> list[tuple[float, float]]:
    """For the root, each layer and the loss: gathering its weights, and what that takes of compute.

    A collective's result is copied to where it is read. What peers copy arrives there, but they
    write and read as many bytes beside the compute (two H200: 13 ms a row of 1,280 tokens).
    """
    facts, mesh = cost.facts, plan.mesh
    tier = cost.cluster.tier(mesh, "dp")
    sizes = [facts.root_bytes, *(one.weight_bytes / mesh.tp for one in facts.layers)]
    sizes.append(facts.head_bytes / mesh.tp)
    return [
        (cost.collectives.ms("all-gather", tier, mesh.dp, size), cost.copy_ms(size))
        for size in sizes
    ]


def _overlapped(
    compute: Sequence[float], gathers: Sequence[tuple[float, float]], slowdown: float
) -> float:
    """Modules in a row, each of which needs its weights gathered.

    A module's weights are gathered while the one before computes; what that takes of compute comes
    before their own. Compute beside a collective is slower.

    slowdown   of compute while a collective runs
    """
    gathered = free = started = 0.0
    for place, (ms, (gather, copy)) in enumerate(zip(compute, gathers, strict=True)):
        begin = max(gathered, started)
        gathered = begin + gather
        started = max(free, gathered)
        following = gathers[place + 1][0] if place + 1 < len(gathers) else 0.0
        beside = min(ms, following)
        free = started + copy + ms + (slowdown - 1) * beside
    return free


def stage_layers(plan: Plan, layers: int) -> list[range]:
    """The layers of each stage."""
    ends = [0, *plan.cuts, layers]
    return [range(low, high) for low, high in pairwise(ends)]


def stage_times(cost: CostModel, plan: Plan, loads: Sequence[Load]) -> Times:
    """Seconds of each stage and micro-batch, as the event simulation takes them."""
    stages = stage_layers(plan, len(cost.facts.layers))
    forward: list[list[float]] = []
    backward: list[list[float]] = []
    for stage, layers in enumerate(stages):
        first, last = stage == 0, stage == len(stages) - 1
        each = {load: _stage_ms(cost, plan, layers, load, first, last) for load in set(loads)}
        both = [each[load] for load in loads]
        if plan.shard_base and plan.mesh.dp > 1 and plan.keep_gathered:
            # The first micro-batch gathers for the whole round.
            both[0] = _gathered_ms(cost, plan, layers, loads[0], cost, first=first, last=last)
        forward.append([there * 1e-3 for there, _ in both])
        backward.append([back * 1e-3 for _, back in both])
    largest = max(load.total for load in loads)
    payload = largest * cost.facts.hidden * cost.facts.itemsize
    transfer = cost.collectives.ms("send", cost.cluster.tier(plan.mesh, "pp"), 2, payload)
    return Times(forward, backward, transfer=transfer * 1e-3)


def _stage_ms(
    cost: CostModel, plan: Plan, layers: range, load: Load, first: bool, last: bool
) -> tuple[float, float]:
    """One stage on one row: forward, backward; what is kept for a round is there."""
    if plan.shard_base and plan.mesh.dp > 1:
        return _gathered_ms(
            cost, plan, layers, load, cost, first=first, last=last, kept=plan.keep_gathered
        )
    there = cost.summed(layers, lambda place: forward_ms(cost, plan, place, load))
    back = cost.summed(layers, lambda place: backward_ms(cost, plan, place, load))
    loss = cost.loss_ms(load, plan.mesh) if last else (0.0, 0.0)
    return there + loss[0] + (cost.root_ms(load) if first else 0.0), back + loss[1]


@lru_cache(maxsize=256)
def _order(schedule: Schedule, stages: int, processes: int, micro_batches: int) -> Order:
    return schedule_order(schedule, stages, processes, micro_batches)


def _pipeline_ms(cost: CostModel, plan: Plan, loads: Sequence[Load]) -> tuple[float, float]:
    """The busiest process's work, and what the pipeline waits beyond it."""
    order = _order(plan.schedule, plan.stages, plan.mesh.pp, len(loads))
    found = simulate(order, stage_times(cost, plan, loads), plan.stages)
    busy = max(found.busy_seconds)
    return busy * 1e3, (found.makespan_seconds - busy) * 1e3


def _held(cost: CostModel, plan: Plan, process: int) -> range:
    """The layers of a process; of an interleaved one those of its first stage, times its stages."""
    stages = stage_layers(plan, len(cost.facts.layers))
    own = stages[process :: plan.mesh.pp]
    return range(own[0].start, own[0].start + sum(map(len, own)))


def _reduce_ms(cost: CostModel, plan: Plan, trained: float) -> float:
    """Sums of adapter gradients over replicas, and of replicated halves over tp."""
    mesh, payload = plan.mesh, trained * cost.facts.trained_bytes
    replicas = cost.cluster.tier(mesh, "dp"), mesh.dp, payload
    halves = cost.cluster.tier(mesh, "tp"), mesh.tp, payload / 2
    return sum(cost.collectives.ms("all-reduce", *group) for group in (replicas, halves))


def _measure(load: Load, cost: CostModel) -> float:
    return load.total + load.squares / (SQUARE * cost.facts.hidden)


# Milliseconds of one step of each pair of a group and a layout, term by term.
#
# The terms are those of tlora_fx/cost/step_time.py, summed over layers before and not after they
# are asked for: all are straight in the sums that a `Demand` holds, but for the curves of a row's
# tokens.


#: All-reduces of a layer in one direction under tensor parallelism.
TALKS = 2
#: As tlora_fx/cost/step_time.py has them.
GATHER_HOST_MS_estimator_time, HOST_BOUND_TOKENS_estimator_time = 0.95, 512
#: As `BaseFit` names curves and slopes of layers.
DIRECTIONS = ("forward", "backward")
Terms = dict[str, Array]


@dataclass(frozen=True, slots=True)
class StepClock:
    """Tells times of pairs.

    fused          adapters run in shared kernels; otherwise one after the other
    nano_batches   numbers of them to choose from, where tp talks
    """

    fit: BaseFit
    layouts: Layouts
    fused: bool = True
    nano_batches: Sequence[int] = (1,)

    def terms(self, groups: Groups, pairs: Pairs) -> Terms:
        """Milliseconds of a step by name [m]; they add up, an overlap being negative."""
        fit, rows, share = self.fit, pairs.rows, pairs.share
        base = rows * (self._curve("forward", pairs) + self._curve("backward", pairs))
        attention, adapters = self._beside(groups, pairs)
        targets = groups.column("targets")[pairs.group] * share
        talk, loss_talk = self._talk(pairs, targets)
        found = fit.loss.find(targets / rows)
        loss = rows * (self._loss("forward", pairs, found) + self._loss("backward", pairs, found))
        terms = {
            "host": fit.host.at(0, fit.host.find(groups.column("tokens")))[pairs.group],
            "base": base,
            "attention": attention,
            "adapters": adapters,
            "launching": self._launching(groups, pairs),
            "root": rows * self._curve("root", pairs),
            "loss": loss / self.layouts.tp[pairs.layout] + loss_talk,
            "tensor-parallel": talk,
        }
        if max(self.nano_batches) > 1:
            terms["overlap"] = self._overlap(groups, pairs)
        self._staged(pairs, terms)
        return terms | self._end(groups, pairs)

    def gathers(self, groups: Groups, pairs: Pairs) -> Array:
        """What a sharded base adds [m]: waiting for weights, unpacking them, slower compute.

        source   tlora_fx/cost/step_time.py, `_gathered_ms`, with layers that are all alike
        """
        whole = pairs.rows * self._row(groups, pairs)
        tables = len(self.fit.tp)
        # Weights are copied from neighbours in a node, and no graph holds a collective's gathers.
        near = self.layouts.near[pairs.layout, pairs.reach]
        pairs = replace(pairs, size=np.where(near, pairs.size, pairs.launched(tables).size))
        fit, facts, rows = self.fit, self.fit.facts, pairs.rows
        layers, slower = len(facts.layers), fit.profile.slowdown - 1
        tp = self.layouts.tp[pairs.layout]
        start, per_byte = pairs.links(self.layouts.gather)
        weights = sum(one.weight_bytes for one in facts.layers) / layers / tp
        sizes = (np.full_like(tp, facts.root_bytes), weights, facts.head_bytes / tp)
        root, layer, head = (np.where(size > 0, start + per_byte * size, 0.0) for size in sizes)
        unpack_root, unpack, unpack_head = (size * self.layouts.copy_per_byte for size in sizes)
        targets = groups.column("targets")[pairs.group] * pairs.share
        found, talk = fit.loss.find(targets / rows), self._talk(pairs, targets)
        loss_there = self._loss("forward", pairs, found) / tp
        loss_back = self._loss("backward", pairs, found) / tp + talk[1] / rows
        ends = self._curve("root", pairs)
        there, back = (one / layers for one in self._directions(groups, pairs, talk[0]))

        def beside(compute: Array, copied: Array, following: Array) -> Array:
            busy = compute + copied + slower * np.minimum(compute, following)
            return np.asarray(np.maximum(busy, following))

        forward = root + beside(ends, unpack_root, layer) + beside(there, unpack, head)
        forward += (layers - 1) * beside(there, unpack, layer) + loss_there + unpack_head
        backward = head + beside(loss_back, unpack_head, layer) + back + unpack
        backward += (layers - 1) * beside(back, unpack, layer)
        host = self._host(groups, pairs.launched(tables))
        graphs = pairs.size < tables
        forward = np.where(
            graphs, forward, np.maximum(forward, host[0] + GATHER_HOST_MS_estimator_time * layers)
        )
        backward = np.where(
            graphs, backward, np.maximum(backward, host[1] + GATHER_HOST_MS_estimator_time * layers)
        )
        return np.asarray(rows * (forward + backward) - whole)

    def _row(self, groups: Groups, pairs: Pairs) -> Array:
        """What `terms` has for one row of a base that is not sharded."""
        tp, targets = self.layouts.tp[pairs.layout], groups.column("targets")[pairs.group]
        targets = targets * pairs.share
        found, talk = self.fit.loss.find(targets / pairs.rows), self._talk(pairs, targets)
        loss = self._loss("forward", pairs, found) + self._loss("backward", pairs, found)
        there, back = self._directions(groups, pairs, talk[0])
        row = self._curve("root", pairs) + there + back + loss / tp + talk[1] / pairs.rows
        return np.asarray(row)

    def _host(self, groups: Groups, pairs: Pairs) -> tuple[Array, Array]:
        """What the host takes to launch all layers of a row: their time on a small one."""
        count = np.maximum(1.0, pairs.tokens // HOST_BOUND_TOKENS_estimator_time)
        found = self.fit.row.find(pairs.tokens / count)
        both = []
        floors = zip(DIRECTIONS, self._slopes(), self._floors(groups, pairs), strict=True)
        for name, slopes, floor in floors:
            each, work = self._adapted(groups, slopes)
            part = pairs.share * pairs.table(work) / (pairs.rows * count)
            curve = self.fit.row.at(self.fit.curve(name) + pairs.size, found)
            both.append(np.maximum(curve + pairs.table(each) + part, floor))
        return both[0], both[1]

    def _loss(self, name: str, pairs: Pairs, found: tuple[Places, Array]) -> Array:
        return self.fit.loss.at(self.fit.loss_curve(name, pairs.size), found)

    def _curve(self, name: str, pairs: Pairs) -> Array:
        return self.fit.row.at(self.fit.curve(name) + pairs.size, pairs.found)

    def _beside(self, groups: Groups, pairs: Pairs) -> tuple[Array, Array]:
        """Attention, and adapters, of the busiest replica in both directions."""
        fit = self.fit
        slopes = fit.forward + fit.backward
        attention = groups.squares * slopes[:, 0]
        if self.fused:
            work = groups.work(slopes) - attention
            each = groups.each_row(slopes, fit.sites)
        else:
            work = np.zeros_like(attention)
            each = groups.adapters * (UNFUSED_MS * len(fit.facts.layers)) + 0 * slopes[:, 0]
        adapters = pairs.rows * pairs.table(each) + pairs.share * pairs.table(work)
        return pairs.share * pairs.table(attention), adapters

    def _talk(self, pairs: Pairs, targets: Array) -> tuple[Array, Array]:
        """All-reduces of hidden states in layers, and of the gradient of the head's input."""
        facts = self.fit.facts
        start, per_byte = pairs.links(self.layouts.talk)
        per_token = per_byte * (facts.hidden * facts.itemsize)
        mine = pairs.tokens * pairs.rows
        each = 2 * TALKS * len(facts.layers)
        return each * (start * pairs.rows + per_token * mine), (
            start * pairs.rows + per_token * targets
        )

    def _staged(self, pairs: Pairs, terms: Terms) -> None:
        """Share out compute over stages; what they wait for each other is a term."""
        pp = self.layouts.pp[pairs.layout]
        if (pp == 1).all():
            return
        work = sum((terms[name] for name in terms if name != "host"), np.zeros_like(pp))
        for name in terms.keys() - {"host"}:
            terms[name] = terms[name] / pp
        facts = self.fit.facts
        start, per_byte = pairs.links(self.layouts.send)
        sent = start + per_byte * pairs.tokens * (facts.hidden * facts.itemsize)
        terms["bubble"] = (pp - 1) / pairs.rows * work / pp + 2 * (pp - 1) * sent

    def _end(self, groups: Groups, pairs: Pairs) -> Terms:
        """Sums of gradients, and optimizers, of the part that a process trains."""
        facts, pp = self.fit.facts, self.layouts.pp[pairs.layout]
        part = trained_part(self.layouts.tp[pairs.layout]) / pp
        numbers = groups.column("parameters")[pairs.group] * part
        start, per_byte = pairs.links(self.layouts.reduce)
        job, tensor, number = self.fit.optimizer
        steps = groups.column("jobs") * job
        return {
            "reduce": np.where(numbers > 0, start, 0.0) + per_byte * numbers * facts.trained_bytes,
            "optimizer": steps[pairs.group]
            + tensor * groups.column("tensors")[pairs.group] / pp
            + number * numbers,
        }

    def _directions(self, groups: Groups, pairs: Pairs, talk: Array) -> tuple[Array, Array]:
        """Milliseconds of all layers on one row, forward and backward, talk included."""
        talk = talk / 2 / pairs.rows
        each = zip(self._computed(groups, pairs), self._floors(groups, pairs), strict=True)
        there, back = (np.maximum(device, host) + talk for device, host in each)
        return there, back

    def _launching(self, groups: Groups, pairs: Pairs) -> Array:
        """What a round's layers wait for the host, which launches them."""
        if (pairs.size < len(self.fit.tp)).all():
            return np.zeros_like(pairs.tokens)
        each = zip(self._computed(groups, pairs), self._floors(groups, pairs), strict=True)
        waits = sum(np.maximum(host - device, 0.0) for device, host in each)
        return np.asarray(pairs.rows * waits)

    def _computed(self, groups: Groups, pairs: Pairs) -> list[Array]:
        """The device's milliseconds of all layers on one row, forward and backward."""
        return [
            self._curve(name, pairs) + self._part(groups, pairs, slopes) / pairs.rows
            for name, slopes in zip(DIRECTIONS, self._slopes(), strict=True)
        ]

    def _floors(self, groups: Groups, pairs: Pairs) -> list[Array]:
        """The host's; nothing where rows run as CUDA graphs."""
        both = []
        for host in (self.fit.forward_host, self.fit.backward_host):
            each, _ = self._adapted(groups, host[:, 1:])
            both.append(pairs.table(host[:, 0] + each))
        return both

    def _slopes(self) -> tuple[Array, Array]:
        return self.fit.forward, self.fit.backward

    def _part(self, groups: Groups, pairs: Pairs, slopes: Array) -> Array:
        """One direction of what `_beside` says: a round's milliseconds, rows' own included."""
        each, work = self._adapted(groups, slopes)
        return pairs.rows * pairs.table(each) + pairs.share * pairs.table(work)

    def _adapted(self, groups: Groups, slopes: Array) -> tuple[Array, Array]:
        """[n, tp] of each row however long it is, and of a round's tokens; one direction."""
        if self.fused:
            return groups.each_row(slopes, self.fit.sites), groups.work(slopes)
        unfused = UNFUSED_MS / 2 * len(self.fit.facts.layers)
        return groups.adapters * unfused + 0 * slopes[:, 0], groups.squares * slopes[:, 0]

    def _overlap(self, groups: Groups, pairs: Pairs) -> Array:
        """What the best number of nano-batches takes less than one, never positive.

        source   field notes on nano-batching: T = max(C, M) + min(C, M) / N, where C is N rows of
                 an N-th of the tokens, so that what a row costs at least is paid N times; nothing
                 of it is a CUDA graph
        """
        late = pairs.launched(len(self.fit.tp))
        both = zip(self._computed(groups, pairs), self._floors(groups, pairs), strict=True)
        wholes = [np.maximum(device, host) for device, host in both]
        floors = self._floors(groups, late)
        start, per_byte = pairs.links(self.layouts.talk)
        facts, best = self.fit.facts, np.zeros_like(pairs.tokens)
        layers = TALKS * len(facts.layers)
        bytes_ = pairs.tokens * (facts.hidden * facts.itemsize)
        for count in self.nano_batches:
            saved = np.zeros_like(best)
            found = self.fit.row.find(pairs.tokens / count)
            talk = layers * (count * start + per_byte * bytes_)
            once = layers * (start + per_byte * bytes_)
            for place, name in enumerate(DIRECTIONS):
                slopes, whole = self._slopes()[place], wholes[place]
                each = late.table(self._adapted(groups, slopes)[0])
                cut = count * self.fit.row.at(self.fit.curve(name) + late.size, found)
                cut += self._part(groups, late, slopes) / late.rows + (count - 1) * each
                cut = np.maximum(cut, count * floors[place])
                overlapped = np.maximum(cut, talk) + np.minimum(cut, talk) / count
                saved += overlapped - (whole + once) if count > 1 else 0.0
            best = np.minimum(best, np.where(start > 0, saved, 0.0))
        return np.asarray(best * pairs.rows)


def trained_part(tp: Array) -> Array:
    """Of an adapter's halves the one that tp cuts is a part, the other one whole."""
    return np.where(tp > 1, 0.5 + 0.5 / tp, 1.0)
