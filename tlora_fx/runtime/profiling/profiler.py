"""Measure the layers of a model on the device at hand: what `tlora-fx profile` runs.

A few layers are enough: of each structure one with the jobs' adapters and one bare. They get random
weights and are compiled as training compiles them. Each is timed alone, on rows of several lengths
and with the tokens of several jobs, and so are embedding, head with loss, the end of a job's step,
and packing on the host. A layer of a tensor-parallel plan is timed with its pieces of the matrices
and without its collectives, which needs one device.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from tlora_fx.compiler import compile
from tlora_fx.config.job import Job
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.load import Load, work_of
from tlora_fx.cost.model_facts import CAPTURED_TOKENS, LayerFacts, ModelFacts
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import (
    Captured,
    Hardware,
    HostPoint,
    LayerPoint,
    LayerProfile,
    LossPoint,
    OptimizerPoint,
    Profile,
    RootPoint,
    name_of,
)
from tlora_fx.cost.profile_sources import own_file, shape_of
from tlora_fx.errors import NotProfilable, ProfileFileError
from tlora_fx.ir.graph import LOSS, under
from tlora_fx.ir.storage import LocalShard
from tlora_fx.model.batch import JobTokens, PackedBatch, pack, pad
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.parallel import GROUP, use_group
from tlora_fx.parallel.prepare import prepared
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters
from tlora_fx.runtime.launching.launch import Launch, join, leave
from tlora_fx.runtime.optim.group_update import GroupUpdate
from tlora_fx.runtime.optim.optimizer import JobOptimizer
from tlora_fx.runtime.profiling.timing import (
    Bytes,
    TimedPass,
    bytes_of,
    collective_points,
    measure,
    measure_captured,
)

TOKENS = (512, 1280, 2560, 4800, 8192, 16384)
LENGTHS = (160, 1024)
DISTRIBUTIONS = ("peft", "tlora-fx", "torch", "transformers", "triton")


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Settings of a measurement.

    device    that this process measures
    tokens    numbers of tokens of the rows
    lengths   lengths of their sequences
    tp        sizes of tensor parallelism
    rounds    in which all pieces take turns
    command   command line of the user, for the profile
    say       is told what is being done
    """

    device: torch.device
    tokens: tuple[int, ...] = TOKENS
    lengths: tuple[int, ...] = LENGTHS
    tp: tuple[int, ...] = (1,)
    rounds: int = 5
    compiled: bool = True
    command: str = ""
    say: Callable[[str], None] = field(default=lambda text: None, compare=False)


def profile_file(
    jobs: Sequence[Job], request: ProfileRequest, output: Path | None, *, add: bool
) -> tuple[Profile | None, Path | None]:
    """Measure, and write the file.

    returns   what was written, and where; nothing on all processes but the first
    raises    ProfileFileError, NotProfilable
    """
    launch = Launch.found()
    join(launch, request.device)
    try:
        if launch.rank > 0:
            dist.barrier()
            collective_points(request.device, launch.per_machine, request.rounds)
            return None, None
        profile = profile_jobs(jobs, request)
        if launch.size > 1:
            dist.barrier()
            points = collective_points(request.device, launch.per_machine, request.rounds)
            profile = profile.model_copy(update={"collectives": points})
    finally:
        leave()
    path = output or own_file(profile)
    if add and path.exists():
        profile = joined(Profile.load(path), profile, path)
    profile.save(path)
    return profile, path


