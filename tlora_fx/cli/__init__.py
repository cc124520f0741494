"""The command line: one file a command, imported when it is called."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module

import typer

from tlora_fx.cli.options import Interrupted, command_group
from tlora_fx.errors import TloraError, nearest, printable
from tlora_fx.host.environment import require_known_values

#: By logger, what the messages have in them: kernels for other GPUs, and one library's use of
#: what another will drop.
NOTICES = {
    "torchao": "Failed to load ",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
}


@contextmanager
def without_foreign_notices() -> Iterator[None]:
    """Inside, these messages are not logged; every other one of the same loggers is."""
    filters = [(logging.getLogger(name), partial(_lacks, part)) for name, part in NOTICES.items()]
    for logger, left_out in filters:
        logger.addFilter(left_out)
    try:
        yield
    finally:
        for logger, left_out in filters:
            logger.removeFilter(left_out)


def _lacks(part: str, record: logging.LogRecord) -> bool:
    return part not in record.getMessage()


COMMANDS = {
    "bisect": "Find the pass, and the rewrite inside it, that breaks a check.",
    "chat": "Talk with a trained job on the terminal.",
    "client": "Submit jobs to a service, watch, pause, cancel and fetch them.",
    "compile": "Fuse the jobs of a file into one model and write it down.",
    "explain": "Say why a module is lowered, shared and folded, or why not.",
    "generate": "Let trained jobs go on from a prompt.",
    "inspect": "Look into a compiled model, or into what each pass did.",
    "kernels": "List, show, explain, check and tune the generated kernels.",
    "merge": "Merge a job's adapter into its base, and write full weights.",
    "opt": "Run a pipeline on graphs of a file, and print what comes out.",
    "passes": "List the passes and their options.",
    "plan": "Choose how a model is cut over GPUs, without any of them at hand.",
    "profile": "Measure a model's layers on the device at hand.",
    "replay": "Run a pass that failed once more, alone.",
    "report": "Write an HTML page of a run: curves, rates, lengths, groups.",
    "run": "Train the jobs of a folder on this machine, grouped anew at each horizon.",
    "schedule": "Save a snapshot of a run, and ask why the scheduler decided as it did.",
    "serve": "Train jobs that come over HTTP, for several users, with a page.",
    "simulate": "Replay a trace of jobs under scheduling policies, on a simulated clock.",
    "stop": "End jobs of a run where they are, with the adapters that they have.",
    "tokens": "Make, list and revoke the tokens of a service's users.",
    "train": "Train all jobs of a file together, each to its own last step.",
    "verify": "Show that each job trains as it would alone.",
    "watch": "Show the curves of a run's jobs on the terminal while they train.",
}
INTERRUPTED = 130
#: Options that were taken out, by the names that plans had for them.
TAKEN_OUT = {"--sequence-parallel": "sequence_parallel"}


def main(arguments: list[str] | None = None) -> None:
    """Run `tlora-fx`; exits with 1 on a mistake that it can explain, 2 on wrong usage."""
    given = sys.argv[1:] if arguments is None else arguments
    asked = next((word for word in given if not word.startswith("-")), None)
    if asked is not None and asked not in COMMANDS:
        close = nearest(asked, COMMANDS)
        hint = f" Did you mean '{close}'?" if close else ""
        _say(f"There is no command '{asked}'.{hint} See tlora-fx --help.")
        sys.exit(2)
    gone = next((word for word in given if word in TAKEN_OUT), None)
    if gone is not None:
        from tlora_fx.cost.plan import TAKEN_OUT as REASONS

        _say(f"There is no option '{gone}': {REASONS[TAKEN_OUT[gone]]}.")
        sys.exit(2)
    try:
        if asked is not None and not {"--help", "-h"} & {*given}:
            require_known_values()
        with without_foreign_notices():
            _app(asked)(given, prog_name="tlora-fx")
    except TloraError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        _say(f"{error}{notes}")
        sys.exit(1)
    except (KeyboardInterrupt, Interrupted) as stop:
        _say(f"interrupted: {stop}" if str(stop) else "interrupted")
        sys.exit(INTERRUPTED)


def _app(asked: str | None) -> typer.Typer:
    """The application; only the command that is asked for is imported."""
    app = command_group("Train many LoRA jobs as one fused graph, each as it would train alone.")
    app.callback()(_options)
    for name, told in COMMANDS.items():
        module = import_module(f"tlora_fx.cli.{name}") if name == asked else None
        if module is None:
            app.command(name, help=told)(_stand_in)
        elif hasattr(module, "group"):
            app.add_typer(module.group, name=name)
        else:
            app.command(name)(module.run)
    return app


def _version(asked: bool) -> None:
    if asked:
        from tlora_fx import __version__

        typer.echo(__version__)
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_version, help="Say the version."
    ),
) -> None:
    """Options of `tlora-fx` itself."""


def _stand_in() -> None:
    raise AssertionError("a command is imported when it is called")


def _say(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")
