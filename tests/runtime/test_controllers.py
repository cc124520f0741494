"""Controllers of nano-batches on simulated steps: T = max(C, M) + min(C, M) / N + o N."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.errors import ControllerWrong
from tlora_fx.parallel.nano_batches import COUNTS
from tlora_fx.runtime.controllers import Aimd, Fixed, KeepBest, NanoBatches, find_controller

# Communication over compute, and what each further nano-batch costs.
RATIOS = {0.2: 0.01, 1.0: 0.02, 2.5: 0.03}
STEPS = 1500


def curve(ratio, cost):
    """Seconds of a step by N, with one second of compute."""
    return lambda count: max(1, ratio) + min(1, ratio) / count + cost * count


def run(controller, seconds_of, steps=STEPS, noise=0.02, seed=0):
    """Run a controller; what steps really took on average, and the counts that ran."""
    draw = random.Random(seed)
    glue = NanoBatches(controller)
    took, ran = [], []
    for step in range(steps):
        seconds = seconds_of(step)(glue.count)
        took.append(seconds)
        ran.append(glue.count)
        glue.decide(seconds * (1 + noise * draw.gauss(0, 1)))
    return mean(took), ran


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_default_comes_within_four_percent_of_the_best_count(ratio):
    """Looking around and noise included, for every ratio of communication to compute."""
    seconds = curve(ratio, RATIOS[ratio])
    best = min(map(seconds, COUNTS))

    found = [run(KeepBest(), lambda _: seconds, seed=seed)[0] / best for seed in range(5)]

    assert max(found) <= 1.04


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_paper_s_rule_is_no_better_than_the_default(ratio):
    """AIMD backs off wherever a further nano-batch does not help."""
    seconds = curve(ratio, RATIOS[ratio])

    assert run(Aimd(), lambda _: seconds)[0] >= run(KeepBest(), lambda _: seconds)[0]


def test_aimd_is_the_paper_s_rule():
    """Add 4 after a faster horizon, else halve and round down, never below 1; equal is slower."""
    controller = Aimd(tau_seconds=0.5, horizon=1)
    seen = []
    for seconds in (10, 9, 8.6, 8, 7, 6, 6, 6, 6, 6, 5):
        controller.observe(seconds)
        seen.append(controller.next())

    assert seen == [5, 9, 4, 8, 12, 16, 8, 4, 2, 1, 5]


def test_a_changed_load_is_followed():
    """Where communication becomes free, the default goes back to one nano-batch."""
    slow, free = curve(1.0, 0.02), curve(0.0, 0.05)

    _, ran = run(KeepBest(), lambda step: slow if step < STEPS else free, steps=2 * STEPS)

    assert mean(ran[STEPS // 2 : STEPS]) > 5
    assert mean(ran[-STEPS // 2 :]) < 2


def test_a_load_that_changes_a_little_is_followed_after_a_rest():
    """A change within the noise of a rest is found when the default looks again."""
    before, after = (lambda count: 1 + 0.1 / count), (lambda count: 1 + 0.012 * count)

    _, ran = run(KeepBest(), lambda s: before if s < STEPS else after, 6 * STEPS, noise=0.002)

    assert min(ran[STEPS // 2 : STEPS]) >= 3
    assert mean(ran[-STEPS:]) <= 2.5


def test_a_count_that_is_much_slower_is_left_at_once():
    """Each look costs a step that is not measured and two that are, not a whole horizon."""
    for slower in (1.3, 1.7, 3.0):
        took, ran = run(KeepBest(counts=(1, 2)), lambda _, s=slower: lambda n: 1 if n == 1 else s)
        looks = sum(one == 1 and two == 2 for one, two in pairwise(ran))
        assert 1 <= looks <= 10
        assert ran.count(2) == 3 * looks
        assert took <= 1 + 3 * looks * (slower - 1) / STEPS + 1e-9


@pytest.mark.parametrize("horizon", [4, 8])
def test_hiccups_are_no_reason_to_look_again(horizon):
    """Now and then steps are slower for a while, whatever the count."""
    draw, left = random.Random(1), 0

    def seconds_of(_):
        nonlocal left
        left = left - 1 if left > 0 else (3 * horizon // 4 if draw.random() < 0.01 else 0)
        return lambda count: (1.3 if left else 1.0) * (1 if count == 1 else 1.7)

    _, ran = run(KeepBest(counts=(1, 2), horizon=horizon), seconds_of)

    assert ran.count(2) <= 0.02 * STEPS


@pytest.mark.parametrize("seed", range(5))
def test_an_unsteady_host_is_not_looked_after_for_ever(seed):
    """Where steps are now fast, now slow, for dozens of steps each, N = 1 stays the best."""
    draw, pace = random.Random(seed), [1.0]

    def seconds_of(step):
        if step % 24 == 0:
            pace[0] = draw.choice([1.0, 1.3, 1.6])
        return lambda count: pace[0] * (1 if count == 1 else 1.7)

    _, ran = run(KeepBest(counts=(1, 2)), seconds_of)

    assert ran[STEPS // 2 :].count(2) <= 0.02 * STEPS / 2


def resting(horizon=4, rest=4, **options):
    """A controller of two counts that rests at the first: 1 second a step."""
    controller = KeepBest(counts=(1, 2), horizon=horizon, rest=rest, settle=0, **options)
    hear(controller, 1.0, horizon)
    hear(controller, 1.5, 2)
    assert controller.next() == 1
    return controller


def hear(controller, seconds, steps):
    """So many steps that took as long; why the last horizon went on as it did."""
    for _ in range(steps):
        controller.observe(seconds)
    return controller.decisions[-1].why


def test_one_slow_horizon_does_not_end_a_rest_and_two_do():
    """Nor does one that comes last become what others are compared with."""
    controller = resting()
    assert hear(controller, 1.3, 4) == "steps took another time once"
    assert hear(controller, 1.0, 4) == "resting"
    assert hear(controller, 1.3, 4) == "steps took another time once"
    assert "steps take another time" in hear(controller, 1.3, 4)
    assert controller.next() == 2

    controller = resting()
    for _ in range(7):  # a first rest that found nothing is twice as long
        assert hear(controller, 1.0, 4) == "resting"
    assert hear(controller, 1.3, 4) == "steps took another time once"
    assert hear(controller, 1.0, 4).startswith("looking again")
    hear(controller, 1.2, 2)
    assert controller.next() == 1


def test_a_count_is_left_only_where_all_its_steps_are_slow():
    """One fast step, and the whole horizon is heard."""
    controller = KeepBest(counts=(1, 2), horizon=4, settle=0)
    hear(controller, 1.0, 4)
    hear(controller, 1.5, 1)
    hear(controller, 0.9, 2)
    assert controller.next() == 2
    hear(controller, 0.9, 1)
    assert controller.next() == 2
    assert "2 is the best" in controller.decisions[-1].why


def test_false_alarms_grow_rarer_until_something_is_found():
    """Each takes twice the shift, half of a step's time at most, and a better count resets it."""
    controller = resting(rest=64)
    seconds = 1.0
    for shift in (0.12, 0.24, 0.48, 0.5, 0.5):
        hear(controller, seconds * (1 + 0.95 * shift), 8)
        assert controller.next() == 1
        hear(controller, seconds * (1 + 1.05 * shift), 8)
        assert controller.next() == 2, shift
        seconds *= 1 + 1.05 * shift
        hear(controller, 2 * seconds, 2)
        assert controller.next() == 1
    hear(controller, 1.6 * seconds, 8)
    hear(controller, 0.5 * seconds, 8)
    assert controller.next() == 2
    hear(controller, 0.5 * seconds * 1.15, 8)
    assert controller.next() == 1


