"""What people watch a pipeline with: times, prints and numbered dumps.

All of it goes to one stream, stderr unless another is given. The same can be asked for on the
command line, from Python, and by the environment variable `TLORA_FX_LOG`:

    TLORA_FX_LOG=time,print-after=changed,dump-changed=states,verify=numerics
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, cast, get_args

from tlora_fx.errors import PipelineError, nearest
from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.ir.verifier import owners
from tlora_fx.model.source import graphs_source
from tlora_fx.numerics import Numerics
from tlora_fx.pipeline import Done, Instrument, Pipeline, Verify

LOG_VARIABLE = "TLORA_FX_LOG"
# Names that print-after takes besides those of passes.
ALL, CHANGED = "all", "changed"
HEADER = "# A state of graphs, written by tlora-fx"


class Timing(Instrument):
    """Prints how long each pass took, over all graphs that it ran on; on stderr by default."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stderr
        self.rows: dict[tuple[int, str], list[Done]] = {}

    def started(self, pipeline: Pipeline) -> None:
        self.rows = {}

    def after(self, done: Done) -> None:
        self.rows.setdefault((done.place, done.item.name), []).append(done)

    def finished(self, group: GroupGraph) -> None:
        for line in self.lines():
            self.out.write(line + "\n")

    def lines(self) -> Iterator[str]:
        """The table: a pass a line, then the sum."""
        yield f"{'pass':<24}{'graphs':>8}{'seconds':>10}{'checks':>10}  changed"
        for (_, name), done in self.rows.items():
            changed = sum(bool(item.changed) for item in done)
            yield _time_line(name, done, f"{changed} of {len(done)}")
        yield _time_line("all", [item for done in self.rows.values() for item in done], "")


def _time_line(name: str, done: Sequence[Done], changed: str) -> str:
    seconds = sum(item.seconds for item in done)
    checks = sum(item.check_seconds for item in done)
    return f"{name:<24}{len(done):>8}{seconds:>10.3f}{checks:>10.3f}  {changed}".rstrip()


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
    """What is asked to be watched, wherever it was asked.

    time            print how long passes take
    print_after     names of passes, "all", or "changed"
    dump_changed    folder for numbered dumps
    stop_after      the last pass to run
    verify          what is checked after each pass
    """

    time: bool = False
    print_after: tuple[str, ...] = ()
    dump_changed: Path | None = None
    stop_after: str | None = None
    verify: Verify | None = None

    def instruments(self, out: TextIO | None = None) -> list[Instrument]:
        """What does the watching."""
        found: list[Instrument] = [PrintAfter(name, out) for name in self.print_after]
        if self.dump_changed is not None:
            found.append(DumpChanged(self.dump_changed))
        if self.verify == "numerics":
            found.append(Numerics(out=out or sys.stderr))
        return [Timing(out), *found] if self.time else found


def watch_from(environment: Mapping[str, str] = os.environ) -> Watch:
    """What `TLORA_FX_LOG` asks for; raises PipelineError for a word that it does not know."""
    watch = Watch()
    for word in environment.get(LOG_VARIABLE, "").split(","):
        name, _, value = word.strip().partition("=")
        if name:
            watch = _with(watch, name, value)
    return watch


def _with(watch: Watch, name: str, value: str) -> Watch:
    if name == "time" and not value:
        return replace(watch, time=True)
    if name == "print-after" and value:
        return replace(watch, print_after=(*watch.print_after, value))
    if name == "dump-changed" and value:
        return replace(watch, dump_changed=Path(value))
    if name == "stop-after" and value:
        return replace(watch, stop_after=value)
    if name == "verify" and value in get_args(Verify):
        return replace(watch, verify=cast(Verify, value))
    words = ("time", "print-after", "dump-changed", "stop-after", "verify")
    raise PipelineError(
        f"{LOG_VARIABLE} cannot be read",
        found=f"{name}={value}" if value else name,
        nearest=nearest(name, words) if name not in words else None,
        expected="time, print-after=NAME|all|changed, dump-changed=DIR, stop-after=NAME, "
        "verify=none|structure|numerics",
        help="separate words by commas",
    )
