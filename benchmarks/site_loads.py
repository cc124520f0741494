"""What `site.py` measures: frozen linears, the jobs on them, and the bounds that must hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Mode = Literal["eager", "graph"]
Group = tuple[int, tuple[int, ...]]

SQUARE: tuple[Group, ...] = ((4096, (4096,)),)
WIDE: tuple[Group, ...] = ((4096, (14336,)),)
TALL: tuple[Group, ...] = ((14336, (4096,)),)
LAYER: tuple[Group, ...] = (
    (4096, (4096, 1024, 1024)),
    (4096, (4096,)),
    (4096, (14336, 14336)),
    (14336, (4096,)),
)
# Rows of the step: one job, eight of batch 1, GSM8K's mix, eight of batch 8 and 256 tokens.
STEPS = {
    160: (160,),
    1280: (160,) * 8,
    4800: (160, 160, 320, 320, 640, 640, 1280, 1280),
    16384: (2048,) * 8,
}
MIXED = (256, 256, 512, 512, 1024, 1024, 2048, 2048)
SKEWED = (4096, 2048, 1024, 512, 256, 128, 64, 64)
LOW, HIGH = (2, 4, 8, 16), (16, 32, 64, 128)
ALPHA = 16.0
RATE = 0.05
SMALLEST = 16  # features of a shrunk linear


@dataclass(frozen=True, slots=True)
class Load:
    """Frozen linears and the adapters on all of them.

    groups    (in, (out, ...)) of linears that read one input
    lengths   tokens of each job
    ranks     of each job, the same on every linear; each job's scale is ALPHA / rank
    rate      every job's dropout
    """

    groups: tuple[Group, ...]
    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    rate: float = 0.0

    @property
    def tokens(self) -> int:
        """Of all jobs."""
        return sum(self.lengths)

    @property
    def sites(self) -> list[tuple[int, int]]:
        """(in, out) of every linear, in order."""
        return [(inner, outer) for inner, outers in self.groups for outer in outers]

    @property
    def scales(self) -> list[float]:
        """What each job's branch is multiplied by."""
        return [ALPHA / rank for rank in self.ranks]

    def shrunk(self, by: int) -> Load:
        """The same in small: tokens and features divided by `by`, ranks as they are."""
        groups = tuple(
            (_less(inner, by), tuple(_less(outer, by) for outer in outers))
            for inner, outers in self.groups
        )
        lengths = tuple(max(1, length // by) for length in self.lengths)
        return replace(self, groups=groups, lengths=lengths)

    def without_dropout(self) -> Load:
        """The same with a rate of 0."""
        return replace(self, rate=0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    name     for `--rows`
    title    for people
    load     what our arm runs
    bound    of our median over the frozen linears' in the same rounds; None: none was set
    aim      the same, hoped for
    modes    in which it always runs; `--graph` adds "graph"
    base     our own arm on this load takes the place of the frozen linears
    quick    whether `--quick` runs it
    """

    name: str
    title: str
    load: Load
    bound: float | None = None
    aim: float | None = None
    modes: tuple[Mode, ...] = ("eager",)
    base: Load | None = None
    quick: bool = False

    def shrunk(self, by: int) -> Row:
        """The same row in small."""
        if by == 1:
            return self
        base = None if self.base is None else self.base.shrunk(by)
        return replace(self, load=self.load.shrunk(by), base=base)


def _less(features: int, by: int) -> int:
    return max(SMALLEST, features // by)


def _equal(tokens: int, jobs: int) -> tuple[int, ...]:
    return (tokens // jobs,) * jobs


def _cycled(ranks: tuple[int, ...], jobs: int) -> tuple[int, ...]:
    # One job alone takes the largest rank.
    return (ranks * jobs)[:jobs] if jobs > 1 else ranks[-1:]


FOUR = Load(SQUARE, _equal(8192, 4), (16,) * 4)
CROWD = Load(SQUARE, _equal(8192, 64), _cycled(LOW, 64))
FEW = Load(SQUARE, _equal(8192, 4), LOW)


def bound_rows() -> Iterator[Row]:
    """The rows that have bounds."""
    eight = _cycled(LOW, 8)
    crowd = Load(SQUARE, _equal(8192, 32), _cycled(LOW, 32))
    small = Load(SQUARE, _equal(1024, 8), eight)
    yield Row("square-4", "4096→4096, 4 jobs r16", FOUR, 1.12, 1.08, quick=True)
    yield Row("square-32", "4096→4096, 32 jobs r2..16", crowd, 1.14, 1.09, quick=True)
    wide, tall = Load(WIDE, MIXED, eight), Load(TALL, MIXED, eight)
    yield Row("wide-8", "4096→14336, 8 jobs mixed", wide, 1.06, 1.04, quick=True)
    yield Row("tall-8", "14336→4096, 8 jobs mixed", tall, 1.06, 1.04, quick=True)
    layer = Load(LAYER, MIXED, eight)
    yield Row("layer-8", "seven sites of a layer, 8 jobs mixed", layer, 1.08, 1.05, quick=True)
    yield Row("small-8", "M=1024 4096→4096, 8 jobs", small, 1.25, 1.15, ("graph",), quick=True)
    dropped = replace(FOUR, rate=RATE)
    yield Row("dropout", "dropout 0.05 over 0", dropped, 1.04, 1.02, base=FOUR, quick=True)
    yield Row("crowd", "64 jobs over 4 jobs, r2..16", CROWD, 1.06, 1.03, base=FEW, quick=True)


def further_rows() -> Iterator[Row]:
    """What else is worth knowing; no bounds."""
    sixteen = replace(CROWD, ranks=(16,) * 64)
    yield Row("crowd-r16", "64 jobs over 4 jobs, r16", sixteen, base=FOUR)
    eight, small = _cycled(LOW, 8), _equal(1024, 8)
    yield Row("small-wide", "M=1024 4096→14336, 8 jobs", Load(WIDE, small, eight), modes=("graph",))
    yield Row("small-tall", "M=1024 14336→4096, 8 jobs", Load(TALL, small, eight), modes=("graph",))
    for tokens, lengths in STEPS.items():
        title = f"seven sites of a layer, jobs: {len(lengths)}, tokens: {tokens:,}"
        ranks = _cycled(LOW, len(lengths))
        yield Row(f"layer-{tokens}", title, Load(LAYER, lengths, ranks), modes=("graph",))
    layer = Load(LAYER, MIXED, eight, RATE)
    plain = layer.without_dropout()
    yield Row("layer-dropout", "seven sites, dropout 0.05 over 0", layer, base=plain)
    for word, ranks in (("low", LOW), ("high", HIGH)):
        told = f"r{ranks[0]}..{ranks[-1]}"
        for jobs in (1, 4, 8, 32, 64):
            load = Load(SQUARE, _equal(8192, jobs), _cycled(ranks, jobs))
            title = f"{jobs} equal jobs {told}" if jobs > 1 else f"1 job r{ranks[-1]}"
            yield from _both_rates(f"{word}-{jobs}", title, load)
        skewed = Load(SQUARE, SKEWED, _cycled(ranks, 8))
        yield from _both_rates(f"{word}-skewed", f"8 skewed jobs {told}", skewed)
        lone = Load(SQUARE, (1, 8191), (ranks[0], ranks[-1]))
        yield from _both_rates(f"{word}-lone", f"1 + 8191 tokens {told}", lone)


def _both_rates(name: str, title: str, load: Load) -> Iterator[Row]:
    yield Row(name, title, load)
    yield Row(f"{name}-dropout", f"{title}, dropout {RATE}", replace(load, rate=RATE))
