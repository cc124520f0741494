"""The profiles that are at hand: those that were shipped, and those that the user measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Literal

from tlora_fx.cost.hardware import GPUS, Gpu, find_gpu, gpu_of_device
from tlora_fx.cost.model_facts import ITEM_BYTES, LayerFacts, ModelFacts, chunk_rows, find_base
from tlora_fx.cost.profile import (
    Hardware,
    HostPoint,
    LayerPoint,
    LayerProfile,
    LossPoint,
    ModelShape,
    OptimizerPoint,
    Profile,
    RootPoint,
    name_of,
)
from tlora_fx.errors import NotProfilable, ProfileFileError, ProfileMismatch, ProfileMissing
from tlora_fx.host.paths import profile_folder, profile_folders

# Times that a data sheet allows: to plan for a GPU that nobody has measured.
#
# A layer's products take what their operations cost at a part of the peak, or what reading the
# weights costs; what lies between them is bound by memory. The parts are stated below. All that
# comes from here is marked as estimated; where some GPU or some shape was measured, only the ratio
# of two rooflines is used, so that most of the parts cancel.


#: Parts of the peaks that are assumed to be reached.
PRODUCTS, MEMORY, ATTENTION = 0.70, 0.75, 0.40
#: What starting a layer, or one linear with adapters, costs at least.
LAYER_MS, SITE_MS = 0.03, 0.006
#: Times that each hidden column is read or written between products, forward and backward.
PASSES = {"forward": 14, "backward": 22}
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
LENGTHS = (128, 1024)
TENSOR_MS = 2e-4
HOST_MS_PER_TOKEN = 2e-4
TP = (1, 2, 4, 8)
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a layer, in the quantities that count here (see LayerProfile)."""

    elements: float
    attention_width: float
    hidden: float
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return ITEM_BYTES[self.dtype]


def layer_ms(gpu: Gpu, size: Size, point: LayerPoint, direction: Direction) -> float:
    """Milliseconds of a layer on a row.

    The backward of a frozen product is one product, that of attention two and a half times its
    forward, that of an adapter twice its forward.
    """
    peak = gpu.peak_tflops(size.dtype) * 1e9
    memory = gpu.memory_gbps * 1e6 * MEMORY
    adapters, attention = (1, 1.0) if direction == "forward" else (2, 2.5)
    products = 2 * (size.elements * point.tokens + adapters * point.rank_tokens)
    weights = size.elements * size.itemsize / memory
    columns = PASSES[direction] * size.hidden * point.tokens + 2 * point.site_tokens
    return (
        max(products / (peak * PRODUCTS), weights)
        + 2 * attention * size.attention_width * point.squares / (peak * ATTENTION)
        + columns * size.itemsize / memory
        + LAYER_MS
        + SITE_MS * point.sites
    )


def roofline_profile(gpu: Gpu, facts: ModelFacts, tokens: Sequence[int] = TOKENS) -> Profile:
    """A profile of a model on a GPU, from the data sheet alone.

    tokens    sizes of its rows
    """
    known: dict[str, LayerFacts] = {}
    for layer in facts.layers:
        if layer.structure not in known or layer.adapted:
            known[layer.structure] = layer
    roof = _Roofline(gpu, facts)
    layers = [roof.layer(layer, tp, tokens) for layer in known.values() for tp in TP]
    return Profile(
        name=f"roofline:{gpu.name}",
        source="roofline",
        origin=gpu.name,
        hardware=Hardware(gpu=gpu.name, memory_gib=gpu.memory_gib, processors=gpu.processors),
        shape=shape_of(facts),
        layers=layers,
        root=[roof.root(count) for count in tokens],
        loss=[roof.loss(rows) for rows in tokens],
        optimizer=[roof.optimizer(*one) for one in ((2, 10**4), (500, 10**7), (500, 10**5))],
        host=[HostPoint(tokens=n, ms=n * HOST_MS_PER_TOKEN) for n in (512, 16384)],
    )


