"""The samples of a job, and which of them each of its optimizer steps takes.

What a step takes depends on the job alone: on its data, its seed, and the number of the step.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from tlora_fx.config.job import COLUMNS_OF, DataSpec, Job, is_written_as_path
from tlora_fx.config.paths import is_file, is_folder, is_there
from tlora_fx.errors import (
    AmbiguousFormatError,
    ChatTemplateError,
    DataFileError,
    EmptyDataError,
    MalformedRowError,
    MissingColumnError,
    NoTargetsError,
    nearest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TARGET = -100


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence.

    input_ids  token ids
    labels     the same length, not shifted: the token's id, or -100 where it is not trained
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]


class SampleTable(Sequence[Sample]):
    """Many samples in eight bytes a token; a sample is built when it is read."""

    def __init__(self, samples: Sequence[Sample] = ()) -> None:
        """Make a table of `samples`."""
        self._ids = array("i")
        self._labels = array("i")
        self._ends = array("q")
        for sample in samples:
            self.append(sample.input_ids, sample.labels)

    def append(self, ids: Sequence[int], labels: Sequence[int]) -> None:
        """Add a sample of equally many ids and labels."""
        assert len(ids) == len(labels)
        self._ids.extend(ids)
        self._labels.extend(labels)
        self._ends.append(len(self._ids))

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        """One sample, or a list of them."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        start, end = self._ends[at - 1] if at else 0, self._ends[at]
        return Sample(tuple(self._ids[start:end]), tuple(self._labels[start:end]))

    @property
    def tokens(self) -> int:
        """How many tokens all samples have."""
        return len(self._ids)

    def digest(self) -> str:
        """The SHA-256 of all samples in their order, 32 hexadecimal digits of it."""
        digest = hashlib.sha256(len(self).to_bytes(8, "little"))
        for numbers in (self._ends, self._ids, self._labels):
            digest.update(numbers)
        return digest.hexdigest()[:32]


