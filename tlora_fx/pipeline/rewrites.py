"""Counters of a running pass: its rewrites, which a bisection may hold back, and statistics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class RuleStatistics:
    """Matches and rewrites of one rule or pattern in one pass.

    tries     nodes at which it was matched; one that calls another operator is no try
    misses    how often each condition was the one that failed
    seconds   of matching, and of rewriting by `rewrite_greedily`
    """

    tries: int = 0
    matches: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: RuleStatistics) -> None:
        """Add what the same rule did elsewhere."""
        self.tries += other.tries
        self.matches += other.matches
        self.misses += other.misses
        self.seconds += other.seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


@dataclass(slots=True)
class Rewrites:
    """The rewrites of one pass, over all its graphs; at most `limit` are allowed, None: all.

    What it counts besides stands in `statistics`; in `rules` by name what became of its rules,
    None where nobody asks.

    They are counted so that `bisect` can find the one that breaks a check. A pass asks before each
    that stands on its own, and leaves the place as it is where that is refused.
    """

    limit: int | None = None
    descriptions: list[str] = field(default_factory=list)
    statistics: Counter[str] = field(default_factory=Counter)
    rules: dict[str, RuleStatistics] | None = None

    def take(self, what: str) -> bool:
        """Count one more; whether it may be made."""
        self.descriptions.append(what)
        return self.limit is None or len(self.descriptions) <= self.limit


_running: ContextVar[Rewrites | None] = ContextVar("rewrites", default=None)


@contextmanager
def counting(rewrites: Rewrites) -> Iterator[None]:
    """Count what is asked for inside."""
    token = _running.set(rewrites)
    try:
        yield
    finally:
        _running.reset(token)


def count(name: str, amount: int = 1) -> None:
    """Add to a statistic of the running pass, which `--time` shows.

    name      one that the pass declares in `statistics`; another one is shown as it is
    """
    rewrites = _running.get()
    if rewrites is not None:
        rewrites.statistics[name] += amount


def rewrite_allowed(what: str) -> bool:
    """Count a rewrite of the running pass; False where a bisection holds it back.

    what    where it rewrites and into what: "multi_lora_linear at layers_0_31.mlp.up_proj"
    """
    rewrites = _running.get()
    return rewrites is None or rewrites.take(what)


def watched_rules() -> dict[str, RuleStatistics] | None:
    """Where the running pass counts what becomes of its rules; None where nobody asks."""
    rewrites = _running.get()
    return None if rewrites is None else rewrites.rules
