"""Predict step times: of plans, and of groups of jobs, many at once.

A row costs what its layers, embedding, head and loss cost, and what processes of tensor parallelism
say to each other, which is not hidden but for nano-batches. Small rows run as CUDA graphs where
they can; otherwise a layer takes as long as the slower of the device and the host. Sharded weights
are gathered while the layer before computes, in a pipeline by each micro-batch anew unless they are
kept for the round. A pipeline's schedule is simulated event by event. Then gradients are summed and
optimizers step. Times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from tlora_fx.cost.fit import (
    TIMES,
    CollectiveTimes,
    Curve,
    Curves,
    Kind,
    LayerTables,
    Line,
    Links,
    fit_nonnegative,
)
from tlora_fx.cost.hardware import LinkTier, gpu_of_device
from tlora_fx.cost.load import Array, Load, Mask, Round, Rows, is_small
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.pipeline_simulation import Order, Times, schedule_order, simulate
from tlora_fx.cost.plan import BudgetPrice, MeshShape, Plan, Schedule
from tlora_fx.cost.profile import Operation, Profile
from tlora_fx.host.environment import wants_peer_copies

#: Hidden columns times this many: where attention costs as much as all else (see `Cutting.of`).
SQUARE = 12.0
#: What Python does for one gather, on the hosts of two and of four H200: a layer of Llama-3-8B's
#: shape took 1.8 and 2.0 ms more than a whole one, forward and backward, where the host was slower.
GATHER_HOST_MS = 0.95
#: Rows so small that a layer's time is the host's, where layers are not captured.
HOST_BOUND_TOKENS = 512
#: All-reduces of a layer in one direction under tensor parallelism.
ALL_REDUCES_PER_LAYER = 2
GPUS_PER_NODE = 8
#: Reached part of a memory's bandwidth in copies.
COPY = 0.8
#: Milliseconds that one adapter adds to one linear, forward and backward, where no kernel is
#: fused: each adapter is two small products in turn. Measured: benchmarks/results/
#: site-2026-11-22.json, row layer-8, arm `loop` in eager mode, (21.68 - 9.49) ms over 56 adapters.
UNFUSED_MS = 0.2177
Terms = dict[str, Array]


@dataclass(slots=True)
class CostModel:
    """Costs of a model's parts on one kind of hardware.

    lowest      the first layer whose backward anybody needs; None: the facts' own
    fused       False: adapters run one after the other
    estimated   whether anything that was asked for was not measured as it is
    prices      of recompute budgets, by `Plan.budget_key`; one that is not there counts as a share
                of every layer
    kinds       layers that cost the same
    kind_of     for each layer its kind
    """

    facts: ModelFacts
    profile: Profile
    gpus_per_node: int = GPUS_PER_NODE
    lowest: int | None = None
    fused: bool = True
    estimated: bool = field(init=False)
    prices: dict[tuple[float, int], BudgetPrice] = field(default_factory=dict)
    collectives: CollectiveTimes = field(init=False)
    kinds: tuple[Kind, ...] = field(init=False)
    kind_of: tuple[int, ...] = field(init=False)
    ends: Ends = field(init=False)
    _clocks: dict[tuple[tuple[int, ...], float, float], RowClock] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self.collectives = CollectiveTimes(self.profile)
        self.estimated = self.profile.estimated
        self.ends = Ends(self.profile)
        lowest = self.facts.lowest if self.lowest is None else self.lowest
        alike: dict[tuple[object, ...], list[int]] = {}
        for index, layer in enumerate(self.facts.layers):
            role = "below" if index < lowest else "first" if index == lowest else "above"
            alike.setdefault((role, layer.structure, layer.sites), []).append(index)
        self.kinds = tuple(
            Kind(self.facts.layers[indices[0]], str(role)) for (role, *_), indices in alike.items()
        )
        of = {index: kind for kind, indices in enumerate(alike.values()) for index in indices}
        self.kind_of = tuple(of[index] for index in range(len(of)))

    def clock(
        self, tp: tuple[int, ...], *, recompute: float = 0.0, summed: float | None = None
    ) -> RowClock:
        """Clock of rows, by indices of sizes of tensor parallelism.

        recompute   share of layers that is computed again in the backward
        summed      share of layers that is summed over processes again; None: `recompute`
        """
        summed = recompute if summed is None else summed
        key = tp, recompute, summed
        if key not in self._clocks:
            tables = LayerTables.of(self.facts, self.profile, self.kinds, tp)
            self.estimated = self.estimated or not all(tables.exact)
            if not self.fused:
                tables = tables.unfused(UNFUSED_MS / 2)
            self._clocks[key] = RowClock(self, tables, recompute, summed)
        return self._clocks[key]

    def optimizer_ms(self, tensors: Sequence[float], numbers: Sequence[float] | Array) -> float:
        """The end of a step, one job after the other.

        tensors, numbers   of each job in this process
        """
        own = [(count, number) for count, number in zip(tensors, numbers, strict=True) if number]
        counts, trained = (sum(column) for column in zip(*own, strict=True)) if own else (0, 0)
        return float(self.ends.optimizer_ms(len(own), counts, trained))

    def rows(self, loads: Sequence[Load], tp: int) -> Rows:
        """Loads as rows that are launched, by processes that cut matrices into tp parts."""
        layers = [kind.layer for kind in self.kinds]
        return Rows.of(layers, loads, self.facts.hidden, tp)

    def tier(self, mesh: MeshShape, dimension: str) -> LinkTier:
        """The furthest that two neighbours along a dimension are apart.

        Ranks count along tp first, then dp, then pp.
        """
        span = {"tp": mesh.tp, "dp": mesh.tp * mesh.dp, "pp": mesh.size}[dimension]
        return "node" if span <= self.gpus_per_node else "network"

    def links(self, mesh: MeshShape, *, sharded: bool = True) -> Links:
        """Lines of the collectives in a mesh.

        sharded   weights are gathered
        """
        return links_of(self.collectives, mesh, lambda name: self.tier(mesh, name), sharded=sharded)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a token between layers."""
        return self.facts.hidden * self.facts.itemsize

    @property
    def copy_ms(self) -> float:
        """Milliseconds to copy a byte within a device, one read and one write."""
        gpu = gpu_of_device(self.profile.hardware.gpu)
        return 2 / (gpu.memory_gbps * 1e6 * COPY) if gpu else 0.0


