"""`tlora-fx serve`: a run that takes jobs over HTTP."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlora_fx.cli.options import takes_options
from tlora_fx.cli.run import (
    TURN_SECONDS,
    RunCommandOptions,
    StopSignals,
    placed,
    require_executor,
)
from tlora_fx.errors import ServiceRefused

if TYPE_CHECKING:
    import uvicorn

    from tlora_fx.scheduler.service import SchedulerService
    from tlora_fx.server.app import Service

START_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommandOptions(RunCommandOptions):
    """What the command line says: as for `run`, less a folder of job files."""

    jobs: Path = field(init=False, default=Path())
    until_empty: bool = field(init=False, default=False)
    forever: bool = field(init=False, default=True)
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder of the run; begun or new.")
    ] = None
    host: Annotated[
        str, typer.Option(help="Where to listen; elsewhere than here it needs tokens.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8642
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM): serve HTTPS.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its key, if not in the same file.")] = None
    root: Annotated[
        list[Path] | None,
        typer.Option(help="Folder that jobs may read bases, data, adapters from; repeatable."),
    ] = None
    max_upload: Annotated[float, typer.Option(min=0, help="MiB of one uploaded file.")] = 256.0
    max_stored: Annotated[float, typer.Option(min=0, help="GiB of a user's uploads.")] = 10.0
    log_format: Annotated[str, typer.Option(help="Of the log on stderr: text or json.")] = "text"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        with suppress(ValueError):
            return ip_address(self.host).is_loopback
        return self.host == "localhost"


@takes_options
def run(options: ServeCommandOptions) -> None:
    """Train jobs that come over HTTP: `tlora-fx client`, the API (/openapi.json), the page (/).

    All is written down: killed or stopped, it goes on when it is started again with the same -o.
    """
    from tlora_fx.scheduler.policies import policy_of

    policy = policy_of(options.policy)
    require_executor(options)
    if options.log_format not in ("text", "json"):
        raise typer.BadParameter("--log-format is text or json")
    for folder in options.root or ():
        if not folder.is_dir():
            raise ServiceRefused("there is no such folder", root=folder)
    for file in (options.tls_cert, options.tls_key):
        if file is not None and not file.is_file():
            raise ServiceRefused("there is no such file", found=file, help="see --tls-cert")
    output = options.output or Path("runs") / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    _log_to_stderr(options.log_format)
    limits = _limits(options)

    from tlora_fx.server.store import ServiceStore

    store = ServiceStore(output)
    if not options.loopback:
        store.require_tokens(options.host)

    from tlora_fx.scheduler.service import Estimates, opened
    from tlora_fx.server.app import make_service
    from tlora_fx.server.control import Control, EventLog

    cluster, kind, adapted = placed(options)
    estimates = Estimates(cluster, tuple(options.profile or ()))
    callback = EventLog(store)
    with opened(
        store.inbox, output, cluster, policy, estimates.estimator, estimates, callback,
        adapted(options.service(kind, estimates.layout_of)),
    ) as running:  # fmt: skip
        running.before_advance = Control(store, output, running)
        # Only now: another service may hold the folder.
        service = make_service(
            output, limits, open_to_all=options.loopback,
            gpus=cluster.gpus, gpu=cluster.gpu, policy=policy.name,
        )  # fmt: skip
        _serve(options, service, running)
    if running.stopping:
        raise KeyboardInterrupt(f"every group is safe; go on with -o {output}")


def _limits(options: ServeCommandOptions) -> Any:
    from tlora_fx.server.submission import IntakeLimits

    return IntakeLimits(
        tuple(options.root or ()),
        int(options.max_upload * (1 << 20)),
        int(options.max_stored * (1 << 30)),
        options.trust_remote_code,
    )


def _serve(options: ServeCommandOptions, service: Service, running: SchedulerService) -> None:
    """Turn the run until it is stopped, while a thread answers requests."""
    import uvicorn

    from tlora_fx.server.app import make_app

    hosts = () if ip_or_local(options.host) else (options.host,)
    config = uvicorn.Config(
        make_app(service, hosts), options.host, options.port, access_log=False, log_config=None,
        ssl_certfile=options.tls_cert and str(options.tls_cert),
        ssl_keyfile=options.tls_key and str(options.tls_key), timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=_answer, args=(server, running), daemon=True)
    signals = StopSignals(running)
    with signals:
        thread.start()
        _announce(options, server, thread)
        while running.turn():
            time.sleep(TURN_SECONDS)
    server.should_exit = True
    thread.join(10)


def _answer(server: uvicorn.Server, running: SchedulerService) -> None:
    """Answer until the end; a server that ends by itself stops the run, and all is safe."""
    try:
        with suppress(SystemExit):
            server.run()
    finally:
        running.stop()


def _announce(
    options: ServeCommandOptions, server: uvicorn.Server, thread: threading.Thread
) -> None:
    """Say where it listens, once it does."""
    end = time.monotonic() + START_SECONDS
    while not server.started and thread.is_alive() and time.monotonic() < end:
        time.sleep(0.02)
    if not server.started:
        raise ServiceRefused(
            "it cannot listen there",
            found=f"{options.host}:{options.port}",
            help="choose another --port; the log says why",
        )
    port = server.servers[0].sockets[0].getsockname()[1]
    scheme = "https" if options.tls_cert else "http"
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"{scheme}://{host}:{port}", flush=True)  # noqa: T201  (a pipe shall hear it now)


def ip_or_local(host: str) -> bool:
    """Whether a host is an address."""
    with suppress(ValueError):
        return bool(ip_address(host))
    return False


class _JsonLines(logging.Formatter):
    """A line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, message, and what comes with it."""
        known = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime"}
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **{key: value for key, value in record.__dict__.items() if key not in known},
        }
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def _log_to_stderr(kind: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(message)s  %(jobs)s", defaults={"jobs": ""})
    handler.setFormatter(_JsonLines() if kind == "json" else plain)
    for name in ("tlora_fx.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO if name.startswith("tlora") else logging.WARNING)
        logger.addHandler(handler)
        logger.propagate = False
