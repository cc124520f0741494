"""Measure the layers of a model on the device at hand: what `tlora-fx profile` runs.

A few layers are enough: of each structure one with the jobs' adapters and one bare. They get random
weights and are compiled as training compiles them. Each is timed alone, on rows of several lengths
and with the tokens of several jobs, and so are embedding, head with loss, the end of a job's step,
and packing on the host. A layer of a tensor-parallel plan is timed with its pieces of the matrices
and without its collectives, which needs one device.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from tlora_fx.compiler import compile
from tlora_fx.config.job import Job
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import Tier
from tlora_fx.cost.load import Load, work_of
from tlora_fx.cost.model_facts import CAPTURED_TOKENS, ModelFacts
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import (
    Captured,
    CollectivePoint,
    Hardware,
    HostPoint,
    LayerPoint,
    LayerProfile,
    LossPoint,
    Operation,
    OptimizerPoint,
    Profile,
    RootPoint,
    name_of,
)
from tlora_fx.cost.profile_sources import own_file, shape_of
from tlora_fx.errors import NotProfilable, ProfileFileError, TloraError
from tlora_fx.ir.graph import LOSS, under
from tlora_fx.ir.storage import LocalShard
from tlora_fx.model.batch import JobTokens, PackedBatch, pack, pad
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.parallel import GROUP, use_group
from tlora_fx.parallel.cuda_graphs import forget_capture
from tlora_fx.parallel.prepare import prepared
from tlora_fx.runtime.adapters import base_tensors, start_adapters
from tlora_fx.runtime.distributed import device_named
from tlora_fx.runtime.optimizer import JobOptimizer

# Time pieces of work in turns, and see what they leave in memory.
#
# In each round every piece has its turn, so that clocks, temperatures and neighbours fall on all
# alike; a figure is the median over the rounds. On CUDA times come from events, so that what is
# seen is what training has: the device while it is busy, the host where it cannot keep ahead.


logger = logging.getLogger("tlora_fx.runtime")
# Of one piece in a turn: a host that launches few layers has not come to its pace.
BLOCK_MS = 50.0
MOST_CALLS = 8


@dataclass(slots=True)
class TimedPass:
    """One forward, and its backward where it has one.

    forward    what is timed; gives what `backward` takes
    backward   of several forwards at once, as one backward runs through all layers of a model;
               None: the forward alone is timed
    times      milliseconds of forward and backward, one pair a round
    captured   the same as CUDA graphs; empty where that was not asked for, or does not go
    """

    forward: Callable[[], Any]
    backward: Callable[[Sequence[Any]], object] | None = None
    times: list[tuple[float, float]] = field(default_factory=list)
    captured: list[tuple[float, float]] = field(default_factory=list)
    calls: int = 1

    @property
    def forward_ms(self) -> float:
        """The median over the rounds."""
        return statistics.median(there for there, _ in self.times)

    @property
    def backward_ms(self) -> float:
        """The median over the rounds."""
        return statistics.median(back for _, back in self.times)

    @property
    def captured_ms(self) -> tuple[float, float] | None:
        """The medians of forward and backward as CUDA graphs, if there are any."""
        if not self.captured:
            return None
        there, back = zip(*self.captured, strict=True)
        return statistics.median(there), statistics.median(back)

    @property
    def noise(self) -> float:
        """The larger median deviation of both, over its median."""
        pairs = list(zip(*self.times, strict=True))
        return max(_noise(values) for values in pairs if any(values))


def measure(pieces: Sequence[TimedPass], device: torch.device, rounds: int) -> None:
    """Warm every piece up, then time all of them in turns."""
    for piece in pieces:
        _block(piece, device, 1)
        once = sum(_block(piece, device, 1))
        piece.calls = max(1, min(math.ceil(BLOCK_MS / max(once, 1e-3)), MOST_CALLS))
    for number in range(rounds):
        for piece in pieces if number % 2 == 0 else reversed(pieces):
            piece.times.append(_block(piece, device, piece.calls))


def _block(piece: TimedPass, device: torch.device, calls: int) -> tuple[float, float]:
    """Milliseconds a call of forward and backward; one forward before them does not count."""
    stamp = _stamps(device)
    piece.forward()
    stamps = [stamp()]
    made = [piece.forward() for _ in range(calls)]
    stamps.append(stamp())
    if piece.backward is not None:
        piece.backward(made)
        stamps.append(stamp())
    first, second, *third = [when() for when in stamps]
    back = (third[0] - second) / calls if third else 0.0
    return (second - first) / calls, back


def measure_captured(pieces: Sequence[TimedPass], device: torch.device, rounds: int) -> None:
    """Time pieces that `measure` has timed as CUDA graphs too, one after the other.

    What reads tables of jobs on the host cannot be captured, and is left out.
    """
    if device.type != "cuda":
        return
    stream = torch.cuda.current_stream(device)
    for piece in pieces:
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.device(device):
                graphs, kept = _graphs(piece, pool)
        except (RuntimeError, TloraError) as error:
            logger.info("not timed as a CUDA graph: %s", error)
            forget_capture(device, stream, pool)
            continue
        for _ in range(rounds + 1):
            piece.captured.append(_replayed(graphs, device, piece.calls))
        # The first replay of a graph loads it.
        del piece.captured[0], graphs, kept


def _graphs(piece: TimedPass, pool: Any) -> tuple[list[torch.cuda.CUDAGraph], object]:
    """The forward, and the backward where there is one; and what lies in their memory."""
    graphs = [torch.cuda.CUDAGraph() for _ in range(1 if piece.backward is None else 2)]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graphs[0], pool=pool, stream=stream):
        made = piece.forward()
    if piece.backward is not None:
        with torch.cuda.graph(graphs[1], pool=pool, stream=stream):
            piece.backward([made])
    return graphs, made


def _replayed(
    graphs: Sequence[torch.cuda.CUDAGraph], device: torch.device, calls: int
) -> tuple[float, float]:
    """Milliseconds a replay of the first and of the second graph."""
    stamp = _stamps(device)
    graphs[0].replay()
    stamps = [stamp()]
    for graph in graphs:
        for _ in range(calls):
            graph.replay()
        stamps.append(stamp())
    first, second, *third = [when() for when in stamps]
    return (second - first) / calls, (third[0] - second) / calls if third else 0.0


def _stamps(device: torch.device) -> Callable[[], Callable[[], float]]:
    """What takes a stamp on the device; the stamp then says its milliseconds."""
    if device.type != "cuda":
        return _host_stamp
    event: Any = torch.cuda.Event
    zero = event(enable_timing=True)
    torch.cuda.synchronize(device)
    zero.record()

    def stamp() -> Callable[[], float]:
        taken = event(enable_timing=True)
        taken.record()

        def when() -> float:
            taken.synchronize()
            return float(zero.elapsed_time(taken))

        return when

    return stamp


def _host_stamp() -> Callable[[], float]:
    now = time.perf_counter() * 1e3
    return lambda: now


def _noise(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values) / middle if middle else 0.0


@dataclass(slots=True)
class Bytes:
    """What a forward leaves until the backward, and the most that each took meanwhile."""

    saved: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0


def bytes_of(piece: TimedPass, device: torch.device, shared: Sequence[Tensor]) -> Bytes:
    """See one forward and backward in memory.

    shared   tensors that stand before the forward and are not counted where no allocator counts
    """
    piece_backward = piece.backward or (lambda made: None)
    if device.type != "cuda":
        known = {tensor.untyped_storage().data_ptr() for tensor in shared}
        with _kept_storages(known) as kept:
            made = piece.forward()
        for result in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(result, Tensor):
                kept[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
        saved = float(sum(kept.values()))
        piece_backward([made])
        return Bytes(saved, saved, 0.5 * saved)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    made = piece.forward()
    saved = torch.cuda.memory_allocated(device) - before
    forward_peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    standing = torch.cuda.memory_allocated(device)
    piece_backward([made])
    backward_peak = torch.cuda.max_memory_allocated(device) - standing
    return Bytes(float(saved), float(forward_peak), float(backward_peak))


@contextmanager
def _kept_storages(known: set[int]) -> Iterator[dict[int, int]]:
    """Sizes of the storages that autograd keeps meanwhile, but for known ones."""
    kept: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and storage.data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


# Measure what processes take to talk: run under torchrun, by all processes at once.


SIZES = (2**16, 2**20, 2**23, 2**26, 2**28)
ON_CPU = SIZES[:3]
REPEATS = 5


def collective_points(
    device: torch.device, per_node: int, rounds: int = 5
) -> list[CollectivePoint]:
    """All-reduce, all-gather and send over all processes, half of them, and two, by size.

    per_node   processes of a node: what stays inside one is told apart from what does not
    returns    the same on every process: medians of the slowest
    """
    world = dist.get_world_size()
    found: list[CollectivePoint] = []
    for size in sorted({2, max(2, world // 2), world}):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            tier: Tier = "node" if size <= per_node else "network"
            found.extend(_points(device, group, size, tier, rounds))
        dist.barrier()
    return found


def _points(
    device: torch.device, group: dist.ProcessGroup | None, size: int, tier: Tier, rounds: int
) -> list[CollectivePoint]:
    made = []
    for payload in SIZES if device.type == "cuda" else ON_CPU:
        works = _works(device, group, size, payload)
        for operation, work in works.items():
            parts = 2 if operation == "send" else 1
            times = [_block_profiling_collectives(work, device, parts) for _ in range(rounds + 1)][
                1:
            ]
            middle = statistics.median(times)
            slowest = torch.tensor([middle], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            noise = statistics.median(abs(one - middle) for one in times) / middle
            made.append(
                CollectivePoint(
                    operation=operation,
                    tier=tier,
                    processes=size,
                    payload_bytes=payload,
                    ms=float(slowest),
                    noise=noise,
                )
            )
    return made


def _works(
    device: torch.device, group: dist.ProcessGroup | None, size: int, payload: int
) -> dict[Operation, Callable[[], object]]:
    whole = torch.zeros(payload // 2 // size * size, dtype=torch.bfloat16, device=device)
    piece = torch.zeros(whole.numel() // size, dtype=torch.bfloat16, device=device)
    found: dict[Operation, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, piece, group=group),
    }
    if size == 2:
        found["send"] = lambda: _send(whole, group)
    return found


def _send(value: Tensor, group: dist.ProcessGroup | None) -> None:
    """From the first process to the second, and back: two sends."""
    rank = dist.get_rank(group)
    for sender in (0, 1):
        if rank == sender:
            dist.send(value, 1 - rank, group=group)
        else:
            dist.recv(value, 1 - rank, group=group)


def _block_profiling_collectives(
    work: Callable[[], object], device: torch.device, parts: int = 1
) -> float:
    """Milliseconds of one; `parts`: how many each call holds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(REPEATS):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1e3 / REPEATS / parts