@dataclass(slots=True)
class DataReport:
    """What became of the rows of a job's data.

    rows                    rows of the data, bad ones too
    bad_rows                skipped because they could not be read
    first_bad_rows          place and reason of the first few
    truncated               samples cut to `max_length`
    dropped_without_target  samples with nothing to train on, after truncation
    prefix_mismatches       samples whose prompt is tokenised otherwise before its completion
    samples, tokens         what is left
    target_tokens           tokens that are trained in one epoch
    notes                   other things that a user should know
    """

    rows: int = 0
    bad_rows: int = 0
    first_bad_rows: tuple[str, ...] = ()
    truncated: int = 0
    dropped_without_target: int = 0
    prefix_mismatches: int = 0
    samples: int = 0
    tokens: int = 0
    target_tokens: int = 0
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The report as text: what is left, then each thing that was changed or left out."""
        lines = [f"{self.samples} samples, {self.tokens} tokens, {self.target_tokens} trained"]
        for count, what in (
            (self.bad_rows, "bad rows skipped"),
            (self.truncated, "samples truncated to max_length"),
            (self.dropped_without_target, "samples dropped: nothing to train on"),
            (self.prefix_mismatches, "prompts tokenised otherwise before their completion"),
        ):
            if count:
                lines.append(f"{count} of {self.rows} {what}")
        return [*lines, *(f"bad row {row}" for row in self.first_bad_rows), *self.notes]

    def add_bad_row(self, job: Job, where: str, reason: str) -> None:
        """Count a bad row; raises MalformedRowError unless the job skips bad rows."""
        if not job.data.skip_bad_rows:
            help = "mend the row, or set skip_bad_rows: true in the job's data"
            what = "a row of the data cannot be used"
            raise MalformedRowError(what, file=where, job=job.name, found=reason, help=help)
        self.bad_rows += 1
        if len(self.first_bad_rows) < 5:
            self.first_bad_rows = (*self.first_bad_rows, f"{where}: {reason}")


@dataclass(frozen=True)
class JobData:
    """The samples of a job and their order.

    samples     in the order of the data
    report      what became of the rows
    evaluation  what the job is evaluated on, in the order of the data
    tokenizer   that made the samples, where they were read; an adapter's folder gets it
    """

    job: Job
    samples: Sequence[Sample]
    report: DataReport
    evaluation: Sequence[Sample] = ()
    tokenizer: PreTrainedTokenizerBase | None = None

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which each sample is taken once; the last may be smaller."""
        micro_batches = math.ceil(len(self.samples) / self.job.per_device_train_batch_size)
        return math.ceil(micro_batches / self.job.gradient_accumulation_steps)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of the job."""
        if self.job.max_steps is not None:
            return self.job.max_steps
        return math.ceil((self.job.num_train_epochs or 1.0) * self.steps_per_epoch)

    @cached_property
    def digest(self) -> str:
        """Equal for equal samples in equal order."""
        samples = self.samples
        return (samples if isinstance(samples, SampleTable) else SampleTable(samples)).digest()

    def step(self, step: int) -> list[list[Sample]]:
        """The micro-batches of optimizer step `step`, from 0.

        Any step may be asked for, in any order: after an epoch the next begins, with an order of
        its own where the job shuffles. As in transformers' Trainer, the last step of an epoch may
        have fewer micro-batches, and its last micro-batch fewer samples; none is empty.
        """
        if step < 0:
            raise IndexError(f"step {step} of a job")
        epoch, at = divmod(step, self.steps_per_epoch)
        batch = self.job.per_device_train_batch_size
        taken = batch * self.job.gradient_accumulation_steps
        indices = self._order(epoch)[at * taken : (at + 1) * taken].tolist()
        return [
            [self.samples[index] for index in indices[start : start + batch]]
            for start in range(0, len(indices), batch)
        ]

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            # Two neighbouring epochs are all that training and a look ahead read.
            for old in list(self._orders)[:-1]:
                self._orders.pop(old, None)
            order = self._orders[epoch] = sample_order(len(self.samples), self.job, epoch)
        return order

    @cached_property
    def _orders(self) -> dict[int, np.ndarray]:
        return {}


def sample_order(count: int, job: Job, epoch: int) -> np.ndarray:
    """The indices of `count` samples in the order that `job` takes them in `epoch`, from 0."""
    if not job.shuffle:
        return np.arange(count)
    return np.random.default_rng((job.seed, epoch)).permutation(count)


def load_job_data(job: Job, tokenizer: PreTrainedTokenizerBase) -> JobData:
    """Read, tokenise and truncate the data of a job, and what it is evaluated on.

    raises  DataError, one of its classes for each mistake
    """
    samples: Sequence[Sample]
    evaluation: Sequence[Sample] = ()
    samples, report = _samples(job, tokenizer)
    notes: list[str] = []
    if isinstance(job.eval_split, float):
        samples, evaluation = held_out(samples, job)
        report.samples, report.tokens = len(samples), _tokens(samples)
        report.target_tokens = sum(map(_targets, samples))
        tokens = f"{_tokens(evaluation)} tokens, {sum(map(_targets, evaluation))} counted"
        notes.append(f"evaluation: {len(evaluation)} samples held out, {tokens}")
    elif (spec := _evaluated(job)) is not None:
        evaluation, found = _samples(job.model_copy(update={"data": spec}), tokenizer)
        notes += [f"evaluation: {line}" for line in found.lines()]
    if tokenizer.eos_token_id is None:
        notes.insert(0, "the tokenizer has no end-of-sequence token: samples end without one")
    report.notes = tuple(notes)
    return JobData(job, samples, report, evaluation, tokenizer)


def _evaluated(job: Job) -> DataSpec | None:
    """The data that a job is evaluated on, where it is not held out."""
    if not isinstance(job.eval_split, str):
        return job.eval_data
    if _is_file(job.data.path):
        raise DataFileError(
            f"a file has no split '{job.eval_split}'",
            path=job.data.path,
            job=job.name,
            help="name the file to evaluate under eval_data, or hold out a part: eval_split: 0.1",
        )
    return job.data.model_copy(update={"split": job.eval_split})


def held_out(samples: Sequence[Sample], job: Job) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """The samples that are trained, and the part that is kept for evaluation, in their order.

    Which ones depends on the job's seed and on how many there are; their number is rounded up.

    raises  EmptyDataError when none is left to train on
    """
    count = math.ceil(job.eval_split * len(samples))
    if count >= len(samples):
        raise EmptyDataError(
            "holding out samples for evaluation leaves none to train on",
            path=job.data.path,
            job=job.name,
            found=f"{len(samples)} samples, eval_split: {job.eval_split}",
            help="give more samples, or a file of its own under eval_data",
        )
    drawn = np.random.default_rng((job.seed, _HELD_OUT)).permutation(len(samples))
    held = set(drawn[:count].tolist())
    parts: tuple[SampleTable, SampleTable] = SampleTable(), SampleTable()
    for index, sample in enumerate(samples):
        parts[index in held].append(sample.input_ids, sample.labels)
    return parts


# No epoch has this number.
_HELD_OUT = 2**32 - 1


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in samples)


def _targets(sample: Sample) -> int:
    return sum(label != NO_TARGET for label in sample.labels[1:])


def _samples(job: Job, tokenizer: PreTrainedTokenizerBase) -> tuple[SampleTable, DataReport]:
    """The samples of the data that a job's `data` names, at least one."""
    report, table = DataReport(), SampleTable()
    for encoded in _encoded(job, tokenizer, report):
        _keep(encoded, job, report, table)
    report.samples, report.tokens = len(table), table.tokens
    if report.rows == report.bad_rows:
        what = "all rows of the data are bad" if report.rows else "the data has no rows"
        found = "\n".join(report.first_bad_rows) or None
        raise EmptyDataError(what, path=job.data.path, job=job.name, found=found)
    if not table:
        raise NoTargetsError(
            f"none of {report.rows} samples has a token to train on",
            path=job.data.path,
            job=job.name,
            max_length=job.max_length,
            found=f"{report.truncated} samples are longer than max_length",
            help="give completions, raise max_length, or set loss_on: all",
        )
    return table, report


