"""The options of every command that runs passes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from tlora_fx.pipeline import Instrument, Pipeline

Checks = Literal["none", "structure", "numerics"]
PipelineText = Annotated[
    str | None,
    typer.Option("--pipeline", help="Passes instead of the default; see `tlora-fx passes`."),
]
AddPass = Annotated[
    list[str] | None,
    typer.Option("--add-pass", help="One more pass: NAME@after:NAME or NAME@before:NAME."),
]
VerifyPasses = Annotated[
    Checks | None,
    typer.Option("--verify", help="Checks after each pass. Default: structure."),
]
Time = Annotated[bool, typer.Option("--time", help="Print how long each pass takes.")]
PrintAfter = Annotated[
    list[str] | None,
    typer.Option("--print-after", help="Print graphs after a pass: NAME, all or changed."),
]
DumpChanged = Annotated[
    Path | None,
    typer.Option("--dump-changed", help="Folder for the graphs after each pass that changed any."),
]
StopAfter = Annotated[str | None, typer.Option("--stop-after", help="The last pass to run.")]


def asked(pipeline: str | None, added: list[str] | None) -> Pipeline:
    """The pipeline that the options mean.

    raises    PipelineError, PluginBroken
    """
    from tlora_fx.compiler import resolve_pipeline

    return resolve_pipeline(pipeline, added or ())


def watching(
    time: bool, print_after: list[str] | None, dump_changed: Path | None
) -> list[Instrument]:
    """What does the watching that the options ask for, on stderr."""
    from tlora_fx.inspect.instruments import Watch

    return Watch(time, tuple(print_after or ()), dump_changed).instruments()
