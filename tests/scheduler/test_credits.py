"""Who has given GPU time to whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.toy import demand
from tlora_fx.errors import CreditRefused
from tlora_fx.scheduler.formations import Credits
from tlora_fx.scheduler.state import ActiveJob, JobRequest


def job(name: str, *, gpus: int = 1, lends: float = 0.0, solo: float = 1.0) -> ActiveJob:
    return ActiveJob(
        JobRequest(name, "base", demand(1, 128, 2), gpus, 100, max_slowdown_opt_in=lends), solo
    )


def test_a_lender_gets_what_it_gives_up_past_its_bound():
    """At twice its time alone a job bound to 1.5 makes three quarters of the steps due to it."""
    lender, other = job("lender", gpus=4, lends=2.0), job("other")
    account = Credits(0.0)

    account.share([lender, other], 2.0, 100.0)

    assert lender.credit == pytest.approx(4 * 0.25 * 100)
    assert other.credit == pytest.approx(-lender.credit)


def test_within_the_bound_nothing_is_lent():
    """Slowdown up to the bound is every job's lot."""
    jobs = [job("a", lends=2.0), job("b")]

    Credits(0.0).share(jobs, 1.4, 100.0)

    assert [one.credit for one in jobs] == [0.0, 0.0]


def test_a_creditor_that_runs_faster_than_alone_is_repaid():
    """Its neighbour's debt and its credit shrink together, and neither turns."""
    lender, other = job("lender", lends=2.0), job("other", solo=2.0)
    account = Credits(0.0)
    account.share([lender, other], 2.0, 100.0)

    account.share([lender, other], 0.8, 40.0)
    assert lender.credit == pytest.approx(25 - 0.25 * 40)
    account.share([lender, other], 0.8, 1000.0)
    assert lender.credit == pytest.approx(0.0)
    assert other.credit == pytest.approx(0.0)


def test_nobody_lends_past_its_consent():
    """A lender that is slowed down more than it said is an error, not a credit."""
    with pytest.raises(CreditRefused, match="did not consent"):
        Credits(0.0).share([job("a", lends=2.0), job("b", solo=3.0)], 2.5, 1.0)


turns = st.tuples(
    st.lists(st.integers(0, 5), min_size=2, max_size=4, unique=True),
    st.floats(0.5, 1.99),
    st.floats(0, 1000),
)


@given(st.lists(turns, max_size=20), st.lists(st.integers(1, 8), min_size=6, max_size=6))
def test_what_is_given_is_what_is_taken(history, gpus):
    """Balances sum to zero, whoever met whom and whoever has ended."""
    jobs = [
        job(f"j{index}", gpus=count, lends=2.0 if index % 2 else 0.0)
        for index, count in enumerate(gpus)
    ]
    account = Credits(0.0)

    for members, seconds, time in history:
        account.share([jobs[index] for index in members], seconds, time)
        assert abs(sum(one.credit for one in jobs)) < 1e-6
