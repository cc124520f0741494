"""No job of a random mix trains otherwise than alone by plain PEFT, and none without a word.

`python -m tests.silence.mixes SEED` shows one of them again.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.silence.mixes.verdict import judge

#: Of jobs together, of those that come and go, and of a process that is killed.
QUICK = (9, 22, 47)


@pytest.mark.parametrize("seed", QUICK)
def test_jobs_of_a_mix_train_as_alone(seed, tmp_path):
    """Losses, evaluations, adapters, and what PEFT loads."""
    mix, verdicts = judge(seed, tmp_path)

    assert {verdict.outcome for verdict in verdicts.values()} == {"equal"}, f"{mix}: {verdicts}"


@pytest.mark.slow
@settings(max_examples=100, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_jobs_of_many_mixes_train_as_alone_or_are_refused(seed, tmp_path_factory):
    """Others each time."""
    mix, verdicts = judge(seed, tmp_path_factory.mktemp("mix"))

    assert not any(verdict.silent for verdict in verdicts.values()), f"{mix}: {verdicts}"
