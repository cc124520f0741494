"""Measure a row of `site.py`: build its arms, check their numbers, time them against each other."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.interleaved import Runner, Spread, captured, eager, interleave, ratios
from benchmarks.kernel_times import profiled, table
from benchmarks.site_arms import Arm, CannotError, frozen
from benchmarks.site_check import LIMITS, Results, errors, reference, results, saved_bytes
from benchmarks.site_inputs import Built, Inputs, sets_of, with_load
from benchmarks.site_loads import Load, Mode, Row
from benchmarks.site_ours import choices

FROZEN, OURS, BASE = "frozen", "ours", "ours-on-base"
PROFILED_CALLS = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    rounds   that each figure is the median of
    arms     by name, besides the frozen linears
    graph    every row as a CUDA graph too
    profile  the kernels of our arms and of the frozen linears too
    """

    device: str
    dtype: torch.dtype
    rounds: int
    arms: Mapping[str, Arm]
    graph: bool = False
    profile: bool = False

    def modes(self, row: Row) -> list[Mode]:
        """In which a row runs here."""
        if self.device != "cuda":
            return ["eager"]
        wanted = {*row.modes, *(["graph"] if self.graph else [])}
        modes: tuple[Mode, ...] = ("eager", "graph")
        return [mode for mode in modes if mode in wanted]


@dataclass(slots=True)
class Found:
    """What is known of one arm on one row.

    why_not  why it was not timed, by mode, or under "" for every mode
    times    milliseconds a call, by mode, one figure a round
    error    by kind of result, against float64
    saved    bytes that live from forward to backward, parameters not counted
    plans    what our operator chose, by direction and shape
    """

    why_not: dict[str, str] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    saved: int | None = None
    plans: dict[str, str] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Measured:
    """A row, what was found of its arms, and the arm whose times all others are divided by."""

    row: Row
    found: Mapping[str, Found]
    under: str

    def over(self, name: str, mode: str) -> Spread | None:
        """An arm's time over that of the frozen linears, or of the row's base, in one round."""
        own, theirs = self.found[name].times.get(mode), self.found[self.under].times.get(mode)
        return None if own is None or theirs is None else ratios(own, theirs)

    def ahead_of_us(self, mode: str) -> list[str]:
        """The arms of others whose median is below ours."""
        ours = self.over(OURS, mode)
        return [
            name
            for name in self.found
            if name not in {FROZEN, BASE} and not name.startswith(OURS)
            for theirs in [self.over(name, mode)]
            if ours is not None and theirs is not None and theirs.median < ours.median
        ]


def measure(row: Row, settings: Settings) -> Measured:
    """All arms of a row, the frozen linears first."""
    torch.compiler.reset()
    ours = {OURS: settings.arms[OURS]} if row.base is not None else settings.arms
    found, ready = _ready(row.load, settings, {FROZEN: frozen, **ours})
    if row.base is not None:
        theirs, on_base = _ready(row.base, settings, {BASE: settings.arms[OURS]})
        found, ready = found | theirs, ready | on_base
    for mode in settings.modes(row):
        _time(found, ready, mode, settings)
    if settings.profile and settings.device == "cuda":
        for name in [FROZEN, *(name for name in ready if name.startswith(OURS))]:
            found[name].kernels = _profile(ready[name])
    ready.clear()
    _forget()
    return Measured(row, found, FROZEN if row.base is None else BASE)


def _ready(
    load: Load, settings: Settings, arms: Mapping[str, Arm]
) -> tuple[dict[str, Found], dict[str, list[Built]]]:
    """Build every arm on every set of inputs, and keep those whose numbers are right."""
    sets = sets_of(load, settings.dtype, settings.device)
    found = {name: Found() for name in arms}
    ready: dict[str, list[Built]] = {}
    expected = _References(sets[0])
    for name, arm in arms.items():
        try:
            found[name].error = _checked(name, arm, expected)
            ready[name] = [arm(inputs) for inputs in sets]
            found[name].saved = saved_bytes(ready[name][0])
            if name.startswith(OURS):
                with choices() as found[name].plans:
                    results(ready[name][0])
        except CannotError as error:
            found[name].why_not[""] = str(error)
        except Exception as error:  # noqa: BLE001  (an arm may fail in any way; others go on)
            found[name].why_not[""] = _told(error)
            ready.pop(name, None)
            _forget()
    return found, ready


class _References:
    """The float64 results of a set, with dropout and without, computed when they are needed."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._found: dict[float, Results] = {}

    def of(self, rate: float) -> Results:
        """What arms of this dropout rate are compared with."""
        if rate not in self._found:
            self._found[rate] = reference(_at_rate(self.inputs, rate))
        return self._found[rate]


def _at_rate(inputs: Inputs, rate: float) -> Inputs:
    load = inputs.load
    return inputs if rate == load.rate else with_load(inputs, load.without_dropout())


def _checked(name: str, arm: Arm, expected: _References) -> dict[str, float]:
    """An arm's errors against float64; raises CannotError where it computes something else."""
    # Others draw torch's masks, which no reference knows: they are checked without dropout. The
    # frozen linears are checked in y and dX of nobody's adapters, which is torch's own business.
    if name == FROZEN:
        return {}
    rate = expected.inputs.load.rate if name.startswith(OURS) else 0.0
    found = errors(results(arm(_at_rate(expected.inputs, rate))), expected.of(rate))
    worst = max(found.values())
    if not worst <= LIMITS[expected.inputs.xs[0].dtype]:
        raise CannotError(f"wrong numbers: error {worst:.1e} against float64")
    return found


def _time(
    found: Mapping[str, Found],
    ready: Mapping[str, Sequence[Built]],
    mode: Mode,
    settings: Settings,
) -> None:
    runners: dict[str, Runner] = {}
    for name, built in ready.items():
        try:
            runners[name] = _runner(built, mode)
        except Exception as error:  # noqa: BLE001  (what cannot be captured says so)
            found[name].why_not[mode] = f"cannot be captured: {_told(error)}"
            _forget()
    for name, times in interleave(runners, settings.device, settings.rounds).items():
        found[name].times[mode] = times


def _runner(built: Sequence[Built], mode: Mode) -> Runner:
    def work(index: int) -> None:
        with built[index].context():
            built[index].step()

    # Once on every set: what an arm compiles or tunes by itself is not to be timed.
    for index in range(len(built)):
        work(index)
    return captured(work, len(built)) if mode == "graph" else eager(work, len(built))


def _profile(built: Sequence[Built]) -> list[dict[str, Any]]:
    def run() -> None:
        for call in range(PROFILED_CALLS):
            with built[0].context():
                built[call % len(built)].step()

    run()
    return table(profiled(run), PROFILED_CALLS)


def _told(error: Exception) -> str:
    lines: Iterator[str] = (line for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {next(lines, '')[:200]}"


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def quiet() -> None:
    """No warnings of other libraries, and room in torch.compile for a layer of every set."""
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64
