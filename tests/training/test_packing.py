"""Small requests that a model has sent share a row, and each is what it is by itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.training.clients import (
    SMALL_MICRO_TOKENS,
    VOCABULARY,
    Client,
    cycle_of,
    datum,
    engine,
    run_all,
)
from tests.training.test_cycle import (
    CONFIGS,
    FAR,
    GOOD,
    SCALED,
    adapter,
    assert_same,
    drawn_datum,
    long_data,
)
from tlora_fx.ops.kernels.select import strict


@pytest.fixture
def calls(monkeypatch):
    """By call of `accumulate`, sequences of each job."""
    noted, accumulate = [], engine().step.accumulate

    def note(batches):
        noted.append(sorted(len(micro) for b in batches.values() for micro in b.micro_batches))
        return accumulate(batches)

    monkeypatch.setattr(engine().step, "accumulate", note)
    return noted


def small(key, count=3, loss="cross_entropy"):
    draw = random.Random(key)
    return [[drawn_datum(draw, loss) for _ in range(1 + at % 2)] for at in range(count)]


def test_what_a_model_has_sent_runs_in_one_cycle(tmp_path, calls):
    """Up to its step, and with that of its neighbour; each answer is that of the request alone."""
    cycle = cycle_of(tmp_path)
    many, one, alone = (Client(cycle.log, config=CONFIGS[0]) for _ in range(3))
    run_all(cycle)
    futures = [many.forward_backward(data) for data in small(1)]
    step, neighbour = many.optim_step(**SCALED), one.forward_backward(small(2)[1])
    later = many.forward_backward(GOOD)
    cycle.run()
    assert calls == [[2, 4]]
    assert all(cycle.log.answer("ada", each) for each in (*futures, step, neighbour))
    assert cycle.log.answer("ada", later) is None
    expected = []
    for data in small(1):
        expected.append(alone.forward_backward(data))
        run_all(cycle)
    last = alone.optim_step(**SCALED)
    run_all(cycle)

    for number, other in zip(futures, expected, strict=True):
        (metrics, logprobs), (wanted, others) = many.result(number), alone.result(other)
        assert metrics == pytest.approx(wanted, rel=1e-9)
        for found, own in zip(logprobs, others, strict=True):
            assert found == pytest.approx(own, rel=1e-6)
    assert many.result(step)["metrics"] == pytest.approx(alone.result(last)["metrics"], rel=1e-9)
    assert_same(adapter(cycle, many), adapter(cycle, alone))
    rows = cycle.log.cycles("ada", many.session)
    assert [row["together"] for row in rows if row["seq"] <= 3] == [4, 4, 4]


def test_one_request_that_fails_takes_no_other_with_it(tmp_path, calls):
    """They ran together, and run again one by one."""
    cycle = cycle_of(tmp_path)
    hurt, clean = (Client(cycle.log, config=CONFIGS[0]) for _ in range(2))
    run_all(cycle)
    told = [{**GOOD[0], "logprobs": [-5.5] * 3, "advantages": [0.5] * 3}]
    sent = [hurt.forward_backward(data, "importance_sampling") for data in (told, FAR, told)]
    for _ in range(2):
        clean.forward_backward(told, "importance_sampling")
    steps = [each.optim_step(**SCALED) for each in (hurt, clean)]
    run_all(cycle)

    assert calls == [[2, 3], [1], [1], [1]]
    assert "not finite" in hurt.result(sent[1])["error"]
    assert hurt.result(sent[0])[0] == hurt.result(sent[2])[0]
    found, wanted = hurt.result(steps[0])["metrics"], clean.result(steps[1])["metrics"]
    assert found == pytest.approx(wanted, rel=1e-9)
    assert_same(adapter(cycle, hurt), adapter(cycle, clean))


def sent(client, draw):
    """Some requests and a step; some requests fail, each in a way of its own."""
    numbers = []
    for _ in range(draw.randint(1, 6)):
        loss = draw.choice(["cross_entropy", "ppo", "ppo", "gspo"])
        data = [drawn_datum(draw, loss) for _ in range(draw.randint(1, 3))]
        match draw.randrange(8):
            case 0:
                data, loss = FAR, "importance_sampling"
            case 1:
                data[-1]["target_tokens"] = data[-1]["target_tokens"] + VOCABULARY
        only = draw.random() < 0.1
        numbers.append(client.forward_backward(data, loss, forward_only=only))
    return [*numbers, client.optim_step(**SCALED)]


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10**6), budget=st.integers(10, 100))
def test_packed_requests_are_what_they_are_one_by_one(tmp_path_factory, seed, budget):
    """Of models that take turns, for a cycle has no room for all; some requests fail."""
    folder, answers = tmp_path_factory.mktemp("run"), {}
    for how in ("packed", "alone"):
        cycle, draw = cycle_of(folder / how), random.Random(seed)
        cycle.shares.budget = budget
        clients = [Client(cycle.log, config=CONFIGS[0] | {"seed": at}) for at in range(3)]
        with pytest.MonkeyPatch.context() as patch:
            if how == "alone":
                patch.setattr(cycle, "_pack", lambda running, commands: None)
            futures = [(each, sent(each, draw)) for _ in range(2) for each in clients]
            run_all(cycle)
        answers[how] = [each.result(number) for each, numbers in futures for number in numbers]

    for found, expected in zip(*answers.values(), strict=True):
        if isinstance(found, tuple):
            assert found[0] == pytest.approx(expected[0], rel=1e-9)
        elif "metrics" in found:
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        else:
            assert found["error"].split("\n")[0] == expected["error"].split("\n")[0]


@pytest.mark.usefixtures("small_micro_batches")
def test_requests_that_are_unlike_run_one_after_the_other(tmp_path, calls):
    """In order: other losses or options, a forward alone, one that is wrong, and large ones."""
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log)
    run_all(cycle)
    [[scored], _] = small(3, 2, "ppo")
    own = [
        client.forward_backward([scored], "ppo"),
        client.forward_backward([scored], "ppo", {"clip_low_threshold": 0.7}),
        client.forward_backward([scored], "gspo"),
        client.forward_backward([scored], "gspo"),
        client.forward_backward(GOOD),
        client.forward_backward(GOOD, forward_only=True),
        client.forward_backward(GOOD),
        client.forward_backward(GOOD, "stable_reinforce"),
        client.forward_backward(long_data(2)),
        client.forward_backward(long_data(1) + GOOD),
        client.forward_backward(long_data(2)),
        client.forward_backward(long_data(5)),
        client.optim_step(),
    ]
    answered = []
    while cycle.run():
        answered.append([at for at, each in enumerate(own) if cycle.log.answer("ada", each)])

    # A step waits for no cycle of its own.
    counts = [len(each) for each in answered]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11, 11, 13]
    assert all(each == [*range(len(each))] for each in answered)
    assert calls[-6:] == [[2], [2], [2], [2], [2], [1]]


def test_strict_bits_do_not_depend_on_when_requests_arrive(tmp_path, calls):
    """A request has a row of its own then, whatever else is there."""
    with strict():
        cycle = cycle_of(tmp_path)
        early, late = (Client(cycle.log, config=CONFIGS[0]) for _ in range(2))
        run_all(cycle)
        first, second = [], []
        first += [early.forward_backward(data) for data in small(1)]
        first.append(early.optim_step(**SCALED))
        run_all(cycle)
        for data in small(1):
            second.append(late.forward_backward(data))
            run_all(cycle)
        second.append(late.optim_step(**SCALED))
        run_all(cycle)

    assert calls == [[1], [2], [1]] * 2
    pairs = zip(first, second, strict=True)
    assert all(repr(early.result(a)) == repr(late.result(b)) for a, b in pairs)
    assert_same(adapter(cycle, early), adapter(cycle, late), 0)


@pytest.mark.usefixtures("small_micro_batches")
def test_many_small_requests_get_no_more_than_large_ones(tmp_path):
    """While both wait for more than a cycle has, they get the same tokens."""
    cycle, draw = cycle_of(tmp_path), random.Random(6)
    cycle.shares.budget = 250
    many, few = (Client(cycle.log, config=CONFIGS[0]) for _ in range(2))
    run_all(cycle)
    for _ in range(60):
        many.forward_backward([datum([draw.randrange(3, VOCABULARY) for _ in range(19)])])
    for _ in range(5):
        few.forward_backward(long_data(2))
    had = Counter()
    for _ in range(8):
        cycle.run()
        rows = [*cycle.log.cycles("ada", many.session), *cycle.log.cycles("ada", few.session)]
        had = Counter()
        for row in rows:
            had[row["queue"]] += row["tokens"]

    assert had[many.model] > 750
    assert abs(had[many.model] - had[few.model]) <= SMALL_MICRO_TOKENS
