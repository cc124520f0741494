"""The tokens of a job's data: a table that is there already, or the rows read and tokenised.

Jobs share a table when their data, their tokenizer and what decides the tokens of a row are the
same. What jobs differ in by `max_length` or by which tokens are trained is no reason to encode
again. Tables lie in `data` of the cache folder, each under a hash of all that decides it: the
digest of the file, the tokenizer, the job's settings, our own code and the versions of the
libraries. TLORA_FX_DATA_CACHE is the largest size of that folder in GiB; with 0 nothing is kept.

Much data is encoded by several processes. They are started by their own command and speak over
pipes: a fork of a process that has threads or a GPU is not safe, and the other ways to start one
run the user's script again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import pyarrow as pa

from tlora_fx.config.base_task import pools_first
from tlora_fx.config.job import Job
from tlora_fx.config.losses import reads_logprobs
from tlora_fx.errors import ChatTemplateError, DataError, DataFileError, MalformedRowError
from tlora_fx.host import environment
from tlora_fx.host.kept_objects import longest_unused
from tlora_fx.host.memory import usable_cpus
from tlora_fx.host.paths import cache_folder
from tlora_fx.host.sources import own_source
from tlora_fx.runtime.chats.conversations import BadRowError
from tlora_fx.runtime.chats.renderer import UnlocatedTurnError, template_of
from tlora_fx.runtime.checkpoints.digests import file_digest
from tlora_fx.runtime.data.encoding import DraftRow, LabelPosition, TextEncoder
from tlora_fx.runtime.data.layout import WINDOW, LaidOutRows, SampleLayout, layout_of
from tlora_fx.runtime.data.rows import data_files, read_rows
from tlora_fx.runtime.data.tables import (
    BadRow,
    RowCounts,
    TokenRow,
    TokenTable,
    record_batch,
    trained_tokens,
    write_batches,
)
from tlora_fx.runtime.data.text_files import DataRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

#: Rows that are tokenised by one call.
CHUNK_ROWS = 1024
#: Rows behind which more processes are worth their start, some seconds each.
FEW_ROWS = 32 * CHUNK_ROWS
MAX_PROCESSES = 16

FORMAT = 1
LIBRARIES = ("transformers", "tokenizers", "jinja2")
_open: WeakValueDictionary[str, TokenTable] = WeakValueDictionary()

Encode = Callable[[RowCounts], Iterable[pa.RecordBatch]]


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
    # Functions get all columns of numbers, whichever function it is.
    reads = job.named_loss if isinstance(job.named_loss, str) else job.named_loss is not None
    return (content, known, json.dumps(spec, sort_keys=True), job.method, base, reads)


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


class EncodedChunk(NamedTuple):
    """The sequences of some rows.

    rows        how many there were, bad ones too
    bad         rows of which no tokens could be made
    batch       the sequences of the others, as of `tables.SCHEMA`
    notes       what a user should know of the chat template, as far as rows have shown it
    """

    rows: int
    bad: list[BadRow]
    batch: pa.RecordBatch
    notes: tuple[str, ...]


class ChunkEncoder:
    """Encodes rows of one layout as a job reads them."""

    def __init__(
        self,
        job: Job,
        tokenizer: PreTrainedTokenizerBase,
        clock: datetime | None,
        layout: SampleLayout,
    ) -> None:
        """Encode no row yet."""
        self._setup = (job, tokenizer, clock, layout)
        self._encoder = TextEncoder(tokenizer, layout, job.data.append_eos, clock)
        self._draft: DraftRow = self._encoder.draft
        if job.base.is_classifier:
            base, most, position = job.base, job.max_length, _label_position(job)
            self._draft = partial(
                self._encoder.draft_label, base=base, most=most, position=position
            )
            if job.method == "reward":
                self._draft = partial(self._encoder.draft_scored, base=base, position=position)
        elif job.method == "kto":
            self._draft = self._encoder.draft_judged
        elif job.is_preference:
            self._draft = self._encoder.draft_pair
        elif layout.numbers:
            self._draft = partial(
                self._encoder.draft_numbered, reads_logprobs=reads_logprobs(job.named_loss)
            )

    def __reduce__(self) -> tuple[type[ChunkEncoder], tuple[object, ...]]:
        """A new one in another process, which gets neither rows nor models."""
        job, *others = self._setup
        bare = {"base": job.base.as_written(), "data": job.data.model_copy(update={"rows": None})}
        loss = job.named_loss if isinstance(job.named_loss, str) else None
        without = {**bare, "eval_data": None, "loss": loss}
        return ChunkEncoder, (job.model_copy(update=without), *others)

    def rows(self, chunk: Sequence[DataRow]) -> Iterator[tuple[TokenRow, ...] | BadRow]:
        """The sequences of each row, or what is wrong with it."""
        fields = [row.fields for row in chunk if row.fields is not None]
        encoded = iter(self._encoder.encode_rows(fields, self._draft))
        for row in chunk:
            made = BadRowError(row.reason) if row.fields is None else next(encoded)
            if isinstance(made, BadRowError):
                yield BadRow(row.where, str(made), isinstance(made, UnlocatedTurnError))
            else:
                yield made

    def __call__(self, chunk: Sequence[DataRow]) -> EncodedChunk:
        """All of them at once."""
        made = list(self.rows(chunk))
        good = chain.from_iterable(each for each in made if not isinstance(each, BadRow))
        bad = [each for each in made if isinstance(each, BadRow)]
        return EncodedChunk(len(chunk), bad, record_batch(list(good)), tuple(self._encoder.notes))


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


def encoded_chunks(rows: Iterable[DataRow], encoder: ChunkEncoder) -> Iterator[EncodedChunk]:
    """All rows in their order, by processes beside this one if there are many.

    raises   what reading the rows raises
    """
    left = iter(rows)

    def chunks() -> Iterator[list[DataRow]]:
        while chunk := list(islice(left, CHUNK_ROWS)):
            yield chunk

    yield from map(encoder, islice(chunks(), FEW_ROWS // CHUNK_ROWS))
    count = min(usable_cpus(), MAX_PROCESSES)
    first = next(chunks(), None)
    if first is None:
        return
    many = chain([first], chunks())
    with ExitStack() as stack:
        try:
            setup = pickle.dumps(encoder)
        except (pickle.PickleError, TypeError, AttributeError) as error:
            logger.info("one process encodes: %s", error)
            count = 1
        if count < 2:
            yield from map(encoder, many)
            return
        workers = _Workers(encoder, setup, count)
        stack.callback(workers.close)
        running: deque[Future[EncodedChunk]] = deque()
        for chunk in many:
            running.append(workers.submit(chunk))
            # Few wait, so that memory stays small.
            if len(running) > 2 * count:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


class _Workers:
    """Processes that encode, each with a thread here that waits for it."""

    def __init__(self, encoder: ChunkEncoder, setup: bytes, count: int) -> None:
        self._encoder = encoder
        self._own, self._here = threading.local(), threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="encode")
        self._start = partial(_started, setup, self._processes)

    def submit(self, chunk: list[DataRow]) -> Future[EncodedChunk]:
        """Encode a chunk when a process is free."""
        return self._threads.submit(self._encode, chunk)

    def _encode(self, chunk: list[DataRow]) -> EncodedChunk:
        try:
            if not hasattr(self._own, "process"):
                self._own.process = self._start()
            return _asked(self._own.process, chunk)
        except (OSError, EOFError, pickle.PickleError) as error:
            logger.info("a process that encodes has ended, this one does its work: %s", error)
            with self._here:
                return self._encoder(chunk)

    def close(self) -> None:
        """End the processes, also those that are at work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _started(setup: bytes, processes: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603  our own command
        [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        },
    )
    processes.append(process)
    assert process.stdin is not None
    process.stdin.write(setup)
    return process


