"""`tlora-fx serve`: a run that takes jobs over HTTP."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_address
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from tlora_fx.cli.arguments.options import option, takes_options
from tlora_fx.cli.arguments.run_options import (
    TURN_SECONDS,
    RunCommandOptions,
    StopSignals,
    placed,
    require_executor,
    require_output_and_times,
)
from tlora_fx.errors import ServiceRefused
from tlora_fx.scheduler.folder_kind import require_folder_of_service
from tlora_fx.server.answering import Answering, listen
from tlora_fx.server.log_lines import log_to_stderr
from tlora_fx.server.store import ServiceStore

#: Below the run's folder: the log and versions of the Tinker API.
TINKER_FOLDER = Path("service") / "tinker"

if TYPE_CHECKING:
    from tlora_fx.host.clock import SteadyClock
    from tlora_fx.server.control import EventLog
    from tlora_fx.server.submission import IntakeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommandOptions(RunCommandOptions):
    """Options of the command line: those of `run`, less a folder of job files."""

    jobs: Path = field(init=False, default=Path())
    until_empty: bool = field(init=False, default=False)
    forever: bool = field(init=False, default=True)
    output: Path | None = option(
        None,
        "Output folder, new or of a service to continue; runs/DATE-TIME if not given.",
        "-o",
        "--output",
    )
    host: str = option(
        "127.0.0.1", "Address to listen on; any but a loopback address requires access tokens."
    )
    require_tokens: bool = option(
        False,
        "Answer only requests with an access token, now and after every restart with the same -o.",
    )
    port: int = option(8642, "TCP port to listen on; 0 takes a free one.", min=0, max=65535)
    public_url: str | None = option(
        None,
        "Address at which browsers find the service if it is behind a proxy, such as "
        "https://train.example.com; requires access tokens.",
    )
    tls_cert: Path | None = option(
        None, "TLS certificate (PEM file); with it the service speaks HTTPS."
    )
    tls_key: Path | None = option(
        None,
        "Private key of the TLS certificate (PEM file), if it is not in the certificate's file.",
    )
    root: list[Path] | None = option(
        None,
        "Folder on this machine from which jobs may read base models, data and adapters; "
        "repeatable.",
    )
    max_upload: float | None = option(
        None,
        "Largest uploaded file, in MiB; if not given, 1024, or more if the largest adapter of "
        "--tinker needs more.",
        min=0,
    )
    max_stored: float = option(
        10.0, "Largest size of all uploads of a user together, in GiB.", min=0
    )
    keep_uploads: float | None = option(
        None, "Days to keep uploaded files that no job needs; for ever if not given.", min=0
    )
    keep_jobs: float | None = option(
        None, "Days to keep jobs that have ended; for ever if not given.", min=0
    )
    archive: Path | None = option(
        None, "Folder that gets a tar file of each job before --keep-jobs removes it."
    )
    log_format: str = option("text", "Format of the log on stderr: text or json.")

    compiled: bool = option(
        False,
        "Compile the layers with torch.compile; groups take longer to start, and --tinker compiles "
        "while it serves.",
        "--compile",
    )
    tinker: bool = option(
        False,
        "Also serve the Tinker API, to clients that call forward_backward, optim_step and sample "
        "from their own loop.",
    )
    tinker_base: str | None = option(
        None,
        "Hub id or folder of the base model of --tinker; a small one with random weights if not "
        "given.",
    )
    tinker_device: str = option("cpu", "Device of --tinker: cpu, or a GPU such as cuda:0.")
    tinker_models: int = option(
        8, "Models of --tinker that are on the device at a time; others wait.", min=2
    )
    tinker_rank: int = option(64, "Largest rank of a model of --tinker.", min=8, max=256)

    tinker_waiting: float = option(
        2.0,
        "Largest total size, in GiB, of one user's requests to --tinker that wait for an answer.",
        min=0.25,
    )
    tinker_price: float = option(
        0.0, "Price of an hour of the device of --tinker, for /metrics.", min=0
    )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        with suppress(ValueError):
            return ip_address(self.host).is_loopback
        return self.host == "localhost"


@takes_options
def run(options: ServeCommandOptions) -> None:
    """Run an HTTP service to which users submit jobs to train.

    Use it by `tlora-fx client`, by the web page (/) or by the HTTP API (/openapi.json). After
    Ctrl-C or a crash, start it again with the same -o to continue: all state is in that folder.
    """
    from tlora_fx.scheduler.policies import policy_of

    policy = policy_of(options.policy)
    options = _require_right(options)
    assert options.output is not None
    log_to_stderr(options.log_format)
    logging.getLogger("tlora_fx.server").info(
        "opens %s; the address follows, once requests are answered", options.output
    )

    store = _guarded_store(options.output, options)

    from tlora_fx.scheduler.estimates import Estimates
    from tlora_fx.scheduler.service import Submitters, opened
    from tlora_fx.server.control import Control, EventLog

    cluster, kind, adapted = placed(options)
    estimates = Estimates(cluster, tuple(options.profile or ()))
    # What was refused is its user's to submit anew.
    service = replace(
        options.service(kind, estimates), retries=False, removes_files=True,
        submitters=Submitters(store.user_of_file, store.user_of_job, store.wants),
    )  # fmt: skip
    events = EventLog(store, cluster.unit)
    with opened(
        store.inbox, options.output, cluster, policy, estimates.estimator, estimates,
        events, adapted(service),
    ) as running:  # fmt: skip
        running.before_advance = Control(store, options.output, running)
        # Only now: another service may hold the folder.
        with (
            StopSignals(running),
            _training(options, store.now, events, lambda: running.stopping) as (trainer, bell),
        ):
            answer = partial(
                _answer, options, cluster.gpus, cluster.gpu, policy.name, bell, store.now
            )
            with _answering(options, answer, events, lambda: running.stopping) as answering:
                while running.turn():
                    time.sleep(TURN_SECONDS)
                    answering.keep()
                    if trainer is not None:
                        trainer.keep()
    if running.stopping:
        raise KeyboardInterrupt(f"every group is safe; go on with -o {options.output}")


def _require_right(options: ServeCommandOptions) -> ServeCommandOptions:
    """The options with an output folder, after all checks that need no torch.

    raises    TloraError, typer.BadParameter
    """
    require_executor(options)
    options.require_passes()
    begun = require_output_and_times(options, require_folder_of_service)
    if options.log_format not in ("text", "json"):
        raise typer.BadParameter("--log-format is text or json")
    public_url = _public_url(options.public_url)
    for folder in options.root or ():
        if not folder.is_dir():
            raise ServiceRefused("there is no such folder", root=folder)
    for file in (options.tls_cert, options.tls_key):
        if file is not None and not file.is_file():
            raise ServiceRefused("there is no such file", found=file, help="see --tls-cert")
    if not begun:
        # A service that was killed may hold its port a moment longer.
        _require_port(options)
    output = options.output or Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return replace(options, public_url=public_url, output=output)


def _require_port(options: ServeCommandOptions) -> None:
    """Refuse an address that cannot be listened on, before torch is imported."""
    for each in listen(options.host, options.port):
        each.close()


def _public_url(text: str | None) -> str | None:
    """The public address without a slash at its end; raises ServiceRefused."""
    if text is None:
        return None
    try:
        url = urlsplit(text)
        right = url.scheme in ("http", "https") and url.hostname and not (url.query or url.fragment)
        right = right and url.username is None and url.port != 0
    except ValueError:
        right = False
    if not right:
        raise ServiceRefused(
            "this is no address of a service",
            expected="such as https://train.example.com or https://example.com/train",
            found=f"--public-url {text}",
        )
    return text.rstrip("/")


def _guarded_store(folder: Path, options: ServeCommandOptions) -> ServiceStore:
    """The run's store, once it is settled who must bring a token; raises ServiceRefused."""
    store = ServiceStore(folder)
    if options.require_tokens:
        store.require_tokens()
    if options.public_url:
        store.refuse_open_network(f"--public-url {options.public_url}")
    if not options.loopback:
        store.refuse_open_network(f"--host {options.host}")
    return store


