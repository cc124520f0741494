"""Whether the files that jobs read, their bases and their data, can be read now.

Folders of a network may go away for a while. A job that stumbled over that is not at fault: it goes
on once its files are back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tlora_fx.config.base_files import require_base_files
from tlora_fx.config.data_spec import DataSpec
from tlora_fx.config.job import Job
from tlora_fx.errors import (
    BaseFileDamaged,
    BaseFileRefused,
    BaseNotLoadable,
    DataFileError,
    RankFailed,
    TloraError,
    TokenizerNotLoadable,
)
from tlora_fx.runtime.data.rows import require_data

_OF_FILES = (
    DataFileError, BaseNotLoadable, BaseFileDamaged, BaseFileRefused, TokenizerNotLoadable,
)  # fmt: skip


def is_about_files(error: BaseException) -> bool:
    """Whether an error may come of a file of a job that cannot be read, here or on another rank."""
    if isinstance(error, RankFailed):
        # Of another rank's error only the text is known, which begins with its code.
        reason = str(error.facts.get("reason", ""))
        return reason.startswith(tuple(f"error[{kind.code}]" for kind in _OF_FILES))
    return isinstance(error, (*_OF_FILES, OSError))


def require_files(job: Job) -> None:
    """Check that the files of a job are there and can be read; what is in them is not compared.

    raises   DataFileError, BaseFileDamaged, BaseFileRefused
    """
    parts = [*job.data.parts, *(job.eval_data.parts if job.eval_data else ())]
    for part in parts:
        require_data(part, job.name)
        _require_readable(part, job.name)
    require_base_files(job.base)


def absent_files(specs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Jobs whose files cannot be read now, each with the reason.

    specs   `Job.model_dump(mode="json")` of each, which was right once
    """
    absent = {}
    for spec in specs:
        try:
            require_files(Job.model_validate(spec))
        except (TloraError, OSError) as error:
            absent[str(spec["name"])] = str(error)
    return absent


def _require_readable(spec: DataSpec, job: str) -> None:
    """Read a byte of a data file, or a name of a folder; neither waits for anybody."""
    path = Path(spec.path)
    try:
        if path.is_dir():
            next(path.iterdir(), None)
        elif path.is_file():
            with path.open("rb") as file:
                file.read(1)
    except OSError as error:
        raise DataFileError(
            "the data file cannot be read", path=path, job=job, found=error.strerror or error
        ) from error
