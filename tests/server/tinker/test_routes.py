"""Routes without a trainer: who may ask, what has a place in the log, and futures that wait."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import threading
import time
from dataclasses import replace
from datetime import datetime

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from tests.server.tinker.serving import serving
from tests.training.clients import datum, request
from tlora_fx.server.ledger import User
from tlora_fx.server.tinker.links import Links
from tlora_fx.server.tinker.routes import MAX_DEPTH
from tlora_fx.training.log import LAYERS, TOOK_OVER, WAITING, CommandLog
from tlora_fx.training.messages import _CLASS
from tlora_fx.training.process import Bell
from tlora_fx.training.records import Checkpoint, Command, Outcome, Ran, json_answer
from tlora_fx.training.times import REASONS
from tlora_fx.training.waiting import Bound, Waiting

KEY = {"X-API-Key": "tml-any"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}


class Asked:
    """A service, and what may be asked of it."""

    def __init__(self, address, socket, service, folder):
        self.address, self.socket, self.service = address, socket, service
        self.folder = folder
        self.log = CommandLog(folder / "tinker")
        self.client = httpx.Client(base_url=f"{address}/api/v1", timeout=300)

    def post(self, path, body=None, key="tml-any", **more):
        content = {"json": body} if "content" not in more else {}
        headers = {"X-API-Key": key} | more.pop("headers", {})
        return self.client.post(path, headers=headers, **content, **more)

    def get(self, path, key="tml-any"):
        return self.client.get(path, headers={"X-API-Key": key})

    def session(self, key="tml-any"):
        body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        return self.post("/create_session", body, key).json()["session_id"]

    def model(self, session, key="tml-any"):
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tlora-fx/small"}
        return self.post("/create_model", body, key).json()

    def finish(self, answer=None, seconds=0.0):
        """Do what a trainer would: answer all that may run, which takes so long together."""
        ran = [command for own in self.log.runnable().values() for command in own]
        cycle = Ran("forward_backward", time.time(), dict.fromkeys(ran, 3), seconds)
        outcomes = [Outcome(each, json_answer(answer or {"did": each.kind}), 3) for each in ran]
        self.log.finish(outcomes, cycle if seconds else None)
        return [each.number for each in ran]


@pytest.fixture
def asked(tmp_path):
    with serving(tmp_path, seconds=0.5) as (address, socket, service):
        yield Asked(address, socket, service, tmp_path)


def test_a_model_is_called_by_its_session_and_number(asked):
    session = asked.session()
    made = asked.model(session)

    assert made == {"request_id": "1", "model_id": f"{session}:train:0"}
    assert asked.model(session) == made
    body = {"session_id": session, "model_seq_id": 0, "base_model": "another"}
    conflict = asked.post("/create_model", body)
    assert conflict.status_code == 409
    assert conflict.json()["code"] == "T0983"


def test_a_repeat_has_the_same_future_and_another_body_is_refused(asked):
    model = asked.model(asked.session())["model_id"]
    body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.5}}
    first = asked.post("/optim_step", body).json()

    assert asked.post("/optim_step", dict(reversed(body.items()))).json() == first
    assert asked.post("/optim_step", body | {"adam_params": {}}).status_code == 409
    assert asked.post("/save_weights", body).status_code == 409


def test_the_same_data_in_another_order_of_names_is_the_same_request(asked):
    """Protobuf's maps have no order, and a client may write them anew."""
    model = asked.model(asked.session())["model_id"]
    message = _CLASS["ForwardBackwardRequest"]()
    message.ParseFromString(request(model, 1, [datum([5, 6, 7], weights=[1.0, 0.5])]))
    one = message.SerializeToString()
    message.data[0].loss_fn_inputs.reverse()
    other = message.SerializeToString()
    assert one != other

    sent = [
        asked.post("/forward_backward", content=each, headers=PROTOBUF) for each in (one, other)
    ]
    assert sent[0].json() == sent[1].json()


def test_what_has_no_place_in_an_order_is_refused_at_once(asked):
    model = asked.model(asked.session())["model_id"]
    post = asked.post

    assert post("/optim_step", {"model_id": model}).status_code == 422
    assert post("/optim_step", {"model_id": model, "seq_id": True}).status_code == 422
    assert post("/optim_step", {"model_id": model, "seq_id": 0}).status_code == 422
    assert post("/optim_step", {"model_id": "x:train:0", "seq_id": 1}).status_code == 404
    assert post("/optim_step", [1]).status_code == 422
    assert post("/optim_step", content=b"{").status_code == 422
    assert post("/forward_backward", content=b"\xff\xff", headers=PROTOBUF).status_code == 422
    assert post("/asample", {"sampling_session_id": "x", "seq_id": 0}).status_code == 404
    packed = PROTOBUF | {"Content-Encoding": "zstd"}
    assert post("/forward_backward", content=b"", headers=packed).status_code == 422
    # All else is its model's: the trainer says what is wrong.
    assert post("/optim_step", {"model_id": model, "seq_id": 1, "x": 1}).status_code == 200


