"""The time and the memory of groups of jobs, from measured profiles of layers.

What a job asks for adds up over a group (`Demand`), so a merge costs one sum, and a group's time
is a look-up a layout. Thousands of groups are costed in one call; numpy is all that it needs. The
terms are those by which planners choose plans: the scheduler expects what `tlora-fx plan` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.cluster import Cluster, Tier
from tlora_fx.cost.demand import COLUMN, Array, Demand
from tlora_fx.cost.fit import TP, BaseFit
from tlora_fx.cost.hardware import GIB
from tlora_fx.cost.layouts import SPINE, Groups, Layouts, Pairs, paired
from tlora_fx.cost.memory import Room
from tlora_fx.cost.model_facts import CAPTURED_TOKENS, ModelFacts, find_base
from tlora_fx.cost.plan import MeshShape
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import require_profile
from tlora_fx.cost.step_time import StepClock, Terms
from tlora_fx.errors import BaseUnknown, EstimatorOption, nearest

# What the scheduler asks of an estimator.


@dataclass(frozen=True, slots=True)
class Layout:
    """How a group runs on its GPUs: a plan without cuts.

    mesh         processes along each dimension
    shard_base   the base is sharded over dp
    """

    mesh: MeshShape = field(default_factory=MeshShape)
    shard_base: bool = False

    def __str__(self) -> str:
        return f"{self.mesh}{', sharded base' if self.shard_base else ''}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step of a group, term by term.

    seconds        of one step; infinite where nothing fits
    layout         the fastest that fits; None where none does
    memory_bytes   of the fullest GPU
    terms          seconds by name; with the overlap they add up to `seconds`
    memory         bytes by name; they add up to `memory_bytes`
    busy           part of the GPUs' time that computes at the roofline
    estimated      whether anything was not measured
    launched       jobs that keep rows from running as CUDA graphs, where otherwise small rows would
    why_not        what stood against every layout, where none fits
    """

    seconds: float
    layout: Layout | None
    memory_bytes: float
    terms: Mapping[str, float]
    memory: Mapping[str, float]
    busy: float = 0.0
    estimated: bool = False
    launched: int = 0
    why_not: str = ""


class Estimator(Protocol):
    """Time and memory of groups.

    evaluations   how many (group, GPUs) pairs were asked for in all
    """

    evaluations: int

    def seconds(self, base: str, demands: Array, gpus: Array, tiers: list[Tier]) -> Array:
        """Seconds of one step of each of n groups under its best layout; inf where none fits.

        demands   [n, 12] rows of `Demand`
        gpus      [n] GPUs of each; a layout may use fewer
        tiers     [n] how far apart they stand
        """

    def busy(self, base: str, demands: Array, gpus: Array, seconds: Array) -> Array:
        """The part of the GPUs' time that each of n groups uses, 0 to 1; 1 minus it is residual."""

    def explain(self, base: str, demand: Demand, gpus: int, tier: Tier) -> Prediction:
        """One group, term by term."""

    def solo(self, base: str, demand: Demand, gpus: int) -> float:
        """Seconds of one step of a job alone on the GPUs it asked for; cached."""


# One base, ready to be asked: its tables, its layouts, its clock and its memory.


@dataclass(frozen=True, slots=True)
class Base:
    """One base, ready to be asked."""

    fit: BaseFit
    layouts: Layouts
    clock: StepClock
    room: Room


def where_it_fits(known: Base, groups: Groups, pairs: Pairs, ms: Array) -> Array:
    """The times of pairs that may not fit: as they are, with a sharded base, or infinite."""
    usable = known.fit.usable_bytes
    fits = added(known.room.terms(groups, pairs)) <= usable
    found = np.where(fits, ms, np.inf)
    dp, pp = known.layouts.dp[pairs.layout], known.layouts.pp[pairs.layout]
    other = np.flatnonzero(~fits & (dp > 1) & (pp == 1))
    if len(other):
        chosen = pairs.only(other)
        gathers = known.clock.gathers(groups, chosen)
        shards = added(known.room.terms(groups, chosen, sharded=True)) <= usable
        found[other] = np.where(shards, ms[other] + gathers, np.inf)
    return found


def added(terms: Terms) -> Array:
    """All terms together."""
    return np.asarray(sum(terms.values()))


