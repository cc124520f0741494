"""Routes of the Tinker API.

A body is looked at only as far as its place in the log needs; the trainer reads the rest, for a
request that was refused here would leave a gap in its model's order. Field names and paths are the
API's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from prometheus_client.core import GaugeMetricFamily
from pydantic import BaseModel, Field
from starlette.datastructures import URL, URLPath

from tlora_fx.config.adapter_folder import CONFIG, WEIGHTS
from tlora_fx.errors import JobUnknown, QuotaReached, RequestGone, RequestRefused
from tlora_fx.server.ledger import User
from tlora_fx.server.submission import Intake
from tlora_fx.server.tinker.futures import Futures
from tlora_fx.server.tinker.links import LINK_SECONDS, Links
from tlora_fx.training.folders import LAYOUT, copy_version
from tlora_fx.training.log import LAYERS, TOOK_OVER, CommandLog, model_id, session_id
from tlora_fx.training.messages import canonical_request
from tlora_fx.training.peft_folders import adopt
from tlora_fx.training.records import Checkpoint, Model
from tlora_fx.training.requests import (
    MAX_PLACE,
    MAX_SAMPLES,
    MAX_TTL_SECONDS,
    NAME,
    is_name,
)
from tlora_fx.training.times import explained, slowdowns, trace

#: Bodies at most. Clients cut data at 5 MB, but one sequence may be larger.
DATA_BYTES, PROMPT_BYTES = 64 << 20, 16 << 20
#: What a folder's name begins with in which a PEFT folder is checked.
UPLOAD = ".upload-"
#: Requests of an answer at most.
MAX_TRACED = 10_000
#: Of what a client says of itself.
MAX_DEPTH = 32
#: What the service's client is told of itself. No compression: most bodies stay on one machine.
CLIENT_CONFIG: Mapping[str, Any] = {
    "pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": False,
    "custom_loss_server_side": True, "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False, "use_pyqwest_transport": False,
}  # fmt: skip
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Tinker:
    """State that the routes share; Prometheus reads what users have used.

    price   of an hour of the device
    links   to files of checkpoints
    """

    log: CommandLog
    futures: Futures
    price: float = 0.0
    links: Links = field(init=False)

    def __post_init__(self) -> None:
        self.links = Links.of(self.log.folder)
        # Of a process that was killed.
        for left in self.log.folder.glob(f"{UPLOAD}*"):
            shutil.rmtree(left, ignore_errors=True)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Requests, tokens, seconds and price, by user and kind; slowdowns by user; layers."""
        found = {
            name: GaugeMetricFamily(f"tlora_tinker_{name}", text, labels=["user", "kind"])
            for name, text in {
                "requests": "Requests of training clients that were done.",
                "tokens": "Tokens computed for training clients.",
                "seconds": "Seconds of the device for training clients, by tokens of a cycle.",
                "price": "Price of these seconds.",
            }.items()
        }
        for row in self.log.usage():
            numbers = {**row, "price": row["seconds"] / 3600 * self.price}
            for name, metric in found.items():
                metric.add_metric([row["user"], row["kind"]], numbers[name])
        slow = GaugeMetricFamily(
            "tlora_tinker_slowdown",
            "Slowdown by others that 95 % of the last requests did not exceed.",
            labels=["user"],
        )
        for user, slowdown in slowdowns(self.log.times()).items():
            slow.add_metric([user], slowdown)
        yield from (*found.values(), slow, *self._layers())

    def _layers(self) -> Iterator[GaugeMetricFamily]:
        """Whether compiled layers run, and since which cycle."""
        facts = self.log.facts()
        if facts.get(LAYERS, "off") == "off":
            return
        yield GaugeMetricFamily(
            "tlora_tinker_compiled",
            "Whether cycles for training clients run on compiled layers.",
            value=facts[LAYERS] == "compiled",
        )
        if (took_over := facts.get(TOOK_OVER)) is not None:
            yield GaugeMetricFamily(
                "tlora_tinker_compiled_after_cycle",
                "Cycle for training clients after which compiled layers took over.",
                value=took_over["cycle"],
            )


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and whom."""

    user: User
    tinker: Tinker
    intake: Intake

    @property
    def log(self) -> CommandLog:
        """The command log."""
        return self.tinker.log

    def require_quota(self, kind: str) -> None:
        """Refuse another command of a kind; raises QuotaReached, StorageFailed."""
        self.intake.require_room()
        name = self.user.name
        if self.user.gpu_hours is not None:
            seconds = sum(row["seconds"] for row in self.log.usage() if row["user"] == name)
            self.user.require_hours(seconds / 3600)
        if kind.startswith("save"):
            used = sum(each.bytes for each in self.log.checkpoints(name))
            most = self.intake.limits.stored_bytes
            if used >= most:
                raise QuotaReached(
                    "the checkpoints take too many bytes",
                    expected=f"at most {most}", found=used,
                    help="delete some, or save with ttl_seconds",
                )  # fmt: skip


def _asker(request: Request) -> Asker:
    service = request.app.state.service
    user = service.user(service.token_of(request.headers))
    return Asker(user, request.app.state.tinker, service.intake)


By = Annotated[Asker, Depends(_asker)]
Count = Annotated[int, Query(ge=0)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
api = APIRouter(prefix="/api/v1", tags=["tinker"])


class Session(BaseModel):
    """A new session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(BaseModel):
    """A request about a session."""

    session_id: str


