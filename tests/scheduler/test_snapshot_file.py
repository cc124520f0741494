"""Snapshots of a run as files: read back they are decided upon as they were."""

from __future__ import annotations

import json

import pytest

from tests.scheduler.toy import Roofline, measured
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import demand_of
from tlora_fx.errors import NewerFormat, StateFileError
from tlora_fx.scheduler.policies import POLICIES, find_policy
from tlora_fx.scheduler.snapshot_file import Snapshot, load_snapshot, save_snapshot
from tlora_fx.scheduler.state import ActiveJob, Group, JobRequest, SchedulerState

BASE = "llama-3-8b"


def state(cluster) -> SchedulerState:
    estimator, jobs = measured(cluster, BASE), {}
    for number, (rank, batch, length) in enumerate([(2, 1, 256), (16, 4, 512), (8, 2, 1024)]):
        demand = demand_of(BASE, rank, batch, length)
        made = JobRequest(f"job-{number}", BASE, demand, 1, 100, submitted=float(number))
        solo = estimator.solo(BASE, demand, 1)
        jobs[made.name] = ActiveJob(made, solo, steps_done=number * 10.0, credit=-number)
    return SchedulerState(60.0, cluster, estimator, jobs, (), horizon=30.0, switch_seconds=5.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_snapshot_is_decided_as_it_was(tmp_path, policy):
    """The same groups, by the same policy, from the same expectations."""
    cluster = Cluster(4, 4, 1, "h200")
    before = Snapshot(state(cluster), find_policy(policy))
    before.state.groups = (Group(("job-0", "job-1"), 2, (0, 1), 0.5, 3.0),)
    save_snapshot(tmp_path / "state.json", before)
    after = load_snapshot(tmp_path / "state.json")

    assert after.policy == before.policy
    assert after.state.jobs == before.state.jobs
    assert after.state.groups == before.state.groups
    assert after.state.cluster == cluster
    assert after.policy.decide(after.state) == before.policy.decide(before.state)


def test_a_snapshot_of_before_graphs_is_read(tmp_path):
    """Neither facts nor demands said then whether rows run as graphs."""
    cluster = Cluster(4, 4, 1, "h200")
    before = Snapshot(state(cluster), find_policy("tlora"))
    file = tmp_path / "state.json"
    save_snapshot(file, before)
    written = json.loads(file.read_bytes())
    del written["estimator"]["shapes"][BASE]["launched"]
    for one in written["state"]["jobs"]:
        del one["request"]["demand"]["launched"]
    file.write_text(json.dumps(written))

    assert load_snapshot(file).state.jobs == before.state.jobs


def test_an_estimator_without_a_file_form_is_refused(tmp_path):
    """Nothing is written."""
    cluster = Cluster(2, 2)
    snapshot = Snapshot(SchedulerState(0.0, cluster, Roofline(), {}), find_policy("tlora"))
    with pytest.raises(StateFileError, match="cannot be written"):
        save_snapshot(tmp_path / "state.json", snapshot)

    assert not (tmp_path / "state.json").exists()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": "tlora-fx moment x"}', '{"format": "tlora-fx moment 1"}'],
)
def test_a_file_that_is_no_snapshot_is_refused(tmp_path, content):
    """Whatever is in it."""
    path = tmp_path / "state.json"
    path.write_text(content)

    with pytest.raises(StateFileError):
        load_snapshot(path)


def test_a_snapshot_of_a_newer_format_is_refused(tmp_path):
    """With what to do."""
    path = tmp_path / "state.json"
    path.write_text('{"format": "tlora-fx moment 9"}')

    with pytest.raises(NewerFormat, match="newer version of tlora-fx"):
        load_snapshot(path)


def test_another_file_is_told_from_a_state(tmp_path):
    """By what it should hold and what it holds, not by how reading it failed; a missing one too."""
    path = tmp_path / "profile.json"
    path.write_text('{"name": "a profile", "hardware": {}}')
    with pytest.raises(StateFileError) as caught:
        load_snapshot(path)
    told = str(caught.value)
    assert "'tlora-fx moment 1'" in told
    assert "an object with name, hardware" in told
    assert "KeyError" not in told

    with pytest.raises(StateFileError, match="there is no such file"):
        load_snapshot(tmp_path / "nowhere.json")


def test_a_snapshot_that_is_cut_is_refused(tmp_path):
    """A field that is missing is named."""
    cluster = Cluster(2, 2)
    snapshot = Snapshot(state(cluster), find_policy("tlora"))
    path = tmp_path / "state.json"
    save_snapshot(path, snapshot)
    written = json.loads(path.read_text())
    del written["state"]["jobs"]
    path.write_text(json.dumps(written))

    with pytest.raises(StateFileError, match="jobs"):
        load_snapshot(path)


def test_a_snapshot_with_a_strange_field_is_refused(tmp_path):
    """A cluster of another version is not guessed at."""
    cluster = Cluster(2, 2)
    snapshot = Snapshot(state(cluster), find_policy("tlora"))
    path = tmp_path / "state.json"
    save_snapshot(path, snapshot)
    written = json.loads(path.read_text())
    written["state"]["cluster"]["spine"] = 1
    path.write_text(json.dumps(written))

    with pytest.raises(StateFileError, match="spine"):
        load_snapshot(path)
