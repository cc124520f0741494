"""The most memory that a process holds at once under a plan.

What stands between steps is counted exactly; what a layer leaves until its backward, and what it
takes while it runs, is what a profile measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.demand import COLUMN, Array
from tlora_fx.cost.fit import BaseFit, Pieces
from tlora_fx.cost.hardware import GIB, wants_peer_copies
from tlora_fx.cost.layouts import MAX_ROW_TOKENS, Groups, Layouts, Pairs
from tlora_fx.cost.load import Load, Round
from tlora_fx.cost.model_facts import ADAM_STATES, TAIL, WIDEST_TAIL
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.step_time import SQUARE, CostModel, Terms, stage_layers, trained_in, trained_part
from tlora_fx.errors import JobTooLong

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


def require_fits(cost: CostModel, plan: Plan, work: Round) -> None:
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


# Bytes of the fullest process of each pair of a group and a layout, term by term.
#
# As tlora_fx/cost/memory.py: what stands between steps is counted, what a row leaves is measured.


#: Layers whose gathered weights stand at once.
#: Curves of what a row takes.
CURVES = ("saved", "backward peak", "forward peak", "root saved")


@dataclass(frozen=True, slots=True)
class Bound:
    """Bytes that no layout without stages needs more than, straight in a demand.

    least   whatever is asked for
    each    [12] by the columns of a demand
    token   of the longest row
    """

    least: float
    each: Array
    token: float

    @classmethod
    def of(cls, fit: BaseFit) -> Bound:
        """Each curve below a line, each slope that of the tp that takes most."""
        facts, count = fit.facts, len(fit.tp)
        lines = [below(fit.row, range(fit.curve(name), fit.curve(name) + count)) for name in CURVES]
        loss = below(fit.loss, [2]), below(fit.loss, [3])
        slopes = (fit.saved + fit.backward_peak + fit.forward_peak).max(axis=0)
        tail = WIDEST_TAIL * (fit.columns + fit.sites * WIDEST_TAIL) * facts.itemsize
        rises = {
            "squares": slopes[0],
            "adapters": slopes[1] + slopes[2],
            "site_tokens": slopes[3],
            "rank_tokens": slopes[4],
            "targets": loss[0][1] + loss[1][1],
            "parameters": facts.trained_bytes * (2.0 + ADAM_STATES),
        }
        each = np.array([float(rises.get(name, 0.0)) for name in COLUMN])
        least = facts.base_bytes + len(facts.layers) * tail
        least += sum(start for start, _ in (*lines, *loss))
        talk = 2.0 * facts.hidden * facts.itemsize
        return cls(least, each, sum(rise for _, rise in lines) + talk)


def below(curves: Pieces, names: Iterable[int]) -> tuple[float, float]:
    """A start and a rise: a line above some curves, everywhere."""
    count = len(curves.starts)
    places = [slice(name * count, (name + 1) * count) for name in names]
    start = max(float(curves.values[place][0]) for place in places)
    rise = max(float(curves.slopes[place][-1]) for place in places)
    for place in places:
        behind = curves.values[place][1:] - start
        rise = max(rise, float(np.max(behind / curves.starts[1:], initial=0.0)))
    return start, rise


@dataclass(frozen=True, slots=True)
class Room:
    """Tells memory of pairs."""

    fit: BaseFit
    layouts: Layouts
    bound: Bound = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", Bound.of(self.fit))

    def terms(self, groups: Groups, pairs: Pairs, *, sharded: bool = False) -> Terms:
        """Bytes by name [m]; they add up.

        sharded   the base lies in parts on replicas
        """
        facts, pairs = self.fit.facts, pairs.fullest(self.layouts)
        tp, dp, pp = (
            one[pairs.layout] for one in (self.layouts.tp, self.layouts.dp, self.layouts.pp)
        )
        layers = sum(one.weight_bytes for one in facts.layers) / tp
        root, head = float(facts.root_bytes), facts.head_bytes / tp
        ends = np.where(pp > 1, np.maximum(root, head), root + head)
        base = layers / pp + ends
        if sharded:
            base = base / dp
            gathered, activations, transient = self._sharded(groups, pairs)
        else:
            base = base + self._behind(groups)[pairs.group] / (tp * pp)
            gathered, activations = np.zeros_like(tp), self._kept(groups, pairs)
            transient = np.maximum(*self._transient(groups, pairs))
        return {
            "base": base,
            "gathered": gathered,
            "adapters": self.adapter_bytes(groups, pairs),
            "activations": activations,
            "transient": transient,
        }

    def _sharded(self, groups: Groups, pairs: Pairs) -> tuple[Array, Array, Array]:
        """Gathered weights, activations and the rest, when they are most in all.

        While layers run, while head and loss do, or when the root is read. What a collective has
        gathered is unpacked; what replicas of one node copy from each other is not.
        """
        facts, tp = self.fit.facts, self.layouts.tp[pairs.layout]
        layer = sum(one.weight_bytes for one in facts.layers) / len(facts.layers) / tp
        head = (facts.head_bytes or facts.root_bytes) / tp
        kept, nothing = self._kept(groups, pairs), np.zeros_like(tp)
        layers, loss = self._transient(groups, pairs)
        copied = self.layouts.near[pairs.layout, pairs.reach] & wants_peer_copies()
        moments = np.array(
            [
                [GATHERED * layer, kept, layers],
                [head + layer, kept, np.maximum(np.where(copied, 0.0, head), loss)],
                [np.where(copied, 1.0, 2.0) * facts.root_bytes + layer, nothing, nothing],
            ]
        )
        most = moments.sum(axis=1).argmax(axis=0)
        gathered, activations, transient = np.take_along_axis(moments, most[None, None], axis=0)[0]
        return gathered, activations, transient

    def fits_surely(self, groups: Groups) -> NDArray[np.bool_]:
        """Whether a group fits however it runs but for pipelines [n]; where not, `terms` tells.

        A bound that is quick to compute: all on one GPU, in rows as long as they may be.
        """
        tokens, samples = groups.column("tokens"), groups.column("samples")
        most = np.maximum(tokens / samples, groups.column("squares") / tokens)
        longest = np.where(most <= MAX_ROW_TOKENS, np.minimum(tokens, MAX_ROW_TOKENS), tokens)
        total = self.bound.least + groups.demands @ self.bound.each + self.bound.token * longest
        return np.asarray(total <= self.fit.usable_bytes)

    def adapter_bytes(self, groups: Groups, pairs: Pairs) -> Array:
        """Parameters, gradients and the states of AdamW."""
        facts = self.fit.facts
        tp, pp = (one[pairs.layout] for one in (self.layouts.tp, self.layouts.pp))
        numbers = groups.column("parameters")[pairs.group] / pp
        # As tlora_fx/cost/memory.py counts it: a stage's adapters whole, also those that tp cuts.
        part = np.where(pp > 1, 1.0, trained_part(tp))
        return np.asarray(numbers * part * (facts.trained_bytes * (2 + ADAM_STATES)))

    def _behind(self, groups: Groups) -> Array:
        """What compiled layers leave free behind adapted weights [n], before tp cuts it."""
        facts = self.fit.facts
        ranks = groups.column("rank") / max(self.fit.columns, 1.0)
        tail = np.ceil(ranks / TAIL) * TAIL
        tail = np.where(tail <= WIDEST_TAIL, tail, 0.0)
        each = facts.itemsize * tail * (self.fit.columns + self.fit.sites * tail)
        return np.asarray(len(facts.layers) * each)

    def _curve(self, name: str, pairs: Pairs) -> Array:
        return self.fit.row.at(self.fit.curve(name) + pairs.size, pairs.found)

    def _beside(self, groups: Groups, pairs: Pairs, slopes: Array) -> Array:
        """Of one row, beside its tokens."""
        work = pairs.table(groups.work(slopes)) * pairs.share / pairs.rows
        return np.asarray(work + pairs.table(groups.each_row(slopes, self.fit.sites)))

    def _kept(self, groups: Groups, pairs: Pairs) -> Array:
        """What forwards leave until their backwards, of all rows that a process has begun."""
        pp = self.layouts.pp[pairs.layout]
        layers = self._curve("saved", pairs) + self._beside(groups, pairs, self.fit.saved)
        begun = np.minimum(pairs.rows, pp)
        return np.asarray((layers / pp + self._curve("root saved", pairs)) * begun)

    def _transient(self, groups: Groups, pairs: Pairs) -> tuple[Array, Array]:
        """The most that a layer takes beside what is kept, and what head and loss take."""
        fit, tp = self.fit, self.layouts.tp[pairs.layout]
        targets = groups.column("targets")[pairs.group] * pairs.share / pairs.rows
        found = fit.loss.find(targets)
        loss = fit.loss.at(2, found) + fit.loss.at(3, found) / tp
        peaks = {"forward peak": fit.forward_peak, "backward peak": fit.backward_peak}
        forward, backward = (
            self._curve(name, pairs) + self._beside(groups, pairs, slopes)
            for name, slopes in peaks.items()
        )
        saved = self._curve("saved", pairs) + self._beside(groups, pairs, fit.saved)
        beyond = forward - saved / len(fit.facts.layers)
        # Under tp a sum of hidden states stands beside what it is made of, and the next one's.
        talk = np.where(tp > 1, 2.0 * fit.facts.hidden * fit.facts.itemsize * pairs.tokens, 0.0)
        return np.maximum(backward, beyond) + talk, loss + talk