def _encoded(job: Job, tokenizer: PreTrainedTokenizerBase, report: DataReport) -> Iterator[Encoded]:
    encoder: TextEncoder | None = None
    for row in read_rows(job.data, job.name):
        report.rows += 1
        if row.fields is None:
            report.add_bad_row(job, row.where, row.reason)
            continue
        encoder = encoder or _encoder(job, tokenizer, row)
        try:
            yield encoder.encode(row.fields)
        except BadRowError as error:
            if isinstance(error, PrefixError) and not job.data.skip_bad_rows:
                raise ChatTemplateError(
                    "the chat template does not show which tokens the assistant wrote",
                    file=row.where,
                    job=job.name,
                    found=error,
                    help="use a template with {% generation %}, or set loss_on: all",
                ) from None
            report.add_bad_row(job, row.where, str(error))


def _encoder(job: Job, tokenizer: PreTrainedTokenizerBase, row: DataRow) -> TextEncoder:
    layout = find_layout(job.data, row.fields or (), where=row.where, job=job.name)
    if layout.format == "messages" and not template_of(tokenizer):
        help = "name a chat model's tokenizer under base, or give prompt and completion columns"
        raise ChatTemplateError("the tokenizer has no chat template", job=job.name, help=help)
    return TextEncoder(tokenizer, layout)


