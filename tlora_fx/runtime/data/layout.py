"""Which of a row's columns are read, and as what: the format of a job's data.

No row decides for the others. The format is found from the columns of the first rows together, a
column that a format may have is read in whatever row it stands, and each row is held against what
was found: a column that nobody reads is named in the report, and one that looks as if it governed
training is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, get_args

from tlora_fx.config.data_spec import COLUMNS_OF, OPTIONAL_COLUMNS, ColumnName, columns_of
from tlora_fx.config.job import DataSpec, Job
from tlora_fx.config.losses import FIELDS
from tlora_fx.errors import (
    AmbiguousFormatError,
    MissingColumnError,
    UnreadColumnError,
    did_you_mean,
    nearest,
)
from tlora_fx.runtime.chats.conversations import is_conversation
from tlora_fx.runtime.data.number_columns import number_columns
from tlora_fx.runtime.data.text_files import DataRow, separated_otherwise

Format = Literal[
    "prompt-completion", "messages", "text", "alpaca", "sharegpt", "preference",
    "unpaired-preference", "label", "tokens",
]  # fmt: skip
#: Formats of other methods and tasks than plain training.
_APART = ("preference", "unpaired-preference", "label")
FORMATS: tuple[Format, ...] = get_args(Format)
CHATS = ("messages", "sharegpt")
#: Rows that are looked at before the first one is encoded.
WINDOW = 1000

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
#: Names of columns that say what of a row is trained, or how much it counts.
_GOVERNING = frozenset(
    {
        "mask", "masks", "loss_mask", "label_mask", "labels_mask", "train_mask", "prompt_mask",
        "response_mask", "completion_mask", "assistant_mask", "assistant_masks",
        "weight", "weights", "loss_weight", "loss_weights", "sample_weight", "sample_weights",
        "train", "training", "trainable", "is_trained", "train_on", "loss",
    }
)  # fmt: skip
#: And where text is trained rather than classified.
_VERDICTS = frozenset({"label", "labels"})
#: Columns that may hold text or messages.
_SPOKEN = ("prompt", "completion", "chosen", "rejected")
#: Columns that say what of a row's tokens is trained.
TOKEN_MASKS = ("labels", "completion_mask", "assistant_masks", "loss_mask")


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """How rows become samples.

    format          what a row holds
    columns         our column names mapped to those of the data, optional ones that a row may have
    on_completion   whether only the completion, or the assistant's turns, are trained
    seen            our names of the columns that the first rows have; None: all
    needs_template  whether some of the first rows are conversations
    is_instructed   whether some of the first rows have a system or a history beside a prompt
    numbers         our names of the columns of numbers that the job's loss reads
    """

    format: Format
    columns: Mapping[str, str]
    on_completion: bool
    seen: frozenset[str] | None = None
    needs_template: bool = False
    is_instructed: bool = False
    numbers: tuple[str, ...] = ()

    def line(self) -> str:
        """Line for the user."""
        order = [*get_args(ColumnName), *self.numbers]
        names = [
            name if name == theirs else f"{name} from {theirs}"
            for name, theirs in sorted(self.columns.items(), key=lambda at: order.index(at[0]))
            if self.seen is None or name in self.seen
        ]
        if self.format == "label":
            return f"read as label ({', '.join(names)})"
        what = "the assistant's turns" if self.format in CHATS else "completions"
        if self.format == "preference":
            what = "the difference of both"
        if self.format == "tokens":
            masks = [name for name in TOKEN_MASKS if name in (self.seen or ())]
            what = f"what {' and '.join(masks)} say" if masks else "all tokens"
        trained = what if self.on_completion else "all tokens"
        return f"read as {self.format} ({', '.join(names)}); trained on {trained}"


def find_layout(job: Job, rows: Iterable[Mapping[str, Any]], *, where: str) -> SampleLayout:
    """The layout of a job's data that begins with these rows.

    where   the first of them
    raises  MissingColumnError, AmbiguousFormatError
    """
    rows = list(rows)
    named = set(chain.from_iterable(rows))
    # Columnar files have each column in each row, and null where a row has none.
    filled = {name for row in rows for name, value in row.items() if value is not None}
    spec, formats = job.data, _wanted(job)
    fitting = [name for name in formats if filled.issuperset(_needed(spec, name).values())]
    if not fitting:
        fitting = [name for name in formats if named.issuperset(_needed(spec, name).values())]
    if len(fitting) > 1:
        raise AmbiguousFormatError(
            f"the columns fit the formats {' and '.join(fitting)}",
            file=where,
            job=job.name,
            help=f"set format in the job's data, such as format: {fitting[0]}",
        )
    if not fitting:
        raise _missing(job, formats, sorted(named), where)
    [format] = fitting
    columns = _needed(spec, format) | _optional(spec, format)
    if job.method != "reward":
        columns.pop("margin", None)
    numbers = number_columns(job, format, rows, columns, where)
    columns |= numbers
    seen = frozenset(
        name for name, theirs in columns.items() if theirs in filled or name in COLUMNS_OF[format]
    )
    is_instructed = _has(rows, columns, ("system", "history"), bool)
    return SampleLayout(
        format,
        columns,
        _trains_completions(job, format, where, seen),
        seen,
        format in CHATS or is_instructed or _has(rows, columns, _SPOKEN, is_conversation),
        is_instructed,
        tuple(numbers),
    )


def layout_of(job: Job, layout: SampleLayout) -> SampleLayout:
    """A layout of data that another job has read, with what this one trains.

    raises  MissingColumnError where the job asks to train what the data does not have
    """
    seen = layout.seen or frozenset()
    on_completion = _trains_completions(job, layout.format, job.data.path, seen)
    return replace(layout, on_completion=on_completion)


class LaidOutRows:
    """The rows of a job's data, each held against the layout that the first of them have.

    layout   None where no row can be read
    unread   columns of the rows so far that are not read
    """

    def __init__(
        self, job: Job, rows: Iterable[DataRow], window: int = WINDOW, *, is_whole: bool = True
    ) -> None:
        """Look at the first rows.

        window    how many of them; more where these are all bad
        is_whole  these are all rows of the data: one must have each column that is mapped
        raises    MissingColumnError, AmbiguousFormatError; what reading the rows raises
        """
        left = iter(rows)
        first, fields, where = [], [], ""
        for row in left:
            first.append(row)
            if row.fields is not None:
                where = where or row.where
                fields.append(row.fields)
            if len(first) >= window and fields:
                break
        self.layout = find_layout(job, fields, where=where) if fields else None
        self.unread: dict[str, None] = {}
        self._job, self._rows, self._is_whole = job, chain(first, left), is_whole

    def __iter__(self) -> Iterator[DataRow]:
        """Each row, bad ones too.

        raises   UnreadColumnError at the first row with a column that governs and is not read;
                 MissingColumnError at the end, of a mapped column that no row has
        """
        check = None if self.layout is None else _RowCheck(self._job, self.layout, self.unread)
        where = self._job.data.path
        for row in self._rows:
            if check is not None and row.fields is not None:
                check.check(row.where, row.fields)
            yield row
        if check is not None and self._is_whole:
            check.require_mapped(where)


@dataclass(slots=True)
class _RowCheck:
    """Holds rows against a layout.

    unread    gets the names of columns that are not read
    """

    job: Job
    layout: SampleLayout
    unread: dict[str, None]
    _known: set[str] = field(default_factory=set)
    _missing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mapped = self.job.data.mapped_columns
        self._missing = {to: name for name, to in mapped.items() if name in self.layout.columns}

    def check(self, where: str, fields: Mapping[str, Any]) -> None:
        """Look at the columns of a row that no row before it had."""
        new = fields.keys() - self._known
        if not new:
            return
        read, ignored = set(self.layout.columns.values()), self.job.data.ignored_columns
        for name in sorted(new):
            self._missing.pop(name, None)
            if name in read or name in ignored:
                self._known.add(name)
            elif not _governs(self.job, name):
                self._known.add(name)
                self.unread[name] = None
            elif fields[name] not in (None, ""):
                raise self._governing(where, name, fields)

    def require_mapped(self, where: str) -> None:
        """Refuse a mapping to a column that no row had; raises MissingColumnError."""
        for theirs, ours in self._missing.items():
            raise MissingColumnError(
                f"the data has no column {theirs!r}",
                file=where,
                job=self.job.name,
                found=f"columns {', '.join(sorted(self._known))}",
                help=did_you_mean(theirs, [*self._known], f"leave {ours} out of columns"),
            )

    def _governing(self, where: str, name: str, fields: Mapping[str, Any]) -> UnreadColumnError:
        ignoring = f"columns: {{{name}: null}}"
        value = fields[name]
        format = self.layout.format
        if name == "label" and isinstance(value, bool) and format == "prompt-completion":
            return UnreadColumnError(
                "the rows are of KTO: 'label' says whether a completion is wanted, and method sft "
                "would train all of them",
                file=where,
                job=self.job.name,
                found=f"{name}: {str(value).lower()}",
                help=f"set method: kto, or keep the rows that are wanted and set {ignoring} in the "
                "job's data",
            )
        return UnreadColumnError(
            f"the column '{name}' looks as if it said what is trained, and is not read",
            file=where,
            job=self.job.name,
            expected=f"columns of {format}: {', '.join(sorted(columns_of(format)))}",
            found=f"{name}: {str(value)[:60]}",
            help=f"set {ignoring} in the job's data to train without it",
        )


def _governs(job: Job, name: str) -> bool:
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    verdict = plain in _VERDICTS and job.method == "sft" and not job.base.is_classifier
    return plain in _GOVERNING or verdict


def _has(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], names: Sequence[str], test: Any
) -> bool:
    """Whether a value of these columns of ours passes a test."""
    theirs = [columns[name] for name in names if name in columns]
    return any(test(row.get(name)) for row in rows for name in theirs)


def _trains_completions(job: Job, format: Format, where: str, seen: frozenset[str]) -> bool:
    """Whether completions alone are trained; raises MissingColumnError where there are none."""
    if format in _APART:
        return True
    if format == "tokens":
        return _trains_marked(job, where, seen)
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


def _trains_marked(job: Job, where: str, seen: frozenset[str]) -> bool:
    """Whether the masks of tokenised rows are read; raises MissingColumnError."""
    asked = {
        "loss_on: all": job.data.loss_on == "all",
        "loss_on: completion": job.data.loss_on == "completion",
        "completion_only_loss: true": job.completion_only_loss,
        "assistant_only_loss: true": job.assistant_only_loss,
    }
    wants = [text for text, on in asked.items() if on and text != "loss_on: all"]
    if wants and not seen.intersection(TOKEN_MASKS):
        raise MissingColumnError(
            "the data is tokens and does not say which are trained",
            file=where,
            job=job.name,
            expected=f"a column of {', '.join(TOKEN_MASKS)}",
            found=wants[0],
            help="set loss_on: all, or give labels with -100 where nothing is trained",
        )
    return not asked["loss_on: all"] and job.completion_only_loss is not False


def _wanted(job: Job) -> list[Format]:
    """The formats that a job's data may have."""
    if job.data.format != "auto":
        return [job.data.format]
    if job.method != "sft":
        return ["unpaired-preference" if job.method == "kto" else "preference"]
    if job.base.is_classifier:
        return ["label"]
    formats: list[Format] = [format for format in FORMATS if format not in _APART]
    mapped = set(job.data.mapped_columns).difference(FIELDS)
    return [name for name in formats if mapped <= columns_of(name)]


def _needed(spec: DataSpec, format: Format) -> dict[str, str]:
    mapped = spec.mapped_columns
    return {name: mapped.get(name, name) for name in sorted(COLUMNS_OF[format])}


def _optional(spec: DataSpec, format: Format) -> dict[str, str]:
    mapped, ignored = spec.mapped_columns, spec.ignored_columns
    return {
        name: mapped.get(name, name)
        for name in sorted(OPTIONAL_COLUMNS[format])
        if name in mapped or name not in ignored
    }


def _missing(job: Job, formats: list[Format], present: list[str], where: str) -> MissingColumnError:
    found = ", ".join(present) or "none"
    if separator := separated_otherwise(where, present):
        what = "the data has one column, whose name looks like several"
        return MissingColumnError(what, file=where, job=job.name, found=found, help=separator)
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
    by_name = {name.casefold(): name for name in present} | {name: name for name in present}
    guess = {
        ours: next((by_name[name] for name in (ours, *usual) if name in by_name), "")
        for ours, usual in _USUAL.items()
    }
    for names in guesses:
        if all(guess[name] for name in names):
            pairs = ", ".join(f"{name}: {guess[name]}" for name in names)
            return f"perhaps columns: {{{pairs}}}"
    return ""
