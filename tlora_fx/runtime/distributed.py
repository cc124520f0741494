"""Messages between the processes of a run, so that none goes on alone.

All goes over the host's group, so that nothing waits for the GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tlora_fx.config.functions import UserFunction
from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import kind_of
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import DeviceUnknown, NotElementwise, RankFailed, RanksParted, TloraError
from tlora_fx.ir.storage import Shard
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.runtime.adapters.files import saved_name
from tlora_fx.runtime.adapters.starts import needs_data
from tlora_fx.runtime.checkpoints.store import JobState
from tlora_fx.runtime.checkpoints.tensor_file import file_tensors, tensor_bytes
from tlora_fx.runtime.member import Member

T = TypeVar("T")
# Optimizers that read whole matrices; all others treat each number by itself.
WHOLE_MATRICES = frozenset({"adafactor", "muon", "adamw_8bit", "lorafa"})


class RoundNotice(NamedTuple):
    """Message of each process before a round.

    table         hash of the round's rows
    asked         the process was asked to stop
    choice        a number that the leader decides for all, such as nano-batches
    step_micros   wall time of the process's last round
    due           a checkpoint is due on this process
    fault         1 + the index of a job that cannot go on, on this process; 0: none
    changes       jobs that come or go before this round, as the leader was asked
    waits         the process has to look at this round before the next one
    compilation   how far the process's compilation is (see `runtime.rounds.compilation`)
    """

    table: int
    asked: int = 0
    choice: int = 1
    step_micros: int = 0
    due: int = 0
    fault: int = 0
    changes: int = 0
    waits: int = 0
    compilation: int = 0


def _reason(error: Exception) -> str:
    """An error in words, and never none."""
    return str(error) if isinstance(error, TloraError) else f"{type(error).__name__}: {error}"


class Ranks:
    """The processes of a mesh, from one of them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def agree(self, notice: RoundNotice) -> RoundNotice:
        """Tell all processes of the round to come, and hear of theirs.

        returns   the same on every process: whether any was asked to stop, or has to wait, the
                  slowest one's time, a job that cannot go on, the least compilation; all else is
                  the leader's
        raises    RanksParted, on every process, where one has other rows
        """
        if self.mesh.world is None:
            return notice
        mine = torch.tensor(notice, dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.mesh.size)]
        dist.all_gather(gathered, mine, group=self.mesh.world)
        notices = [RoundNotice(*row.tolist()) for row in gathered]
        _require_one_table([notice.table for notice in notices])
        return notices[0]._replace(
            asked=max(notice.asked for notice in notices),
            step_micros=max(notice.step_micros for notice in notices),
            fault=max(notice.fault for notice in notices),
            waits=max(notice.waits for notice in notices),
            compilation=min(notice.compilation for notice in notices),
        )

    def together(self, action: Callable[[], T], errors: type[Exception] = TloraError) -> T:
        """Do what may fail on some processes only; if it does, it fails on all.

        errors    that it may fail with. Those of a lost process are not among them: who waits for
                  the others inside of the action would wait for ever after one
        raises    the process's own error; RankFailed where another process has one
        """
        error: Exception | None = None
        try:
            result = action()
        except errors as raised:
            error = raised
        reasons = self.tell_all("" if error is None else _reason(error))
        failed = [rank for rank, reason in enumerate(reasons) if reason]
        if error is None and failed:
            error = RankFailed(
                f"process {failed[0]} cannot go on",
                rank=", ".join(map(str, failed)),
                reason=reasons[failed[0]],
                help="mend it there, and start all processes again",
            )
        if error is not None:
            # Every process raises: it is enough that one tells.
            error.__dict__["shared"] = True
            raise error
        return result

    def tell_all(self, value: T) -> list[T]:
        """Values of all processes, by rank."""
        if self.mesh.world is None:
            return [value]
        values: list[T | None] = [None] * self.mesh.size
        dist.all_gather_object(values, value, group=self.mesh.world)
        return values  # type: ignore[return-value]

    def from_leader(self, value: T) -> T:
        """The leader's value, on every process."""
        if self.mesh.world is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.mesh.world, device=torch.device("cpu"))
        return box[0]