# Rows to measure on, and what a model's root calls its layers and loss with on each.


#: The share of a row's tokens that each job has.
Mix = tuple[float, ...]
SEED = 11


def mixes_of(facts: ModelFacts) -> tuple[Mix, ...]:
    """All jobs alike; all tokens to the job with the largest adapter; all to the smallest."""
    jobs = len(facts.jobs)
    trained = facts.trained
    ends = {max(range(jobs), key=trained.__getitem__), min(range(jobs), key=trained.__getitem__)}
    alone = [tuple(float(job == own) for job in range(jobs)) for own in sorted(ends)]
    return (tuple(1 / jobs for _ in range(jobs)), *(alone if jobs > 1 else []))


def lengths_of(mix: Mix, tokens: int, length: int) -> list[list[int]]:
    """Lengths of each job's sequences in a row of so many tokens."""
    found: list[list[int]] = []
    given = 0
    for end in _ends(mix, tokens):
        left, own = end - given, []
        while left > 0:
            # What would be left alone as a single token goes with the last sequence.
            take = left if left <= length + 1 else length
            own.append(take)
            left -= take
        found.append(own)
        given = end
    return found


def row_of(model: SuperModel, mix: Mix, tokens: int, length: int) -> PackedBatch:
    """A row of random tokens, each but a sequence's first with a loss."""
    return (pack if model.group.form == "packed" else pad)(tokens_of(model, mix, tokens, length))


