"""What the training API gains and costs: `python -m benchmarks.tinker`.

    python -m benchmarks.tinker                                              # on a GPU
    python -m benchmarks.tinker --compile                               # with compiled layers too
    python -m benchmarks.tinker --device cpu --layers 2 --hidden 64 --lengths 16 --tenants 3

Tenants send one request for gradients and one optimizer step each. Arms take turns:

    alone       `GroupStep`, one tenant after the other
    captured    the same without log-probabilities, so that rows run as CUDA graphs
    together    `GroupStep`, all tenants in one call
    cycle       the same requests by the command log and a cycle; they are in the log already

Before they are timed, losses and norms of gradients of each tenant are compared with those that it
has alone. Then tenants that send several requests before their step, by a cycle (`cycle`) and by
one call of `GroupStep` for each request of all tenants (`calls`). With `--compile` layers are then
compiled as the service compiles them, while cycles run, and all of this is measured again on
compiled layers; before, what they compute is compared with rows that are launched as they were
before compiling, each tenant alone. Then: one client over HTTP that
waits for each answer, and models that are created, parked and brought back. The page cache forgets
a snapshot before it is read from disk.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import parser_of, shape_of
from benchmarks.interleaved import Spread, seconds_of
from benchmarks.results_file import console, described, write
from benchmarks.step_mixes import SEED, Shape
from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.runtime.step_batches import Batch
from tlora_fx.training.cycle import Cycle
from tlora_fx.training.datums import batch_of
from tlora_fx.training.engine import Engine, LoggedLayers
from tlora_fx.training.log import TOOK_OVER, CommandLog
from tlora_fx.training.messages import read_request
from tlora_fx.training.options import EngineOptions
from tlora_fx.training.process import run_commands
from tlora_fx.training.tenants import Tenants

#: Clients in one process, untyped.
CLIENTS: Any = import_module("tests.training.clients")
#: The client's own default.
RANK = 32
#: Adapters stay as they are, so that all arms compute the same.
STILL = {"learning_rate": 0.0, "weight_decay": 0.0}
#: Relative, of a tenant's loss and norm of gradients, together against alone.
BOUND = {"cpu": 1e-4, "cuda": 2e-2}
#: Models that are made, parked and brought back.
MODELS = 5
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ShapeOptions(EngineOptions):
    """Options of an engine on a base of some shape, with random weights."""

    shape: Shape = field(default_factory=Shape)

    def spec(self) -> BaseSpec:
        """The base."""
        folder = self.folder / "shape"
        self.shape.config(architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        dtype: Any = self.shape.dtype
        return BaseSpec(config=folder, dtype=dtype, seed=SEED)


def main() -> None:
    """Measure, print and write."""
    given = _arguments()
    found = described("tinker", given.device) | {"layers": given.layers, "tenants": given.tenants}
    path = given.out / f"tinker-{found['date']}.json"
    with tempfile.TemporaryDirectory(prefix="tinker-") as folder:
        for name, figures in measured(given, Path(folder)):
            found[name] = figures
            console().print(name, figures, highlight=False)
            write(path, found)


def measured(given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Each part's name and figures, as they come."""
    shape = shape_of(given)
    options = ShapeOptions(
        folder, device=given.device, residents=given.tenants, max_rank=RANK, shape=shape
    )
    started = time.perf_counter()
    engine = Engine(options)
    yield "start", {"s": _figure(time.perf_counter() - started)}
    cycle = Cycle(CommandLog(folder), engine)
    bench = Bench(cycle, [_client(cycle) for _ in range(given.tenants)], given)
    _run_all(cycle)
    for client in bench.clients:
        _disturb(cycle, client)
    eager: dict[str, Figures] = {}
    for name, figures in bench.cycles():
        eager[name] = figures
        yield name, figures
    if given.compile:
        yield "compiling", bench.compiling()
        for name, figures in bench.cycles() if engine.step.model.is_compiled else ():
            if "cycle" in figures and "cycle" in eager[name]:
                gain = eager[name]["cycle"]["median"] / figures["cycle"]["median"]
                figures["gain_over_eager"] = _figure(gain)
            yield f"{name}, compiled", figures
    yield "http", bench.over_http(min(given.lengths))
    yield "models", bench.models()