def profile_jobs(jobs: Sequence[Job], request: ProfileRequest) -> Profile:
    """Measure the layers of jobs' base with the jobs' adapters.

    raises    NotProfilable where the base has no layers; TloraError as `compile` does
    """
    request.say("compiling the jobs")
    compiled = {tp: compile(list(jobs)) for tp in request.tp}
    facts = facts_of(next(iter(compiled.values())))
    if not facts.layers:
        raise NotProfilable(
            "the base was compiled without layers, so there is none to time",
            base=facts.title,
            help="`tlora-fx explain JOBS --node MODULE` says why its layers do not fold",
        )
    hardware = hardware_of(request.device)
    request.say("building the layers to measure")
    samples = {
        tp: _sampled_model(model, request, tp, layers_to_time(facts))
        for tp, model in compiled.items()
    }
    layers: list[LayerProfile] = []
    for tp, sampled in samples.items():
        bare = _bare_model(sampled.model, jobs[0], request) if tp == 1 else None
        layers.extend(_layer_profiles([sampled, *([bare] if bare else [])], request))
    # A head that is cut knows only its part of the targets.
    whole = (
        samples[1]
        if 1 in samples
        else _sampled_model(compile(list(jobs)), request, 1, layers_to_time(facts))
    )
    mix = mixes_of(facts)[0]
    rows = [
        calls_of(whole.model, row_of(whole.model, mix, n, request.lengths[0]), request.device)
        for n in request.tokens
    ]
    measured = request.device, request.rounds
    request.say("measuring the embedding, the head and the optimizer")
    return Profile(
        name=name_of(facts.title, hardware.gpu),
        hardware=hardware,
        versions={name: version(name) for name in DISTRIBUTIONS if _is_there(name)},
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=request.command,
        compiled=request.compiled,
        shape=shape_of(facts),
        layers=layers,
        root=root_points(whole.model, rows, *measured),
        loss=loss_points(whole.model, rows, *measured),
        optimizer=optimizer_points(jobs, whole.model, *measured),
        host=host_points(whole.model, mix, request.tokens, request.lengths[0], request.device),
    )


def hardware_of(device: torch.device) -> Hardware:
    """The device at hand."""
    if device.type != "cuda":
        return Hardware(gpu="cpu", processors=torch.get_num_threads())
    gpu = torch.cuda.get_device_properties(device)
    return Hardware(
        gpu=gpu.name,
        memory_gib=round(gpu.total_memory / 2**30, 1),
        processors=gpu.multi_processor_count,
    )


