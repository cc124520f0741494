"""The listing on a terminal: the backbone in one calm colour, each job in one of its own.

The colours are Okabe and Ito's, which colour-blind people tell apart; the glyphs do so without
any. `NO_COLOR` and pipes are respected by rich.
"""

from __future__ import annotations

from rich.console import Console
from rich.style import Style
from rich.text import Text

from tlora_fx.inspect.legend import Line
from tlora_fx.inspect.schema import Listing
from tlora_fx.inspect.text import WIDTH, listing_lines

CALM = "#7A93A8"
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#F0E442")
NARROWEST = 72
STYLES = {"shared": Style(color=CALM), "dim": Style(dim=True), "title": Style(bold=True)}


def show(listing: Listing, console: Console) -> None:
    """Print the listing, as wide as the terminal, at most WIDTH columns; WIDTH into a pipe."""
    width = max(NARROWEST, min(console.width, WIDTH)) if console.is_terminal else WIDTH
    for line in listing_lines(listing, width):
        console.print(styled(line), no_wrap=True, overflow="ignore", crop=False, highlight=False)


def styled(line: Line) -> Text:
    """A line with its colours."""
    return Text.assemble(*((text, style_of(name)) for text, name in line))


def style_of(name: str) -> Style:
    """The style of what a piece is: "shared", "dim", "title", "job 3"."""
    if name.startswith("job "):
        return Style(color=PALETTE[int(name.removeprefix("job ")) % len(PALETTE)], bold=True)
    return STYLES.get(name, Style.null())
