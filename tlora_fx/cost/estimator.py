"""The time and the memory of groups of jobs, from measured profiles of layers.

What a job asks for adds up over a group (`Demand`), so a merge costs one sum, and a group's time
is a look-up a layout. Thousands of groups are costed in one call, by the functions by which
planners choose plans: of the same rows both say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from tlora_fx.cost.fit import QUANTITIES, SAVED, Line, Links
from tlora_fx.cost.hardware import GIB, Cluster, Tier, gpu_of_device
from tlora_fx.cost.layouts import SPINE, Groups, Layouts, Pairs, Sites
from tlora_fx.cost.load import (
    COLUMN,
    MAX_ROW_TOKENS,
    Array,
    Demand,
    Mask,
    Rows,
    is_small,
    require_demands,
)
from tlora_fx.cost.memory import StageContents, in_flight, memory_terms, usable_bytes
from tlora_fx.cost.model_facts import ADAM_STATES, TAIL, WIDEST_TAIL, ModelFacts, find_base
from tlora_fx.cost.pipeline_simulation import Times, schedule_order, simulate
from tlora_fx.cost.plan import MeshShape
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import TP, require_profile
from tlora_fx.cost.step_time import (
    HOST_BOUND_TOKENS,
    CostModel,
    Sharding,
    Stage,
    Terms,
    stages_of,
    total,
    trained_part,
)
from tlora_fx.errors import BaseUnknown, EstimatorOption, nearest

#: Groups that are costed at once: what they need lies in a processor's cache.
CHUNK = 2048
#: Solo times that are kept.
CACHED = 200_000
#: No weights are copied where none are gathered.
_NEVER = np.array(False)
#: Reasons that are named where nothing fits.
REASONS = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a group on its GPUs: a plan without cuts.

    mesh         processes along each dimension
    shard_base   the base is sharded over dp
    """

    mesh: MeshShape = field(default_factory=MeshShape)
    shard_base: bool = False

    def __str__(self) -> str:
        return f"{self.mesh}{', sharded base' if self.shard_base else ''}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted terms of one step of a group.

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

        demands   [n, 15] rows of `Demand`
        gpus      [n] GPUs of each; a layout may use fewer
        tiers     [n] how far apart they stand
        raises    DemandWrong for a number that is not finite, is negative, or is 0 of samples,
                  tokens or GPUs
        """

    def busy(self, base: str, demands: Array, gpus: Array, seconds: Array) -> Array:
        """The part of the GPUs' time that each of n groups uses, 0 to 1; 1 minus it is residual."""

    def explain(self, base: str, demand: Demand, gpus: int, tier: Tier) -> Prediction:
        """Prediction of one group's step, term by term."""

    def solo(self, base: str, demand: Demand, gpus: int) -> float:
        """Seconds of one step of a job alone on the GPUs it asked for; cached."""


