"""Bytes of the fullest process of each pair of a group and a layout, term by term.

As tlora_fx/cost/memory.py: what stands between steps is counted, what a row leaves is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.demand import COLUMN, Array
from tlora_fx.cost.hardware import wants_peer_copies
from tlora_fx.cost.layouts import Layouts
from tlora_fx.scheduler.bases import ADAM_STATES, TAIL, WIDEST_TAIL
from tlora_fx.scheduler.estimator_curves import Pieces
from tlora_fx.scheduler.estimator_fit import BaseFit
from tlora_fx.scheduler.estimator_rows import MAX_ROW_TOKENS, Groups, Pairs
from tlora_fx.scheduler.estimator_time import Terms, trained_part

#: Layers whose gathered weights stand at once.
GATHERED = 2
#: Curves of what a row takes.
CURVES = ("saved", "backward peak", "forward peak", "root saved")


@dataclass(frozen=True, slots=True)
class Bound:
    """Bytes that no layout without stages needs more than, straight in a demand.

    least   whatever is asked for
    each    [12] by the columns of a demand
    token   of the longest row
    """

    least: float
    each: Array
    token: float

    @classmethod
    def of(cls, fit: BaseFit) -> Bound:
        """Each curve below a line, each slope that of the tp that takes most."""
        facts, count = fit.facts, len(fit.tp)
        lines = [below(fit.row, range(fit.curve(name), fit.curve(name) + count)) for name in CURVES]
        loss = below(fit.loss, [2]), below(fit.loss, [3])
        slopes = (fit.saved + fit.backward_peak + fit.forward_peak).max(axis=0)
        tail = WIDEST_TAIL * (fit.columns + fit.sites * WIDEST_TAIL) * facts.itemsize
        rises = {
            "squares": slopes[0],
            "adapters": slopes[1] + slopes[2],
            "site_tokens": slopes[3],
            "rank_tokens": slopes[4],
            "targets": loss[0][1] + loss[1][1],
            "parameters": facts.trained_bytes * (2.0 + ADAM_STATES),
        }
        each = np.array([float(rises.get(name, 0.0)) for name in COLUMN])
        least = facts.base_bytes + len(facts.layers) * tail
        least += sum(start for start, _ in (*lines, *loss))
        talk = 2.0 * facts.hidden * facts.itemsize
        return cls(least, each, sum(rise for _, rise in lines) + talk)


def below(curves: Pieces, names: Iterable[int]) -> tuple[float, float]:
    """A start and a rise: a line above some curves, everywhere."""
    count = len(curves.starts)
    places = [slice(name * count, (name + 1) * count) for name in names]
    start = max(float(curves.values[place][0]) for place in places)
    rise = max(float(curves.slopes[place][-1]) for place in places)
    for place in places:
        behind = curves.values[place][1:] - start
        rise = max(rise, float(np.max(behind / curves.starts[1:], initial=0.0)))
    return start, rise


@dataclass(frozen=True, slots=True)
class Room:
    """Tells memory of pairs."""

    fit: BaseFit
    layouts: Layouts
    bound: Bound = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", Bound.of(self.fit))

    def terms(self, groups: Groups, pairs: Pairs, *, sharded: bool = False) -> Terms:
        """Bytes by name [m]; they add up.

        sharded   the base lies in parts on replicas
        """
        facts, pairs = self.fit.facts, pairs.fullest(self.layouts)
        tp, dp, pp = (
            one[pairs.layout] for one in (self.layouts.tp, self.layouts.dp, self.layouts.pp)
        )
        layers = sum(one.weight_bytes for one in facts.layers) / tp
        root, head = float(facts.root_bytes), facts.head_bytes / tp
        ends = np.where(pp > 1, np.maximum(root, head), root + head)
        base = layers / pp + ends
        if sharded:
            base = base / dp
            gathered, activations, transient = self._sharded(groups, pairs)
        else:
            base = base + self._behind(groups)[pairs.group] / (tp * pp)
            gathered, activations = np.zeros_like(tp), self._kept(groups, pairs)
            transient = np.maximum(*self._transient(groups, pairs))
        return {
            "base": base,
            "gathered": gathered,
            "adapters": self.adapter_bytes(groups, pairs),
            "activations": activations,
            "transient": transient,
        }

    def _sharded(self, groups: Groups, pairs: Pairs) -> tuple[Array, Array, Array]:
        """Gathered weights, activations and the rest, when they are most in all.

        While layers run, while head and loss do, or when the root is read. What a collective has
        gathered is unpacked; what replicas of one node copy from each other is not.
        """
        facts, tp = self.fit.facts, self.layouts.tp[pairs.layout]
        layer = sum(one.weight_bytes for one in facts.layers) / len(facts.layers) / tp
        head = (facts.head_bytes or facts.root_bytes) / tp
        kept, nothing = self._kept(groups, pairs), np.zeros_like(tp)
        layers, loss = self._transient(groups, pairs)
        copied = self.layouts.near[pairs.layout, pairs.reach] & wants_peer_copies()
        moments = np.array(
            [
                [GATHERED * layer, kept, layers],
                [head + layer, kept, np.maximum(np.where(copied, 0.0, head), loss)],
                [np.where(copied, 1.0, 2.0) * facts.root_bytes + layer, nothing, nothing],
            ]
        )
        most = moments.sum(axis=1).argmax(axis=0)
        gathered, activations, transient = np.take_along_axis(moments, most[None, None], axis=0)[0]
        return gathered, activations, transient

    def fits_surely(self, groups: Groups) -> NDArray[np.bool_]:
        """Whether a group fits however it runs but for pipelines [n]; where not, `terms` tells.

        A bound that is quick to compute: all on one GPU, in rows as long as they may be.
        """
        tokens, samples = groups.column("tokens"), groups.column("samples")
        most = np.maximum(tokens / samples, groups.column("squares") / tokens)
        longest = np.where(most <= MAX_ROW_TOKENS, np.minimum(tokens, MAX_ROW_TOKENS), tokens)
        total = self.bound.least + groups.demands @ self.bound.each + self.bound.token * longest
        return np.asarray(total <= self.fit.usable_bytes)

    def adapter_bytes(self, groups: Groups, pairs: Pairs) -> Array:
        """Parameters, gradients and the states of AdamW."""
        facts = self.fit.facts
        tp, pp = (one[pairs.layout] for one in (self.layouts.tp, self.layouts.pp))
        numbers = groups.column("parameters")[pairs.group] / pp
        # As tlora_fx/cost/memory.py counts it: a stage's adapters whole, also those that tp cuts.
        part = np.where(pp > 1, 1.0, trained_part(tp))
        return np.asarray(numbers * part * (facts.trained_bytes * (2 + ADAM_STATES)))

    def _behind(self, groups: Groups) -> Array:
        """What compiled layers leave free behind adapted weights [n], before tp cuts it."""
        facts = self.fit.facts
        ranks = groups.column("rank") / max(self.fit.columns, 1.0)
        tail = np.ceil(ranks / TAIL) * TAIL
        tail = np.where(tail <= WIDEST_TAIL, tail, 0.0)
        each = facts.itemsize * tail * (self.fit.columns + self.fit.sites * tail)
        return np.asarray(len(facts.layers) * each)

    def _curve(self, name: str, pairs: Pairs) -> Array:
        return self.fit.row.at(self.fit.curve(name) + pairs.size, pairs.found)

    def _beside(self, groups: Groups, pairs: Pairs, slopes: Array) -> Array:
        """Of one row, beside its tokens."""
        work = pairs.table(groups.work(slopes)) * pairs.share / pairs.rows
        return np.asarray(work + pairs.table(groups.each_row(slopes, self.fit.sites)))

    def _kept(self, groups: Groups, pairs: Pairs) -> Array:
        """What forwards leave until their backwards, of all rows that a process has begun."""
        pp = self.layouts.pp[pairs.layout]
        layers = self._curve("saved", pairs) + self._beside(groups, pairs, self.fit.saved)
        begun = np.minimum(pairs.rows, pp)
        return np.asarray((layers / pp + self._curve("root saved", pairs)) * begun)

    def _transient(self, groups: Groups, pairs: Pairs) -> tuple[Array, Array]:
        """The most that a layer takes beside what is kept, and what head and loss take."""
        fit, tp = self.fit, self.layouts.tp[pairs.layout]
        targets = groups.column("targets")[pairs.group] * pairs.share / pairs.rows
        found = fit.loss.find(targets)
        loss = fit.loss.at(2, found) + fit.loss.at(3, found) / tp
        peaks = {"forward peak": fit.forward_peak, "backward peak": fit.backward_peak}
        forward, backward = (
            self._curve(name, pairs) + self._beside(groups, pairs, slopes)
            for name, slopes in peaks.items()
        )
        saved = self._curve("saved", pairs) + self._beside(groups, pairs, fit.saved)
        beyond = forward - saved / len(fit.facts.layers)
        # Under tp a sum of hidden states stands beside what it is made of, and the next one's.
        talk = np.where(tp > 1, 2.0 * fit.facts.hidden * fit.facts.itemsize * pairs.tokens, 0.0)
        return np.maximum(backward, beyond) + talk, loss + talk