def links_of(
    times: CollectiveTimes,
    mesh: MeshShape,
    tier: Callable[[str], LinkTier],
    *,
    sharded: bool = True,
    slower: float = 1.0,
) -> Links:
    """Lines of the collectives in a mesh, over links of some tiers.

    slower   so many times the network's times
    """

    def line(operation: Operation, dimension: str) -> Line:
        count = getattr(mesh, dimension)
        processes = 2 if operation == "send" and count > 1 else count
        link = tier(dimension)
        return times.line(operation, link, processes).slower(slower if link == "network" else 1.0)

    comm = line("all-reduce", "tp")
    return Links(
        comm=comm,
        reduce=line("all-reduce", "dp").plus(comm, 0.5),
        gather=line("all-gather", "dp") if sharded else Line(),
        send=line("send", "pp"),
        copies=np.array(wants_peer_copies() and tier("dp") == "node"),
    )


class Ends:
    """Work before and behind the layers, by a profile: root, head and loss, host, optimizer.

    Of root and loss there are times as CUDA graphs, and where the host launches them.

    root_bytes   what embedding, positions and last norm leave until the backward, of tokens
    loss_saved   what head and loss leave, and what they take at most beside it, of targets
    loss_peak
    host_ms      packing rows, of a round's tokens
    overlaps     whether rows are packed while the device runs the round before
    """

    def __init__(self, profile: Profile) -> None:
        both = (profile.as_captured(), profile)
        root = [_curves(one.root, "tokens", ("forward_ms", "backward_ms")) for one in both]
        loss = [_curves(one.loss, "targets", ("forward_ms", "backward_ms")) for one in both]
        self._root = Curves.of([curve for own in root for curve in own], (2, 2)).summed(1)
        self._loss = Curves.of([curve for own in loss for curve in own], (2, 2))
        self._loss_both = self._loss.summed(1)
        sizes = _curves(profile.loss, "targets", ("saved_bytes", "peak_bytes"))
        self.loss_saved, self.loss_peak = (Curves.of([curve]) for curve in sizes)
        self.root_bytes = Curves.of(_curves(profile.root, "tokens", ("saved_bytes",)))
        self.host_ms = Curves.of(_curves(profile.host, "tokens", ("ms",)))
        self.overlaps = profile.hardware.gpu != "cpu"
        points = profile.optimizer
        rows = np.array([[1.0, one.tensors, one.parameters] for one in points])
        values = np.array([one.ms for one in points])
        self._optimizer = fit_nonnegative(rows, values) if points else np.zeros(3)

    def waits_ms(self, packing: Array, rest: Array | float) -> Array:
        """Milliseconds that rounds wait for their rows to be packed [m].

        Where a process has jobs that are not updated in one step (see `RoundEnd`), each round's end
        is looked at before the next one begins; nothing is known of that here.

        packing   what that takes, by `host_ms`
        rest      what else rounds take
        """
        return np.maximum(packing - rest, 0.0) if self.overlaps else packing

    def root_ms(self, tokens: Array, launched: Mask) -> Array:
        """Embedding, positions and last norm, forward and backward [m]."""
        return self._root.pick(launched.astype(np.intp), tokens)

    def loss_ms(self, targets: Array, launched: Mask) -> tuple[Array, Array]:
        """Head and loss, forward and backward [m] each."""
        mode, found = launched.astype(np.intp), self._loss.find(targets)
        return self._loss.at((mode, 0), found), self._loss.at((mode, 1), found)

    def loss_both_ms(self, targets: Array, launched: Mask) -> Array:
        """Head and loss, forward and backward together [m]."""
        return self._loss_both.pick(launched.astype(np.intp), targets)

    def loss_bytes(self, targets: Array, tp: Array | float = 1.0) -> Array:
        """The most that head and loss take at once [m]."""
        return self.loss_saved(targets) + self.loss_peak(targets) / tp

    def optimizer_ms(
        self, jobs: Array | float, tensors: Array | float, numbers: Array | float
    ) -> Array:
        """The end of a step, one job after the other, from what all of them have in a process."""
        job, tensor, number = self._optimizer
        return np.asarray(jobs * job + tensors * tensor + numbers * number)