class OfModel(BaseModel):
    """A request about a model."""

    model_id: str


class OfFuture(BaseModel):
    """A request for what another one came to."""

    request_id: str


class OfPath(BaseModel):
    """A request about a checkpoint."""

    tinker_path: str


class Ttl(BaseModel):
    """For how long a checkpoint stays; None: for ever."""

    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL_SECONDS)


class Copy(Ttl):
    """A copy of a checkpoint in a model of a session; by default of one of its own.

    There are no projects: whichever is named, the copy is the user's.
    """

    source_path: str
    session_id: str | None = None
    model_seq_id: int = Field(default=0, ge=0, le=MAX_PLACE)
    destination_project_id: str | None = None


class PeftFolder(BaseModel):
    """The files of a PEFT folder that were uploaded, by their SHA-256."""

    config: Sha256 = Field(alias=CONFIG)
    weights: Sha256 = Field(alias=WEIGHTS)


class NewSampler(OfSession):
    """A new sampler of a checkpoint, or of the base."""

    sampling_session_seq_id: int = Field(ge=0, le=MAX_PLACE)
    model_path: str | None = None
    base_model: str | None = None


# Clients and sessions.


@api.post("/client/config")
def client_config(by: By) -> dict[str, Any]:
    """How clients are to behave."""
    return dict(CLIENT_CONFIG)


@api.post("/client/dynamic_config")
def dynamic_config(by: By) -> dict[str, Any]:
    """The same of what may change."""
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": False}


@api.post("/telemetry")
def telemetry(by: By) -> dict[str, str]:
    """Accept what clients say of themselves; nothing is kept."""
    return {"status": "accepted"}


@api.get("/healthz")
def healthz() -> dict[str, str]:
    """Whether the service answers."""
    return {"status": "ok"}


@api.get("/get_server_capabilities")
def capabilities(by: By) -> dict[str, Any]:
    """The base that models train on."""
    facts = by.log.facts()
    model = {
        "model_name": facts.get("base_model"), "max_context_length": facts.get("max_context"),
        "trainable": True, "sampleable": facts.get("sampleable", False),
    }  # fmt: skip
    return {"supported_models": [model] if facts else []}


@api.post("/create_session")
def create_session(body: Session, by: By) -> dict[str, str]:
    """Begin a session."""
    _require_shallow(body.user_metadata)
    session = by.log.open_session(by.user.name, body.model_dump())
    return {"type": "create_session", "session_id": session}


@api.post("/session_heartbeat")
def session_heartbeat(body: OfSession, by: By) -> dict[str, str]:
    """Keep a session alive."""
    by.log.heard(by.user.name, body.session_id)
    return {"type": "session_heartbeat"}


@api.post("/sessions/{session}/finish", status_code=204)
def finish_session(session: str, by: By) -> None:
    """End a session; what it made stays."""
    by.log.end_session(by.user.name, session)


@api.get("/sessions")
def sessions(by: By, limit: Count = 20, offset: Count = 0) -> dict[str, Any]:
    """The user's sessions."""
    return {"sessions": by.log.sessions(by.user.name)[offset : offset + limit]}


@api.get("/sessions/{session}")
def one_session(session: str, by: By) -> dict[str, Any]:
    """Models and samplers of a session."""
    found = by.log.session(by.user.name, session)
    said = found["said"]
    return {
        "training_run_ids": found["models"], "sampler_ids": found["samplers"],
        "user_metadata": said.get("user_metadata"), "display_name": said.get("display_name"),
    }  # fmt: skip