@dataclass
class ProfileEstimator:
    """An `Estimator` by profiles.

    profiles       by base
    cluster        whose nodes and racks decide what crosses which link
    shapes         facts of bases that are not known by name; a base not among them is looked up
    fused          False: adapters run one after the other (the ablation without a kernel fuser)
    graphs         False: rows are launched, none runs as a CUDA graph; nor does any that is unfused
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
    graphs: bool = True
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
        """See `Estimator`; raises BaseUnknown, DemandWrong."""
        known, count = self.base(base), np.asarray(gpus)
        require_demands(demands, count)
        self.evaluations += len(demands)
        found = np.empty(len(demands))
        for start in range(0, len(demands), CHUNK):
            part = slice(start, start + CHUNK)
            groups = known.groups(demands[part], count[part], tiers[part])
            found[part] = known.seconds(groups, count[part])
        return found

    def busy(self, base: str, demands: Array, gpus: Array, seconds: Array) -> Array:
        """The part of the GPUs' peak that each of n groups uses, 0 to 1.

        What is counted is what the model needs: four operations for each number of the base and
        token (nothing is computed again, no gradient of weights), six for adapters', and
        attention's. Against the data sheet's peak, as utilisation is told, so no group comes to 1;
        on hardware without a sheet against the fastest row that the profile has.
        """
        known = self.base(base)
        peak = known.peak_flops
        if not peak:
            return np.zeros(len(demands))
        with np.errstate(divide="ignore", invalid="ignore"):
            found = operations(known.cost.facts, demands) / (seconds * gpus * peak)
        return np.where(np.isfinite(seconds), np.clip(found, 0.0, 1.0), 0.0)

    def explain(self, base: str, demand: Demand, gpus: int, tier: Tier) -> Prediction:
        """Prediction of one group's step, term by term; raises BaseUnknown, DemandWrong."""
        known, count, row = self.base(base), np.array([gpus]), demand.row()[None]
        require_demands(row, count)
        return known.explain(known.groups(row, count, [tier]), count)

    def solo(self, base: str, demand: Demand, gpus: int) -> float:
        """Seconds of one step of a job alone on the GPUs it asked for; cached, not counted."""
        key = (base, demand, gpus)
        found = self._solo.get(key)
        if found is None:
            if len(self._solo) >= CACHED:
                self._solo.clear()
            tier = self.cluster.min_tier(gpus)
            asked = self.evaluations
            found = float(self.seconds(base, demand.row()[None], np.array([gpus]), [tier])[0])
            self.evaluations = asked
            self._solo[key] = found
        return found

    def base(self, name: str) -> Base:
        """Tables of a base, made when they are first asked for; raises BaseUnknown."""
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
            known = self._bases[name] = Base(facts, self.profiles[name], self)
        return known


