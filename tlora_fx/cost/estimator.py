"""The time and the memory of groups of jobs, from measured profiles of layers.

What a job asks for adds up over a group (`Demand`), so a merge costs one sum, and a group's time
is a look-up a layout. Thousands of groups are costed in one call; numpy is all that it needs. The
terms are those by which planners choose plans: the scheduler expects what `tlora-fx plan` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.cluster import Cluster, Tier
from tlora_fx.cost.demand import Array, Demand
from tlora_fx.cost.layouts import SPINE, Layouts
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.profile import Profile
from tlora_fx.errors import BaseUnknown, EstimatorOption, nearest
from tlora_fx.scheduler.bases import find_base
from tlora_fx.scheduler.estimating import Prediction
from tlora_fx.scheduler.estimator_base import Base, measured, operations, where_it_fits
from tlora_fx.scheduler.estimator_explain import explained
from tlora_fx.scheduler.estimator_fit import BaseFit
from tlora_fx.scheduler.estimator_memory import Room
from tlora_fx.scheduler.estimator_profiles import demand_profile
from tlora_fx.scheduler.estimator_rows import Groups, paired
from tlora_fx.scheduler.estimator_time import StepClock

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
            demand_profile(name, self.profiles[name], self.cluster.gpu, allow_estimated=True)
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