@api.get("/sessions/{session}/trace_export")
def trace_export(session: str, by: By, request: Request) -> dict[str, Any]:
    """Where a session's trace is."""
    by.log.session(by.user.name, session)
    return {"status": "ready", "url": str(_link(request, "session_trace", session=session))}


@api.get("/sessions/{session}/trace")
def session_trace(session: str, by: By) -> dict[str, Any]:
    """Requests of a session and their cycles, for Perfetto."""
    by.log.session(by.user.name, session)
    name = by.user.name
    rows = by.log.times(name, session=session, limit=MAX_TRACED)
    pieces, took_over = by.log.cycles(name, session), by.log.facts().get(TOOK_OVER)
    return {"traceEvents": [*trace(rows, pieces, took_over)]}


def _link(request: Request, route: str, **parts: str) -> URL:
    """Where a client finds a route: at the public address if there is one."""
    base = request.app.state.public_url or request.base_url
    path: URLPath = request.app.url_path_for(route, **parts)
    return path.make_absolute_url(base)


# Commands.


def _future(by: Asker, number: int, **more: Any) -> dict[str, Any]:
    by.tinker.futures.ring()
    return {"request_id": str(number), **more}


async def _json(request: Request) -> dict[str, Any]:
    """A body in JSON, as it came."""
    body = await request.body()
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused("the body is no JSON", reason=error) from error
    if not isinstance(content, dict):
        raise RequestRefused("the body is no object of JSON")
    return content


