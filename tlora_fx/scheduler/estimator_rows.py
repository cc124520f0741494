"""Groups and layouts, paired: what one process has to do in each pair.

A round's samples are dealt out to replicas and cut into rows of a limited length; none is cut. The
busiest replica has as many samples of mean length as can not be avoided, and at least one of the
longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.demand import COLUMN, Array
from tlora_fx.cost.layouts import Layouts
from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.scheduler.estimator_fit import BaseFit

Places = NDArray[np.intp]
#: As tlora_fx/cost/load.py: tokens of one forward, at most.
MAX_ROW_TOKENS = 16384
#: Micro-batches of a pipeline, times its stages, where there are samples enough.
MICRO_BATCHES = 4


@dataclass(slots=True)
class Groups:
    """What n groups ask for, by column, and sums that do not depend on a layout.

    reach           [n] how far their GPUs are spread
    forward_rows, backward_rows   [n, tp] milliseconds a row, whatever its length
    forward_work, backward_work   [n, tp] milliseconds of the round's work beside its tokens
    """

    demands: Array
    reach: Places
    rank_tokens: Array
    site_tokens: Array
    squares: Array
    adapters: Array

    @classmethod
    def of(cls, fit: BaseFit, demands: Array, reach: Places) -> Groups:
        """Widths narrowed by tp where they are cut."""
        return cls(
            demands,
            reach,
            rank_tokens=demands[:, COLUMN["rank_tokens"], None] * fit.narrower,
            site_tokens=demands[:, COLUMN["site_tokens"], None] * fit.narrower,
            squares=demands[:, COLUMN["squares"], None],
            adapters=demands[:, COLUMN["adapters"], None],
        )

    def column(self, name: str) -> Array:
        """One field of all demands [n]."""
        found: Array = self.demands[:, COLUMN[name]]
        return found

    def work(self, slopes: Array) -> Array:
        """[n, tp] of the whole round: attention, and what grows with tokens at adapters.

        slopes   [tp, 5]
        """
        return (
            self.squares * slopes[:, 0]
            + self.site_tokens * slopes[:, 3]
            + self.rank_tokens * slopes[:, 4]
        )

    def each_row(self, slopes: Array, sites: int) -> Array:
        """[n, tp] of each row, however long it is: linears with adapters, and adapters."""
        return np.minimum(self.adapters, sites) * slopes[:, 1] + self.adapters * slopes[:, 2]


@dataclass(slots=True)
class Pairs:
    """m pairs of a group and a layout.

    group, layout   [m] places
    size, reach     [m] of the layout's tp in tables, by those without CUDA graphs where any of the
                    group's jobs or a row of this size runs without; of the group
    share           [m] the part of the round that the busiest replica has
    rows            [m] forwards of a replica
    tokens          [m] of one row
    found           pieces of the curves that the rows lie on
    """

    group: Places
    layout: Places
    size: Places
    reach: Places
    share: Array
    rows: Array
    tokens: Array
    found: tuple[Places, Array]

    @classmethod
    def of(cls, groups: Groups, layouts: Layouts, group: Places, layout: Places) -> Pairs:
        """Deal out the samples."""
        samples = groups.column("samples")[group]
        total = groups.column("tokens")[group]
        dp, pp = layouts.dp[layout], layouts.pp[layout]
        own = np.ceil(samples / dp)
        longer = groups.column("squares")[group] / (total * total)
        share = np.maximum(own / samples, longer)
        mine = total * share
        rows = np.minimum(np.ceil(mine / MAX_ROW_TOKENS), own)
        if (pp > 1).any():
            most = np.minimum(MICRO_BATCHES * pp, own) // pp * pp
            rows = np.where(pp > 1, np.maximum(rows, np.maximum(most, 1)), rows)
        rows = np.maximum(rows, 1.0)
        tokens = mine / rows
        found = layouts.fit.row.find(tokens)
        size, sizes = layouts.size[layout], len(layouts.fit.tp)
        launched = (groups.column("launched")[group] > 0) | (
            tokens > CAPTURED_TOKENS * layouts.tp[layout]
        )
        launched &= size < sizes
        size = np.where(launched, size + sizes, size)
        return cls(group, layout, size, groups.reach[group], share, rows, tokens, found)

    def only(self, chosen: NDArray[np.bool_] | Places) -> Pairs:
        """Some of them."""
        return Pairs(
            self.group[chosen], self.layout[chosen], self.size[chosen], self.reach[chosen],
            self.share[chosen], self.rows[chosen], self.tokens[chosen],
            (self.found[0][chosen], self.found[1][chosen]),
        )  # fmt: skip

    def launched(self, sizes: int) -> Pairs:
        """The same where no row runs as a CUDA graph; `sizes` of tp there are."""
        return replace(self, size=np.where(self.size < sizes, self.size + sizes, self.size))

    def fullest(self, layouts: Layouts) -> Pairs:
        """The same with rows as long as they may be, where one process closes them job by job."""
        alone = (layouts.dp[self.layout] == 1) & (layouts.pp[self.layout] == 1) & (self.rows > 1)
        if not alone.any():
            return self
        tokens = np.where(alone, np.maximum(self.tokens, MAX_ROW_TOKENS), self.tokens)
        rows = self.rows * self.tokens / tokens
        return replace(self, rows=rows, tokens=tokens, found=layouts.fit.row.find(tokens))

    def table(self, values: Array) -> Array:
        """From a table [n, tp] one number a pair."""
        found: Array = values[self.group, self.size]
        return found

    def links(self, lines: tuple[Array, Array]) -> tuple[Array, Array]:
        """A start and so much a byte of each pair, from tables [l, reach]."""
        return lines[0][self.layout, self.reach], lines[1][self.layout, self.reach]


def paired(groups: Groups, layouts: Layouts, gpus: Array, roomy: NDArray[np.bool_]) -> Pairs:
    """All pairs that can be the fastest, group by group.

    A layout with more replicas than samples is none, and one whose busiest replica has as many
    samples as with fewer replicas is slower than that. Pipelines are for bases that are too large
    for a GPU.

    roomy   [n] the whole base has room on each GPU
    """
    counts = layouts.count(gpus)
    group = np.repeat(np.arange(len(gpus)), counts)
    first = np.cumsum(counts) - counts
    layout = np.arange(len(group)) - np.repeat(first, counts)
    samples = groups.column("samples")[group]
    dp, before, pp = layouts.dp[layout], layouts.before[layout], layouts.pp[layout]
    own = np.ceil(samples / dp)
    better = own < np.ceil(samples / np.maximum(before, 1e-9))
    kept = (dp == 1) | ((dp <= samples) & better)
    kept &= (pp == 1) | ((own >= pp) & ~roomy[group])
    return Pairs.of(groups, layouts, group[kept], layout[kept])
