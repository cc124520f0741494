"""Marks and colours of jobs on a page, and lines printed in these colours.

Jobs have a glyph each; where they are more than there are glyphs, jobs that are alike share a
letter. The backbone has one calm colour, each job one of its own, and glyphs say the same without
colour. `NO_COLOR` and pipes are respected by rich.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.style import Style
from rich.text import Text

from tlora_fx.errors import first_of
from tlora_fx.inspect.schema import NodeEntry
from tlora_fx.inspect.wording import Line, plural

SHARED = "■"
GLYPHS = "◆▲●▼★◇△○▽☆"
MAX_NAMES = 6
# Okabe and Ito's colours, which colour-blind people tell apart.
CALM = "#7A93A8"
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#F0E442")
NARROWEST = 72
STYLES = {
    "shared": Style(color=CALM),
    "adapters": Style(bold=True),
    "loss": Style(color=CALM, bold=True),
    "dim": Style(dim=True),
    "title": Style(bold=True),
    "added": Style(color=PALETTE[2]),
    "removed": Style(color=PALETTE[3]),
    "changed": Style(color=PALETTE[0]),
}


@dataclass(frozen=True, slots=True)
class JobMark:
    """Jobs with one mark.

    mark     a glyph, or letters
    index    of the mark among all, for its colour
    """

    mark: str
    index: int
    jobs: tuple[str, ...]

    @property
    def style(self) -> str:
        """Style that the screen takes the job's colour from."""
        return f"job {self.index}"


def job_marks(jobs: Sequence[str], kind: Callable[[str], Hashable]) -> list[JobMark]:
    """Jobs under one mark, in the order of their first; of one `kind` they may share a letter."""
    if len(jobs) <= len(GLYPHS):
        return [JobMark(GLYPHS[index], index, (job,)) for index, job in enumerate(jobs)]
    alike: dict[Hashable, list[str]] = {}
    for job in jobs:
        alike.setdefault(kind(job), []).append(job)
    return [JobMark(letters(i), i, tuple(members)) for i, members in enumerate(alike.values())]


def letters(index: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    head, tail = divmod(index, 26)
    return (letters(head - 1) if head else "") + chr(ord("A") + tail)


class Marks:
    """Marks and colours where single nodes are shown: a glyph for each job, or its name alone."""

    def __init__(self, jobs: Sequence[str]) -> None:
        self.jobs = list(jobs)
        self.index = {name: index for index, name in enumerate(self.jobs)}

    def job(self, name: str) -> Line:
        """A job's mark and name, in its colour."""
        index = self.index.get(name)
        if index is None:
            return [(name, "")]
        mark = GLYPHS[index] if len(self.jobs) <= len(GLYPHS) else ""
        return [(mark + name, f"job {index}")]

    def who(self, node: NodeEntry) -> Line:
        """Whom a node serves: a name where it is one job, else marks as far as there are any."""
        if node.role in ("shared", "backbone", "loss", "table") or not node.jobs:
            return [(SHARED, "shared")] if node.role in ("shared", "backbone", "loss") else []
        if len(node.jobs) == 1:
            return self.job(node.jobs[0])
        if len(self.jobs) > len(GLYPHS):
            return [(plural(len(node.jobs), "job"), "dim")]
        return [(GLYPHS[self.index[name]], f"job {self.index[name]}") for name in node.jobs]

    def style(self, node: NodeEntry) -> str:
        """Style of a node: its role, and its job where it serves one alone."""
        if node.role == "adapter":
            return f"job {self.index.get(node.jobs[0], 0)}" if len(node.jobs) == 1 else "adapters"
        return {"table": "dim", "loss": "loss", "": ""}.get(node.role, "shared")

    def names(self, jobs: Sequence[str]) -> str:
        """Jobs in words."""
        if len(jobs) == len(self.jobs) > 1:
            return f"all {plural(len(jobs), 'job')}"
        return first_of(jobs, MAX_NAMES)


def colour_of(style: str) -> str:
    """The colour of "job 3"."""
    return PALETTE[int(style.removeprefix("job ")) % len(PALETTE)]


def style_of(name: str) -> Style:
    """The style of what a piece is: "shared", "dim", "title", "job 3"."""
    if name.startswith("job "):
        return Style(color=colour_of(name), bold=True)
    return STYLES.get(name, Style.null())


def show_lines(lines: Iterable[Line], console: Console) -> None:
    """Print a page's lines in their colours, as wide as they are."""
    for line in lines:
        text = Text.assemble(*((text, style_of(name)) for text, name in line))
        console.print(text, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def width_of(console: Console, widest: int) -> int:
    """The columns that a page has: the terminal's, or the widest into a pipe."""
    return max(NARROWEST, min(console.width, widest)) if console.is_terminal else widest