class Base:
    """One base on one cluster, ready to be asked."""

    def __init__(self, facts: ModelFacts, profile: Profile, options: ProfileEstimator) -> None:
        sizes, cluster, fused = options.tp or measured(profile), options.cluster, options.fused
        self.tp = tuple(size for size in sizes if divides(facts, size))
        # Groups' jobs may adapt any layer.
        self.cost = CostModel(facts, profile, cluster.gpus_per_node, lowest=0, fused=fused)
        self.clock = self.cost.clock(self.tp)
        # Adapters one after the other read their tables on the host.
        captured = fused and options.graphs
        self.layouts = Layouts(self.cost, cluster, self.tp, options.spine, captured=captured)
        self.sites = Sites(self.cost, self.tp)
        self.nano_batches = [count for count in options.nano_batches if count > 1]
        self._whole = Stage(range(len(facts.layers)))
        self.usable_bytes, self.peak_flops = usable_bytes(profile), _peak(profile, facts.dtype)
        self._least, self._each, self._longest = self._bound()

    def groups(self, demands: Array, gpus: Array, tiers: list[Tier]) -> Groups:
        """Columns of groups with these demands, on GPUs that are so far apart."""
        return Groups(demands, self.layouts.span(gpus, tiers), self.sites.work(demands))

    def pairs(self, groups: Groups, gpus: Array) -> tuple[Pairs, Mask]:
        """All pairs that can be the fastest; and of the groups those that fit however they run."""
        fits_whole = self.fits_surely(groups)
        return Pairs.possible(groups, self.layouts, gpus, fits_whole), fits_whole

    def terms(self, pairs: Pairs, *, sharded: bool = False) -> Terms:
        """Milliseconds of a step by name [m]; they add up, an overlap being negative.

        sharded   the base lies in parts on replicas
        """
        layouts, facts = self.layouts, self.cost.facts
        terms = self._rows(pairs, sharded=sharded)
        staged = np.flatnonzero(layouts.pp[pairs.layout] > 1)
        if len(staged):
            for term in terms.values():
                term[staged] = 0.0
            for name, values in self._stages(pairs.only(staged)).items():
                terms[name] = np.zeros(len(pairs.layout))
                terms[name][staged] = values
        numbers = pairs.of_group("parameters") * layouts.trained[pairs.layout]
        reduce = layouts.line("reduce", pairs.layout, pairs.span)
        terms = {
            **terms,
            "reduce": reduce(numbers * facts.trained_bytes),
            "optimizer": self.cost.ends.optimizer_ms(
                pairs.of_group("jobs"),
                pairs.of_group("tensors") * layouts.held[pairs.layout],
                numbers,
            ),
        }
        packing = self.cost.ends.host_ms(pairs.groups.column("tokens"))[pairs.rows.load]
        host = self.cost.ends.waits_ms(packing, total(terms))
        return {"host": host, **terms, **self._measuring(pairs, sharded=sharded)}

    def memory(self, pairs: Pairs, *, sharded: bool = False) -> Terms:
        """Bytes of the fullest process by name [m]; they add up."""
        pp = self.layouts.pp[pairs.layout]
        found: Terms = {}
        for stages in np.unique(pp).astype(int):
            chosen = np.flatnonzero(pp == stages)
            terms = self._fullest(pairs.only(chosen), stages, sharded=sharded)
            for name, values in terms.items():
                found.setdefault(name, np.zeros(len(pp)))[chosen] = values
        return found

    def seconds(self, groups: Groups, gpus: Array) -> Array:
        """Seconds of a step on the fastest layout of each group; infinite where none fits."""
        pairs, fits_whole = self.pairs(groups, gpus)
        ms = total(self.terms(pairs))
        tight = np.flatnonzero(~fits_whole[pairs.rows.load])
        if len(tight):
            ms[tight] = self._where_it_fits(pairs.only(tight), ms[tight])
        starts = np.searchsorted(pairs.rows.load, np.arange(len(gpus)))
        return np.asarray(np.minimum.reduceat(ms, starts) * 1e-3)

    def explain(self, groups: Groups, gpus: Array) -> Prediction:
        """The fastest layout of a single group that fits, or what stands against all of them."""
        pairs, _ = self.pairs(groups, gpus)
        layouts = self.layouts
        spread = (layouts.dp[pairs.layout] > 1) & (layouts.pp[pairs.layout] == 1)
        options = [LayoutCosts.of(self, pairs, sharded=False)]
        if spread.any():
            options.append(LayoutCosts.of(self, pairs.only(spread), sharded=True))
        best = min(options, key=LayoutCosts.seconds)
        if best.seconds() < float("inf"):
            return best.prediction()
        return _nothing_fits(options, self.usable_bytes)

    def fits_surely(self, groups: Groups) -> Mask:
        """Whether a group fits however it runs but for pipelines [n]; where not, `memory` tells.

        A bound that is quick to compute: all on one GPU, in rows as long as they may be.
        """
        tokens, samples = groups.column("tokens"), groups.column("samples")
        most = np.maximum(tokens / samples, groups.column("squares") / tokens)
        longest = np.where(most <= MAX_ROW_TOKENS, np.minimum(tokens, MAX_ROW_TOKENS), tokens)
        needed = self._least + groups.demands @ self._each + self._longest * longest
        return np.asarray(needed <= self.usable_bytes)

    def _where_it_fits(self, pairs: Pairs, ms: Array) -> Array:
        """The times of pairs that may not fit: as they are, with a sharded base, or infinite."""
        fits = total(self.memory(pairs)) <= self.usable_bytes
        found = np.where(fits, ms, np.inf)
        dp, pp = self.layouts.dp[pairs.layout], self.layouts.pp[pairs.layout]
        other = np.flatnonzero(~fits & (dp > 1) & (pp == 1))
        if len(other):
            chosen = pairs.only(other)
            fits = total(self.memory(chosen, sharded=True)) <= self.usable_bytes
            found[other] = np.where(fits, total(self.terms(chosen, sharded=True)), np.inf)
        return found

    def _rows(self, pairs: Pairs, *, sharded: bool) -> Terms:
        """All rows of a replica without stages, with the number of nano-batches that is best."""
        best = self._forwards(pairs, 1, sharded=sharded)
        for count in self.nano_batches:
            other = self._forwards(pairs, count, sharded=sharded)
            # Only communication of tp can be hidden by them.
            better = (total(other) < total(best)) & (self.layouts.tp[pairs.layout] > 1)
            best = {
                name: np.where(better, values, best.get(name, 0.0))
                for name, values in other.items()
            }
        return best

    def _forwards(self, pairs: Pairs, nano: int, *, sharded: bool) -> Terms:
        layouts, rows, parts = self.layouts, pairs.rows, None
        tp = layouts.tp[pairs.layout]
        links = self._links(pairs, "comm", *(["gather"] if sharded else []))
        if nano > 1:
            rows = replace(rows, launched=np.ones_like(rows.launched))
            parts = rows.split(nano)
        terms = self.clock.row_terms(rows, tp, links, parts, nano)
        if sharded:
            there, back = self.clock.stage_ms(
                replace(rows, launched=rows.launched | ~links.copies),
                tp,
                links,
                self._whole,
                parts=parts,
                nano=nano,
                sharding=_sharding(rows),
            )
            terms["gathers"] = there + back - total(terms)
        return {name: pairs.count * values for name, values in terms.items()}

    def _stages(self, pairs: Pairs) -> Terms:
        """Pipelines: the busiest process's work, and what the pipeline waits beyond it."""
        busy, makespan = np.zeros((2, len(pairs.layout)))
        pp, facts = self.layouts.pp[pairs.layout], self.cost.facts
        for stages, count in np.unique(np.array([pp, pairs.count]), axis=1).T.astype(int):
            chosen = np.flatnonzero((pp == stages) & (pairs.count == count))
            own = pairs.only(chosen)
            plan = self.layouts.plans[own.layout[0]]
            tp, links = self.layouts.tp[own.layout], self._links(own, "comm", "send")
            each = [
                self.clock.stage_ms(own.rows, tp, links, stage)
                for stage in stages_of(plan, len(facts.layers))
            ]
            times = Times(
                forward=[[there] * count for there, _ in each],
                backward=[[back] * count for _, back in each],
                transfer=links.send(own.rows.tokens * self.cost.hidden_bytes),
            )
            order = schedule_order(plan.schedule, stages, stages, count)
            found = simulate(order, times, stages)
            busy[chosen] = np.max(np.array(found.busy_seconds), axis=0)
            makespan[chosen] = found.makespan_seconds
        return {"stages": busy, "bubble": makespan - busy}

    def _fullest(self, pairs: Pairs, stages: int, *, sharded: bool) -> Terms:
        """Bytes of the fullest process, of layouts with so many stages."""
        layouts, layers = self.layouts, len(self.cost.facts.layers)
        plan, tp = layouts.plans[pairs.layout[0]], layouts.tp[pairs.layout]
        rows, copies = pairs.fullest(layouts), layouts.copies[pairs.layout, pairs.span]
        # A stage's adapters count whole, also those that tp cuts.
        part = trained_part(tp) if stages == 1 else 1.0
        numbers = pairs.of_group("parameters") * part
        best: Terms = {}
        for process, stage in enumerate(stages_of(plan, layers)):
            share = len(stage.layers) / layers
            held = StageContents(
                stage,
                tp=tp,
                dp=layouts.dp[pairs.layout],
                copies=copies,
                flying=in_flight(plan, process, pairs.count),
                adapters=numbers * share * self.cost.facts.trained_bytes * (2 + ADAM_STATES),
                tail_bytes=self._behind(pairs) * share / tp,
                sharded=sharded,
            )
            terms = memory_terms(self.clock, rows, held)
            fuller = total(terms) > total(best) if best else True
            best = {
                name: np.where(fuller, values, best.get(name, 0.0))
                for name, values in terms.items()
            }
        return best

    def _measuring(self, pairs: Pairs, *, sharded: bool) -> Terms:
        """A step's share of evaluations and of answers to prompts, for which all jobs wait.

        Rows of a pipeline are costed as if its stages ran them one after the other.
        """
        rows, tokens, decoding = (
            pairs.groups.column(name)
            for name in ("evaluation_rows", "evaluation_tokens", "decoding_steps")
        )
        terms: Terms = {}
        if tokens.any():
            count = np.maximum(rows, tokens / MAX_ROW_TOKENS)
            each = np.divide(tokens, count, out=np.zeros_like(tokens), where=count > 0)
            each, count = (one[pairs.rows.load] for one in (each, count))
            forward = self._forward_ms(pairs, each, sharded=sharded)
            terms["evaluation"] = count * forward / self.layouts.dp[pairs.layout]
        if decoding.any() and not sharded:
            # A base that lies in pieces answers nothing while it trains.
            whole = self.layouts.tp[pairs.layout] * self.layouts.pp[pairs.layout] == 1
            forward = self._forward_ms(pairs, np.ones(len(whole)), sharded=False)
            terms["sampling"] = decoding[pairs.rows.load] * forward * whole
        return terms

    def _forward_ms(self, pairs: Pairs, tokens: Array, *, sharded: bool) -> Array:
        """A forward of rows of so many tokens, each with a loss; none runs as a CUDA graph [m]."""
        launched = np.ones(len(tokens), dtype=bool)
        rows = replace(
            pairs.rows,
            tokens=tokens,
            targets=tokens,
            launched=launched,
            part=tokens / pairs.of_group("tokens"),
        )
        links = self._links(pairs, "comm", *(["gather"] if sharded else []))
        return self.clock.stage_ms(
            rows,
            self.layouts.tp[pairs.layout],
            links,
            self._whole,
            sharding=_sharding(rows) if sharded else None,
        )[0]

    def _links(self, pairs: Pairs, *names: str) -> Links:
        """What processes of layouts say to each other, as far as it is asked for."""
        lines = {name: self.layouts.line(name, pairs.layout, pairs.span) for name in names}
        nothing = {name: Line() for name in ("comm", "reduce", "gather", "send")}
        copies = self.layouts.copies[pairs.layout, pairs.span] if "gather" in names else _NEVER
        return Links(**nothing | lines, copies=copies)

    def _behind(self, pairs: Pairs) -> Array:
        """What compiled layers leave free behind adapted weights, before tp cuts it [m]."""
        facts, sites = self.cost.facts, self.sites
        ranks = pairs.of_group("rank") / max(sites.columns, 1.0)
        tail = np.ceil(ranks / TAIL) * TAIL
        tail = np.where(tail <= WIDEST_TAIL, tail, 0.0)
        each = facts.itemsize * tail * (sites.columns + sites.count * tail)
        return np.asarray(len(facts.layers) * each)

    def _bound(self) -> tuple[float, Array, float]:
        """Bytes that no layout without stages needs more than: a start, and so much each.

        Of a demand's columns [15], and of a token of the longest row. Each curve lies below a line,
        each slope is that of the tp that takes most.
        """
        facts, tables, ends = self.cost.facts, self.clock.tables, self.cost.ends
        counts = self.clock.counts(self.cost.kind_of)
        saved, *peaks = (tables.curves.part(place) for place in range(SAVED, len(QUANTITIES)))
        lines = [saved.weighted(counts).below(), *(peak.below() for peak in peaks)]
        lines.append(ends.root_bytes.below())
        loss = ends.loss_saved.below(), ends.loss_peak.below()
        slopes = np.einsum("k,ktw->tw", counts, tables.slopes[SAVED])
        slopes = (slopes + tables.slopes[SAVED + 1 :].max(axis=1).sum(axis=0)).max(axis=0)
        tail = WIDEST_TAIL * (self.sites.columns + self.sites.count * WIDEST_TAIL) * facts.itemsize
        rises = {
            "squares": slopes[0],
            "adapters": slopes[1] + slopes[2],
            "site_tokens": slopes[3],
            "rank_tokens": slopes[4],
            "targets": sum(rise for _, rise in loss),
            "parameters": facts.trained_bytes * (2.0 + ADAM_STATES),
        }
        each = np.array([float(rises.get(name, 0.0)) for name in COLUMN])
        least = facts.base_bytes + len(facts.layers) * tail
        least += sum(start for start, _ in (*lines, *loss))
        return least, each, sum(rise for _, rise in lines) + 2.0 * self.cost.hidden_bytes


