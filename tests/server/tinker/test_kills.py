"""`serve --tinker` as its users have it: killed in any of its processes, it loses nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.server.test_serve import serving
from tests.server.tinker.forked import Forked
from tests.training.clients import datum, request
from tlora_fx.training.messages import _CLASS

SECONDS = 600
CLIENTS, KILLS = 3, int(os.environ.get("TLORA_FX_KILLS", "60"))
SEED = int(os.environ.get("TLORA_FX_KILLS_SEED", "7"))
#: Processes that `serve` begins anew take some 20 s of a core, mostly for imports. Forks take less
#: than one.
SERVED_KILLS = max(5, KILLS // 3)


@dataclass(eq=False)
class Drawn:
    """Completions; their log-probabilities depend on the last bit on what is drawn beside them."""

    tokens: list[bytes]
    prompt: bytes
    logprobs: np.ndarray
    __hash__ = None

    @classmethod
    def of(cls, content):
        message = _CLASS["SampleResponse"]()
        message.ParseFromString(content)
        drawn = message.sequences
        logprobs = np.concatenate([np.frombuffer(each.logprobs, "<f4") for each in drawn])
        return cls([each.tokens for each in drawn], message.prompt_logprobs, logprobs)

    def __eq__(self, other):
        same = (self.tokens, self.prompt) == (other.tokens, other.prompt)
        return same and np.allclose(self.logprobs, other.logprobs, rtol=1e-5)


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
        """The bytes of an answer, in which the session has another name."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            answer = self.ask("/retrieve_future", {"request_id": future["request_id"]})
            if b'"try_again"' not in answer.content:
                content = answer.content.replace(self.session.encode(), b"SESSION")
                return Drawn.of(content) if "sample_sequence_ids" in future else content
        raise AssertionError(f"stuck: {future}")

    def begin(self, **config):
        self.session = self.ask("/create_session", {}).json()["session_id"]
        body = {
            "session_id": self.session, "model_seq_id": 0, "base_model": "tlora-fx/small",
            "lora_config": {"rank": 8, "seed": 5, **config},
        }  # fmt: skip
        made = self.ask("/create_model", body).json()
        self.result(made)
        self.model = made["model_id"]

    def send(self, route, **fields):
        self.seq += 1
        body = {"model_id": self.model, "seq_id": self.seq, **fields}
        return self.ask(route, body).json()

    def forward_backward(self, data):
        self.seq += 1
        content = request(self.model, self.seq, data)
        return self.ask("/forward_backward", content=content).json()

    def step(self, *data):
        """Requests for gradients and a step, all sent before the first answer; futures."""
        futures = [self.forward_backward(each) for each in data]
        return [*futures, self.send("/optim_step", adam_params={"learning_rate": 1e-2})]

    def sample(self, place, seq):
        params = {"max_tokens": 6, "seed": seq, "temperature": 1.0}
        body = {
            "sampling_session_id": f"{self.session}:sample:{place}", "seq_id": seq,
            "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "sampling_params": params,
            "num_samples": 2, "prompt_logprobs": True,
        }  # fmt: skip
        return self.ask("/asample", body).json()


def data_of(draw):
    """A few short sequences, or some long ones that a request has in pieces."""
    sizes = [700] * 4 if draw.random() < 0.06 else [draw.randint(3, 40) for _ in range(3)]
    return [datum([draw.randrange(3, 259) for _ in range(size)]) for size in sizes]


def run_client(client, number, rounds, sent):
    """All that one client does; its answers. `sent` hears of each request."""
    draw = random.Random(SEED * CLIENTS + number)
    client.begin(rank=4 + 4 * number, train_unembed=number != 1)
    answers, fetched = [], []
    for turn in range(rounds):
        futures = []
        for each in (data_of(draw), data_of(draw)):
            futures.append(client.forward_backward(each))
            sent(number)
        futures += client.step()
        sent(number)
        if turn % 3 == number % 3:
            # With gradients that no step has used.
            futures.append(client.forward_backward(data_of(draw)))
            futures.append(client.send("/save_weights", path=f"round-{turn}"))
            sent(number)
            futures.append(client.send("/save_weights_for_sampler", sampling_session_seq_id=turn))
            answers += [client.result(each) for each in futures]
            fetched, futures = fetched + futures, [client.sample(turn, seq) for seq in range(2)]
            sent(number)
        answers += [client.result(each) for each in futures]
        fetched += futures
    last = client.send("/save_weights", path="last")
    answers.append(client.result(last))
    assert [client.result(each) for each in [*fetched, last]] == answers
    return answers


