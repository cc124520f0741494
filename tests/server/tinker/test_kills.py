"""`serve --tinker` as its users have it: killed in any of its processes, it loses nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.server.test_serve import serving
from tests.training.clients import datum, read_forward, request

SECONDS = 240
SAMPLES = [datum([5, 6, 7, 8, 9]), datum([10, 11, 12])]


class Client:
    """A client that repeats what fails, as the API's own does."""

    def __init__(self, service):
        self.service, self.seq = service, 0

    def ask(self, path, body=None, content=None):
        """An answer, whichever process has to be started for it first."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            sent = {"json": body} if content is None else {"content": content}
            try:
                answer = self.service().post(path, headers={"X-API-Key": "tml-x"}, **sent)
            except httpx.HTTPError:
                time.sleep(0.2)
                continue
            if answer.status_code < 500:
                assert answer.status_code < 300, answer.text
                return answer
            time.sleep(0.2)
        raise AssertionError("no answer")

    def result(self, future):
        while True:
            body = {"request_id": future["request_id"]}
            answer = self.ask("/retrieve_future", body)
            if answer.headers["content-type"] == "application/x-protobuf":
                return read_forward(answer.content)[0]
            if (content := answer.json()).get("type") != "try_again":
                return content

    def begin(self):
        self.session = self.ask("/create_session", {}).json()["session_id"]
        body = {
            "session_id": self.session, "model_seq_id": 0, "base_model": "tlora-fx/small",
            "lora_config": {"rank": 8, "seed": 5},
        }  # fmt: skip
        made = self.ask("/create_model", body).json()
        self.model = self.result(made)["model_id"]

    def step(self):
        """Two requests for gradients and a step, all sent before the first answer; futures."""
        futures = []
        for _ in range(2):
            self.seq += 1
            content = request(self.model, self.seq, SAMPLES)
            futures.append(self.ask("/forward_backward", content=content).json())
        self.seq += 1
        body = {"model_id": self.model, "seq_id": self.seq, "adam_params": {"learning_rate": 1e-2}}
        return [*futures, self.ask("/optim_step", body).json()]


def children(pid):
    """The processes that a process has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    # Of Python's own there is one that looks after what processes share.
    return [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def train(run, kill, steps):
    """Answers to a client's steps; after each is sent, `kill` is given the service's process."""
    held = {}

    def begin():
        held["context"] = serving(run, "--tinker")
        held["process"], held["client"] = held["context"].__enter__()
        held["client"].base_url = str(held["client"].base_url)

    begin()
    client = Client(lambda: held["client"])
    client.begin()
    answers, fetched = [], []
    for number in range(steps):
        futures = client.step()
        if kill(number, held["process"]):
            held["context"].__exit__(None, None, None)
            begin()
        answers.append([client.result(each) for each in futures])
        fetched += futures
    again = [client.result(each) for each in fetched]
    held["context"].__exit__(None, None, None)
    assert again == [each for own in answers for each in own]
    return answers


KILLS = 60


@pytest.mark.slow
def test_killed_processes_lose_and_double_nothing_and_change_no_bit(tmp_path, monkeypatch):
    """The trainer, who answers, or both with the service, while requests wait for them."""
    monkeypatch.setenv("TLORA_FX_STRICT", "1")
    draw, kills = random.Random(7), []

    def kill(number, process):
        # Requests may be anywhere: in the log, running, or answered.
        time.sleep(draw.uniform(0, 0.1))
        which = ("one", "other", "service")[number % 3]
        kills.append(which)
        if which == "service":
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return True
        own = sorted(children(process.pid))
        os.kill(own[0 if which == "one" else -1], signal.SIGKILL)
        return False

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = train(tmp_path / "a" / "run", kill, KILLS)
    expected = train(tmp_path / "b" / "run", lambda *_: False, KILLS)

    assert {name: kills.count(name) for name in kills} == {
        "one": KILLS // 3, "other": KILLS // 3, "service": KILLS // 3,
    }  # fmt: skip
    assert found == expected
    assert found[-1][0]["loss:sum"] < found[0][0]["loss:sum"]
