"""The service's HTTP face: a typed API, a page, and metrics.

Every answer that is no success has the body `Problem`. A user sees and changes their own jobs
alone; another's job is as unknown as one that never was.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from pydantic import BaseModel, ConfigDict, Field
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlora_fx import __version__
from tlora_fx.errors import (
    JobUnknown,
    QuotaReached,
    RequestConflict,
    RequestRefused,
    SubmissionRefused,
    TloraError,
    TokenRefused,
    UploadRefused,
)
from tlora_fx.runtime.run_folder import METRICS
from tlora_fx.scheduler.explain import explained
from tlora_fx.scheduler.store import History, load_snapshot
from tlora_fx.server.store import LOCAL, ServiceStore, User, Wanted
from tlora_fx.server.submission import Intake, IntakeLimits
from tlora_fx.server.view import Event, GroupSpan, JobStatus, Overview, RunView, log_lines

LOG = logging.getLogger("tlora_fx.server")
#: A request's body without an upload.
BODY_BYTES = 1 << 20
REFRESH_SECONDS = 0.5
#: Between signs of life of a stream that has nothing to tell.
QUIET_SECONDS = 15.0
STATUS = {
    TokenRefused: 401, JobUnknown: 404, RequestConflict: 409, UploadRefused: 413,
    SubmissionRefused: 422, RequestRefused: 422, QuotaReached: 429,
}  # fmt: skip
#: The page loads nothing from elsewhere, and nobody frames it.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Problem(BaseModel):
    """What went wrong: its code in docs/errors.md, the mistake, its facts, and what to do."""

    code: str
    what: str
    facts: dict[str, str]
    help: str
    text: str

    @classmethod
    def of(cls, error: TloraError) -> Problem:
        """An error as a client reads it."""
        return cls(
            code=error.code, what=error.what, facts=error.facts, help=error.help, text=str(error)
        )


class SubmissionBody(BaseModel):
    """A job file, as text, and by name below it the SHA-256 of each upload that it reads."""

    model_config = ConfigDict(extra="forbid")

    job_file: str = Field(max_length=256 << 10)
    files: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(
        default={}, max_length=64
    )
    priority: int = Field(default=0, ge=0, le=1000)


class Submitted(BaseModel):
    """What was taken; replayed: it had been before."""

    submission: int
    jobs: tuple[str, ...]
    replayed: bool


class Uploaded(BaseModel):
    """A file that a submission may name."""

    sha256: str
    bytes: int


class Explanation(BaseModel):
    """Why a job runs as it does, or waits."""

    job: str
    text: str


class Cache(NamedTuple):
    """An explanation, and for which decision it holds."""

    ledger: tuple[int, float]
    text: str


@dataclass(eq=False)
class Service:
    """What requests are answered with.

    open_to_all   nobody needs a token, as long as there are no users; only on this machine
    """

    store: ServiceStore
    intake: Intake
    view: RunView
    folder: Path
    open_to_all: bool = True
    users: dict[str, tuple[float, User]] = field(default_factory=dict)
    explanations: dict[str, Cache] = field(default_factory=dict)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.requests = Counter(
            "tlora_http_requests", "Requests answered.", ("route", "code"), registry=self.registry
        )
        self.seconds = Histogram(
            "tlora_http_seconds", "Seconds to answer.", ("route",), registry=self.registry
        )
        self.registry.register(self)

    def user(self, token: str | None) -> User:
        """Who asks; raises TokenRefused."""
        if token is not None:
            since, user = self.users.get(token, (0.0, None))
            # A token that was revoked is good for another second.
            if user is None or time.monotonic() - since > 1.0:
                user = self.store.user_of(token)
                self.users.pop(token, None)
                if user is not None:
                    self.users[token] = (time.monotonic(), user)
            if user is not None:
                return user
        elif self.open_to_all and not any(self.store.users().values()):
            return User(LOCAL, admin=True)
        raise TokenRefused(
            "no such token" if token else "a token is needed",
            expected="Authorization: Bearer TOKEN",
            help="ask whoever runs the service for one: `tlora-fx tokens add NAME -o RUN`",
        )

    def explain(self, user: User, name: str) -> str:
        """Why a job runs as it does, or waits; jobs of others are not named."""
        owned = self.store.job(user, name)
        [(count, last)] = self.store.rows("SELECT count(*), coalesce(max(time), 0) FROM decisions")
        cached = self.explanations.get(owned.name)
        if cached is None or cached.ledger != (count, last):
            if owned.status is None:
                text = f"{owned.name}: {owned.state}; {owned.told or 'its file is being read'}"
            else:
                history = History.of_run(self.folder)
                snapshot = load_snapshot(self.folder / "state.json") if count else None
                text = explained(snapshot, history, owned.name)
            cached = self.explanations[owned.name] = Cache((count, last), text)
        names = [job.name for job in self.store.jobs() if job.user != user.name]
        strangers = [] if user.admin else sorted(names, key=len, reverse=True)
        pattern = "|".join(rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in strangers)
        told = re.sub(pattern, "another's job", cached.text) if pattern else cached.text
        held = {"pause": "it is paused", "cancel": "it is being cancelled"}.get(owned.wanted)
        return f"{told}\n  {held}" if held and owned.active else told

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What Prometheus reads, of all users together."""
        whole = self.view.overview(User(LOCAL, admin=True))
        jobs = GaugeMetricFamily("tlora_jobs", "Jobs by state.", labels=["state"])
        for state, count in whole.jobs.items():
            jobs.add_metric([state], count)
        yield jobs
        running = [span for span in self.view.groups if span.ended is None]
        rates = (s.status.tokens_per_second or 0.0 for s in self.view.visible(
            User(LOCAL, admin=True)) if s.status.state == "running")  # fmt: skip
        for name, text, value in (
            ("tlora_gpus", "GPUs of the run.", whole.gpus),
            ("tlora_gpus_busy", "GPUs that groups hold.", whole.busy),
            ("tlora_gpu_utilisation", "Share of GPUs held over ten minutes.", whole.utilisation),
            ("tlora_groups", "Groups that run.", len(running)),
            ("tlora_tokens_per_second", "Tokens of all running jobs.", sum(rates)),
        ):
            yield GaugeMetricFamily(name, text, value)


