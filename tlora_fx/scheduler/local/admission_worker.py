"""A process that reads one job file, or prepares the jobs of one.

Whatever a stranger wrote is read here and never in the scheduler: a pattern that backtracks for
hours, numbers that fill the memory and data without an end cost this process alone. It holds
itself to the limits of its order, and leaves what it found as JSON lines.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter

from tlora_fx.config.base_files import require_base_files
from tlora_fx.config.job import Job
from tlora_fx.config.job_file import (
    load_job_file,
    require_trusted,
    require_trusted_functions,
)
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.errors import AdmissionError, TloraError
from tlora_fx.host.durable import replace_file
from tlora_fx.runtime.workers.protocol import EventWriter
from tlora_fx.scheduler.requests import FACTS, facts_of_job, keep_facts, request_of, shape_of
from tlora_fx.scheduler.state import REQUEST, JobRequest

#: Characters of a reason; a mistake may name what was found, however long that is.
REASON_CHARACTERS = 4000
#: That the scheduler reads of one file or job.
ANSWER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AdmissionOrder:
    """Order to one process.

    event_log      where it tells what it found
    file           a job file to read; "" where it prepares jobs
    jobs           `Job.model_dump(mode="json")` of the jobs to prepare
    again          the jobs were prepared by an earlier run: their data need only be there
    submitted      second of the run at which the order was written
    sources        by job prepared before, the run that it goes on from: its data and its base have
                   to be what they were
    cpu_seconds    for each job, or for the file
    memory_bytes   beyond what the process has at its start
    trust_remote_code   whether a base may run code of its own where the file asks for it
    facts          a folder where processes leave what they have compiled for each other; "": none
    """

    event_log: str
    facts: str = ""
    file: str = ""
    jobs: tuple[Mapping[str, Any], ...] = ()
    again: bool = False
    submitted: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)
    cpu_seconds: float = 240.0
    memory_bytes: int = 4 << 30
    trust_remote_code: bool = False

    def write(self, path: Path) -> None:
        """Leave the order where its process finds it."""
        replace_file(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """The order in a file."""
        return TypeAdapter(cls).validate_json(path.read_bytes())


class PreparedJob(NamedTuple):
    """Facts of a job that the scheduler needs.

    shape   of its base, as estimators take it; None: there is nothing to learn of it
    """

    request: JobRequest
    shape: ModelFacts | None


def prepare(job: Job, submitted: float) -> PreparedJob:
    """Check all of a job that needs no weights.

    submitted   seconds
    raises      TloraError: its data, its base or its targets are wrong; and whatever a library
                raises that meets numbers that nobody thought of
    """
    from tlora_fx.model.backbone import load_backbone
    from tlora_fx.runtime.checks import check_fits
    from tlora_fx.runtime.data.samples import load_job_data
    from tlora_fx.runtime.data.tables import lengths_of
    from tlora_fx.runtime.data.tokenizer import load_tokenizer
    from tlora_fx.runtime.optim.trainable import require_trainable

    require_base_files(job.base)
    facts = facts_of_job(job)
    backbone = load_backbone(job.base)
    data = load_job_data(job, load_tokenizer(job.base))
    check_fits(backbone, {job.name: data})
    require_trainable(job, data.steps)
    evaluated = lengths_of(data.evaluation)
    request = request_of(
        job, lengths=data.lengths, evaluated=evaluated, submitted=submitted, facts=facts
    )
    return PreparedJob(request, shape_of(job))


def restore(job: Job) -> ModelFacts | None:
    """The shape of a base whose job was prepared before.

    raises   DataFileError, BaseFileDamaged where data or base are gone or damaged
    """
    from tlora_fx.runtime.workers.job_files import require_files

    require_files(job)
    return shape_of(job)


def main(path: Path) -> bool:
    """Do what an order says; see `AdmissionOrder`."""
    serve(path, prepare, restore)
    return True


def serve(
    path: Path,
    prepare: Callable[[Job, float], PreparedJob],
    restore: Callable[[Job], ModelFacts | None],
) -> None:
    """Do what an order says, with these ways of preparing a job."""
    begun = time.monotonic()
    order = AdmissionOrder.read(path)
    writer = EventWriter(order.event_log)
    limits = _Limits(order)
    if order.facts:
        keep_facts(Path(order.facts))
    if order.file:
        limits.begin()
        _read_file(order, writer, limits)
    for spec in order.jobs:
        limits.begin()
        try:
            job = Job.model_validate(spec)
            require_trusted(job.base, None, trusted=order.trust_remote_code)
            require_trusted_functions([job], None, trusted=order.trust_remote_code)
            if order.again:
                shape = _dumped(restore(job))
                if job.name in order.sources:
                    from tlora_fx.runtime.identity import require_same_files

                    require_same_files(job, Path(order.sources[job.name]))
                _tell(writer, "restored", shape=shape)
            else:
                request, shape = prepare(job, order.submitted + time.monotonic() - begun)
                plain = REQUEST.dump_python(request, mode="json")
                _tell(writer, "prepared", request=plain, shape=_dumped(shape))
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is the reason)
            writer.write("refused", reason=limits.reason(error))


def _read_file(order: AdmissionOrder, writer: EventWriter, limits: _Limits) -> None:
    try:
        jobs = load_job_file(order.file, trust_remote_code=order.trust_remote_code).jobs
        _tell(writer, "read", jobs=[job.model_dump(mode="json") for job in jobs])
    except BaseException as error:  # noqa: BLE001  (whatever it is, it is the reason)
        writer.write("unreadable", reason=limits.reason(error))


def _tell(writer: EventWriter, kind: str, **facts: Any) -> None:
    """Tell what the scheduler can read: not too much, and nothing that no file can hold."""
    try:
        length = len(json.dumps(facts, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end].encode("ascii", "backslashreplace").decode()
        raise AdmissionError(
            "it holds half a character, which no file can hold",
            found=half,
            help="write the whole character, or both halves of its escape",
        ) from None
    if length > ANSWER_BYTES:
        raise AdmissionError(
            "it unfolds into too much",
            expected=f"at most {ANSWER_BYTES} bytes",
            found=length,
            help="put its jobs into several files, and do not repeat long text by aliases",
        )
    writer.write(kind, **facts)


def _dumped(shape: ModelFacts | None) -> Any:
    return None if shape is None else FACTS.dump_python(shape, mode="json")


class _Limits:
    """The limits of this process, which the kernel keeps."""

    def __init__(self, order: AdmissionOrder) -> None:
        self.order = order
        # What the kernel does at SIGTERM needs no Python that listens.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Where the machine, or a container's share of it, is full before, this ends and no other.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")
        # Private memory that can be written to; addresses say nothing where libraries are large.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = _private_bytes() + order.memory_bytes
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))

    def begin(self) -> None:
        """Start the time of another job; SIGXCPU ends a process that takes more."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = used.ru_utime + used.ru_stime + self.order.cpu_seconds
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        most = int(seconds) + 1
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))

    def reason(self, error: BaseException) -> str:
        """Reason for a user why a job or a file raised."""
        # Readers of a base wrap what their libraries raise.
        out_of_memory = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
        if out_of_memory or "can't allocate memory" in str(error):
            error = AdmissionError(
                "preparing it takes more memory than a run allows",
                expected=f"at most {self.order.memory_bytes / (1 << 30):.3g} GiB",
                help="if the job is right, allow more with --prepare-memory",
            )
        return reason_of(error)


def reason_of(error: BaseException) -> str:
    """Our own error's text, or what Python says, as text that every file can hold."""
    text = str(error) if isinstance(error, TloraError) else f"{type(error).__name__}: {error}"
    return text[:REASON_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def _private_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[5])
    return pages * os.sysconf("SC_PAGE_SIZE")
