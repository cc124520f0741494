"""How long one round takes under a plan.

Replicas run their parts of a round one after the other, or as a pipeline, whose schedule is
simulated event by event. Sharded weights are gathered while the layer before computes, in a
pipeline by each micro-batch anew unless they are kept for the round; what tensor parallelism says
is not hidden but for nano-batches. Then gradients are summed and optimizers step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from tlora_fx.cost.load import Load, Round
from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.cost.pipeline_simulation import Order, Times, schedule_order, simulate
from tlora_fx.cost.plan import Plan, Schedule
from tlora_fx.planners.cost import CostModel, trained_in

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