def shape_of(facts: ModelFacts) -> ModelShape:
    """The sizes of a model's first layer, as a profile names them."""
    first = facts.layers[0]
    attention = first.attention[0] if first.attention else None
    others = [n for pair in first.matrices for n in pair if n != facts.hidden]
    return ModelShape(
        title=facts.title,
        hidden=facts.hidden,
        intermediate=max(others, default=0),
        heads=attention.heads if attention else 1,
        key_value_heads=attention.key_value_heads if attention else 1,
        head_dim=attention.head_dim if attention else facts.hidden,
        layers=len(facts.layers),
        vocabulary=facts.vocabulary,
        dtype=facts.dtype,
    )


def saved_numbers(layer: LayerFacts, hidden: int, tp: int = 1) -> float:
    """Numbers that a compiled layer keeps of each token for its backward, and its result.

    The inputs and outputs of all products, and the residual stream twice.
    """
    split = sum(outer for _, outer in layer.matrices if outer != hidden)
    split += max((inner for inner, _ in layer.matrices if inner != hidden), default=0)
    attended = sum(one.width for one in layer.attention)
    whole = sum(outer == hidden for _, outer in layer.matrices)
    return 3 * hidden + (whole * hidden + split + attended) / tp


@dataclass(frozen=True, slots=True)
class _Roofline:
    """Points of a model's profile that a data sheet allows."""

    gpu: Gpu
    facts: ModelFacts

    def layer(self, layer: LayerFacts, tp: int, tokens: Sequence[int]) -> LayerProfile:
        """A layer in so many parts, on rows of these sizes."""
        width = sum(one.width for one in layer.attention) / tp
        size = Size(layer.elements / tp, width, self.facts.hidden, self.facts.dtype)
        return LayerProfile(
            structure=layer.structure,
            tp=tp,
            elements=round(size.elements),
            attention_width=round(width),
            hidden=self.facts.hidden,
            points=[
                self._point(layer, size, tp, count, length, rank)
                for count in tokens
                for length in LENGTHS
                for rank in (0, 1, 8)
            ],
        )

    def _point(
        self, layer: LayerFacts, size: Size, tp: int, tokens: int, length: int, rank: int
    ) -> LayerPoint:
        """A point for adapters of one rank on every matrix; rank 0: a bare layer."""
        count = len(layer.matrices)
        widths = sum(min(i, o) + max(i, o) / tp for i, o in layer.matrices)
        saved = saved_numbers(layer, self.facts.hidden, tp) * tokens * size.itemsize
        work = LayerPoint(
            tokens=tokens,
            squares=float(tokens * min(length, tokens)),
            sites=count if rank else 0,
            job_sites=count if rank else 0,
            site_tokens=tokens * widths if rank else 0,
            rank_tokens=tokens * widths * rank,
            forward_ms=0,
            backward_ms=0,
            saved_bytes=saved,
            forward_peak_bytes=saved,
            backward_peak_bytes=0.5 * saved,
        )
        forward = layer_ms(self.gpu, size, work, "forward")
        backward = layer_ms(self.gpu, size, work, "backward")
        times = {"forward_ms": forward, "backward_ms": backward, "frozen_ms": forward}
        return work.model_copy(update=times | ({"first_ms": backward} if rank else {}))

    def root(self, tokens: int) -> RootPoint:
        """Embedding, positions and last norm of so many tokens."""
        facts = self.facts
        moved = self._moved_ms(6 * facts.hidden * tokens * facts.itemsize)
        saved = 2.0 * facts.hidden * tokens * facts.itemsize
        return RootPoint(tokens=tokens, forward_ms=moved, backward_ms=moved / 2, saved_bytes=saved)

    def loss(self, rows: int) -> LossPoint:
        """Chunks of logits, which the backward computes again."""
        facts = self.facts
        peak = self.gpu.peak_tflops(facts.dtype) * 1e9
        product = 2 * (facts.hidden * facts.vocabulary) * rows / (peak * PRODUCTS)
        logits = self._moved_ms(4.0 * facts.vocabulary * rows)
        chunk = min(rows, chunk_rows(facts.vocabulary))
        return LossPoint(
            targets=rows,
            forward_ms=product + 3 * logits,
            backward_ms=2 * product + 6 * logits,
            saved_bytes=float(facts.hidden * rows * facts.itemsize),
            peak_bytes=float(chunk * facts.vocabulary * (4 + 4 + 2 * facts.itemsize)),
        )

    def optimizer(self, tensors: int, parameters: int) -> OptimizerPoint:
        """The end of a step of a job with so many tensors and numbers."""
        moved = self._moved_ms(parameters * 4 * 9)
        return OptimizerPoint(
            tensors=tensors, parameters=parameters, ms=0.1 + tensors * TENSOR_MS + moved
        )

    def _moved_ms(self, size: float) -> float:
        return size / (self.gpu.memory_gbps * 1e6 * MEMORY)


