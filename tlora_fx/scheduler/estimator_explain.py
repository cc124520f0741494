"""Why a group takes as long as it does: one layout, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlora_fx.cost.demand import Array
from tlora_fx.cost.hardware import GIB
from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.scheduler.estimating import Layout, Prediction
from tlora_fx.scheduler.estimator_base import Base, added, operations
from tlora_fx.scheduler.estimator_rows import Groups, Pairs
from tlora_fx.scheduler.estimator_time import Terms

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
