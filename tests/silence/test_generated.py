"""No generated base trains otherwise than alone, and none ends in a traceback."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.silence.grammar import build, drawn, programs
from tests.silence.known import GENERATED
from tests.silence.oracle import judge

FORMS = ("auto", "packed")
#: So many of them are tried in each run of the tests; `make slow` tries all.
QUICK = 4


def cases():
    """A hundred bases by the seeds of their programs, every second one in packed form."""
    for number in range(100):
        form = FORMS[number % 2]
        reason = GENERATED.get(number)
        marks = [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]
        if number >= QUICK:
            marks.append(pytest.mark.slow)
        yield pytest.param(number, form, marks=marks, id=f"{form} {number}")


@pytest.mark.parametrize(("number", "form"), list(cases()))
def test_a_grown_base_trains_as_alone_or_is_refused(number, form):
    """Losses and adapters of three steps against PEFT, each sequence alone."""
    program = drawn(number)
    verdict = judge(build(program), form)

    assert not verdict.silent, f"{program}: {verdict}"


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=list(HealthCheck))
@given(program=programs(), form=st.sampled_from(FORMS))
def test_many_grown_bases_train_as_alone_or_are_refused(program, form):
    """The same for others each time; hypothesis makes the first wrong one as small as it can."""
    verdict = judge(build(program), form)

    assert not verdict.silent, str(verdict)
