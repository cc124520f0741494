"""A base that reads its row's length as a tensor trains no short sample wrong beside a long one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.silence import oracle
from tests.silence.modules import decoder
from tests.silence.oracle import judge


def places(x):
    """The places of a row, [S]."""
    return torch.arange(x.shape[1], device=x.device)


#: What reads the length of a row, and is another number beyond a limit.
SWITCHES = {
    "largest place": lambda x, n: torch.maximum(
        places(x).max() + 1, torch.tensor(n, device=x.device)
    ),
    "last place": lambda x, n: 1 + (places(x)[-1] >= n) * 1,
    "sum of ones": lambda x, n: torch.ones(x.shape[1], device=x.device).sum().clamp(min=n),
    "ones of x": lambda x, n: x.new_ones(x.shape[1]).sum().clamp(min=n),
    "ones like x": lambda x, n: torch.ones_like(x[..., 0]).sum(1).clamp(min=n)[:, None, None],
    "counted": lambda x, n: 1 + ((x[..., 0] == x[..., 0]).sum(1) > n)[:, None, None] * 1,
    "three times": lambda x, n: 1 + (places(x)[-1] * 3 > 3 * n) * 1,
    "at some places": lambda x, n: 1 + ((places(x) > 5) & (places(x)[-1] > n)).to(x.dtype)[:, None],
}
LIMITS = sorted({*(1 << bits for bits in range(2, 13)), *range(3, 4200, 262)})


def mixing(name, limit):
    """A base whose every layer is scaled by a switch."""
    return decoder(lambda layer, x: x * SWITCHES[name](x, limit) / limit)


def judged(make, limit, monkeypatch):
    """The verdict on a group with a sample of nine tokens and one beyond the limit."""
    steps = ({"one": (9, 3), "two": (limit + 7,)}, {"one": (limit + 7, 5), "two": (2,)})
    monkeypatch.setattr(oracle, "STEPS", steps)
    return judge(make, "auto")


@pytest.mark.parametrize("name", ["largest place", "ones like x", "counted"])
def test_a_switch_at_2048_tokens_is_refused(name, monkeypatch):
    """Dynamic NTK reads the length so."""
    assert judged(mixing(name, 2048), 2048, monkeypatch).outcome == "refused"


def test_a_switch_whose_first_tokens_are_a_rounding_is_refused(monkeypatch):
    """Of 12,418 tokens in float32, one more is less than what passes for one."""
    assert judged(mixing("sum of ones", 12418), 12418, monkeypatch).outcome == "refused"


def test_a_switch_by_place_trains_as_alone(monkeypatch):
    """It says which tokens are late, not how long the row is."""
    make = decoder(lambda layer, x: x * (1 + (places(x) > 2048).to(x.dtype)[:, None]))

    assert judged(make, 2048, monkeypatch).outcome == "equal"


def test_a_switch_of_some_places_below_the_usual_sizes_is_refused(monkeypatch):
    """Rows of thirteen tokens and more are alike; a sample of nine beside one of fifteen is not."""
    assert judged(mixing("at some places", 8), 8, monkeypatch).outcome == "refused"


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", SWITCHES)
def test_any_switch_is_refused_or_equal(name, limit, monkeypatch):
    """At powers of two and at odd numbers."""
    verdict = judged(mixing(name, limit), limit, monkeypatch)

    assert not verdict.silent, str(verdict)


@pytest.mark.slow
@settings(
    max_examples=100,
    suppress_health_check=list(HealthCheck),
)
@given(
    name=st.sampled_from(sorted(SWITCHES)),
    limit=st.integers(3, 4200),
    before=st.sampled_from([1, 2, 7]),
)
def test_a_switch_behind_other_numbers_is_refused_or_equal(name, limit, before):
    """The length is multiplied before it is compared."""

    def scaled(layer, x):
        return x * SWITCHES[name](x, limit * before // 2) / limit

    with pytest.MonkeyPatch.context() as patched:
        verdict = judged(decoder(scaled), limit * before // 2, patched)

    assert not verdict.silent, str(verdict)