def _asked(process: subprocess.Popen[bytes], chunk: list[DataRow]) -> EncodedChunk:
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump(chunk, process.stdin, pickle.HIGHEST_PROTOCOL)
    process.stdin.flush()
    encoded: EncodedChunk = pickle.load(process.stdout)  # noqa: S301  our own process
    return encoded


def serve() -> None:
    """Encode the chunks that come by standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    requests: IO[bytes] = sys.stdin.buffer
    encoder: Callable[[list[DataRow]], EncodedChunk] = pickle.load(requests)  # noqa: S301
    while True:
        try:
            chunk = pickle.load(requests)  # noqa: S301  from the process that started this one
        except EOFError:
            return
        pickle.dump(encoder(chunk), answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


def encode_once(
    keys: Sequence[str], encode: Encode, usable: Callable[[TokenTable], bool]
) -> TokenTable:
    """The table under one of the keys, else a new one, which is kept under the first.

    keys      none where nobody knows what decides the data
    encode    makes the batches of a table, and counts what became of the data's rows
    usable    whether a table that is there serves
    """
    if not keys:
        return _temporary(encode)
    with _locked(keys[0]) as is_writable:
        for key in keys:
            known = _open.get(key) or (_read(key) if is_writable else None)
            if known is not None and usable(known):
                _open[key] = known
                return known
        if is_writable:
            try:
                table = _built(keys[0], encode)
            except OSError as error:
                logger.warning("tokens cannot be kept in %s: %s", tables_folder(), error)
                table = _temporary(encode)
        else:
            table = _temporary(encode)
        _open[keys[0]] = table
        return table


def max_bytes() -> int:
    """How large all tables together may be; raises EnvironmentVariableWrong."""
    return environment.max_bytes(environment.DATA_CACHE)


def tables_folder() -> Path:
    """Where tables lie."""
    return cache_folder() / "data"


def table_key(*parts: object) -> str:
    """A hash of what decides a table, our own code and the libraries' versions among it."""
    code = own_source("runtime/data", "runtime/chats", "config")
    text = repr((FORMAT, code, [version(name) for name in LIBRARIES], parts))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _read(key: str) -> TokenTable | None:
    """The table in the folder under a key; None where none is that can be read."""
    folder = tables_folder() / key
    try:
        counts = json.loads((folder / "rows.json").read_text("utf-8"))
        counts["first_bad"] = [BadRow(*row) for row in counts["first_bad"]]
        if counts["layout"] is not None:
            seen, numbers = (counts["layout"].pop(name) for name in ("seen", "numbers"))
            seen = seen and frozenset(seen)
            counts["layout"] = SampleLayout(**counts["layout"], seen=seen, numbers=tuple(numbers))
        table = TokenTable(folder / "tokens.arrow", RowCounts(**counts), folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        logger.info("encoded data cannot be read from %s: %s", folder, error)
        return None
    with suppress(OSError):
        os.utime(folder)  # the oldest go first
    return table


def _built(key: str, encode: Encode) -> TokenTable:
    """A new table in the folder; raises OSError."""
    home = tables_folder()
    written, counts = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=home)), RowCounts()
    try:
        write_batches(written / "tokens.arrow", encode(counts))
        (written / "rows.json").write_text(json.dumps(asdict(counts), default=sorted), "utf-8")
        shutil.rmtree(home / key, ignore_errors=True)
        written.rename(home / key)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    table = TokenTable(home / key / "tokens.arrow", counts, home / key)
    _remove_oldest(home, keep=home / key)
    return table


