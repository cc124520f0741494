"""No hand-written base trains otherwise than alone, and none ends in a traceback."""

from __future__ import annotations

from itertools import product

import pytest

from tests.silence.known import WRITTEN
from tests.silence.oracle import judge
from tests.silence.written import NASTY, RIGHT

FORMS = ("auto", "packed")
ALL = {**NASTY, **RIGHT}
#: Of so many cases one is tried in each run of the tests; `make slow` tries all.
ONE_OF = 97


def cases():
    """Each base in each form, with what is known of it."""
    named = [(group, name) for group, makes in ALL.items() for name in makes]
    for number, ((group, name), form) in enumerate(product(named, FORMS)):
        marks = [pytest.mark.slow] if number % ONE_OF else []
        reason = WRITTEN.get(f"{form}: {group}: {name}")
        if reason is not None:
            marks.append(pytest.mark.xfail(strict=True, reason=reason))
        yield pytest.param(group, name, form, marks=marks, id=f"{form}: {group}: {name}")


@pytest.mark.parametrize(("group", "name", "form"), list(cases()))
def test_a_base_trains_as_alone_or_is_refused(group, name, form):
    """Losses and adapters of three steps against PEFT, each sequence alone."""
    verdict = judge(ALL[group][name], form)

    assert not verdict.silent, str(verdict)
    if group == "right" or (group == "right padded" and form == "auto"):
        assert verdict.outcome == "equal", str(verdict)
