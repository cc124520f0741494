"""Instruments that watch a pipeline: times, prints and numbered dumps.

All of it goes to one stream, stderr unless another is given. The same can be asked for on the
command line, from Python, and by the environment variable `TLORA_FX_LOG`:

    TLORA_FX_LOG=time,pass-statistics,print-after=changed,dump-changed=states,verify=numerics
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO, cast, get_args

from tlora_fx.config.paths import with_home
from tlora_fx.errors import PipelineError, nearest
from tlora_fx.host.environment import LOG
from tlora_fx.inspect.statistics import PassStatistics
from tlora_fx.inspect.wording import plural
from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.ir.verifier import owners
from tlora_fx.model.source import graphs_source
from tlora_fx.numerics import Numerics
from tlora_fx.pipeline import Done, Instrument, Pipeline, Verify

# Names that print-after takes besides those of passes.
ALL, CHANGED = "all", "changed"
# What a line of times shows at least.
MIN_SECONDS = 5e-4
HEADER = "# A state of graphs, written by tlora-fx"


@dataclass(slots=True)
class Span:
    """A phase of compiling, or a pass inside of one.

    seconds    from begin to end, of all times that it ran; of a pass that of its checks too
    passes     the runs of a pass, one for each graph
    """

    name: str
    seconds: float = 0.0
    inside: dict[str, Span] = field(default_factory=dict)
    passes: list[Done] = field(default_factory=list)

    def child(self, name: str) -> Span:
        """Span inside this one, by its name."""
        return self.inside.setdefault(name, Span(name))

    @property
    def rest(self) -> float:
        """Seconds in which nothing ran that has a name."""
        return self.seconds - sum(span.seconds for span in self.inside.values())


class Timing(Instrument):
    """Prints where the time went, as a tree whose parts add up; on stderr by default.

    Phases are those of the compiler: preparing, tracing, passes, trying the result. A pass stands
    in the phase in which it ran, once for all graphs that it ran on. Without phases there is one,
    which holds the passes.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stderr
        self.root = Span("passes")
        self._open: list[tuple[Span, float]] = []

    def entered(self, phase: str) -> None:
        if not self._open:
            self.root = Span(phase)
        span = self._open[-1][0].child(phase) if self._open else self.root
        self._open.append((span, time.perf_counter()))

    def left(self, phase: str) -> None:
        span, start = self._open.pop()
        span.seconds += time.perf_counter() - start
        if not self._open:
            self._print()

    def started(self, pipeline: Pipeline) -> None:
        if not self._open:
            self.root = Span("passes")

    def after(self, done: Done) -> None:
        inside = self._open[-1][0] if self._open else self.root
        span = inside.child(done.item.name)
        span.passes.append(done)
        span.seconds += done.seconds + done.check_seconds
        if not self._open:
            self.root.seconds += done.seconds + done.check_seconds

    def finished(self, graphs: JobGraph | GroupGraph) -> None:
        if not self._open:
            self._print()

    def _print(self) -> None:
        for line in self.lines():
            self.out.write(line + "\n")

    def lines(self) -> Iterator[str]:
        """The tree: a phase or a pass a line, what it took, and what passes did."""
        yield f"{'phase':<44}{'seconds':>9}{'run':>9}{'checks':>9}  changed"
        yield from _span_lines(self.root, 0)


def _span_lines(span: Span, depth: int) -> Iterator[str]:
    yield _time_line("  " * depth + span.name, span)
    for part in span.inside.values():
        yield from _span_lines(part, depth + 1)
    if span.inside and span.rest >= MIN_SECONDS:
        yield _time_line("  " * (depth + 1) + "(else)", Span("", span.rest))


def _time_line(name: str, span: Span) -> str:
    line = f"{name:<44}{span.seconds:>9.3f}"
    if not span.passes:
        return line
    run = sum(done.seconds for done in span.passes)
    checks = sum(done.check_seconds for done in span.passes)
    changed = sum(bool(done.changed) for done in span.passes)
    told = [f"{changed} of {plural(len(span.passes), 'graph')}"]
    rewrites = sum(done.rewrites for done in span.passes)
    told += [plural(rewrites, "rewrite")] if rewrites else []
    counted: Counter[str] = Counter()
    for done in span.passes:
        counted.update(done.statistics)
    words = span.passes[0].item.statistics
    told += [f"{number} {words.get(name, name)}" for name, number in counted.items()]
    return f"{line}{run:>9.3f}{checks:>9.3f}  {', '.join(told)}"


