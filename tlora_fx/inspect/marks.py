"""Marks and colours of jobs where single nodes are shown: a glyph for each, or its number."""

from __future__ import annotations

from collections.abc import Sequence

from tlora_fx.inspect.legend import GLYPHS, SHARED, Line
from tlora_fx.inspect.program import NodeEntry
from tlora_fx.inspect.wording import plural

MANY = 6


class Marks:
    """Who is who among the jobs of a program."""

    def __init__(self, jobs: Sequence[str]) -> None:
        self.jobs = list(jobs)
        self.place = {name: place for place, name in enumerate(self.jobs)}

    def job(self, name: str) -> Line:
        """A job's mark and name, in its colour."""
        place = self.place.get(name)
        if place is None:
            return [(name, "")]
        mark = GLYPHS[place] if len(self.jobs) <= len(GLYPHS) else ""
        return [(mark + name, f"job {place}")]

    def who(self, node: NodeEntry) -> Line:
        """Whom a node serves: a name where it is one job, else marks as far as there are any."""
        if node.role in ("shared", "backbone", "loss", "table") or not node.jobs:
            return [(SHARED, "shared")] if node.role in ("shared", "backbone", "loss") else []
        if len(node.jobs) == 1:
            return self.job(node.jobs[0])
        if len(self.jobs) > len(GLYPHS):
            return [(plural(len(node.jobs), "job"), "dim")]
        return [(GLYPHS[self.place[name]], f"job {self.place[name]}") for name in node.jobs]

    def style(self, node: NodeEntry) -> str:
        """What a node is coloured by: its role, and its job where it serves one alone."""
        if node.role == "adapter":
            return f"job {self.place.get(node.jobs[0], 0)}" if len(node.jobs) == 1 else "adapters"
        return {"table": "dim", "loss": "loss", "": ""}.get(node.role, "shared")

    def told(self, jobs: Sequence[str]) -> str:
        """Jobs in words."""
        if len(jobs) == len(self.jobs) > 1:
            return f"all {plural(len(jobs), 'job')}"
        shown = ", ".join(jobs[:MANY])
        return shown + (f" and {len(jobs) - MANY} more" if len(jobs) > MANY else "")