@given(st.integers(0, 50))
def test_a_flat_curve_ends_in_rests(seed):
    """Where N makes no difference, most steps run at a count that stays."""
    _, ran = run(KeepBest(), lambda _: lambda count: 1.0, noise=0.01, seed=seed)

    changes = sum(one != two for one, two in pairwise(ran[STEPS // 2 :]))
    assert changes <= STEPS // 2 / 50


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=300),
    st.sampled_from(["keep-best", "aimd", "fixed"]),
)
def test_whatever_steps_take_the_count_is_one_that_can_run(seconds, name):
    """N stays within the counts that are compiled, and the paper's own N never falls below 1."""
    glue = NanoBatches(find_controller(name, horizon=2), counts=(1, 2, 4))
    for took in seconds:
        assert glue.decide(took) in (1, 2, 4)
        assert glue.controller.next() >= 1


def test_every_horizon_is_told_once():
    """Records hold the horizon, N, the median and the reason."""
    glue = NanoBatches(Fixed(count=3, horizon=2))
    for seconds in (1.0, 3.0, 4.0, 4.0, 9.0):
        glue.decide(seconds)

    first, second = glue.records()
    assert first == {
        "controller": "fixed", "horizon": 1, "count": 3, "median_seconds": 2.0, "why": "fixed"
    }  # fmt: skip
    assert second["median_seconds"] == 4.0
    assert glue.records() == []


def test_rounds_of_other_sizes_are_compared_a_token():
    """A round of twice the tokens that takes twice as long is no slower."""
    glue = NanoBatches(KeepBest(settle=0))
    draw = random.Random(3)
    for _ in range(600):
        tokens = draw.choice([1000, 2000, 4000])
        glue.decide(tokens * (1 + 0.1 / glue.count), tokens)

    assert glue.count >= 6


def test_a_count_that_cannot_run_becomes_the_next_smaller_one():
    """AIMD's 5 and 9 run as 4 and 8."""
    glue = NanoBatches(Aimd(horizon=1))

    assert [glue.decide(seconds) for seconds in (3.0, 2.0, 1.0)] == [4, 8, 8]


@pytest.mark.parametrize(
    "make",
    [
        lambda: find_controller("best"),
        lambda: find_controller("aimd", gamma=1),
        lambda: Aimd(beta=1.5),
        lambda: KeepBest(counts=(2, 1)),
        lambda: NanoBatches(Fixed(), counts=(2, 4)),
    ],
    ids=["name", "option", "beta", "falling", "without-one"],
)
def test_numbers_that_make_no_sense_are_refused(make):
    """With an error that names them."""
    with pytest.raises(ControllerWrong):
        make()
