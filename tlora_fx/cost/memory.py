"""The most memory that a process holds at once under a plan.

What stands between steps is counted exactly; what a layer leaves until its backward, and what it
takes while it runs, is what a profile measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tlora_fx.cost.hardware import GIB
from tlora_fx.cost.load import Load, Round
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.step_time import SQUARE, stage_layers
from tlora_fx.errors import JobTooLong
from tlora_fx.planners.cost import CostModel, trained_in

#: What the driver, libraries and the allocator's gaps take.
RESERVED_GIB, GAPS = 1.5, 0.04
#: Layers whose gathered weights stand at once: one that computes, and the next.
GATHERED = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest process.

    base          its part of the frozen base, and the room behind adapted weights
    gathered      weights that are gathered at once
    adapters      parameters, gradients and the optimizers' states
    activations   what forwards leave until their backwards
    transient     the most that a layer or the loss takes beyond that
    """

    base: float
    gathered: float
    adapters: float
    activations: float
    transient: float

    @property
    def total(self) -> float:
        """What the allocator gives out at most."""
        return self.base + self.gathered + self.adapters + self.activations + self.transient


def memory_of(cost: CostModel, plan: Plan, work: Round) -> Memory:
    """The memory of the fullest process of a plan."""
    parts = work.parts(plan.parts, SQUARE * cost.facts.hidden)
    largest = max(parts, key=lambda load: load.total + load.squares / (SQUARE * cost.facts.hidden))
    stages = stage_layers(plan, len(cost.facts.layers))
    count = len(parts) // plan.mesh.dp
    found = [
        _process(cost, plan, stages, process, largest, count) for process in range(plan.mesh.pp)
    ]
    return max(found, key=lambda one: one.total)


def usable_bytes(cost: CostModel) -> float:
    """What the allocator may give out on the profile's hardware; endless where it does not say."""
    size = cost.profile.hardware.memory_gib
    return max(0.0, size - RESERVED_GIB) * GIB * (1 - GAPS) if size else float("inf")


def fits(cost: CostModel, memory: Memory) -> bool:
    """Whether a process has room for it."""
    return memory.total <= usable_bytes(cost)


def demand_fits(cost: CostModel, plan: Plan, work: Round) -> None:
    """Refuse a round that a plan has no memory for, because of the longest job.

    raises    JobTooLong, with the largest length that fits
    """
    memory = memory_of(cost, plan, work)
    if fits(cost, memory):
        return
    job, length = work.longest()
    largest = largest_length(cost, plan, work, job)
    raise JobTooLong(
        f"job '{cost.facts.jobs[job]}' is too long for the memory of a GPU",
        job=cost.facts.jobs[job],
        plan=f"{plan.planner} on {plan.mesh}",
        expected=f"at most {usable_bytes(cost) / GIB:.1f} GiB",
        found=f"{memory.total / GIB:.1f} GiB with samples of {length} tokens",
        help=f"set its max_length to {largest} or less"
        if largest
        else "even its shortest samples do not fit: use more GPUs, or a plan with shard_base",
    )


def largest_length(cost: CostModel, plan: Plan, work: Round, job: int) -> int:
    """The longest samples of a job that fit, all else as it is; 0 where none do."""
    low, high = 0, work.longest()[1]
    while low < high:
        middle = (low + high + 1) // 2
        if fits(cost, memory_of(cost, plan, work.shortened(job, middle))):
            low = middle
        else:
            high = middle - 1
    return low


def _process(
    cost: CostModel,
    plan: Plan,
    stages: Sequence[range],
    process: int,
    load: Load,
    micro_batches: int,
) -> Memory:
    facts, mesh = cost.facts, plan.mesh
    own = [place for stage in stages[process :: mesh.pp] for place in stage]
    first, last = process == 0, process == (len(stages) - 1) % mesh.pp
    tied = facts.head_bytes == 0
    whole = sum(facts.layers[place].weight_bytes for place in own) / mesh.tp
    ends = facts.root_bytes * (first or (last and tied)) + facts.head_bytes / mesh.tp * last
    sharded = plan.shard_base and mesh.dp > 1
    room = 0 if sharded else sum(facts.layers[place].room_bytes for place in own) / mesh.tp
    trained = trained_in(facts, plan, range(len(facts.layers))) if mesh.pp == 1 else [
        sum(facts.layers[place].trained[job] for place in own) for job in range(len(facts.jobs))
    ]  # fmt: skip
    adapters = sum(
        numbers * facts.trained_bytes * (2 + states)
        for numbers, states in zip(trained, facts.states, strict=True)
    )
    base = (whole + ends) / (mesh.dp if sharded else 1) + room
    one, flying = _kept(cost, plan, own, load, first), in_flight(plan, process, micro_batches)
    weights = _gathered(cost, plan, own) if sharded else 0.0
    if sharded and last and _keeps_for_a_round(plan):
        weights += _head(cost, plan)
    moments = [(weights, one * flying, _layers(cost, plan, own, load))]
    if last:
        moments.append(_loss_moment(cost, plan, own, load, one * flying))
    if sharded and first:
        moments.append(_root_moment(cost, plan, own, one * max(flying - 1, 0.0)))
    gathered, activations, transient = max(moments, key=sum)
    return Memory(base, gathered, adapters, activations, transient)


