"""Versions that clients sample from: immutable, with the trainer's log-probabilities."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tests.training.clients import VOCABULARY, Client, cycle_of, datum, engine, run_all
from tlora_fx.training import cycle as cycle_module
from tlora_fx.training.messages import _CLASS
from tlora_fx.training.process import tidy
from tlora_fx.training.records import PROTOBUF

PROMPT = [5, 6, 7, 8, 9]
FAST = {"learning_rate": 0.05}


def drawn(client, number):
    """Of each sequence tokens, log-probabilities and why it ended; and those of the prompt."""
    answer = client.log.answer("ada", number)
    assert answer is not None
    if answer.media != PROTOBUF:
        return json.loads(answer.body)
    message = _CLASS["SampleResponse"]()
    message.ParseFromString(answer.body)
    sequences = [
        (
            np.frombuffer(each.tokens, "<i4").tolist(),
            np.frombuffer(each.logprobs, "<f4"),
            each.stop_reason,
        )
        for each in message.sequences
    ]
    return sequences, np.frombuffer(message.prompt_logprobs, "<f4")


def step(client):
    client.forward_backward([datum([5, 6, 7, 8])])
    client.optim_step(**FAST)


@pytest.fixture
def cycle(tmp_path):
    return cycle_of(tmp_path)


@pytest.fixture
def client(cycle):
    client = Client(cycle.log)
    for _ in range(3):
        step(client)
    client.send("save_weights_for_sampler", sampling_session_seq_id=0)
    run_all(cycle)
    return client


@pytest.fixture
def sampler(client):
    return f"{client.session}:sample:0"


def test_a_version_samples_the_same_while_its_model_trains_on(cycle, client, sampler):
    before = client.sample(sampler, 0, PROMPT, num_samples=3)
    run_all(cycle)
    for _ in range(5):
        step(client)
    after = client.sample(sampler, 1, PROMPT, num_samples=3)
    client.send("save_weights_for_sampler", sampling_session_seq_id=1)
    run_all(cycle)
    newer = client.sample(f"{client.session}:sample:1", 0, PROMPT, num_samples=3)
    run_all(cycle)

    first, second, third = (drawn(client, each)[0] for each in (before, after, newer))
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0]
        np.testing.assert_array_equal(one[1], other[1])
    assert [one[1].tolist() for one in first] != [one[1].tolist() for one in third]


def test_versions_without_a_name_go_with_their_session(cycle, client, sampler):
    """Once what was asked of them is answered; what has a name, and what others have, stays."""
    named = client.send("save_weights_for_sampler", path="named")
    other = Client(cycle.log)
    other.send("save_weights_for_sampler", sampling_session_seq_id=0)
    run_all(cycle)
    found = client.sample(sampler, 0, PROMPT)
    cycle.log.end_session("ada", client.session)
    folders = {
        name: cycle.log.folder / cycle.log.sampler(name).folder
        for name in (sampler, f"{other.session}:sample:0")
    }
    tidy(cycle.log)
    before = {name: folder.is_dir() for name, folder in folders.items()}
    run_all(cycle)
    tidy(cycle.log)

    assert all(before.values())
    assert len(drawn(client, found)[0]) == 1
    assert [folder.is_dir() for folder in folders.values()] == [False, True]
    assert cycle.log.past_versions() == {}
    [checkpoint] = cycle.log.checkpoints(path=client.result(named)["path"])
    assert (cycle.log.folder / checkpoint.folder).is_dir()


def test_a_version_without_a_name_waits_for_no_disk_and_outlives_a_kill(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(1) or sync(file))
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log)
    step(client)
    client.send("save_weights_for_sampler", sampling_session_seq_id=0)
    step(client)
    run_all(cycle)
    sampler = f"{client.session}:sample:0"
    expected = client.sample(sampler, 0, PROMPT)
    run_all(cycle)
    assert synced == []
    client.send("save_weights_for_sampler", path="named")
    run_all(cycle)
    assert len(synced) > 1
    again = cycle_of(tmp_path)
    found = client.sample(sampler, 1, PROMPT)
    run_all(again)

    [[tokens, logprobs, _]] = drawn(client, found)[0]
    [[first, before, _]] = drawn(client, expected)[0]
    assert tokens == first
    np.testing.assert_array_equal(logprobs, before)


@pytest.mark.parametrize("name", ["state.json", "adapter_model.safetensors"])
def test_a_version_that_a_power_failure_cut_fails_its_requests_alone(cycle, client, sampler, name):
    folder = cycle.log.folder / cycle.log.sampler(sampler).folder
    client.send("save_weights_for_sampler", sampling_session_seq_id=1)
    run_all(cycle)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    cycle.forget()
    cut = client.sample(sampler, 0, PROMPT)
    whole = client.sample(f"{client.session}:sample:1", 0, PROMPT)
    run_all(cycle)

    assert "a version of a model cannot be read" in drawn(client, cut)["error"]
    assert len(drawn(client, whole)[0]) == 1


def test_gradients_do_not_wait_until_completions_are_done(cycle, client, sampler, monkeypatch):
    """They run between two tokens, and neither changes the other's numbers."""
    params = {"max_tokens": 40, "seed": 3, "stop": []}
    expected = client.sample(sampler, 0, PROMPT, params=params)
    other, alone = Client(cycle.log), Client(cycle.log)
    step(alone)
    run_all(cycle)
    tokens, futures, between = [], [], engine().sampler.between

    def interrupted():
        tokens.append(1)
        if len(tokens) == 3:
            futures.append(other.forward_backward([datum([5, 6, 7, 8])]))
            futures.append(other.optim_step(**FAST))
            futures.append(client.forward_backward([datum([5, 6, 7, 8])]))
        # They have half of the time, of which a busy machine may leave too little for these tokens.
        cycle._next_wave = 0.0
        between()

    monkeypatch.setattr(engine().sampler, "between", interrupted)
    found = client.sample(sampler, 1, PROMPT, params=params)
    run_all(cycle)

    done = {row["number"]: row["done"] for row in cycle.log.times()}
    assert all(done[each] < done[found] for each in futures)
    [(one, logprobs, _)], [(two, others, _)] = (drawn(client, n)[0] for n in (found, expected))
    assert one == two
    np.testing.assert_array_equal(logprobs, others)
    assert other.result(futures[1]) == alone.result(alone.created + 2)
    seconds = {row["kind"]: row["own"] for row in cycle.log.times(limit=4)}
    span = done[found] - min(row["made"] for row in cycle.log.times(limit=4))
    assert sum(seconds.values()) < span * 1.05