#: By process: a file that it has open once it is at work.
OPEN = {"trainer": "trainer.lock", "answering": "ledger.sqlite"}


def children(pid):
    """The processes that a process has started and that are at work, by what they do."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            with suppress(OSError):
                words = Path(f"/proc/{child}/cmdline").read_bytes()
                files = {each.readlink().name for each in Path(f"/proc/{child}/fd").iterdir()}
                for name, file in OPEN.items():
                    if b"spawn_main" in words and file in files:
                        found[name] = child
    return found


class Served:
    """`tlora-fx serve --tinker`, which starts processes of its own again; killed too, it is begun.

    A parent that is killed alone leaves a trainer that is at work.
    """

    hits = (*Forked.hits, "parent", "all")

    def __init__(self, folder):
        self.run = folder / "run"
        self.models = self.run / "service" / "tinker" / "models"
        self.start()

    def start(self):
        self._context = serving(self.run, "--tinker")
        self.process, self.client = self._context.__enter__()
        self.client.base_url = str(self.client.base_url)

    def end(self):
        self._context.__exit__(None, None, None)

    def kill(self, hit):
        """Kill -9 what is hit; False where it is not there yet."""
        own = children(self.process.pid)
        named = {"both": ("trainer", "answering"), "all": ("trainer", "answering"), "parent": ()}
        hits = named.get(hit, (hit,))
        if not own.keys() >= {*hits}:
            return False
        if hit in ("parent", "all"):
            self.process.kill()
        for each in hits:
            os.kill(own[each], signal.SIGKILL)
        if hit in ("parent", "all"):
            self.process.wait()
            self.end()
            self.start()
        return True


def run_all(service, rounds, kills=0):
    """What clients are answered and what lies on the disk at the end; kills by what they hit."""
    draw, hits, sent = random.Random(SEED), Counter(), []
    # Requests at which the last kill comes.
    min_sent = CLIENTS * (rounds - 1) * 3
    clients = [Client(lambda: service.client) for _ in range(CLIENTS)]
    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [
                pool.submit(run_client, client, number, rounds, sent.append)
                for number, client in enumerate(clients)
            ]
            for at in range(kills):
                while len(sent) < at * min_sent // kills and not any(e.done() for e in running):
                    time.sleep(0.01)
                # Requests may be anywhere: in the log, running, or answered.
                time.sleep(draw.uniform(0, 0.3))
                while not service.kill(hit := service.hits[at % len(service.hits)]):
                    time.sleep(0.1)
                hits[hit] += 1
            answers = [each.result() for each in running]
        metrics = httpx.get(str(service.client.base_url.join("/metrics"))).text
    finally:
        service.end()
    files = {}
    for number, client in enumerate(clients):
        place = service.models / client.model.replace(":", ".")
        files |= {
            (number, str(file.relative_to(place))): file.read_bytes()
            for file in place.glob("version-*/*")
        }
    counts = re.findall(r"tlora_tinker_(?:requests|tokens)\{.*", metrics)
    return answers, files, counts, hits


def assert_nothing_happened(killed, whole):
    """All answers, files and counted requests of a run with kills are those of one without."""
    for own, other in zip(killed[0], whole[0], strict=True):
        pairs = enumerate(zip(own, other, strict=True))
        assert [at for at, (found, wanted) in pairs if found != wanted] == []
    assert killed[1].keys() == whole[1].keys()
    assert len(killed[1]) > 6 * CLIENTS
    assert [name for name in killed[1] if killed[1][name] != whole[1][name]] == []
    assert len(killed[2]) > 8
    assert killed[2] == whole[2]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "most"), [(Forked, KILLS), (Served, SERVED_KILLS)])
def test_killed_processes_lose_and_double_nothing_and_change_no_bit(
    tmp_path, monkeypatch, how, most
):
    """At random moments, while clients train, save and sample: all is as if nobody was killed."""
    monkeypatch.setenv("TLORA_FX_STRICT", "1")
    runs = []
    for name, kills in (("whole", 0), ("killed", most)):
        (tmp_path / name).mkdir()
        runs.append(run_all(how(tmp_path / name), most // CLIENTS + 1, kills))

    hits = runs[1][3]
    assert sum(hits.values()) == most
    assert hits.keys() == {*how.hits}
    assert_nothing_happened(runs[1], runs[0])
