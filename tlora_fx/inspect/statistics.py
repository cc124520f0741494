"""Statistics of passes and of their rules: what ran, how long it took, and what it changed.

A tree, printed when all passes ran, and the data of a file in the dump. A pass is one entry for all
graphs that it ran on.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, TextIO

from pydantic_core import to_jsonable_python

from tlora_fx.inspect.wording import plural
from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.pipeline import Done, Instrument, Pipeline, RuleStatistics

#: Data in the dump's folder of states.
FILE = "statistics.json"
SCHEMA = 1
# What is shown of a rule: reasons of misses, characters of a name.
MAX_REASONS = 3
MAX_NAME = 40


@dataclass(slots=True)
class PassRow:
    """One pass of the pipeline, over all graphs that it ran on.

    place           in the pipeline, counted from 1
    changed         graphs whose code or tags it changed
    run_seconds     of the pass itself
    shape_seconds   in which values were propagated after it
    check_seconds   of all other checks, before and after it
    nodes_in        of its graphs before it; nodes_out after it
    shapes          operators that ran on fake tensors for their values after it
    counts          what it counted itself, in its words
    rules           by name
    """

    place: int
    name: str
    graphs: int = 0
    changed: int = 0
    run_seconds: float = 0.0
    shape_seconds: float = 0.0
    check_seconds: float = 0.0
    nodes_in: int = 0
    nodes_out: int = 0
    shapes: int = 0
    rewrites: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    rules: dict[str, RuleStatistics] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """All that the pass took."""
        return self.run_seconds + self.shape_seconds + self.check_seconds

    def add(self, done: Done) -> None:
        """Add a run on one more graph."""
        self.graphs += 1
        self.changed += bool(done.changed)
        self.run_seconds += done.seconds
        self.shape_seconds += done.shape_seconds
        self.check_seconds += done.check_seconds - done.shape_seconds
        self.nodes_in += done.nodes[0]
        self.nodes_out += done.nodes[1]
        self.shapes += done.shapes
        self.rewrites += done.rewrites
        self.counts.update(done.statistics)
        for name, rule in done.rules.items():
            self.rules.setdefault(name, RuleStatistics()).add(rule)


class PassStatistics(Instrument):
    """Prints what passes and their rules did, as a tree; on stderr by default."""

    watches_rules: ClassVar[bool] = True

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stderr
        self.rows: dict[int, PassRow] = {}

    def started(self, pipeline: Pipeline) -> None:
        self.rows = {}

    def after(self, done: Done) -> None:
        self.rows.setdefault(done.place, PassRow(done.place, done.item.name)).add(done)

    def finished(self, graphs: JobGraph | GroupGraph) -> None:
        self.out.writelines(line + "\n" for line in self.lines())

    def in_order(self) -> list[PassRow]:
        """The passes, as they stand in the pipeline."""
        return [self.rows[place] for place in sorted(self.rows)]

    def to_json(self) -> str:
        """All of it, times in seconds."""
        rows = [to_jsonable_python(row) | {"seconds": row.seconds} for row in self.in_order()]
        return json.dumps({"schema": SCHEMA, "passes": rows}, indent=1) + "\n"

    def lines(self) -> Iterator[str]:
        """The pipeline, its passes, and below each its rules."""
        heads = ("seconds", "run", "shapes", "checks", "nodes in", "out", "propagated")
        yield f"{'pass, rule':<{MAX_NAME}}" + "".join(f"{head:>11}" for head in heads)
        rows = self.in_order()
        sums = [sum(getattr(row, name) for row in rows) for name in _TIMES]
        yield f"{'pipeline':<{MAX_NAME}}" + "".join(f"{value:>11.3f}" for value in sums)
        for row in rows:
            times = "".join(f"{getattr(row, name):>11.3f}" for name in _TIMES)
            numbers = "".join(f"{n:>11}" for n in (row.nodes_in, row.nodes_out, row.shapes))
            yield f"  {row.name:<{MAX_NAME - 2}}{times}{numbers}"
            for name, rule in row.rules.items():
                yield from _rule_lines(name, rule)


_TIMES = ("seconds", "run_seconds", "shape_seconds", "check_seconds")


def _rule_lines(name: str, rule: RuleStatistics) -> Iterator[str]:
    short = name if len(name) <= MAX_NAME - 4 else f"{name[: MAX_NAME - 5]}…"
    told = f"{rule.matches} of {plural(rule.tries, 'node')} matched"
    yield f"    {short:<{MAX_NAME - 4}}{rule.seconds:>11.3f}  {told}"
    most = rule.misses.most_common(MAX_REASONS)
    for reason, times in most:
        yield f"      {times} × not: {reason}"
    others = rule.misses.total() - sum(times for _, times in most)
    if others:
        yield f"      {others} × not: another of {len(rule.misses)} conditions"