@contextmanager
def _answering(
    options: ServeCommandOptions,
    answer: Callable[[list[socket.socket], Connection], None],
    events: EventLog,
    ended: Callable[[], bool],
) -> Iterator[Answering]:
    """Inside, requests are answered by a process of their own, which planning never keeps waiting.

    It ends with this process, however that ends.

    ended   whether the run shall end, and no request is answered
    """
    sockets = listen(options.host, options.port)
    answering = Answering(answer, sockets, partial(events.say, None, "warning", []))
    try:
        answering.start(ended)
        scheme = "https" if options.tls_cert else "http"
        host = f"[{options.host}]" if ":" in options.host else options.host
        port = sockets[0].getsockname()[1]
        if not ended():
            print(f"{scheme}://{host}:{port}", flush=True)  # noqa: T201  (a pipe shall hear it now)
        yield answering
    finally:
        answering.close()


@contextmanager
def _training(
    options: ServeCommandOptions, clock: SteadyClock, events: EventLog, ended: Callable[[], bool]
) -> Iterator[tuple[Answering | None, Path | None]]:
    """Inside, a trainer runs what clients of the Tinker API ask for, if it is served.

    ended    as of `training`
    yields   its process, and the socket by which it hears of requests
    """
    if not options.tinker:
        yield None, None
        return
    from tlora_fx.server.tinker.trainer import training
    from tlora_fx.training.options import EngineOptions

    assert options.output is not None
    engine = EngineOptions(
        options.output / TINKER_FOLDER, base=options.tinker_base, device=options.tinker_device,
        residents=options.tinker_models, max_rank=-(-options.tinker_rank // 8) * 8,
        compiled=options.compiled,
    )  # fmt: skip
    say = partial(events.say, None, "warning", [])
    with training(engine, options.log_format, say, clock, ended) as started:
        yield started


def _limits(options: ServeCommandOptions) -> IntakeLimits:
    """What users may send; once a trainer has said what its base is."""
    from tlora_fx.server.submission import UPLOAD_BYTES, IntakeLimits

    assert options.output is not None
    upload_bytes = UPLOAD_BYTES
    if options.max_upload is not None:
        upload_bytes = int(options.max_upload * (1 << 20))
    elif options.tinker:
        from tlora_fx.training.folders import LAYOUT
        from tlora_fx.training.peft_folders import largest_bytes

        base = json.loads((options.output / TINKER_FOLDER / LAYOUT).read_bytes())
        upload_bytes = max(upload_bytes, largest_bytes(**base))
    days, job_days = options.keep_uploads, options.keep_jobs
    return IntakeLimits(
        roots=tuple(options.root or ()), upload_bytes=upload_bytes,
        stored_bytes=int(options.max_stored * (1 << 30)),
        keep_seconds=None if days is None else days * 86_400.0,
        keep_job_seconds=None if job_days is None else job_days * 86_400.0,
        archive=options.archive,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip


def _answer(
    options: ServeCommandOptions, gpus: int, gpu: str, policy: str, bell: Path | None,
    clock: SteadyClock, sockets: list[socket.socket], parent: Connection,
) -> None:  # fmt: skip
    """Answer requests until the parent has ended; it alone hears signals.

    bell    of the trainer; None: the Tinker API is not served
    clock   of all processes of the service
    """
    from tlora_fx.scheduler.estimates import require_measured
    from tlora_fx.server.app import is_address, make_app
    from tlora_fx.server.connections import make_server
    from tlora_fx.server.service import make_service

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Threads that read or write for others do not keep who answers waiting.
    sys.setswitchinterval(0.001)
    log_to_stderr(options.log_format)
    assert options.output is not None
    service = make_service(
        options.output, _limits(options), open_to_all=options.loopback, gpus=gpus, gpu=gpu,
        policy=policy, now=clock,
        require_measured=partial(require_measured, gpu=gpu, files=tuple(options.profile or ())),
    )  # fmt: skip
    tinker = None
    if bell is not None:
        from tlora_fx.server.tinker.futures import Futures
        from tlora_fx.server.tinker.routes import Tinker
        from tlora_fx.training.log import CommandLog
        from tlora_fx.training.waiting import Waiting

        waiting = Waiting.of_user(int(options.tinker_waiting * (1 << 30)))
        log = CommandLog(options.output / TINKER_FOLDER, clock, waiting)
        tinker = Tinker(log, Futures(log, bell), options.tinker_price)
    hosts = () if is_address(options.host) else (options.host,)
    server = make_server(
        make_app(service, hosts, options.public_url or "", tinker),
        timeout_graceful_shutdown=5,
        ssl_certfile=options.tls_cert and str(options.tls_cert),
        ssl_keyfile=options.tls_key and str(options.tls_key),
    )  # fmt: skip
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.02)
    if server.started:
        parent.send(True)
        while thread.is_alive() and not parent.poll(1.0):
            continue
    service.ending = server.should_exit = True
    thread.join(10)
