"""Stages of layers, one after the other on as many processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from math import inf
from typing import Any, ClassVar, get_args

from torch import nn

from tlora_fx.cost.pipeline_simulation import require_schedule
from tlora_fx.cost.plan import TAKEN_OUT, MeshShape, Plan, Schedule, model_fingerprint
from tlora_fx.errors import NoStage, PlanNotRunnable, nearest
from tlora_fx.ir.graph import HEAD, LOSS
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import require_shardable
from tlora_fx.parallel.pipeline import cut_stages, legal_cuts
from tlora_fx.parallel.prepare import require_fits
from tlora_fx.planners.protocol import Planner

# Where to cut layers into stages, so that the dearest stage is as cheap as can be.
#
# Layers differ: adapters cost more where ranks are large, and below the lowest adapter there is no
# backward at all. A cut by cost puts more of the cheap layers into one stage.


# Sums of the same costs in another order differ by rounding.
ROUNDING = 1 + 1e-9


def cut_layers(
    costs: Sequence[float], stages: int, legal: Collection[int] | None = None
) -> tuple[int, ...]:
    """Cuts into runs of layers whose dearest is as cheap as can be.

    Of all such cuts, those whose stages differ least.

    costs     of each layer, forward and backward, in any unit; what stands before the first layer
              and behind the last counts with these
    stages    how many runs
    legal     where a run may begin; everywhere by default
    returns   the first layer of each run but the first
    raises    NoStage where there are fewer places than stages
    """
    allowed = sorted(set(range(1, len(costs)) if legal is None else legal))
    if len(allowed) < stages - 1 or not costs:
        raise NoStage(
            f"{len(costs)} layers cannot be cut into {stages} stages",
            expected=f"at least {stages - 1} places to cut",
            found=len(allowed),
            help="plan fewer stages",
        )
    sums = [0.0, *accumulate(costs)]
    ends = [*allowed, len(costs)]
    dearest, _ = _best(sums, ends, stages, max, lambda cost: cost)
    limit = dearest * ROUNDING
    _, cuts = _best(
        sums, ends, stages, float.__add__, lambda cost: cost * cost if cost <= limit else inf
    )
    return cuts


def balanced_cuts(
    model: SuperModel, stages: int, costs: Sequence[float] | None = None, *, recompute: bool = False
) -> tuple[int, ...]:
    """Cuts of a model, where a single value crosses.

    costs     of each layer; by default products of matrices by `layer_products`
    raises    NoStage
    """
    if costs is None:
        costs = layer_products(model, recompute=recompute)
    return cut_layers(costs, stages, legal_cuts(model))


def layer_products(model: SuperModel, *, recompute: bool = False) -> list[float]:
    """What each layer costs a token, forward and backward, in multiply-adds of matrices.

    A frozen matrix costs its size in the forward, and again in the backward of its input; an
    adapter costs it a third time. Jobs have equal shares of the tokens. The loss, which computes
    its logits twice, counts with the last layer. Attention itself is left out: it is the same in
    every layer.

    model       weights are not needed
    recompute   layers are computed again in the backward
    """
    found: list[float] = []
    learns = _trains(model, _before(model))
    for path in model.layer_order():
        layer = model.net.get_submodule(path)
        frozen, adapters = _sizes(layer, len(model.jobs))
        learns = learns or adapters > 0
        forward = frozen + adapters
        again = forward if recompute else 0.0
        found.append(forward + (again + frozen + 2 * adapters if learns else 0.0))
    if found and HEAD in model.group.blocks:
        frozen, adapters = _sizes(model.net.get_submodule(LOSS), len(model.jobs))
        found[-1] += 3 * frozen + 4 * adapters
    return found


def _best(
    sums: Sequence[float],
    ends: Sequence[int],
    stages: int,
    join: Callable[[float, float], float],
    price: Callable[[float], float],
) -> tuple[float, tuple[int, ...]]:
    """The cheapest runs by dynamic programming: what they cost, and where they begin.

    sums   cost of all layers before each
    ends   where a run may end
    """
    rows: list[dict[int, tuple[float, tuple[int, ...]]]] = [
        {end: (price(sums[end]), ()) for end in ends}
    ]
    for _ in range(1, stages):
        before, row = rows[-1], {}
        for end in ends:
            choices = [
                (join(cost, price(sums[end] - sums[start])), (*cuts, start))
                for start, (cost, cuts) in before.items()
                if start < end
            ]
            if choices:
                row[end] = min(choices)
        rows.append(row)
    return rows[-1][ends[-1]]


def _sizes(module: nn.Module, jobs: int) -> tuple[float, float]:
    """Numbers in frozen matrices, and in the adapters of a token of an average job."""
    frozen = adapters = 0.0
    for leaf in module.parameters():
        if leaf.requires_grad:
            adapters += leaf.numel() / jobs
        elif leaf.dim() > 1:
            frozen += leaf.numel()
    return frozen, adapters


def _before(model: SuperModel) -> list[str]:
    """Tensors that the root reads by itself."""
    return [str(node.target) for node in model.group.root.nodes if node.op == "get_attr"]


def _trains(model: SuperModel, paths: Sequence[str]) -> bool:
    tensors = (
        getattr(model.net.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2])
        for path in paths
    )
    return any(tensor.requires_grad for tensor in tensors)


# With four micro-batches a stage, waiting is at most a fifth of the time; more are smaller, and
# each costs its launches.
MICRO_BATCHES_A_STAGE = 4
STAGES_A_PROCESS = 2


class PipelineParallel(Planner):
    """Layers cut into stages by their cost, run by a schedule of torch."""

    name: ClassVar[str] = "pipeline"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """The plan of `processes` stages, or of a mesh with pp, and whatever else it has.

        options   `schedule`: "gpipe", "1f1b" (default) or "interleaved";
                  `stages_per_process`: of an interleaved schedule, 2 by default;
                  `micro_batches`: forwards of a replica a round; `cuts`: where stages begin;
                  `costs`: of each layer, forward and backward, in any unit; `recompute`;
                  `shard_base`: each stage's layers are sharded over its replicas;
                  `keep_gathered`: until the end of a round, not for one use
        raises    MeshDoesNotFit, NoStage, ScheduleRefused, PlanNotRunnable
        """
        shape = shape or MeshShape(pp=int(options.get("processes", 1)))
        if shape.pp == 1:
            raise PlanNotRunnable(
                "a pipeline has several stages",
                found=f"a mesh of {shape}",
                help="give a mesh with pp of 2 or more, or choose single, replicated or fsdp",
            )
        require_fits(model, shape)
        schedule = _schedule(str(options.get("schedule", "1f1b")))
        recompute = bool(options.get("recompute", False))
        cuts: Sequence[int] | None = options.get("cuts")
        if cuts is None:
            stages = shape.pp
            if schedule == "interleaved":
                stages *= int(options.get("stages_per_process", STAGES_A_PROCESS))
            cuts = balanced_cuts(model, stages, options.get("costs"), recompute=recompute)
        cut_stages(model, cuts)
        micro_batches = int(options.get("micro_batches", 0)) or _micro_batches(model, shape)
        require_schedule(schedule, len(cuts) + 1, shape.pp, micro_batches)
        shard = bool(options.get("shard_base", False))
        if shard:
            _require_replicas(shape)
        made = Plan(
            planner=self.name,
            mesh=shape,
            model=model_fingerprint(model),
            cuts=tuple(cuts),
            schedule=schedule,
            micro_batches=micro_batches,
            shard_base=shard,
            keep_gathered=shard and bool(options.get("keep_gathered", False)),
            recompute=recompute,
        )
        require_shardable(model, made)
        return made


def _require_replicas(shape: MeshShape) -> None:
    if shape.dp == 1:
        raise PlanNotRunnable(
            "the base cannot be sharded over replicas",
            plan=f"{PipelineParallel.name} on {shape}",
            reason="shards lie on the replicas of a stage, and the mesh has dp=1",
            help="give a mesh with dp of 2 or more, or leave shard_base out",
        )


def _micro_batches(model: SuperModel, shape: MeshShape) -> int:
    """Several a stage, but no more than there are sequences; whole rounds over the processes."""
    sequences = sum(job.per_device_train_batch_size for job in model.jobs)
    wanted = min(MICRO_BATCHES_A_STAGE * shape.pp, sequences // shape.dp)
    return max(1, wanted // shape.pp) * shape.pp


def _schedule(name: str) -> Schedule:
    known = get_args(Schedule)
    for schedule in known:
        if schedule == name:
            found: Schedule = schedule
            return found
    raise PlanNotRunnable(
        f"there is no schedule '{name}'",
        reason=TAKEN_OUT.get(name),
        nearest=nearest(name, known),
        help="known schedules: " + ", ".join(known),
    )
