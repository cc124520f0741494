"""Two hundred clients at a time: each has the numbers that all others of its kind have."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from tests.server.tinker.serving import serving, trainer
from tests.server.tinker.test_kills import Client
from tests.training.clients import datum, read_forward

CLIENTS, STEPS = 200, 2
SAMPLES = [datum([5, 6, 7, 8, 9]), datum([10, 11, 12])]


def metrics(body):
    """Of an answer to a request for gradients, or to a step."""
    return json.loads(body)["metrics"] if body.startswith(b"{") else read_forward(body)[0]


@pytest.mark.slow
def test_two_hundred_clients_at_a_time_lose_and_double_nothing(tmp_path):
    """More than have a place on the device; all begin alike, so all numbers are alike."""
    answers = {}
    with (
        serving(tmp_path) as (address, socket, _),
        trainer(tmp_path / "tinker", socket),
        httpx.Client(
            base_url=f"{address}/api/v1", timeout=300,
            limits=httpx.Limits(max_connections=CLIENTS),
        ) as pool,
    ):  # fmt: skip

        def run(number):
            client = Client(lambda: pool)
            client.begin()
            futures = [each for _ in range(STEPS) for each in client.step(SAMPLES, SAMPLES)]
            answers[number] = [metrics(client.result(each)) for each in futures]

        threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        usage = pool.get(f"{address}/metrics").text

    assert len(answers) == CLIENTS
    first = answers[0]
    assert first[3]["loss:sum"] < first[0]["loss:sum"]
    for own in answers.values():
        for one, other in zip(own, first, strict=True):
            assert one == pytest.approx(other, rel=1e-9)
    steps = float(CLIENTS * STEPS)
    assert f'tlora_tinker_requests{{kind="optim_step",user="local"}} {steps}' in usage