# Carry what was measured to another GPU, another shape, or another size of tensor parallelism.
#
# A time is multiplied by the ratio of two rooflines, at the point and at what it becomes. The
# result is marked: nobody has measured it.


def scaled(profile: Profile, gpu: Gpu, facts: ModelFacts) -> Profile:
    """A profile of a model on a GPU, from another model's or another GPU's."""
    layers: dict[tuple[str, int], LayerProfile] = {}
    sizes = sorted({layer.tp for layer in profile.layers})
    for layer in facts.layers:
        for tp in sizes:
            if (layer.structure, tp) not in layers:
                layers[layer.structure, tp], _ = carried(profile, layer, facts, tp, gpu)
    ceiling, before = roofline_profile(gpu, facts), _gpu(profile)
    memory = before.memory_gbps / gpu.memory_gbps
    width = facts.hidden / profile.shape.hidden
    return profile.model_copy(
        update={
            "name": f"{profile.name} scaled to {facts.title} on {gpu.name}",
            "source": "scaled",
            "origin": profile.name,
            "hardware": Hardware(
                gpu=gpu.name, memory_gib=gpu.memory_gib, processors=gpu.processors
            ),
            "shape": shape_of(facts),
            "layers": list(layers.values()),
            "root": [
                one.scaled(memory * width, memory * width).model_copy(
                    update={"saved_bytes": one.saved_bytes * width}
                )
                for one in profile.root
            ],
            "loss": [_loss_scaling(one, profile, facts, gpu) for one in profile.loss]
            or ceiling.loss,
            "collectives": profile.collectives if gpu is before else [],
        }
    )


def carried(
    profile: Profile, layer: LayerFacts, facts: ModelFacts, tp: int, gpu: Gpu | None = None
) -> tuple[LayerProfile, bool]:
    """Profile of a layer; where the layer was not measured, that of the most similar one.

    gpu       None: the profile's own
    returns   the layer's profile, and whether it was measured as it is
    """
    before = _gpu(profile)
    gpu = gpu or before
    source = min(profile.layers, key=lambda one: _distance(one, layer, tp))
    width = sum(one.width for one in layer.attention) / tp
    new = Size(layer.elements / tp, width, facts.hidden, facts.dtype)
    old = Size(source.elements, source.attention_width, source.hidden, profile.shape.dtype)
    if (source.structure, source.tp) == (layer.structure, tp) and gpu is before:
        return source, True
    points = [_point_scaling(one, old, new, before, gpu, tp / source.tp) for one in source.points]
    scaled_layer = LayerProfile(
        structure=layer.structure,
        tp=tp,
        elements=max(1, round(new.elements)),
        attention_width=round(width),
        hidden=facts.hidden,
        points=points,
    )
    return scaled_layer, False


def _gpu(profile: Profile) -> Gpu:
    """The profile's GPU; one without a data sheet stands in for itself in every ratio."""
    return gpu_of_device(profile.hardware.gpu) or GPUS["h100"]


def _distance(known: LayerProfile, layer: LayerFacts, tp: int) -> tuple[bool, float, float]:
    """Another structure is further away than another tp, and sizes by their ratio."""
    elements = abs(math.log(known.elements * known.tp / max(layer.elements, 1)))
    return known.structure != layer.structure, elements, abs(math.log(known.tp / tp))