def tokens_of(model: SuperModel, mix: Mix, tokens: int, length: int) -> list[JobTokens]:
    """What each job brings to a row of random tokens."""
    draw = random.Random(SEED)  # noqa: S311  (what is drawn must be the same each time)
    vocabulary = model.group.vocabulary
    jobs = []
    for job, lengths in enumerate(lengths_of(mix, tokens, length)):
        drawn = [[draw.randrange(vocabulary) for _ in range(n)] for n in lengths]
        jobs.append(JobTokens(drawn, drawn, seed=job))
    return jobs


@dataclass(frozen=True, slots=True)
class Called:
    """One row, on the device.

    row      its tables
    layers   what each layer is called with
    hidden   place of the hidden state among that
    loss     what the loss is called with, the hidden state first
    """

    row: PackedBatch
    load: Load
    layers: Mapping[str, tuple[Any, ...]]
    hidden: int
    loss: tuple[Any, ...]


def calls_of(model: SuperModel, row: PackedBatch, device: torch.device) -> Called:
    """Run a model's root on a row with layers that hand on what they are given."""
    moved = row.to(device)
    place = hidden_place(model)
    seen: dict[str, tuple[Any, ...]] = {}

    def note(path: str, args: tuple[Any, ...]) -> Tensor:
        seen[path] = args
        found: Tensor = args[0 if path == LOSS else place]
        return found

    with torch.no_grad(), handing_on(model, note):
        model(moved)
    loss = seen.pop(LOSS)
    return Called(moved, Load.of_row(row), seen, place, loss)