def _curves(points: Sequence[object], of: str, names: Sequence[str]) -> list[Curve]:
    """Curves through points, one for each name."""
    return [
        Curve.through([(float(getattr(one, of)), getattr(one, name)) for one in points])
        for name in names
    ]


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers that a process runs, in their order.

    first, last   whether the embedding, and head and loss, belong to them
    """

    layers: Sequence[int]
    first: bool = True
    last: bool = True


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding of a base over replicas, as its rows read it.

    small   parts of the rows, whose layers the host launches as long as it would those of the rows
    keep    gathered weights are kept from the forward to the backward
    kept    what was gathered for a row before is still there; embeddings never are
    """

    small: Rows
    keep: bool = False
    kept: bool = False


@dataclass
class RowClock:
    """Clock that tells times of rows.

    recompute   share of layers that is computed again in the backward
    summed      share of layers whose all-reduces run again there
    learns      [k] 1 where layers have a backward, 0 where not
    runs        [2, k] how often layers of each kind run, forward and backward
    sums        how often layers' all-reduces run
    curve       [t] milliseconds of all of them, of a row's tokens
    """

    cost: CostModel
    tables: LayerTables
    recompute: float = 0.0
    summed: float = 0.0

    def __post_init__(self) -> None:
        self.learns = np.array([float(kind.role != "below") for kind in self.cost.kinds])
        counts = self.counts(self.cost.kind_of)
        backward = counts * self.learns
        self.runs = np.array([counts + self.recompute * backward, backward])
        self.sums = float((counts + (1 + self.summed) * backward).sum())
        times = self.tables.curves
        device = Curves(times.starts, times.values[TIMES], times.slopes[TIMES])
        self.curve = device.weighted(self.runs)
        self._slopes = np.einsum("dk,dktw->ktw", self.runs, self.tables.slopes[TIMES])
        self._merged = self._slopes.sum(axis=0, keepdims=True)

    def counts(self, kinds: Sequence[int]) -> Array:
        """Number of layers of each kind [k]."""
        return np.bincount(kinds, minlength=len(self.learns)).astype(np.float64)

    def compute(self, rows: Rows) -> Array:
        """One layer of each kind, forward and backward, without what processes say [2, k, m]."""
        device = self.tables.values(rows, TIMES)
        return np.maximum(device, self.tables.launches(rows) * rows.launched)

    def row_terms(
        self, rows: Rows, tp: Array | float, links: Links, parts: Rows | None = None, nano: int = 1
    ) -> Terms:
        """Rows of processes that run all layers, whose base is not sharded [m]; they add up.

        parts   a nano-batch of each row, of which there are `nano`; None: the rows themselves
        source  field notes on nano-batching: T = max(C, M) + min(C, M) / N, C of N smaller rows
        """
        cost, part = self.cost, rows if parts is None else parts
        base, attention, adapters = self._device(part)
        comm = nano * ALL_REDUCES_PER_LAYER * links.comm(rows.tokens / nano * cost.hidden_bytes)
        loss = cost.ends.loss_both_ms(rows.targets, rows.launched)
        layers = {
            "base": base,
            "attention": attention,
            "adapters": adapters,
            "launching": self._waits(part),
        }
        if nano > 1:
            layers = {name: nano * term for name, term in layers.items()}
        terms = {
            **layers,
            "root": cost.ends.root_ms(rows.tokens, rows.launched),
            "loss": loss / tp + links.comm(rows.targets * cost.hidden_bytes),
            "tensor-parallel": self.sums * comm,
        }
        if nano > 1:
            compute = nano * self.compute(part)
            hidden = np.minimum(compute, comm) * (1 - 1 / nano)
            terms["overlap"] = -np.einsum("dk,dkm->m", self.runs, hidden)
        return terms

    def stage_ms(
        self,
        rows: Rows,
        tp: Array | float,
        links: Links,
        stage: Stage,
        *,
        parts: Rows | None = None,
        nano: int = 1,
        sharding: Sharding | None = None,
    ) -> tuple[Array, Array]:
        """Rows of a process that runs some layers: forward, backward [m].

        parts      a nano-batch of each row, as `row_terms` has them
        sharding   of the base; None where it is whole
        """
        cost = self.cost
        comm = nano * ALL_REDUCES_PER_LAYER * links.comm(rows.tokens / nano * cost.hidden_bytes)
        there, back = self._directions(rows if parts is None else parts, comm, nano)
        nothing = np.zeros(len(rows.tokens))
        root = cost.ends.root_ms(rows.tokens, rows.launched) if stage.first else nothing
        loss = nothing, nothing
        if stage.last:
            forward, backward = cost.ends.loss_ms(rows.targets, rows.launched)
            loss = forward / tp, backward / tp + links.comm(rows.targets * cost.hidden_bytes)
        kinds = [cost.kind_of[layer] for layer in stage.layers]
        if sharding is None:
            counts = self.counts(kinds)
            return counts @ there + root + loss[0], counts @ back + loss[1]
        weights = self._weights(stage, tp, links)
        # No row of the loss, no gather of its weights.
        some = loss[1] > 0
        gather = np.where(some, weights[-1][0], 0.0), np.where(some, weights[-1][1], 0.0)
        home: list[tuple[Array, Gather]] = [(loss[1], gather)] if stage.last else []
        modules = list(zip(kinds, weights[1:-1], strict=True))
        home += [(back[kind], own) for kind, own in reversed(modules) if self.learns[kind]]
        away = [root, *(there[kind] for kind in kinds), loss[0]]
        hosts = self._hosts(sharding, kinds)
        return self._gathered_ms(rows, away, weights, home, sharding, hosts)

    def _gathered_ms(
        self,
        rows: Rows,
        forward: Sequence[Array],
        weights: Sequence[Gather],
        backward: Sequence[tuple[Array, Gather]],
        sharding: Sharding,
        hosts: tuple[Array, Array],
    ) -> tuple[Array, Array]:
        """Modules in a row whose weights are gathered: forward, backward [m].

        weights    of the modules of the forward
        backward   of each module, from the last one on, with its weights
        hosts      what it takes the host at least
        """
        slowdown = self.cost.profile.slowdown
        ahead = [*weights[:1], *(_NOTHING for _ in weights[1:])] if sharding.kept else weights
        there = _overlapped(forward, ahead, slowdown)
        if sharding.keep:
            back = np.sum([ms for ms, _ in backward], axis=0)
        else:
            back = _overlapped([ms for ms, _ in backward], [own for _, own in backward], slowdown)
        there, back = (
            np.where(rows.launched, np.maximum(device, host), device)
            for device, host in zip((there, back), hosts, strict=True)
        )
        return there, back * (rows.tokens > 0)

    def _device(self, rows: Rows) -> tuple[Array, Array, Array]:
        """What the device takes in all layers for tokens, for attention and for adapters [m]."""
        slopes = self._merged if len(rows.work.squares) == 1 else self._slopes
        index = rows.load * slopes.shape[1] + rows.size

        def table(*fields: int) -> Array:
            terms = [rows.work[field] * slopes[:, None, :, field] for field in fields]
            summed: Array = np.asarray(sum(terms)).sum(axis=0)
            return np.asarray(summed.ravel().take(index))

        base = self.curve.pick(rows.size, rows.tokens)
        return base, rows.part * table(0), table(1, 2) + rows.part * table(3, 4)

    def _waits(self, rows: Rows) -> Array:
        """What layers wait for the host, which launches them [m]."""
        waits = np.zeros(len(rows.tokens))
        late = np.flatnonzero(rows.launched)
        if len(late) and self.tables.host.any():
            own = rows.only(late)
            behind = self.tables.launches(own) - self.tables.values(own, TIMES)
            waits[late] = np.einsum("dk,dkm->m", self.runs, np.maximum(behind, 0.0))
        return waits

    def _directions(self, part: Rows, comm: Array, nano: int) -> tuple[Array, Array]:
        """One layer of each kind with its all-reduces [k, m]: forward; backward, or both again.

        part   a nano-batch of each row, whose communication and compute overlap
        comm   [m] of all of them, in one direction
        """
        compute = nano * self.compute(part)
        there, back = np.maximum(compute, comm) + np.minimum(compute, comm) / nano
        again = self.summed * there + (self.recompute - self.summed) * compute[0]
        return there, (back + again) * self.learns[:, None]

    def _hosts(self, sharding: Sharding, kinds: Sequence[int]) -> tuple[Array, Array]:
        """What the host takes for layers, forward and backward: their time on a small row, hooks.

        Hooks gather weights.
        """
        there, back = self.compute(sharding.small)
        counts = self.counts(kinds)
        learns = counts * self.learns
        again = self.recompute * there
        hooks = GATHER_HOST_MS * (not sharding.kept), GATHER_HOST_MS * (not sharding.keep)
        return counts @ (there + hooks[0]), learns @ (back + again + hooks[1])

    def _weights(self, stage: Stage, tp: Array | float, links: Links) -> list[Gather]:
        """For the root, each layer and the loss: gathering its weights, and copying them.

        A collective's result is copied to where it is read. What peers copy arrives there, but they
        write and read as many bytes beside the compute (two H200: 13 ms a row of 1,280 tokens).
        """
        facts = self.cost.facts

        def gather(size: Array | float) -> Gather:
            return links.gather(size), self.cost.copy_ms * size

        sizes = [facts.layers[layer].weight_bytes for layer in stage.layers]
        each = {size: gather(size / tp) for size in set(sizes)}
        root = gather(facts.root_bytes) if stage.first else _NOTHING
        head = gather(facts.head_bytes / tp) if stage.last else _NOTHING
        return [root, *(each[size] for size in sizes), head]


