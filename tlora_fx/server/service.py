"""The service behind its routes: who asks, the streams they hold, and why their jobs wait."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from starlette.datastructures import Headers

from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.errors import QuotaReached, TokenRefused
from tlora_fx.host.clock import SteadyClock
from tlora_fx.scheduler.explain import explained
from tlora_fx.scheduler.history import History
from tlora_fx.scheduler.snapshot_file import load_snapshot
from tlora_fx.server.ledger import LOCAL, User
from tlora_fx.server.store import ServiceStore
from tlora_fx.server.submission import Intake, IntakeLimits
from tlora_fx.server.view import RunView

#: Of a token, where it is a key of the Tinker API.
KEY_PREFIX = "tml-"
#: A token that was revoked is good for so long; streams look again each `REFRESH_SECONDS` of
#: `server.app`, so that both together stay below a second.
KNOWN_SECONDS = 0.25
#: Streams that a user has open at a time.
MAX_STREAMS = 64


def make_service(
    folder: Path, limits: IntakeLimits, *, open_to_all: bool, gpus: int = 1, gpu: str = "",
    policy: str = "", require_measured: Callable[[BaseSpec], None] = lambda base: None,
    now: SteadyClock | None = None,
) -> Service:  # fmt: skip
    """A service over a run's folder, with what a killed one left put right.

    require_measured   as of `Intake`
    now                as of `ServiceStore`
    raises             LedgerError
    """
    store = ServiceStore(folder, now)
    intake = Intake(store, limits, require_measured)
    intake.restore()
    view = RunView(store, folder, gpus=gpus, gpu=gpu, policy=policy)
    return Service(store, intake, view, folder, open_to_all)


@dataclass(eq=False)
class Service:
    """State and parts of the service that answer requests.

    open_to_all   requests without a token are answered while the ledger requires none; only where
                  this machine alone can connect
    """

    store: ServiceStore
    intake: Intake
    view: RunView
    folder: Path
    open_to_all: bool = True
    users: dict[str, tuple[float, User]] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    ending: bool = False

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tlora_http_requests", "Requests answered.", ("route", "code"), registry=self.registry
        )
        self.seconds = Histogram(
            "tlora_http_seconds", "Seconds to answer.", ("route",), registry=self.registry
        )
        self.registry.register(self)

    def token_of(self, headers: Headers) -> str | None:
        """The token that a request came with, as a bearer or as a key of the Tinker API."""
        bearer, key = _bearer(headers.get("authorization")), headers.get("x-api-key")
        if bearer is not None or key is None:
            return bearer
        token = key.removeprefix(KEY_PREFIX)
        # That API's clients send a key of any kind where none is needed.
        needless = self.open_to_all and not self.store.tokens_required()
        return None if needless and self.store.user_of(token) is None else token

    def user(self, token: str | None) -> User:
        """User who owns a token; raises TokenRefused."""
        if token is None:
            if self.open_to_all and not self.store.tokens_required():
                return User(LOCAL, admin=True)
            raise _refused("a token is needed")
        since, known = self.users.get(token, (float("-inf"), None))
        if known is not None and time.monotonic() - since < KNOWN_SECONDS:
            return known
        self.users.pop(token, None)
        user = self.store.user_of(token)
        if user is None:
            raise _refused("no such token")
        self.users[token] = (time.monotonic(), user)
        return user

    def take_stream(self, user: User) -> None:
        """Count a stream of a user, until its response has ended; raises QuotaReached."""
        if self.streams.get(user.name, 0) >= MAX_STREAMS:
            raise QuotaReached(
                "too many open streams",
                expected=f"at most {MAX_STREAMS} at a time",
                help="close pages and `tlora-fx client logs -f` that nobody watches",
            )
        self.streams[user.name] = self.streams.get(user.name, 0) + 1

    def explain(self, user: User, name: str, *, narrow: bool = False) -> str:
        """Explain why a job runs as it does, or waits; jobs of others are not named."""
        job = self.store.job(user, name)
        if job.status is None:
            text = f"{job.name}: {job.state}; {job.told or 'its file is being read'}"
        else:
            decided = self.store.rows("SELECT 1 FROM decisions LIMIT 1")
            snapshot = load_snapshot(self.folder / "state.json") if decided else None
            history = History.of_job(self.folder, job.name)
            text = explained(snapshot, history, job.name, narrow=narrow)
        names = [] if user.admin else self.store.names_of_others(user, text)
        if names:
            some = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
            text = re.sub(rf"(?<![\w.-])({some})(?![\w-])", "another's job", text)
        held = {"pause": "it is paused", "cancel": "it is being cancelled"}.get(job.wanted)
        return f"{text}\n  {held}" if held and job.active else text

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Metrics that Prometheus reads, of all users together."""
        everybody = User(LOCAL, admin=True)
        whole = self.view.overview(everybody)
        jobs = GaugeMetricFamily("tlora_jobs", "Jobs by state.", labels=["state"])
        for state, count in whole.jobs.items():
            jobs.add_metric([state], count)
        yield jobs
        running = [s.status for s in self.view.visible(everybody) if s.status.state == "running"]
        for name, text, value in (
            ("tlora_gpus", "GPUs of the run.", whole.gpus),
            ("tlora_gpus_busy", "GPUs that groups hold.", whole.busy),
            ("tlora_gpu_utilisation", "Share of GPUs held over ten minutes.", whole.utilisation),
            ("tlora_groups", "Groups that run.", len({status.group for status in running})),
            ("tlora_tokens_per_second", "Tokens of all running jobs.",
             sum(status.tokens_per_second or 0.0 for status in running)),
        ):  # fmt: skip
            yield GaugeMetricFamily(name, text, value)


def _refused(what: str) -> TokenRefused:
    return TokenRefused(
        what,
        expected="Authorization: Bearer TOKEN",
        help="set TLORA_FX_TOKEN or --token, for the Tinker SDK TINKER_API_KEY or api_key to "
        "tml-TOKEN; whoever runs the service makes one with `tlora-fx tokens add NAME -o RUN`",
    )


def _bearer(authorization: str | None) -> str | None:
    kind, _, token = (authorization or "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None
