"""Damaged, reordered and repeated requests over HTTP: each is answered, and hurts nobody."""

from __future__ import annotations

import json
import random

import httpx
import pytest

from tests.server.tinker.serving import serving, trainer
from tests.training.clients import datum, read_forward, request
from tests.training.test_damaged import VALUES, damaged

KEY = {"X-API-Key": "tml-any"}
PROTOBUF = "application/x-protobuf"
STEP = {"learning_rate": 1e-3}
#: Routes that take JSON, and the fields that they read.
ROUTES = {
    "create_session": ("tags", "user_metadata", "sdk_version"),
    "create_model": ("session_id", "model_seq_id", "base_model", "lora_config", "user_metadata"),
    "session_heartbeat": ("session_id",),
    "optim_step": ("model_id", "seq_id", "adam_params"),
    "save_weights": ("model_id", "seq_id", "path", "ttl_seconds", "user_metadata"),
    "save_weights_for_sampler": ("model_id", "seq_id", "path", "sampling_session_seq_id"),
    "save_weights_external": ("model_id", "seq_id", "path", "age_encryption_recipients"),
    "load_weights": ("model_id", "seq_id", "path", "optimizer", "session_id", "model_seq_id"),
    "create_custom_loss": ("session_id", "custom_loss_seq_id", "name", "graph", "inputs"),
    "create_sampling_session": ("session_id", "sampling_session_seq_id", "base_model"),
    "asample": ("sampling_session_id", "seq_id", "prompt", "sampling_params", "num_samples"),
    "retrieve_future": ("request_id",),
    "get_info": ("model_id",),
    "copy_weights": ("source_path", "session_id", "model_seq_id", "ttl_seconds"),
    "weights_info": ("tinker_path",),
}
ODD = (*VALUES, 10**15, "\ud800", "9" * 17, [[[]]], {"a": float("nan")}, "s:train:0", "\0")
DEEP = b"[" * 100_000


def strictly(content):
    """JSON in which all numbers are finite."""

    def refuse(text):
        raise AssertionError(text)

    return json.loads(content, parse_constant=refuse)


class Client:
    """A client that never repeats by itself."""

    def __init__(self, address):
        self.http = httpx.Client(base_url=f"{address}/api/v1", timeout=300, headers=KEY)
        self.session = self.post("create_session", {}).json()["session_id"]
        body = {
            "session_id": self.session, "model_seq_id": 0, "base_model": "tlora-fx/small",
            "lora_config": {"rank": 4, "seed": 9},
        }  # fmt: skip
        made = self.post("create_model", body).json()
        self.model, self.seq, self.made = made["model_id"], 0, made["request_id"]

    def post(self, route, body):
        kind = PROTOBUF if route == "forward_backward" else "application/json"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(f"/{route}", content=content, headers={"Content-Type": kind})

    def result(self, number):
        """What a future came to: JSON, or metrics."""
        while True:
            answer = self.post("retrieve_future", {"request_id": number})
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"] == PROTOBUF:
                return read_forward(answer.content)[0]
            if (content := strictly(answer.content)).get("type") != "try_again":
                return content

    def step(self):
        """Gradients and a step, as a client sends them; what they came to."""
        self.seq += 2
        body = request(self.model, self.seq - 1, [datum([5, 6, 7, 8])])
        step = {"model_id": self.model, "seq_id": self.seq, "adam_params": STEP}
        sent = [self.post("forward_backward", body), self.post("optim_step", step)]
        return [self.result(each.json()["request_id"]) for each in sent]


def request_of(draw, client, seq):
    """A right request of a model under some number."""
    if draw.random() < 0.5:
        tokens = [draw.randrange(3, 259) for _ in range(6)]
        return "forward_backward", request(client.model, seq, [datum(tokens)])
    step = {"learning_rate": draw.random() / 100}
    return "optim_step", {"model_id": client.model, "seq_id": seq, "adam_params": step}


def odd_request(draw, client):
    """A request with something wrong in it somewhere."""
    right = {
        "session_id": client.session, "model_id": client.model, "base_model": "tlora-fx/small",
        "seq_id": draw.randrange(10**4, 10**9), "model_seq_id": draw.randrange(10**9),
    }  # fmt: skip
    route, fields = draw.choice([*ROUTES.items()])
    body = {name: right.get(name, draw.choice(ODD)) for name in fields}
    for name in draw.sample(fields, draw.randint(0, len(fields))):
        body[name] = draw.choice(ODD)
    match draw.randrange(8):
        case 0:
            return route, damaged(draw, json.dumps(body).encode())
        case 1:
            return route, draw.choice([DEEP, b"", b"null", b"[1]", b'"x"', b"\xff", b"1e999"])
        case 2:
            body = request(client.model, 10**6, [datum([5, 6, 7])])
            return "forward_backward", damaged(draw, body)
    return route, body


PLACES = (
    "sessions", "sessions/{session}", "sessions/{session}/trace_export", "checkpoints",
    "sessions/{session}/trace", "training_runs", "training_runs/{model}",
    "training_runs/{model}/requests", "training_runs/{model}/checkpoints",
)  # fmt: skip


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_and_repeated_requests_are_answered_and_hurt_nobody(tmp_path, count):
    """Also not their own model: it has run what was sent in order, once."""
    draw, accepted, numbers = random.Random(count), [], {}
    with (
        serving(tmp_path, seconds=5) as (address, socket, _),
        trainer(tmp_path / "tinker", socket),
    ):
        good, bad, alone = (Client(address) for _ in range(3))
        found, late, seq = [], [], 0
        for at in range(count):
            route, body = odd_request(draw, bad)
            answer = bad.post(route, body)
            assert answer.status_code < 500, (route, body, answer.text)
            if answer.content and answer.headers["content-type"] != PROTOBUF:
                said = strictly(answer.content)
                if answer.status_code == 200 and "request_id" in said:
                    accepted.append(said["request_id"])
            if at % 2 == 0:
                seq += 1
                late.append((seq, *request_of(draw, bad, seq)))
            if at % 10 == 9:
                # The last first; then some again, and others under the same numbers.
                for sent, route, body in [*reversed(late), *draw.choices(late, k=3)]:
                    number = bad.post(route, body).json()["request_id"]
                    assert numbers.setdefault(sent, number) == number
                    other = {"model_id": bad.model, "seq_id": sent, "adam_params": {"eps": 0.5}}
                    assert bad.post("optim_step", other).status_code == 409
                late = []
            if at % 25 == 0:
                found.append(good.step())
        expected = [alone.step() for _ in found]
        numbers[0] = bad.made
        first = {sent: bad.result(number) for sent, number in numbers.items()}
        again = {sent: bad.result(number) for sent, number in numbers.items()}
        last = bad.result(
            bad.post("forward_backward", request(bad.model, seq + 1, [datum([5, 6])])).json()[
                "request_id"
            ]
        )
        for place in PLACES:
            answer = bad.http.get("/" + place.format(session=bad.session, model=bad.model))
            assert answer.status_code == 200, (place, answer.text)
            strictly(answer.content)
        metrics = httpx.get(f"{address}/metrics", timeout=300).text

    assert len(numbers) == count // 2 + 1
    assert first == again
    assert len(accepted) > count // 20
    steps = [each["metrics"]["step"] for _, each in sorted(first.items()) if "metrics" in each]
    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) > count // 20
    assert last["tokens:sum"] == 1
    for own, other in zip(found, expected, strict=True):
        assert own[0] == pytest.approx(other[0], rel=1e-9)
        assert own[1]["metrics"] == pytest.approx(other[1]["metrics"], rel=1e-9)
    assert "NaN" not in metrics
