"""Which of a row's columns are read, and as what: the format of a job's data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tlora_fx.config.job import (
    COLUMNS_OF,
    OPTIONAL_COLUMNS,
    ColumnName,
    DataSpec,
    Job,
    columns_of,
)
from tlora_fx.errors import AmbiguousFormatError, MissingColumnError, nearest

Format = Literal[
    "prompt-completion", "messages", "text", "alpaca", "sharegpt", "preference", "label"
]
FORMATS: tuple[Format, ...] = (
    "prompt-completion", "messages", "text", "alpaca", "sharegpt", "preference", "label",
)  # fmt: skip
CHATS = ("messages", "sharegpt")

#: What data sets often call our columns.
_USUAL: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "input", "query", "problem"),
    "completion": ("answer", "output", "response", "target", "solution"),
    "messages": ("conversation", "chat", "dialog"),
    "text": ("content", "document"),
    "chosen": ("preferred", "accepted", "response_chosen", "answer_chosen"),
    "rejected": ("dispreferred", "response_rejected", "answer_rejected"),
    "label": ("labels", "class", "category", "score", "target"),
}
_GUESSES = (("chosen", "rejected"), ("prompt", "completion"), ("messages",), ("text",))
_LABELLED = (("text", "label"),)


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """How rows become samples.

    format         what a row holds
    columns        our column names mapped to those of the data, optional ones that it has too
    on_completion  whether only the completion, or the assistant's turns, are trained
    """

    format: Format
    columns: Mapping[str, str]
    on_completion: bool

    def line(self) -> str:
        """What a user is told of it."""
        order = get_args(ColumnName)
        names = [
            name if name == theirs else f"{name} from {theirs}"
            for name, theirs in sorted(self.columns.items(), key=lambda at: order.index(at[0]))
        ]
        if self.format == "label":
            return f"read as label ({', '.join(names)})"
        what = "the assistant's turns" if self.format in CHATS else "completions"
        if self.format == "preference":
            what = "the difference of both"
        trained = what if self.on_completion else "all tokens"
        return f"read as {self.format} ({', '.join(names)}); trained on {trained}"


def find_layout(job: Job, columns: Iterable[str], *, where: str) -> SampleLayout:
    """The layout of a job's data with these columns.

    where   the row that the columns are of
    raises  MissingColumnError, AmbiguousFormatError
    """
    spec, present = job.data, set(columns)
    formats = _wanted(job)
    fitting = [name for name in formats if present.issuperset(_needed(spec, name).values())]
    if len(fitting) > 1:
        raise AmbiguousFormatError(
            f"the columns fit the formats {' and '.join(fitting)}",
            file=where,
            job=job.name,
            help=f"set format in the job's data, such as format: {fitting[0]}",
        )
    if not fitting:
        raise _missing(job, formats, sorted(present), where)
    [format] = fitting
    optional = {name: spec.columns.get(name, name) for name in sorted(OPTIONAL_COLUMNS[format])}  # type: ignore[call-overload]
    has = {name: theirs for name, theirs in optional.items() if theirs in present}
    on_completion = _trains_completions(job, format, where)
    return SampleLayout(format, _needed(spec, format) | has, on_completion)


def _trains_completions(job: Job, format: Format, where: str) -> bool:
    """Whether completions alone are trained; raises MissingColumnError where there are none."""
    if format in ("preference", "label"):
        return True
    chat = format in CHATS
    mine, other = "completion_only_loss", "assistant_only_loss"
    if chat:
        mine, other = other, mine
    asked = getattr(job, mine)
    if getattr(job, other) and asked is None:
        raise MissingColumnError(
            f"the data is read as {format}, which '{other}' says nothing of",
            file=where,
            job=job.name,
            found=f"{other}: true",
            help=f"write {mine}: true, or map the columns that are meant",
        )
    if job.data.loss_on != "auto":
        asked = job.data.loss_on == "completion"
    if format == "text" and asked:
        raise MissingColumnError(
            "the data is plain text and has no completion to train on",
            file=where,
            job=job.name,
            help="set loss_on: all, or map the columns prompt and completion",
        )
    return format != "text" if asked is None else bool(asked)


def _wanted(job: Job) -> list[Format]:
    """The formats that a job's data may have."""
    if job.data.format != "auto":
        return [job.data.format]
    if job.method != "sft":
        return ["preference"]
    if job.base.is_classifier:
        return ["label"]
    formats: list[Format] = [format for format in FORMATS if format not in ("preference", "label")]
    if job.data.columns:
        return [name for name in formats if set(job.data.columns) <= columns_of(name)]
    return formats


def _needed(spec: DataSpec, format: Format) -> dict[str, str]:
    mapped: Mapping[str, str] = {str(ours): theirs for ours, theirs in spec.columns.items()}
    return {name: mapped.get(name, name) for name in sorted(COLUMNS_OF[format])}


def _missing(job: Job, formats: list[Format], present: list[str], where: str) -> MissingColumnError:
    found = ", ".join(present) or "none"
    usual = _mapping_help(present, _LABELLED if job.base.is_classifier else _GUESSES)
    if {"chosen", "rejected"} <= set(present) and job.method == "sft":
        usual = "these are preferences: set method: dpo (or orpo) in the job"
    if len(formats) != 1:
        return MissingColumnError(
            "the data has no prompt and completion, no messages, and no text",
            file=where,
            job=job.name,
            found=f"columns {found}",
            help=usual or "map the data's names under columns",
        )
    absent = [name for name in _needed(job.data, formats[0]).values() if name not in present]
    near = [near for name in absent if (near := nearest(name, present))]
    fits = [name for name in FORMATS if set(present) >= COLUMNS_OF[name]]
    if fits and job.data.format != "auto":
        usual = f"the columns are those of format: {fits[0]}"
    return MissingColumnError(
        f"the data has no column {' and no column '.join(repr(name) for name in absent)}",
        file=where,
        job=job.name,
        found=f"columns {found}",
        help=f"did you mean {' and '.join(repr(name) for name in near)}?"
        if near and not fits
        else usual or "map the data's names under columns",
    )


def _mapping_help(present: list[str], guesses: Sequence[Sequence[str]]) -> str:
    """The mapping that fits names which data sets often use, or nothing."""
    guess = {
        ours: next((name for name in (ours, *usual) if name in present), "")
        for ours, usual in _USUAL.items()
    }
    for names in guesses:
        if all(guess[name] for name in names):
            pairs = ", ".join(f"{name}: {guess[name]}" for name in names)
            return f"perhaps columns: {{{pairs}}}"
    return ""