def _field(content: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = content.get(name)
    if type(value) is not kind:
        raise RequestRefused(
            "a request is wrong", where=name, expected=kind.__name__, found=repr(value)[:80]
        )
    return value


def _place(content: Mapping[str, Any], name: str) -> int:
    """A number of a session's models or losses."""
    place = _field(content, name, int)
    if not 0 <= place <= MAX_PLACE:
        raise RequestRefused(
            "a request is wrong", where=name, expected=f"0 to {MAX_PLACE}", found=str(place)[:80]
        )
    return place


def _require_shallow(said: object) -> None:
    """Refuse what a client says of itself where no JSON could show it again."""
    level = [said]
    for _ in range(MAX_DEPTH + 1):
        inner = [each for each in level if isinstance(each, dict | list)]
        if not inner:
            return
        level = [
            one for each in inner for one in (each.values() if isinstance(each, dict) else each)
        ]
    raise RequestRefused("user_metadata is too deep", expected=f"{MAX_DEPTH} levels at most")


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


async def _create(by: Asker, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    session, place = _field(content, "session_id", str), _place(content, "model_seq_id")
    said = content.get("user_metadata")
    _require_shallow(said)

    def create() -> tuple[int, str]:
        if not by.log.is_known(model_id(session, place), 0):
            by.intake.require_room()
        said_of = said if isinstance(said, dict) else {}
        return by.log.create(by.user.name, session, place, kind, _canonical(content), said_of)

    number, model = await run_in_threadpool(create)
    return _future(by, number, model_id=model)


@api.post("/create_model")
async def create_model(request: Request, by: By) -> dict[str, Any]:
    """Make a model: its first command."""
    return await _create(by, "create_model", await _json(request))


async def _append(by: Asker, kind: str, queue: str, seq: int, body: bytes) -> int:
    def append() -> int:
        # A repeat costs nothing.
        if not by.log.is_known(queue, seq):
            by.require_quota(kind)
        return by.log.append(by.user.name, queue, seq, kind, body)

    return await run_in_threadpool(append)


async def _command(request: Request, by: Asker, kind: str) -> dict[str, Any]:
    content = await _json(request)
    model, seq = _field(content, "model_id", str), _field(content, "seq_id", int)
    number = await _append(by, kind, model, seq, _canonical(content))
    return _future(by, number, model_id=model)


@api.post("/load_weights")
async def load_weights(request: Request, by: By) -> dict[str, Any]:
    """Load a checkpoint: into a new model, or into one that is there."""
    content = await _json(request)
    if content.get("session_id") is not None:
        return await _create(by, "load_model", content)
    return await _command(request, by, "load_weights")


@api.post("/optim_step")
@api.post("/save_weights")
@api.post("/save_weights_for_sampler")
@api.post("/save_weights_external")
async def step_or_save(request: Request, by: By) -> dict[str, Any]:
    """One optimizer step; or a checkpoint to go on from, to sample from, or as a PEFT folder."""
    return await _command(request, by, request.url.path.rpartition("/")[2])


@api.post("/create_custom_loss")
async def create_custom_loss(request: Request, by: By) -> dict[str, Any]:
    """Take a loss of the client's own, which requests of the session name then."""
    content = await _json(request)
    session, place = _field(content, "session_id", str), _place(content, "custom_loss_seq_id")
    number = await run_in_threadpool(
        by.log.add_loss, by.user.name, session, place, _canonical(content)
    )
    return _future(by, number)


@api.post("/forward_backward", max_body_size=DATA_BYTES)
async def forward_backward(request: Request, by: By) -> dict[str, Any]:
    """Gradients of a loss, or its value alone; the body is a protobuf message."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestRefused("the body is compressed", help="see client/config")
    body = await request.body()
    model, seq, canonical = await run_in_threadpool(canonical_request, body)
    number = await _append(by, "forward_backward", model, seq, canonical)
    return _future(by, number, model_id=model)


@api.post("/asample", max_body_size=PROMPT_BYTES)
async def asample(request: Request, by: By) -> dict[str, Any]:
    """Completions of a prompt by a sampler."""
    content = await _json(request)
    queue, seq = _field(content, "sampling_session_id", str), _field(content, "seq_id", int)
    number = await _append(by, "sample", queue, seq, _canonical(content))
    count = content.get("num_samples", 1)
    count = count if isinstance(count, int) else 1
    # A client reads as many as it asked for; a request for more than this fails anyway.
    ids = [f"{queue}:{seq}:{each}" for each in range(min(count, MAX_SAMPLES))]
    return _future(by, number, sample_sequence_ids=ids)


@api.post("/retrieve_future")
async def retrieve_future(body: OfFuture, by: By) -> Response:
    """Answer of a command; may be fetched any number of times."""
    if not body.request_id.isdecimal() or len(body.request_id) > 18:
        raise RequestGone("there is no such future", found=body.request_id[:80])
    number, futures = int(body.request_id), by.tinker.futures
    answer = await futures.wait(by.user.name, number)
    if answer is not None:
        return Response(answer.body, media_type=answer.media)
    content = {
        "type": "try_again", "request_id": body.request_id, **futures.queue_state(number)
    }  # fmt: skip
    return Response(json.dumps(content), media_type="application/json")


# Samplers.


@api.post("/create_sampling_session")
def create_sampling_session(body: NewSampler, by: By) -> dict[str, str]:
    """A sampler of a checkpoint, or of the base."""
    facts = by.log.facts()
    base, found = facts.get("base_model"), body.base_model
    if body.model_path is None and found not in (base, facts.get("tokenizer")):
        raise RequestRefused("the service has another base", expected=base, found=found)
    sampler = by.log.add_sampler(
        by.user.name, body.session_id, body.sampling_session_seq_id, body.model_path
    )
    return {"type": "create_sampling_session", "sampling_session_id": sampler.id}


@api.get("/samplers/{sampler}")
def one_sampler(sampler: str, by: By) -> dict[str, Any]:
    """Base or checkpoint that a sampler samples from."""
    found, base = by.log.sampler(sampler, by.user.name), by.log.facts().get("base_model")
    return {"sampler_id": found.id, "base_model": base, "model_path": found.path}


# Models and checkpoints.


@api.post("/get_info")
def get_info(body: OfModel, by: By) -> dict[str, Any]:
    """Description of a model."""
    model, facts = by.log.model(body.model_id, by.user.name), by.log.facts()
    base = facts.get("base_model")
    data = {"arch": "lora", "model_name": base, "tokenizer_id": facts.get("tokenizer")}
    return {
        "type": "get_info", "model_data": data, "model_id": model.id, "model_name": base,
        "is_lora": True, "lora_rank": (model.config or {}).get("rank"),
        "optimizer_config": {"type": "adamw"},
    }  # fmt: skip


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _shown(checkpoint: Checkpoint) -> dict[str, Any]:
    kind = checkpoint.kind.removesuffix("_weights").replace("weights", "training")
    return {
        "checkpoint_id": checkpoint.path.split("/", 3)[3], "checkpoint_type": kind,
        "time": _time(checkpoint.made), "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes, "expires_at": _time(checkpoint.expires),
        "user_metadata": dict(checkpoint.said) or None, "public": checkpoint.public,
    }  # fmt: skip


def _run(model: Model, by: Asker) -> dict[str, Any]:
    """A model, as a training run is shown."""
    saved = by.log.checkpoints(by.user.name, model=model.id)
    last = {each.kind: _shown(each) for each in saved}
    return {
        "training_run_id": model.id, "base_model": by.log.facts().get("base_model"),
        "model_owner": model.user, "is_lora": True, "corrupted": False,
        "lora_rank": (model.config or {}).get("rank"), "last_request_time": _time(model.asked),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": {key: str(value) for key, value in model.said.items()} or None,
    }  # fmt: skip


def _page(items: list[T], limit: int, offset: int) -> tuple[list[T], dict[str, int]]:
    return items[offset : offset + limit], {
        "offset": offset, "limit": limit, "total_count": len(items)
    }  # fmt: skip


@api.get("/training_runs")
def training_runs(by: By, limit: Count = 20, offset: Count = 0) -> dict[str, Any]:
    """The user's models."""
    models, cursor = _page(by.log.models(by.user.name), limit, offset)
    return {"training_runs": [_run(model, by) for model in models], "cursor": cursor}


@api.get("/training_runs/{model}")
def training_run(model: str, by: By) -> dict[str, Any]:
    """One model."""
    return _run(by.log.model(model, by.user.name), by)


@api.get("/training_runs/{model}/requests")
def requests_of(model: str, by: By, limit: Count = 100) -> dict[str, Any]:
    """The last requests of a model: what each waited for, and how much others slowed it down."""
    rows = by.log.times(
        by.user.name, model=by.log.model(model, by.user.name).id, limit=min(limit, MAX_TRACED)
    )
    return {
        "requests": [explained(row) for row in rows],
        "slowdown_p95": slowdowns(rows).get(by.user.name),
    }


@api.get("/training_runs/{model}/checkpoints")
def checkpoints_of(model: str, by: By) -> dict[str, Any]:
    """The checkpoints of a model."""
    found = by.log.checkpoints(by.user.name, model=by.log.model(model, by.user.name).id)
    return {"checkpoints": [_shown(each) for each in found]}


def _own(by: Asker, model: str, checkpoint: str) -> Checkpoint:
    """A checkpoint of the user's own; raises JobUnknown."""
    path = f"tinker://{model}/{checkpoint}"
    for found in by.log.checkpoints(by.user.name, path=path):
        return found
    raise JobUnknown("there is no such checkpoint", found=path)


@api.put("/training_runs/{model}/checkpoints/{checkpoint:path}/ttl", status_code=204)
def keep_checkpoint(model: str, checkpoint: str, body: Ttl, by: By) -> None:
    """Keep a checkpoint for so many seconds from now, or for ever."""
    found, seconds = _own(by, model, checkpoint), body.ttl_seconds
    expires = None if seconds is None else by.log.now() + seconds
    by.log.change(found, expires=expires, public=found.public)


@api.api_route(
    "/training_runs/{model}/checkpoints/{checkpoint:path}/publish",
    methods=["POST", "DELETE"], status_code=204,
)  # fmt: skip
def publish_checkpoint(model: str, checkpoint: str, by: By, request: Request) -> None:
    """Show a checkpoint to all users, or to its owner alone."""
    found = _own(by, model, checkpoint)
    by.log.change(found, expires=found.expires, public=request.method == "POST")


@api.get("/training_runs/{model}/checkpoints/{checkpoint:path}/external_weights_urls")
def external_weights_urls(model: str, checkpoint: str, by: By, request: Request) -> dict[str, Any]:
    """Links to the files of a PEFT folder; whoever has one can fetch its file for an hour."""
    found = by.log.checkpoint(f"tinker://{model}/{checkpoint}", by.user.name)
    expires = int(by.log.now()) + LINK_SECONDS
    urls = {}
    for file in (CONFIG, WEIGHTS):
        url = _link(request, "checkpoint_file", model=model, checkpoint=checkpoint, file=file)
        signature = by.tinker.links.sign(found.path, file, expires)
        urls[file] = str(url.include_query_params(expires=expires, signature=signature))
    return {"urls": urls, "expires": _time(expires)}


FILE = "/training_runs/{model}/checkpoints/{checkpoint:path}/files/{file}"


@api.get(FILE, response_class=FileResponse)
def checkpoint_file(
    model: str, checkpoint: str, file: str, expires: int, signature: str, request: Request
) -> FileResponse:
    """A file of a PEFT folder; the link is the key."""
    tinker: Tinker = request.app.state.tinker
    path = f"tinker://{model}/{checkpoint}"
    # Only names of files that it has are ever signed.
    tinker.links.require(path, file, expires, signature, tinker.log.now())
    place = tinker.log.folder / tinker.log.checkpoint(path).folder / file
    if not place.is_file():
        raise JobUnknown("there is no such file", found=f"{path}/{file}")
    return FileResponse(place, media_type="application/octet-stream")


@api.post("/peft_folders/{name}", status_code=201)
def take_peft_folder(name: str, body: PeftFolder, by: By, request: Request) -> dict[str, str]:
    """Make a checkpoint of uploaded files; the same again by the same key is the same one."""
    if not is_name(name):
        raise RequestRefused("a checkpoint cannot be called so", expected=NAME, found=name[:200])
    log, files = by.log, {CONFIG: body.config, WEIGHTS: body.weights}
    key = request.headers.get("x-idempotency-key", "")
    key = key and f"{key} {name} {files}"
    known = f"tinker://{session_id(by.user.name, key)}:train:0/weights/{name}"
    if key and log.checkpoints(by.user.name, path=known):
        return {"tinker_path": known}
    by.require_quota("save_weights")
    if not (log.folder / LAYOUT).is_file():
        raise RequestRefused("the base is not loaded yet", help="send it again later")
    base = json.loads((log.folder / LAYOUT).read_bytes())
    with tempfile.TemporaryDirectory(dir=log.folder, prefix=UPLOAD) as place:
        fresh = Path(place)
        for file, sha256 in files.items():
            by.intake.place(by.user, fresh / file, file, sha256)
        config = adopt(fresh, **base)
        session = log.open_session(by.user.name, {}, key)
        model, called = f"{session}:train:0", f"weights/{name}"
        size = sum(file.stat().st_size for file in fresh.iterdir())
        folder = copy_version(log.folder, fresh.name, model, called)
    checkpoint = Checkpoint(
        f"tinker://{model}/{called}", model, by.user.name, "weights", folder, size, log.now(),
        None, config,
    )  # fmt: skip
    log.copy(checkpoint, by.user.name, session)
    return {"tinker_path": checkpoint.path}


@api.post("/copy_weights")
def copy_weights(body: Copy, by: By, request: Request) -> dict[str, str]:
    """Copy a checkpoint into a model of a session, by links; the same again is the same copy."""
    source, now = by.log.checkpoint(body.source_path, by.user.name), by.log.now()
    key = request.headers.get("x-idempotency-key", "")
    session = body.session_id or by.log.open_session(by.user.name, {}, key)
    # Whoever the session belongs to finds what lies in its models' folders.
    by.log.heard(by.user.name, session)
    model = f"{session}:train:{body.model_seq_id}"
    name = source.path.split("/", 3)[3]
    path = f"tinker://{model}/{name}"
    if not by.log.checkpoints(by.user.name, path=path):
        by.require_quota("save_weights")
    folder = copy_version(by.log.folder, source.folder, model, name)
    expires = None if body.ttl_seconds is None else now + body.ttl_seconds
    copy = replace(
        source, path=path, model=model, user=by.user.name, folder=folder, made=now,
        expires=expires, public=False,
    )  # fmt: skip
    by.log.copy(copy, by.user.name, session)
    return {"tinker_path": copy.path}


@api.delete("/training_runs/{model}/checkpoints/{checkpoint:path}", status_code=204)
def delete_checkpoint(model: str, checkpoint: str, by: By) -> None:
    """Delete a checkpoint; who samples from it goes on until its weights have to be read again."""
    found = _own(by, model, checkpoint)
    by.log.forget(found)
    by.log.sweep()


@api.get("/checkpoints")
def checkpoints(by: By, limit: Count = 100, offset: Count = 0) -> dict[str, Any]:
    """The user's checkpoints."""
    found, cursor = _page(by.log.checkpoints(by.user.name)[::-1], limit, offset)
    return {"checkpoints": [_shown(each) for each in found], "cursor": cursor}


@api.post("/weights_info")
def weights_info(body: OfPath, by: By) -> dict[str, Any]:
    """Base and rank that a checkpoint can be loaded into."""
    config = by.log.checkpoint(body.tinker_path, by.user.name).config
    parts = {name: config[name] for name in ("train_unembed", "train_mlp", "train_attn")}
    return {
        "base_model": by.log.facts().get("base_model"), "is_lora": True,
        "lora_rank": config["rank"], "optimizer_config": {"type": "adamw"}, **parts,
    }  # fmt: skip