@contextmanager
def handing_on(
    model: SuperModel, instead: Callable[[str, tuple[Any, ...]], Tensor]
) -> Iterator[None]:
    """Layers and loss do something else meanwhile.

    instead   is given a module's path and its arguments, and returns its value
    """
    paths = [*model.layer_order(), LOSS]
    modules = {path: model.net.get_submodule(path) for path in paths}
    before = {path: module.__dict__.get("forward") for path, module in modules.items()}
    for path, module in modules.items():
        module.__dict__["forward"] = _bound(instead, path)
    try:
        yield
    finally:
        for path, module in modules.items():
            _restore(module, before[path])


def hidden_place(model: SuperModel) -> int:
    """Which argument of a layer is what the layer before it gave.

    raises    NotProfilable where layers do not hand on one value
    """
    order = set(model.layer_order())
    calls = [
        node for node in model.group.root.nodes
        if node.op == "call_module" and str(node.target) in order
    ]  # fmt: skip
    places = {
        place
        for before, node in pairwise(calls)
        for place, given in enumerate(node.args)
        if isinstance(given, fx.Node) and (given is before or before in given.all_input_nodes)
    }
    if len(places) > 1:
        raise NotProfilable(
            "layers hand on more than one value, so none can be timed alone",
            base=model.backbone.title,
            found=f"arguments {sorted(places)} of a layer come from the layer before",
        )
    return next(iter(places), 0)


def _bound(instead: Callable[[str, tuple[Any, ...]], Tensor], path: str) -> Callable[..., Tensor]:
    return lambda *args: instead(path, args)


def _restore(module: nn.Module, forward: object) -> None:
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward


def _ends(mix: Sequence[float], tokens: int) -> Iterator[int]:
    """Where each job's tokens end in a row."""
    total = 0.0
    for place, share in enumerate(mix):
        total += share
        yield tokens if place == len(mix) - 1 else round(tokens * min(total, 1.0))


# Measure what is no layer: embedding, head with loss, the end of a job's step, packing.


#: Tensors of a job whose step is timed: of a few layers, of a model of 8 billion parameters.
TENSORS = (14, 112, 448)


def root_points(
    model: SuperModel, rows: Sequence[Called], device: torch.device, rounds: int
) -> list[RootPoint]:
    """Embedding, positions and last norm, forward and backward."""
    last = model.layer_order()[-1]
    pieces = []
    for called in rows:
        leaf = called.loss[0].detach().clone()

        def instead(
            path: str, args: tuple[Any, ...], leaf: Tensor = leaf, place: int = called.hidden
        ) -> Tensor:
            if path == LOSS:
                return args[0]  # type: ignore[no-any-return]
            return leaf.detach().requires_grad_() if path == last else args[place]

        pieces.append(_root_piece(model, called, instead))
    _measure(rows, pieces, device, rounds)
    return [
        RootPoint(
            tokens=called.load.total,
            forward_ms=piece.forward_ms,
            backward_ms=piece.backward_ms,
            captured=captured_of(piece),
            saved_bytes=bytes_of(piece, device, ()).saved,
            noise=piece.noise,
        )
        for called, piece in zip(rows, pieces, strict=True)
    ]


def captured_of(piece: TimedPass) -> Captured | None:
    """A piece's times as CUDA graphs."""
    times = piece.captured_ms
    return None if times is None else Captured(forward_ms=times[0], backward_ms=times[1])


