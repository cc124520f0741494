"""The service's HTTP face: a typed API, a page, and metrics.

Every answer that is no success has the body `Problem`. A user sees and changes their own jobs
alone; another's job is as unknown as one that never was.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry, Metric, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlora_fx.config.hyperparameters import hyperparameters
from tlora_fx.errors import (
    AdapterFolderError,
    JobUnknown,
    LedgerError,
    QueueFull,
    QuotaReached,
    RequestConflict,
    RequestGone,
    RequestRefused,
    StorageFailed,
    SubmissionRefused,
    TloraError,
    TokenRefused,
    UploadRefused,
    did_you_mean,
)
from tlora_fx.host.durable import whole_lines
from tlora_fx.host.version import __version__
from tlora_fx.runtime.run_folder import METRICS
from tlora_fx.server.archives import packed
from tlora_fx.server.ledger import User
from tlora_fx.server.log_lines import SERVICE_ENDING, TOKEN_GONE
from tlora_fx.server.service import Service
from tlora_fx.server.store import STATES, Page
from tlora_fx.server.view import Event, GroupSpan, JobStatus, Overview, log_lines

if TYPE_CHECKING:
    from tlora_fx.server.tinker.routes import Tinker

logger = logging.getLogger(__name__)
#: A request's body without an upload; an upload has a bound of its own.
BODY_BYTES, ANY_BYTES = 1 << 20, 1 << 62
REFRESH_SECONDS = 0.5
#: Of a wrong value, in an answer.
FOUND_CHARACTERS = 80
#: Jobs of a page, at most.
PAGE_JOBS = 1000
#: Between looks for uploads that nobody needs.
COLLECT_SECONDS = 3600.0
#: Between two tries to write job files that a disk did not take.
HAND_OVER_SECONDS = 5.0
#: Between signs of life of a stream that has nothing to tell.
QUIET_SECONDS = 15.0
#: After which a request is sent again that found too many waiting.
QUEUE_FULL_SECONDS = "1"
#: Status of an answer to a body that is too large.
TOO_LARGE = 413
#: Status in the log of a request whose client closed the connection before its end.
HUNG_UP = 499
STATUS = {
    TokenRefused: 401, JobUnknown: 404, RequestConflict: 409, RequestGone: 410, UploadRefused: 413,
    SubmissionRefused: 422, RequestRefused: 422, AdapterFolderError: 422, QuotaReached: 429,
    QueueFull: 429, StorageFailed: 507,
}  # fmt: skip
#: Of a disk that takes nothing more.
NO_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
#: What SQLite says then.
LEDGER_FULL = "database or disk is full"
#: Paths that are answered to everybody, under any name.
HEALTH = ("/healthz", "/readyz")
#: A proxy hands a stream on as it comes.
UNBUFFERED = {"X-Accel-Buffering": "no"}
#: The page loads nothing from elsewhere, and nobody frames it.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Problem(BaseModel):
    """Error in an answer: its code in docs/errors.md, the mistake, its facts, and what to do."""

    code: str
    what: str
    facts: dict[str, str]
    help: str
    text: str


class SubmissionBody(BaseModel):
    """A job file, as text, and by name below it the SHA-256 of each upload that it reads."""

    model_config = ConfigDict(extra="forbid")

    job_file: str = Field(max_length=256 << 10)
    files: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(
        default={}, max_length=64
    )
    priority: int = Field(default=0, ge=0, le=1000)


class Submitted(BaseModel):
    """Accepted submission; `replayed` where it had been accepted before."""

    submission: int
    jobs: tuple[str, ...]
    replayed: bool


class Uploaded(BaseModel):
    """A file that a submission may name."""

    sha256: str
    bytes: int


class Health(BaseModel):
    """State of the process that answers; `status` is "ok", or why it is not ready."""

    status: str


class Explanation(BaseModel):
    """Explanation of why a job runs as it does, or waits."""

    job: str
    text: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of a request: its user, the service, and the token that it came with."""

    user: User
    service: Service
    token: str | None

    def again(self) -> User | None:
        """The user as they are now; None: the token is no longer accepted."""
        try:
            return self.service.user(self.token)
        except TokenRefused:
            return None


