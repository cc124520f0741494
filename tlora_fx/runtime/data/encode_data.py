"""The tokens of a job's data: a table that is there already, or the rows read and tokenised.

What jobs differ in by `max_length` or by which tokens are trained is no reason to encode again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from tlora_fx.config.base_task import pools_first
from tlora_fx.config.job import Job
from tlora_fx.errors import ChatTemplateError, DataError, MalformedRowError
from tlora_fx.runtime.checkpoints.digests import file_digest
from tlora_fx.runtime.data.chats import UnlocatedTurnError, template_of
from tlora_fx.runtime.data.conversations import BadRowError
from tlora_fx.runtime.data.encoding import DraftRow, LabelPosition, TextEncoder
from tlora_fx.runtime.data.layout import WINDOW, LaidOutRows, SampleLayout, layout_of
from tlora_fx.runtime.data.rows import data_files, read_rows
from tlora_fx.runtime.data.table_cache import encode_once, table_key
from tlora_fx.runtime.data.tables import RowCounts, TokenRow, TokenTable
from tlora_fx.runtime.data.text_files import DataRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Rows that are tokenised by one call.
CHUNK_ROWS = 1024


def tokens_of_data(
    job: Job,
    tokenizer: PreTrainedTokenizerBase,
    clock: datetime | None = None,
    limit: int | None = None,
) -> TokenTable:
    """The tokens of the rows that a job's `data` names.

    clock    what a chat template that asks for the time is told
    limit    rows are read until so many samples can be trained
    raises   DataError, one of its classes for each mistake
    """
    encoder = _RowEncoder(job, tokenizer, clock)
    if limit is not None:
        return encode_once((), lambda counts: encoder.first(limit, counts), lambda _: True)

    def serves(counts: RowCounts) -> bool:
        if counts.layout is None:
            return True
        if layout_of(job, counts.layout).on_completion:
            return counts.is_masked
        return not counts.template_faults

    asks = job.data.loss_on != "all" and False not in (
        job.completion_only_loss, job.assistant_only_loss,
    )  # fmt: skip
    parts = _decisive(job, tokenizer)
    keys = [table_key(*parts, clock, masked) for masked in (asks, not asks)] if parts else []
    return encode_once(keys, encoder.all, serves)


def _decisive(job: Job, tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    """What decides the tokens of a job's rows; nothing where that cannot be told."""
    known, files = tokenizer_digest(tokenizer), data_files(job.data, job.name)
    if known is None or not files:
        return ()
    try:
        content = [(path.suffixes, file_digest(path)) for path in files]
    except OSError:
        return ()
    spec = job.data.model_dump(exclude={"path", "loss_on", "skip_bad_rows", "streaming"})
    base: tuple[object, ...] = ()
    if job.base.is_classifier:
        base = (job.base.model_dump_json(), job.max_length)
    return (content, known, json.dumps(spec, sort_keys=True), job.method, base)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A hash of all that a tokenizer's tokens depend on; None of one that runs Python code."""
    if not tokenizer.is_fast:
        return None
    parts = (
        type(tokenizer).__qualname__,
        tokenizer.backend_tokenizer.to_str(),
        repr(tokenizer.chat_template),
        sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
        [getattr(tokenizer, name, None) for name in _FLAGS],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


#: Attributes of tokenizers that decide what they add.
_FLAGS = (
    "add_bos_token", "add_eos_token", "add_prefix_space", "truncation_side", "padding_side",
    "model_max_length", "clean_up_tokenization_spaces", "split_special_tokens",
)  # fmt: skip


class _RowEncoder:
    """Encodes the rows of a job's data, some at a time."""

    def __init__(
        self, job: Job, tokenizer: PreTrainedTokenizerBase, clock: datetime | None
    ) -> None:
        self.job, self.tokenizer, self._clock = job, tokenizer, clock
        self._encoder: TextEncoder | None = None
        self._draft: DraftRow
        self._position = _label_position(job) if job.base.is_classifier else None

    def all(self, counts: RowCounts) -> Iterator[TokenRow]:
        """The sequences of all rows."""
        rows = self._laid_out(counts, WINDOW)
        left = iter(rows)
        while chunk := list(islice(left, CHUNK_ROWS)):
            for row in self._encoded(chunk, counts):
                yield from row
        self._note(rows, counts)

    def first(self, limit: int, counts: RowCounts) -> Iterator[TokenRow]:
        """The sequences of so many rows that `limit` samples can be trained."""
        rows = self._laid_out(counts, min(WINDOW, limit))
        left, more = iter(rows), limit
        while more and (chunk := list(islice(left, min(more, CHUNK_ROWS)))):
            for row in self._encoded(chunk, counts):
                more -= all(self._is_trained(sequence) for sequence in row)
                yield from row
        self._note(rows, counts)

    def _laid_out(self, counts: RowCounts, window: int) -> LaidOutRows:
        """The rows of the data, of which as many are looked at for the columns."""
        rows = LaidOutRows(self.job, read_rows(self.job.data, self.job.name), window)
        counts.layout = rows.layout
        if rows.layout is not None:
            self._encoder = _text_encoder(self.job, self.tokenizer, self._clock, rows.layout)
            self._draft = self._draft_of(self._encoder)
        return rows

    def _note(self, rows: LaidOutRows, counts: RowCounts) -> None:
        """What is known at the end."""
        counts.unread = list(rows.unread)
        if self._encoder is not None:
            counts.notes = list(self._encoder.notes)
            # Where all tokens are trained, chats are not searched for those of the assistant.
            counts.is_masked = self._encoder.layout.on_completion or not self._encoder.has_chats

    def _is_trained(self, sequence: TokenRow) -> bool:
        """Whether a token of a sequence is trained after the job has cut it."""
        assert self._encoder is not None
        first, last = self.job.label_shift, min(len(sequence.ids), self.job.max_length)
        if not self._encoder.layout.on_completion:
            return last > first
        runs = zip(sequence.spans[::2], sequence.spans[1::2], strict=True)
        return any(max(start, first) < min(stop, last) for start, stop in runs)

    def _encoded(
        self, chunk: Sequence[DataRow], counts: RowCounts
    ) -> Iterator[tuple[TokenRow, ...]]:
        """The sequences of each row of a chunk that is not bad."""
        counts.rows += len(chunk)
        fields = [row.fields for row in chunk if row.fields is not None]
        encoded = iter(self._encoder.encode_rows(fields, self._draft) if self._encoder else ())
        for row in chunk:
            made = BadRowError(row.reason) if row.fields is None else next(encoded)
            if isinstance(made, BadRowError):
                self._add_bad_row(counts, row.where, made)
            else:
                yield made

    def _draft_of(self, encoder: TextEncoder) -> DraftRow:
        if self._position is not None:
            base, most = self.job.base, self.job.max_length
            return partial(encoder.draft_label, base=base, most=most, position=self._position)
        return encoder.draft_pair if self.job.is_preference else encoder.draft

    def _add_bad_row(self, counts: RowCounts, where: str, error: BadRowError) -> None:
        """Count a bad row; raises DataError unless the job skips them."""
        if not self.job.data.skip_bad_rows:
            raise bad_row(
                self.job, where, str(error), by_template=isinstance(error, UnlocatedTurnError)
            )
        place = where.removeprefix(self.job.data.path)
        counts.add_bad_row(place, str(error), isinstance(error, UnlocatedTurnError))


def _label_position(job: Job) -> LabelPosition:
    """Which token of a sample the base's class reads for its label.

    As in transformers: an encoder's first one, else the last one that is no padding.
    """
    from tlora_fx.model.backbone import load_config

    config = load_config(job.base)
    if pools_first(config.to_dict()):
        return lambda ids: 0
    padding = config.get_text_config().pad_token_id
    return lambda ids: max((at for at, token in enumerate(ids) if token != padding), default=0)


def bad_row(job: Job, where: str, reason: str, *, by_template: bool) -> DataError:
    """The error that names a row which cannot be used."""
    if by_template:
        return ChatTemplateError(
            "the chat template does not show which tokens the assistant wrote",
            file=where,
            job=job.name,
            found=reason,
            help="use a template with {% generation %}, or set loss_on: all",
        )
    return MalformedRowError(
        "a row of the data cannot be used",
        file=where,
        job=job.name,
        found=reason,
        help="mend the row, or set skip_bad_rows: true in the job's data",
    )


def _text_encoder(
    job: Job, tokenizer: PreTrainedTokenizerBase, clock: datetime | None, layout: SampleLayout
) -> TextEncoder:
    if layout.needs_template and not template_of(tokenizer):
        help = "name a chat model's tokenizer under base, or give prompt and completion columns"
        raise ChatTemplateError("the tokenizer has no chat template", job=job.name, help=help)
    return TextEncoder(tokenizer, layout, job.data.append_eos, clock)