def test_a_model_without_a_place_waits_until_completions_are_done(
    cycle, client, sampler, monkeypatch
):
    """And the log says so."""
    monkeypatch.setattr(cycle_module, "WAITING_SECONDS", 0.0)
    other, futures, between = Client(cycle.log), [], engine().sampler.between
    run_all(cycle)
    cycle.tenants._park(other.model)
    cycle.tenants.leave(other.model)
    states = []

    def interrupted():
        if not futures:
            futures.append(other.forward_backward([datum([5, 6, 7, 8])]))
        cycle._next_wave = 0.0
        between()
        states.append(cycle.log.waits_for_place(futures[0]))

    monkeypatch.setattr(engine().sampler, "between", interrupted)
    client.sample(sampler, 1, PROMPT)
    run_all(cycle)

    assert states
    assert all(states)
    assert not cycle.log.waits_for_place(futures[0])
    assert other.result(futures[0])[0]["tokens:sum"] == 3


def test_log_probabilities_are_the_trainers(cycle, client, sampler):
    """Of what was drawn, and of the prompt."""
    number = client.sample(sampler, 0, PROMPT, prompt_logprobs=True)
    last = client.sample(sampler, 1, PROMPT, prompt_logprobs=True, prompt_logprobs_last_n=2)
    run_all(cycle)
    [(tokens, logprobs, _)], prompt = drawn(client, number)
    forward = client.forward_backward([datum([*PROMPT, *tokens])], forward_only=True)
    run_all(cycle)

    _, [expected] = client.result(forward)
    np.testing.assert_allclose([*prompt[1:], *logprobs], expected, rtol=1e-6)
    assert np.isnan(prompt[0])
    _, few = drawn(client, last)
    np.testing.assert_array_equal(np.isnan(few), [True, True, True, False, False])
    np.testing.assert_array_equal(few[3:], prompt[3:])


