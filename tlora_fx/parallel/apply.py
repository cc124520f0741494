"""Make a model ready to run under a plan: the one way that all planners share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tlora_fx.codegen.ahead import ahead
from tlora_fx.config.functions import UserFunction
from tlora_fx.config.job import Job
from tlora_fx.cost.facts import why_launched
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import NoGradient, PlanNotRunnable
from tlora_fx.host.environment import kernel_mode
from tlora_fx.ir.graph import HEAD
from tlora_fx.ir.storage import LocalShard
from tlora_fx.model.batch import PackedBatch, size_of
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops import use_group
from tlora_fx.ops.kernels.added_gradients import adding
from tlora_fx.ops.kernels.packed import as_compiled
from tlora_fx.ops.kernels.select import cut_by_jobs, is_strict
from tlora_fx.ops.parallel import GROUP
from tlora_fx.parallel.capturing import add_gradients, added_by_kernels
from tlora_fx.parallel.cuda_graphs import RowGraphs
from tlora_fx.parallel.fsdp import Sharded, gathered_bytes, shard_base, shard_layer
from tlora_fx.parallel.mesh import Mesh, open_mesh
from tlora_fx.parallel.nano_batches import NanoModel
from tlora_fx.parallel.scores import RowScores
from tlora_fx.parallel.stage_graphs import StageGraphs


def part_of(model: SuperModel, plan: Plan, mesh: Mesh) -> LocalShard:
    """Part of a prepared model that this process holds."""
    held: frozenset[str] | None = None
    if plan.mesh.pp > 1:
        from tlora_fx.parallel.stages import held_by

        held = held_by(model, plan, mesh.pp_rank)
    return LocalShard(held, mesh.tp_rank)


def load(model: SuperModel, plan: Plan, mesh: Mesh, base: Mapping[str, Tensor]) -> None:
    """Give a prepared model this process's part of the base's weights.

    base     tensors by canonical name; one that this process does not hold is not asked for
    """
    require_shardable(model, plan)
    part = part_of(model, plan, mesh)

    def shard(path: str) -> None:
        if part.holds(path):
            shard_layer(model, plan, mesh, path)

    model.materialize(base, mesh.device, part, shard if shards(plan) else None)


@dataclass(frozen=True, slots=True)
class AppliedPlan:
    """Plan, mesh and runner of an open model; its next trainer under the same plan reuses them."""

    plan: Plan
    mesh: Mesh
    runner: RowRunner | ReducingRunner


def mesh_for(model: SuperModel, plan: Plan, device: torch.device | str) -> Mesh:
    """The mesh on which a model runs under this plan already, or a new one.

    model   prepared for the plan
    """
    before: AppliedPlan | None = model.applied
    device = torch.device(device)
    if before is not None and before.plan == plan:
        mesh = before.mesh
        there = mesh.size == 1 or mesh.world is dist.group.WORLD
        if there and mesh.device.type == device.type and device.index in (None, mesh.device.index):
            return mesh
    return open_mesh(plan.mesh, device)


def apply(
    model: SuperModel, plan: Plan, mesh: Mesh, *, largest_row: int = 0
) -> RowRunner | ReducingRunner:
    """Make a model with its weights ready to run.

    model         prepared for the plan and loaded; its parameters' gradients move, so that
                  `job_parameters` is to be asked for afterwards
    mesh          of `mesh_for`: an open model that ran on it already goes on as it did, with its
                  buffers and captured rows
    largest_row   tokens of the largest row that may come: where it is given, on a GPU, small rows
                  in packed form run as CUDA graphs under plans that can (see `cuda_graphs`)
    raises        PlanNotRunnable
    """
    assert plan.mesh == mesh.shape, (plan.mesh, mesh.shape)
    before: AppliedPlan | None = model.applied
    if before is not None and before.plan == plan and before.mesh is mesh:
        return _again(before, largest_row)
    let_go(model)
    runner = _applied(model, plan, mesh, largest_row)
    if model.is_open:
        model.applied = AppliedPlan(plan, mesh, runner)
    return runner


def _again(before: AppliedPlan, largest_row: int) -> RowRunner | ReducingRunner:
    """What ran a model before, for rows of another size."""
    before.runner.nano_batches = before.plan.nano_batches
    if before.runner.graphs is not None:
        before.runner.graphs.largest_row = largest_row
    return before.runner


def let_go(model: SuperModel) -> None:
    """Forget how an open model ran, and what was captured of it."""
    before: AppliedPlan | None = model.applied
    if before is not None and before.runner.graphs is not None:
        before.runner.graphs.clear()
    model.applied = None


def _applied(
    model: SuperModel, plan: Plan, mesh: Mesh, largest_row: int
) -> RowRunner | ReducingRunner:
    if plan.mesh.tp > 1:
        use_group(GROUP, mesh.tp)
    require_shardable(model, plan)
    require_nano(plan, plan.nano_batches > 1)
    require_whole_pairs(model.jobs, plan, cuts=plan.nano_batches > 1)
    if mesh.size > 1:
        model.keep_all_gradients()
    sharded = shard_base(model, plan, mesh) if shards(plan) and plan.mesh.pp == 1 else None
    if plan.mesh.pp > 1:
        from tlora_fx.parallel.pipeline import PipelineRunner

        pipeline = PipelineRunner(model, plan, mesh, largest_row=largest_row)
        return ReducingRunner(model, mesh, pipeline)
    runner = RowRunner(model, mesh, sharded=sharded is not None)
    if largest_row and mesh.device.type == "cuda" and plan.captures:
        runner.graphs = _graphs(model, mesh, largest_row, sharded)
    runner.nano_batches = plan.nano_batches
    return runner if mesh.size == 1 else ReducingRunner(model, mesh, runner)


def _graphs(model: SuperModel, mesh: Mesh, largest_row: int, sharded: Sharded | None) -> RowGraphs:
    """What runs small rows as CUDA graphs, or knows why none can be captured."""
    gathering = None if sharded is None else sharded.gathering
    gathered = 0 if sharded is None else gathered_bytes(model)
    graphs = RowGraphs(
        model, mesh.device, largest_row,
        group=mesh.tp, gathering=gathering, gathered=gathered, stays=sharded is None,
    )  # fmt: skip
    if reasons := why_launched(model.group):
        graphs.refused = f"tables of jobs are read on the host by {', '.join(reasons)}"
    elif sharded is not None and gathering is None:
        graphs.refused = "the sharded base is gathered by a collective"
    return graphs


def shards(plan: Plan) -> bool:
    """Whether the base is sharded over replicas."""
    return plan.shard_base and plan.mesh.dp > 1


def require_nano(plan: Plan, wanted: bool) -> None:
    """Refuse nano-batches where nothing would cut rows into them.

    wanted    whether the plan, or a controller, asks for any
    raises    PlanNotRunnable
    """
    if wanted and plan.mesh.pp > 1:
        raise PlanNotRunnable(
            "stages of a pipeline take whole micro-batches",
            plan=f"{plan.planner} on {plan.mesh}",
            found="nano-batches",
            help="plan more micro-batches instead, or use pp=1",
        )
    if wanted and shards(plan):
        raise PlanNotRunnable(
            "layers whose weights are gathered are called once a row",
            plan=f"{plan.planner} on {plan.mesh}",
            found="nano-batches",
            help="leave nano-batches out, or use the plan tensor",
        )
    if wanted and plan.recompute_budget:
        raise PlanNotRunnable(
            "nano-batches cut layers, which a budget of recomputation needs whole",
            plan=f"{plan.planner} on {plan.mesh}",
            found=f"recompute_budget {plan.recompute_budget:g}, and nano-batches",
            help="leave out one of them",
        )


def require_whole_pairs(jobs: Sequence[Job], plan: Plan, *, cuts: bool) -> None:
    """Refuse plans under which rows of other losses do not run whole, or not twice.

    cuts      whether rows are cut into nano-batches
    raises    PlanNotRunnable
    """
    names = [job.name for job in jobs if job.has_own_loss or job.needs_whole_batches]
    by_token = any(job.label_smoothing_factor or job.named_loss is not None for job in jobs)
    if names and (cuts or plan.mesh.pp > 1 or shards(plan) or (by_token and plan.mesh.tp > 1)):
        raise PlanNotRunnable(
            "losses beside cross entropy, and noise, need rows that run whole",
            plan=f"{plan.planner} on {plan.mesh}",
            jobs=", ".join(names),
            help="use a plan with pp=1, without a sharded base and without nano-batches, such as "
            "replicated or tensor",
        )
    functions = [job.name for job in jobs if isinstance(job.loss, UserFunction)]
    if functions and plan.mesh.size > 1:
        raise PlanNotRunnable(
            "functions as loss run in one process, which reports their numbers",
            plan=f"{plan.planner} on {plan.mesh}",
            jobs=", ".join(functions),
            help="use the plan single",
        )


def require_shardable(model: SuperModel, plan: Plan) -> None:
    """Refuse to shard what cannot be sharded layer by layer; other plans pass.

    raises    PlanNotRunnable
    """
    if not shards(plan):
        return
    why = ""
    if not model.layer_order():
        why = "the model was compiled without layers"
    if HEAD not in model.group.blocks:
        why = "the model was compiled without lower-loss"
    if why:
        raise PlanNotRunnable(
            "the base cannot be sharded over replicas",
            plan=f"{plan.planner} on {plan.mesh}",
            reason=why,
            help="use a plan with shard_base: false",
        )


class StepRunner(Protocol):
    """Runs forward and backward of whole rounds under one plan.

    Runners of whole rows also have `nano_batches`, a number that may change between rounds.
    """

    def run(self, rows: Sequence[PackedBatch], weights: Tensor) -> Tensor:
        """One round: forward, backward, and each job's loss.

        Afterwards the gradients of this process's parameters hold the whole round's: summed over
        replicas, and over tp where a replicated half of an adapter needs it.

        rows      the whole round's rows on the CPU, the same on every process; their number is a
                  multiple of dp * micro_batches. Replica d runs rows d, d + dp, d + 2 dp, ...
        weights   [J] on the process's device: what a job's loss sum is multiplied with
        returns   [J] each job's weighted loss sum over the round, the same on every process
        """

    def evaluate(self, rows: Sequence[PackedBatch]) -> RowScores:
        """The same rows without dropout, gradients and graphs; nothing that trains changes.

        rows      as of `run`
        """


class RowRunner:
    """Runs whole rows, one after the other, as a single process does.

    sharded  the base is sharded over the mesh's replicas
    nano     set when rows are first cut into nano-batches; its number may change between rounds
    graphs   of rows that come again, where rows may run so
    """

    def __init__(self, model: SuperModel, mesh: Mesh, *, sharded: bool = False) -> None:
        self.model, self.mesh, self.sharded = model, mesh, sharded
        self.nano: NanoModel | None = None
        self.graphs: RowGraphs | None = None

    @property
    def nano_batches(self) -> int:
        """Into how many parts each row is cut whose communication and compute overlap."""
        return 1 if self.nano is None else self.nano.count

    @nano_batches.setter
    def nano_batches(self, count: int) -> None:
        if self.nano is None and count > 1:
            self.nano = NanoModel(self.model)
            if self.graphs is not None:
                self.graphs.clear()
        if self.nano is not None:
            self.nano.count = count

    def run(self, rows: Sequence[PackedBatch], weights: Tensor) -> Tensor:
        """Forward and backward of this replica's rows; see `StepRunner`."""
        total: Tensor | None = None
        for given in rows[self.mesh.dp_rank :: self.mesh.shape.dp]:
            row = given
            self._compile_ahead(row, weights)
            if self.graphs is not None and self.nano is None:
                row = self.graphs.with_reference(row, weights)
            losses = self._captured(row, weights)
            if losses is None:
                if self.graphs is not None and self.nano is None:
                    row = self.graphs.formed(row)
                losses = self._run(row, weights)
            total = losses if total is None else total + losses
        return torch.zeros_like(weights) if total is None else total

    def evaluate(self, rows: Sequence[PackedBatch]) -> RowScores:
        """Forward of this replica's rows; see `StepRunner`."""
        mine = range(self.mesh.dp_rank, len(rows), self.mesh.shape.dp)
        total = torch.zeros(len(self.model.jobs), dtype=torch.float64, device=self.mesh.device)
        with cut_by_jobs(), self.model.evaluating() as predicted:
            for index in mine:
                total += self.model(self._moved(rows[index]))
        tokens = (part.cpu() for part in predicted)
        return RowScores(total, dict(zip(mine, tokens, strict=True)))

    def _compile_ahead(self, row: PackedBatch, weights: Tensor) -> None:
        """Have the kernels of the first row compiled, in the form in which it will run."""
        if self.mesh.device.type == "cuda" and self._runs_whole_rows:
            ahead.try_once(
                "row",
                self.model,
                partial(self._ask, row, weights),
                partial(self._kernels_of, row, weights),
            )

    def _ask(self, row: PackedBatch, weights: Tensor) -> None:
        if self.graphs is None:
            with cut_by_jobs():
                start_nothing(self.model, row, weights)
            return
        for formed in self.graphs.forms(row):
            with self.graphs.asking(formed):
                start_nothing(self.model, formed, weights)

    def _kernels_of(self, row: PackedBatch, weights: Tensor) -> tuple[object, ...]:
        """What decides which kernels the first row, and those that follow, will start."""
        model, graphs = self.model, self.graphs
        named = (*model.named_parameters(), *model.named_buffers())
        return (
            [(name, tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in named],
            [sorted(job.lora_fields.items()) for job in model.jobs],
            (model.source, model.is_compiled, model.is_open),
            (torch.cuda.get_device_name(weights.device), kernel_mode(), is_strict()),
            # Several processes add gradients by other kernels.
            self.mesh.size > 1,
            None if graphs is None else (graphs.ladder.steps, graphs.most, bool(graphs.refused)),
            (size_of(row) if row.is_plain else row.input_ids.shape, row.is_plain),
        )

    @property
    def _runs_whole_rows(self) -> bool:
        """Whether no other process, and no other part of a row, takes part in a row.

        Replicas of a whole base talk between rounds alone.
        """
        return self.mesh.size == self.mesh.shape.dp and not self.sharded and self.nano is None

    def _run(self, row: PackedBatch, weights: Tensor) -> Tensor:
        alone = self.mesh.size == 1 and self.nano is None
        with cut_by_jobs() if self.graphs is None else self.graphs.launching(row):
            before = _allocated(self.mesh.device)
            losses = self.model.weighted(self._moved(row), weights)
            # Where processes sum gradients they do it as those come.
            kept = _allocated(self.mesh.device) - before if alone else 0
            add_gradients(losses, self.model, kept)
        return losses.detach()

    def _captured(self, row: PackedBatch, weights: Tensor) -> Tensor | None:
        """Run a row as a CUDA graph, if it can be; nano-batches are cut anew for each row."""
        if self.graphs is None:
            return None
        self.graphs.rows_run += 1
        return None if self.nano is not None else self.graphs.run(row, weights)

    def _moved(self, row: PackedBatch) -> PackedBatch:
        device = self.mesh.device
        return row.to(device) if self.nano is None else self.nano.moved(row, device)


def _allocated(device: torch.device) -> int:
    """Bytes of tensors on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def start_nothing(model: SuperModel, row: PackedBatch, weights: Tensor) -> None:
    """Forward and backward of a row whose kernels are compiled ahead; nothing that trains changes.

    Layers of one structure start the same kernels, so one of them runs. Where adapters are larger
    than what the forward keeps, the backward is left out: their gradients would lie beside those
    that add up, and ask for memory that a row does not need.

    row       on the CPU
    weights   [J] on the model's device, a GPU
    """
    device = weights.device
    before = torch.cuda.memory_allocated(device)
    with (
        torch.random.fork_rng([device]),
        as_compiled(model.is_compiled),
        each_structure_once(model) as idle,
    ):
        losses = model.weighted(row.to(device), weights)
        kept = torch.cuda.memory_allocated(device) - before
        others = {id(leaf) for layer in idle for leaf in layer.parameters()}
        leaves = [x for x in model.parameters() if x.requires_grad and id(x) not in others]
        if losses.requires_grad and sum(leaf.nbytes for leaf in leaves) <= kept:
            with adding(added_by_kernels(model)):
                torch.autograd.grad(losses.sum(), leaves, allow_unused=True)


@contextmanager
def each_structure_once(model: SuperModel) -> Iterator[list[nn.Module]]:
    """Inside, a layer gives what an earlier one of its structure gave, instead of running.

    A layer whose inputs ask for a gradient, where those of the earlier one did not, runs too, and
    so does one whose inputs have other shapes: a row may run beside what it is compared with.

    yields   the layers that did not run
    """
    given: dict[tuple[object, ...], Any] = {}
    idle: list[nn.Module] = []
    own: list[tuple[nn.Module, Any]] = []

    def give(name: str, layer: nn.Module, forward: Callable[..., Any], *inputs: Tensor) -> Any:
        key = name, *((value.requires_grad, value.shape) for value in inputs)
        if key in given:
            idle.append(layer)
        else:
            given[key] = forward(*inputs)
        return given[key]

    try:
        for block in model.group.blocks.values():
            for path in block.instances if block.name != HEAD else ():
                layer = model.net.get_submodule(path)
                own.append((layer, layer.__dict__.get("forward")))
                layer.__dict__["forward"] = partial(give, block.name, layer, layer.forward)
        yield idle
    finally:
        for layer, forward in own:
            del layer.__dict__["forward"]
            if forward is not None:
                layer.__dict__["forward"] = forward


class ReducingRunner:
    """Sums gradients and losses of all replicas behind another runner."""

    def __init__(self, model: SuperModel, mesh: Mesh, inner: StepRunner) -> None:
        self.model, self.mesh, self.inner = model, mesh, inner
        self.buckets = GradientBuckets(model, mesh)
        self._first: FirstStep | None = FirstStep(model, mesh)

    @property
    def nano_batches(self) -> int:
        """See `RowRunner`; always 1 behind a runner that has none."""
        return int(getattr(self.inner, "nano_batches", 1))

    @nano_batches.setter
    def nano_batches(self, count: int) -> None:
        if isinstance(self.inner, RowRunner):
            self.inner.nano_batches = count

    @property
    def graphs(self) -> RowGraphs | StageGraphs | None:
        """CUDA graphs of rows or micro-batches that come again, where they may run so."""
        return getattr(self.inner, "graphs", None)

    def run(self, rows: Sequence[PackedBatch], weights: Tensor) -> Tensor:
        """One round; see `StepRunner`.

        raises    NoGradient after the first round
        """
        total = self.inner.run(rows, weights)
        if self._first is not None:
            self._first.require_gradients(rows)
            self._first = None
        self.buckets.reduce()
        if self.mesh.dp is not None:
            dist.all_reduce(total, group=self.mesh.dp)
        return total

    def evaluate(self, rows: Sequence[PackedBatch]) -> RowScores:
        """See `StepRunner`."""
        scores = self.inner.evaluate(rows)
        if self.mesh.dp is not None:
            dist.all_reduce(scores.losses, group=self.mesh.dp)
        return scores


# Gradients of all adapters in a few flat buffers, each summed by one all-reduce.
#
# Gradients of banks become views of the buffers, so nothing is copied before or after.

# Kernels and reductions choose their arithmetic by alignment: every gradient begins on a boundary.
BOUNDARY_BYTES = 256


class GradientBuckets:
    """The gradients of what a process trains, by dtype and by who has to agree on them.

    The half of an adapter that is whole while the other is cut over tp has a partial gradient on
    each process of tp; all else only over dp.
    """

    def __init__(self, model: SuperModel, mesh: Mesh) -> None:
        partial = {id(leaf) for leaf in model.partial_sums()}
        sorted_leaves: dict[tuple[dist.ProcessGroup, torch.dtype], list[nn.Parameter]] = {}
        for leaf in trained_leaves(model):
            group = mesh.dp_tp if id(leaf) in partial else mesh.dp
            if group is not None:
                sorted_leaves.setdefault((group, leaf.dtype), []).append(leaf)
        self.buckets = [
            (group, _move_gradients(leaves)) for (group, _), leaves in sorted_leaves.items()
        ]
        model.forget_views()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum every gradient over the processes that hold parts of it."""
        for group, flat in self.buckets:
            dist.all_reduce(flat, group=group)


def trained_leaves(model: SuperModel) -> list[nn.Parameter]:
    """Every leaf that this process trains: halves of banks, and what jobs train outside of them."""
    leaves = model.net.parameters()
    return [leaf for leaf in leaves if leaf.requires_grad and not leaf.is_meta]


def _move_gradients(leaves: Sequence[nn.Parameter]) -> Tensor:
    """A flat buffer of zeros whose pieces are the gradients of these leaves."""
    size = leaves[0].element_size()
    step = max(1, BOUNDARY_BYTES // size)
    starts = [0]
    for leaf in leaves:
        starts.append(starts[-1] + -(-leaf.numel() // step) * step)
    flat = torch.zeros(starts[-1], dtype=leaves[0].dtype, device=leaves[0].device)
    for leaf, start in zip(leaves, starts, strict=False):
        # A B of experts lies by columns: optimizers want gradients that lie alike.
        leaf.grad = flat.as_strided(leaf.shape, leaf.stride(), start)
    return flat


# Whether gradients reached every adapter that had something to learn from, in the first step.


class FirstStep:
    """Watches the first step of a run over several processes.

    A schedule or a pass that loses a gradient would otherwise train on without a word.
    """

    def __init__(self, model: SuperModel, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        reached: set[int] = set()

        def reach(leaf: nn.Parameter) -> None:
            # No more than this is kept by the leaves, of a model that never runs too.
            reached.add(id(leaf))

        self._reached = reached
        self._handles: list[RemovableHandle] = [
            leaf.register_post_accumulate_grad_hook(reach)  # type: ignore[no-untyped-call]
            for leaf in trained_leaves(model)
        ]

    def require_gradients(self, rows: Sequence[PackedBatch]) -> None:
        """Refuse a step in which an adapter got no gradient; called after its backward.

        rows     of the whole round
        raises   NoGradient, on every process
        """
        for handle in self._handles:
            handle.remove()
        mine = self._missed(_jobs_with_targets(rows))
        by_rank = [mine] * self.mesh.size
        if self.mesh.world is not None:
            dist.all_gather_object(by_rank, mine, group=self.mesh.world)
        for rank, missed in enumerate(by_rank):
            if missed:
                more = f"\nand {len(missed) - 5} more" if missed[5:] else ""
                raise NoGradient(
                    "no gradient reached an adapter in the first step",
                    rank=rank,
                    found="\n".join(missed[:5]) + more,
                    help="please report this, with the job file and the plan",
                )

    def _missed(self, jobs: set[int]) -> list[str]:
        """Sites, with their jobs, that no gradient reached."""
        names = self.model.group.job_names
        missed: list[str] = []
        late = {id(leaf) for leaf in trained_leaves(self.model)} - self._reached
        for path, bank in self.model.banks.items():
            served = [names[job] for job in sorted(jobs) if bank.serves(job)]
            if served and late & {id(bank.a), id(bank.b)}:
                missed.append(f"{path}: {', '.join(served)}")
        for job in sorted(jobs):
            for name, parameter in self.model.job_parameters(names[job]).items():
                if id(parameter) in late:
                    missed.append(f"{name}: {names[job]}")
        return missed


def _jobs_with_targets(rows: Sequence[PackedBatch]) -> set[int]:
    jobs: set[int] = set()
    for row in rows:
        ends = row.target_segments.tolist()
        jobs |= {job for job in range(len(ends) - 1) if ends[job + 1] > ends[job]}
    return jobs
