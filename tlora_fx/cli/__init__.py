"""The command line: one file a command, imported when it is called."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

import typer
from typer.core import TyperGroup

from tlora_fx.cli.arguments.options import Interrupted, command_group
from tlora_fx.cli.arguments.synonyms import in_job_file, suggested
from tlora_fx.errors import NameNotUtf8, TloraError, printable
from tlora_fx.host import collector
from tlora_fx.host.early_end import TERMINATED
from tlora_fx.host.environment import require_known_values
from tlora_fx.host.quiet_import import without_foreign_notices
from tlora_fx.host.threads import thread_rules
from tlora_fx.runtime.launching.interrupts import Terminated, raising_terminated

COMMANDS = {
    "bisect": "Find the pass, and the rewrite in it, that breaks a check.",
    "chat": "Chat with a trained adapter on the terminal.",
    "client": "Submit jobs to a service; list, pause, cancel and fetch them.",
    "compile": "Fuse the jobs of a file into one model and write its code.",
    "data": "Show what jobs train on, token by token, and what was left out.",
    "explain": "Explain why jobs share a module, or why they do not.",
    "generate": "Generate text from prompts with trained adapters.",
    "import": "Make a job file of an Axolotl, LLaMA-Factory or TRL config.",
    "inspect": "Show a compiled model, or what each pass changed.",
    "kernels": "List, show, explain and tune generated GPU kernels.",
    "merge": "Merge an adapter into its base and write the full model.",
    "opt": "Run compiler passes on a graph file and print the result.",
    "passes": "List the compiler passes and their options.",
    "plan": "Choose how to split a model over GPUs; needs no GPU.",
    "prepare": "Fill the caches from which train starts, without training.",
    "profile": "Measure time and memory of a model's layers on this machine.",
    "reduce": "Shrink a graph file on which something fails.",
    "replay": "Run a failed compiler pass again, from its replay folder.",
    "report": "Write an HTML report of a run: losses, speed, groups.",
    "results": "Show the results of a run as a table, or write them as CSV.",
    "run": "Train a folder of jobs, and regroup them while they train.",
    "schedule": "Save a snapshot of the scheduler, or explain its decisions.",
    "serve": "Run an HTTP service to which users submit jobs to train.",
    "simulate": "Simulate scheduling policies on a trace of jobs.",
    "stop": "Stop jobs of a run early and keep their adapters.",
    "tokens": "Create, list and revoke the access tokens of a service.",
    "train": "Train all jobs of a file together on one frozen base.",
    "verify": "Check that jobs train together as they would alone.",
    "watch": "Show live loss curves of a run on the terminal.",
}
#: By command, its module, where it cannot have the same name.
MODULES = {"import": "import_config"}
INTERRUPTED, MISUSED = 130, 2
#: Commands that read a job file and train or measure what it says.
OF_A_JOB_FILE = frozenset({"train", "verify", "prepare", "data", "compile", "plan", "profile"})
#: Options that were taken out, by the names that plans had for them.
TAKEN_OUT = {"--sequence-parallel": "sequence_parallel"}


def main(arguments: list[str] | None = None) -> None:
    """Run `tlora-fx`; exits with 1 on a mistake that it can explain, 2 on wrong usage.

    Ctrl-C and SIGTERM end it with one line, and with 130 and 143; what trains ends in order first.

    arguments   by default those of the process, which then ends with the command
    """
    if arguments is not None:
        _run(arguments)
        return
    _spell_out_what_cannot_be_encoded()
    if sys.argv[1:2] in (["train"], ["prepare"]):
        collector.begin()
    try:
        with raising_terminated():
            _run(sys.argv[1:])
    except Terminated:
        _say("terminated by SIGTERM")
        sys.exit(TERMINATED)
    finally:
        collector.leave()


def _spell_out_what_cannot_be_encoded() -> None:
    """Make stdout and stderr write what their encoding lacks as escapes, and not raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(given: list[str]) -> None:
    asked = next((word for word in given if not word.startswith("-")), None)
    if asked is not None and asked not in COMMANDS:
        close = suggested(asked, COMMANDS)
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
            _require_utf8(given)
            thread_rules.set_up()  # before torch is imported
        with without_foreign_notices(), _leading_to_the_job_file(asked, given):
            _app(asked)(given, prog_name="tlora-fx")
    except TloraError as error:
        _say(error.with_notes())
        if asked in ("train", "prepare"):
            from tlora_fx.runtime.launching.local_launch import leave_for_torchrun

            leave_for_torchrun(error.with_notes())
        sys.exit(1)
    except OSError as error:
        # Of a file that was named, a command tells itself; this one is its output.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123  (a device)
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        _say(f"the output cannot be written: {error.strerror}; free space, or send it elsewhere")
        sys.exit(1)
    except (KeyboardInterrupt, Interrupted) as stop:
        _say(f"interrupted: {stop}" if str(stop) else "interrupted")
        sys.exit(INTERRUPTED)


def _require_utf8(words: list[str]) -> None:
    """Refuse a current folder or arguments that no tokenizer or ledger could hold.

    raises   NameNotUtf8
    """
    named = [("argument", word) for word in words]
    with suppress(OSError):  # it was removed
        named.append(("folder", os.getcwd()))  # noqa: PTH109  (as text)
    for kind, text in named:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise NameNotUtf8(
                "a name is not UTF-8",
                **{kind: os.fsencode(text).decode("utf-8", "backslashreplace")},
                help="rename it; where it is right and the locale is another, set PYTHONUTF8=1",
            ) from error


@contextmanager
def _leading_to_the_job_file(asked: str | None, given: list[str]) -> Iterator[None]:
    """After wrong usage, say where fields of jobs stand that other trainers take as options."""
    try:
        yield
    except SystemExit as end:
        if end.code == MISUSED and asked in OF_A_JOB_FILE:
            for option in _unknown_options(asked, given):
                if help := in_job_file(option):
                    _say(f"{option}: {help}")
        raise


def _unknown_options(asked: str, given: list[str]) -> list[str]:
    command = typer.main.get_command(_app(asked))
    assert isinstance(command, TyperGroup)
    known = {name for each in command.commands[asked].params for name in each.opts}
    options = [word.partition("=")[0] for word in given if word.startswith("--")]
    return [option for option in options if option not in known]


def _app(asked: str | None) -> typer.Typer:
    """The application; only the command that is asked for is imported."""
    app = command_group("Train many LoRA jobs as one fused graph, each as it would train alone.")
    app.callback()(_options)
    for name, told in COMMANDS.items():
        home = f"tlora_fx.cli.{MODULES.get(name, name)}"
        module = import_module(home) if name == asked else None
        if module is None:
            app.command(name, help=told)(_stand_in)
        elif hasattr(module, "group"):
            app.add_typer(module.group, name=name)
        else:
            app.command(name)(module.run)
    return app


def _version(asked: bool) -> None:
    if asked:
        from tlora_fx.host.version import __version__

        typer.echo(__version__)
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_version, help="Print the version and exit."
    ),
) -> None:
    """Options of `tlora-fx` itself."""


def _stand_in() -> None:
    raise AssertionError("a command is imported when it is called")


def _say(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")