def _temporary(encode: Encode) -> TokenTable:
    """A table whose file is gone when nothing maps it any more; raises DataFileError."""
    counts = RowCounts()
    try:
        with tempfile.TemporaryDirectory(prefix="tlora-fx-data-") as folder:
            path = Path(folder) / "tokens.arrow"
            write_batches(path, encode(counts))
            return TokenTable(path, counts)
    except OSError as error:
        raise DataFileError(
            "the tokens of the data cannot be written",
            path=tempfile.gettempdir(),
            found=error.strerror or error,
            help="free space there, or name another folder by TMPDIR",
        ) from error


@contextmanager
def _locked(key: str) -> Iterator[bool]:
    """One process encodes, others wait and read; whether the folder can be written."""
    home = tables_folder()
    if max_bytes() <= 0:
        yield False
        return
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / f".{key}.lock").open("w")
    except OSError as error:
        logger.warning("tokens cannot be kept in %s: %s", home, error)
        yield False
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


def _remove_oldest(home: Path, *, keep: Path) -> None:
    """Remove the tables that were used longest ago, until the rest fits, and what was left half."""
    yesterday = time.time() - 86_400
    for entry in home.glob(".*"):
        with suppress(OSError):
            if entry.stat().st_mtime < yesterday:
                shutil.rmtree(entry, ignore_errors=True)
                entry.unlink(missing_ok=True)
    tables = (path for path in home.iterdir() if path.is_dir() and not path.name.startswith("."))
    for folder in longest_unused(tables, max_bytes(), keep=keep):
        # Processes that have mapped its file keep what they have.
        shutil.rmtree(folder, ignore_errors=True)
        (home / f".{folder.name}.lock").unlink(missing_ok=True)
