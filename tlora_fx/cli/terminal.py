"""Output of commands, on a terminal, without one and into files: work in progress, whole tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import typer
from rich import console as rich_console
from rich.cells import cell_len
from rich.console import ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from tlora_fx.errors import DumpNotWritable, ReportNotWritable, errors_as, printable
from tlora_fx.host.durable import write_output

EVERY_SECONDS = 5.0
#: Characters between two columns of a bare table.
COLUMN_GAP = 2


class Console(rich_console.Console):
    """A console on which no text of strangers moves the cursor, or says what nobody wrote."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Text with what a terminal would obey spelled out, before it is laid out."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments likewise: some text comes ready-made."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text of strangers on stdout, or on stderr."""
    typer.echo(printable(text), err=err, nl=nl)


class Working:
    """Message on a console while something takes its time: `with Working(console, "measuring"):`.

    A spinner on a terminal; else a line at first, and one every five seconds.
    """

    def __init__(self, console: Console, text: str, every_seconds: float = EVERY_SECONDS) -> None:
        self.console = console
        self.text = text
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._spinner: Status | None = None
        self._teller: threading.Thread | None = None

    def __enter__(self) -> Working:
        if self.console.is_terminal:
            self._spinner = self.console.status(self.text)
            self._spinner.start()
        else:
            self._say(self.text)
            self._teller = threading.Thread(target=self._tell, daemon=True)
            self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._spinner is not None:
            self._spinner.stop()
        if self._teller is not None:
            self._teller.join()

    def now(self, text: str) -> None:
        """Something else is being done."""
        self.text = text
        if self._spinner is not None:
            self._spinner.update(text)

    def _tell(self) -> None:
        started = time.monotonic()
        while not self._ended.wait(self._every_seconds):
            self._say(f"{self.text}: {time.monotonic() - started:.0f} s so far")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def write_file(path: Path, text: str, what: str, help: str) -> None:
    """Write what is told of a run into a file; raises ReportNotWritable."""
    with errors_as(ReportNotWritable, f"{what} cannot be written", file=path, help=help):
        write_output(path, text.encode())


def writing_graphs(path: Path) -> AbstractContextManager[None]:
    """Inside, graphs are written to a file or folder; raises DumpNotWritable where that fails."""
    help = "choose another file with -o, or free disk space"
    return errors_as(DumpNotWritable, "the graphs cannot be written", file=path, help=help)


def bare_table(*titles: str, right: Collection[str] = ()) -> Table:
    """A table without lines.

    right    titles of columns whose cells stand to the right
    """
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left")
    return table


def without_columns(table: Table, width: int, spare: Sequence[str]) -> Table:
    """The table without the columns for which a terminal has no room.

    width    of the terminal, in characters
    spare    titles of columns that may be left out, those that matter least first
    """
    for title in spare:
        widths = [max(map(cell_len, [str(c.header), *map(str, c.cells)])) for c in table.columns]
        if sum(widths) + COLUMN_GAP * (len(widths) - 1) <= width:
            break
        kept = [column for column in table.columns if column.header != title]
        fewer = bare_table()
        for column in kept:
            fewer.add_column(column.header, justify=column.justify)
        for cells in zip(*(column.cells for column in kept), strict=True):
            fewer.add_row(*cells)
        table = fewer
    return table


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as its content: a pipe or a narrow terminal gets every number of it."""
    wanted = Measurement.get(console, console.options.update_width(2**15), table).maximum
    whole = Console(
        file=console.file,
        highlight=False,
        width=max(wanted, console.width),
        force_terminal=console.is_terminal,
        no_color=console.no_color,
    )
    whole.print(table, soft_wrap=True)
