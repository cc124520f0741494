"""Damaged requests: each has an answer, and hurts nobody else."""

from __future__ import annotations

import json
import random

import pytest

from tests.training.clients import VOCABULARY, Client, cycle_of, datum, request, run_all
from tlora_fx.errors import RequestRefused
from tlora_fx.training.messages import canonical_request

KINDS = ("optim_step", "save_weights", "save_weights_for_sampler", "load_weights", "nothing")
VALUES = (None, -1, 0, 1e400, "x", [], {}, True, "../a", float("nan"), 2**70, "tinker://a/b/c")


def damaged(draw, body):
    """Bytes in which something was changed, taken out or put in."""
    found = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found))
        match draw.randrange(3):
            case 0:
                found[at] ^= 1 << draw.randrange(8)
            case 1:
                del found[at : at + draw.randint(1, 8)]
            case 2:
                found[at:at] = draw.randbytes(draw.randint(1, 4))
        if not found:
            break
    return bytes(found)


def odd_fields(draw):
    names = (
        "adam_params", "learning_rate", "path", "ttl_seconds", "overwrite", "optimizer",
        "sampling_session_seq_id", "user_metadata", "kind", "seq_id", "odd",
    )  # fmt: skip
    fields = {name: draw.choice(VALUES) for name in draw.sample(names, draw.randint(0, 4))}
    if draw.random() < 0.3:
        rates = ("learning_rate", "beta1", "eps", "weight_decay", "grad_clip_norm")
        fields["adam_params"] = {draw.choice(rates): draw.choice(VALUES)}
    return fields


def send_damaged(draw, client):
    """One request that is wrong somewhere; None where it has no place in the log at all."""
    client.seq += 1
    if draw.random() < 0.5:
        loss = draw.choice(["cross_entropy", "ppo", "gspo"])
        tokens = [draw.randrange(VOCABULARY) for _ in range(6)]
        numbers = {"weights": [0.5] * 5, "logprobs": [-0.5] * 5, "advantages": [0.5] * 5}
        body = request(client.model, client.seq, [datum(tokens, **numbers)], loss)
        try:
            _, _, body = canonical_request(damaged(draw, body))
        except RequestRefused:
            client.seq -= 1
            return None
        kind = "forward_backward"
    else:
        kind = draw.choice(KINDS)
        body = json.dumps({"model_id": client.model, "seq_id": client.seq} | odd_fields(draw))
        body = body.encode() if draw.random() < 0.8 else damaged(draw, body.encode())
    return client.log.append("ada", client.model, client.seq, kind, body)


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_requests_are_answered_and_hurt_nobody(tmp_path, count):
    """Also not the next right request of their own model."""
    draw, cycle = random.Random(count), cycle_of(tmp_path)
    bad, good, alone = (Client(cycle.log, config={"rank": 4, "seed": 9}) for _ in range(3))
    futures, steps, expected = [], [], []
    data = [datum([5, 6, 7, 8])]
    for at in range(count):
        number = send_damaged(draw, bad)
        futures += [] if number is None else [number]
        if at % 20 == 0:
            steps.append((good.forward_backward(data), good.optim_step(learning_rate=1e-3)))
            run_all(cycle)
    run_all(cycle)
    expected += [
        (alone.forward_backward(data), alone.optim_step(learning_rate=1e-3)) for _ in steps
    ]
    last = bad.forward_backward(data)
    run_all(cycle)

    assert len(futures) > count / 2
    for number in futures:
        answer = cycle.log.answer("ada", number)
        assert answer is not None
        if answer.failed:
            error = json.loads(answer.body)
            assert error["category"] == "user", error
    for own, other in zip(steps, expected, strict=True):
        (found, _), step = map(good.result, own)
        (wanted, _), same = map(alone.result, other)
        assert found == pytest.approx(wanted, rel=1e-9)
        assert step["metrics"] == pytest.approx(same["metrics"], rel=1e-9)
    assert bad.result(last)[0]["tokens:sum"] == 3
