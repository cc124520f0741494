"""Token ids of many sequences in one Arrow file, which is mapped into memory and not read.

A file has a row for each sequence: its token ids, the spans of them that are trained, the numbers
that a job's loss reads, and the code of its label where the base is a classifier. Processes that
map one file share its memory. What jobs differ in (`max_length`, which tokens are trained) is
applied when a sequence is read, by `SampleTable`. `datasets.Dataset.from_file` opens the files too.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np
import pyarrow as pa

from tlora_fx.config.losses import FIELDS
from tlora_fx.host.durable import replace_shared_file
from tlora_fx.runtime.data.layout import SampleLayout

#: Label of a token that is no target: the loss mask leaves it out.
NO_TARGET = -100
#: Values of a column of lists, and where each list begins and ends.
Lists = tuple[np.ndarray, np.ndarray]
SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.int32())),
        ("code", pa.int64()),
        ("differs", pa.bool_()),
        ("cut", pa.bool_()),
        ("final", pa.bool_()),
        ("numbers", pa.list_(pa.float64())),
    ]
)


class BadRow(NamedTuple):
    """A row of which no tokens could be made.

    place        file and line, or what follows the path of the data
    reason       why
    by_template  the chat template hides what is trained
    """

    place: str
    reason: str
    by_template: bool

    def place_in(self, path: str) -> str:
        """File and line of the row in the data at `path`."""
        return f"{path}{self.place}" if self.place.startswith(":") else self.place


@dataclass(slots=True)
class RowCounts:
    """Counts of the rows of data before anything is cut.

    rows             rows that were read, bad ones too
    bad_rows         rows of which no tokens could be made
    first_bad        the first few of them
    template_faults  those of them of which the chat template hides what is trained
    layout           of the rows, as the job that read them trains them; None where none was read
    unread           columns of the rows that are not read
    notes            what a user should know of the data
    """

    rows: int = 0
    bad_rows: int = 0
    first_bad: list[BadRow] = field(default_factory=list)
    layout: SampleLayout | None = None
    unread: list[str] = field(default_factory=list)
    template_faults: int = 0
    notes: list[str] = field(default_factory=list)

    def add_bad_row(self, row: BadRow) -> None:
        """Count a bad row, and keep it if it is one of the first."""
        self.bad_rows += 1
        self.template_faults += row.by_template
        if len(self.first_bad) < 5:
            self.first_bad.append(row)


class TokenRow(NamedTuple):
    """One sequence before truncation.

    ids      token ids
    spans    start and end of each run of trained tokens, one after the other, in order
    code     the label as of `label_code`, for classifiers; of kto, whether it is desirable
    differs  the prompt's tokens alone are no prefix of the sequence's
    cut      the tokenizer has cut the text
    final    jobs that train all tokens train these spans too: of a conversation they leave out the
             turns that are not to be trained
    numbers  what a job's loss reads beside each token: of each column of `SampleLayout.numbers` as
             many as there are ids, one column after the other
    """

    ids: Sequence[int]
    spans: Sequence[int]
    code: int = 0
    differs: bool = False
    cut: bool = False
    final: bool = False
    numbers: Sequence[float] = ()


def record_batch(rows: Sequence[TokenRow]) -> pa.RecordBatch:
    """Sequences as a batch of a file."""
    columns = zip(*rows, strict=True) if rows else ([] for _ in SCHEMA)
    arrays = [
        pa.array(column, type=field.type) for column, field in zip(columns, SCHEMA, strict=True)
    ]
    return pa.record_batch(arrays, schema=SCHEMA)


def write_batches(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Write sequences as an Arrow stream.

    raises   OSError
    """
    with path.open("wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)


def trained_tokens(
    batch: pa.RecordBatch, first: int, max_length: int, *, whole: bool
) -> np.ndarray:
    """How many tokens of each sequence of a batch are trained, [N] int64.

    first       tokens before this position are not counted
    max_length  tokens of a sequence that are kept
    whole       all tokens are trained, not only the spans, but where spans are final
    """
    lengths = np.diff(_lists(batch.column("ids"))[1])
    is_whole = ~_flags(batch, "final") & whole
    return _trained(lengths, [_lists(batch.column("spans"))], first, max_length, is_whole)


def _trained(
    lengths: np.ndarray,
    spans: Sequence[Lists],
    first: int,
    max_length: int,
    is_whole: np.ndarray,
) -> np.ndarray:
    kept = np.minimum(lengths, max_length).astype(np.int64)
    whole: np.ndarray = np.maximum(kept - first, 0)
    if is_whole.all():
        return whole
    counts, at = np.zeros(len(lengths), np.int64), 0
    for values, ends in spans:
        runs = values[ends[0] : ends[-1]].reshape(-1, 2)
        owner = np.repeat(np.arange(at, at + len(ends) - 1), np.diff(ends) // 2)
        stop = np.minimum(runs[:, 1], kept[owner])
        np.add.at(counts, owner, np.maximum(stop - np.maximum(runs[:, 0], first), 0))
        at += len(ends) - 1
    return np.where(is_whole, whole, counts)


class TokenTable:
    """The sequences of a file.

    counts    what became of the rows that they were made of
    folder    where digests of samples are kept; None where nothing is
    lengths   [N] int32, tokens of each sequence
    codes     [N] int64, codes of labels
    differs   [N] bool, of `TokenRow`
    cut       [N] bool, of `TokenRow`
    final     [N] bool, of `TokenRow`
    """

    def __init__(self, path: Path, counts: RowCounts, folder: Path | None = None) -> None:
        """Map the file.

        raises    OSError, pyarrow.ArrowInvalid when it is no such file
        """
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            if stream.schema != SCHEMA:
                raise pa.ArrowInvalid(f"{path} has other columns")
            batches = [batch for batch in stream if len(batch)]
        self.counts, self.folder = counts, folder
        self._ids = [_lists(batch.column("ids")) for batch in batches]
        self._spans = [_lists(batch.column("spans")) for batch in batches]
        self._numbers = [_lists(batch.column("numbers")) for batch in batches]
        self.lengths = _joined([np.diff(ends) for _, ends in self._ids], np.int32)
        self._starts = np.cumsum([0, *(len(batch) for batch in batches)])
        self.codes = _joined([np.from_dlpack(batch.column("code")) for batch in batches], np.int64)
        self.differs, self.cut, self.final = (
            _joined([_flags(batch, name) for batch in batches], bool)
            for name in ("differs", "cut", "final")
        )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @cached_property
    def largest_id(self) -> int:
        """The largest of all token ids; -1 where there is none."""
        return max((int(values.max()) for values, _ in self._ids if len(values)), default=-1)

    @property
    def batches(self) -> int:
        """Number of batches of the file."""
        return len(self._ids)

    def batch(self, index: int) -> tuple[int, Lists, Lists]:
        """The index of the first sequence of a batch, and ids and spans of its sequences."""
        return int(self._starts[index]), self._ids[index], self._spans[index]

    def ids(self, index: int) -> np.ndarray:
        """Token ids of a sequence, [n] int32; a view of the file."""
        return self._item(self._ids, index)

    def spans(self, index: int) -> np.ndarray:
        """Start and end of each trained run of a sequence, [runs, 2] int32; a view of the file."""
        return self._item(self._spans, index).reshape(-1, 2)

    @property
    def number_names(self) -> tuple[str, ...]:
        """Names of the columns of numbers beside each token."""
        layout = self.counts.layout
        return () if layout is None else tuple(layout.numbers)

    def numbers(self, index: int) -> np.ndarray:
        """Numbers beside the tokens of a sequence, [columns, n] float64; a view of the file."""
        return self._item(self._numbers, index).reshape(len(self.number_names), -1)

    def trained(self, first: int, max_length: int, *, whole: bool) -> np.ndarray:
        """How many tokens of each sequence are trained, [N] int64.

        first       tokens before this position are not counted
        max_length  tokens of a sequence that are kept
        whole       all tokens are trained, not only the spans, but where spans are final
        """
        is_whole = ~self.final & whole
        return _trained(self.lengths, self._spans, first, max_length, is_whole)

    def _item(self, chunks: Sequence[Lists], index: int) -> np.ndarray:
        batch = int(np.searchsorted(self._starts, index, "right")) - 1
        values, ends = chunks[batch]
        row = index - self._starts[batch]
        part: np.ndarray = values[ends[row] : ends[row + 1]]
        return part


# Arrow's own `to_numpy` imports pandas where it is installed, which takes a fifth of a second.


def _flags(batch: pa.RecordBatch, name: str) -> np.ndarray:
    return np.from_dlpack(batch.column(name).cast(pa.uint8())).view(np.bool_)


def _lists(column: Any) -> Lists:
    return np.from_dlpack(column.values), np.from_dlpack(column.offsets)


def _joined(parts: Sequence[np.ndarray], kind: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, kind), *parts]).astype(kind, copy=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence.

    input_ids  token ids
    labels     the same length, not shifted: the token's id, or -100 where it is not trained

    For losses with a name and functions, each of the same length, and read where there is a label:

    weights      factor of the token's loss; None: 1
    logprobs     log-probability of the token when it was sampled
    advantages   how much better than expected the token was
    inputs       further numbers, by names of one's own, for a function as loss

    desirable    for kto, whether the completion is wanted
    beyond       for kto, the end of the completion that `input_ids` lack because they are cut: a
                 shorter prompt of another sample may have room for it
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None
    desirable: bool | None = None
    inputs: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    beyond: tuple[int, ...] = ()

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        """Numbers of its tokens, by name."""
        fields = {name: getattr(self, name) for name in FIELDS}
        return {**{name: of for name, of in fields.items() if of is not None}, **self.inputs}

    @property
    def is_scored(self) -> bool:
        """Whether it says what only a loss with a name, or a function, reads."""
        return bool(self.numbers)


@dataclass(frozen=True, slots=True)
class Cut:
    """The sequences of a table as a job cuts them.

    max_length  tokens of a sequence that are kept
    whole       all tokens are trained, not only the spans, but where spans are final
    odd_spans   of pairs, only the second sequence is trained by its spans, the first one whole
    labelled    one token has a label, which is not the token's id
    judged      the code of a sequence says whether it is desirable
    """

    max_length: int
    whole: bool = False
    odd_spans: bool = False
    labelled: bool = False
    judged: bool = False


class TokenSamples(Sequence[Sample], ABC):
    """Samples whose tokens lie in tables; each is built when it is read."""

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Sample | Self:
        """One sample, or those of a slice."""
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        ids, labels = self.arrays(index)
        numbers = {name: tuple(own.tolist()) for name, own in self.numbers(index).items()}
        fields = {name: numbers.pop(name) for name in FIELDS if name in numbers}
        return Sample(
            tuple(ids.tolist()),
            tuple(labels.tolist()),
            desirable=self.is_desirable(index),
            beyond=tuple(self.beyond(index).tolist()),
            inputs=numbers,
            **fields,
        )

    @abstractmethod
    def is_desirable(self, index: int) -> bool | None:
        """Whether a sample is desirable; None where samples are not judged."""

    @abstractmethod
    def beyond(self, index: int) -> np.ndarray:
        """Tokens that are cut off a judged sample, [n] int32; none of others."""

    @property
    @abstractmethod
    def has_numbers(self) -> bool:
        """Whether samples have numbers beside their tokens."""

    @abstractmethod
    def numbers(self, index: int) -> dict[str, np.ndarray]:
        """Numbers beside the tokens of a sample by name, [n] float64 each."""

    @abstractmethod
    def arrays(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels of a sample, [n] int32 each; raises IndexError."""

    @abstractmethod
    def take(self, indices: np.ndarray) -> Self:
        """The samples with these indices."""

    @property
    @abstractmethod
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, [N] int32."""

    @abstractmethod
    def targets(self, first: int) -> np.ndarray:
        """How many tokens of each sample are trained, those before position `first` not counted."""

    @property
    @abstractmethod
    def largest_id(self) -> int:
        """The largest token id of the tables, cut or not."""

    @abstractmethod
    def digest(self) -> str:
        """The SHA-256 of all samples in their order, 32 hexadecimal digits of it.

        Hashed are the number of samples (8 bytes), where each ends (8 bytes each), all ids and all
        labels (4 bytes each). Tables that are kept keep their digests.
        """


class SampleTable(TokenSamples):
    """Samples of one table of tokens.

    table   the tokens
    rows    [N] indices of the table's sequences, one for each sample
    cut     what is made of them
    """

    def __init__(self, table: TokenTable, rows: np.ndarray, cut: Cut) -> None:
        """Hold no tokens of its own."""
        self.table, self.rows, self.cut = table, rows, cut

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.rows)

    def arrays(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `TokenSamples.arrays`."""
        return self._arrays(int(self.rows[index]))

    def is_desirable(self, index: int) -> bool | None:
        """See `TokenSamples.is_desirable`."""
        return bool(self.table.codes[self.rows[index]]) if self.cut.judged else None

    def beyond(self, index: int) -> np.ndarray:
        """See `TokenSamples.beyond`."""
        if not self.cut.judged:
            return np.empty(0, np.int32)
        return self.table.ids(int(self.rows[index]))[self.cut.max_length :]

    @property
    def has_numbers(self) -> bool:
        """See `TokenSamples.has_numbers`."""
        return bool(self.table.number_names)

    def numbers(self, index: int) -> dict[str, np.ndarray]:
        """See `TokenSamples.numbers`."""
        if not self.has_numbers:
            return {}
        numbers = self.table.numbers(int(self.rows[index]))[:, : self.cut.max_length]
        return dict(zip(self.table.number_names, numbers, strict=True))

    def take(self, indices: np.ndarray) -> SampleTable:
        """See `TokenSamples.take`."""
        return SampleTable(self.table, self.rows[indices], self.cut)

    @property
    def lengths(self) -> np.ndarray:
        """See `TokenSamples.lengths`."""
        lengths: np.ndarray = np.minimum(self.table.lengths[self.rows], self.cut.max_length)
        return lengths

    def targets(self, first: int) -> np.ndarray:
        """See `TokenSamples.targets`."""
        cut = self.cut
        trained = self.table.trained(first, cut.max_length, whole=cut.whole)
        if cut.odd_spans:
            trained[::2] = self.table.trained(first, cut.max_length, whole=True)[::2]
        return np.asarray(trained[self.rows])

    @property
    def largest_id(self) -> int:
        """See `TokenSamples.largest_id`."""
        return self.table.largest_id

    def digest(self) -> str:
        """See `TokenSamples.digest`."""
        if self.table.folder is None:
            return self._digest()
        which = hashlib.sha256(repr(self.cut).encode())
        which.update(self.rows.astype(np.int64).tobytes())
        return _kept_digest(self.table.folder, which.hexdigest(), self._digest)

    def _digest(self) -> str:
        if (np.diff(self.rows) < 0).any():
            pairs = [self._arrays(row) for row in self.rows.tolist()]
            return _digest(self.lengths, (i for i, _ in pairs), (labels for _, labels in pairs))
        return _digest(
            self.lengths,
            (self._flat(index, labels=False) for index in range(self.table.batches)),
            (self._flat(index, labels=True) for index in range(self.table.batches)),
        )

    def _flat(self, batch: int, *, labels: bool) -> np.ndarray:
        """Ids or labels of all samples of a batch, one behind the other.

        Computes the loss mask of a whole batch, as `_arrays` does of one sequence.
        """
        first, (values, ends), spans = self.table.batch(batch)
        start, stop = np.searchsorted(self.rows, (first, first + len(ends) - 1))
        rows = self.rows[start:stop] - first
        begins, lengths = ends[:-1].astype(np.int64), np.diff(ends)
        kept = np.minimum(lengths, self.cut.max_length)[rows].astype(np.int64)
        offsets = np.repeat(begins[rows] - (np.cumsum(kept) - kept), kept)
        index = offsets + np.arange(len(offsets))
        flat: np.ndarray = values[index]
        if not labels:
            return flat
        is_whole = ~self.table.final[first : first + len(lengths)] & self.cut.whole
        if is_whole.all():
            return flat
        runs = spans[0].reshape(-1, 2)
        owner = np.repeat(np.arange(len(lengths)), np.diff(spans[1]) // 2)
        edges = np.zeros(len(values) + 1, np.int32)
        np.add.at(edges, begins[owner] + runs[:, 0], 1)
        np.add.at(edges, begins[owner] + runs[:, 1], -1)
        trained = np.cumsum(edges[:-1]) > 0
        if self.cut.odd_spans:
            is_whole |= (first + np.arange(len(lengths))) % 2 == 0
        trained |= np.repeat(is_whole, lengths)
        if self.cut.labelled:
            codes = self.table.codes[first : first + len(lengths)]
            flat = np.repeat(codes, lengths)[index].astype(np.int32)
        return np.where(trained[index], flat, np.int32(NO_TARGET))

    def _arrays(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels of a sequence of the table, [n] int32 each.

        Computes the loss mask: labels are -100 (`NO_TARGET`) where no loss is counted, else the
        ids. `_flat` computes the same for all sequences of a batch.
        """
        ids, cut = self.table.ids(row)[: self.cut.max_length], self.cut
        if (cut.whole and not self.table.final[row]) or (cut.odd_spans and row % 2 == 0):
            return ids, ids
        labels = np.full(len(ids), NO_TARGET, np.int32)
        for start, stop in self.table.spans(row).tolist():
            labels[start:stop] = self.table.codes[row] if cut.labelled else ids[start:stop]
        return ids, labels


class MixedTable(TokenSamples):
    """Samples of several tables in one order.

    tables   whose samples these are
    origin   [N] index of the table of each sample
    places   [N] index of the sample in its table
    """

    def __init__(
        self, tables: Sequence[SampleTable], origin: np.ndarray, places: np.ndarray
    ) -> None:
        """Hold no tokens of its own."""
        self.tables, self.origin, self.places = tables, origin, places

    @classmethod
    def joined(cls, tables: Sequence[SampleTable]) -> MixedTable:
        """All samples of tables, one table after the other."""
        counts = [len(table) for table in tables]
        places = np.concatenate([np.arange(count) for count in counts])
        return cls(tables, np.repeat(np.arange(len(counts)), counts), places)

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.origin)

    def arrays(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `TokenSamples.arrays`."""
        return self.tables[int(self.origin[index])].arrays(int(self.places[index]))

    def is_desirable(self, index: int) -> bool | None:
        """See `TokenSamples.is_desirable`."""
        return self.tables[int(self.origin[index])].is_desirable(int(self.places[index]))

    def beyond(self, index: int) -> np.ndarray:
        """See `TokenSamples.beyond`."""
        return self.tables[int(self.origin[index])].beyond(int(self.places[index]))

    @property
    def has_numbers(self) -> bool:
        """See `TokenSamples.has_numbers`."""
        return any(table.has_numbers for table in self.tables)

    def numbers(self, index: int) -> dict[str, np.ndarray]:
        """See `TokenSamples.numbers`."""
        return self.tables[int(self.origin[index])].numbers(int(self.places[index]))

    def take(self, indices: np.ndarray) -> MixedTable:
        """See `TokenSamples.take`."""
        return MixedTable(self.tables, self.origin[indices], self.places[indices])

    @property
    def lengths(self) -> np.ndarray:
        """See `TokenSamples.lengths`."""
        return self._gathered([table.lengths for table in self.tables], np.int32)

    def targets(self, first: int) -> np.ndarray:
        """See `TokenSamples.targets`."""
        return self._gathered([table.targets(first) for table in self.tables], np.int64)

    @property
    def largest_id(self) -> int:
        """See `TokenSamples.largest_id`."""
        return max(table.largest_id for table in self.tables)

    def digest(self) -> str:
        """See `TokenSamples.digest`; kept with the first table, where all are kept."""
        folders = [each.table.folder for each in self.tables]
        if folders[0] is None or None in folders:
            return self._digest()
        which = hashlib.sha256(repr([folder and folder.name for folder in folders]).encode())
        for each in self.tables:
            which.update(repr((each.cut, len(each))).encode())
            which.update(each.rows.astype(np.int64).tobytes())
        which.update(self.origin.astype(np.int64).tobytes())
        which.update(self.places.astype(np.int64).tobytes())
        return _kept_digest(folders[0], which.hexdigest(), self._digest)

    def _digest(self) -> str:
        at = list(zip(self.origin.tolist(), self.places.tolist(), strict=True))
        ids = (self.tables[table].arrays(place)[0] for table, place in at)
        return _digest(self.lengths, ids, (self.tables[t].arrays(place)[1] for t, place in at))

    def _gathered(self, values: Sequence[np.ndarray], kind: Any) -> np.ndarray:
        gathered = np.zeros(len(self), kind)
        for table, own in enumerate(values):
            mine = self.origin == table
            gathered[mine] = own[self.places[mine]]
        return gathered


def mixed_order(
    counts: Sequence[int], weights: Sequence[float], seed: int, stopping_strategy: str
) -> tuple[np.ndarray, np.ndarray]:
    """From which data set each sample of a mixture is, and its index there.

    counts             samples of each data set, at least one
    weights            how often each is drawn from; need not add up to one
    stopping_strategy  first_exhausted or all_exhausted
    returns            both [N] int64
    source             `datasets.interleave_datasets`, whose order this is. It builds the rows too,
                       which takes some seconds for a million of them
    """
    sizes, shares = np.array(counts), np.array(weights) / np.sum(weights)
    rng, blocks, drawn = np.random.default_rng(seed), [], np.zeros(len(counts), np.int64)
    is_ended = np.any if stopping_strategy == "first_exhausted" else np.all
    while not is_ended(drawn >= sizes):
        blocks.append(rng.choice(len(counts), size=_DRAWN_AT_ONCE, p=shares))
        drawn += np.bincount(blocks[-1], minlength=len(counts))
    origin = np.concatenate(blocks)
    places, last = np.empty(len(origin), np.int64), []
    for number, size in enumerate(counts):
        own = np.flatnonzero(origin == number)
        places[own] = np.arange(len(own)) % size
        last += own[size - 1 : size].tolist()
    end = 1 + (min(last) if stopping_strategy == "first_exhausted" else max(last))
    return origin[:end], places[:end]


#: As `interleave_datasets` draws them; another number would give another order.
_DRAWN_AT_ONCE = 1000


def lengths_of(samples: Sequence[Sample]) -> np.ndarray:
    """Tokens of each sample, [N] int32."""
    if isinstance(samples, TokenSamples):
        return samples.lengths
    return np.array([len(sample.input_ids) for sample in samples], np.int32)


def targets_of(samples: Sequence[Sample], first: int) -> np.ndarray:
    """`TokenSamples.targets` of any samples, [N]."""
    if isinstance(samples, TokenSamples):
        return samples.targets(first)
    counts = [sum(label != NO_TARGET for label in each.labels[first:]) for each in samples]
    return np.array(counts, np.int64)


def largest_id(samples: Sequence[Sample]) -> int:
    """The largest token id of any samples, or of all tokens of their table."""
    if isinstance(samples, TokenSamples):
        return samples.largest_id
    return max(max(sample.input_ids) for sample in samples)


def digest_of(samples: Sequence[Sample]) -> str:
    """`TokenSamples.digest` of any samples."""
    if isinstance(samples, TokenSamples):
        digest, judged = samples.digest(), map(samples.is_desirable, range(len(samples)))
        more = bytes(flag for flag in judged if flag is not None)
        if more:
            cut = (samples.beyond(index) for index in range(len(samples)))
            more += b"".join(ids.astype(np.int32).tobytes() for ids in cut)
        if samples.has_numbers:
            more += _number_bytes(samples.numbers(index) for index in range(len(samples)))
        return hashlib.sha256(digest.encode() + more).hexdigest()[:_SHOWN] if more else digest
    parts = [[getattr(s, name) for s in samples] for name in ("input_ids", "labels")]
    ids, labels = ([np.array(line, np.int32) for line in lines] for lines in parts)
    digest = _digest(lengths_of(samples), ids, labels)
    if not any(sample.is_scored for sample in samples):
        return digest
    more = _number_bytes({name: np.array(of) for name, of in s.numbers.items()} for s in samples)
    return hashlib.sha256(digest.encode() + more).hexdigest()[:_SHOWN]


def _number_bytes(samples: Iterable[Mapping[str, np.ndarray]]) -> bytes:
    """A hash of the numbers beside the tokens of samples, by name."""
    digest = hashlib.sha256()
    for numbers in samples:
        for name, own in sorted(numbers.items()):
            digest.update(f"{name} {len(own)} ".encode())
            digest.update(own.astype(np.float64).tobytes())
    return digest.digest()


def _kept_digest(folder: Path, key: str, compute: Callable[[], str]) -> str:
    """A digest that is kept in a table's folder under a key, or a new one, which is kept then."""
    path = folder / f"{key[:32]}.digest"
    with suppress(OSError, ValueError):
        known = path.read_text("ascii")
        if len(known) == _SHOWN:
            return known
    digest = compute()
    with suppress(OSError):
        replace_shared_file(path, digest.encode())
    return digest


#: Hexadecimal digits of a digest.
_SHOWN = 32


def _digest(lengths: np.ndarray, ids: Iterable[np.ndarray], labels: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256(len(lengths).to_bytes(8, "little"))
    digest.update(np.cumsum(lengths, dtype=np.int64).tobytes())
    for line in chain(ids, labels):
        digest.update(line.tobytes())
    return digest.hexdigest()[:_SHOWN]
