"""Measure the layers of a model on the device at hand: what `tlora-fx profile` runs.

A few layers are enough: of each structure one with the jobs' adapters and one bare. They get random
weights and are compiled as training compiles them. Each is timed alone, on rows of several lengths
and with the tokens of several jobs, and so are embedding, head with loss, the end of a job's step,
and packing on the host. A layer of a tensor-parallel plan is timed with its pieces of the matrices
and without its collectives, which needs one device.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.compiler import compile
from tlora_fx.config.job import Job
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.model_facts import CAPTURED_TOKENS, ModelFacts
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import Captured, Hardware, LayerPoint, LayerProfile, Profile, name_of
from tlora_fx.errors import NotProfilable
from tlora_fx.ir.graph import under
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.tensor_groups import GROUP, use_group
from tlora_fx.parallel.prepare import prepared
from tlora_fx.part import Part
from tlora_fx.planners.cost import work_of
from tlora_fx.planners.roofline import shape_of
from tlora_fx.runtime.adapters import start_adapters
from tlora_fx.runtime.profiling_clock import Piece, bytes_of, measure, measure_captured
from tlora_fx.runtime.profiling_ends import host_points, loss_points, optimizer_points, root_points
from tlora_fx.runtime.profiling_rows import Called, calls_of, mixes_of, row_of
from tlora_fx.runtime.weights import base_tensors

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
    part = Part(frozenset([*outside, *(order[place] for place in layers)]), 0, tp)
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
    above: Piece
    first: Piece | None = None
    frozen: Piece | None = None

    def pieces(self) -> list[Piece]:
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
    work = work_of(layer, called.load, made.facts.hidden, made.tp)
    point = LayerPoint(
        **work._asdict(),
        forward_ms=0,
        backward_ms=0,
        saved_bytes=seen.saved,
        forward_peak_bytes=seen.forward_peak,
        backward_peak_bytes=seen.backward_peak,
    )
    first = _piece(module, called, layer.path, needs=False) if layer.adapted else None
    frozen = None if made.adapted else _frozen_piece(module, called, layer.path)
    return _Timed(layer.structure, point, above, first, frozen)


def _piece(module: nn.Module, called: Called, path: str, *, needs: bool) -> Piece:
    """A layer's forward and backward; `needs`: its input has a gradient too."""
    args, place = called.layers[path], called.hidden
    slope = torch.ones_like(args[place])

    def forward() -> Tensor:
        hidden = args[place].detach().requires_grad_(needs)
        return _first(module(*args[:place], hidden, *args[place + 1 :]))

    return Piece(forward, lambda made: torch.autograd.backward(made, [slope] * len(made)))


def _frozen_piece(module: nn.Module, called: Called, path: str) -> Piece:
    """A layer's forward where nothing needs a gradient."""

    def forward() -> Tensor:
        with torch.no_grad():
            return _first(module(*called.layers[path]))

    return Piece(forward)


def _run(piece: Piece) -> None:
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
