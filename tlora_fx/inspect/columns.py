"""Lay a table into lines of a width: columns that matter least go first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDE = 120


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns are shown, and how wide: place to width.

    numbers    places of columns whose cells stand to the right
    gap        blanks behind each
    """

    sizes: dict[int, int]
    numbers: tuple[int, ...]
    gap: int

    @classmethod
    def fitting(
        cls,
        rows: Sequence[Sequence[str]],
        width: int,
        rest: int,
        numbers: tuple[int, ...] = (),
        dispensable: Sequence[int] = (),
    ) -> Columns:
        """Columns that leave room for what stands behind them.

        rows          all lines, titles too
        width         of a line
        rest          what is left free behind the columns
        dispensable   places, those that matter least first
        """
        sizes = {place: max(len(row[place]) for row in rows) for place in range(len(rows[0]))}
        found = cls(sizes, numbers, 3 if width >= WIDE else 2)
        for place in dispensable:
            if found.end > width - rest:
                del sizes[place]
        return found

    @property
    def end(self) -> int:
        """Where the columns end."""
        return sum(size + self.gap for size in self.sizes.values())

    def text(self, cells: Sequence[str]) -> str:
        """The shown cells of a row."""
        return "".join(
            (f"{cells[place]:>{size}}" if place in self.numbers else f"{cells[place]:<{size}}")
            + " " * self.gap
            for place, size in self.sizes.items()
        )