def in_flight(plan: Plan, process: int, micro_batches: int) -> float:
    """Micro-batches whose activations a process holds at once, in units of all its stages."""
    pp = plan.mesh.pp
    if pp == 1:
        return 1.0
    if plan.schedule == "gpipe":
        return float(micro_batches)
    if plan.schedule == "interleaved":
        own = plan.stages // pp
        warm = (own - 1) * pp + 2 * (pp - process - 1) + 1
        return min(float(micro_batches), warm / own)
    return float(min(micro_batches, pp - process))


def _kept(cost: CostModel, plan: Plan, own: Sequence[int], load: Load, first: bool) -> float:
    """What one micro-batch leaves in a process."""
    facts, tp = cost.facts, plan.mesh.tp
    if plan.recompute:
        result = load.total * facts.hidden * facts.itemsize
        kept = float(sum(place >= facts.lowest for place in own) * result)
    else:
        kept = cost.summed(own, lambda place: cost.layer(place, load, tp).saved)
    return kept + (cost.root_bytes(load) if first else 0.0)


def _gathered(cost: CostModel, plan: Plan, own: Sequence[int]) -> float:
    """Layers whose whole weights stand beside the shards while layers run."""
    sizes = (cost.facts.layers[place].weight_bytes / plan.mesh.tp for place in own)
    return sum(sorted(sizes, reverse=True)[: None if plan.keep_gathered else GATHERED])


def _loss_moment(
    cost: CostModel, plan: Plan, own: Sequence[int], load: Load, kept: float
) -> tuple[float, float, float]:
    """Gathered weights, activations and the rest while head and loss run."""
    transient = cost.loss_bytes(load, plan.mesh.tp) + _talk(cost, plan, load)
    if not plan.shard_base or plan.mesh.dp == 1:
        return 0.0, kept, transient
    head = _head(cost, plan)
    # What a collective gathered is unpacked into the weights; then the last layer's come for its
    # backward.
    beside = _gathered(cost, plan, own if plan.keep_gathered else own[-1:])
    packed = 0.0 if cost.gathers_by_copies(plan.mesh) else head
    return head + beside, kept, max(packed, transient)


def _root_moment(
    cost: CostModel, plan: Plan, own: Sequence[int], before: float
) -> tuple[float, float, float]:
    """Gathered weights, activations and the rest while embeddings are looked up.

    before   what micro-batches left that are in flight
    """
    # What a collective gathered is unpacked into the weights; the first layer's come while it is.
    beside = _gathered(cost, plan, own if _keeps_for_a_round(plan) else own[:1])
    times = 1 if cost.gathers_by_copies(plan.mesh) else 2
    return times * cost.facts.root_bytes + beside, before, 0.0


def _keeps_for_a_round(plan: Plan) -> bool:
    """Whether weights stay gathered from micro-batch to micro-batch, not for one row alone."""
    return plan.keep_gathered and plan.mesh.pp > 1


def _head(cost: CostModel, plan: Plan) -> float:
    """The whole head, of which shards are held."""
    return (cost.facts.head_bytes or cost.facts.root_bytes) / plan.mesh.tp


def _layers(cost: CostModel, plan: Plan, own: Sequence[int], load: Load) -> float:
    """The most that a layer takes beside what is kept."""
    kinds = {cost.kinds[place] for place in own}
    costs = [cost.layer(place, load, plan.mesh.tp) for place in kinds]
    backward = [one.backward_peak + (one.forward_peak if plan.recompute else 0.0) for one in costs]
    forward = [max(0.0, one.forward_peak - one.saved) for one in costs]
    return max([*backward, *forward], default=0.0) + _talk(cost, plan, load)


def _talk(cost: CostModel, plan: Plan, load: Load) -> float:
    """Under tp a sum of hidden states stands beside what it is made of, and the next one's."""
    payload = load.total * cost.facts.hidden * cost.facts.itemsize
    return 2.0 * payload if plan.mesh.tp > 1 else 0.0