@dataclass(eq=False, slots=True)
class Bench:
    """Tenants of one cycle."""

    cycle: Cycle
    clients: Sequence[Any]
    given: argparse.Namespace

    def cycles(self) -> Iterator[tuple[str, Figures]]:
        """What requests of each length take, and how rows ran."""
        for length in self.given.lengths:
            yield f"{length} tokens a request", self.arms(length)
            name = f"{self.given.requests} requests of {length} tokens a step"
            yield name, self.accumulated(length)
        if (graphs := self.cycle.engine.step.graphs) is not None:
            numbers = ("captured", "rows_run", "rows_replayed", "skipped_no_memory", "refused")
            yield "graphs", {name: getattr(graphs, name) for name in numbers}

    def compiling(self) -> Figures:
        """Until compiled layers run: how long it takes, and cycles of all tenants meanwhile."""
        log, step = self.cycle.log, self.cycle.engine.step
        step.options = replace(step.options, compiled=True)
        data, meanwhile = self.data(min(self.given.lengths)), list[float]()
        started = time.perf_counter()
        layers = self.cycle.layers = LoggedLayers(log, step)
        while layers.state == "compiling":
            self.send(data)
            meanwhile.append(1e3 * self.timed(self.cycle.run))
            if layers.state == "compiled":
                meanwhile.pop()  # It has waited for the take-over.
            _run_all(self.cycle)
        figures: Figures = {"state": layers.state, "s": _figure(time.perf_counter() - started)}
        if meanwhile:
            figures["cycle"] = _spread(meanwhile)
        if layers.state == "compiled":
            figures["take_over_s"] = _figure(log.facts()[TOOK_OVER]["seconds"])
        return figures

    def arms(self, length: int) -> Figures:
        """Milliseconds of all tenants' requests, by arm, and what follows from them."""
        step = self.cycle.engine.step
        data = self.data(length)
        batches = {
            self.cycle.tenants.resident[client.model].name: batch_of(
                read_request(_body(client, data[client.model])), None
            )
            for client in self.clients
        }
        plain = {name: Batch(each.micro_batches, reduction="sum") for name, each in batches.items()}
        adam = {name: {"lr": 0.0, "weight_decay": 0.0} for name in batches}

        def alone(given: dict[str, Batch]) -> dict[str, tuple[float, float]]:
            return {name: self.steps({name: each}, adam)[name] for name, each in given.items()}

        with step.uncompiled():
            expected = alone(batches)
        # More than once: rows are captured when they come again.
        for _ in range(self.given.warm_up + 1):
            found = self.by_cycle(data)
        for client in self.clients:
            name = self.cycle.tenants.resident[client.model].name
            if wrong := _apart(found[client.model], expected[name], BOUND[self.given.device[:4]]):
                return {"wrong": wrong}
        arms: dict[str, Callable[[], Any]] = {
            "alone": lambda: alone(batches),
            "captured": lambda: alone(plain),
            "together": lambda: self.steps(batches, adam),
            "cycle": lambda: self.by_cycle(data),
        }
        if step.mesh.device.type == "cpu":
            del arms["captured"]
        times: dict[str, list[float]] = {name: [] for name in arms}
        for at in range(-self.given.warm_up, self.given.repeats):
            for name, arm in arms.items():
                seconds = self.sent(data) if name == "cycle" else self.timed(arm)
                if at >= 0:
                    times[name].append(1e3 * seconds)
        figures: Figures = {name: _spread(own) for name, own in times.items()}
        adds = [c - t for c, t in zip(times["cycle"], times["together"], strict=True)]
        figures["cycle_adds"] = _spread(adds)
        for name in ("alone", "captured")[: len(arms) - 2]:
            gain = figures[name]["median"] / figures["cycle"]["median"]
            figures[f"gain_over_{name}"] = _figure(gain)
        return figures

    def data(self, length: int) -> dict[str, list[Any]]:
        """By model, one sequence of random tokens."""
        draw = torch.Generator().manual_seed(SEED)
        vocabulary = self.cycle.engine.step.model.group.vocabulary
        return {
            client.model: [
                CLIENTS.datum(torch.randint(0, vocabulary, (length + 1,), generator=draw).tolist())
            ]
            for client in self.clients
        }

    def steps(self, batches: dict[str, Batch], adam: Any) -> dict[str, tuple[float, float]]:
        """Gradients and a step of some tenants; losses and norms."""
        step = self.cycle.engine.step
        outputs = step.accumulate(batches)
        updates = step.apply({name: adam[name] for name in batches})
        return {name: (outputs[name].loss, updates[name].grad_norm) for name in batches}

    def by_cycle(self, data: dict[str, list[Any]]) -> dict[str, tuple[float, float]]:
        """The same by the cycle."""
        futures = [
            (client, client.forward_backward(data[client.model]), client.optim_step(**STILL))
            for client in self.clients
        ]
        _run_all(self.cycle)
        return {
            client.model: (
                client.result(forward)[0]["loss:sum"],
                client.result(step)["metrics"]["grad_norm"],
            )
            for client, forward, step in futures
        }

    def accumulated(self, length: int) -> Figures:
        """Milliseconds of tenants that send several requests for gradients before each step."""
        data, step, count = self.data(length), self.cycle.engine.step, self.given.requests
        batches = {
            self.cycle.tenants.resident[client.model].name: batch_of(
                read_request(_body(client, data[client.model])), None
            )
            for client in self.clients
        }

        def calls() -> None:
            for _ in range(count):
                step.accumulate(batches)
            step.apply({name: {"lr": 0.0, "weight_decay": 0.0} for name in batches})

        times: dict[str, list[float]] = {"calls": [], "cycle": []}
        for _ in range(self.repeats):
            times["calls"].append(1e3 * self.timed(calls))
            times["cycle"].append(1e3 * self.sent(data, count))
        figures: Figures = {name: _spread(own[self.given.warm_up :]) for name, own in times.items()}
        gain = figures["calls"]["median"] / figures["cycle"]["median"]
        return figures | {"gain": _figure(gain)}

    def sent(self, data: dict[str, list[Any]], requests: int = 1) -> float:
        """Seconds of the cycle alone: the requests are in the log before."""
        self.send(data, requests)
        return self.timed(lambda: _run_all(self.cycle))

    def send(self, data: dict[str, list[Any]], requests: int = 1) -> None:
        """Append each tenant's requests for gradients, and a step, to the log."""
        for client in self.clients:
            for _ in range(requests):
                client.forward_backward(data[client.model])
            client.optim_step(**STILL)

    def timed(self, action: Callable[[], Any]) -> float:
        """Seconds until the device is done."""
        return seconds_of(action)

    def over_http(self, length: int) -> Figures:
        """What the wire adds to a step of one client that waits for each answer."""
        if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
            return {"skipped": f"not installed: {', '.join(missing)}"}
        client = self.clients[0]
        name = self.cycle.tenants.resident[client.model].name
        own = self.data(length)[client.model]
        batch = {name: batch_of(read_request(_body(client, own)), None)}
        adam = {name: {"lr": 0.0, "weight_decay": 0.0}}
        direct = [1e3 * self.timed(lambda: self.steps(batch, adam)) for _ in range(self.repeats)]
        self.cycle.forget()
        with _serving(self.cycle) as port:
            wire = Wire(port)
            wire.begin()
            times = [1e3 * self.timed(lambda: wire.step(own)) for _ in range(self.repeats)]
        # Those of the other cycle.
        for member in list(self.cycle.engine.step.members.values()):
            self.cycle.engine.step.release(member.job.name)
        warm = self.given.warm_up
        figures = {"direct": _spread(direct[warm:]), "http": _spread(times[warm:])}
        adds = figures["http"]["median"] - figures["direct"]["median"]
        return figures | {"adds_ms": _figure(adds)}

    @property
    def repeats(self) -> int:
        """Of one arm, those that warm it up included."""
        return int(self.given.warm_up + self.given.repeats)

    def models(self) -> Figures:
        """Milliseconds until a model is made, parked and brought back, and how fast the disk is."""
        cycle, tenants = self.cycle, self.cycle.tenants
        cycle._busy.clear()
        found: dict[str, list[float]] = {}

        def note(name: str, action: Callable[[], Any]) -> None:
            found.setdefault(name, []).append(1e3 * self.timed(action))

        for _ in range(MODELS):
            cycle.forget()
            client = _client(cycle)
            note("created", lambda: _run_all(cycle))
            _disturb(cycle, client)
            self._step_of(client)
            # Of a snapshot, all models wait for the copy alone.
            note("snapshot_copied", partial(tenants.keep, client.model))
            note("snapshot_written", tenants.settle)
            # For samplers; all models wait while one is written.
            named, unnamed = (f"models/{len(found['created'])}-{each}" for each in range(2))
            note("version_named", partial(tenants.write, client.model, named, whole=False))
            note("version_unnamed", partial(tenants.write_unnamed, client.model, unnamed))
            self._step_of(client)
            for _ in range(2):
                note("parked_in_memory", lambda: tenants._make_room(()))
                size = tenants.parked[client.model][1].nbytes
                note("from_memory", partial(cycle.bring, client.model))
            memory, tenants.parked_bytes = tenants.parked_bytes, 0
            note("parked_on_disk", lambda: _park_on_disk(tenants))
            tenants.parked_bytes = memory
            file = tenants._snapshot(client.model, cycle.log.model(client.model).kept)
            _uncache(file)
            note("read", file.read_bytes)
            _uncache(file)
            note("from_disk", partial(cycle.bring, client.model))
        figures: Figures = {name: _spread(own) for name, own in found.items()}
        figures["mib_a_model"] = _figure(size / 2**20)
        rate = figures["read"]["median"] / figures["from_disk"]["median"]
        return figures | {"share_of_read_rate": _figure(rate)}

    def _step_of(self, client: Any) -> None:
        client.forward_backward(self.data(min(self.given.lengths))[self.clients[0].model])
        client.optim_step(**STILL)
        _run_all(self.cycle)


