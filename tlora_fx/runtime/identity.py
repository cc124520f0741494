"""Identity of a run, so that only the same run goes on: its jobs, samples, the base's tensors.

Content decides. A path may change when what it names is the same, and the same path may not hold
other samples or another base.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlora_fx.config.functions import function_text
from tlora_fx.config.job import Job
from tlora_fx.errors import CheckpointError, DataFileError, OptimizerError, ResumeMismatch
from tlora_fx.host.version import __version__
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.runtime.checkpoints.digests import base_digests, file_digest, tensor_digests
from tlora_fx.runtime.checkpoints.store import Checkpoint, CheckpointStore
from tlora_fx.runtime.clocks import clocks_of
from tlora_fx.runtime.data.rows import data_files
from tlora_fx.runtime.data.samples import JobData, load_job_data
from tlora_fx.runtime.data.tokenizer import load_tokenizer
from tlora_fx.runtime.optim.trainable import learning_rates

#: What of a job is compared by what comes of it: its samples, its steps, the base's tensors.
BY_CONTENT = frozenset(
    {"base", "data", "mixing", "max_length", "max_steps", "num_train_epochs", "eval_split"}
)
#: What does not alter training.
HARMLESS = frozenset({
    "save_steps", "schedule", "eval_data", "eval_strategy", "eval_steps",
    "per_device_eval_batch_size", "compute_metrics", "metric_for_best_model", "greater_is_better",
    "load_best_model_at_end", "early_stopping_patience", "early_stopping_threshold",
    "sample_prompts", "sample_steps", "sample_max_new_tokens", "report_to",
})  # fmt: skip
#: Without these a saved state cannot be loaded.
NEEDED = frozenset({"lora", "adapter_dtype", "optim", "optim_args", "loraplus_lr_ratio"})
#: Of a config, what names it and does not describe it.
_NAMES = frozenset({"_name_or_path", "transformers_version"})
_SHOWN = 8
#: What made other samples of the same data in checkpoints that have no version.
_READ_OTHERWISE = (
    "an older version of tlora-fx wrote the checkpoint. Since 0.2.0 some data has other tokens:\n"
    "in chats, headers of the template are not trained; in all formats, a column that the first\n"
    "row lacks is read in later rows (an Alpaca input, the prompt of a pair, tools)"
)
#: Steps done of which the rates are compared.
_COMPARED_STEPS = 100_000


Kind = Literal["harmless", "altering", "fatal"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it was when the checkpoint was made.

    kind   harmless: training goes on as it would have; altering: it does not; fatal: the saved
           state does not fit
    """

    text: str
    kind: Kind


def describe_run(
    model: SuperModel, jobs: Sequence[Job], data: Mapping[str, JobData], *, whole: bool = False
) -> dict[str, Any]:
    """Description of a run in its checkpoints, JSON-able.

    whole    read every byte of the base (see `digests`)
    raises   BaseNotLoadable
    """
    own = {"version": __version__, "base": _base(model, whole=whole)}
    return {**describe_jobs(jobs, data), **own}


def describe_jobs(jobs: Sequence[Job], data: Mapping[str, JobData]) -> dict[str, Any]:
    """Description of the jobs of a run in its checkpoints."""
    return {
        "jobs": {job.name: _described(job) for job in jobs},
        "steps": {job.name: data[job.name].steps for job in jobs},
        "data": {job.name: _data(job, data[job.name]) for job in jobs},
        "clocks": {
            job.name: clock.isoformat(timespec="seconds")
            for job in jobs
            if (clock := data[job.name].clock) is not None
        },
    }


def _described(job: Job) -> dict[str, Any]:
    described = job.model_dump(mode="json", exclude={"base", "adapter"})
    if described["loss"] == "cross_entropy":
        described["loss"] = None  # The same training, and older checkpoints name none.
    # A folder to continue counts by its config: its tensors are where the job began.
    return described | {"lora": dict(job.lora_fields)}


def _data(job: Job, data: JobData) -> dict[str, Any]:
    content = None
    with suppress(OSError, DataFileError):
        content = _content(job)
    path = ", ".join(str(Path(part.path)) for part in job.data.parts)
    return {"path": path, "file": content, "samples": data.digest}


