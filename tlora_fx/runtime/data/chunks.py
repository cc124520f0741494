"""Rows encoded some at a time, for much data by several processes.

Processes are started by their own command and speak over pipes: a fork of a process that has
threads or a GPU is not safe, and the other ways to start one run the user's script again.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import pyarrow as pa

from tlora_fx.config.base_task import pools_first
from tlora_fx.config.job import Job
from tlora_fx.host.memory import usable_cpus
from tlora_fx.runtime.chats.conversations import BadRowError
from tlora_fx.runtime.chats.renderer import UnlocatedTurnError
from tlora_fx.runtime.data.encoding import DraftRow, LabelPosition, TextEncoder
from tlora_fx.runtime.data.layout import SampleLayout
from tlora_fx.runtime.data.tables import BadRow, TokenRow, record_batch
from tlora_fx.runtime.data.text_files import DataRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

#: Rows that are tokenised by one call.
CHUNK_ROWS = 1024
#: Rows behind which more processes are worth their start, some seconds each.
FEW_ROWS = 32 * CHUNK_ROWS
MAX_PROCESSES = 16


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
        elif job.is_preference:
            self._draft = self._encoder.draft_pair

    def __reduce__(self) -> tuple[type[ChunkEncoder], tuple[object, ...]]:
        """A new one in another process."""
        return ChunkEncoder, self._setup

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
