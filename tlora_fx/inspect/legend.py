"""Who is who in a listing: a glyph for each job, a letter for each kind of job where they are many.

Glyphs tell jobs apart without colour. Jobs of one letter have adapters at the same modules, and
the same branches run as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tlora_fx.inspect.schema import JobEntry, Listing, Row
from tlora_fx.inspect.wording import counted, cut, kind_text, listed, plural

SHARED = "■"
GLYPHS = "◆▲●▼★◇△○▽☆"
NAME_WIDTH = 40

#: A piece of text and what it is: "shared", "job 3", "dim", "title" or "".
Piece = tuple[str, str]
Line = list[Piece]


@dataclass(frozen=True, slots=True)
class Party:
    """Jobs that a listing shows by one mark.

    mark     a glyph, or letters
    place    number of the party, for its colour
    """

    mark: str
    place: int
    jobs: tuple[JobEntry, ...]

    @property
    def style(self) -> str:
        """What the screen colours by."""
        return f"job {self.place}"


class Legend:
    """The parties of a listing; each job has a glyph of its own as long as there are glyphs."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.lettered = len(listing.jobs) > len(GLYPHS)
        groups = _alike(listing) if self.lettered else [(job,) for job in listing.jobs]
        marks = [letters(place) if self.lettered else GLYPHS[place] for place in range(len(groups))]
        self.parties = [Party(marks[place], place, jobs) for place, jobs in enumerate(groups)]
        self.party_of = {job.name: party for party in self.parties for job in party.jobs}

    def who(self, row: Row, names: bool, details: bool = True) -> Line:
        """Whom a row serves, in words.

        names      jobs are named beside their glyphs
        details    what the row is, how many jobs, and why branches run as they are, is told too
        """
        line: Line = [(SHARED, "shared")]
        reasons: dict[str | None, dict[str, Party]] = {}
        for branch in row.branches:
            why = None if branch.lowered else kind_text(branch.kind, branch.as_it_is or "")
            party = self.party_of[branch.job]
            reasons.setdefault(why, {})[party.mark] = party
        for why in sorted(reasons, key=lambda reason: reason is not None):
            line += self._parties(reasons[why].values(), names, details)
            if why is not None:
                told = f"(as it is: {why})" if details else "(as it is)"
                line += [(word, "dim") for word in told.split()]
        return line + [(word, "dim") for word in row.detail.split() if details]

    def _parties(self, parties: Iterable[Party], names: bool, details: bool) -> Line:
        shown = list(parties)
        if not self.lettered:
            return [
                (party.mark + (party.jobs[0].name if names else ""), party.style) for party in shown
            ]
        marks = [(party.mark, party.style) for party in shown]
        if not details:
            return marks
        jobs = [job for party in shown for job in party.jobs]
        ranks = sorted({rank for job in jobs for rank in job.ranks})
        told = f"({plural(len(jobs), 'job')}, rank {listed(ranks)})"
        return marks + [(word, "dim") for word in told.split()]

    def lines(self, width: int) -> list[Line]:
        """The legend as a table."""
        title = ("", "", "rank", "scaling", "dropout", "sites", "parameters", "modules")
        rows = [(party, self._cells(party)) for party in self.parties]
        sizes = [
            max(len(cells[place]) for cells in (title, *(c for _, c in rows)))
            for place in range(len(title) - 1)
        ]
        base = counted(self.listing.totals.shared_parameters)
        shared = (SHARED, "all jobs", "", "", "", "", base, "the frozen base")
        sizes[1:] = [
            max(size, len(cell)) for size, cell in zip(sizes[1:], shared[1:-1], strict=True)
        ]
        lines = [_table_line(title, sizes, "title", width)]
        lines.append(_table_line(shared, sizes, "shared", width))
        for party, cells in rows:
            lines.append(_table_line(cells, sizes, party.style, width))
            if self.lettered:
                lines.extend(_names(party, width))
        return lines

    def _cells(self, party: Party) -> tuple[str, ...]:
        jobs = party.jobs
        name = plural(len(jobs), "job") if self.lettered else cut(jobs[0].name, NAME_WIDTH)
        return (
            party.mark,
            name,
            listed(sorted({rank for job in jobs for rank in job.ranks})),
            listed(sorted({scaling for job in jobs for scaling in job.scalings})),
            listed(sorted({rate for job in jobs for rate in job.dropouts})),
            listed(sorted({job.sites for job in jobs})),
            counted(sum(job.parameters for job in jobs)),
            ", ".join(dict.fromkeys(target for job in jobs for target in job.targets)),
        )


def letters(place: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    head, tail = divmod(place, 26)
    return (letters(head - 1) if head else "") + chr(ord("A") + tail)


def wrapped(line: Line, start: int, width: int) -> list[Line]:
    """Words laid into lines, separated by blanks; lines after the first begin at a column."""
    lines: list[Line] = [[]]
    used = start
    for text, style in line:
        if lines[-1] and used + 1 + len(text) > width:
            lines.append([(" " * start, "")])
            used = start
        if lines[-1] and used > start:
            lines[-1].append((" ", ""))
            used += 1
        lines[-1].append((cut(text, width - used), style))
        used += len(text)
    return lines


def _alike(listing: Listing) -> list[tuple[JobEntry, ...]]:
    """Jobs with adapters at the same rows, in the order of their first."""
    places: dict[str, list[object]] = {job.name: [] for job in listing.jobs}
    for number, block in enumerate(listing.blocks):
        for row in block.rows:
            for branch in row.branches:
                why = None if branch.lowered else kind_text(branch.kind, branch.as_it_is or "")
                places[branch.job].append((number, row.module, why))
    groups: dict[tuple[object, ...], list[JobEntry]] = {}
    for job in listing.jobs:
        groups.setdefault(tuple(places[job.name]), []).append(job)
    return [tuple(jobs) for jobs in groups.values()]


def _table_line(cells: tuple[str, ...], sizes: list[int], style: str, width: int) -> Line:
    mark, name, *numbers, last = cells
    text = "".join(f"{cell:>{size + 3}}" for cell, size in zip(numbers, sizes[2:], strict=True))
    head = f"{mark:<{sizes[0]}} {name:<{sizes[1]}}"
    rest = cut(f"{text}   {last}", width - len(head))
    return [(head, style), (rest, "title" if style == "title" else "")]


def _names(party: Party, width: int) -> list[Line]:
    words = [f"{cut(job.name, NAME_WIDTH)}," for job in party.jobs]
    words[-1] = words[-1].rstrip(",")
    first, *rest = wrapped([(word, "dim") for word in words], 4, width)
    return [[("    ", ""), *first], *rest]
