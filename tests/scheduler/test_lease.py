"""Leases: after the end of its epoch a worker writes nothing, however late it comes."""

from __future__ import annotations

import threading

import pytest
import torch

from tlora_fx.errors import CheckpointError
from tlora_fx.runtime.checkpoints.store import CheckpointStore, JobState
from tlora_fx.scheduler.lease import grant, is_granted, revoke


def group_of(run):
    group = run / "groups" / "000001"
    group.mkdir(parents=True)
    return group


def save(store, step):
    store.save(step, {"a": JobState({"w": torch.zeros(1)}, step=step)}, {})


def test_what_is_written_through_a_lease_lies_beside_it(tmp_path):
    """Checkpoints in the group's folder, jobs in the run's."""
    group = group_of(tmp_path)
    lease = grant(group, tmp_path)
    save(CheckpointStore(lease / "train"), 3)
    (lease / "jobs" / "a").mkdir()

    assert is_granted(group)
    assert CheckpointStore(group / "train").counters()["a"]["step"] == 3
    assert (tmp_path / "a").is_dir()


def test_a_revoked_lease_takes_nothing(tmp_path):
    """Neither a checkpoint nor a folder, and none is made where the link was."""
    group = group_of(tmp_path)
    lease = grant(group, tmp_path)
    save(CheckpointStore(lease / "train"), 3)
    revoke(group)

    with pytest.raises(CheckpointError):
        save(CheckpointStore(lease / "train"), 4)
    with pytest.raises(OSError, match="lease"):
        (lease / "jobs" / "a").mkdir(parents=True, exist_ok=True)
    assert not is_granted(group)
    assert CheckpointStore(group / "train").counters()["a"]["step"] == 3
    assert not (tmp_path / "a").exists()


def test_revoking_twice_or_where_nothing_was_granted_changes_nothing(tmp_path):
    """A run that goes on revokes whatever it finds."""
    group = group_of(tmp_path)
    revoke(group)
    grant(group, tmp_path)
    revoke(group)
    revoke(group)
    grant(group, tmp_path)

    assert not is_granted(group)


@pytest.mark.parametrize("before", [1, 2, 5])
def test_what_was_read_after_revoking_is_the_last(tmp_path, before):
    """A worker that saves all the time has saved its last when the lease is over."""
    group = group_of(tmp_path)
    store = CheckpointStore(grant(group, tmp_path) / "train")
    saved, refused = threading.Semaphore(0), []

    def train():
        step = 0
        while not refused:
            step += 1
            try:
                save(store, step)
            except CheckpointError:
                refused.append(step)
            saved.release()

    worker = threading.Thread(target=train)
    worker.start()
    for _ in range(before):
        saved.acquire()
    revoke(group)
    read = CheckpointStore(group / "train").counters()
    worker.join()

    assert read["a"]["step"] >= before
    assert CheckpointStore(group / "train").counters() == read