def _point_scaling(
    point: LayerPoint, old: Size, new: Size, before: Gpu, after: Gpu, narrower: float
) -> LayerPoint:
    """A point of a layer of another size, on another GPU."""
    # An adapter's columns: those of the hidden state stay whole, the others are cut.
    width = new.hidden / old.hidden * (1 + 1 / narrower) / 2
    resized = point.model_copy(
        update={
            "site_tokens": point.site_tokens * width,
            "rank_tokens": point.rank_tokens * width,
        }
    )
    ratios = [
        layer_ms(after, new, resized, direction) / layer_ms(before, old, point, direction)
        for direction in ("forward", "backward")
    ]
    bytes_ratio = new.hidden / old.hidden * (0.25 + 0.75 / narrower) * new.itemsize / old.itemsize
    sizes = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")
    grown = {name: getattr(point, name) * bytes_ratio for name in sizes}
    return resized.scaled(*ratios).model_copy(update=grown)


def _loss_scaling(point: LossPoint, profile: Profile, facts: ModelFacts, gpu: Gpu) -> LossPoint:
    """Head and loss of another vocabulary and width."""
    before, shape = _gpu(profile), profile.shape
    product = facts.hidden * facts.vocabulary / (shape.hidden * shape.vocabulary)
    ratio = product * before.peak_tflops(shape.dtype) / gpu.peak_tflops(facts.dtype)
    logits = facts.vocabulary / shape.vocabulary
    return point.scaled(ratio, ratio).model_copy(
        update={
            "saved_bytes": point.saved_bytes * facts.hidden / shape.hidden,
            "peak_bytes": point.peak_bytes * logits,
        }
    )


SHIPPED = Path(__file__).parent / "profiles"
ROOFLINE = "roofline:"
#: How a profile is measured in minutes on a CPU.
ON_CPU = " --eager --tokens 64,256,1024 --lengths 32"


def own_file(profile: Profile) -> Path:
    """File of the user's profile of its base on its GPU; one of another base stays beside it."""
    name = name_of(profile.shape.title, profile.hardware.gpu)
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    paths = (profile_folder() / f"{each}.json" for each in names)
    return next(path for path in paths if not path.exists() or _is_replaced(path, profile))


def _is_replaced(path: Path, profile: Profile) -> bool:
    """Whether a file holds a profile of the same base, or none that can be read."""
    try:
        there = Profile.load(path)
    except ProfileFileError:
        return True
    own, other = (
        (each.shape.model_copy(update={"title": ""}), {layer.structure for layer in each.layers})
        for each in (profile, there)
    )
    return own == other


def known_profiles() -> Iterator[Profile]:
    """All profiles, the user's first; a file that is none is passed over."""
    for folder in (*profile_folders(), SHIPPED):
        for path in sorted(folder.glob("*.json")):
            try:
                yield Profile.load(path)
            except ProfileFileError:
                continue


def profile_for(facts: ModelFacts, gpu: str, *, allow_estimated: bool) -> Profile:
    """The profile to plan a model with.

    gpu       a short name such as "h200", the driver's name, a file, or "roofline:" and a name for
              the data sheet alone
    raises    ProfileMissing where nothing was measured and estimates are not allowed; UnknownGpu,
              ProfileFileError; NotProfilable for a model that was compiled without layers
    """
    if not facts.layers:
        raise without_layers(facts)
    if gpu.startswith(ROOFLINE):
        found = roofline_profile(find_gpu(gpu.removeprefix(ROOFLINE)), facts)
    elif gpu.endswith(".json"):
        found = _fitted(Profile.load(gpu), facts)
    else:
        found = _nearest(facts, gpu)
    if found.estimated and not allow_estimated:
        raise ProfileMissing(
            f"there is no measured profile of this model on '{gpu}'",
            base=facts.title,
            found=found.name,
            help=f"measure one there with `tlora-fx profile jobs.yaml{ON_CPU * (gpu == 'cpu')}`, "
            "or plan with --allow-estimated",
        )
    return found


def without_layers(facts: ModelFacts) -> NotProfilable:
    """The error of a model that was compiled without layers, whose graph no profile describes."""
    return NotProfilable(
        "the base was compiled without layers, so there is none to time for a plan",
        base=facts.title,
        help="`tlora-fx train` needs none: it takes --plan single for one process, and "
        "--plan replicated for several; `tlora-fx explain JOBS --node MODULE` says why layers do "
        "not fold",
    )