def _content(job: Job) -> str | None:
    """The digest of a job's data file, or of all its files; None for a hub id.

    raises   OSError, DataFileError
    """
    parts = job.data.parts
    files = [path for part in parts for path in data_files(part, job.name)]
    digests = [file_digest(path) for path in files]
    if len(digests) < 2:
        return digests[0] if digests else None
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def _base(model: SuperModel, *, whole: bool) -> dict[str, Any]:
    backbone = model.backbone
    spec, config = backbone.spec, {}
    if backbone.config is not None and hasattr(backbone.config, "to_dict"):
        config = {k: v for k, v in backbone.config.to_dict().items() if k not in _NAMES}
    given = tensor_digests(backbone.values) if spec.module is not None else None
    return {
        "dtype": spec.dtype,
        "quantize": spec.quantize,
        "config": _plain(config),
        "seed": spec.seed if spec.config is not None else None,
        "tensors": given or base_digests(spec),
        "whole": base_digests(spec, whole=True) if whole else None,
    }


def _plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def require_same_run(
    checkpoint: Checkpoint,
    now: Mapping[str, Any],
    jobs: Sequence[Job],
    *,
    accept: bool = False,
    only: str | None = None,
) -> list[str]:
    """Refuse a checkpoint of another run.

    now       what `describe_run` says
    accept    go on although training does not go on as it would have
    only      the name of a job: the others of the checkpoint do not matter
    returns   what is different, and was taken
    raises    ResumeMismatch, with every difference
    """
    known = [job for job in jobs if only in (None, job.name)]
    try:
        differences = list(_differences(checkpoint, now, known, alone=only is not None))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "the checkpoint does not say of what run it is",
            folder=checkpoint.path,
            found=f"{type(error).__name__}: {error}",
            help="restore it from a backup, or train into a new folder",
        ) from error
    refused = [d.text for d in differences if d.kind == "fatal"]
    altering = [d.text for d in differences if d.kind == "altering"]
    if refused or (altering and not accept):
        listed = refused + altering
        more = [f"and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else []
        help = "resume with what the run was started with"
        if not refused:
            help += ", or add --accept-changes to go on all the same"
        raise ResumeMismatch(
            "the checkpoint belongs to another run",
            job=only,
            folder=checkpoint.path,
            differs="\n".join(listed[:_SHOWN] + more),
            cause=_READ_OTHERWISE if _reads_otherwise(checkpoint.run, now, known) else None,
            help=help,
        )
    return [d.text for d in differences]


def require_same_files(job: Job, folder: Path) -> None:
    """Refuse to go on with a job whose data or base is not what its checkpoint was made with.

    What was not written to since then is not read.

    folder   of the run whose newest checkpoint the job goes on from
    raises   ResumeMismatch; what loading the data raises, where its file is another
    """
    before = CheckpointStore(folder).run()
    if job.name not in before.get("data", {}):
        return  # of an older version, or not readable: its worker says so
    data_before, texts = before["data"][job.name], []
    if data_before["file"] is not None and data_before["file"] != _content(job):
        data = load_job_data(job, load_tokenizer(job.base), clocks_of(before).get(job.name))
        texts += [
            text for text, kind in _of_data(data_before, _data(job, data)) if kind != "harmless"
        ]
    now = {**before["base"], "tensors": base_digests(job.base), "whole": None}
    texts += [each.text for each in _of_base(before["base"], now) if each.kind != "harmless"]
    if texts:
        raise ResumeMismatch(
            f"job '{job.name}' cannot go on from its checkpoint",
            job=job.name,
            folder=folder,
            differs="\n".join(texts),
            help="put back what it was trained with, or add --accept-changes",
        )


def _differences(
    checkpoint: Checkpoint, now: Mapping[str, Any], jobs: Sequence[Job], *, alone: bool
) -> Iterator[Difference]:
    before = checkpoint.run
    names = [job.name for job in jobs]
    there = [name for name in before.get("jobs", {}) if name in names or not alone]
    if sorted(there) != sorted(names):
        was, found = ", ".join(there) or "none", ", ".join(names)
        yield Difference(f"the jobs were {was}; they are {found}", "fatal")
        return
    for job in jobs:
        for text, kind in _of_job(job, before["jobs"][job.name], now["jobs"][job.name]):
            yield Difference(f"job '{job.name}': {text}", kind)
    if "data" not in before:
        yield Difference("an older checkpoint: data and base are not compared", "harmless")
        return
    for job in jobs:
        step = checkpoint.jobs[job.name].step
        for text, kind in (
            *_of_data(before["data"][job.name], now["data"][job.name]),
            *_of_steps(job, before["steps"][job.name], now["steps"][job.name], step),
        ):
            yield Difference(f"job '{job.name}': {text}", kind)
    yield from _of_base(before["base"], now["base"])


def _of_job(
    job: Job, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, Kind]]:
    for key in now:
        default = Job.model_fields[key].get_default() if key in Job.model_fields else None
        # A field that is younger than the checkpoint was as it is by default.
        was = before.get(key, default)
        if key == "reference" and key not in before and job.has_adapter_reference:
            was = "base"  # which all jobs compared with
        if key in BY_CONTENT or was == now[key]:
            continue
        kind: Kind = "altering"
        # Of functions of the user's, another source may be the same function, mended.
        both_functions = function_text(was) and function_text(now[key])
        if key in HARMLESS and not both_functions:
            kind = "harmless"
        elif key in NEEDED and not both_functions:
            kind = "fatal"
        for at, old, new in value_differences(was, now[key], key):
            yield f"{at} was {old}, is {new}", kind