def table_hash(rows: Sequence[PackedBatch]) -> int:
    """A hash of a round's rows, below 2^63."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        for tensor in row.tensors().values():
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def require_elementwise(jobs: Sequence[Job], mesh: Mesh) -> None:
    """Refuse optimizers and starts that need whole matrices where processes hold pieces of them.

    raises    NotElementwise
    """
    for job in jobs:
        for what, found, help in _whole_needs(job, mesh.shape):
            raise NotElementwise(
                f"job '{job.name}' {what}",
                job=job.name,
                found=f"{found}, on a mesh of {mesh.shape}",
                help=f"choose a plan with {help}",
            )


def _whole_needs(job: Job, shape: MeshShape) -> Iterator[tuple[str, str, str]]:
    """What of a job needs what no process of a mesh has; what it is, and which plan helps."""
    init = (job.lora or {}).get("init_lora_weights")
    start, kind = f"init_lora_weights: {init}", kind_of(job.lora_fields)
    if shape.pp > 1 and kind == "ADALORA":
        yield "moves ranks between modules that no process has all of", kind, "pp=1"
    if shape.pp > 1 and needs_data(job):
        what = "has a start from its data, for which a process needs all layers"
        yield what, start, "pp=1, or another start"
    if shape.tp == 1:
        return
    tokens = job.lora_fields.get("trainable_token_indices")
    if tokens or not job.is_lora:
        found = "trainable_token_indices" if tokens else str(kind)
        yield "trains beside LoRA, which is not cut into pieces", found, "tp=1"
    if init == "orthogonal" or job.changes_base or needs_data(job):
        yield "has a start that is made of whole matrices", start, "tp=1, or another start"
    if job.optim in WHOLE_MATRICES or isinstance(job.optim, UserFunction):
        what = "has an optimizer that may read whole matrices"
        yield what, f"optim: {job.optim}", "tp=1, or an optimizer such as adamw"


def _require_one_table(tables: Sequence[int]) -> None:
    (common, count), *others = Counter(tables).most_common()
    if not others:
        return
    apart = [rank for rank, table in enumerate(tables) if table != common]
    raise RanksParted(
        "processes would train on different rows",
        expected=f"the same rows as {count} of {len(tables)} processes",
        found=f"others on rank {', '.join(map(str, apart))}",
        help="check that all processes read the same files and run the same version",
    )


# The device that a user names.


def device_named(name: str | None) -> torch.device:
    """The CPU, or a CUDA device of this machine; without a name the first one where there is one.

    name      "cpu", "cuda" (the first one), "cuda:1", ...
    raises    DeviceUnknown
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = name or ("cuda" if count else "cpu")
    kind, _, number = wanted.partition(":")
    if wanted == "cpu":
        return torch.device("cpu")
    if kind == "cuda" and number in ("", *map(str, range(count))) and count:
        return torch.device("cuda", int(number or 0))
    known = ["cpu", *(f"cuda:{index}" for index in range(count))]
    raise DeviceUnknown(
        f"this machine has no device '{wanted}'",
        expected=", ".join(known),
        found=wanted,
        help="leave the device out: then it is a GPU where there is one",
    )


def require_device(device: torch.device | str | None) -> None:
    """Refuse a device that this machine does not have; raises DeviceUnknown."""
    if device is not None and str(device).partition(":")[0] not in ("cpu", "meta"):
        device_named(str(device))


# A job's state put together from all processes, and cut again for each.
#
# Checkpoints and adapter folders hold whole tensors under PEFT's names, whatever plan made them.
# The leader writes them; replicas hold the same, so only the processes of the first one send.

Shards = Mapping[str, Shard | None]