def _is_there(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


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


# Layers: of each structure one with the jobs' adapters and one bare.


@dataclass(frozen=True, slots=True)
class SampledModel:
    """A model of which a few layers have weights.

    layers   their indices
    tp       pieces that its matrices are cut into, of which it holds the first
    """

    model: SuperModel
    facts: ModelFacts
    layers: tuple[int, ...]
    tp: int
    adapted: bool


def _sampled_model(
    model: SuperModel,
    request: ProfileRequest,
    tp: int,
    layers: tuple[int, ...],
    *,
    adapted: bool = True,
) -> SampledModel:
    """Give some layers, the embedding and the head random weights."""
    if tp > 1:
        use_group(GROUP, None)
        model = prepared(model, Plan(planner="profile", mesh=MeshShape(tp=tp)))
    part = some_layers(model, layers)
    model.materialize(base_tensors(model.backbone, request.device), request.device, part)
    start_adapters(model, {name: {} for name in model.members})
    if request.compiled:
        model.compile()
    return SampledModel(model, facts_of(model), layers, tp, adapted)


def some_layers(model: SuperModel, layers: Sequence[int], *, loss: bool = True) -> LocalShard:
    """The part of a model that has some layers, and what is in no layer.

    loss    with head and loss
    """
    order = model.layer_order()
    apart = order if loss else [*order, LOSS]
    named = [*dict(model.net.named_parameters()), *dict(model.net.named_buffers())]
    outside = [name for name in named if not any(under(name, path) for path in apart)]
    return LocalShard(frozenset([*outside, *(order[index] for index in layers)]))


def layers_to_time(facts: ModelFacts) -> tuple[int, ...]:
    """One layer of each structure, that with most adapters."""
    best: dict[str, int] = {}
    for index, layer in enumerate(facts.layers):
        known = best.get(layer.structure)
        if known is None or len(layer.sites) > len(facts.layers[known].sites):
            best[layer.structure] = index
    return tuple(sorted(best.values()))


def _bare_model(like: SuperModel, job: Job, request: ProfileRequest) -> SampledModel | None:
    """A model whose only adapter is in its last layer; None where no layer is left bare."""
    facts = facts_of(like)
    last = facts.layers[-1]
    bare = {layer.structure: index for index, layer in enumerate(facts.layers[:-1])}
    sites = (path for job_graph in like.group.jobs for path in job_graph.sites)
    target = next((path for path in sites if path.startswith(f"{last.path}.")), None)
    if not bare or target is None:
        return None
    lora = {
        "r": 1,
        "target_modules": [target.removeprefix(f"{last.path}.").rpartition(".")[2]],
        "layers_to_transform": [len(facts.layers) - 1],
    }
    single = job.model_copy(update={"name": "bare", "lora": lora, "adapter": None})
    return _sampled_model(compile([single]), request, 1, tuple(bare.values()), adapted=False)


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """The pieces of one layer on one row.

    above    in the middle of a model: its input has a gradient
    first    the first layer, whose input has none
    frozen   where nothing needs a gradient
    """

    layer: LayerFacts
    load: Load
    memory: Bytes
    above: TimedPass
    first: TimedPass | None = None
    frozen: TimedPass | None = None

    def pieces(self) -> list[TimedPass]:
        """Pieces that the layer has."""
        return [piece for piece in (self.above, self.first, self.frozen) if piece is not None]

    def point(self, hidden: int, tp: int = 1) -> LayerPoint:
        """Times of its pieces, once they are measured."""
        work = work_of([self.layer], [self.load], hidden, tp)
        return LayerPoint(
            tokens=self.load.total,
            **{name: float(values[0, 0, 0]) for name, values in work._asdict().items()},
            forward_ms=self.above.forward_ms,
            backward_ms=self.above.backward_ms,
            first_ms=self.first.backward_ms if self.first else None,
            frozen_ms=self.frozen.forward_ms if self.frozen else None,
            captured=captured_of(self.above, self.first, self.frozen),
            saved_bytes=self.memory.saved,
            forward_peak_bytes=self.memory.forward_peak,
            backward_peak_bytes=self.memory.backward_peak,
            noise=max(piece.noise for piece in self.pieces()),
        )


def _say_turns(say: Callable[[str], None], done: int, turns: int) -> None:
    say(f"measuring layers, {done:,} of {turns:,} turns done")


def _layer_profiles(models: Sequence[SampledModel], request: ProfileRequest) -> list[LayerProfile]:
    """Time the layers of some models in turns with each other."""
    timed = [(model, layer) for model in models for layer in _pieces(model, request)]
    pieces = [piece for _, layer in timed for piece in layer.pieces()]
    measure(pieces, request.device, request.rounds, partial(_say_turns, request.say))
    most = CAPTURED_TOKENS * models[0].tp
    small = [
        layer for model, layer in timed if layer.load.total <= most and not model.facts.launched
    ]
    capturable = [piece for layer in small for piece in layer.pieces()]
    measure_captured(capturable, request.device, request.rounds)
    first = models[0]
    points: dict[str, list[LayerPoint]] = {}
    for model, layer in timed:
        point = layer.point(model.facts.hidden, model.tp)
        points.setdefault(layer.layer.structure, []).append(point)
    profiles: dict[str, LayerProfile] = {}
    for index in first.layers:
        facts = first.facts.layers[index]
        width = sum(attention.width for attention in facts.attention)
        profiles[facts.structure] = LayerProfile(
            structure=facts.structure,
            tp=first.tp,
            elements=max(1, facts.elements // first.tp),
            attention_width=width // first.tp,
            hidden=first.facts.hidden,
            points=points[facts.structure],
        )
    return list(profiles.values())


def _pieces(sampled: SampledModel, request: ProfileRequest) -> Iterator[TimedLayer]:
    """Every layer of a model on rows of all sizes; other mixes of jobs on the first length."""
    mixes = mixes_of(sampled.facts)
    for tokens in request.tokens:
        rows = [(mixes[0], length) for length in request.lengths]
        rows += [(mix, request.lengths[0]) for mix in mixes[1:] if sampled.adapted]
        for mix, length in rows:
            row = row_of(sampled.model, mix, tokens, min(length, tokens))
            called = calls_of(sampled.model, row, request.device)
            for index in sampled.layers:
                yield _timed(sampled, request, index, called)


def _timed(
    sampled: SampledModel, request: ProfileRequest, index: int, called: RowCalls
) -> TimedLayer:
    layer = sampled.facts.layers[index]
    module = sampled.model.net.get_submodule(layer.path)
    above = layer_pass(module, called, layer.path, needs=True)
    shared = [*module.parameters(), *module.buffers()]
    shared += [value for value in called.layers[layer.path] if isinstance(value, Tensor)]
    run_once(above)
    memory = bytes_of(above, request.device, shared)
    first = layer_pass(module, called, layer.path, needs=False) if layer.adapted else None
    frozen = None if sampled.adapted else _frozen_piece(module, called, layer.path)
    return TimedLayer(layer, called.load, memory, above, first, frozen)


def layer_pass(module: nn.Module, called: RowCalls, path: str, *, needs: bool = True) -> TimedPass:
    """A layer's forward and backward; `needs`: its input has a gradient too."""
    args, index = called.layers[path], called.hidden
    slope = torch.ones_like(args[index])

    def forward() -> Tensor:
        hidden = args[index].detach().requires_grad_(needs)
        return _first(module(*args[:index], hidden, *args[index + 1 :]))

    return TimedPass(forward, lambda out: torch.autograd.backward(out, [slope] * len(out)))


def _frozen_piece(module: nn.Module, called: RowCalls, path: str) -> TimedPass:
    """A layer's forward where nothing needs a gradient."""

    def forward() -> Tensor:
        with torch.no_grad():
            return _first(module(*called.layers[path]))

    return TimedPass(forward)


def run_once(piece: TimedPass) -> None:
    """Once before anything counts: compilers and allocators do their first work."""
    output = piece.forward()
    if piece.backward is not None:
        piece.backward([output])


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return first


# Rows to measure on, and what a model's root calls its layers and loss with on each.

#: The share of a row's tokens that each job has.
Mix = tuple[float, ...]
SEED = 11


def mixes_of(facts: ModelFacts) -> tuple[Mix, ...]:
    """All jobs alike; all tokens to the job with the largest adapter; all to the smallest."""
    jobs = len(facts.jobs)
    trained = facts.trained
    ends = {max(range(jobs), key=trained.__getitem__), min(range(jobs), key=trained.__getitem__)}
    alone = [tuple(float(job == end) for job in range(jobs)) for end in sorted(ends)]
    return (tuple(1 / jobs for _ in range(jobs)), *(alone if jobs > 1 else []))


def lengths_of(mix: Mix, tokens: int, length: int) -> list[list[int]]:
    """Lengths of each job's sequences in a row of so many tokens."""
    jobs: list[list[int]] = []
    start = 0
    for end in _ends(mix, tokens):
        left, lengths = end - start, []
        while left > 0:
            # What would be left alone as a single token goes with the last sequence.
            take = left if left <= length + 1 else length
            lengths.append(take)
            left -= take
        jobs.append(lengths)
        start = end
    return jobs


def row_of(model: SuperModel, mix: Mix, tokens: int, length: int) -> PackedBatch:
    """A row of random tokens, each but a sequence's first with a loss."""
    return (pack if model.group.form == "packed" else pad)(tokens_of(model, mix, tokens, length))


def tokens_of(model: SuperModel, mix: Mix, tokens: int, length: int) -> list[JobTokens]:
    """Tokens of each job in a row of random tokens."""
    draw = random.Random(SEED)  # noqa: S311  (what is drawn must be the same each time)
    vocabulary = model.group.vocabulary
    jobs = []
    for job, lengths in enumerate(lengths_of(mix, tokens, length)):
        drawn = [[draw.randrange(vocabulary) for _ in range(n)] for n in lengths]
        jobs.append(JobTokens(drawn, drawn, seed=job))
    return jobs


@dataclass(frozen=True, slots=True)
class RowCalls:
    """One row, on the device.

    row      its tables
    layers   arguments of each layer
    hidden   index of the hidden state among that
    loss     arguments of the loss, the hidden state first
    """

    row: PackedBatch
    load: Load
    layers: Mapping[str, tuple[Any, ...]]
    hidden: int
    loss: tuple[Any, ...]


def calls_of(model: SuperModel, row: PackedBatch, device: torch.device) -> RowCalls:
    """Run a model's root on a row with layers that hand on what they are given."""
    moved = row.to(device)
    hidden = hidden_argument(model)
    seen: dict[str, tuple[Any, ...]] = {}

    def note(path: str, args: tuple[Any, ...]) -> Tensor:
        seen[path] = args
        handed_on: Tensor = args[0 if path == LOSS else hidden]
        return handed_on

    with torch.no_grad(), handing_on(model, note):
        model(moved)
    loss = seen.pop(LOSS)
    return RowCalls(moved, Load.of_row(row), seen, hidden, loss)


@contextmanager
def handing_on(
    model: SuperModel, instead: Callable[[str, tuple[Any, ...]], Tensor]
) -> Iterator[None]:
    """Layers and loss do something else meanwhile.

    instead   is given a module's path and its arguments, and returns its value
    """

    def run_instead(path: str) -> Callable[..., Tensor]:
        return lambda *args, **_: instead(path, args)

    with ExitStack() as stack:
        for path in (*model.layer_order(), LOSS):
            module = model.net.get_submodule(path)
            stack.enter_context(patch.object(module, "forward", run_instead(path)))
        yield


def hidden_argument(model: SuperModel) -> int:
    """Index of the layer argument that is the result of the layer before.

    raises    NotProfilable where layers do not hand on one value
    """
    order = set(model.layer_order())
    calls = [
        node for node in model.group.root.nodes
        if node.op == "call_module" and str(node.target) in order
    ]  # fmt: skip
    indices = {
        index
        for before, node in pairwise(calls)
        for index, argument in enumerate(node.args)
        if isinstance(argument, fx.Node)
        and (argument is before or before in argument.all_input_nodes)
    }
    if len(indices) > 1:
        raise NotProfilable(
            "layers hand on more than one value, so none can be timed alone",
            base=model.backbone.title,
            found=f"arguments {sorted(indices)} of a layer come from the layer before",
        )
    return next(iter(indices), 0)


def _ends(mix: Sequence[float], tokens: int) -> Iterator[int]:
    """Where each job's tokens end in a row."""
    total = 0.0
    for job, share in enumerate(mix):
        total += share
        yield tokens if job == len(mix) - 1 else round(tokens * min(total, 1.0))


# Measure what is no layer: embedding, head with loss, the end of a job's step, packing.

#: Tensors of a job whose step is timed: of a few layers, of a model of 8 billion parameters.
TENSORS = (14, 112, 448)


def root_points(
    model: SuperModel, rows: Sequence[RowCalls], device: torch.device, rounds: int
) -> list[RootPoint]:
    """Embedding, positions, and a last norm that the loss does not begin with."""
    last = model.layer_order()[-1]
    pieces = []
    for called in rows:
        leaf = called.loss[0].detach().clone()

        def instead(
            path: str, args: tuple[Any, ...], leaf: Tensor = leaf, hidden: int = called.hidden
        ) -> Tensor:
            if path == LOSS:
                return args[0]  # type: ignore[no-any-return]
            return leaf.detach().requires_grad_() if path == last else args[hidden]

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


def captured_of(
    piece: TimedPass, first: TimedPass | None = None, frozen: TimedPass | None = None
) -> Captured | None:
    """A piece's times as CUDA graphs; of a layer with those of its other pieces."""
    times = piece.captured_ms
    first_times, frozen_times = (each and each.captured_ms for each in (first, frozen))
    return times and Captured(
        forward_ms=times[0],
        backward_ms=times[1],
        first_ms=first_times and first_times[1],
        frozen_ms=frozen_times and frozen_times[0],
    )


def _measure(
    rows: Sequence[RowCalls], pieces: Sequence[TimedPass], device: torch.device, rounds: int
) -> None:
    """Time what each row needs, for rows that may run as CUDA graphs also so."""
    measure(pieces, device, rounds)
    small = [
        piece
        for called, piece in zip(rows, pieces, strict=True)
        if called.load.total <= CAPTURED_TOKENS
    ]
    measure_captured(small, device, rounds)


def _root_piece(model: SuperModel, called: RowCalls, instead: Any) -> TimedPass:
    slope = torch.ones_like(called.loss[0])

    def forward() -> Tensor:
        with handing_on(model, instead):
            states: Tensor = model(called.row)
            return states

    def backward(states: Sequence[Tensor]) -> None:
        learning = [state for state in states if state.requires_grad]
        if learning:
            torch.autograd.backward(learning, [slope] * len(learning))

    return TimedPass(forward, backward)


def loss_points(
    model: SuperModel, rows: Sequence[RowCalls], device: torch.device, rounds: int
) -> list[LossPoint]:
    """Head and loss by rows with a target, and the last norm where chunks begin with it."""
    loss = model.net.get_submodule(LOSS)
    pieces = []
    for called in rows:
        hidden, *tables = called.loss

        def forward(hidden: Tensor = hidden, tables: Sequence[Any] = tuple(tables)) -> Tensor:
            leaf = hidden.detach().requires_grad_()
            total: Tensor = loss(leaf, *tables, finish=model.finish).sum()
            return total

        pieces.append(TimedPass(forward, torch.autograd.backward))
    _measure(rows, pieces, device, rounds)
    memories = [bytes_of(piece, device, list(loss.parameters())) for piece in pieces]
    return [
        LossPoint(
            targets=called.load.targets,
            forward_ms=piece.forward_ms,
            backward_ms=piece.backward_ms,
            captured=captured_of(piece),
            saved_bytes=memory.saved,
            peak_bytes=max(memory.forward_peak - memory.saved, memory.backward_peak),
            noise=piece.noise,
        )
        for called, piece, memory in zip(rows, pieces, memories, strict=True)
        if called.load.targets
    ]


def optimizer_points(
    jobs: Sequence[Job], model: SuperModel, device: torch.device, rounds: int
) -> list[OptimizerPoint]:
    """The end of a job's step, for jobs of several sizes, with parameters laid out as in banks."""
    banks = [bank for bank in model.banks.values() if not bank.a.is_meta]
    widths = [(bank.a.shape[1], bank.b.shape[1]) for bank in banks] or [(8, 8)]
    ranks = sorted({bank.a.shape[0] for bank in banks} or {4})
    points = []
    for rank in {ranks[0] // 2 or 1, ranks[0]}:
        for count in TENSORS:
            parameters = _parameters(widths, rank, count, device)
            optimizer = JobOptimizer(jobs[0], parameters, steps=1000)
            update = GroupUpdate.of([optimizer], [0])
            losses = torch.ones(1, device=device)
            piece = TimedPass(partial(_end_step, optimizer, update, losses))
            measure([piece], device, rounds)
            numbers = sum(p.numel() for p in parameters.values())
            point = {"tensors": count, "parameters": numbers}
            points.append(OptimizerPoint(**point, ms=piece.forward_ms, noise=piece.noise))
    return points


def _parameters(
    widths: Sequence[tuple[int, int]], rank: int, count: int, device: torch.device
) -> dict[str, nn.Parameter]:
    parameters: dict[str, nn.Parameter] = {}
    for site in range(count // 2):
        inner, outer = widths[site % len(widths)]
        for name, tensor in (
            ("A", torch.zeros(rank, inner, device=device)),
            ("B", torch.zeros(rank, outer, device=device).t()),
        ):
            parameter = nn.Parameter(tensor)
            parameter.grad = torch.full_like(tensor, 1e-3)
            parameters[f"{site}.lora_{name}"] = parameter
    return parameters


def _end_step(optimizer: JobOptimizer, update: GroupUpdate | None, losses: Tensor) -> None:
    """As `runtime.round_end` does it."""
    if update is None:
        optimizer.step(optimizer.gradient_norm())
        optimizer.zero_grad()
        return
    update.launch(losses)
    optimizer.noted()


def host_points(
    model: SuperModel, mix: Mix, tokens: Sequence[int], length: int, device: torch.device
) -> list[HostPoint]:
    """Packing a row, and moving it to the device."""
    form = pack if model.group.form == "packed" else pad
    points = []
    for count in dict.fromkeys((tokens[0], tokens[-1])):
        jobs = tokens_of(model, mix, count, length)
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            form(jobs).to(device)
            taken.append(time.perf_counter() - started)
        points.append(HostPoint(tokens=count, ms=min(taken) * 1e3))
    return points
