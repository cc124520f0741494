"""Merge a trained adapter into its base: full weights that need neither PEFT nor tlora-fx."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora_fx.config.adapter_folder import CONFIG, read_adapter_config, require_adapter_files
from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import kind_of, register_tuner
from tlora_fx.errors import RunFolderError, TokenizerNotLoadable, errors_as, nearest
from tlora_fx.host.storage import os_errors
from tlora_fx.runtime.run_folder import JOB, require_new

if TYPE_CHECKING:
    from peft import PeftModel


def adapter_of(run: Path, job: str | None) -> Path:
    """The adapter folder of a run's job, or the given folder where it is one.

    job      may be left out where the run has one alone
    raises   RunFolderError where there is none
    """
    if job is None and (run / CONFIG).is_file():
        return run
    if not run.is_dir():
        raise RunFolderError("there is no such run", folder=run, help="give a run's -o folder")
    jobs = sorted(path.parent.name for path in run.glob(f"*/{CONFIG}"))
    if job is None and len(jobs) == 1:
        job = jobs[0]
    if job in jobs:
        return run / str(job)
    if not jobs:
        raise RunFolderError(
            "there is no adapter in this folder",
            folder=run,
            help="give the -o folder of a run that has written adapters, or an adapter's folder",
        )
    near = nearest(job, jobs) if job else None
    what = f"the run has no adapter of a job '{job}'" if job else "the run has several adapters"
    raise RunFolderError(
        what,
        folder=run,
        found=", ".join(jobs),
        help=f"did you mean '{near}'?" if near else "name a job by --job",
    )


def adapters_of(run: Path) -> dict[str, Path]:
    """Every adapter folder of a run, by job; of an adapter folder it alone.

    raises   RunFolderError where there is none
    """
    if (run / CONFIG).is_file():
        return {run.resolve().name: run}
    found = {path.parent.name: path.parent for path in sorted(run.glob(f"*/{CONFIG}"))}
    return found or {"": adapter_of(run, None)}


def job_of(adapter: Path) -> Job:
    """The job that left an adapter folder, its base included.

    raises   RunFolderError where nothing says which, AdapterFolderError for a damaged folder
    """
    require_adapter_files(adapter)
    with errors_as(
        RunFolderError, "nothing says which base an adapter belongs to", OSError, ValueError,
        folder=adapter, expected=JOB,
        help="adapters of tlora-fx train have it; merge others with PEFT",
    ):  # fmt: skip
        job = Job.model_validate(json.loads((adapter / JOB).read_bytes()))
    read_adapter_config(adapter, job.base.task)
    return job


def merge(adapter: Path, output: Path, shard_size: str = "5GB") -> Path:
    """Write the base with an adapter merged into it, as transformers saves a model.

    The base is loaded as for training, PEFT merges in its dtype, and the adapter's tokenizer comes
    along. Of a base in 4 or 8 bits the rounded numbers are merged, on which the job was trained.

    adapter      a folder that `adapter_of` found
    output       a new folder
    shard_size   of each file of weights at most, such as 5GB
    returns      output
    raises       RunFolderError, AdapterFolderError, BaseNotLoadable
    """
    require_new(output)
    job = job_of(adapter)

    from peft import PeftModel

    from tlora_fx.runtime.adapters.quantised import trained_base

    register_tuner(kind_of(read_adapter_config(adapter, job.base.task)))
    base: Any = trained_base([job], restored=True)
    with _quiet(adapter):
        adapted = PeftModel.from_pretrained(base, str(adapter))
        _part_head(base)
        merged = _merged(adapted, adapter)
        _join_head(merged)
    fresh = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with _quiet(adapter), os_errors(output):
            merged.save_pretrained(fresh, max_shard_size=shard_size)
            _save_tokenizer(job, adapter, fresh)
        output.mkdir(parents=True, exist_ok=True)
        output.rmdir()
        fresh.rename(output)
    except OSError as error:
        raise RunFolderError(
            "the merged model could not be written",
            folder=output,
            found=error,
            help="free space, or choose another folder with -o",
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return output


def _merged(adapted: PeftModel, adapter: Path) -> Any:
    try:
        return adapted.merge_and_unload()
    except RuntimeError as error:
        if "merge" not in str(error):
            raise
        raise RunFolderError(
            "PEFT cannot merge this adapter",
            folder=adapter,
            found=error,
            help="load it as an adapter, by PEFT or by a server that takes adapters",
        ) from error


def _part_head(base: Any) -> None:
    """Give a head that shares the embedding's matrix one of its own, where one of them is adapted.

    PEFT adds each adapter to the matrix in place, and the other module would read it.
    """
    from torch import nn

    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or not (hasattr(table, "base_layer") or hasattr(head, "base_layer")):
        return
    own = getattr(head, "base_layer", head)
    if own.weight is getattr(table, "base_layer", table).weight:
        own.weight = nn.Parameter(own.weight.detach().clone(), requires_grad=False)


def _join_head(merged: Any) -> None:
    """Let a head share the embedding's matrix again, or the config say that it does not."""
    table, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    config = merged.config.get_text_config()
    if head is None or head.weight is table.weight or not config.tie_word_embeddings:
        return
    if head.weight.equal(table.weight):
        head.weight = table.weight
        return
    config.tie_word_embeddings = merged.config.tie_word_embeddings = False


@contextmanager
def _quiet(adapter: Path) -> Iterator[None]:
    """Inside, transformers neither draws a bar of its own nor warns of what peft calls."""
    from tlora_fx.runtime.adapters.files import without_bars

    with without_bars(str(adapter)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
        # A head that is tied to the embedding is parted from it.
        warnings.filterwarnings("ignore", message="Model with .tie_word_embeddings=True")
        yield


def _save_tokenizer(job: Job, adapter: Path, folder: Path) -> None:
    """The tokenizer beside the adapter, or that of the base; a base may have none."""
    from tlora_fx.runtime.data.tokenizer import load_tokenizer

    own = (adapter / "tokenizer_config.json").is_file()
    spec = job.base.model_copy(update={"tokenizer": str(adapter)}) if own else job.base
    try:
        load_tokenizer(spec).save_pretrained(folder)
    except TokenizerNotLoadable:
        return