def _keep(encoded: Encoded, job: Job, report: DataReport, table: SampleTable) -> None:
    report.prefix_mismatches += encoded.prefix_differs
    report.truncated += len(encoded.ids) > job.max_length
    ids = encoded.ids[: job.max_length]
    targets = encoded.targets[: job.max_length]
    # The first token has no token before it that could predict it.
    trained = sum(targets[1:])
    if not trained:
        report.dropped_without_target += 1
        return
    report.target_tokens += trained
    labels = [token if on else NO_TARGET for token, on in zip(ids, targets, strict=True)]
    table.append(ids, labels)


# Read the rows of a job's data: JSONL, JSON, Parquet, or a data set of the hub.
#
# A row that cannot be read is an error that names file and line, or is counted when the job skips
# bad rows. So JSON is read here: `datasets`, which reads the rest, refuses a file for one bad row.

SUFFIXES = (".jsonl", ".json", ".parquet")
_OTHER_SUFFIXES = (".csv", ".tsv", ".txt", ".gz", ".zst", ".zip", ".arrow", ".jsonlines", ".ndjson")


class DataRow(NamedTuple):
    """One row of the data.

    where   file and line (from 1), or file and row (from 1), for messages
    fields  the row's columns, or None when it is bad
    reason  why it is bad
    """

    where: str
    fields: Mapping[str, Any] | None
    reason: str = ""


def require_data(spec: DataSpec, job: str) -> None:
    """Refuse data in a file that is not there; raises DataFileError. A hub id is not looked up."""
    path = Path(spec.path)
    if _is_file(spec.path) and not is_file(path):
        raise DataFileError("the data file does not exist", path=path, job=job)


def read_rows(spec: DataSpec, job: str) -> Iterator[DataRow]:
    """All rows of the data of `job`, in file order; blank lines of JSONL are no rows.

    raises  DataFileError
    """
    if not _is_file(spec.path):
        return _hub_rows(spec, job)
    path, reader = _reader(spec, job)
    return _opened(reader, path, job)


def require_files(job: Job) -> None:
    """Refuse data files that are not there, or of a type that is not read; raises DataFileError."""
    for spec in (job.data, _evaluated(job)):
        if spec is not None and _is_file(spec.path):
            _reader(spec, job.name)