class PrintAfter(Instrument):
    """Prints the graphs after a pass, as the code that they are.

    wanted    name of a pass, "all", or "changed" for those that changed the code
    out       where to, stderr by default
    """

    def __init__(self, wanted: str, out: TextIO | None = None) -> None:
        self.wanted = wanted
        self.out = out or sys.stderr

    def started(self, pipeline: Pipeline) -> None:
        if self.wanted not in (ALL, CHANGED):
            pipeline.place_of(self.wanted)

    def after(self, done: Done) -> None:
        if self.wanted in (done.item.name, ALL) or (
            self.wanted == CHANGED and done.changed == "code"
        ):
            self.out.write(f"# after {done.place} {done}\n{state_source(done.graphs)}\n")


class DumpChanged(Instrument):
    """Writes the code of graphs into a folder, numbered, after each pass that changed it.

    `03-fold-layers.job-a.py` is what the third pass left of job a's graph; 00 is what was traced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def started(self, pipeline: Pipeline) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("[0-9][0-9]-*.py"):
            if old.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
                old.unlink()

    def traced(self, subject: str, graphs: JobGraph) -> None:
        self._write(0, "trace", subject, graphs)

    def after(self, done: Done) -> None:
        if done.changed == "code":
            self._write(done.place, done.item.name, done.subject, done.graphs)

    def _write(self, place: int, name: str, subject: str, graphs: JobGraph | GroupGraph) -> None:
        file = f"{place:02}-{name}.{re.sub(r'[^A-Za-z0-9._-]+', '-', subject)}.py"
        text = f"{HEADER}, after {name} on {subject}\n\n{state_source(graphs)}"
        (self.folder / file).write_text(text, encoding="utf-8")


def state_source(graphs: JobGraph | GroupGraph) -> str:
    """The code of all graphs that a pass may have rewritten."""
    return "\n\n".join(graphs_source(owner) for owner in owners(graphs))


@dataclass(frozen=True, slots=True)
class Watch:
    """Settings of instruments, whether options or the environment asked for them.

    time            print how long passes take
    print_after     names of passes, "all", or "changed"
    dump_changed    folder for numbered dumps
    stop_after      the last pass to run
    verify          what is checked after each pass
    strict          check numbers after each pass, and fail where they cannot be compared
    statistics      print what passes and their rules did
    """

    time: bool = False
    print_after: tuple[str, ...] = ()
    dump_changed: Path | None = None
    stop_after: str | None = None
    verify: Verify | None = None
    strict: bool = False
    statistics: bool = False

    def instruments(self, out: TextIO | None = None) -> list[Instrument]:
        """Instruments that these settings ask for."""
        found: list[Instrument] = [PrintAfter(name, out) for name in self.print_after]
        if self.dump_changed is not None:
            found.append(DumpChanged(self.dump_changed))
        if self.statistics:
            found.append(PassStatistics(out))
        if self.verify == "numerics" or self.strict:
            found.append(Numerics(out=out or sys.stderr, strict=self.strict))
        return [Timing(out), *found] if self.time else found


def watch_from(words: str) -> Watch:
    """Settings in the words of `TLORA_FX_LOG`; raises PipelineError for an unknown word."""
    watch = Watch()
    for word in words.split(","):
        name, _, value = word.strip().partition("=")
        if name:
            watch = _with(watch, name, value)
    return watch


def _with(watch: Watch, name: str, value: str) -> Watch:
    if name == "time" and not value:
        return replace(watch, time=True)
    if name == "pass-statistics" and not value:
        return replace(watch, statistics=True)
    if name == "print-after" and value:
        return replace(watch, print_after=(*watch.print_after, value))
    if name == "dump-changed" and value:
        return replace(watch, dump_changed=with_home(value))
    if name == "stop-after" and value:
        return replace(watch, stop_after=value)
    if name == "verify" and value in get_args(Verify):
        return replace(watch, verify=cast(Verify, value))
    words = ("time", "pass-statistics", "print-after", "dump-changed", "stop-after", "verify")
    raise PipelineError(
        f"{LOG} cannot be read",
        found=f"{name}={value}" if value else name,
        nearest=nearest(name, words) if name not in words else None,
        expected="time, pass-statistics, print-after=NAME|all|changed, dump-changed=DIR, "
        "stop-after=NAME, verify=none|structure|numerics",
        help="separate words by commas",
    )