def test_bodies_are_bounded(asked):
    large = asked.post("/optim_step", content=b"[" + b" " * (2 << 20))
    assert large.status_code == 413
    # Data may be larger than that, and is bounded too.
    assert asked.post("/forward_backward", content=b"\xff" * (2 << 20)).status_code == 422
    larger = asked.post("/forward_backward", content=b"\xff" * (65 << 20))
    assert larger.json()["facts"]["expected"] == f"at most {64 << 20} bytes"


def test_a_future_says_try_again_and_can_be_fetched_again(asked):
    number = asked.model(asked.session())["request_id"]
    body = {"request_id": number, "allow_metadata_only": True}
    waiting = asked.post("/retrieve_future", body).json()
    assert (waiting["type"], waiting["request_id"]) == ("try_again", number)
    asked.finish({"model_id": "x"})

    assert [asked.post("/retrieve_future", body).json() for _ in range(2)] == [
        {"model_id": "x"}, {"model_id": "x"},
    ]  # fmt: skip
    with serving(asked.folder) as (address, socket, service):
        again = Asked(address, socket, service, asked.folder)
        assert again.post("/retrieve_future", body).json() == {"model_id": "x"}


def test_a_future_says_what_it_waits_for(asked):
    """A trainer, a place for its model, or nothing but its turn."""
    number = asked.model(asked.session())["request_id"]
    body, states = {"request_id": number}, []

    def ask():
        answer = asked.post("/retrieve_future", body).json()
        states.append((answer["queue_state"], answer.get("queue_state_reason", "")))

    ask()
    bell = Bell(asked.socket)
    assert bell.wait(300)
    ask()
    [queue] = asked.log.runnable()
    for waiting in ([queue], ["another"]):
        asked.log.tell({WAITING: waiting})
        ask()
    bell.close()

    assert [state for state, _ in states] == ["paused_capacity", "active"] * 2
    assert "no trainer" in states[0][1]
    assert "a place in memory" in states[2][1]


@pytest.mark.parametrize("number", ["7", "x", "-1", "9" * 30, "1.5"])
def test_a_future_that_is_not_there_is_gone(asked, number):
    """The client repeats the request then."""
    assert asked.post("/retrieve_future", {"request_id": number}).status_code == 410


def test_the_bell_wakes_both_ends(asked):
    """Without it a future looks again only now and then; with it, at once."""
    bell = Bell(asked.socket)
    assert bell.wait(300)  # it is connected
    found = []

    def run():
        while not found:
            if bell.wait(10) and (numbers := asked.finish()):
                bell.ring(numbers)
                found.extend(numbers)

    thread = threading.Thread(target=run)
    thread.start()
    number = asked.model(asked.session())["request_id"]
    while (answer := asked.post("/retrieve_future", {"request_id": number}).json()) and (
        answer.get("type") == "try_again"
    ):
        time.sleep(0.01)
    thread.join()
    bell.close()

    assert answer == {"did": "create_model"}
    assert found == [int(number)]


def test_users_see_nothing_of_each_other(tmp_path):
    with serving(tmp_path, open_to_all=False, seconds=0.2) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        ada, bob = (f"tml-{service.store.add_user(User(name))}" for name in ("ada", "bob"))
        session = asked.session(ada)
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tlora-fx/small"}
        made = asked.post("/create_model", body, ada).json()
        model = made["model_id"]

        assert asked.post("/create_session", {}, "tml-no").status_code == 401
        assert asked.client.post("/create_session", json={}).status_code == 401
        bearer = {"Authorization": f"Bearer {ada.removeprefix('tml-')}"}
        assert asked.client.get("/training_runs", headers=bearer).status_code == 200
        assert asked.post("/create_model", body, bob).status_code == 410
        assert asked.post("/session_heartbeat", {"session_id": session}, bob).status_code == 410
        number = {"request_id": made["request_id"]}
        assert asked.post("/retrieve_future", number, bob).status_code == 410
        assert asked.post("/get_info", {"model_id": model}, bob).status_code == 404
        assert asked.get(f"/training_runs/{model}", bob).status_code == 404
        assert asked.get(f"/training_runs/{model}", ada).json()["model_owner"] == "ada"
        assert asked.get("/training_runs", bob).json()["training_runs"] == []
        assert asked.get("/sessions", bob).json() == {"sessions": []}
        assert asked.get(f"/sessions/{session}", ada).json()["training_run_ids"] == [model]