Gather = tuple[Array | float, Array | float]
_NOTHING: Gather = (0.0, 0.0)


def _overlapped(compute: Sequence[Array], gathers: Sequence[Gather], slowdown: float) -> Array:
    """Modules in a row, each of which needs its weights gathered.

    A module's weights are gathered while the one before computes; what that takes of compute comes
    before their own. Compute beside a collective is slower.

    slowdown   of compute while a collective runs
    """
    gathered = free = started = np.zeros(1)
    ahead = [*(gather for gather, _ in gathers), 0.0][1:]
    for ms, (gather, copy), following in zip(compute, gathers, ahead, strict=True):
        gathered = np.maximum(gathered, started) + gather
        started = np.maximum(free, gathered)
        free = started + copy + ms + (slowdown - 1) * np.minimum(ms, following)
    return free


@dataclass(frozen=True, slots=True)
class StepTime:
    """Milliseconds of one round, in parts that add up.

    host        waiting for rows to be packed
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
        """Seconds of the whole round."""
        return (self.host + self.compute + self.bubble + self.reduce + self.optimizer) * 1e-3


def step_time(cost: CostModel, plan: Plan, work: Round) -> StepTime:
    """The time of a round; the same plan and round give the same number everywhere."""
    facts, mesh = cost.facts, plan.mesh
    parts = work.parts(plan.parts, SQUARE * facts.hidden)
    replicas = [parts[replica :: mesh.dp] for replica in range(mesh.dp)]
    busiest = max(replicas, key=lambda loads: sum(measure(load, facts) for load in loads))
    if mesh.pp > 1:
        order = _order(plan.schedule, plan.stages, mesh.pp, len(busiest))
        simulated = simulate(order, stage_times(cost, plan, busiest), plan.stages)
        compute = float(max(simulated.busy_seconds)) * 1e3
        bubble = float(simulated.makespan_seconds) * 1e3 - compute
    else:
        compute, bubble = float(row_ms(cost, plan, busiest).sum()), 0.0
    held = [held_layers(plan, len(facts.layers), process) for process in range(mesh.pp)]
    trained = [trained_in(facts, mesh.tp, own) for own in held]
    links = cost.links(mesh, sharded=False)
    ends = []
    for numbers, layers in zip(trained, held, strict=True):
        share = len(layers) / max(len(facts.layers), 1)
        ends.append(cost.optimizer_ms([round(n * share) for n in facts.tensors], numbers))
    reduce = max(float(links.reduce(n.sum() * facts.trained_bytes)) for n in trained)
    rest = compute + bubble + reduce + max(ends)
    packing = cost.ends.host_ms(work.load.total)
    host = float(cost.ends.waits_ms(packing, rest))
    return StepTime(host, compute, bubble, reduce, optimizer=max(ends))


def row_ms(cost: CostModel, plan: Plan, loads: Sequence[Load]) -> Array:
    """Forward and backward of rows by a process that runs all layers [m].

    As a CUDA graph where it is small, both the plan and the model let rows run so, and a sharded
    base lies in one node, where processes span each other's memory.
    """
    mesh, sharded = plan.mesh, plan.shard_base and plan.mesh.dp > 1
    links, clock = cost.links(mesh, sharded=sharded), clock_of(cost, plan)
    rows = _rows(cost, plan, loads, copies=bool(not sharded or links.copies))
    parts, nano = _nano_batches(cost, plan, loads)
    if not sharded:
        return total(clock.row_terms(rows, mesh.tp, links, parts, nano))
    sharding = Sharding(cost.rows(_small(loads), mesh.tp), plan.keep_gathered)
    stage = Stage(range(len(cost.facts.layers)))
    there, back = clock.stage_ms(
        rows, mesh.tp, links, stage, parts=parts, nano=nano, sharding=sharding
    )
    return (there + back) * (rows.tokens > 0)


def _rows(cost: CostModel, plan: Plan, loads: Sequence[Load], *, copies: bool) -> Rows:
    """Rows as CUDA graphs, where they are small and both the plan and the model let them.

    copies   whether weights lie where a row reads them, or are copied there
    """
    rows = cost.rows(loads, plan.mesh.tp)
    captures = plan.captures and cost.facts.captures and copies
    rows.launched = ~(is_small(rows.tokens, plan.mesh.tp) & captures)
    return rows


def layers_ms(cost: CostModel, plan: Plan, load: Load) -> list[float]:
    """Forward and backward of each layer on a row; at the ends embedding and loss too."""
    clock, rows, tp = clock_of(cost, plan), _rows(cost, plan, [load], copies=True), plan.mesh.tp
    links, count = cost.links(plan.mesh, sharded=False), len(cost.kind_of)
    each = [
        clock.stage_ms(rows, tp, links, Stage([layer], layer == 0, layer == count - 1))
        for layer in range(count)
    ]
    return [float(there[0] + back[0]) for there, back in each]


def stage_times(cost: CostModel, plan: Plan, loads: Sequence[Load]) -> Times:
    """Seconds of each stage and micro-batch, as the event simulation takes them."""
    mesh, sharded = plan.mesh, plan.shard_base and plan.mesh.dp > 1
    links, clock = cost.links(mesh, sharded=sharded), clock_of(cost, plan)
    rows = _rows(cost, plan, loads, copies=True)
    keep, sharding = plan.keep_gathered, None
    if sharded:
        sharding = Sharding(cost.rows(_small(loads), mesh.tp), keep, kept=keep)
    parts, nano = _nano_batches(cost, plan, loads)
    forward, backward = [], []
    for stage in stages_of(plan, len(cost.facts.layers)):
        ask = partial(clock.stage_ms, rows, mesh.tp, links, stage, parts=parts, nano=nano)
        there, back = ask(sharding=sharding)
        if sharding is not None and keep:
            # The first micro-batch gathers for the whole round.
            there[0] = ask(sharding=replace(sharding, kept=False))[0][0]
        forward.append(there * 1e-3)
        backward.append(back * 1e-3)
    transfer = links.send(rows.tokens.max() * cost.hidden_bytes)
    return Times(forward, backward, transfer=transfer * 1e-3)


def stages_of(plan: Plan, layers: int) -> list[Stage]:
    """The layers of each stage."""
    ends = [0, *plan.cuts, layers]
    last = len(ends) - 2
    return [
        Stage(range(low, high), stage == 0, stage == last)
        for stage, (low, high) in enumerate(pairwise(ends))
    ]


def held_layers(plan: Plan, layers: int, process: int) -> range:
    """The layers of a process; of an interleaved one those of its first stage, times its stages."""
    stages = [stage.layers for stage in stages_of(plan, layers)[process :: plan.mesh.pp]]
    return range(stages[0][0], stages[0][0] + sum(map(len, stages)))


def trained_in(facts: ModelFacts, tp: int, layers: Sequence[int]) -> Array:
    """Numbers of each job that one process trains in some layers [jobs]."""
    every = np.array([facts.layers[layer].trained for layer in layers], dtype=np.float64)
    return np.asarray(every.sum(axis=0) * trained_part(tp))


def trained_part(tp: Array | float) -> Array:
    """Part of an adapter's bytes in one process: tp cuts one of its halves, the other is whole."""
    return np.where(np.asarray(tp) > 1, 0.5 + 0.5 / tp, 1.0)


