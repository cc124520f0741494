"""`tlora-fx compile`: fuse the jobs of a file and write the model down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora_fx.cli.arguments.options import (
    JobFilePath,
    PipelineOptions,
    WatchOptions,
    option,
    takes_options,
)
from tlora_fx.cli.terminal import Console, echo, writing_graphs
from tlora_fx.config.job_file import JobFile, load_job_file

if TYPE_CHECKING:
    from tlora_fx.inspect.schema import Listing
    from tlora_fx.pipeline import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions(WatchOptions, PipelineOptions):
    """Options of the command line."""

    jobs: JobFilePath
    output: Path = option(
        ..., "Folder for the compiled model, or NAME.tfx for the graphs alone.", "-o", "--output"
    )
    stop_after: str | None = option(None, "Name of the last compiler pass to run.")
    states: bool = option(False, "Also write the graphs after every pass, for `inspect --diff`.")

    @property
    def is_file(self) -> bool:
        """Whether a file of the graphs is asked for, instead of a folder of the model."""
        return self.output.suffix == ".tfx"


@takes_options
def run(options: CompileOptions) -> None:
    """Fuse the jobs of a file into one model and write its code.

    Needs no weights. Writes ssm.py (the code), ssm.txt (a listing), ssm.json (the data of the
    listing), program.json (the data of every node), graph.tfx (the graphs, for `opt`), model.json
    (for `tlora_fx.load`), report.txt (what jobs share, what not and why) and kernels/ (the
    generated GPU kernels). Those of an earlier compile are replaced, other files in the folder are
    kept; the folder of a run is refused. With --stop-after, no model is written: only what
    --print-after and --dump-changed ask for. With -o NAME.tfx, only the graphs are
    written; this works with --stop-after too.
    """
    from tlora_fx.runtime.launching.early_checks import require_trainable
    from tlora_fx.runtime.run_folder import require_no_run

    options.require_passes()
    if not options.is_file and options.stop_after is None:
        require_no_run(options.output)
    console = Console(stderr=True)
    seconds: dict[str, float] = {}
    with _phase(console, seconds, "read"):
        given = load_job_file(options.jobs, trust_remote_code=options.trust_remote_code)
        require_trainable(given.jobs)
    with _phase(console, seconds, "load libraries"):
        import peft  # noqa: F401  (with transformers; compiling would import them anyway)

        from tlora_fx.compiler import compile
        from tlora_fx.inspect.dump import dump
        from tlora_fx.inspect.program import Recorder
        from tlora_fx.inspect.statistics import PassStatistics
        from tlora_fx.tools.replay import keep_replay
    folder = options.output.parent if options.is_file else options.output
    on_failure = partial(keep_replay, folder / "replay")
    passes, instruments = options.passes(options.disable_pass), options.instruments()
    if options.stop_after is not None or options.is_file:
        _write_graphs(given, passes, options, instruments=instruments, on_failure=on_failure)
        return
    recorder = Recorder()
    instruments += [recorder] if options.states else []
    with _phase(console, seconds, f"fuse {len(given.jobs)} jobs", "fuse"):
        model = compile(
            given, passes, verify=options.verify, instruments=instruments, on_failure=on_failure
        )
    with _phase(console, seconds, "write"):
        statistics = next((one for one in instruments if isinstance(one, PassStatistics)), None)
        stages = recorder.stages if options.states else ()
        listing = dump(model, options.output, stages, statistics)
    for line in summary(listing, seconds, options.output):
        echo(line)


def _write_graphs(
    given: JobFile, passes: Pipeline, options: CompileOptions, **watching: Any
) -> None:
    """Run the passes, as far as they are asked for, and write the graphs where a file is."""
    from tlora_fx.compiler import run_passes
    from tlora_fx.graph_file import save_graphs

    stop = options.stop_after
    group = run_passes(given, passes, stop_after=stop, verify=options.verify, **watching)
    if options.is_file:
        with writing_graphs(options.output):
            save_graphs(group, options.output)
    stopped = f"stopped after {stop}: no model is built" if stop else ""
    echo(stopped or f"written   {options.output}: the graphs, for `tlora-fx opt`")


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
