"""The most memory that a process holds at once.

What stands between steps is counted exactly; what a layer leaves until its backward, and what it
takes while it runs, is what a profile measured. Numbers are bytes, of m processes at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tlora_fx.cost.fit import SAVED
from tlora_fx.cost.hardware import GIB
from tlora_fx.cost.load import Array, Mask, Round, Rows
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.step_time import (
    SQUARE,
    CostModel,
    RowClock,
    Stage,
    Terms,
    clock_of,
    measure,
    stages_of,
    trained_in,
)
from tlora_fx.errors import JobTooLong

#: What the driver, libraries and the allocator's gaps take.
RESERVED_GIB, GAPS = 1.5, 0.04
#: Layers whose gathered weights stand at once: one that computes, and the next.
GATHERED = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest process.

    base          its part of the frozen base, and the columns behind adapted weights
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
        """Most bytes that the allocator gives out."""
        return self.base + self.gathered + self.adapters + self.activations + self.transient


@dataclass(frozen=True, slots=True)
class StageContents:
    """Contents of m processes of one stage, whose layers are the same.

    stage      its layers
    tp, dp     [m] processes that cut matrices, and replicas
    copies     [m] whether gathered weights are copied from peers to where they are read
    flying     [m] micro-batches whose activations are held at once
    adapters   [m] bytes of parameters, gradients and states
    tail_bytes [m] bytes behind adapted weights
    sharded    the base is sharded over replicas
    keep       gathered weights are kept from the forward to the backward
    for_round  they are kept from micro-batch to micro-batch
    recompute  share of layers that is computed again in the backward
    kept       bytes of a token that a layer keeps all the same, where a budget's price tells
    """

    stage: Stage
    tp: Array | float
    dp: Array | float
    copies: Mask | bool
    flying: Array | float
    adapters: Array | float
    tail_bytes: Array | float
    sharded: bool = False
    keep: bool = False
    for_round: bool = False
    recompute: float = 0.0
    kept: float | None = None


def memory_terms(clock: RowClock, rows: Rows, held: StageContents) -> Terms:
    """Bytes by the fields of Memory [m], where each process runs such a row."""
    cost, stage, tp = clock.cost, held.stage, held.tp
    facts = cost.facts
    weights = [facts.layers[layer].weight_bytes for layer in stage.layers]
    root, head = float(facts.root_bytes), facts.head_bytes / tp
    tied = facts.head_bytes == 0
    base = sum(weights) / tp + root * (stage.first or (stage.last and tied)) + head * stage.last
    base = base / held.dp if held.sharded else base + held.tail_bytes
    one, layers = _row_bytes(clock, rows, held)
    comm = np.where(np.asarray(tp) > 1, 2.0 * cost.hidden_bytes * rows.tokens, 0.0)
    loss = cost.ends.loss_bytes(rows.targets, tp) + comm
    kept, nothing = one * held.flying, np.zeros_like(one)
    moments: list[list[Array | float]] = [[nothing, kept, layers + comm]]
    if not held.sharded and stage.last:
        moments.append([nothing, kept, loss])
    if held.sharded:
        whole = head if facts.head_bytes else root / tp
        most = sum(sorted(weights, reverse=True)[: None if held.keep else GATHERED]) / tp
        moments[0][0] = most + whole * (stage.last and held.for_round)
        if stage.last:
            # What a collective gathered is unpacked into the weights; then the last layer's come
            # for its backward.
            beside = most if held.keep else weights[-1] / tp
            packed = np.where(held.copies, 0.0, whole)
            moments.append([whole + beside, kept, np.maximum(packed, loss)])
        if stage.first:
            # The same of embeddings; the first layer's come while they are looked up.
            beside = most if held.for_round else weights[0] / tp
            before = one * np.maximum(held.flying - 1.0, 0.0)
            moments.append([np.where(held.copies, 1, 2) * root + beside, before, nothing])
    every = np.array([[part + nothing for part in moment] for moment in moments])
    fullest = every.sum(axis=1).argmax(axis=0)
    gathered, activations, transient = np.take_along_axis(every, fullest[None, None], axis=0)[0]
    return {
        "base": base + nothing,
        "gathered": gathered,
        "adapters": held.adapters + nothing,
        "activations": activations,
        "transient": transient,
    }


def _row_bytes(clock: RowClock, rows: Rows, held: StageContents) -> tuple[Array, Array]:
    """What one row leaves in a process, and the most that a layer takes beside that [m]."""
    cost = clock.cost
    kinds = [cost.kind_of[layer] for layer in held.stage.layers]
    values = clock.tables.values(rows, slice(SAVED, None))
    saved, there, back = values[:, sorted(set(kinds))]
    one, again = clock.counts(kinds) @ values[0], held.recompute
    if again:
        learns = sum(float(clock.learns[kind]) for kind in kinds)
        inputs = learns * rows.tokens * cost.hidden_bytes
        if held.kept is not None:
            within = np.minimum(one, inputs + learns * rows.tokens * held.kept)
            again = 1 - (within - inputs) / np.maximum(one - inputs, 1.0)
        one, back = again * inputs + (1 - again) * one, back + again * there
    if held.stage.first:
        one = one + cost.ends.root_bytes(rows.tokens)
    return one, np.maximum(back, there - saved).max(axis=0, initial=0.0)


def memory_of(cost: CostModel, plan: Plan, work: Round) -> Memory:
    """The memory of the fullest process of a plan."""
    facts, mesh = cost.facts, plan.mesh
    parts = work.parts(plan.parts, SQUARE * facts.hidden)
    rows = cost.rows([max(parts, key=lambda load: measure(load, facts))], mesh.tp)
    count, stages = len(parts) // mesh.dp, stages_of(plan, len(facts.layers))
    sharded = plan.shard_base and mesh.dp > 1
    price = cost.prices.get(plan.budget_key)
    clock, copies = clock_of(cost, plan), bool(cost.links(mesh, sharded=sharded).copies)
    found = []
    for process in range(mesh.pp):
        own = [layer for stage in stages[process :: mesh.pp] for layer in stage.layers]
        trained = trained_in(facts, mesh.tp if mesh.pp == 1 else 1, own)
        states = 2.0 + np.array(facts.states, dtype=np.float64)
        held = StageContents(
            Stage(own, process == 0, process == (len(stages) - 1) % mesh.pp),
            tp=mesh.tp,
            dp=mesh.dp,
            copies=copies,
            flying=in_flight(plan, process, count),
            adapters=float(trained @ states) * facts.trained_bytes,
            tail_bytes=sum(facts.layers[layer].tail_bytes for layer in own) / mesh.tp,
            sharded=sharded,
            keep=plan.keep_gathered,
            for_round=plan.keep_gathered and mesh.pp > 1,
            recompute=plan.recomputed,
            kept=price.kept_bytes if price is not None else None,
        )
        terms = memory_terms(clock, rows, held)
        found.append(Memory(**{name: float(own[0]) for name, own in terms.items()}))
    return max(found, key=lambda one: one.total)


def usable_bytes(profile: Profile) -> float:
    """Bytes that the allocator may give out on a profile's hardware; infinite where unknown."""
    size = profile.hardware.memory_gib
    return max(0.0, size - RESERVED_GIB) * GIB * (1 - GAPS) if size else float("inf")


def device_bytes(memory: Mapping[str, float]) -> float:
    """Bytes that a process takes of its device, by the fields of Memory; one that is missing is 0.

    Rows that run as CUDA graphs have activations of their own, beside those of other rows.
    """
    graphs = memory.get("activations", 0.0) + memory.get("transient", 0.0)
    return (sum(memory.values()) + graphs) / (1 - GAPS) + RESERVED_GIB * GIB


def fits(cost: CostModel, memory: Memory) -> bool:
    """Whether it fits the memory of a process."""
    return memory.total <= usable_bytes(cost.profile)


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
        expected=f"at most {usable_bytes(cost.profile) / GIB:.1f} GiB",
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


def in_flight(plan: Plan, process: int, micro_batches: Array | float) -> Array | float:
    """Micro-batches whose activations a process holds at once, in units of all its stages."""
    pp = plan.mesh.pp
    if pp == 1:
        return 1.0
    if plan.schedule == "gpipe":
        return micro_batches
    if plan.schedule == "interleaved":
        own = plan.stages // pp
        warm = (own - 1) * pp + 2 * (pp - process - 1) + 1
        return np.minimum(micro_batches, warm / own)
    return np.minimum(micro_batches, pp - process)
