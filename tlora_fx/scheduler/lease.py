"""Leases, by which workers write for a group: a link that dangles once the group's epoch is over.

    groups/000012/train          checkpoints
                 /held/train     → ../train
                      /jobs      → the run's folder, with the folders of its jobs
                 /lease          → held for as long as the epoch lasts, then → over

A worker names its files through `lease` and by no other way. Revoking it replaces the link by one
that leads nowhere, which is one operation of the file system: a worker that a dead machine brings
back, or that nobody could end, finds none of its names there any more and can make none anew.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tlora_fx.host.durable import sync_folder

_HELD, _OVER = "held", "over"


def grant(group: Path, run: Path) -> Path:
    """Make a group's lease.

    group     the folder of its formation, below `run`
    run       the run's folder
    returns   the lease, with `train` and `jobs` below it
    """
    held, lease = group / _HELD, lease_of(group)
    (group / "train").mkdir(exist_ok=True)
    held.mkdir(exist_ok=True)
    # The way from one folder to the other, however each machine has mounted both.
    jobs = Path(os.path.relpath(run, held))
    for name, target in (("train", Path("..", "train")), ("jobs", jobs)):
        with suppress(FileExistsError):
            (held / name).symlink_to(target)
    with suppress(FileExistsError):
        lease.symlink_to(_HELD)
    sync_folder(group)
    return lease


def revoke(group: Path) -> None:
    """Revoke a group's lease: its workers write nothing more; groups without one are left alone."""
    if not is_granted(group):
        return
    over = group / f".{_OVER}"
    over.unlink(missing_ok=True)
    over.symlink_to(_OVER)
    over.rename(lease_of(group))
    sync_folder(group)


def is_granted(group: Path) -> bool:
    """Whether the group's epoch lasts."""
    try:
        return lease_of(group).readlink() == Path(_HELD)
    except OSError:
        return False


def lease_of(group: Path) -> Path:
    """A group's lease."""
    return group / "lease"