def no_gpu_to_plan_for(base: object) -> ProfileMissing:
    """The error of a machine without a GPU, where none was named."""
    return ProfileMissing(
        "there is no GPU on this machine to plan for",
        base=base,
        expected="--gpu with the GPU that will train",
        help=f"name one with --gpu: {', '.join(GPUS)}, or a profile's file",
    )


def covers(profile: Profile, facts: ModelFacts) -> bool:
    """Whether all layers of a model were measured, and its head."""
    shape = profile.shape
    same_head = (shape.vocabulary, shape.hidden) == (facts.vocabulary, facts.hidden)
    known = {layer.structure for layer in profile.layers}
    dtype = shape.dtype == facts.dtype
    measured = bool(facts.layers) and all(layer.structure in known for layer in facts.layers)
    return same_head and dtype and measured


def _fitted(profile: Profile, facts: ModelFacts) -> Profile:
    if covers(profile, facts):
        return profile
    return scaled(profile, gpu_of_device(profile.hardware.gpu) or find_gpu("h100"), facts)


def _nearest(facts: ModelFacts, gpu: str) -> Profile:
    """A measured profile; else the nearest one scaled; else the roofline."""
    every = list(known_profiles())
    here = [one for one in every if same_gpu(one.hardware.gpu, gpu)]
    exact = [one for one in here if covers(one, facts)]
    if exact:
        return exact[0]
    sheet = find_gpu(gpu)
    by_size = [one for one in every if gpu_of_device(one.hardware.gpu) is not None]
    if not by_size:
        return roofline_profile(sheet, facts)
    nearest = min(
        by_size,
        key=lambda one: (
            not covers(one, facts),
            not same_gpu(one.hardware.gpu, gpu),
            abs(one.shape.hidden - facts.hidden),
        ),
    )
    return scaled(nearest, sheet, facts)


# The profiles that an estimator may be made of: of the cluster's own GPUs, and measured.


def profiles_for(
    bases: Iterable[str],
    gpu: str,
    *,
    allow_estimated: bool = False,
    shapes: Mapping[str, ModelFacts] | None = None,
    given: Mapping[str, Profile] | None = None,
) -> dict[str, Profile]:
    """A profile of each base on one kind of GPU.

    gpu              a short name such as "h200", or the driver's
    allow_estimated  where nothing was measured take the nearest profile, scaled, or a roofline
    shapes           facts of bases that are not known by name
    given            profiles that a user names; they are not scaled
    raises           ProfileMismatch, BaseUnknown, UnknownGpu
    """
    known, own = shapes or {}, given or {}
    found = {}
    for base in bases:
        facts = known[base] if base in known else find_base(base).facts()
        profile = own.get(base) or profile_for(facts, gpu, allow_estimated=True)
        require_profile(base, profile, gpu, allow_estimated=allow_estimated)
        found[base] = profile
    return found


def require_profile(base: str, profile: Profile, gpu: str, *, allow_estimated: bool) -> None:
    """Refuse a profile of other hardware, and one that was not measured; raises ProfileMismatch."""
    if not same_gpu(profile.hardware.gpu, gpu):
        raise ProfileMismatch(
            f"the profile of base '{base}' is of another GPU",
            profile=profile.name,
            expected=gpu,
            found=profile.hardware.gpu,
            help="measure the base there with `tlora-fx profile`, or name the right profile",
        )
    if profile.estimated and not allow_estimated:
        raise ProfileMismatch(
            f"base '{base}' was not measured on '{gpu}'",
            profile=profile.name,
            found=f"{profile.source}, from {profile.origin}",
            help="measure it with `tlora-fx profile`, or allow estimated profiles",
        )


def same_gpu(one: str, other: str) -> bool:
    """Whether two names mean one kind of GPU."""
    known = [gpu_of_device(name) for name in (one, other)]
    if None in known:
        return one.lower() == other.lower()
    return known[0] is known[1]