async def _caller(
    request: Request, authorization: Annotated[str | None, Header()] = None
) -> Caller:
    service: Service = request.app.state.service
    token = service.token_of(request.headers)
    return Caller(service.user(token), service, token)


By = Annotated[Caller, Depends(_caller)]


class CountedStream(StreamingResponse):
    """A stream that counts among its user's from before its first byte until its end.

    One too many is not begun: sending it raises QuotaReached.
    """

    def __init__(self, by: Caller, content: AsyncIterator[bytes], media_type: str) -> None:
        super().__init__(content, media_type=media_type, headers=UNBUFFERED)
        self._by = by

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        # Not before: a response that is never sent has no end.
        self._by.service.take_stream(self._by.user)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._by.service.streams[self._by.user.name] -= 1


api = APIRouter(prefix="/api/v1")


@api.put("/files/{sha256}", status_code=201, tags=["submit"], max_body_size=ANY_BYTES)
async def upload(sha256: str, request: Request, by: By) -> Uploaded:
    """Keep a file for submissions, by its SHA-256; the body is the file."""
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise RequestRefused("this is no SHA-256", found=sha256)
    size = await by.service.intake.upload(by.user, sha256, request.stream())
    return Uploaded(sha256=sha256, bytes=size)


@api.post("/submissions", status_code=201, tags=["submit"])
def submit(
    body: SubmissionBody,
    response: Response,
    idempotency_key: Annotated[str, Header(pattern=r"^[!-~]{1,128}$")],
    by: By,
) -> Submitted:
    """Submit the jobs of a file, once for each key; a replayed key answers as before."""
    taken = by.service.intake.submit(
        by.user, idempotency_key, body.job_file, body.files, body.priority
    )
    response.status_code = 200 if taken.replayed else 201
    return Submitted(submission=taken.number, jobs=taken.jobs, replayed=taken.replayed)


def _page(
    after: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None,
    before: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_JOBS)] = PAGE_JOBS,
    state: Annotated[str | None, Query(max_length=20)] = None,
    ended: bool | None = None,
) -> Page:
    if after is not None and before is not None:
        raise RequestRefused(
            "'after' and 'before' cannot be given together", help="leave out one of them"
        )
    if state is not None and state not in STATES:
        raise RequestRefused(
            "no job can be in this state",
            expected=", ".join(STATES),
            found=state,
            help=did_you_mean(state, STATES),
        )
    return Page(after, before, limit, state, ended)


Paged = Annotated[Page, Depends(_page)]


@api.get("/jobs", response_model=list[JobStatus], tags=["jobs"])
def jobs(by: By, page: Paged) -> Response:
    """A user's jobs, in order of submission, a page at a time.

    after: the `number` of the last job that is known; the page has those behind it. before: those
    before that number instead, the newest first. A page with fewer than `limit` jobs is the last.
    state: only jobs in this state. ended: only jobs that have ended, or that have not.
    """
    shown = by.service.view.page(by.user, page)
    return Response(b"[" + b",".join(s.body for s in shown) + b"]", media_type="application/json")


@api.get("/jobs/{name}", response_model=JobStatus, tags=["jobs"])
async def job(name: str, by: By) -> Response:
    """One job."""
    view = by.service.view
    shown = view.shown.get(name)
    if shown is None or not (by.user.admin or shown.owned.user == by.user.name):
        shown = await run_in_threadpool(view.one, by.user, name)
    return Response(shown.body, media_type="application/json")


@api.get("/jobs/{name}/curve", tags=["jobs"])
def curve(name: str, by: By) -> list[tuple[int, float]]:
    """The loss of one job by step, thinned."""
    return by.service.view.curve(by.user, name)


