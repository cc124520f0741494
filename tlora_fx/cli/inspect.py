"""`tlora-fx inspect`: a compiled model on one screen. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[Path, typer.Argument(help="What `tlora-fx compile` wrote.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="The data instead of the screen.")
    ] = False,
) -> None:
    """Show a compiled model on one screen: what is shared, by whom, and what it costs."""
    from tlora_fx.inspect.schema import load_listing

    listing = load_listing(folder)
    if as_json:
        typer.echo(listing.to_json(), nl=False)
        return
    from rich.console import Console

    from tlora_fx.inspect.screen import show

    show(listing, Console())
