"""`tlora-fx compile`: fuse the jobs of a file and write the model down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora_fx.cli.options import (
    AddPass,
    DisablePass,
    DumpChanged,
    Load,
    PipelineText,
    PrintAfter,
    PrintAfterChange,
    Statistics,
    StopAfter,
    Strict,
    Time,
    TrustRemoteCode,
    VerifyPasses,
    instruments_of,
    pipeline_of,
    require_pipeline,
)
from tlora_fx.cli.terminal import Console, echo

if TYPE_CHECKING:
    from tlora_fx.inspect.schema import Listing
    from tlora_fx.ir.graph import GroupGraph


def run(
    jobs: Annotated[Path, typer.Argument(help="Job file (YAML).")],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="Folder for the compiled model, or NAME.tfx for the graphs alone.",
        ),
    ],
    pipeline: PipelineText = None,
    add_pass: AddPass = None,
    disable_pass: DisablePass = None,
    load: Load = None,
    verify: VerifyPasses = None,
    strict: Strict = False,
    time: Time = False,
    pass_statistics: Statistics = False,
    print_after: PrintAfter = None,
    print_after_change: PrintAfterChange = False,
    dump_changed: DumpChanged = None,
    stop_after: StopAfter = None,
    states: Annotated[
        bool,
        typer.Option(
            "--states", help="Also write the graphs after every pass, for `inspect --diff`."
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Fuse the jobs of a file into one model and write its code.

    Needs no weights. Writes ssm.py (the code), ssm.txt (a listing), ssm.json (the data of the
    listing), program.json (the data of every node), graph.tfx (the graphs, for `opt`), model.json
    (for `tlora_fx.load`), report.txt (what jobs share, what not and why) and kernels/ (the
    generated GPU kernels). Other files in the folder are kept. With --stop-after, no model is
    written: only what --print-after and --dump-changed ask for. With -o NAME.tfx, only the graphs
    are written; this works with --stop-after too.
    """
    from tlora_fx.config.job_file import load_job_file
    from tlora_fx.runtime.early_checks import require_trainable

    require_pipeline(pipeline, add_pass, load)
    console = Console(stderr=True)
    seconds: dict[str, float] = {}
    with _phase(console, seconds, "read"):
        given = load_job_file(jobs, trust_remote_code=trust_remote_code)
        require_trainable(given.jobs)
    with _phase(console, seconds, "load libraries"):
        import peft  # noqa: F401  (with transformers; compiling would import them anyway)

        from tlora_fx.compiler import compile, run_passes
        from tlora_fx.graph_file import SUFFIX
        from tlora_fx.inspect.dump import dump
        from tlora_fx.inspect.program import Recorder
        from tlora_fx.inspect.statistics import PassStatistics
        from tlora_fx.tools.replay import keep_replay
    passes = pipeline_of(pipeline, add_pass, load, disable_pass)
    instruments = instruments_of(
        time, print_after, dump_changed, verify, strict, pass_statistics, print_after_change
    )
    on_failure = partial(keep_replay, _folder(output) / "replay")
    if stop_after is not None or output.suffix == SUFFIX:
        group = run_passes(
            given, passes, stop_after=stop_after, verify=verify, instruments=instruments,
            on_failure=on_failure,
        )  # fmt: skip
        _leave_graphs(group, output, stop_after)
        return
    recorder = Recorder()
    instruments += [recorder] if states else []
    with _phase(console, seconds, f"fuse {len(given.jobs)} jobs", "fuse"):
        model = compile(
            given, passes, verify=verify, instruments=instruments, on_failure=on_failure
        )
    with _phase(console, seconds, "write"):
        statistics = next((one for one in instruments if isinstance(one, PassStatistics)), None)
        listing = dump(model, output, recorder.stages if states else (), statistics)
    for line in summary(listing, seconds, output):
        echo(line)


def _leave_graphs(group: GroupGraph, output: Path, stop_after: str | None) -> None:
    """Write the graphs alone, where a file is asked for."""
    from tlora_fx.graph_file import SUFFIX, save_graphs

    if output.suffix == SUFFIX:
        save_graphs(group, output)
    stopped = f"stopped after {stop_after}: no model is built" if stop_after else ""
    echo(stopped or f"written   {output}: the graphs, for `tlora-fx opt`")


def _folder(output: Path) -> Path:
    """The folder of what comes out."""
    return output.parent if output.suffix == ".tfx" else output


def summary(listing: Listing, seconds: dict[str, float], folder: Path) -> list[str]:
    """Summary of a compiled model, in a few lines."""
    from tlora_fx.inspect.text import headline
    from tlora_fx.inspect.wording import plural

    totals = listing.totals
    structures = sum(1 for block in listing.blocks if block.layers)
    alone = totals.adapters - totals.lowered
    kept = f"; {plural(alone, 'branch')} as they are: see report.txt" if alone else ""
    layers = f"{plural(len(listing.base.layers), 'layer')} in {plural(structures, 'structure')}"
    return [
        headline(listing),
        f"shared    {totals.shared_nodes} operators run once for all jobs, {layers}",
        f"adapters  {totals.lowered} of {totals.adapters} in shared operators{kept}",
        "seconds   " + ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items()),
        f"written   {folder}: ssm.txt to read, report.txt, ssm.py; ssm.json, program.json",
    ]


@contextmanager
def _phase(
    console: Console, seconds: dict[str, float], doing: str, name: str | None = None
) -> Iterator[None]:
    """Say on the terminal what is being done, and note how long it took."""
    start = time.perf_counter()
    with console.status(doing):
        yield
    seconds[name or doing] = time.perf_counter() - start