def measure(load: Load, facts: ModelFacts) -> float:
    """Size of a load, in tokens."""
    return load.total + load.squares / (SQUARE * facts.hidden)


def total(terms: Terms) -> Array:
    """Sum of all terms."""
    return np.asarray(sum(terms.values()))


def clock_of(cost: CostModel, plan: Plan) -> RowClock:
    """Clock of a plan's rows."""
    price = cost.prices.get(plan.budget_key)
    again = price.again if price is not None else plan.recomputed
    # Under a budget torch's partitioner keeps what collectives gave.
    summed = 0.0 if plan.recompute_budget else again
    return cost.clock((plan.mesh.tp,), recompute=again, summed=summed)


def _nano_batches(cost: CostModel, plan: Plan, loads: Sequence[Load]) -> tuple[Rows | None, int]:
    """A nano-batch of each row, and how many; only communication of tp can be hidden by them."""
    nano, tp = plan.nano_batches, plan.mesh.tp
    if nano == 1 or tp == 1:
        return None, 1
    return cost.rows([_split(load, nano) for load in loads], tp), nano


def _small(loads: Sequence[Load]) -> list[Load]:
    return [_split(load, max(1, load.total // HOST_BOUND_TOKENS)) for load in loads]


def _split(load: Load, count: int) -> Load:
    """One of so many equal parts."""
    if count == 1:
        return load
    tokens = tuple(-(-n // count) for n in load.tokens)
    return Load(
        tokens, load.squares / count, -(-load.sequences // count), -(-load.targets // count)
    )


@lru_cache(maxsize=256)
def _order(schedule: Schedule, stages: int, processes: int, micro_batches: int) -> Order:
    return schedule_order(schedule, stages, processes, micro_batches)
