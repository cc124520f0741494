"""Train jobs from Python: `tlora_fx.train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from tlora_fx.api.results import JobResult, Results
from tlora_fx.cli.bars import Bars
from tlora_fx.cli.terminal import Console
from tlora_fx.compiler import Jobs, as_jobs, compile
from tlora_fx.config.validation import words_of_python
from tlora_fx.cost.load import MAX_ROW_TOKENS
from tlora_fx.errors import JobError, TloraError
from tlora_fx.host import phases
from tlora_fx.runtime.callbacks import Callbacks, TrainerCallback
from tlora_fx.runtime.checks import unusual
from tlora_fx.runtime.distributed import require_device
from tlora_fx.runtime.job_run import JobRun
from tlora_fx.runtime.launching.early_checks import require_data
from tlora_fx.runtime.run_folder import hold_early, require_begun, require_free, require_new
from tlora_fx.runtime.trainer import Trainer, TrainerOptions, new_folder


def train(
    jobs: Jobs,
    *,
    output: Path | str | None = None,
    device: torch.device | str | None = None,
    resume: bool = False,
    accept_changes: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    verbose: bool = True,
    compiled: bool = False,
    max_row_tokens: int = MAX_ROW_TOKENS,
) -> Results:
    """Train jobs together on one base, in this process; each ends as it would alone.

    jobs             one job, a list of them, or a job file
    output           new folder for adapters, metrics and checkpoints; by default one in runs/
    device           by default the GPU where there is one
    resume           go on from the newest checkpoint in `output`
    accept_changes   resume although data, base or settings have changed
    callbacks        hear of the run
    verbose          show progress and warnings; errors are raised either way
    compiled         compile the layers with torch.compile
    max_row_tokens   tokens of one forward pass at most
    returns          results by job name; a job that has failed is one of them
    raises           TloraError for what is wrong with jobs, data, base or folder; KeyboardInterrupt
                     after a checkpoint when the user stopped the run
    """
    folder = Path(output) if output is not None else new_folder()
    console = Console(stderr=True, quiet=not verbose, highlight=False)
    with _told_in_python(), _start(), Bars(console) as bars, ExitStack() as held:
        require_free(folder)
        (require_begun if resume else require_new)(folder)
        require_device(device)
        given = as_jobs(jobs)
        _require_callbacks(callbacks)
        require_data(given)
        held.enter_context(hold_early(folder, resume))
        heard = _Heard(bars, max_row_tokens)
        trainer = Trainer(
            compile(given),
            given,
            output=folder,
            device=device,
            resume=resume,
            callback=Callbacks([bars, heard, *callbacks]),
            options=TrainerOptions(
                max_row_tokens=max_row_tokens, compiled=compiled, accept_changes=accept_changes
            ),
        )
        runs = trainer.run()
    results = [JobResult.of_folder(run.job, folder / run.job.name) for run in runs]
    return Results(results, folder, heard.warnings)


def _require_callbacks(callbacks: Sequence[TrainerCallback]) -> None:
    """Refuse what hears of nothing; raises JobError."""
    listed = isinstance(callbacks, Sequence)
    for callback in callbacks if listed else [callbacks]:
        hears = callable(getattr(callback, "stepped", None)) and not isinstance(callback, type)
        if not listed or not hears:
            raise JobError(
                "train(callbacks=...): it is no list of callbacks",
                expected="objects of classes below tlora_fx.TrainerCallback, such as [Tell()]",
                found=repr(callback),
            )


class _Heard(TrainerCallback):
    """Tells what became of the data, and keeps warnings."""

    def __init__(self, bars: Bars, max_row_tokens: int) -> None:
        self._bars, self._max_row_tokens = bars, max_row_tokens
        self.warnings: list[str] = []

    def started(self, runs: Sequence[JobRun]) -> None:
        """Tell how each job's data was read, and what is most likely not meant."""
        data = {run.job.name: run.data for run in runs}
        self._bars.read({name: samples.report for name, samples in data.items()})
        for text in unusual([run.job for run in runs], data, self._max_row_tokens):
            self._bars.warned(words_of_python(text))
            self.warned(words_of_python(text))

    def warned(self, text: str) -> None:
        """Keep it."""
        self.warnings.append(text)


@contextmanager
def _start() -> Iterator[None]:
    """Time the phases until the first step, or until an error."""
    phases.begin()
    try:
        yield
    finally:
        phases.end()


@contextmanager
def _told_in_python() -> Iterator[None]:
    """Errors are told in Python's words, where others speak of a job file or of a command."""
    try:
        yield
    except TloraError as error:
        error.what, error.help = words_of_python(error.what), words_of_python(error.help)
        error.facts = {name: words_of_python(text) for name, text in error.facts.items()}
        error.args = (error.render(),)
        raise