def _reader(spec: DataSpec, job: str) -> tuple[Path, Callable[[Path, str], Iterator[DataRow]]]:
    """The file of a data set, and what reads its rows."""
    path = Path(spec.path)
    if is_folder(path):
        raise DataFileError("the data is a folder", path=path, job=job, help="name a file in it")
    if not is_file(path):
        raise DataFileError("the data file does not exist", path=path, job=job)
    readers: Mapping[str, Callable[[Path, str], Iterator[DataRow]]] = {
        ".jsonl": _jsonl_rows,
        ".json": _json_rows,
        ".parquet": _parquet_rows,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataFileError(
            f"files of type '{path.suffix}' are not read",
            path=path,
            job=job,
            expected=" ".join(SUFFIXES),
        )
    return path, reader


def _is_file(path: str) -> bool:
    known = path.lower().endswith(SUFFIXES + _OTHER_SUFFIXES)
    return known or is_written_as_path(path) or is_there(path)


def _opened(
    reader: Callable[[Path, str], Iterator[DataRow]], path: Path, job: str
) -> Iterator[DataRow]:
    try:
        yield from reader(path, job)
    except OSError as error:
        what = "the data file cannot be read"
        raise DataFileError(what, path=path, job=job, found=error.strerror or error) from error


def _jsonl_rows(path: Path, job: str) -> Iterator[DataRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            try:
                value = json.loads(text.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                yield DataRow(where, None, f"no JSON: {_json_reason(error)}")
            else:
                yield _row(where, value)


def _json_rows(path: Path, job: str) -> Iterator[DataRow]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        at = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        what = "the data file is no JSON"
        raise DataFileError(what, path=at, job=job, found=_json_reason(error)) from None
    if not isinstance(value, list):
        raise DataFileError(
            "the data file holds no list of rows",
            path=path,
            job=job,
            found=type(value).__name__,
            help="write [{...}, {...}], or one object a line into a .jsonl file",
        )
    for number, item in enumerate(value, 1):
        yield _row(f"{path}: row {number}", item)


def _parquet_rows(path: Path, job: str) -> Iterator[DataRow]:
    file = glob.escape(str(path))
    with TemporaryDirectory() as cache:
        try:
            yield from _loaded(
                path, "parquet", data_files=file, split="train", streaming=True, cache_dir=cache
            )
        except ValueError as error:
            what = "the data file is no Parquet that can be read"
            raise DataFileError(what, path=path, job=job, found=error) from None


def _hub_rows(spec: DataSpec, job: str) -> Iterator[DataRow]:
    try:
        return _loaded(spec.path, spec.path, split=spec.split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataFileError(
            f"the data set '{spec.path}' cannot be loaded",
            job=job,
            split=spec.split,
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            help="check the id and the split; a local file is written with its suffix",
        ) from error


def _loaded(title: Path | str, name: str, **options: Any) -> Iterator[DataRow]:
    """The rows of what `datasets` loads under a name."""
    import datasets

    table = datasets.load_dataset(name, **options)
    return (_row(f"{title}: row {number}", fields) for number, fields in enumerate(table, 1))


def _row(where: str, value: object) -> DataRow:
    if isinstance(value, dict):
        return DataRow(where, value)
    return DataRow(where, None, f"the row is no object but {type(value).__name__}")


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


# Decide from the columns of a data set how its rows become samples.

Format = Literal["prompt-completion", "messages", "text"]

#: What data sets often call our columns.
_USUAL: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "input", "query"),
    "completion": ("answer", "output", "response", "target", "solution"),
    "messages": ("conversations", "conversation", "chat", "dialog"),
    "text": ("content", "document"),
}


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """How rows become samples.

    format         what a row holds
    columns        our column names mapped to those of the data
    on_completion  whether only the completion, or the assistant's turns, are trained
    """

    format: Format
    columns: Mapping[str, str]
    on_completion: bool


def find_layout(spec: DataSpec, columns: Iterable[str], *, where: str, job: str) -> SampleLayout:
    """The layout of data with these columns.

    where   the row that the columns are of
    raises  MissingColumnError, AmbiguousFormatError
    """
    present = set(columns)
    formats = _wanted(spec)
    fitting = [format for format in formats if present.issuperset(_map(spec, format).values())]
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
    return SampleLayout(format, _map(spec, format), on_completion)


def _wanted(spec: DataSpec) -> list[Format]:
    formats: list[Format] = ["prompt-completion", "messages", "text"]
    if spec.format != "auto":
        return [spec.format]
    if spec.columns:
        return [format for format in formats if set(spec.columns) <= COLUMNS_OF[format]]
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


# Turn rows into token ids and the mask of the tokens that are trained.
#
# Texts are tokenised as TRL's SFTTrainer does: the prompt alone, and prompt and completion as one
# text; an end-of-sequence token closes a sample. The beginning-of-sequence token is whatever the
# tokenizer adds, and stands once.

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class BadRowError(ValueError):
    """A row has values that make no sample. Internal: callers count it or name the row."""


class PrefixError(BadRowError):
    """A chat template renders the start of a conversation otherwise than the whole of it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of one row before truncation.

    ids             token ids
    targets         per token, whether it is trained
    prefix_differs  the prompt's tokens alone are no prefix of the sample's
    """

    ids: list[int]
    targets: list[bool]
    prefix_differs: bool = False


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Encodes the rows of one layout with one tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    layout: SampleLayout

    def encode(self, fields: Mapping[str, Any]) -> Encoded:
        """The tokens of a row; raises BadRowError when a column is missing or has a wrong type."""
        for name in self.layout.columns.values():
            if fields.get(name) is None:
                raise BadRowError(f"no value in the column '{name}'")
        ours = {name: fields[theirs] for name, theirs in self.layout.columns.items()}
        if self.layout.format == "messages":
            return self._chat(_messages(ours["messages"]), _tools(fields.get("tools")))
        for name, value in ours.items():
            if not isinstance(value, str):
                theirs = self.layout.columns[name]
                raise BadRowError(f"the column '{theirs}' holds {type(value).__name__}, no text")
        if self.layout.format == "text":
            ids = self._closed(ours["text"])
            return Encoded(ids, [True] * len(ids))
        return self._completion(ours["prompt"], ours["completion"])

    def _completion(self, prompt: str, completion: str) -> Encoded:
        before = self._ids(prompt)
        ids = self._closed(prompt + completion)
        # A tokenizer may merge across the border. All tokens from the first that differs on hold
        # some of the completion.
        start = _common(before, ids)
        differs = start < len(before)
        if not self.layout.on_completion:
            return Encoded(ids, [True] * len(ids), differs)
        trained = bool(completion)
        return Encoded(ids, [trained and at >= start for at in range(len(ids))], differs)

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text with what the tokenizer adds before it, and nothing after it."""
        _require_encodable(text)
        encoding = self.tokenizer(text, add_special_tokens=True, truncation=False, verbose=False)
        ids: list[int] = list(encoding["input_ids"])
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if (
            bos is not None
            and ids[:2] == [bos, bos]
            and text.startswith(_text(self.tokenizer, "bos"))
        ):
            ids = ids[1:]
        written = eos is not None and text.endswith(_text(self.tokenizer, "eos"))
        added = ids[-2:] == [eos, eos] if written else ids[-1:] == [eos]
        return ids[:-1] if eos is not None and added else ids

    def _closed(self, text: str) -> list[int]:
        ids = self._ids(text)
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

    def _chat(self, messages: list[dict[str, Any]], tools: Any) -> Encoded:
        if not self.layout.on_completion:
            ids = self._render(messages, tools)
            return Encoded(ids, [True] * len(ids))
        if self.tokenizer.is_fast and _GENERATION.search(template_of(self.tokenizer)):
            encoding = self._template(messages, tools, return_assistant_tokens_mask=True)
            trained = [bool(mask) for mask in encoding["assistant_masks"]]
            return Encoded(list(encoding["input_ids"]), trained)
        return self._by_prefix(messages, tools)

    def _by_prefix(self, messages: list[dict[str, Any]], tools: Any) -> Encoded:
        """Find each assistant turn as what it adds to the conversation before it."""
        ids = self._render(messages, tools)
        targets = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            head = messages[:turn]
            before = self._render(head, tools, add_generation_prompt=True) if head else []
            after = self._render(messages[: turn + 1], tools)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise PrefixError(f"the template shows turn {turn + 1} otherwise in the whole chat")
            targets[len(before) : len(after)] = [True] * (len(after) - len(before))
        return Encoded(ids, targets)

    def _render(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> list[int]:
        return list(self._template(messages, tools, **options)["input_ids"])

    def _template(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=True, return_dict=True, **options
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRowError(f"the chat template refuses the messages: {error}") from error


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template that plain conversations use, or nothing when the tokenizer has none."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        return ""


def _require_encodable(text: str) -> None:
    """Refuse half a character, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("ascii", "backslashreplace").decode()
        raise BadRowError(f"the text has half a character, {half} at {error.start + 1}") from None


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRowError("the messages are no list with at least one message")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRowError(f"message {number} is no object with a role")
        content = message.get("content")
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise BadRowError(f"message {number} has no text in 'content'")
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def _tools(value: object) -> object:
    if value is None or isinstance(value, list):
        return value
    raise BadRowError(f"the column 'tools' holds {type(value).__name__}, no list")


def _common(left: list[int], right: list[int]) -> int:
    """How many tokens both start with."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _text(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    return str(getattr(tokenizer, f"{name}_token"))
