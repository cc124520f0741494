"""The tokens of a job's data: a table that is there already, or the rows read and tokenised.

What jobs differ in by `max_length` or by which tokens are trained is no reason to encode again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import pyarrow as pa

from tlora_fx.config.job import Job
from tlora_fx.errors import ChatTemplateError, DataError, MalformedRowError
from tlora_fx.runtime.chats.renderer import template_of
from tlora_fx.runtime.checkpoints.digests import file_digest
from tlora_fx.runtime.data.chunks import CHUNK_ROWS, ChunkEncoder, EncodedChunk, encoded_chunks
from tlora_fx.runtime.data.layout import WINDOW, LaidOutRows, SampleLayout, layout_of
from tlora_fx.runtime.data.rows import data_files, read_rows
from tlora_fx.runtime.data.table_cache import encode_once, table_key
from tlora_fx.runtime.data.tables import (
    BadRow,
    RowCounts,
    TokenTable,
    record_batch,
    trained_tokens,
)
from tlora_fx.runtime.data.text_files import DataRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    if limit is not None:
        first = partial(_first_rows, job, tokenizer, clock, limit)
        return encode_once((), first, lambda _: True)

    def serves(table: TokenTable) -> bool:
        layout = table.counts.layout
        if layout is None or not (table.final.any() or table.counts.template_faults):
            return True
        # Of conversations, what is trained was found for jobs that train it as the first one did.
        return layout_of(job, layout).on_completion == layout.on_completion

    asks = job.data.loss_on != "all" and False not in (
        job.completion_only_loss, job.assistant_only_loss,
    )  # fmt: skip
    parts = _decisive(job, tokenizer)
    keys = [table_key(*parts, clock, masked) for masked in (asks, not asks)] if parts else []
    return encode_once(keys, partial(_all_rows, job, tokenizer, clock), serves)


def _decisive(job: Job, tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    """What decides the tokens of a job's rows; nothing where that cannot be told."""
    known, files = tokenizer_digest(tokenizer), data_files(job.data, job.name)
    if known is None or not files:
        return ()
    try:
        content = [(path.suffixes, file_digest(path)) for path in files]
    except OSError:
        return ()
    ignored = {"path", "loss_on", "skip_bad_rows", "streaming", "weight", "more"}
    spec = job.data.model_dump(exclude=ignored)
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


def _all_rows(
    job: Job, tokenizer: PreTrainedTokenizerBase, clock: datetime | None, counts: RowCounts
) -> Iterator[pa.RecordBatch]:
    """The sequences of all rows."""
    rows = LaidOutRows(job, read_rows(job.data, job.name))
    chunks: Iterable[EncodedChunk]
    if rows.layout is None:
        chunks = [_bad_chunk(list(rows))]
    else:
        encoder = _chunk_encoder(job, tokenizer, clock, rows.layout)
        chunks = encoded_chunks(rows, encoder)
    for chunk in chunks:
        _count(job, chunk, rows, counts)
        yield chunk.batch


def _first_rows(
    job: Job,
    tokenizer: PreTrainedTokenizerBase,
    clock: datetime | None,
    limit: int,
    counts: RowCounts,
) -> Iterator[pa.RecordBatch]:
    """The sequences of so many rows that `limit` samples can be trained."""
    rows = LaidOutRows(job, read_rows(job.data, job.name), min(WINDOW, limit))
    if rows.layout is None:
        _count(job, _bad_chunk(list(rows)), rows, counts)
        return
    encoder, missing = _chunk_encoder(job, tokenizer, clock, rows.layout), limit
    left = iter(rows)
    while missing and (some := list(islice(left, min(missing, CHUNK_ROWS)))):
        chunk = encoder(some)
        _count(job, chunk, rows, counts)
        missing -= _trained_samples(job, chunk.batch, whole=not rows.layout.on_completion)
        yield chunk.batch


def _trained_samples(job: Job, batch: pa.RecordBatch, *, whole: bool) -> int:
    """How many samples of some sequences can be trained after the job has cut them."""
    counts = trained_tokens(batch, job.label_shift, job.max_length, whole=whole)
    return int(counts.reshape(-1, job.sequences_per_sample).all(axis=1).sum())


def _bad_chunk(rows: Sequence[DataRow]) -> EncodedChunk:
    """Rows none of which can be read."""
    bad = [BadRow(row.where, row.reason, by_template=False) for row in rows]
    return EncodedChunk(len(rows), bad, record_batch([]), ())


def _count(job: Job, chunk: EncodedChunk, rows: LaidOutRows, counts: RowCounts) -> None:
    """Count what became of some rows; raises DataError for a bad one unless the job skips them."""
    counts.rows += chunk.rows
    for row in chunk.bad:
        if not job.data.skip_bad_rows:
            raise bad_row(job, row.place, row.reason, by_template=row.by_template)
        counts.add_bad_row(row._replace(place=row.place.removeprefix(job.data.path)))
    counts.layout, counts.unread = rows.layout, list(rows.unread)
    counts.notes += [note for note in chunk.notes if note not in counts.notes]


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


def _chunk_encoder(
    job: Job, tokenizer: PreTrainedTokenizerBase, clock: datetime | None, layout: SampleLayout
) -> ChunkEncoder:
    if layout.needs_template and not template_of(tokenizer):
        help = "name a chat model's tokenizer under base, or give prompt and completion columns"
        raise ChatTemplateError("the tokenizer has no chat template", job=job.name, help=help)
    return ChunkEncoder(job, tokenizer, clock, layout)