@api.post("/jobs/{name}/{verb}", status_code=202, tags=["jobs"])
def change(name: str, verb: Literal["cancel", "pause", "resume"], by: By) -> JobStatus:
    """Say what a job shall do.

    cancel: end, where it trains after its step. pause: leave its group, and wait; no step is lost.
    resume: go on from where it was.
    """
    wanted = by.service.store.want(by.user, name, "run" if verb == "resume" else verb)
    return by.service.view.show(wanted).status


@api.delete("/jobs/{name}", status_code=204, tags=["jobs"])
def remove(name: str, by: By) -> None:
    """Remove a job that has ended, with its folder; GPU-hours that it used stay used."""
    by.service.store.remove(by.user, name)
    by.service.intake.empty_trash()


@api.get("/jobs/{name}/explain", tags=["jobs"])
def explain(name: str, by: By, narrow: bool = False) -> Explanation:
    """Explain why a job runs as it does, or waits; narrow: by short lines, not by a wide table."""
    return Explanation(job=name, text=by.service.explain(by.user, name, narrow=narrow))


@api.get("/jobs/{name}/hyperparameters", tags=["jobs"])
def job_hyperparameters(name: str, by: By) -> dict[str, str]:
    """Hyperparameters of a job by their names in the job file.

    The main ones, and those that are not at their defaults.
    """
    owned = by.service.store.job(by.user, name)
    return hyperparameters(by.service.store.described(owned.submission).get(owned.name, {}))


@api.get("/curves", tags=["jobs"])
def curves(by: By, page: Paged) -> dict[str, list[tuple[int, float]]]:
    """The loss by step, thinned, of each job of a page; the page is asked for as of `/jobs`."""
    return by.service.view.curves(by.user, page)


@api.get("/jobs/{name}/adapter", response_class=StreamingResponse, tags=["jobs"])
def adapter(name: str, by: By) -> StreamingResponse:
    """The folder of a job that has its adapter, as a tar file."""
    service = by.service
    owned = service.store.job(by.user, name)
    folder = service.folder / owned.name
    if owned.active or not (folder / "adapter_model.safetensors").is_file():
        raise RequestConflict(
            "the job has no adapter",
            job=owned.name,
            found=owned.state,
            help="wait for its end"
            if owned.active
            else f"`tlora-fx client status {name}` says why it ended",
        )
    size, content = packed(folder, owned.name)
    headers = {"Content-Length": str(size)}
    return StreamingResponse(content, headers=headers, media_type="application/x-tar")


@api.get("/jobs/{name}/logs", response_class=StreamingResponse, tags=["jobs"])
async def logs(name: str, by: By, follow: bool = False) -> StreamingResponse:
    """A job's steps and evaluations as lines; follow: until it has ended."""
    owned = await run_in_threadpool(by.service.store.job, by.user, name)
    lines = _lines(by, owned.name, follow=follow)
    return CountedStream(by, lines, "text/plain; charset=utf-8")


@api.get("/overview", tags=["service"])
def overview(by: By) -> Overview:
    """The service as a whole."""
    return by.service.view.overview(by.user)


@api.get("/groups", tags=["service"])
async def groups(by: By) -> list[GroupSpan]:
    """List which groups stood on which GPUs, the newest thousand."""
    return by.service.view.spans(by.user)


@api.get("/events", tags=["service"])
def events(by: By, after: Annotated[int, Query(ge=0, lt=1 << 62)] = 0) -> list[Event]:
    """The newest events behind a number."""
    return by.service.view.events(by.user, after)


@api.get("/stream", response_class=StreamingResponse, tags=["service"])
async def stream(by: By, after: int = -1) -> StreamingResponse:
    """Server-sent events: `jobs` that changed or were `removed`, `groups` and `events`.

    The first `jobs` are those that have not ended. It ends when the token is revoked.
    """
    return CountedStream(by, _told(by, after), "text/event-stream")