class LimitBody:
    """Answers 413 to a body that is longer than its route takes, however it is sent."""

    def __init__(self, app: ASGIApp, upload_bytes: int) -> None:
        self.app, self.upload_bytes = app, upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what comes."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        upload = scope["path"].startswith("/api/v1/files/")
        most = self.upload_bytes + 1 if upload else BODY_BYTES
        length = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        error = UploadRefused("the body is too large", expected=f"at most {most} bytes")
        if length.isdigit() and int(length) > most:
            await problem(error)(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > most:
                raise error
            return message

        await self.app(scope, counted, send)


def problem(error: TloraError, status: int | None = None) -> JSONResponse:
    """An error as an answer."""
    code = status or next((c for kind, c in STATUS.items() if isinstance(error, kind)), 500)
    headers = {"WWW-Authenticate": "Bearer"} if code == 401 else {}
    return JSONResponse(Problem.of(error).model_dump(), code, {**HEADERS, **headers})


def make_app(service: Service, hosts: tuple[str, ...] = ()) -> FastAPI:
    """The application over an open run.

    hosts   names by which it may be called beside addresses; where it needs no token a page of a
            stranger could otherwise call it by a name of theirs
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ending = asyncio.Event()
        task = asyncio.create_task(_refreshed(service, ending))
        app.state.ending = ending
        yield
        ending.set()
        await task

    app = FastAPI(
        title="tlora-fx", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="Submit LoRA jobs to a run, and watch them.",
        responses={
            code: {"model": Problem} for code in (401, 403, 404, 409, 413, 422, 429)
        },
    )  # fmt: skip
    app.add_middleware(LimitBody, upload_bytes=service.intake.limits.upload_bytes)
    _errors(app)
    _watched(app, service, hosts)
    _page(app)
    _mutations(app, service)
    _jobs(app, service)
    _whole(app, service)
    _streams(app, service)
    return app


async def _refreshed(service: Service, ending: asyncio.Event) -> None:
    """Keep the view fresh, by one thread."""
    while not ending.is_set():
        try:
            await run_in_threadpool(service.view.refresh)
        except Exception:
            LOG.exception("the view could not be refreshed", extra={"event": "error"})
        try:
            await asyncio.wait_for(ending.wait(), REFRESH_SECONDS)
        except TimeoutError:
            continue


def _errors(app: FastAPI) -> None:
    @app.exception_handler(TloraError)
    async def ours(request: Request, error: TloraError) -> Response:
        return problem(error)

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return problem(RequestRefused("a request is wrong", where=where, found=first["msg"]), 422)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        return problem(RequestRefused(str(error.detail), path=request.url.path), error.status_code)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        LOG.error("a request failed", exc_info=error, extra={"event": "error"})
        return problem(RequestRefused("the service failed", help="see its log"), 500)


def _watched(app: FastAPI, service: Service, hosts: tuple[str, ...]) -> None:
    @app.middleware("http")
    async def watch(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        begun = time.perf_counter()
        if why := _strange(request, service, hosts):
            response: Response = problem(RequestRefused(why, help="call it by its address"), 403)
        else:
            response = await call_next(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        route = getattr(request.scope.get("route"), "path", "")
        seconds = time.perf_counter() - begun
        service.requests.labels(route, str(response.status_code)).inc()
        service.seconds.labels(route).observe(seconds)
        if request.method != "GET":
            LOG.info(
                "%s %s %s",
                request.method,
                request.url.path,
                response.status_code,
                extra={"event": "request", "status": response.status_code, "seconds": seconds},
            )
        return response


def _strange(request: Request, service: Service, hosts: tuple[str, ...]) -> str:
    """Why a browser must have been sent by a page of somebody else; "" where it was not."""
    origin = request.headers.get("origin")
    host = request.headers.get("host", "")
    if request.method not in ("GET", "HEAD") and origin not in (
        None,
        f"{request.url.scheme}://{host}",
    ):
        return "a page of another origin asks"
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if service.open_to_all and name not in ("localhost", *hosts) and not _is_address(name):
        return "it is not called so"
    return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _page(app: FastAPI) -> None:
    assets = files("tlora_fx.server") / "assets"

    def serve(path: str, name: str, kind: str) -> None:
        async def asset() -> Response:
            return Response((assets / name).read_bytes(), media_type=kind)

        app.get(path, include_in_schema=False)(asset)

    serve("/", "index.html", "text/html")
    serve("/app.js", "app.js", "text/javascript")
    serve("/app.css", "app.css", "text/css")


def _asks(service: Service) -> Any:
    """The user of a request, as a parameter."""

    async def user(authorization: Annotated[str | None, Header()] = None) -> User:
        kind, _, token = (authorization or "").partition(" ")
        return service.user(token.strip() if kind.lower() == "bearer" else None)

    return Depends(user)


def _mutations(app: FastAPI, service: Service) -> None:
    asking = _asks(service)

    @app.put("/api/v1/files/{sha256}", status_code=201, tags=["submit"])
    async def upload(sha256: str, request: Request, user: User = asking) -> Uploaded:
        """Keep a file for submissions, by its SHA-256; the body is the file."""
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise RequestRefused("this is no SHA-256", found=sha256)
        size = await service.intake.upload(user, sha256, request.stream())
        return Uploaded(sha256=sha256, bytes=size)

    @app.post("/api/v1/submissions", status_code=201, tags=["submit"])
    def submit(
        body: SubmissionBody,
        response: Response,
        idempotency_key: Annotated[str, Header(pattern=r"^[!-~]{1,128}$")],
        user: User = asking,
    ) -> Submitted:
        """Submit the jobs of a file, once for each key; a replayed key answers as before."""
        taken = service.intake.submit(
            user, idempotency_key, body.job_file, body.files, body.priority
        )
        response.status_code = 200 if taken.replayed else 201
        return Submitted(submission=taken.number, jobs=taken.jobs, replayed=taken.replayed)

    def wanting(verb: str, wanted: Wanted, told: str) -> None:
        def change(name: str, user: User = asking) -> JobStatus:
            return service.view.show_now(service.store.want(user, name, wanted))

        change.__doc__, change.__name__ = told, verb
        path = f"/api/v1/jobs/{{name}}/{verb}"
        app.post(path, status_code=202, tags=["jobs"])(change)

    wanting("cancel", "cancel", "End a job: where it trains, after its step.")
    wanting("pause", "pause", "Let a job wait; it leaves its group, and no step is lost.")
    wanting("resume", "run", "Let a paused job go on from where it was.")


def _whole(app: FastAPI, service: Service) -> None:
    asking = _asks(service)
    view = service.view

    @app.get("/api/v1/overview", tags=["service"])
    def overview(user: User = asking) -> Overview:
        """The service as a whole."""
        return view.overview(user)

    @app.get("/api/v1/groups", tags=["service"])
    async def groups(user: User = asking) -> list[GroupSpan]:
        """Which groups stood on which GPUs, the newest thousand."""
        return view.spans(user)

    @app.get("/api/v1/events", tags=["service"])
    def events(
        user: User = asking, after: Annotated[int, Query(ge=0, lt=1 << 62)] = 0
    ) -> list[Event]:
        """The newest events behind a number."""
        return view.events(user, after)

    @app.get("/metrics", response_class=Response, tags=["service"])
    def metrics(user: User = asking) -> Response:
        """For Prometheus; of all users together."""
        return Response(generate_latest(service.registry), media_type="text/plain; version=0.0.4")


def _jobs(app: FastAPI, service: Service) -> None:
    asking = _asks(service)
    view = service.view

    @app.get("/api/v1/jobs", response_model=list[JobStatus], tags=["jobs"])
    async def jobs(
        user: User = asking, state: Annotated[str | None, Query(max_length=20)] = None
    ) -> Response:
        """A user's jobs, in order of submission."""
        bodies = [s.body for s in view.visible(user) if state in (None, s.status.state)]
        return Response(b"[" + b",".join(bodies) + b"]", media_type="application/json")

    @app.get("/api/v1/jobs/{name}", response_model=JobStatus, tags=["jobs"])
    async def job(name: str, user: User = asking) -> Response:
        """One job."""
        shown = view.shown.get(name)
        if shown is None or not (user.admin or shown.owned.user == user.name):
            owned = await run_in_threadpool(service.store.job, user, name)
            body = view.show_now(owned).model_dump_json().encode()
        else:
            body = shown.body
        return Response(body, media_type="application/json")

    @app.get("/api/v1/jobs/{name}/explain", tags=["jobs"])
    def explain(name: str, user: User = asking) -> Explanation:
        """Why a job runs as it does, or waits."""
        return Explanation(job=name, text=service.explain(user, name))

    @app.get("/api/v1/curves", tags=["jobs"])
    async def curves(user: User = asking) -> dict[str, list[tuple[int, float]]]:
        """The loss by step of each of a user's jobs, thinned."""
        shown = (one.owned.name for one in view.visible(user))
        return {name: m.curve.points for name in shown if (m := view.metrics.get(name))}

    @app.get("/api/v1/jobs/{name}/adapter", response_class=FileResponse, tags=["jobs"])
    def adapter(name: str, user: User = asking) -> FileResponse:
        """The folder of a job that has its adapter, as a tar file."""
        owned = service.store.job(user, name)
        folder = service.folder / owned.name
        if owned.active or not (folder / "adapter_model.safetensors").is_file():
            raise RequestConflict(
                "the job has no adapter", job=owned.name, found=owned.state, help="wait for its end"
            )
        with (
            NamedTemporaryFile(dir=service.store.folder, suffix=".tar", delete=False) as file,
            tarfile.open(fileobj=file, mode="w") as tar,
        ):
            for path in sorted(folder.iterdir()):
                if path.is_file() and not path.name.startswith("."):
                    tar.add(path, f"{owned.name}/{path.name}")
        remove = BackgroundTask(Path(file.name).unlink, missing_ok=True)
        return FileResponse(
            file.name,
            media_type="application/x-tar",
            filename=f"{owned.name}.tar",
            background=remove,
        )


def _streams(app: FastAPI, service: Service) -> None:
    asking = _asks(service)
    view = service.view

    @app.get("/api/v1/jobs/{name}/logs", response_class=StreamingResponse, tags=["jobs"])
    async def logs(name: str, user: User = asking, follow: bool = False) -> StreamingResponse:
        """A job's steps and evaluations as lines; follow: until it has ended."""
        owned = await run_in_threadpool(service.store.job, user, name)
        lines = _lines(app, service, user, owned.name, follow=follow)
        return StreamingResponse(lines, media_type="text/plain; charset=utf-8")

    @app.get("/api/v1/stream", response_class=StreamingResponse, tags=["service"])
    async def stream(user: User = asking, after: int = -1) -> StreamingResponse:
        """Server-sent events: `jobs` that changed, `groups` and `events`, as they come."""

        async def told() -> AsyncIterator[bytes]:
            version, event = after, view.last_event
            spans, quiet = b"", 0.0
            while not app.state.ending.is_set():
                changed = view.visible(user, version)
                version = max([version, *(shown.version for shown in changed)])
                if changed:
                    yield _sent("jobs", b"[" + b",".join(s.body for s in changed) + b"]")
                if view.last_event != event:
                    new = await run_in_threadpool(view.events, user, event)
                    event = view.last_event
                    yield _sent("events", _json(new))
                now = _json(view.spans(user))
                if now != spans:
                    spans = now
                    yield _sent("groups", now)
                quiet = 0.0 if changed else quiet + REFRESH_SECONDS
                if quiet >= QUIET_SECONDS:
                    quiet = 0.0
                    yield b": quiet\n\n"
                await asyncio.sleep(REFRESH_SECONDS)

        return StreamingResponse(told(), media_type="text/event-stream")


def _json(items: list[Any]) -> bytes:
    return json.dumps([item.model_dump() for item in items]).encode()


def _sent(kind: str, data: bytes) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


async def _lines(
    app: FastAPI, service: Service, user: User, name: str, *, follow: bool
) -> AsyncIterator[bytes]:
    """What a job's metrics tell, and what is new until it has ended or the service stops."""
    path, read = service.folder / name / METRICS, 0
    while True:
        # Asked before the file is read: once it has ended, nothing more comes.
        owned = await run_in_threadpool(service.store.job, user, name)
        content = await run_in_threadpool(_rest, path, read)
        whole = content[: content.rfind(b"\n") + 1]
        read += len(whole)
        for line in log_lines(whole):
            yield f"{line}\n".encode()
        if not whole and (not follow or not owned.active or app.state.ending.is_set()):
            yield f"{name}: {owned.state} {owned.reason or ''}".strip().encode() + b"\n"
            return
        if not whole:
            await asyncio.sleep(REFRESH_SECONDS)


def _rest(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(1 << 20)
    except OSError:
        return b""


def make_service(
    folder: Path, limits: IntakeLimits, *, open_to_all: bool, gpus: int = 1, gpu: str = "",
    policy: str = "",
) -> Service:  # fmt: skip
    """A service over a run's folder, with what a killed one left put right.

    raises   LedgerError
    """
    store = ServiceStore(folder)
    intake = Intake(store, limits)
    intake.restore()
    view = RunView(store, folder, gpus=gpus, gpu=gpu, policy=policy)
    return Service(store, intake, view, folder, open_to_all)