def measured(profile: Profile) -> tuple[int, ...]:
    """Sizes of tensor parallelism that a profile has layers of, 1 always among them."""
    return tuple(sorted({1, *(layer.tp for layer in profile.layers)} & set(TP)))


def operations(facts: ModelFacts, demands: Array) -> Array:
    """Floating-point operations that a step of each of n groups needs [n]."""
    elements = sum(layer.elements for layer in facts.layers)
    width = sum(one.width for layer in facts.layers for one in layer.attention)
    tokens, targets, squares, adapters = (
        demands[:, COLUMN[name]] for name in ("tokens", "targets", "squares", "rank_tokens")
    )
    head = facts.hidden * facts.vocabulary
    # Causal attention: two products of half a square forwards, five backwards.
    attention = 7 * width * squares
    products = 4 * (elements * tokens + head * targets)
    return np.asarray(products + 6 * len(facts.layers) * adapters + attention)


# Why a group takes as long as it does: one layout, term by term.


#: Reasons that are named where nothing fits.
REASONS = 8


def explained(known: Base, groups: Groups, pairs: Pairs) -> Prediction:
    """The fastest layout of one group that fits, or what stands against all of them.

    groups   a single one
    pairs    all its layouts
    """
    spread = pairs.only(known.layouts.dp[pairs.layout] > 1)
    options = [
        Option.of(known, groups, pairs, sharded=False),
        Option.of(known, groups, spread, sharded=True),
    ]
    best = min(options, key=Option.seconds)
    if best.seconds() < float("inf"):
        return best.prediction()
    return _nothing_fits(options, known.fit.usable_bytes)


@dataclass(frozen=True, slots=True)
class Option:
    """All layouts of one group, with a whole base or a sharded one.

    launched   jobs of the group that cannot run as CUDA graphs
    """

    known: Base
    pairs: Pairs
    terms: Terms
    memory: Terms
    busy: float
    sharded: bool
    launched: int

    @classmethod
    def of(cls, known: Base, groups: Groups, pairs: Pairs, *, sharded: bool) -> Option:
        """Of pairs of one group."""
        if sharded:
            pairs = pairs.only(known.layouts.pp[pairs.layout] == 1)
        terms = known.clock.terms(groups, pairs)
        if sharded:
            terms["gathers"] = known.clock.gathers(groups, pairs)
        needed = float(operations(known.fit.facts, groups.demands)[0])
        room = known.room.terms(groups, pairs, sharded=sharded)
        launched = int(groups.column("launched")[0])
        return cls(known, pairs, terms, room, needed, sharded, launched)

    def ms(self) -> Array:
        """Milliseconds of each layout, infinite where it does not fit."""
        total = sum(self.terms.values(), np.zeros(len(self.pairs.group)))
        return np.where(added(self.memory) <= self.known.fit.usable_bytes, total, np.inf)

    def seconds(self) -> float:
        """Of the fastest one."""
        return float(self.ms().min(initial=np.inf)) * 1e-3

    def prediction(self) -> Prediction:
        """The fastest one, told."""
        place = int(self.ms().argmin())
        mesh = self.known.layouts.meshes[self.pairs.layout[place]]
        seconds = {name: float(one[place]) * 1e-3 for name, one in self.terms.items()}
        memory = {name: float(one[place]) for name, one in self.memory.items()}
        total = sum(seconds.values())
        peak = self.known.fit.peak_flops * mesh.size
        measured = self.known.layouts.measured(mesh, int(self.pairs.reach[place]),
                                               sharded=self.sharded)  # fmt: skip
        exact = self.known.fit.exact[self.known.fit.tp.index(mesh.tp)]
        return Prediction(
            seconds=total,
            layout=Layout(mesh, self.sharded),
            memory_bytes=sum(memory.values()),
            terms={name: one for name, one in seconds.items() if one},
            memory={name: one for name, one in memory.items() if one},
            busy=min(1.0, self.busy / (total * peak)) if peak else 0.0,
            estimated=self.known.fit.profile.estimated or not exact or not measured,
            launched=self._without_graphs(place),
        )

    def _without_graphs(self, place: int) -> int:
        """Jobs that keep a layout's rows from running as CUDA graphs; 0 where others would not."""
        fit, layouts, pairs = self.known.fit, self.known.layouts, self.pairs
        layout = pairs.layout[place]
        small = pairs.tokens[place] <= CAPTURED_TOKENS * layouts.tp[layout]
        near = not self.sharded or layouts.near[layout, pairs.reach[place]]
        captures = layouts.size[layout] < len(fit.tp) and small and near
        return self.launched if captures and fit.profile.knows_graphs else 0

    def needs(self) -> list[tuple[float, str]]:
        """Bytes of each layout, and its name."""
        total = added(self.memory)
        meshes = [self.known.layouts.meshes[place] for place in self.pairs.layout]
        return [(float(size), str(Layout(mesh, self.sharded)))
                for size, mesh in zip(total, meshes, strict=True)]  # fmt: skip