class StateGatherer:
    """Moves the states of jobs between the leader and the processes of a mesh."""

    def __init__(self, model: SuperModel, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        self.apart = mesh.shape.tp > 1 or mesh.shape.pp > 1

    def whole(self, job: str, state: JobState) -> JobState:
        """The state with whole tensors on the leader; on others what they hold.

        Every process calls this at once.
        """
        if not self.apart:
            return state
        adapter = self._gathered(state.adapter, self._adapter_shards(job))
        optimizer = self._gathered(state.optimizer, self._optimizer_shards(job, state.optimizer))
        values = self._values(dict(state.optimizer_values))
        best = state.best
        # Of a job that keeps its best step a process may hold nothing.
        if state.evaluation.get("keeps_best"):
            best = self._gathered(best, self._adapter_shards(job))
        return replace(
            state, adapter=adapter, optimizer=optimizer, optimizer_values=values, best=best
        )

    def whole_adapter(self, job: str, adapter: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """An adapter with whole tensors on the leader; on others what they hold."""
        return self._gathered(adapter, self._adapter_shards(job)) if self.apart else adapter

    def own(self, job: str, state: JobState) -> JobState:
        """Part of a whole state that this process holds."""
        if not self.apart:
            return state
        shards, parameters = self.model.shards(job), self.model.job_parameters(job)
        adapter = _cut(state.adapter, self._adapter_shards(job))
        cuts: dict[str, Shard | None] = {}
        for name, tensor in state.optimizer.items():
            parameter = _parameter(name)
            if parameter in shards:
                shard, local = shards[parameter], tuple(parameters[parameter].shape)
                # Moments are as large as what they belong to; counters are not cut.
                whole = shard is not None and tuple(tensor.shape) != shard.full_shape(local)
                cuts[name] = None if whole else shard
        values = dict(state.optimizer_values)
        values["state"] = {
            name: value
            for name, value in values.get("state", {}).items()
            if _parameter(name) in shards
        }
        optimizer = _cut(state.optimizer, cuts)
        best = _cut(state.best, self._adapter_shards(job))
        return replace(
            state, adapter=adapter, optimizer=optimizer, optimizer_values=values, best=best
        )

    def _adapter_shards(self, job: str) -> Shards:
        return {saved_name(name): shard for name, shard in self.model.shards(job).items()}

    def _optimizer_shards(self, job: str, tensors: Mapping[str, Tensor]) -> Shards:
        shards, parameters = self.model.shards(job), self.model.job_parameters(job)
        return {
            name: shards[_parameter(name)]
            if tensor.shape == parameters[_parameter(name)].shape
            else None
            for name, tensor in tensors.items()
        }

    def _values(self, values: dict[str, Any]) -> dict[str, Any]:
        states: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(states, values["state"], group=self.mesh.world)
        merged = {name: value for state in states for name, value in state.items()}
        return {**values, "state": merged}

    def _gathered(self, tensors: Mapping[str, Tensor], shards: Shards) -> Mapping[str, Tensor]:
        """Every process's tensors put together, on the leader."""
        sends = self.mesh.dp_rank == 0
        mine = tensor_bytes(tensors) if tensors and sends and not self.mesh.leader else b""
        sent = len(mine), {name: shards[name] for name in tensors if sends}
        by_rank: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(by_rank, sent, group=self.mesh.world)
        if not self.mesh.leader:
            if mine:
                dist.send(torch.frombuffer(mine, dtype=torch.uint8), 0, self.mesh.world)
            return tensors
        pieces: dict[str, dict[int, Tensor]] = {}
        cuts: dict[str, Shard | None] = {}
        for rank, (size, shards_there) in enumerate(by_rank):
            there = tensors if rank == 0 else self._received(rank, size)
            for name, shard in shards_there.items():
                index = 0 if shard is None else shard.index
                # What is joined with others is copied then.
                own = there[name].cpu() if rank == 0 or shard is not None else there[name].clone()
                pieces.setdefault(name, {}).setdefault(index, own)
                cuts[name] = shard
        return {name: _joined(pieces[name], cuts[name]) for name in sorted(pieces)}

    def _received(self, rank: int, size: int) -> Mapping[str, Tensor]:
        if not size:
            return {}
        content = torch.empty(size, dtype=torch.uint8)
        dist.recv(content, rank, self.mesh.world)
        return file_tensors(content.numpy().data)


def _parameter(name: str) -> str:
    """The parameter that a tensor of an optimizer belongs to: "exp_avg/NAME"."""
    return name.partition("/")[2]


def _joined(pieces: Mapping[int, Tensor], shard: Shard | None) -> Tensor:
    if shard is None:
        return pieces[0]
    assert sorted(pieces) == list(range(shard.count)), sorted(pieces)
    return shard.joined([pieces[index] for index in range(shard.count)])


def _cut(tensors: Mapping[str, Tensor], shards: Shards) -> dict[str, Tensor]:
    """This process's pieces of whole tensors; what it does not hold is left out."""
    return {
        name: tensors[name] if shard is None else shard.of(tensors[name]).contiguous()
        for name, shard in shards.items()
        if name in tensors
    }


# Each job's gradient norm, where processes hold whole jobs or parts of their parameters.


def counted(member: Member, model: SuperModel, mesh: Mesh) -> list[nn.Parameter]:
    """Parameters of a job whose gradients count on this process, of those that it holds.

    What is cut over tp counts on each process of it, what is whole there once; stages hold
    different parameters, and replicas the same.
    """
    if mesh.dp_rank:
        return []
    shards = model.shards(member.job.name)
    return [
        parameter
        for name, parameter in member.optimizer.trained.items()
        if parameter.grad is not None and (mesh.tp_rank == 0 or shards[name] is not None)
    ]


@torch.no_grad()
def gradient_squares(members: Sequence[Member], model: SuperModel, mesh: Mesh) -> Tensor:
    """The sum of squares of those gradients of each job that count on this process.

    returns   float64 [J] on the mesh's device, zeros for jobs that are not among the members
    """
    squares = torch.zeros(len(model.jobs), dtype=torch.float64, device=mesh.device)
    for member in members:
        gradients = [
            parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
            for parameter in counted(member, model, mesh)
            if parameter.grad is not None
        ]
        if gradients:
            norms = torch.stack(list(torch._foreach_norm(gradients)))
            squares[member.index] = norms.double().square().sum()
    return squares


@torch.no_grad()
def gradient_norms(
    members: Sequence[Member], device: torch.device, squares: Tensor | None = None
) -> dict[int, float]:
    """The 2-norm over all gradients of each job, by job index.

    squares   float64 [J], `gradient_squares` added up over all processes; None: each has whole jobs
    """
    if squares is None:
        return _whole_norms(members, device)
    by_job = squares.tolist()
    return {member.index: math.sqrt(by_job[member.index]) for member in members}


def _whole_norms(members: Sequence[Member], device: torch.device) -> dict[int, float]:
    """All norms with one wait for the device; float64 holds each as it is."""
    if not members:
        return {}
    norms = [member.optimizer.measured_norm().to(device, torch.float64) for member in members]
    values = torch.stack(norms).tolist()
    return {member.index: norm for member, norm in zip(members, values, strict=True)}