async def _told(by: Caller, version: int) -> AsyncIterator[bytes]:
    view = by.service.view
    event, groups, said = view.last_event, -1, time.monotonic()
    gone = view.version
    while not by.service.ending and (user := by.again()):
        news = []
        now = view.version
        if removed := view.removed_since(user, gone, now):
            news.append(("removed", json.dumps(removed).encode()))
        gone = now
        if changed := view.visible(user, version):
            version = max(shown.version for shown in changed)
            news.append(("jobs", b"[" + b",".join(shown.body for shown in changed) + b"]"))
        if view.last_event != event:
            news.append(("events", _json(await run_in_threadpool(view.events, user, event))))
            event = view.last_event
        if view.groups_version != groups:
            groups = view.groups_version
            news.append(("groups", _json(view.spans(user))))
        for kind, data in news:
            yield b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
        if not news and time.monotonic() - said > QUIET_SECONDS:
            news = [("", b"")]
            yield b": quiet\n\n"
        said = time.monotonic() if news else said
        await asyncio.sleep(REFRESH_SECONDS)


def _json(items: Sequence[BaseModel]) -> bytes:
    return b"[" + b",".join(item.model_dump_json().encode() for item in items) + b"]"


async def _lines(by: Caller, name: str, *, follow: bool) -> AsyncIterator[bytes]:
    """What a job's metrics tell, and what is new until it has ended or the service stops."""
    path, read = by.service.folder / name / METRICS, 0
    while user := by.again():
        # Asked before the file is read: once it has ended, nothing more comes.
        owned = await run_in_threadpool(by.service.store.job, user, name)
        whole = await run_in_threadpool(_new_lines, path, read)
        read += len(whole)
        for line in log_lines(whole):
            yield f"{line}\n".encode()
        if not whole and (not follow or not owned.active or by.service.ending):
            early = SERVICE_ENDING if follow and owned.active else ""
            yield f"{name}: {owned.state} {owned.reason or ''}".strip().encode()
            yield early.encode() + b"\n"
            return
        if not whole:
            await asyncio.sleep(REFRESH_SECONDS)
    yield f"{name}{TOKEN_GONE}\n".encode()


def _new_lines(path: Path, start: int) -> bytes:
    try:
        return whole_lines(path, start, 1 << 20)
    except OSError:
        return b""


async def metrics(by: By) -> Response:
    """Metrics for Prometheus, of all users together; rows of one user are for that user."""
    text = await run_in_threadpool(generate_latest, SeenMetrics(by.service.registry, by.user))
    return Response(text, media_type="text/plain; version=0.0.4")


class SeenMetrics(CollectorRegistry):
    """The metrics of a registry without the rows of users whom a user may not see."""

    def __init__(self, registry: CollectorRegistry, user: User) -> None:
        super().__init__()
        self._registry, self._user = registry, user

    def collect(self) -> Iterator[Metric]:
        """Metrics with the rows that the user may see."""
        for metric in self._registry.collect():
            metric.samples = [
                sample
                for sample in metric.samples
                if self._user.admin or sample.labels.get("user", self._user.name) == self._user.name
            ]
            yield metric


async def healthz() -> Health:
    """Say that this process answers."""
    return Health(status="ok")


def readyz(request: Request, response: Response) -> Health:
    """Say whether requests can be served: the ledger can be read, and the service is not ending."""
    service: Service = request.app.state.service
    why = "it is ending" if service.ending else ""
    try:
        service.store.rows("SELECT 1 FROM facts")
    except LedgerError as error:
        logger.warning("not ready: %s", error.facts.get("reason"), extra={"event": "error"})
        why = "its ledger cannot be read"
    if why:
        response.status_code = 503
    return Health(status=why or "ok")