def _nothing_fits(options: Sequence[Option], usable_bytes: float) -> Prediction:
    needs = sorted(pair for option in options for pair in option.needs())
    reasons = [f"{name} needs {size / GIB:.1f} GiB of {usable_bytes / GIB:.1f}"
               for size, name in needs[:REASONS]]  # fmt: skip
    least = needs[0][0] if needs else float("inf")
    return Prediction(float("inf"), None, least, {}, {}, why_not="; ".join(reasons))


def table_of(prediction: Prediction) -> str:
    """A prediction as text: one line a term, then the memory."""
    if prediction.layout is None:
        return f"nothing fits: {prediction.why_not}"
    rows = [f"{prediction.layout!s:<32}{prediction.seconds * 1e3:>12.2f} ms"]
    rows += [f"  {name:<30}{value * 1e3:>12.2f} ms" for name, value in prediction.terms.items()]
    rows.append(f"{'memory':<32}{_size(prediction.memory_bytes):>16}")
    rows += [f"  {name:<30}{_size(value):>16}" for name, value in prediction.memory.items()]
    rows.append(f"{'of the peak':<32}{prediction.busy * 100:>12.1f} %")
    if prediction.launched:
        rows.append(f"no CUDA graphs: {prediction.launched} of its jobs cannot run in one")
    if prediction.estimated:
        rows.append("some of it was computed and not measured")
    return "\n".join(rows)


