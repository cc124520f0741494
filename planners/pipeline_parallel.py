"""Stages of layers, one after the other on as many processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, get_args

from tlora_fx.cost.pipeline_simulation import demand_schedule
from tlora_fx.cost.plan import TAKEN_OUT, MeshShape, Plan, Schedule, model_fingerprint
from tlora_fx.errors import PlanNotRunnable, nearest
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import demand_shardable
from tlora_fx.planners.cuts import balanced_cuts
from tlora_fx.planners.feasible import demand_fits
from tlora_fx.planners.protocol import Planner
from tlora_fx.planners.stages import cut_stages

# With four micro-batches a stage, waiting is at most a fifth of the time; more are smaller, and
# each costs its launches.
MICRO_BATCHES_A_STAGE = 4
STAGES_A_PROCESS = 2


class Pipeline(Planner):
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
        demand_fits(model, shape)
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
        demand_schedule(schedule, len(cuts) + 1, shape.pp, micro_batches)
        shard = bool(options.get("shard_base", False))
        if shard:
            _demand_replicas(shape)
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
        demand_shardable(model, made)
        return made


def _demand_replicas(shape: MeshShape) -> None:
    if shape.dp == 1:
        raise PlanNotRunnable(
            "the base cannot be sharded over replicas",
            plan=f"{Pipeline.name} on {shape}",
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
