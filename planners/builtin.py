"""The planners that cut a model by one rule: single, replicated, fsdp, tensor and pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import fx

from tlora_fx.cost.pipeline_simulation import require_schedule
from tlora_fx.cost.plan import MeshShape, Plan, Schedule, model_fingerprint
from tlora_fx.errors import PlanNotRunnable
from tlora_fx.ir.graph import HEAD, Block
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import require_shardable
from tlora_fx.parallel.prepare import require_fits
from tlora_fx.parallel.stages import cut_stages
from tlora_fx.passes.tensor_parallel.shard import nothing_cut
from tlora_fx.planners.protocol import Planner, PlannerOptions
from tlora_fx.planners.stage_cuts import balanced_cuts

# With four micro-batches a stage, waiting is at most a fifth of the time; more are smaller, and
# each costs its launches.
MICRO_BATCHES_A_STAGE = 4


def _plan(planner: Planner, model: SuperModel, mesh: MeshShape, **fields: Any) -> Plan:
    """A planner's plan of a model."""
    return Plan(planner=planner.name, mesh=mesh, model=model_fingerprint(model), **fields)


class RecomputeOptions(PlannerOptions):
    """`recompute`: layers are computed again in the backward."""

    recompute: bool = False


class Single(Planner):
    """Run on one device."""

    name: ClassVar[str] = "single"
    Options = RecomputeOptions

    def make(
        self, model: SuperModel, shape: MeshShape | None, options: RecomputeOptions, profile: Any
    ) -> Plan:
        """The plan of one process; raises PlanNotRunnable for a mesh of several processes."""
        if shape is not None and shape.size > 1:
            raise PlanNotRunnable(
                "the plan 'single' is for one process",
                found=f"a mesh of {shape}",
                help="choose replicated, fsdp, pipeline, tensor or auto",
            )
        return _plan(self, model, MeshShape(), recompute=options.recompute)

    def holds_whole_base(self, plan: Plan) -> bool:
        """True."""
        return True

    def may_grow(self, plan: Plan) -> bool:
        """True: there is one process."""
        return True


class Replicated(Planner):
    """Data parallelism: adapters' gradients are summed once a round, and nothing else is sent.

    Every process holds the whole model and runs rows of its own.
    """

    name: ClassVar[str] = "replicated"
    Options = RecomputeOptions

    def make(
        self, model: SuperModel, shape: MeshShape | None, options: RecomputeOptions, profile: Any
    ) -> Plan:
        """The plan of `processes` replicas, or of a mesh with dp alone.

        raises    PlanNotRunnable for another mesh
        """
        mesh = _replicas(self.name, shape or MeshShape(dp=options.processes))
        return _plan(self, model, mesh, recompute=options.recompute)

    def holds_whole_base(self, plan: Plan) -> bool:
        """True."""
        return True


class Fsdp(Planner):
    """FSDP2 over the frozen base: replicas share one copy, and gather a layer while it is needed.

    Adapters and their optimizers stay whole on each replica.
    """

    name: ClassVar[str] = "fsdp"

    class Options(PlannerOptions):
        """Options of sharding; the first two are chosen by memory where they are left out.

        Without `memory_bytes` weights are gathered twice and nothing is recomputed.

        keep_gathered   weights are kept from a layer's forward to its backward
        recompute       layers are computed again in the backward
        longest_row     most tokens of a row of the data; None: `max_row_tokens`
        compiled        layers run compiled, and keep less for their backward
        """

        keep_gathered: bool | None = None
        recompute: bool | None = None
        longest_row: PositiveInt | None = None
        compiled: bool = False

    def make(
        self, model: SuperModel, shape: MeshShape | None, options: Options, profile: Any
    ) -> Plan:
        """The plan of `processes` replicas, or of a mesh with dp alone.

        raises    PlanNotRunnable for another mesh
        """
        mesh = _replicas(self.name, shape or MeshShape(dp=options.processes))
        row = options.longest_row or options.max_row_tokens
        keep, recompute = choose(
            model, mesh.dp, options.memory_bytes, row, compiled=options.compiled
        )
        return _plan(
            self,
            model,
            mesh,
            shard_base=True,
            keep_gathered=keep if options.keep_gathered is None else options.keep_gathered,
            recompute=recompute if options.recompute is None else options.recompute,
        )