def test_a_published_checkpoint_can_be_used_by_all_and_changed_by_its_owner(tmp_path):
    with serving(tmp_path, open_to_all=False, seconds=0.2) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        ada, bob = (f"tml-{service.store.add_user(User(name))}" for name in ("ada", "bob"))
        body = {"session_id": asked.session(ada), "model_seq_id": 0, "base_model": "x"}
        model = asked.post("/create_model", body, ada).json()["model_id"]
        [[command]] = asked.log.runnable().values()
        config = {"rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": False}
        kept = Checkpoint(f"tinker://{model}/weights/a", model, "ada", "weights", "v", 7, 1.0, None,
                          config)  # fmt: skip
        asked.log.finish([Outcome(command, json_answer({}), checkpoint=kept, config=config)])
        place, info = f"/training_runs/{model}/checkpoints/weights/a", {"tinker_path": kept.path}

        assert asked.post("/weights_info", info, bob).status_code == 404
        assert asked.post(f"{place}/publish", {}, bob).status_code == 404
        assert asked.post(f"{place}/publish", {}, ada).status_code == 204
        assert asked.post("/weights_info", info, bob).json()["lora_rank"] == 4
        assert asked.client.delete(place, headers={"X-API-Key": bob}).status_code == 404
        assert asked.get("/checkpoints", bob).json()["checkpoints"] == []
        hidden = asked.client.delete(f"{place}/publish", headers={"X-API-Key": ada})
        assert hidden.status_code == 204
        assert asked.post("/weights_info", info, bob).status_code == 404


def test_a_session_ends_once(asked):
    session = asked.session()
    end = {"reason": {"type": "success"}, "detail": None}

    assert asked.post("/session_heartbeat", {"session_id": session}).status_code == 200
    for _ in range(2):
        assert asked.post(f"/sessions/{session}/finish", end).status_code == 204
    assert asked.post("/session_heartbeat", {"session_id": session}).status_code == 410
    assert asked.post("/sessions/nothing/finish", end).status_code == 404


def test_requests_tokens_seconds_and_price_are_counted_by_user(tmp_path):
    with serving(tmp_path, price=2.5) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        asked.model(asked.session())
        asked.model(asked.session())
        asked.finish(seconds=36.0)
        for _ in range(2):  # answered again after a restart, nothing is counted twice
            asked.log.finish([Outcome(Command(1, "local", "q", 0, "x", b""), json_answer({}), 9)])
        text = httpx.get(f"{asked.address}/metrics", timeout=300).text

    expected = {"requests": 2.0, "tokens": 6.0, "seconds": 36.0, "price": 0.025}
    for name, value in expected.items():
        assert f'tlora_tinker_{name}{{kind="create_model",user="local"}} {value}' in text
    assert 'tlora_tinker_slowdown{user="local"} 1.0' in text


def test_what_a_user_has_used_is_shown_to_that_user_and_to_administrators(asked):
    """In the metrics; what is no user's is shown to all."""
    add = asked.service.store.add_user
    tokens = {name: add(User(name, admin=name == "root")) for name in ("alice", "bob", "root")}
    for name in ("alice", "bob"):
        asked.model(asked.session(f"tml-{tokens[name]}"), f"tml-{tokens[name]}")
    asked.finish(seconds=36.0)
    seen = {}
    for name, token in tokens.items():
        headers = {"Authorization": f"Bearer {token}"}
        text = httpx.get(f"{asked.address}/metrics", headers=headers, timeout=300).text
        assert "tlora_gpus 1.0" in text
        seen[name] = set(re.findall(r'tlora_tinker_.*user="(\w+)"', text))

    assert seen == {"alice": {"alice"}, "bob": {"bob"}, "root": {"alice", "bob"}}


