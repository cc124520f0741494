"""How many GPUs groups hold: as many as are best, fewer beyond the knee, never more than asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tlora_fx.scheduler.gains_units import Gathering, Round
from tlora_fx.scheduler.search.objective import Pricer, Unit, powers


def sized(pricer: Pricer, gathering: Gathering, found: Round, *, pooled: bool = False) -> None:
    """Give what is new, and what has lost a job, as many GPUs as are best.

    A group that has lost a job may not keep the GPUs that it asked for; where the others break a
    bound on what is left to them, jobs are taken out, the one that bears least first.

    pooled   all that a group's jobs asked for, not fewer
    """
    slim(pricer, found)
    for place in range(len(found.units)):
        unit = found.units[place]
        while unit.homes and not unit.settled and not _size(pricer, [unit], pooled):
            tightest = min(unit.jobs, key=lambda name: (gathering.limit(name), name))
            unit = _without(gathering, unit, tightest)
            found.units[place] = unit
            found.units.append(gathering.alone(gathering.state.jobs[tightest]))
            found.fresh.append(True)
            found.broke.append(tightest)
    new = [
        unit
        for unit, fresh in zip(found.units, found.fresh, strict=True)
        if fresh and not unit.homes and pricer.crowded and not pooled
    ]
    if new:
        _size(pricer, new, pooled)


def slim(pricer: Pricer, found: Round) -> None:
    """Where not all find room, groups give back what only jobs that have ended had asked for."""
    if sum(unit.gpus for unit in found.units) <= pricer.capacity:
        return
    for place, unit in enumerate(found.units):
        if unit.gpus > unit.asked:
            unit.settled = unit.held = False
            found.fresh[place] = True


def _without(gathering: Gathering, unit: Unit, name: str) -> Unit:
    """A unit without one of its jobs, where it was."""
    stay = [gathering.state.jobs[other] for other in unit.jobs if other != name]
    rest = gathering.unit(stay, unit.gpus, unit.seconds)
    rest.homes = unit.homes
    return rest


def _size(pricer: Pricer, units: Sequence[Unit], pooled: bool) -> bool:
    """The best number of GPUs for each; False where there is none for one of them."""
    many = pricer.many(units)
    choices = many.asked[None] if pooled else powers(many.asked)
    worth, gpus, seconds = pricer.best(many, choices)
    for unit, one, count, step in zip(units, worth, gpus, seconds, strict=True):
        if np.isfinite(one):
            unit.gpus, unit.seconds = int(count), float(step)
    return bool(np.isfinite(worth).all()) or all(len(unit.jobs) == 1 for unit in units)


def resized(pricer: Pricer, units: Sequence[Unit]) -> list[Unit]:
    """Units on the GPUs that are best for them, where the change pays for itself."""
    movable = [unit for unit in units if not unit.held]
    if not movable:
        return list(units)
    many = pricer.many(movable)
    worth, gpus, seconds = pricer.best(many, powers(many.asked))
    better: dict[int, Unit] = {}
    for unit, one, count, step in zip(movable, worth, gpus, seconds, strict=True):
        lasting = max(min(pricer.window, unit.left * unit.seconds), 1e-9)
        gain = one - pricer.worth(unit) - pricer.lost(unit) / lasting
        if np.isfinite(one) and gain > 1e-9 and count != unit.gpus:
            better[id(unit)] = replace(unit, gpus=int(count), seconds=float(step), settled=False)
    return [better.get(id(unit), unit) for unit in units]


def released(pricer: Pricer, units: Sequence[Unit], knee: float) -> list[Unit]:
    """Units that are not running yet without the GPUs that bring them next to nothing.

    knee   a step may grow by no more than this part of itself
    """
    new = [unit for unit in units if not unit.settled]
    if not new or pricer.crowded:
        return list(units)
    many = pricer.many(new)
    worth, gpus, seconds = pricer.table(many, powers(many.asked))
    smaller: dict[int, Unit] = {}
    for place, unit in enumerate(new):
        fits = np.isfinite(worth[:, place]) & (seconds[:, place] <= unit.seconds * (1 + knee))
        least = int(np.argmax(fits))
        if fits[least] and gpus[least, place] < unit.gpus:
            count, step = int(gpus[least, place]), float(seconds[least, place])
            smaller[id(unit)] = replace(unit, gpus=count, seconds=step)
    return [smaller.get(id(unit), unit) for unit in units]