def _replicas(name: str, mesh: MeshShape) -> MeshShape:
    if mesh.pp > 1 or mesh.tp > 1:
        raise PlanNotRunnable(
            f"the plan '{name}' has replicas only",
            expected=f"a mesh of {MeshShape(dp=mesh.size)}",
            found=f"a mesh of {mesh}",
            help="choose pipeline, tensor or auto for the other dimensions",
        )
    return mesh


# What fits into a device's memory, by counting, without a measurement.

# What the allocator, libraries and what is not counted here may take.
USABLE = 0.85


def choose(
    model: SuperModel,
    replicas: int,
    memory_bytes: int | None,
    row_tokens: int,
    *,
    compiled: bool = False,
) -> tuple[bool, bool]:
    """Whether gathered weights are kept, and whether layers are computed again.

    memory_bytes   of one device; None for unknown
    row_tokens     of the longest row
    compiled       layers run compiled
    """
    if memory_bytes is None:
        return False, False
    usable = USABLE * memory_bytes - trained_bytes(model)
    base = base_bytes(model)
    activations = activation_bytes(model, row_tokens, compiled=compiled)
    if base + activations <= usable:
        return True, False
    return False, base / replicas + activations > usable


def base_bytes(model: SuperModel) -> int:
    """The frozen base, as it is stored."""
    return sum(leaf.nbytes for leaf in model.net.parameters() if not leaf.requires_grad)


def trained_bytes(model: SuperModel) -> int:
    """Adapters with gradients and two moments of AdamW."""
    return sum(4 * leaf.nbytes for leaf in model.net.parameters() if leaf.requires_grad)


def activation_bytes(model: SuperModel, row_tokens: int, *, compiled: bool = False) -> int:
    """Most bytes that all layers together keep of one row for backward."""
    blocks = [block for block in model.group.blocks.values() if block.name != HEAD]
    return sum(
        len(block.instances) * _bytes_of(_kept_values(block, compiled=compiled), row_tokens)
        for block in blocks
    )


def _kept_values(block: Block, *, compiled: bool) -> set[fx.Node]:
    """Values that a layer may keep: all, but where it is compiled those of pointwise operators.

    A compiled layer computes them again from its inputs and from what all other operators, such as
    products and attention, take and give.
    """
    calls = [node for node in block.graph.nodes if node.op == "call_function"]
    if not compiled:
        return set(calls)
    kept = {node for node in block.graph.nodes if node.op == "placeholder"}
    for node in calls:
        if not _is_fused(node):
            kept |= {node, *map(_viewed, node.all_input_nodes)}
    return kept


#: Neither pointwise nor views, but fused with what is.
_FUSED = frozenset(
    {"aten::to", "aten::_to_copy", "aten::cat", "aten::clone", "aten::mean", "aten::sum"}
)


