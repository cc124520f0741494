"""Jobs that an HTML page shows by one mark: a glyph for each, or a letter for each kind of job.

As in the listing: with more jobs than glyphs, jobs that have adapters at the same modules share a
letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tlora_fx.inspect.legend import GLYPHS, letters
from tlora_fx.inspect.program import Stage


@dataclass(frozen=True, slots=True)
class Party:
    """Jobs with one mark.

    place    number of the party, for its colour
    """

    mark: str
    place: int
    jobs: tuple[str, ...]


def parties(stages: Sequence[Stage]) -> list[Party]:
    """Every job in one party, in the order of the parties' first jobs."""
    jobs = stages[-1].program.jobs
    if len(jobs) <= len(GLYPHS):
        return [Party(GLYPHS[place], place, (job,)) for place, job in enumerate(jobs)]
    sites = _sites(stages[-1])
    alike: dict[frozenset[object], list[str]] = {}
    for job in jobs:
        alike.setdefault(frozenset(sites[job]), []).append(job)
    return [
        Party(letters(place), place, tuple(members)) for place, members in enumerate(alike.values())
    ]


def _sites(stage: Stage) -> dict[str, set[object]]:
    """Where each job has adapters: which graph, which module, which operators."""
    found: dict[str, set[object]] = {job: set() for job in stage.program.jobs}
    for graph in stage.program.graphs:
        for node in graph.nodes:
            if node.role == "adapter" and node.kind == "call":
                for job in node.jobs:
                    found[job].add((graph.name, node.site or node.module, node.target))
    return found