def _measure(
    rows: Sequence[Called], pieces: Sequence[TimedPass], device: torch.device, rounds: int
) -> None:
    """Time what each row needs, for rows that may run as CUDA graphs also so."""
    measure(pieces, device, rounds)
    small = [
        piece
        for called, piece in zip(rows, pieces, strict=True)
        if called.load.total <= CAPTURED_TOKENS
    ]
    measure_captured(small, device, rounds)


def _root_piece(model: SuperModel, called: Called, instead: Any) -> TimedPass:
    slope = torch.ones_like(called.loss[0])

    def forward() -> Tensor:
        with handing_on(model, instead):
            made: Tensor = model(called.row)
            return made

    def backward(made: Sequence[Tensor]) -> None:
        learning = [one for one in made if one.requires_grad]
        if learning:
            torch.autograd.backward(learning, [slope] * len(learning))

    return TimedPass(forward, backward)


def loss_points(
    model: SuperModel, rows: Sequence[Called], device: torch.device, rounds: int
) -> list[LossPoint]:
    """Head and loss by rows with a target."""
    loss = model.net.get_submodule(LOSS)
    pieces = []
    for called in rows:
        hidden, *tables = called.loss

        def forward(hidden: Tensor = hidden, tables: Sequence[Any] = tuple(tables)) -> Tensor:
            made: Tensor = loss(hidden.detach().requires_grad_(), *tables).sum()
            return made

        pieces.append(TimedPass(forward, torch.autograd.backward))
    _measure(rows, pieces, device, rounds)
    seen = [bytes_of(piece, device, list(loss.parameters())) for piece in pieces]
    return [
        LossPoint(
            targets=called.load.targets,
            forward_ms=piece.forward_ms,
            backward_ms=piece.backward_ms,
            captured=captured_of(piece),
            saved_bytes=one.saved,
            peak_bytes=max(one.forward_peak - one.saved, one.backward_peak),
            noise=piece.noise,
        )
        for called, piece, one in zip(rows, pieces, seen, strict=True)
        if called.load.targets
    ]