def _size(count: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", GIB / 2**10)):
        if count >= size / 2:
            return f"{count / size:.2f} {unit}"
    return f"{count * 2**20 / GIB:.2f} KiB"


Mask = NDArray[np.bool_]
#: Groups that are costed at once: what they need lies in a processor's cache.
CHUNK = 2048
#: Solo times that are kept.
CACHED = 200_000


@dataclass
class ProfileEstimator:
    """An `Estimator` by profiles.

    profiles       by base
    cluster        whose nodes and racks decide what talks over which link
    shapes         facts of bases that are not known by name; a base not among them is looked up
    fused          False: adapters run one after the other (the ablation without a kernel fuser)
    nano_batches   numbers of nano-batches to choose from under tensor parallelism
    tp             sizes of tensor parallelism to choose from; None: those that a profile has
                   measured. Others are scaled by rooflines, which know nothing of launching
    spine          how much slower the network is beyond a rack
    evaluations    how many (group, GPUs) pairs `seconds` was asked for
    raises         EstimatorOption; whatever asks of a base BaseUnknown, ProfileMismatch where its
                   profile is of other GPUs than the cluster's
    """

    profiles: Mapping[str, Profile]
    cluster: Cluster
    shapes: Mapping[str, ModelFacts] = field(default_factory=dict)
    fused: bool = True
    nano_batches: Sequence[int] = (1,)
    tp: Sequence[int] | None = None
    spine: float = SPINE
    evaluations: int = 0

    def __post_init__(self) -> None:
        if not self.nano_batches or min(self.nano_batches) < 1:
            raise EstimatorOption(
                "nano-batches are counted from 1", found=list(self.nano_batches), help="such as 1,2"
            )
        if self.tp is not None and 1 not in self.tp:
            raise EstimatorOption("a single GPU has tp=1", found=list(self.tp), help="name 1 too")
        self._bases: dict[str, Base] = {}
        self._solo: dict[tuple[str, Demand, int], float] = {}

    def add(self, base: str, profile: Profile, facts: ModelFacts) -> None:
        """Learn of a base that was not known, or of a newer profile of it."""
        self.profiles = {**self.profiles, base: profile}
        self.shapes = {**self.shapes, base: facts}
        self._bases.pop(base, None)
        self._solo = {key: value for key, value in self._solo.items() if key[0] != base}

    def seconds(self, base: str, demands: Array, gpus: Array, tiers: list[Tier]) -> Array:
        """Seconds of one step of each of n groups under its best layout; inf where none fits.

        demands   [n, 12]
        gpus      [n], at least 1
        tiers     [n]
        raises    BaseUnknown
        """
        known = self.base(base)
        self.evaluations += len(demands)
        reach = known.layouts.reach(np.asarray(gpus), tiers)
        found = np.empty(len(demands))
        for start in range(0, len(demands), CHUNK):
            part = slice(start, start + CHUNK)
            groups = Groups.of(known.fit, demands[part], reach[part])
            found[part] = self._best(known, groups, np.asarray(gpus)[part])
        return found

    def busy(self, base: str, demands: Array, gpus: Array, seconds: Array) -> Array:
        """The part of the GPUs' peak that each of n groups uses, 0 to 1.

        What is counted is what the model needs: four operations for each number of the base and
        token (nothing is computed again, no gradient of weights), six for adapters', and
        attention's. Against the data sheet's peak, as utilisation is told, so no group comes to 1;
        on hardware without a sheet against the fastest row that the profile has.
        """
        known = self.base(base)
        peak = known.fit.peak_flops
        if not peak:
            return np.zeros(len(demands))
        with np.errstate(divide="ignore", invalid="ignore"):
            found = operations(known.fit.facts, demands) / (seconds * gpus * peak)
        return np.where(np.isfinite(seconds), np.clip(found, 0.0, 1.0), 0.0)

    def knee_tokens(self, base: str) -> float:
        """Tokens of a row on one GPU at which a step's time begins to grow with them.

        Where the line of the last measured piece meets the time of the shortest row: fewer tokens
        leave a GPU idle for what adapters and launches cost. Merging pays below it.
        """
        fit = self.base(base).fit
        curves = [fit.curve(name) for name in ("forward", "backward")]
        last = len(fit.row.starts) - 1
        slope = sum(float(fit.row.slopes[c * len(fit.row.starts) + last]) for c in curves)
        start = sum(float(fit.row.values[c * len(fit.row.starts)]) for c in curves)
        if slope <= 0:
            return float("inf")
        end = fit.row.starts[last]
        at_end = sum(float(fit.row.values[c * len(fit.row.starts) + last]) for c in curves)
        return max(0.0, float(end - (at_end - start) / slope))

    def explain(self, base: str, demand: Demand, gpus: int, tier: Tier) -> Prediction:
        """One group, term by term.

        raises    BaseUnknown
        """
        known = self.base(base)
        reach = known.layouts.reach(np.array([gpus]), [tier])
        groups = Groups.of(known.fit, demand.row()[None], reach)
        roomy = known.room.fits_surely(groups)
        return explained(known, groups, paired(groups, known.layouts, np.array([gpus]), roomy))

    def solo(self, base: str, demand: Demand, gpus: int) -> float:
        """Seconds of one step of a job alone on the GPUs it asked for; cached, not counted."""
        key = (base, demand, gpus)
        found = self._solo.get(key)
        if found is None:
            if len(self._solo) >= CACHED:
                self._solo.clear()
            tier = self.cluster.least_tier(gpus)
            asked = self.evaluations
            found = float(self.seconds(base, demand.row()[None], np.array([gpus]), [tier])[0])
            self.evaluations = asked
            self._solo[key] = found
        return found

    def base(self, name: str) -> Base:
        """Tables of a base, made when they are first asked for.

        raises    BaseUnknown
        """
        known = self._bases.get(name)
        if known is None:
            if name not in self.profiles:
                raise BaseUnknown(
                    f"there is no profile of base '{name}'",
                    nearest=nearest(name, self.profiles),
                    found=", ".join(self.profiles) or "no profiles",
                    help="measure one with `tlora-fx profile`, or name a base that has one",
                )
            require_profile(name, self.profiles[name], self.cluster.gpu, allow_estimated=True)
            facts = self.shapes[name] if name in self.shapes else find_base(name).facts()
            fit = BaseFit.of(facts, self.profiles[name], self.tp or measured(self.profiles[name]))
            # Adapters one after the other read their tables on the host.
            layouts = Layouts(fit, self.cluster, self.spine, captured=self.fused)
            clock = StepClock(fit, layouts, self.fused, tuple(self.nano_batches))
            known = self._bases[name] = Base(fit, layouts, clock, Room(fit, layouts))
        return known

    def _best(self, known: Base, groups: Groups, gpus: Array) -> Array:
        """Seconds of the fastest layout of each group."""
        roomy = known.room.fits_surely(groups)
        pairs = paired(groups, known.layouts, gpus, roomy)
        terms = known.clock.terms(groups, pairs)
        ms = sum(terms.values(), np.zeros(len(pairs.group)))
        tight = np.flatnonzero(~roomy[pairs.group])
        if len(tight):
            ms[tight] = where_it_fits(known, groups, pairs.only(tight), ms[tight])
        starts = np.searchsorted(pairs.group, np.arange(len(gpus)))
        return np.asarray(np.minimum.reduceat(ms, starts) * 1e-3)


# A roofline by the sheet: an estimator without any profile, for tests and for comparing policies.
#
# The field notes' synthetic roofline of an 8B base on A100s, by which their table of optimality
# was made. One term for compute, with a floor of tokens below which a GPU idles; one for what a
# group costs whatever it does; all-reduces of tensor and data parallelism, hidden by nano-batches.
# Nothing of it was measured, and its predictions say so.


#: Bytes of a trained number with its gradient and the optimizer's states; of one gradient.
TRAINED_BYTES, GRADIENT_BYTES = 16.0, 4.0
#: Seconds of starting a layer's all-reduce: under tp, and of gradients.
TALK_SECONDS, REDUCE_SECONDS = 20e-6, 50e-6


@dataclass
class SyntheticEstimator:
    """An `Estimator` that needs nothing; every base is the same.

    parameters          of the base
    layers, hidden      of the base
    flops               peak operations a second of a GPU, and `reached` of them
    floor_tokens        what a row costs at least, in tokens
    memory_bytes        of a GPU for weights, adapters and activations
    activation_bytes    of a token, over all tensor-parallel processes
    node_bandwidth, network_bandwidth   bytes a second of a ring
    group_seconds       of a step, whatever it does
    fused_seconds       of adapters in shared kernels, and of each job among them
    unfused_seconds     of each job, where adapters run one after the other
    nano_batches        numbers to choose from
    evaluations         how many (group, GPUs) pairs were asked for
    """

    cluster: Cluster = field(default_factory=lambda: Cluster(128, gpu="a100"))
    parameters: float = 8.03e9
    layers: int = 32
    hidden: int = 4096
    flops: float = 312e12
    reached: float = 0.55
    floor_tokens: float = 250.0
    memory_bytes: float = 72e9
    activation_bytes: float = 3e6
    node_bandwidth: float = 200e9
    network_bandwidth: float = 20e9
    group_seconds: float = 0.011
    fused_seconds: tuple[float, float] = (0.002, 0.0001)
    unfused_seconds: float = 0.0067
    nano_batches: Sequence[int] = (1, 2, 4, 8)
    nano_seconds: float = 0.002
    tp: Sequence[int] = (1, 2, 4, 8)
    fused: bool = True
    evaluations: int = 0

    def __post_init__(self) -> None:
        self._solo: dict[tuple[Demand, int], float] = {}

    def seconds(self, base: str, demands: Array, gpus: Array, tiers: list[Tier]) -> Array:
        """Seconds of one step of each of n groups; inf where none fits.

        demands   [n, 12]; `samples`, `tokens`, `jobs` and `parameters` count
        gpus      [n], all of which are used
        tiers     [n]
        """
        self.evaluations += len(demands)
        count = np.asarray(gpus, dtype=np.float64)
        far = np.array([tier in {"rack", "cluster"} for tier in tiers])
        each = [self._total(self._terms(demands, count, far, tp)) for tp in self.tp]
        return np.asarray(np.min(each, axis=0))

    def busy(self, base: str, demands: Array, gpus: Array, seconds: Array) -> Array:
        """The part of the reachable peak that each of n groups uses, 0 to 1."""
        needed = 4 * self.parameters * demands[:, COLUMN["tokens"]]
        with np.errstate(divide="ignore", invalid="ignore"):
            found = needed / (seconds * gpus * self.flops * self.reached)
        return np.where(np.isfinite(seconds), np.clip(found, 0.0, 1.0), 0.0)

    def explain(self, base: str, demand: Demand, gpus: int, tier: Tier) -> Prediction:
        """One group, term by term."""
        row, count = demand.row()[None], np.array([float(gpus)])
        far = np.array([tier in {"rack", "cluster"}])
        every = {tp: self._terms(row, count, far, tp) for tp in self.tp}
        tp = min(every, key=lambda size: float(self._total(every[size])[0]))
        terms, room = every[tp], self._room(row, count, tp)
        memory = {name: float(value[0]) for name, value in room.items()}
        seconds = float(self._total(terms)[0])
        if not np.isfinite(seconds):
            need, has = sum(memory.values()) / 1e9, self.memory_bytes / 1e9
            why = f"needs {need:.1f} GB of {has:.1f} on {gpus} GPUs"
            return Prediction(seconds, None, sum(memory.values()), {}, memory, why_not=why)
        dp = int(min(gpus // tp, max(demand.samples, 1)))
        busy = self.busy(base, row, count, np.array([seconds]))
        return Prediction(
            seconds=seconds,
            layout=Layout(MeshShape(dp=dp, tp=tp)),
            memory_bytes=sum(memory.values()),
            terms={name: float(value[0]) for name, value in terms.items()},
            memory=memory,
            busy=float(busy[0]),
            estimated=True,
        )

    def solo(self, base: str, demand: Demand, gpus: int) -> float:
        """Seconds of one step of a job alone on the GPUs it asked for; cached, not counted."""
        key = (demand, gpus)
        if key not in self._solo:
            tier = self.cluster.least_tier(gpus)
            asked = self.evaluations
            found = self.seconds(base, demand.row()[None], np.array([gpus]), [tier])
            self.evaluations = asked
            self._solo[key] = float(found[0])
        return self._solo[key]

    def _row_tokens(self, demands: Array, gpus: Array, tp: int) -> tuple[Array, Array]:
        """Replicas, and the tokens of the busiest one."""
        samples = np.maximum(demands[:, COLUMN["samples"]], 1.0)
        dp = np.minimum(np.maximum(gpus // tp, 1.0), samples)
        return dp, np.ceil(samples / dp) * demands[:, COLUMN["tokens"]] / samples

    def _room(self, demands: Array, gpus: Array, tp: int) -> dict[str, Array]:
        """Bytes of a GPU [n]."""
        _, tokens = self._row_tokens(demands, gpus, tp)
        return {
            "base": np.full(len(tokens), 2 * self.parameters / tp),
            "adapters": demands[:, COLUMN["parameters"]] * TRAINED_BYTES / tp,
            "activations": self.activation_bytes * tokens / tp,
        }

    def _terms(self, demands: Array, gpus: Array, far: Array, tp: int) -> dict[str, Array]:
        """Seconds [n] under one size of tp; infinite where it does not fit."""
        dp, tokens = self._row_tokens(demands, gpus, tp)
        jobs, trained = demands[:, COLUMN["jobs"]], demands[:, COLUMN["parameters"]]
        used = 4 * self.parameters * (tokens + self.floor_tokens)
        compute = used / (tp * self.flops * self.reached)
        whole, each = self.fused_seconds if self.fused else (0.0, self.unfused_seconds)
        hidden_bytes = tokens * self.hidden * 2 * 2 * (tp - 1) / tp
        talk = self.layers * 4 * (TALK_SECONDS + hidden_bytes / self.node_bandwidth) * (tp > 1)
        bandwidth = np.where(far, self.network_bandwidth, self.node_bandwidth)
        gradients = trained * GRADIENT_BYTES * 2 * (dp - 1) / dp / tp
        reduce = (dp > 1) * (REDUCE_SECONDS * self.layers + gradients / bandwidth)
        hidden = self._overlap(compute, talk + reduce)
        fits = sum(self._room(demands, gpus, tp).values()) <= self.memory_bytes
        possible = fits & (gpus >= tp)
        return {
            "group": np.where(possible, self.group_seconds, np.inf),
            "adapters": whole + each * jobs,
            "base": compute,
            "tensor-parallel": talk + np.zeros_like(compute),
            "reduce": reduce,
            "overlap": hidden,
        }

    def _overlap(self, compute: Array, talk: Array) -> Array:
        """What the best number of nano-batches saves, never positive."""
        more, less = np.maximum(compute, talk), np.minimum(compute, talk)
        each = [more + less / n + self.nano_seconds * (n - 1) for n in self.nano_batches]
        return np.where(talk > 0, np.minimum(np.min(each, axis=0) - more - less, 0.0), 0.0)

    @staticmethod
    def _total(terms: dict[str, Array]) -> Array:
        return np.asarray(sum(terms.values()))