class Wire:
    """One client over HTTP, by the standard library alone."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.model, self.seq = "", 0

    def ask(self, path: str, body: Any) -> Any:
        """An answer: JSON, or the bytes of a message."""
        raw = isinstance(body, bytes)
        kind = "application/x-protobuf" if raw else "application/json"
        headers = {"X-API-Key": "tml-x", "Content-Type": kind}
        content = body if raw else json.dumps(body)
        self.connection.request("POST", f"/api/v1/{path}", content, headers)
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise SystemExit(f"{path} answered {answer.status}: {content[:500]!r}")
        return json.loads(content) if answer.headers.get_content_subtype() == "json" else content

    def result(self, future: Any) -> Any:
        """What a request came to."""
        while True:
            found = self.ask("retrieve_future", {"request_id": future["request_id"]})
            if not isinstance(found, dict):
                return found
            if "error" in found:
                raise SystemExit(found["error"])
            if found.get("type") != "try_again":
                return found

    def begin(self) -> None:
        """Make a model, once somebody answers."""
        for _ in range(600):
            with suppress(ConnectionRefusedError):
                self.connection.connect()
                break
            time.sleep(0.1)
        session = self.ask("create_session", {})["session_id"]
        body = {
            "session_id": session, "model_seq_id": 0, "base_model": "tlora-fx/small",
            "lora_config": {"rank": RANK, "seed": 1},
        }  # fmt: skip
        self.model = self.result(self.ask("create_model", body))["model_id"]

    def step(self, data: Sequence[Any]) -> None:
        """Gradients and an optimizer step, each asked for when the last is answered."""
        self.seq += 1
        body = _body(self, data)
        self.result(self.ask("forward_backward", body))
        self.seq += 1
        step = {"model_id": self.model, "seq_id": self.seq, "adam_params": STILL}
        self.result(self.ask("optim_step", step))


@contextmanager
def _serving(cycle: Cycle) -> Iterator[int]:
    """Inside, HTTP is answered by another process, and commands run in a thread of this one."""
    context, ended, ready = multiprocessing.get_context("spawn"), threading.Event(), []
    folder = cycle.log.folder
    with tempfile.TemporaryDirectory(prefix="tinker-") as place:
        bell = Path(place) / "bell"
        thread = threading.Thread(
            target=run_commands,
            args=(CommandLog(folder), cycle.engine, bell, lambda: ready.append(1), ended),
        )
        thread.start()
        port = context.Queue()
        process = context.Process(target=_answer, args=(folder, bell, port), daemon=True)
        process.start()
        try:
            yield port.get(timeout=120)
        finally:
            process.terminate()
            ended.set()
            thread.join()


def _answer(folder: Path, bell: Path, port: Any) -> None:
    """Answer HTTP until terminated."""
    from tlora_fx.server.app import make_app
    from tlora_fx.server.connections import make_server
    from tlora_fx.server.service import make_service
    from tlora_fx.server.submission import IntakeLimits
    from tlora_fx.server.tinker.futures import Futures
    from tlora_fx.server.tinker.routes import Tinker

    log = CommandLog(folder)
    service = make_service(folder / "service", IntakeLimits(), open_to_all=True)
    server = make_server(make_app(service, tinker=Tinker(log, Futures(log, bell))), port=0)
    bound = server.config.bind_socket()
    port.put(bound.getsockname()[1])
    server.run([bound])


def _park_on_disk(tenants: Tenants) -> None:
    tenants._make_room(())
    tenants.settle()


def _client(cycle: Cycle) -> Any:
    return CLIENTS.Client(cycle.log, config={"rank": RANK, "seed": 1})


def _body(client: Any, data: Sequence[Any]) -> bytes:
    body: bytes = CLIENTS.request(client.model, client.seq, data)
    return body


def _disturb(cycle: Cycle, client: Any) -> None:
    """Let no matrix be zero, as after some steps."""
    torch.manual_seed(SEED)
    for parameter in cycle.tenants.member(client.model).parameters.values():
        parameter.data.normal_(std=0.01)


def _run_all(cycle: Cycle) -> None:
    while cycle.run():
        pass


def _apart(found: tuple[float, float], expected: tuple[float, float], bound: float) -> str:
    alike = all(
        abs(one - other) <= bound * abs(other) for one, other in zip(found, expected, strict=True)
    )
    return "" if alike else f"a tenant among others has {found}, alone {expected}"


def _uncache(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _figure(value: float) -> float:
    return float(f"{value:.4g}")


def _spread(times: Sequence[float]) -> dict[str, float]:
    return {name: _figure(value) for name, value in Spread.of(times).json().items()}


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, layers=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 160, 640])
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="measure compiled layers too")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