def _of_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Kind]]:
    path, same_file = now["path"], before["file"] == now["file"]
    if before["path"] != path:
        path = f"{path} (was {before['path']})"
    elif not same_file:
        path = f"{path}, written anew"
    if before["samples"] == now["samples"]:
        if path != now["path"]:
            yield f"data {path}: the same samples", "harmless"
    elif same_file and before["file"] is not None:
        how = "tokenizer, chat template, max_length, weights or what is read of a row has changed"
        yield f"data {path}: the same file, other samples: {how}", "altering"
    else:
        yield f"data {path}: other samples", "altering"


def _reads_otherwise(
    before: Mapping[str, Any], now: Mapping[str, Any], jobs: Sequence[Job]
) -> bool:
    """Whether an older version made other samples of the data that a job still has."""
    if "version" in before or "data" not in before:
        return False
    pairs = [(before["data"][job.name], now["data"][job.name]) for job in jobs]
    return any(
        was["file"] == found["file"] and was["samples"] != found["samples"] for was, found in pairs
    )


def _of_steps(job: Job, before: int, now: int, done: int) -> Iterator[tuple[str, Kind]]:
    if before == now:
        return
    try:
        steps = range(min(done, _COMPARED_STEPS))
        same = learning_rates(job, before, steps) == learning_rates(job, now, steps)
    except OptimizerError:
        same = False
    text = f"the steps were {before}, are {now}"
    if same or now <= done:
        yield text, "harmless"
    else:
        yield f"{text}: '{job.lr_scheduler_type}' would have had other rates so far", "altering"


def _of_base(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for key in ("dtype", "quantize", "seed", "config"):
        # Older checkpoints do not say that the base was not quantised.
        for at, old, new in value_differences(before.get(key), now[key], key):
            yield Difference(f"the base: {at} was {old}, is {new}", "altering")
    compared = False
    for kind in ("tensors", "whole"):
        was, found = before[kind], now[kind]
        if was is None or found is None:
            continue
        compared = True
        apart = [name for name in {**was, **found} if was.get(name) != found.get(name)]
        if apart:
            text = f"the base: {len(apart)} of {len(found)} tensors are others, such as {apart[0]}"
            yield Difference(text, "altering")
            return
    if not compared and before["seed"] is None:
        yield Difference("the base's weights were not at hand and are not compared", "harmless")


def value_differences(before: Any, now: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two nested values part, as far as mappings go."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield at, _said(before), _said(now)
        return
    for key in {**before, **now}:
        yield from value_differences(before.get(key), now.get(key), f"{at}.{key}".strip("."))


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return "unset" if value is None else str(value)