def test_a_request_says_what_it_waited_for(asked):
    session = asked.session()
    model = asked.model(session)["model_id"]
    asked.finish(seconds=0.01)
    asked.post("/optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    asked.finish(seconds=0.02)
    found = asked.get(f"/training_runs/{model}/requests").json()

    assert [each["kind"] for each in found["requests"]] == ["optim_step", "create_model"]
    assert found["requests"][0]["own_seconds"] == pytest.approx(0.02)
    assert found["requests"][0]["why"] in REASONS.values()
    assert found["slowdown_p95"] >= 1
    exported = asked.get(f"/sessions/{session}/trace_export").json()
    assert exported["status"] == "ready"
    events = httpx.get(exported["url"], headers=KEY, timeout=300).json()["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    assert [each["tid"] for each in spans] == [1, 1, 2, 2]
    assert spans[3]["dur"] == pytest.approx(2e4)
    assert [each["args"]["name"] for each in events if each["ph"] == "M"] == [model]
    assert asked.get("/sessions/another/trace").status_code == 404


@pytest.mark.parametrize(
    ("state", "took_over", "said"),
    [
        ("off", None, []),
        ("compiling", None, [("compiled", "0.0")]),
        ("failed", None, [("compiled", "0.0")]),
        ("compiled", {"cycle": 7}, [("compiled", "1.0"), ("compiled_after_cycle", "7.0")]),
    ],
)
def test_metrics_say_whether_compiled_layers_run(asked, state, took_over, said):
    """And behind which cycle they took over, where a service compiles."""
    asked.log.tell({LAYERS: state, TOOK_OVER: took_over})
    text = httpx.get(f"{asked.address}/metrics", timeout=300).text

    assert re.findall(r"^tlora_tinker_(compiled\w*) (\S+)$", text, re.MULTILINE) == said


def test_who_has_used_all_hours_or_bytes_gets_no_more(tmp_path):
    with serving(tmp_path, open_to_all=False, seconds=0.2) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        ada, bob = (
            f"tml-{service.store.add_user(user)}"
            for user in (User("ada", gpu_hours=0.01), User("bob"))
        )
        body = {"session_id": asked.session(ada), "model_seq_id": 0, "base_model": "x"}
        model = asked.post("/create_model", body, ada).json()["model_id"]
        step = {"model_id": model, "seq_id": 1, "adam_params": {}}
        assert asked.post("/optim_step", step, ada).status_code == 200
        asked.finish(seconds=37.0)
        refused = asked.post("/optim_step", step | {"seq_id": 2}, ada)

        assert refused.status_code == 429
        assert "no GPU-hours are left" in refused.text
        body |= {"session_id": asked.session(bob)}
        model = asked.post("/create_model", body, bob).json()["model_id"]
        [[command]] = asked.log.runnable().values()
        kept = Checkpoint(
            "tinker://m/weights/a", model, "bob", "weights", "v", 11 << 30, 1.0, None, {}
        )
        asked.log.finish([Outcome(command, json_answer({}), checkpoint=kept)])
        save = {"model_id": model, "seq_id": 1, "path": "b"}
        assert asked.post("/save_weights", save, bob).status_code == 429
        assert asked.post("/optim_step", save, bob).status_code == 200


def test_what_was_answered_long_ago_is_forgotten(asked):
    """Unless the model's snapshot does not have it; a repeat of it is not run again."""
    model = asked.model(asked.session())["model_id"]
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    number = asked.post("/optim_step", step).json()["request_id"]
    asked.finish(seconds=0.01)
    asked.log.prune(time.time() + 1)
    assert "did" in asked.post("/retrieve_future", {"request_id": number}).json()
    asked.log.keep(model, 1)
    asked.log.prune(time.time() - 60)
    assert "did" in asked.post("/retrieve_future", {"request_id": number}).json()
    asked.log.prune(time.time() + 1)

    assert asked.post("/retrieve_future", {"request_id": number}).status_code == 410
    assert asked.post("/optim_step", step).status_code == 410
    assert asked.post("/optim_step", step | {"seq_id": 2}).status_code == 200
    assert asked.log.times() == asked.log.times(model=model)
    assert len(asked.log.usage()) == 2


def test_a_request_that_the_disk_does_not_take_is_answered_507(asked, monkeypatch):
    """Before it is full, and where it is; the same request is taken once there is room."""

    def full(*given, **how):
        raise OSError(errno.ENOSPC, "database or disk is full")

    model = asked.model(asked.session())["model_id"]
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    with monkeypatch.context() as patch:
        patch.setattr("tlora_fx.server.submission.missing_bytes", lambda folder: 1 << 20)
        early = asked.post("/optim_step", step)
        session = asked.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "x"}
        assert asked.post("/create_model", body).status_code == 507
        still = asked.get("/training_runs")
    with monkeypatch.context() as patch:
        patch.setattr(CommandLog, "append", full)
        late = asked.post("/optim_step", step)

    assert (early.status_code, late.status_code, still.status_code) == (507, 507, 200)
    assert early.json()["code"] == late.json()["code"] == "T0960"
    assert asked.post("/optim_step", step).status_code == 200


def test_a_page_of_another_origin_cannot_ask(asked):
    answer = asked.post("/create_session", {}, headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403


def test_the_api_is_served_only_where_it_was_asked_for(tmp_path):
    from fastapi.testclient import TestClient

    from tlora_fx.server.app import make_app
    from tlora_fx.server.service import make_service
    from tlora_fx.server.submission import IntakeLimits

    service = make_service(tmp_path, IntakeLimits(), open_to_all=True)
    with TestClient(make_app(service, ("testserver",))) as client:
        assert client.post("/api/v1/create_session", json={}).status_code in (404, 405)


def test_a_checkpoint_is_shown_and_deleted(asked):
    model = asked.model(asked.session())["model_id"]
    [[command]] = asked.log.runnable().values()
    path = f"tinker://{model}/weights/a.b"
    config = {"rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": False}
    kept = Checkpoint(path, model, "local", "weights", "models/v", 7, 1.0, None, config, {"k": "v"})
    named = replace(kept, path=f"tinker://{model}/sampler_weights/s", kind="sampler_weights")
    (asked.folder / "tinker/models/v").mkdir(parents=True)
    asked.log.finish(
        [
            Outcome(command, json_answer({}), checkpoint=each, config=config)
            for each in (kept, named)
        ]
    )

    shown = asked.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [each["checkpoint_id"] for each in shown] == ["weights/a.b", "sampler_weights/s"]
    assert [each["checkpoint_type"] for each in shown] == ["training", "sampler"]
    run = asked.get(f"/training_runs/{model}").json()
    assert run["last_checkpoint"]["tinker_path"] == path
    assert run["lora_rank"] == 4
    assert asked.post("/weights_info", {"tinker_path": path}).json()["train_unembed"] is False
    place = f"/training_runs/{model}/checkpoints/weights/a.b"
    asked.client.put(f"{place}/ttl", json={"ttl_seconds": 7200}, headers=KEY)
    assert asked.log.checkpoint(path).expires == pytest.approx(time.time() + 7200, abs=60)
    asked.client.put(f"{place}/ttl", json={"ttl_seconds": None}, headers=KEY)
    assert asked.log.checkpoint(path).expires is None
    (asked.folder / "tinker/models/v/state.json").write_text("{}")
    body = {"source_path": path, "session_id": asked.session(), "model_seq_id": 3}
    copies = [asked.post("/copy_weights", body).json()["tinker_path"] for _ in range(2)]
    assert copies == [f"tinker://{body['session_id']}:train:3/weights/a.b"] * 2
    copied = asked.log.checkpoint(copies[0])
    gone = asked.client.delete(f"/training_runs/{model}/checkpoints/weights/a.b", headers=KEY)
    assert gone.status_code == 204
    assert (asked.folder / "tinker" / copied.folder / "state.json").read_text() == "{}"
    assert asked.post("/copy_weights", body).status_code == 404
    assert not (asked.folder / "tinker/models/v").exists()
    assert asked.post("/weights_info", {"tinker_path": path}).status_code == 404
    assert len(json.dumps(asked.get("/checkpoints").json()["checkpoints"])) > 2


def content(name, folder="v"):
    """What a file of `exported` has."""
    return f"{folder} {name}".encode() * 100_000


def exported(asked, key="tml-any", folder="v"):
    """A checkpoint with two files, which belongs to whom the key does."""
    model = asked.post(
        "/create_model",
        {"session_id": asked.session(key), "model_seq_id": 0, "base_model": "x"}, key,
    ).json()["model_id"]  # fmt: skip
    [[command]] = asked.log.runnable().values()
    checkpoint = Checkpoint(
        f"tinker://{model}/external_weights/a", model, command.user, "external_weights",
        f"models/{folder}", 7, 1.0, None, {},
    )  # fmt: skip
    asked.log.finish([Outcome(command, json_answer({}), checkpoint=checkpoint)])
    place = asked.folder / "tinker/models" / folder
    place.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "state.json"):
        (place / name).write_bytes(content(name, folder))
    return f"/training_runs/{model}/checkpoints/external_weights/a"


def test_nobody_puts_a_copy_into_another_users_session(tmp_path):
    """It would lie there already when the owner makes a copy of that name."""
    with serving(tmp_path, open_to_all=False) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        ada, bob = (f"tml-{service.store.add_user(User(name))}" for name in ("ada", "bob"))
        model = exported(asked, bob).split("/")[2]
        body = {"source_path": f"tinker://{model}/external_weights/a",
                "session_id": asked.session(ada)}  # fmt: skip

        assert asked.post("/copy_weights", body, bob).status_code == 410
        assert [each.name for each in (tmp_path / "tinker/models").iterdir()] == ["v"]


def test_another_checkpoint_is_not_copied_to_where_one_of_its_name_is(asked):
    """The answer would be the path of the other one's weights."""
    session, sources = asked.session(), []
    for folder in ("v", "w"):
        place = exported(asked, folder=folder)
        sources.append(place.replace("/training_runs/", "tinker://").replace("/checkpoints", ""))
    bodies = [{"source_path": source, "session_id": session} for source in sources]

    answers = [asked.post("/copy_weights", body) for body in (*bodies, bodies[0])]

    assert [each.status_code for each in answers] == [200, 409, 200]
    copied = asked.log.checkpoint(answers[0].json()["tinker_path"])
    name = "adapter_model.safetensors"
    assert (asked.folder / "tinker" / copied.folder / name).read_bytes() == content(name)


def test_a_copy_that_is_asked_for_again_changes_nothing(asked):
    """A repeat that comes late does not undo what its owner said of the copy since then."""
    place = exported(asked)
    source = place.replace("/training_runs/", "tinker://").replace("/checkpoints", "")
    body = {"source_path": source, "session_id": asked.session(), "ttl_seconds": 600}
    path = asked.post("/copy_weights", body).json()["tinker_path"]
    first = asked.log.checkpoint(path)
    assert first.expires == pytest.approx(time.time() + 600, abs=60)
    assert asked.post("/copy_weights", body).json() == {"tinker_path": path}
    assert asked.log.checkpoint(path) == first
    asked.log.change(first, expires=None, public=True)

    assert asked.post("/copy_weights", body).json() == {"tinker_path": path}
    assert asked.log.checkpoint(path) == replace(first, expires=None, public=True)
    # An expired one is no copy any more.
    asked.log.change(first, expires=1.0, public=True)
    assert asked.post("/copy_weights", body).json() == {"tinker_path": path}
    assert asked.log.checkpoint(path).made > first.made


def test_a_repeat_is_answered_as_before_once_a_quota_is_used_up(asked):
    """What was asked for is there, and a repeat of it costs nothing."""
    (asked.folder / "tinker/layout.json").write_text(json.dumps(BASE))
    place = exported(asked)
    source = place.replace("/training_runs/", "tinker://").replace("/checkpoints", "")
    copy = {"source_path": source, "session_id": asked.session()}
    key = {"X-Idempotency-Key": "k"}
    model = asked.model(asked.session())["model_id"]
    save = {"model_id": model, "seq_id": 1, "path": "b"}

    sums = {name: hashlib.sha256(each).hexdigest() for name, each in peft_files().items()}
    send_folder(asked, "another", peft_files())

    def ask():
        return [
            asked.post("/copy_weights", copy),
            asked.post("/peft_folders/a", sums, headers=key),
            asked.post("/save_weights", save),
        ]

    first = [each.json() for each in ask()]
    asked.service.intake.limits = replace(asked.service.intake.limits, stored_bytes=0)

    assert [each.json() for each in ask()] == first
    assert asked.post("/copy_weights", copy | {"model_seq_id": 1}).status_code == 429
    assert asked.post("/save_weights", save | {"seq_id": 2}).status_code == 429
    assert asked.post("/peft_folders/a", sums).status_code == 429


def test_links_lead_to_the_public_address(tmp_path):
    """Its path too, which a proxy removes; headers of a proxy say nothing then."""
    public = "https://train.example.com/tinker"
    with serving(tmp_path, public_url=public) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        place = exported(asked, "tml-any")
        session = place.split("/")[2].partition(":")[0]
        links = [*asked.get(f"{place}/external_weights_urls").json()["urls"].values()]
        links.append(asked.get(f"/sessions/{session}/trace_export").json()["url"])

        assert {link.startswith(f"{public}/api/v1/") for link in links} == {True}
        for link in links:
            assert asked.get(link.removeprefix(f"{public}/api/v1")).status_code == 200


def test_a_link_fetches_one_file_of_its_owner_without_a_key(tmp_path):
    """Another file, time or signature is refused, also by another service."""
    with serving(tmp_path, open_to_all=False) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        ada, bob = (f"tml-{service.store.add_user(User(name))}" for name in ("ada", "bob"))
        place = exported(asked, ada)
        assert asked.get(f"{place}/external_weights_urls", bob).status_code == 404
        assert asked.client.get(f"{place}/external_weights_urls").status_code == 401
        found = asked.get(f"{place}/external_weights_urls", ada).json()
        links = found["urls"]
        assert set(links) == {"adapter_config.json", "adapter_model.safetensors"}
        assert datetime.fromisoformat(found["expires"]).timestamp() > time.time() + 3000
        for name, link in links.items():
            answer = httpx.get(link, timeout=300)
            assert answer.content == content(name)
            assert answer.headers["content-length"] == str(len(answer.content))
        url = httpx.URL(links["adapter_config.json"])
        state = url.path.replace("adapter_config.json", "state.json")
        for wrong in (
            url.copy_with(path=state),
            url.copy_set_param("expires", "9" * 11),
            url.copy_set_param("signature", "0" * 64),
            url.copy_set_param("signature", "\u00e9"),
        ):
            assert httpx.get(wrong, timeout=300).status_code == 401
        # Whoever has the key of this service alone can sign.
        with serving(tmp_path / "other", open_to_all=False) as (other, _, _):
            there = httpx.get(str(url).replace(address, other), timeout=300)
            assert there.status_code == 401

    links = Links.of(tmp_path / "tinker")
    assert (tmp_path / "tinker/links.key").stat().st_mode & 0o777 == 0o600
    with serving(tmp_path, open_to_all=False) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        again = url.copy_with(port=httpx.URL(address).port)
        assert httpx.get(again, timeout=300).status_code == 200
        path = place.replace("/training_runs/", "tinker://").replace("/checkpoints", "")
        past = int(time.time()) - 1
        late = again.copy_merge_params(
            {"expires": past, "signature": links.sign(path, "adapter_config.json", past)}
        )
        assert "the link has expired" in httpx.get(late, timeout=300).text
        asked.client.delete(place, headers={"X-API-Key": ada})
        assert httpx.get(again, timeout=300).status_code == 404


#: Of one linear, as a trainer tells it.
BASE = {"layout": {"train_attn": {"q_proj": [3, 5]}, "train_mlp": {}, "train_unembed": {}},
        "max_rank": 8}  # fmt: skip


def peft_files(rank=2, value=0.5):
    """The files of an adapter of that linear, by name."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]}
    stem = "base_model.model.q_proj.lora_"
    tensors = {f"{stem}A.weight": np.full((rank, 5), value, "f4"),
               f"{stem}B.weight": np.full((3, rank), value, "f4")}  # fmt: skip
    return {"adapter_config.json": json.dumps(config).encode(),
            "adapter_model.safetensors": save(tensors)}  # fmt: skip


def send_folder(asked, name, files, key="tml-any", **headers):
    """Upload files, and make a checkpoint of them."""
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    for file, content in files.items():
        put = asked.client.put(f"/files/{sums[file]}", content=content, headers={"X-API-Key": key})
        assert put.status_code in (201, 401)
    return asked.post(f"/peft_folders/{name}", sums, key, headers=headers)


def test_a_key_of_links_that_was_cut_is_made_anew(tmp_path):
    """By an empty one, which a power failure may leave, anybody could sign."""
    whole = Links.of(tmp_path)
    assert Links.of(tmp_path) == whole
    (tmp_path / "links.key").write_bytes(b"")

    again = Links.of(tmp_path)

    assert len(again.key) == 32
    assert Links.of(tmp_path) == again
    assert (tmp_path / "links.key").stat().st_mode & 0o777 == 0o600


def test_a_peft_folder_becomes_a_checkpoint_of_who_sent_it(tmp_path):
    with serving(tmp_path, open_to_all=False) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        ada, bob = (f"tml-{service.store.add_user(User(name))}" for name in ("ada", "bob"))
        early = send_folder(asked, "a", peft_files(), ada)
        assert "the base is not loaded yet" in early.text
        (tmp_path / "tinker/layout.json").write_text(json.dumps(BASE))
        assert send_folder(asked, "a", peft_files(), "tml-no").status_code == 401
        assert send_folder(asked, "a..b", peft_files(), ada).status_code == 422
        path = send_folder(asked, "a.b", peft_files(), ada).json()["tinker_path"]
        key = {"X-Idempotency-Key": "k"}
        answers = [send_folder(asked, "a.b", peft_files(), ada, **key) for _ in range(2)]
        answers.append(send_folder(asked, "a.b", peft_files(value=1.5), ada, **key))
        # What another user has uploaded is not there.
        sums = {name: hashlib.sha256(each).hexdigest() for name, each in peft_files().items()}
        assert "was not uploaded" in asked.post("/peft_folders/a", sums, bob).text

        assert [each.status_code for each in answers] == [201] * 3
        paths = [each.json()["tinker_path"] for each in answers]
        assert paths[0] == paths[1]
        assert len({path, *paths}) == 3
        assert re.fullmatch(r"tinker://s\w{16}:train:0/weights/a.b", path)
        info = {"tinker_path": path}
        assert asked.post("/weights_info", info, bob).status_code == 404
        found = asked.post("/weights_info", info, ada).json()
        assert [found[name] for name in ("lora_rank", "train_attn", "train_mlp")] == [
            2,
            True,
            False,
        ]
        shown = asked.get("/checkpoints", ada).json()["checkpoints"]
        assert {each["tinker_path"] for each in shown} == {path, *paths}
        assert all(each["size_bytes"] > 100 for each in shown)
        folder = tmp_path / "tinker" / asked.log.checkpoint(path).folder
        assert json.loads((folder / "state.json").read_text())["scale"] == 0.5
        for name, content in peft_files().items():
            assert (folder / name).read_bytes() == content


def test_a_peft_folder_that_is_sent_again_changes_nothing(asked, monkeypatch):
    """Nor does it matter that its session is over."""
    (asked.folder / "tinker/layout.json").write_text(json.dumps(BASE))
    key = {"X-Idempotency-Key": "k"}
    path = send_folder(asked, "a", peft_files(), **key).json()["tinker_path"]
    first = asked.log.checkpoint(path)
    asked.log.change(first, expires=9e9, public=True)
    monkeypatch.setattr("tlora_fx.training.log.SESSION_SECONDS", 0.0)

    again = send_folder(asked, "a", peft_files(), **key)

    assert again.json() == {"tinker_path": path}
    assert asked.log.checkpoint(path) == replace(first, expires=9e9, public=True)


def test_what_is_no_peft_folder_leaves_nothing(tmp_path):
    """Nor does one of which a process was killed."""
    with serving(tmp_path) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        (tmp_path / "tinker/layout.json").write_text(json.dumps(BASE))
        wrong = send_folder(asked, "a", peft_files(rank=9))
        assert wrong.status_code == 422
        assert wrong.json()["code"] == "T0405"
        assert "--tinker-rank" in wrong.json()["help"]
        assert str(tmp_path) not in wrong.text
        assert "not finite" in send_folder(asked, "a", peft_files(value=np.inf)).text
        [config, _] = peft_files()
        one = send_folder(asked, "a", {config: peft_files()[config]})
        assert one.status_code == 422
        assert "adapter_model.safetensors" in one.text
        sums = {"adapter_config.json": "../x", "adapter_model.safetensors": "0" * 64}
        assert asked.post("/peft_folders/a", sums).status_code == 422
        service.intake.limits = replace(service.intake.limits, stored_bytes=0)
        assert asked.post("/peft_folders/a", sums | {config: "0" * 64}).status_code == 429

        assert asked.get("/checkpoints").json()["checkpoints"] == []
        assert asked.get("/sessions").json()["sessions"] == []
        assert not (tmp_path / "tinker/models").exists()
        assert not [*(tmp_path / "tinker").glob(".upload-*")]
    left = tmp_path / "tinker/.upload-x"
    left.mkdir()
    (left / "adapter_config.json").write_bytes(b"x")
    with serving(tmp_path):
        assert not left.exists()


FAR = {"ttl_seconds": 10**15}
DEEP = b'{"model_id": ' + b"[" * 100_000
SAID = b'{"session_id": "x", "model_seq_id": 1, "user_metadata": %s}'
NESTED = SAID % (b'{"a":' * 300 + b"1" + b"}" * 300)
LISTED = SAID % (b'{"a":' + b"[" * 300 + b"]" * 300 + b"}")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("optim_step", {"model_id": "\ud800", "seq_id": 1}),
        ("optim_step", {"model_id": "{model}", "seq_id": 2**70}),
        ("optim_step", DEEP),
        ("get_info", {"model_id": "\ud800"}),
        ("create_session", {"user_metadata": {"a": "\ud800"}}),
        ("create_session", {"display_name": "\ud800"}),
        ("create_model", {"session_id": "\ud800", "model_seq_id": 1, "base_model": "x"}),
        ("copy_weights", {"source_path": "tinker://{model}/weights/a", **FAR}),
        # What a folder could not be called, or no answer could show.
        ("copy_weights", {"source_path": "tinker://x", "model_seq_id": 10**300}),
        ("create_model", {"session_id": "x", "model_seq_id": 10**300, "base_model": "x"}),
        ("create_model", {"session_id": "x", "model_seq_id": -1, "base_model": "x"}),
        ("create_custom_loss", {"session_id": "x", "custom_loss_seq_id": 10**300}),
        ("create_sampling_session", {"session_id": "x", "sampling_session_seq_id": 10**300}),
        ("create_session", NESTED),
        ("create_session", LISTED),
        ("create_model", NESTED),
    ],
)
def test_what_no_file_can_hold_is_the_mistake_of_who_asks(asked, route, body):
    """No failure of the service, which a client would repeat for ever."""
    model = asked.model(asked.session())["model_id"]
    if not isinstance(body, bytes):
        body = json.dumps(body).replace("{model}", model).encode()
    answer = asked.post(f"/{route}", content=body, headers={"Content-Type": "application/json"})

    assert answer.status_code == 422, answer.text
    assert answer.json()["help"] != "see its log"


@pytest.mark.parametrize(("levels", "status"), [(MAX_DEPTH, 200), (MAX_DEPTH + 1, 422)])
def test_what_a_client_says_of_itself_has_as_many_levels_as_the_refusal_says(asked, levels, status):
    said = {}
    for _ in range(levels - 1):
        said = {"a": said}

    assert asked.post("/create_session", {"user_metadata": said}).status_code == status


@pytest.mark.parametrize("query", ["limit=-1", "offset=-1"])
def test_a_page_of_less_than_nothing_is_refused(asked, query):
    asked.model(asked.session())
    assert asked.get(f"/training_runs?{query}").status_code == 422


def test_a_client_that_does_not_wait_is_told_to_send_again(tmp_path):
    """With 429 and after how long; a repeat of what was taken is answered as before."""
    with serving(tmp_path, waiting=Waiting(queue=Bound(2, 1000))) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        model = asked.model(asked.session())["model_id"]
        asked.finish()
        requests = {
            seq: {"model_id": model, "seq_id": seq, "adam_params": {}} for seq in (1, 3, 4, 5)
        }
        taken = [asked.post("/optim_step", requests[seq]) for seq in (3, 4)]
        refused, again, fills = (asked.post("/optim_step", requests[seq]) for seq in (5, 3, 1))

    assert [each.status_code for each in taken] == [200, 200]
    assert (refused.status_code, refused.json()["code"]) == (429, "T0992")
    assert 0 < float(refused.headers["Retry-After"]) <= 60
    assert again.json() == taken[0].json()
    assert fills.status_code == 200
