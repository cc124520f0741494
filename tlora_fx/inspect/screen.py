"""Pages on a terminal: the backbone in one calm colour, each job in one of its own.

Glyphs and signs say the same without colour. `NO_COLOR` and pipes are respected by rich.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.style import Style
from rich.text import Text

from tlora_fx.inspect.legend import Line
from tlora_fx.inspect.palette import CALM, PALETTE, colour_of
from tlora_fx.inspect.schema import Listing
from tlora_fx.inspect.text import WIDTH, listing_lines

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


def show(listing: Listing, console: Console) -> None:
    """Print the listing, as wide as the terminal, at most WIDTH columns; WIDTH into a pipe."""
    show_lines(listing_lines(listing, width_of(console, WIDTH)), console)


def show_lines(lines: Iterable[Line], console: Console) -> None:
    """Print a page's lines as they are."""
    for line in lines:
        console.print(styled(line), no_wrap=True, overflow="ignore", crop=False, highlight=False)


def width_of(console: Console, widest: int) -> int:
    """The columns that a page has: the terminal's, or the widest into a pipe."""
    return max(NARROWEST, min(console.width, widest)) if console.is_terminal else widest


def styled(line: Line) -> Text:
    """A line with its colours."""
    return Text.assemble(*((text, style_of(name)) for text, name in line))


def style_of(name: str) -> Style:
    """The style of what a piece is: "shared", "dim", "title", "job 3"."""
    if name.startswith("job "):
        return Style(color=colour_of(name), bold=True)
    return STYLES.get(name, Style.null())
