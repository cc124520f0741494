"""Tables that are never cut: a pipe, a file or a narrow terminal gets every number of them."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as its content is, whatever the width of the console."""
    wanted = Measurement.get(console, console.options.update_width(2**15), table).maximum
    made = Console(
        file=console.file,
        highlight=False,
        width=max(wanted, console.width),
        force_terminal=console.is_terminal,
        no_color=console.no_color,
    )
    made.print(table, soft_wrap=True)
