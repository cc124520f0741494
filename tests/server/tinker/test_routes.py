"""Routes without a trainer: who may ask, what has a place in the log, and futures that wait."""

from __future__ import annotations

import errno
import json
import re
import threading
import time

import httpx
import pytest

from tests.server.tinker.serving import KEY, Asked, asked, serving
from tests.training.clients import datum, request
from tlora_fx.server.ledger import User
from tlora_fx.server.tinker.routes import MAX_DEPTH
from tlora_fx.training.log import LAYERS, TOOK_OVER, WAITING, CommandLog
from tlora_fx.training.messages import _CLASS
from tlora_fx.training.process import Bell
from tlora_fx.training.records import Checkpoint, Command, Outcome, json_answer
from tlora_fx.training.times import REASONS
from tlora_fx.training.waiting import Bound, Waiting

__all__ = ["asked"]

PROTOBUF = {"Content-Type": "application/x-protobuf"}


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
