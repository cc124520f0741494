"""One process that holds everything."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tlora_fx.cost.plan import MeshShape, Plan, model_fingerprint
from tlora_fx.errors import PlanNotRunnable
from tlora_fx.ir.graph import HEAD, Block
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.prepare import require_fits
from tlora_fx.passes.tensor_parallel.shard import nothing_cut
from tlora_fx.planners.protocol import Planner


class Single(Planner):
    """Run on one device."""

    name: ClassVar[str] = "single"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """The plan of one process.

        options   `recompute`: layers are computed again in the backward
        raises    PlanNotRunnable for a mesh of several processes
        """
        if shape is not None and shape.size > 1:
            raise PlanNotRunnable(
                "the plan 'single' is for one process",
                found=f"a mesh of {shape}",
                help="choose replicated, fsdp, pipeline, tensor or auto",
            )
        recompute = bool(options.get("recompute", False))
        return Plan(planner=self.name, model=model_fingerprint(model), recompute=recompute)


# Every process holds the whole model and runs rows of its own.


class Replicated(Planner):
    """Data parallelism: adapters' gradients are summed once a round, and nothing else is sent."""

    name: ClassVar[str] = "replicated"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """The plan of `processes` replicas, or of a mesh with dp alone.

        options   `recompute`: layers are computed again in the backward
        raises    PlanNotRunnable for another mesh
        """
        shape = replicas(self.name, shape, options)
        recompute = bool(options.get("recompute", False))
        return Plan(
            planner=self.name, mesh=shape, model=model_fingerprint(model), recompute=recompute
        )


def replicas(name: str, shape: MeshShape | None, options: dict[str, Any]) -> MeshShape:
    """The mesh of a plan that has replicas only.

    raises    PlanNotRunnable for another mesh
    """
    shape = shape or MeshShape(dp=int(options.get("processes", 1)))
    if shape.pp > 1 or shape.tp > 1:
        raise PlanNotRunnable(
            f"the plan '{name}' has replicas only",
            expected=f"a mesh of {MeshShape(dp=shape.size)}",
            found=f"a mesh of {shape}",
            help="choose pipeline, tensor or auto for the other dimensions",
        )
    return shape


# Replicas that share one copy of the frozen base: each layer is gathered while it is needed.


class Fsdp(Planner):
    """FSDP2 over the frozen base; adapters and their optimizers stay whole on each replica."""

    name: ClassVar[str] = "fsdp"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """The plan of `processes` replicas, or of a mesh with dp alone.

        options   `keep_gathered`, `recompute`: chosen by the memory where they are left out;
                  `memory_bytes`: of one device, without which weights are gathered twice and
                  nothing is recomputed; `max_row_tokens`: of the longest row
        """
        shape = replicas(self.name, shape, options)
        kept, again = choose(
            model, shape.dp, options.get("memory_bytes"), int(options.get("max_row_tokens", 16384))
        )
        return Plan(
            planner=self.name,
            mesh=shape,
            model=model_fingerprint(model),
            shard_base=True,
            keep_gathered=_given(options.get("keep_gathered"), kept),
            recompute=_given(options.get("recompute"), again),
        )


def _given(option: bool | None, chosen: bool) -> bool:
    return chosen if option is None else bool(option)


# What fits into a device's memory: keep gathered weights, keep activations, or neither.
#
# A bound by counting, without a measurement: all values of a layer's graph with a token dimension
# are taken as kept.


# What the allocator, libraries and what is not counted here may take.
USABLE = 0.85


def choose(
    model: SuperModel, replicas: int, memory_bytes: int | None, row_tokens: int
) -> tuple[bool, bool]:
    """Whether gathered weights are kept, and whether layers are computed again.

    memory_bytes   of one device; None for unknown
    row_tokens     of the longest row
    """
    if memory_bytes is None:
        return False, False
    usable = USABLE * memory_bytes - trained_bytes(model)
    base, activations = base_bytes(model), activation_bytes(model, row_tokens)
    if base + activations <= usable:
        return True, False
    return False, base / replicas + activations > usable


def base_bytes(model: SuperModel) -> int:
    """The frozen base, as it is stored."""
    parameters = model.net.parameters()
    return sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)


def trained_bytes(model: SuperModel) -> int:
    """Adapters with gradients and two moments of AdamW."""
    trained = [p for p in model.net.parameters() if p.requires_grad]
    return sum(4 * p.numel() * p.element_size() for p in trained)


def activation_bytes(model: SuperModel, row_tokens: int) -> int:
    """What all layers together keep of one row, at most."""
    blocks = [block for block in model.group.blocks.values() if block.name != HEAD]
    return sum(len(block.instances) * _kept_bytes(block, row_tokens) for block in blocks)


def _kept_bytes(block: Block, row_tokens: int) -> int:
    values = [node.meta.get("val") for node in block.graph.nodes if node.op == "call_function"]
    kept = 0
    for value in values:
        if isinstance(value, torch.Tensor) and any(_is_token(size) for size in value.shape):
            sizes = (row_tokens if _is_token(size) else int(size) for size in value.shape)
            numel = 1
            for size in sizes:
                numel *= size
            kept += numel * value.element_size()
    return kept


def _is_token(size: object) -> bool:
    return isinstance(size, torch.SymInt)


# Every matrix is cut over processes, which compute each layer together.


class Tensor(Planner):
    """Tensor parallelism: a process holds a piece of every matrix and of every adapter.

    For small rounds on processes that lie close together: two sums a layer in the forward, two in
    the backward. The graph pass `shard-tensor` does the cutting; its notes say what stays whole.
    """

    name: ClassVar[str] = "tensor"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """The plan of `processes` pieces, or of a mesh with tp, and replicas beside it.

        options   `recompute`: layers are computed again in the backward; `nano_batches`: parts of
                  a row whose sums and products overlap
        raises    MeshDoesNotFit where heads or widths do not divide; PlanNotRunnable where no
                  matrix can be cut, and for a mesh with stages
        """
        shape = shape or MeshShape(tp=int(options.get("processes", 1)))
        if shape.pp > 1:
            raise PlanNotRunnable(
                f"the plan '{self.name}' has pieces and replicas only",
                expected=f"a mesh of {MeshShape(tp=shape.tp, dp=shape.dp * shape.pp)}",
                found=f"a mesh of {shape}",
                help="choose pipeline or auto for stages",
            )
        require_fits(model, shape)
        reasons = nothing_cut(model.group, shape.tp) if shape.tp > 1 else []
        if reasons:
            raise PlanNotRunnable(
                f"no layer of the base can be cut over tp={shape.tp} processes",
                base=model.backbone.title,
                found="\n".join(reasons),
                help="choose replicated, fsdp or pipeline",
            )
        return Plan(
            planner=self.name,
            mesh=shape,
            model=model_fingerprint(model),
            recompute=bool(options.get("recompute", False)),
            nano_batches=int(options.get("nano_batches", 1)),
        )