def optimizer_points(
    jobs: Sequence[Job], model: SuperModel, device: torch.device, rounds: int
) -> list[OptimizerPoint]:
    """The end of a job's step, for jobs of several sizes, with parameters laid out as in banks."""
    held = [bank for bank in model.banks.values() if not bank.a.is_meta]
    widths = [(bank.a.shape[1], bank.b.shape[1]) for bank in held] or [(8, 8)]
    ranks = sorted({bank.a.shape[0] for bank in held} or {4})
    found = []
    for rank in {ranks[0] // 2 or 1, ranks[0]}:
        for count in TENSORS:
            parameters = _parameters(widths, rank, count, device)
            optimizer = JobOptimizer(jobs[0], parameters, steps=1000)
            piece = TimedPass(partial(_end_step, optimizer))
            measure([piece], device, rounds)
            numbers = sum(p.numel() for p in parameters.values())
            point = {"tensors": count, "parameters": numbers}
            found.append(OptimizerPoint(**point, ms=piece.forward_ms, noise=piece.noise))
    return found


def _parameters(
    widths: Sequence[tuple[int, int]], rank: int, count: int, device: torch.device
) -> dict[str, nn.Parameter]:
    made: dict[str, nn.Parameter] = {}
    for place in range(count // 2):
        inner, outer = widths[place % len(widths)]
        for name, tensor in (
            ("A", torch.zeros(rank, inner, device=device)),
            ("B", torch.zeros(rank, outer, device=device).t()),
        ):
            parameter = nn.Parameter(tensor)
            parameter.grad = torch.full_like(tensor, 1e-3)
            made[f"{place}.lora_{name}"] = parameter
    return made


def _end_step(optimizer: JobOptimizer) -> None:
    optimizer.step(optimizer.gradient_norm())
    optimizer.zero_grad()


def host_points(
    model: SuperModel, mix: Mix, tokens: Sequence[int], length: int, device: torch.device
) -> list[HostPoint]:
    """Packing a row, and moving it to the device."""
    form = pack if model.group.form == "packed" else pad
    found = []
    for count in dict.fromkeys((tokens[0], tokens[-1])):
        jobs = tokens_of(model, mix, count, length)
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            form(jobs).to(device)
            taken.append(time.perf_counter() - started)
        found.append(HostPoint(tokens=count, ms=min(taken) * 1e3))
    return found


TOKENS = (512, 1280, 2560, 4800, 8192, 16384)
LENGTHS = (160, 1024)
DISTRIBUTIONS = ("peft", "tlora-fx", "torch", "transformers", "triton")


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure.

    tokens    of the rows
    lengths   of their sequences
    tp        sizes of tensor parallelism
    rounds    in which all pieces take turns
    """

    device: torch.device
    tokens: tuple[int, ...] = TOKENS
    lengths: tuple[int, ...] = LENGTHS
    tp: tuple[int, ...] = (1,)
    rounds: int = 5
    compiled: bool = True


@dataclass(frozen=True, slots=True)
class Made:
    """A model of which a few layers have weights.

    layers   their places
    tp       pieces that its matrices are cut into, of which it holds the first
    """

    model: SuperModel
    facts: ModelFacts
    layers: tuple[int, ...]
    tp: int
    adapted: bool


def profile_jobs(jobs: Sequence[Job], asked: Asked, command: str = "") -> Profile:
    """Measure the layers of jobs' base with the jobs' adapters.

    raises    NotProfilable where the base has no layers; TloraError as `compile` does
    """
    compiled = {tp: compile(list(jobs)) for tp in asked.tp}
    facts = facts_of(next(iter(compiled.values())))
    if not facts.layers:
        raise NotProfilable(
            "the base was compiled without layers, so there is none to time",
            base=facts.title,
            help="`tlora-fx explain` says why its layers do not fold",
        )
    hardware = hardware_of(asked.device)
    made = {tp: _made(model, asked, tp, _adapted(facts)) for tp, model in compiled.items()}
    layers: list[LayerProfile] = []
    for tp, own in made.items():
        bare = _bare_model(own.model, jobs[0], asked) if tp == 1 else None
        layers.extend(_layer_profiles([own, *([bare] if bare else [])], asked))
    # A head that is cut knows only its part of the targets.
    whole = made[1] if 1 in made else _made(compile(list(jobs)), asked, 1, _adapted(facts))
    mix = mixes_of(facts)[0]
    rows = [
        calls_of(whole.model, row_of(whole.model, mix, n, asked.lengths[0]), asked.device)
        for n in asked.tokens
    ]
    measured = asked.device, asked.rounds
    return Profile(
        name=name_of(facts.title, hardware.gpu),
        hardware=hardware,
        versions={name: version(name) for name in DISTRIBUTIONS if _is_there(name)},
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=command,
        compiled=asked.compiled,
        shape=shape_of(facts),
        layers=layers,
        root=root_points(whole.model, rows, *measured),
        loss=loss_points(whole.model, rows, *measured),
        optimizer=optimizer_points(jobs, whole.model, *measured),
        host=host_points(whole.model, mix, asked.tokens, asked.lengths[0], asked.device),
    )


def hardware_of(device: torch.device) -> Hardware:
    """The device at hand."""
    if device.type != "cuda":
        return Hardware(gpu="cpu", processors=torch.get_num_threads())
    found = torch.cuda.get_device_properties(device)
    return Hardware(
        gpu=found.name,
        memory_gib=round(found.total_memory / 2**30, 1),
        processors=found.multi_processor_count,
    )


def _made(
    model: SuperModel, asked: Asked, tp: int, layers: tuple[int, ...], *, adapted: bool = True
) -> Made:
    """Give some layers, the embedding and the head random weights."""
    if tp > 1:
        use_group(GROUP, None)
        model = prepared(model, Plan(planner="profile", mesh=MeshShape(tp=tp)))
    order = model.layer_order()
    named = [*dict(model.net.named_parameters()), *dict(model.net.named_buffers())]
    outside = [name for name in named if not any(under(name, layer) for layer in order)]
    part = LocalShard(frozenset([*outside, *(order[place] for place in layers)]), 0, tp)
    model.materialize(base_tensors(model.backbone, asked.device), asked.device, part)
    start_adapters(model)
    if asked.compiled:
        model.compile()
    return Made(model, facts_of(model), layers, tp, adapted)


def _adapted(facts: ModelFacts) -> tuple[int, ...]:
    """One layer of each structure, that with most adapters."""
    best: dict[str, int] = {}
    for place, layer in enumerate(facts.layers):
        known = best.get(layer.structure)
        if known is None or len(layer.sites) > len(facts.layers[known].sites):
            best[layer.structure] = place
    return tuple(sorted(best.values()))


def _bare_model(like: SuperModel, job: Job, asked: Asked) -> Made | None:
    """A model whose only adapter is in its last layer; None where no layer is left bare."""
    facts = facts_of(like)
    last = facts.layers[-1]
    bare = {layer.structure: place for place, layer in enumerate(facts.layers[:-1])}
    sites = (path for own in like.group.jobs for path in own.sites)
    target = next((path for path in sites if path.startswith(f"{last.path}.")), None)
    if not bare or target is None:
        return None
    lora = {
        "r": 1,
        "target_modules": [target.removeprefix(f"{last.path}.").rpartition(".")[2]],
        "layers_to_transform": [len(facts.layers) - 1],
    }
    one = job.model_copy(update={"name": "bare", "lora": lora, "adapter": None})
    return _made(compile([one]), asked, 1, tuple(bare.values()), adapted=False)


@dataclass(slots=True)
class _Timed:
    """The pieces of one layer on one row."""

    structure: str
    point: LayerPoint
    above: TimedPass
    first: TimedPass | None = None
    frozen: TimedPass | None = None

    def pieces(self) -> list[TimedPass]:
        """Those that there are."""
        return [piece for piece in (self.above, self.first, self.frozen) if piece is not None]


def _layer_profiles(models: Sequence[Made], asked: Asked) -> list[LayerProfile]:
    """Time the layers of some models in turns with each other."""
    timed = [one for made in models for one in _pieces(made, asked)]
    pieces = [piece for one in timed for piece in one.pieces()]
    measure(pieces, asked.device, asked.rounds)
    most = CAPTURED_TOKENS * models[0].tp
    small = [one for one in timed if one.point.tokens <= most]
    graphs = [piece for one in small for piece in one.pieces()]
    measure_captured(graphs, asked.device, asked.rounds)
    first = models[0]
    found: dict[str, LayerProfile] = {}
    for place in first.layers:
        layer = first.facts.layers[place]
        width = sum(one.width for one in layer.attention)
        found[layer.structure] = LayerProfile(
            structure=layer.structure,
            tp=first.tp,
            elements=max(1, layer.elements // first.tp),
            attention_width=width // first.tp,
            hidden=first.facts.hidden,
            points=[_point(one) for one in timed if one.structure == layer.structure],
        )
    return list(found.values())


def _point(timed: _Timed) -> LayerPoint:
    first, frozen = timed.first, timed.frozen
    return timed.point.model_copy(
        update={
            "forward_ms": timed.above.forward_ms,
            "backward_ms": timed.above.backward_ms,
            "first_ms": first.backward_ms if first else None,
            "frozen_ms": frozen.forward_ms if frozen else None,
            "captured": _captured(timed),
            "noise": max(piece.noise for piece in timed.pieces()),
        }
    )


def _captured(timed: _Timed) -> Captured | None:
    above = timed.above.captured_ms
    first = timed.first.captured_ms if timed.first else None
    frozen = timed.frozen.captured_ms if timed.frozen else None
    if above is None:
        return None
    return Captured(
        forward_ms=above[0],
        backward_ms=above[1],
        first_ms=first and first[1],
        frozen_ms=frozen and frozen[0],
    )


def _pieces(made: Made, asked: Asked) -> Iterator[_Timed]:
    """Every layer of a model on rows of all sizes; other mixes of jobs on the first length."""
    mixes = mixes_of(made.facts)
    for tokens in asked.tokens:
        rows = [(mixes[0], length) for length in asked.lengths]
        rows += [(mix, asked.lengths[0]) for mix in mixes[1:] if made.adapted]
        for mix, length in rows:
            row = row_of(made.model, mix, tokens, min(length, tokens))
            called = calls_of(made.model, row, asked.device)
            for place in made.layers:
                yield _timed(made, asked, place, called)


def _timed(made: Made, asked: Asked, place: int, called: Called) -> _Timed:
    layer = made.facts.layers[place]
    module = made.model.net.get_submodule(layer.path)
    above = _piece(module, called, layer.path, needs=True)
    shared = [*module.parameters(), *module.buffers()]
    shared += [given for given in called.layers[layer.path] if isinstance(given, Tensor)]
    _run(above)
    seen = bytes_of(above, asked.device, shared)
    work = work_of([layer], [called.load], made.facts.hidden, made.tp)
    point = LayerPoint(
        tokens=called.load.total,
        **{name: float(values[0, 0, 0]) for name, values in work._asdict().items()},
        forward_ms=0,
        backward_ms=0,
        saved_bytes=seen.saved,
        forward_peak_bytes=seen.forward_peak,
        backward_peak_bytes=seen.backward_peak,
    )
    first = _piece(module, called, layer.path, needs=False) if layer.adapted else None
    frozen = None if made.adapted else _frozen_piece(module, called, layer.path)
    return _Timed(layer.structure, point, above, first, frozen)


def _piece(module: nn.Module, called: Called, path: str, *, needs: bool) -> TimedPass:
    """A layer's forward and backward; `needs`: its input has a gradient too."""
    args, place = called.layers[path], called.hidden
    slope = torch.ones_like(args[place])

    def forward() -> Tensor:
        hidden = args[place].detach().requires_grad_(needs)
        return _first(module(*args[:place], hidden, *args[place + 1 :]))

    return TimedPass(forward, lambda made: torch.autograd.backward(made, [slope] * len(made)))


def _frozen_piece(module: nn.Module, called: Called, path: str) -> TimedPass:
    """A layer's forward where nothing needs a gradient."""

    def forward() -> Tensor:
        with torch.no_grad():
            return _first(module(*called.layers[path]))

    return TimedPass(forward)


def _run(piece: TimedPass) -> None:
    """Once before anything counts: compilers and allocators do their first work."""
    made = piece.forward()
    if piece.backward is not None:
        piece.backward([made])


def _first(made: Any) -> Tensor:
    found: Tensor = made[0] if isinstance(made, (tuple, list)) else made
    return found


def _is_there(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


# What `tlora-fx profile` does with its options: one process, or all of a torchrun.


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of the command."""

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    tp: tuple[int, ...]
    rounds: int
    compiled: bool
    device: str | None
    command: str

    def asked(self, device: torch.device) -> Asked:
        """The same for a device."""
        return Asked(device, self.tokens, self.lengths, self.tp, self.rounds, self.compiled)


def profile_file(
    jobs: Sequence[Job], wanted: Wanted, output: Path | None, *, add: bool
) -> tuple[Profile | None, Path | None]:
    """Measure, and write the file.

    returns   what was written, and where; nothing on all processes but the first
    raises    ProfileFileError, NotProfilable
    """
    device = _device(wanted.device)
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not alone:
        _join(device)
    try:
        if not alone and dist.get_rank() > 0:
            dist.barrier()
            collective_points(device, _per_node(), wanted.rounds)
            return None, None
        found = profile_jobs(jobs, wanted.asked(device), wanted.command)
        if not alone:
            dist.barrier()
            points = collective_points(device, _per_node(), wanted.rounds)
            found = found.model_copy(update={"collectives": points})
    finally:
        if not alone:
            dist.destroy_process_group()
    path = output or own_file(found.shape.title, found.hardware.gpu)
    if add and path.exists():
        found = joined(Profile.load(path), found, path)
    found.save(path)
    return found, path


def joined(old: Profile, new: Profile, path: Path) -> Profile:
    """Two profiles of one model on one device; what both have is the new one's.

    raises    ProfileFileError where they are of different models or devices
    """
    for what in ("shape", "hardware", "compiled"):
        mine, theirs = getattr(new, what), getattr(old, what)
        if mine != theirs:
            raise ProfileFileError(
                "only measurements of one model on one device belong into one file",
                file=path,
                expected=f"{what}: {theirs}",
                found=f"{what}: {mine}",
                help="write another file, or leave --add out",
            )
    keys = {(layer.structure, layer.tp) for layer in new.layers}
    kept = [layer for layer in old.layers if (layer.structure, layer.tp) not in keys]
    whole = new if any(layer.tp == 1 for layer in new.layers) else old
    return whole.model_copy(
        update={
            "layers": sorted([*kept, *new.layers], key=lambda one: (one.tp, one.structure)),
            "collectives": new.collectives or old.collectives,
            "versions": new.versions,
            "date": new.date,
            "command": f"{old.command}; {new.command}",
        }
    )


def _device(name: str | None) -> torch.device:
    """The named one; of GPUs, each process of a machine has its own."""
    device, place = device_named(name), os.environ.get("LOCAL_RANK")
    return torch.device("cuda", int(place)) if place and device.type == "cuda" else device


def _join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def _per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
