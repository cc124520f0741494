"""Homes that nobody has: of a user without one, and of a name that no user has."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from tlora_fx.config.hub import hub_cache
from tlora_fx.config.job_file import load_job_file
from tlora_fx.config.paths import with_home
from tlora_fx.errors import DataFileError
from tlora_fx.runtime.launching.early_checks import require_hub
from tlora_fx.runtime.workers.job_files import require_files

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture
def homeless(monkeypatch):
    """A user of whom the machine knows nothing, as in many containers."""

    def unknown(user):
        raise KeyError(user)

    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_trains_on_a_base_in_a_folder():
    """The hub's cache is nowhere, and not asked for; a `~` stays what it is."""
    jobs = load_job_file(QUICKSTART / "jobs.yaml").jobs
    require_hub(jobs)

    assert not hub_cache().exists()
    assert with_home("~/a") == Path("~/a")


def test_a_home_that_nobody_has_is_told_as_data_that_is_not_there(tmp_path):
    """By the job, with the path as it is written."""
    text = (QUICKSTART / "jobs.yaml").read_text()
    text = text.replace("config: base", f"config: {QUICKSTART / 'base'}")
    file = tmp_path / "jobs.yaml"
    file.write_text(text.replace("data/records.jsonl", "~no-such-user/records.jsonl"))
    *_, job = load_job_file(file).jobs

    with pytest.raises(DataFileError, match="does not exist") as refused:
        require_files(job)
    assert "~no-such-user/records.jsonl" in str(refused.value)
