"""Decide from the columns of a data set how its rows become samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tlora_fx.config.job import COLUMNS_OF, DataSpec
from tlora_fx.errors import AmbiguousFormatError, MissingColumnError, nearest

Format = Literal["prompt-completion", "messages", "text"]

#: What data sets often call our columns.
_USUAL: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "input", "query"),
    "completion": ("answer", "output", "response", "target", "solution"),
    "messages": ("conversations", "conversation", "chat", "dialog"),
    "text": ("content", "document"),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows become samples.

    format         what a row holds
    columns        our column names mapped to those of the data
    on_completion  whether only the completion, or the assistant's turns, are trained
    """

    format: Format
    columns: Mapping[str, str]
    on_completion: bool


def find_layout(spec: DataSpec, columns: Iterable[str], *, where: str, job: str) -> Layout:
    """The layout of data with these columns.

    where   the row that the columns are of
    raises  MissingColumnError, AmbiguousFormatError
    """
    present = set(columns)
    formats = _wanted(spec)
    fitting = [one for one in formats if all(name in present for name in _map(spec, one).values())]
    if len(fitting) > 1:
        raise AmbiguousFormatError(
            f"the columns fit the formats {' and '.join(fitting)}",
            file=where,
            job=job,
            help="set format in the job's data",
        )
    if not fitting:
        raise _missing(spec, formats, sorted(present), where, job)
    [format] = fitting
    on_completion = format != "text" if spec.loss_on == "auto" else spec.loss_on == "completion"
    if format == "text" and on_completion:
        raise MissingColumnError(
            "the data is plain text and has no completion to train on",
            file=where,
            job=job,
            help="set loss_on: all, or map the columns prompt and completion",
        )
    return Layout(format, _map(spec, format), on_completion)


def _wanted(spec: DataSpec) -> list[Format]:
    formats: list[Format] = ["prompt-completion", "messages", "text"]
    if spec.format != "auto":
        return [spec.format]
    if spec.columns:
        return [one for one in formats if set(spec.columns) <= COLUMNS_OF[one]]
    return formats


def _map(spec: DataSpec, format: Format) -> dict[str, str]:
    mapped: Mapping[str, str] = {str(ours): theirs for ours, theirs in spec.columns.items()}
    return {name: mapped.get(name, name) for name in sorted(COLUMNS_OF[format])}


def _missing(
    spec: DataSpec, formats: list[Format], present: list[str], where: str, job: str
) -> MissingColumnError:
    found = ", ".join(present) or "none"
    if len(formats) > 1:
        return MissingColumnError(
            "the data has no prompt and completion, no messages, and no text",
            file=where,
            job=job,
            found=f"columns {found}",
            help=_mapping_help(present) or "map the data's names under columns",
        )
    absent = [name for name in _map(spec, formats[0]).values() if name not in present]
    near = [near for name in absent if (near := nearest(name, present))]
    return MissingColumnError(
        f"the data has no column {' and no column '.join(repr(name) for name in absent)}",
        file=where,
        job=job,
        found=f"columns {found}",
        help=f"did you mean {' and '.join(repr(name) for name in near)}?"
        if near
        else _mapping_help(present) or "map the data's names under columns",
    )


def _mapping_help(present: list[str]) -> str:
    """The mapping that fits names which data sets often use, or nothing."""
    guess = {
        ours: next((name for name in usual if name in present), ours if ours in present else "")
        for ours, usual in _USUAL.items()
    }
    for names in (("prompt", "completion"), ("messages",), ("text",)):
        if all(guess[name] for name in names):
            pairs = ", ".join(f"{name}: {guess[name]}" for name in names)
            return f"perhaps columns: {{{pairs}}}"
    return ""