def test_a_seeded_request_draws_the_same_among_others(cycle, client, sampler):
    """Also beside its equal: they are no two samples of one call."""
    params = {"max_tokens": 6, "seed": 11, "stop": [], "temperature": 1.5}
    twice = [client.sample(sampler, seq, PROMPT, params=params) for seq in (0, 1)]
    base = cycle.log.add_sampler("ada", client.session, 7, None)
    other = client.sample(base.id, 0, PROMPT, params=params)
    unseeded = params | {"seed": None}
    loose = [client.sample(sampler, seq, PROMPT, params=unseeded) for seq in (2, 3)]
    run_all(cycle)

    first, second, third, *free = (drawn(client, each)[0][0][0] for each in (*twice, other, *loose))
    assert first == second
    assert first != third
    assert free[0] != free[1]
    assert [drawn(client, each)[0][0][2] for each in twice] == [1, 1]


def test_stop_tokens_end_a_completion(cycle, client, sampler):
    probe = client.sample(sampler, 0, PROMPT)
    run_all(cycle)
    [(tokens, _, _)], _ = drawn(client, probe)
    params = {"max_tokens": 4, "seed": 3, "stop": [tokens[1]]}
    number = client.sample(sampler, 1, PROMPT, params=params)
    run_all(cycle)

    [(found, _, reason)], _ = drawn(client, number)
    assert found == tokens[: tokens.index(tokens[1]) + 1]
    assert reason == 0


def test_models_that_never_rest_leave_room_to_sample(cycle, client, sampler):
    """Each slot has a model with more to run; the version has its turn all the same."""
    others = [Client(cycle.log) for _ in range(engine().options.residents)]
    run_all(cycle)
    number = None
    for turn in range(6):
        for other in others:
            other.forward_backward([datum([5, 6, 7])])
        if turn == 1:
            number = client.sample(sampler, 0, PROMPT)
        cycle.run()

    assert drawn(client, number)[0]


WRONG = {
    # They would take the trainer's memory, and that of the next trainer.
    "a million completions": ({"tokens": PROMPT, "num_samples": 10**6}, "equal to 4096"),
    "unknown token": ({"tokens": [VOCABULARY]}, "token ids from 0"),
    "empty": ({"tokens": []}, "a token at least"),
    "too long": ({"tokens": [5] * 2048}, "too long"),
    "top-k": ({"tokens": PROMPT, "topk_prompt_logprobs": 5}, "topk_prompt_logprobs"),
    "temperature": ({"tokens": PROMPT, "params": {"temperature": -1}}, "temperature"),
    "last": (
        {"tokens": PROMPT, "prompt_logprobs": True, "prompt_logprobs_last_n": 5}, "too large",
    ),
}  # fmt: skip


def test_a_wrong_request_is_an_error_of_itself_alone(cycle, client, sampler):
    good = [client.sample(sampler, 100, PROMPT)]
    futures = [
        client.sample(sampler, seq, **fields) for seq, (fields, _) in enumerate(WRONG.values())
    ]
    good.append(client.sample(sampler, 101, PROMPT))
    run_all(cycle)

    for number, (_, text) in zip(futures, WRONG.values(), strict=True):
        error = drawn(client, number)
        assert error["category"] == "user"
        assert text in error["error"]
    first, second = (drawn(client, each)[0] for each in good)
    assert first[0][0] == second[0][0]


def test_a_named_version_is_a_checkpoint_without_an_optimizer(cycle, client):
    saved = client.send("save_weights_for_sampler", path="best", ttl_seconds=3600)
    run_all(cycle)
    path = client.result(saved)["path"]
    checkpoint = cycle.log.checkpoint(path, "ada")
    assert path.endswith("/sampler_weights/best")
    assert checkpoint.expires == pytest.approx(checkpoint.made + 3600)
    sampler = cycle.log.add_sampler("ada", client.session, 5, path)
    number = client.sample(sampler.id, 0, PROMPT)
    resumed = Client(cycle.log, load=path)
    run_all(cycle)

    assert drawn(client, number)[0]
    assert "no optimizer state" in resumed.result(resumed.created)["error"]


def test_more_versions_than_slots_take_turns(cycle, client):
    """Each cycle draws from as many as fit."""
    count = engine().options.residents + 2
    for place in range(1, count):
        step(client)
        client.send("save_weights_for_sampler", sampling_session_seq_id=place)
    run_all(cycle)
    futures = [
        client.sample(f"{client.session}:sample:{place}", 0, PROMPT) for place in range(count)
    ]
    run_all(cycle)

    logprobs = {tuple(drawn(client, each)[0][0][1].tolist()) for each in futures}
    assert len(logprobs) == count
