"""How far the default policy looks: at what is new, at all, or from several beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tlora_fx.scheduler.gains_merge import Merger
from tlora_fx.scheduler.gains_packs import Packer
from tlora_fx.scheduler.gains_segments import KEYS, segmented
from tlora_fx.scheduler.gains_sizes import resized
from tlora_fx.scheduler.gains_units import Gathering, Round
from tlora_fx.scheduler.search.moves import Move, Mover
from tlora_fx.scheduler.search.objective import Pricer, Unit

HOSTS = 12
#: What the calls of one search take, in evaluations.
CALLS = 5000


@dataclass(slots=True)
class Found:
    """What a search came to.

    units     the groups that shall run
    safe      groups to fall back to where these find no places
    merger    knows the merges that were made, and the best that were not; None: nothing was new
    moves     that were made
    """

    units: list[Unit]
    safe: list[Unit]
    merger: Merger | None = None
    moves: list[Move] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Depth:
    """How much a search may cost.

    breadth    groups that are all compared; of more, each with a quarter as many
    thorough   jobs up to which several beginnings are tried where all is new
    moves      jobs moved, swapped or split off in one round at most
    """

    breadth: int
    thorough: int
    moves: int

    def cost(self, jobs: int, units: int) -> float:
        """About how many groups a full search evaluates, its calls' own time counted as such."""
        if jobs > self.breadth:
            return float(CALLS + units * self.breadth)
        return float(CALLS + units * units + jobs * units + jobs * jobs)


def search(
    pricer: Pricer, gathering: Gathering, found: Round, depth: Depth, *, full: bool
) -> Found:
    """The groups of a round.

    full   look at all groups, not only at what is new or changed
    """
    if not full and not any(found.fresh):
        return Found(found.units, found.units)
    merger = Merger(pricer, found.units, depth.breadth)
    merged = merger.run(np.array([full or fresh for fresh in found.fresh]))
    result = Found(merged, merged, merger)
    jobs = gathering.state.jobs
    if not full or len(jobs) > depth.breadth:
        return result
    alone = {name: gathering.alone(job) for name, job in jobs.items()}
    starts = [merged]
    if len(found.units) <= depth.thorough and not any(unit.settled for unit in found.units):
        starts += others(pricer, found.units)
    best: tuple[float, Mover | None] = (-np.inf, None)
    for start in starts:
        mover = Mover(pricer, resized(pricer, start), alone)
        units = mover.run(depth.moves)
        worth = net_worth(pricer, units, found.units)
        if worth > best[0] + 1e-9:
            best, result.units, result.moves = (worth, mover), units, mover.moves
    return result


def others(pricer: Pricer, units: Sequence[Unit]) -> list[list[Unit]]:
    """Groupings that were found in other ways."""
    packs = [Packer(pricer, units, HOSTS, shared=shared).run() for shared in (True, False)]
    return [*packs, *(segmented(pricer, units, key, len(units)) for key in KEYS)]


def net_worth(pricer: Pricer, units: Sequence[Unit], before: Sequence[Unit]) -> float:
    """Of units, less what re-forming those costs that were there before and are not now."""
    kept = {id(unit) for unit in units}
    return sum(pricer.worth(unit) for unit in units) - sum(
        pricer.lost(unit) / pricer.window for unit in before if id(unit) not in kept
    )
