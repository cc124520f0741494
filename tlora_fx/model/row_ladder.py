"""The few sizes to which the rows of a mix of jobs are padded, so that each size comes again.

Whatever is kept by the size of a row, such as a CUDA graph, pays where rows have few sizes, and
rows of real data hardly ever have the same. A ladder is made of sizes of rows to come: it has at
most so many steps, each of which holds the rows next below it, with little padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

#: Steps of a ladder.
MAX_STEPS = 16
# Part of a step's tokens that a row may lack, by the step's tokens: a GPU reads the weights for
# a short row as long as for one that is somewhat longer.
_TOKENS = ((1024, 1 / 4), (2048, 1 / 8))
_TOKENS_BEYOND = 1 / 16
# Part of a step's tokens by which targets may be too many; as many as tokens, where that is more.
_TARGETS = 1 / 8
# Steps are multiples of so many tokens, as kernels' tiles are.
_GRANULE = 16
# Part of a step's tokens that it has targets for beyond those of the rows it was made of.
_MORE_TARGETS = 1 / 64
# A target costs about so much of a token: it is read by the head alone.
_TARGET_COST = 1 / 8
# No attention kernel is chosen by whether the longest sequence is shorter than this.
_SHORT = 512


class RowSize(NamedTuple):
    """Sizes of a packed row, and the longest sequence that it may hold, in tokens."""

    tokens: int
    sequences: int
    longest: int
    targets: int

    def holds(self, other: RowSize) -> bool:
        """Whether a row of the other size can be padded to this one."""
        return all(mine >= its for mine, its in zip(self, other, strict=True))

    def beside(self, other: RowSize) -> RowSize:
        """The size of a row of the sequences of both."""
        return RowSize(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            max(self.longest, other.longest),
            self.targets + other.targets,
        )

    def with_all_of(self, other: RowSize) -> RowSize:
        """The smallest size that holds both."""
        return RowSize(*map(max, self, other))


@dataclass(frozen=True, slots=True)
class RowLadder:
    """Steps that rows are padded to, the smallest first; with none, rows are padded by rule.

    steps   sizes
    """

    steps: tuple[RowSize, ...] = ()

    @staticmethod
    def of(rows: Iterable[RowSize], most: int = MAX_STEPS) -> RowLadder:
        """The ladder for rows of these sizes.

        Where they differ so much that the steps do not suffice, the rarest are left out.

        most   steps
        """
        sizes = [row for row in rows if row.tokens and row.targets]
        longest = power_of_two(max((row.longest for row in sizes), default=1))
        found: dict[tuple[int, ...], _Group] = {}
        for row in sizes:
            held = max(power_of_two(row.longest), min(_SHORT, longest))
            # Padding is sequences too: one or two, where those of the row are not shorter.
            kind = power_of_two(row.sequences + 2), held
            alike = (*kind, repeating_length(row.tokens), row.targets * 8 // row.tokens)
            group = _Group(*kind, row.tokens, row.tokens, row.targets, row.targets, 1)
            found[alike] = found[alike].with_(group) if alike in found else group
        groups = [found[key] for key in sorted(found)]
        while len(groups) > most:
            joined = [
                (one.with_(other), place)
                for place, (one, other) in enumerate(pairwise(groups))
                if one.may_join(other)
            ]
            if not joined:
                break
            cost = [group.waste - sum(g.waste for g in groups[at : at + 2]) for group, at in joined]
            group, place = joined[cost.index(min(cost))]
            groups[place : place + 2] = [group]
        often = sorted(groups, key=lambda group: -group.count)[:most]
        return RowLadder(tuple(sorted({group.step for group in often})))

    def step_for(self, size: RowSize) -> RowSize | None:
        """The smallest step that holds a row with little padding; None where there is none."""
        for step in self.steps:
            close = step.tokens - size.tokens <= _padding(step.tokens)
            more = step.tokens * (_target_part(step.tokens) + _MORE_TARGETS) + 2 * _GRANULE
            if step.holds(size) and close and step.targets - size.targets <= more:
                return step
        return None

    def step_of(self, size: RowSize) -> RowSize | None:
        """The smallest step of a row that has a step's tokens already; None where there is none.

        However many targets it lacks: those of the rows that run beside it may be more.
        """
        for step in self.steps:
            if step.tokens == size.tokens and step.holds(size):
                return step
        return None


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one step: the step's sequences and longest, the rows' sizes, and how many they are.

    waste    tokens of padding of all of them, where a target counts as a part of one
    """

    sequences: int
    longest: int
    fewest: int
    tokens: int
    fewest_targets: int
    targets: int
    count: int
    waste: float = 0.0

    @property
    def step(self) -> RowSize:
        """The step that holds them."""
        tokens = -(-self.tokens // _GRANULE) * _GRANULE
        targets = min(tokens, self.targets + round(tokens * _MORE_TARGETS))
        targets = min(tokens, -(-targets // _GRANULE) * _GRANULE)
        return RowSize(tokens, self.sequences, self.longest, targets)

    def may_join(self, other: _Group) -> bool:
        """Whether one step can hold both, within what rows may be padded."""
        joined = self.with_(other)
        alike = (self.sequences, self.longest) == (other.sequences, other.longest)
        close = joined.tokens - joined.fewest <= _padding(joined.tokens) - _GRANULE
        return (
            alike and close
            and joined.targets - joined.fewest_targets
            <= joined.tokens * _target_part(joined.tokens)
        )  # fmt: skip

    def with_(self, other: _Group) -> _Group:
        """The rows of both."""
        tokens, targets = max(self.tokens, other.tokens), max(self.targets, other.targets)
        waste = self.waste + other.waste
        for each in (self, other):
            padding = tokens - each.tokens + (targets - each.targets) * _TARGET_COST
            waste += each.count * padding
        return replace(
            self,
            fewest=min(self.fewest, other.fewest),
            tokens=tokens,
            fewest_targets=min(self.fewest_targets, other.fewest_targets),
            targets=targets,
            count=self.count + other.count,
            waste=waste,
        )


def _padding(tokens: int) -> float:
    """Tokens of padding that a row of a step of so many may have."""
    return max(2 * _GRANULE, tokens * _token_part(tokens))


def _token_part(tokens: int) -> float:
    return next((part for most, part in _TOKENS if tokens <= most), _TOKENS_BEYOND)


def _target_part(tokens: int) -> float:
    return max(_TARGETS, _token_part(tokens))


def repeating_length(tokens: int) -> int:
    """The next of few lengths, at most a thirty-second above: what is kept by length comes again.

    source   32 lengths between powers of two, 16 tokens apart at least
    """
    step = max(16, (1 << tokens.bit_length() - 1) // 32) if tokens else 16
    return -(-tokens // step) * step


def power_of_two(count: int) -> int:
    """The next power of two, 1 at least."""
    return 1 << max(count - 1, 0).bit_length()