class Gate:
    """Lets no page of a stranger ask, and counts, times and logs what is answered.

    hosts     names by which the service may be called beside addresses
    origins   of pages that may ask, beside the address that was asked
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str] = ()) -> None:
        self.app, self.hosts, self.origins = app, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 500
        request, service = Request(scope), scope["app"].state.service

        async def heard(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            if why := self._strange(request, open_to_all=service.open_to_all):
                refused = RequestRefused(why, help="call it by its address")
                await problem(refused, 403)(scope, receive, heard)
            elif refusal := self._without_token(request, service):
                await problem(refusal)(scope, receive, heard)
            else:
                await self.app(scope, receive, heard)
        finally:
            route = getattr(scope.get("route"), "path", "")
            seconds = time.perf_counter() - begun
            service.requests.labels(route, str(status)).inc()
            service.seconds.labels(route).observe(seconds)
            if request.method != "GET":
                told = {"event": "request", "status": status, "seconds": seconds}
                why = ": the client closed the connection" if status == HUNG_UP else ""
                logger.info("%s %s %s%s", request.method, scope["path"], status, why, extra=told)

    @staticmethod
    def _without_token(request: Request, service: Service) -> TokenRefused | None:
        """Refusal of a request that may have a body, before a byte of that is read."""
        if request.method in ("GET", "HEAD"):
            return None
        try:
            service.user(service.token_of(request.headers))
        except TokenRefused as refusal:
            return refusal
        return None

    def _strange(self, request: Request, *, open_to_all: bool) -> str:
        """Why a page of somebody else must have sent a browser; "" where none did."""
        if request.scope["path"] in HEALTH:
            return ""  # Probes call a service as they like, and are told nothing of it.
        host = request.headers.get("host", "").lower()
        here = (None, f"{request.url.scheme}://{host}", *self.origins)
        if request.method not in ("GET", "HEAD") and request.headers.get("origin") not in here:
            return "a page of another origin asks"
        name = re.sub(r":\d+$", "", host)
        known = name in ("localhost", *self.hosts) or is_address(name.strip("[]"))
        # Where no token is needed, a stranger's page could call it by a name of theirs.
        return "it is not called so" if open_to_all and not known else ""


def _origin(url: SplitResult) -> str:
    """The origin of a page, as browsers write it."""
    host = f"[{url.hostname}]" if ":" in str(url.hostname) else url.hostname
    usual = url.port in (None, {"http": 80, "https": 443}[url.scheme])
    return f"{url.scheme}://{host}" + ("" if usual else f":{url.port}")


def is_address(host: str) -> bool:
    """Whether a host is an address, and no name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def problem(error: TloraError, status: int | None = None) -> Response:
    """An error as an answer."""
    code = status or next((c for kind, c in STATUS.items() if isinstance(error, kind)), 500)
    body = Problem(
        code=error.code, what=error.what, facts=error.facts, help=error.help, text=str(error)
    )
    headers = {"WWW-Authenticate": "Bearer"} if code == 401 else {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = QUEUE_FULL_SECONDS
    # What was sent may have held a lone surrogate, which UTF-8 has no bytes for.
    content = json.dumps(body.model_dump(), ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, code, {**HEADERS, **headers}, media_type="application/json")


async def _failed(request: Request, error: Exception) -> Response:
    """Whatever went wrong, as an answer."""
    match error:
        case LedgerError() if error.facts.get("reason") == LEDGER_FULL:
            return _unwritten(request, LEDGER_FULL)
        case TloraError():
            answer = problem(error)
            if answer.status_code == 500:
                logger.error("%s: %s", request.url.path, error, extra={"event": "error"})
            return answer
        case RequestValidationError():
            return problem(_invalid(error.errors()[0]))
        case HTTPException():
            refused = RequestRefused(str(error.detail), path=request.url.path)
            return problem(refused, error.status_code)
        case ClientDisconnect():
            return Response(status_code=HUNG_UP)
        case OSError() if error.errno in NO_STORAGE:
            return _unwritten(request, str(error.strerror))
    logger.error("a request failed", exc_info=error, extra={"event": "error"})
    return problem(RequestRefused("the service failed", help="see its log"), 500)


def _invalid(mistake: Mapping[str, Any]) -> RequestRefused:
    """The first mistake that pydantic has seen in a request."""
    where = ".".join(map(str, mistake["loc"]))
    match mistake["type"]:
        case "missing":
            expected, found = "a value", "nothing"
        case "json_invalid":
            expected, found = "JSON", str(mistake["ctx"]["error"])
        case _:
            expected, found = mistake["msg"], repr(mistake["input"])[:FOUND_CHARACTERS]
    return RequestRefused("a request is wrong", where=where, expected=expected, found=found)


def _unwritten(request: Request, reason: str) -> Response:
    """Answer to a request that the disk did not take."""
    logger.error("%s: %s", request.url.path, reason, extra={"event": "error"})
    what = "the service cannot write to its disk; nothing has changed"
    help = "send the request again later; the operator must free space or mend the disk"
    return problem(StorageFailed(what, reason=reason, help=help))


class Application(FastAPI):
    """FastAPI that answers by a `Problem`, and not by plain text, to a body that is too large."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        replaced = False

        async def told(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and message["status"] == TOO_LARGE:
                kind = MutableHeaders(scope=message).get("content-type", "")
                replaced = kind.startswith("text/plain")
                if replaced:
                    await _too_large(scope)(scope, receive, send)
            if not replaced:
                await send(message)

        await super().__call__(scope, receive, told)


def _too_large(scope: Scope) -> Response:
    most = getattr(scope.get("route"), "max_body_size", None) or BODY_BYTES
    refused = UploadRefused(
        "the body of the request is too large",
        path=scope["path"],
        expected=f"at most {most} bytes",
        help="send less at a time; upload data as files",
    )
    return problem(refused)


def make_app(
    service: Service, hosts: Sequence[str] = (), public_url: str = "", tinker: Tinker | None = None
) -> FastAPI:
    """The application over an open run.

    hosts        names by which it may be called beside addresses
    public_url   where browsers find it behind a proxy; "" where they ask it itself
    tinker       what the Tinker API stands on; None: it is not served
    """
    origins: tuple[str, ...] = ()
    if public_url:
        public = urlsplit(public_url)
        hosts, origins = (*hosts, str(public.hostname)), (_origin(public),)
    app = Application(
        title="tlora-fx", version=__version__, lifespan=_life, docs_url=None, redoc_url=None,
        description="Submit LoRA jobs to a run, and watch them.", max_body_size=BODY_BYTES,
        responses={code: {"model": Problem} for code in (401, 403, 404, 409, 413, 422, 429)},
        exception_handlers=dict.fromkeys(
            # Of an error that is not named here, the connection is closed behind the answer.
            (
                TloraError, RequestValidationError, HTTPException, ClientDisconnect, OSError,
                Exception,
            ),
            _failed,
        ),
    )  # fmt: skip
    app.state.service, app.state.tinker, app.state.public_url = service, tinker, public_url
    app.add_middleware(Gate, hosts=hosts, origins=origins)
    app.include_router(api)
    if tinker is not None:
        from tlora_fx.server.tinker.routes import api as tinker_api

        app.include_router(tinker_api)
        service.registry.register(tinker)
    app.get("/healthz", tags=["service"])(healthz)
    app.get("/readyz", tags=["service"], responses={503: {"model": Health}})(readyz)
    app.get("/metrics", response_class=Response, tags=["service"])(metrics)
    assets = StaticFiles(packages=[("tlora_fx.server", "assets")], html=True)
    app.mount("/", assets, "page")
    return app


@asynccontextmanager
async def _life(app: FastAPI) -> AsyncIterator[None]:
    """Keep the view fresh, and the folder lean, for as long as the application lasts."""
    service: Service = app.state.service
    work = (
        (service.view.refresh, REFRESH_SECONDS),
        (service.intake.hand_over, HAND_OVER_SECONDS),
        (service.intake.collect, COLLECT_SECONDS),
    )
    tasks = [asyncio.create_task(_repeat(action, seconds)) for action, seconds in work]
    if app.state.tinker is not None:
        tasks.append(asyncio.create_task(app.state.tinker.futures.listen()))
    yield
    for task in tasks:
        task.cancel()


async def _repeat(action: Callable[[], None], seconds: float) -> None:
    while True:
        try:
            await run_in_threadpool(action)
        except Exception:
            logger.exception("%s failed", action.__qualname__, extra={"event": "error"})
        await asyncio.sleep(seconds)