def _sharding(rows: Rows) -> Sharding:
    """What the host takes to launch layers, by rows so small that it is slower."""
    small = rows.split(np.maximum(1.0, rows.tokens // HOST_BOUND_TOKENS))
    return Sharding(replace(small, launched=np.ones_like(small.launched)))


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """All layouts of one group, with a whole base or a sharded one."""

    known: Base
    pairs: Pairs
    terms: Terms
    memory: Terms
    sharded: bool

    @classmethod
    def of(cls, known: Base, pairs: Pairs, *, sharded: bool) -> LayoutCosts:
        """Costs of the given pairs, which are all of one group."""
        terms, memory = (ask(pairs, sharded=sharded) for ask in (known.terms, known.memory))
        return cls(known, pairs, terms, memory, sharded)

    def ms(self) -> Array:
        """Milliseconds of each layout, infinite where it does not fit."""
        return np.where(total(self.memory) <= self.known.usable_bytes, total(self.terms), np.inf)

    def seconds(self) -> float:
        """Seconds of a step on the fastest layout."""
        return float(self.ms().min()) * 1e-3

    def prediction(self) -> Prediction:
        """Prediction by the fastest layout."""
        place, known = int(self.ms().argmin()), self.known
        layout, span = int(self.pairs.layout[place]), int(self.pairs.span[place])
        mesh = known.layouts.plans[layout].mesh
        seconds = {name: float(one[place]) * 1e-3 for name, one in self.terms.items()}
        memory = {name: float(one[place]) for name, one in self.memory.items()}
        step = sum(seconds.values())
        needed = float(operations(known.cost.facts, self.pairs.groups.demands)[0])
        peak = known.peak_flops * mesh.size
        measured = known.layouts.measured(mesh, span, sharded=self.sharded)
        exact = known.clock.tables.exact[known.tp.index(mesh.tp)]
        return Prediction(
            seconds=step,
            layout=Layout(mesh, self.sharded),
            memory_bytes=sum(memory.values()),
            terms={name: one for name, one in seconds.items() if one},
            memory={name: one for name, one in memory.items() if one},
            busy=min(1.0, needed / (step * peak)) if peak else 0.0,
            estimated=known.cost.profile.estimated or not exact or not measured,
            launched=self._without_graphs(place),
        )

    def _without_graphs(self, place: int) -> int:
        """Jobs that keep a layout's rows from running as CUDA graphs; 0 where others would not."""
        layouts, layout = self.known.layouts, self.pairs.layout[place]
        small = is_small(self.pairs.rows.tokens[place], layouts.tp[layout])
        near = not self.sharded or layouts.copies[layout, self.pairs.span[place]]
        captures = layouts.captures[layout] and small and near
        launched = int(self.pairs.groups.column("launched")[0])
        return launched if captures and self.known.cost.profile.knows_graphs else 0

    def needs(self) -> list[tuple[float, str]]:
        """Bytes of each layout, and its name."""
        meshes = [self.known.layouts.plans[place].mesh for place in self.pairs.layout]
        return [(float(size), str(Layout(mesh, self.sharded)))
                for size, mesh in zip(total(self.memory), meshes, strict=True)]  # fmt: skip


def _nothing_fits(options: Sequence[LayoutCosts], usable_bytes: float) -> Prediction:
    needs = sorted(pair for option in options for pair in option.needs())
    reasons = [f"{name} needs {size / GIB:.1f} GiB of {usable_bytes / GIB:.1f}"
               for size, name in needs[:REASONS]]  # fmt: skip
    least = needs[0][0] if needs else float("inf")
    return Prediction(float("inf"), None, least, {}, {}, why_not="; ".join(reasons))


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


def divides(facts: ModelFacts, tp: int) -> bool:
    """Whether heads, key-value heads and widths can be cut into so many parts."""
    if tp == 1:
        return True
    attended = [one for layer in facts.layers for one in layer.attention]
    heads = [n for one in attended for n in (one.heads, one.key_value_heads)]
    widths = [n for layer in facts.layers for pair in layer.matrices for n in pair]
    return bool(attended) and not any(n % tp for n in heads + widths)


def _peak(profile: Profile, dtype: str) -> float:
    gpu = gpu_of_device(profile.hardware.gpu)
    if gpu is not None:
        return gpu.peak_tflops(dtype) * 1e12
    rows = [(layer, point) for layer in profile.layers if layer.tp == 1 for point in layer.points]
    return max(
        (4 * layer.elements * point.tokens / max(point.forward_ms + point.backward_ms, 1e-9) * 1e3
         for layer, point in rows),
        default=0.0,
    )  # fmt: skip


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
