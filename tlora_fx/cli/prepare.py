"""`tlora-fx prepare`: fill the caches from which `tlora-fx train` starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tlora_fx.cli.arguments.options import takes_options
from tlora_fx.cli.arguments.start_options import (
    StartOptions,
    arrange,
    compiled_with_data,
    plan_name,
    read_base_ahead,
    read_jobs,
    require_start,
    start_processes,
)
from tlora_fx.cli.terminal import Console, bare_table, print_whole
from tlora_fx.errors import EnvironmentVariableWrong
from tlora_fx.host import phases
from tlora_fx.host.environment import CACHE
from tlora_fx.host.paths import cache_folder, why_unwritable
from tlora_fx.host.phases import phase

if TYPE_CHECKING:
    from tlora_fx.cli.bars import Bars
    from tlora_fx.config.job import Job
    from tlora_fx.runtime.launching.launch import Launch
    from tlora_fx.runtime.warm_up import Cache

AGAIN = "start it again: what is in the caches is not made anew"


@takes_options
def run(options: StartOptions) -> None:
    """Fill the caches from which train starts, without training.

    Traces and fuses the jobs of a file, checks the fused graph against the base, and tokenizes the
    data. On a GPU it also loads the base and runs one round, whose result is dropped, so that
    kernels are compiled, and layers with --compile. A later train of the same jobs with the same
    options, on such a GPU, finds all of it.

    Without a GPU, as when an image is built, it does what needs none, and says what is left for
    train. --device cpu prepares for training on the CPU.
    """
    phases.begin(began := phases.process_began()).add("imports", began)

    from tlora_fx.host.gpus import visible_gpus

    has_device = options.device is not None or visible_gpus() > 0
    leads = os.environ.get("RANK", "0") == "0"
    with phase("checks"):
        jobs = _require_right(options, has_device=has_device) if leads else ()
    if has_device and options.gpus is not None:
        start_processes(options.gpus, options, lambda: AGAIN)
        leads = os.environ.get("RANK", "0") == "0"
    if leads and has_device:
        read_base_ahead(jobs)

    from tlora_fx.cli.bars import Bars

    with Bars(Console(stderr=True, quiet=not leads, highlight=False)) as bars:
        with phase("imports"):
            from tlora_fx.runtime.launching.launch import Launch, exits_at_once

        launch = Launch.found() if has_device else Launch()
        options = replace(options, plan=plan_name(options, launch))

        def work() -> None:
            with bars:
                _prepare(options, launch if has_device else None, bars, jobs)

        exits_at_once(work, launch, lambda: AGAIN)


def _require_right(options: StartOptions, *, has_device: bool) -> Sequence[Job]:
    """The jobs, after all checks that need no torch; raises TloraError."""
    from tlora_fx.runtime.launching.early_checks import require_data_and_base

    _require_cache()
    jobs = read_jobs(options)
    if has_device:
        require_start(options, jobs)
    require_data_and_base(jobs, weights=has_device)
    return jobs


def _require_cache() -> None:
    """Refuse a cache that cannot be filled; raises EnvironmentVariableWrong."""
    folder = cache_folder()
    if why := why_unwritable(folder):
        raise EnvironmentVariableWrong(
            "the cache cannot be written",
            folder=folder,
            found=why,
            help=f"set {CACHE} to a folder that you may write to",
        )


def _prepare(options: StartOptions, launch: Launch | None, bars: Bars, jobs: Sequence[Job]) -> None:
    """Fill what can be filled, and say what was.

    launch   None where no device is to run anything
    """
    with phase("imports"):
        from tlora_fx.runtime.group_step import StepOptions
        from tlora_fx.runtime.warm_up import caches, digest_data, not_kept, warm_up

    if launch is None:
        known = caches(gpu=False, compiled=False)
        before = [cache.entries() for cache in known]
        data, model = compiled_with_data(options, jobs)
        digest_data(model, data)
    else:
        gpu = launch.device(options.device).type == "cuda"
        known = caches(gpu=gpu, compiled=options.compiled)
        before = [cache.entries() for cache in known]
        arranged = arrange(options, launch, bars, jobs)
        data, model = arranged.data, arranged.model
        rows = StepOptions(options.max_row_tokens, options.compiled, options.cuda_graphs)
        warm_up(model, data, arranged.plan, arranged.device, rows, bars.warned)
    bars.stop()
    record = phases.end()
    if launch is not None and launch.rank > 0:
        return
    _show(known, before)
    if record is not None:
        bars.console.print(f"prepared in {record.line()}", markup=False)
    for text in not_kept(model, warmed=launch is not None, compiled=options.compiled):
        bars.console.print(f"left for train: {text}", markup=False, soft_wrap=True)


def _show(known: Sequence[Cache], before: Sequence[int]) -> None:
    """Print each cache's folder, and how many entries are new."""
    from tlora_fx.runtime.warm_up import counted

    table = bare_table("cache", "entries", "new", "folder", right=("entries", "new"))
    for cache, now, new in counted(before, known):
        off = "" if cache.is_on else f" ({cache.variable}=0: nothing is kept)"
        table.add_row(cache.holds, str(now), str(new), f"{cache.folder}{off}")
    print_whole(Console(), table)
    sys.stdout.flush()