def _is_fused(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    pointwise = torch.Tag.pointwise in target.tags
    return pointwise or _is_view(node) or target._schema.name in _FUSED


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    # One that changes the dtype may give the same tensor, so its result is said to be a view.
    changes = schema.name in _FUSED
    return not changes and bool(schema.returns) and schema.returns[0].alias_info is not None


def _viewed(node: fx.Node) -> fx.Node:
    """The value that a view looks at, through views of views."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _bytes_of(nodes: Iterable[fx.Node], row_tokens: int) -> int:
    """Bytes of those values that have a token dimension."""
    found = 0
    for value in (node.meta.get("val") for node in nodes):
        if isinstance(value, torch.Tensor) and any(_is_token(size) for size in value.shape):
            sizes = (row_tokens if _is_token(size) else int(size) for size in value.shape)
            found += math.prod(sizes) * value.element_size()
    return found


def _is_token(size: object) -> bool:
    return isinstance(size, torch.SymInt)


class Tensor(Planner):
    """Tensor parallelism: a process holds a piece of every matrix and of every adapter.

    For small rounds on processes that lie close together: two sums a layer in the forward, two in
    the backward. The graph pass `shard-tensor` does the cutting; its notes say what stays whole.
    """

    name: ClassVar[str] = "tensor"

    class Options(PlannerOptions):
        """Options of tensor parallelism.

        recompute      layers are computed again in the backward
        nano_batches   parts of a row whose sums and products overlap
        """

        recompute: bool = False
        nano_batches: PositiveInt = 1

    def make(
        self, model: SuperModel, shape: MeshShape | None, options: Options, profile: Any
    ) -> Plan:
        """The plan of `processes` pieces, or of a mesh with tp, and replicas beside it.

        raises    MeshDoesNotFit where heads or widths do not divide; PlanNotRunnable where no
                  matrix can be cut, and for a mesh with stages
        """
        mesh = shape or MeshShape(tp=options.processes)
        if mesh.pp > 1:
            raise PlanNotRunnable(
                f"the plan '{self.name}' has pieces and replicas only",
                expected=f"a mesh of {MeshShape(tp=mesh.tp, dp=mesh.dp * mesh.pp)}",
                found=f"a mesh of {mesh}",
                help="choose pipeline or auto for stages",
            )
        require_fits(model, mesh)
        reasons = nothing_cut(model.group, mesh.tp) if mesh.tp > 1 else []
        if reasons:
            raise PlanNotRunnable(
                f"no layer of the base can be cut over tp={mesh.tp} processes",
                base=model.backbone.title,
                found="\n".join(reasons),
                help="choose replicated, fsdp or pipeline",
            )
        fields = {"recompute": options.recompute, "nano_batches": options.nano_batches}
        return _plan(self, model, mesh, **fields)


class PipelineParallel(Planner):
    """Layers cut into stages by their cost, run by a schedule of torch."""

    name: ClassVar[str] = "pipeline"

    class Options(PlannerOptions):
        """Options of pipeline parallelism.

        schedule             the pipeline schedule: gpipe, 1f1b or interleaved
        stages_per_process   of an interleaved schedule
        micro_batches        forwards of a replica a round; None: chosen by the jobs' batches
        cuts                 where stages begin; None: balanced
        costs                of each layer, forward and backward, in any unit
        recompute            layers are computed again in the backward
        shard_base           each stage's layers are sharded over its replicas
        keep_gathered        until the end of a round, not for one use
        """

        schedule: Schedule = "1f1b"
        stages_per_process: PositiveInt = 2
        micro_batches: PositiveInt | None = None
        cuts: tuple[int, ...] | None = None
        costs: tuple[float, ...] | None = None
        recompute: bool = False
        shard_base: bool = False
        keep_gathered: bool = False

    def make(
        self, model: SuperModel, shape: MeshShape | None, options: Options, profile: Any
    ) -> Plan:
        """The plan of `processes` stages, or of a mesh with pp, and whatever else it has.

        raises    MeshDoesNotFit, NoStage, ScheduleRefused, PlanNotRunnable
        """
        mesh = shape or MeshShape(pp=options.processes)
        if mesh.pp == 1:
            raise PlanNotRunnable(
                "a pipeline has several stages",
                found=f"a mesh of {mesh}",
                help="give a mesh with pp of 2 or more, or choose single, replicated or fsdp",
            )
        require_fits(model, mesh)
        stages = mesh.pp * (options.stages_per_process if options.schedule == "interleaved" else 1)
        cuts = options.cuts
        if cuts is None:
            cuts = balanced_cuts(model, stages, options.costs, recompute=options.recompute)
        cut_stages(model, cuts)
        micro_batches = options.micro_batches or _micro_batches(model, mesh)
        require_schedule(options.schedule, len(cuts) + 1, mesh.pp, micro_batches)
        if options.shard_base and mesh.dp == 1:
            raise PlanNotRunnable(
                "the base cannot be sharded over replicas",
                plan=f"{self.name} on {mesh}",
                reason="shards lie on the replicas of a stage, and the mesh has dp=1",
                help="give a mesh with dp of 2 or more, or leave shard_base out",
            )
        plan = _plan(
            self,
            model,
            mesh,
            cuts=cuts,
            schedule=options.schedule,
            micro_batches=micro_batches,
            shard_base=options.shard_base,
            keep_gathered=options.shard_base and options.keep_gathered,
            recompute=options.recompute,
        )
        require_shardable(model, plan)
        return plan


def _micro_batches(model: SuperModel, mesh: MeshShape) -> int:
    """Several a stage, but no more than there are sequences; whole rounds over the processes."""
    members = [model.jobs[index] for index in model.members.values()]
    sequences = sum(job.per_device_train_batch_size for job in members)
    wanted = min(MICRO_BATCHES_A_STAGE * mesh.pp, sequences // mesh.dp)
    return max(1, wanted // mesh.pp) * mesh.pp
