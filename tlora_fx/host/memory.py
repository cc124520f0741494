"""Main memory and CPUs that this process may use, with the limits of its container.

A control group (cgroup) limits a container; the groups above it may have lower limits. Versions 1
and 2 of control groups are read. `root` is the folder in which /proc and /sys lie.

source    https://docs.kernel.org/admin-guide/cgroup-v2.html, cgroup-v1/memory.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Version:
    """The files of one version of control groups.

    inactive   entry of memory.stat: cached files that the kernel gives up first
    """

    limit: str
    used: str
    inactive: str


_V2 = _Version("memory.max", "memory.current", "inactive_file")
_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def total_bytes(root: Path = ROOT) -> int:
    """Main memory that this process could have if nothing else were there."""
    limits = (limit for limit, _ in _memory_limits(root))
    return min([_meminfo(root)["MemTotal"], *limits])


def free_bytes(root: Path = ROOT) -> int:
    """Main memory that this process can still have without swapping or being killed."""
    left = (limit - used for limit, used in _memory_limits(root))
    return max(0, min([_meminfo(root)["MemAvailable"], *left]))


def usable_cpus(root: Path = ROOT) -> int:
    """CPUs that this process may use at a time: at least 1, fractions rounded down."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_cpu_limits(root)])))


def _meminfo(root: Path) -> dict[str, int]:
    lines = (root / "proc/meminfo").read_text("ascii").splitlines()
    pairs = (line.removesuffix(" kB").split(":") for line in lines if line.endswith(" kB"))
    return {name: int(value) << 10 for name, value in pairs}


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit and the use, in bytes, of each control group around this process."""
    for folder, is_v2 in _groups(root, "memory"):
        files = _V2 if is_v2 else _V1
        limit, used = _text(folder / files.limit), _text(folder / files.used)
        if limit.isdecimal():
            stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            unused = int(stat.get(files.inactive, 0))
            yield int(limit), max(0, int(used or 0) - unused)


def _cpu_limits(root: Path) -> Iterator[float]:
    """The CPU time in a second that each control group around this process may have."""
    for folder, is_v2 in _groups(root, "cpu"):
        if is_v2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        # The quota of a group without a limit is "max" or -1.
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's control group and of those above, and whether they are v2."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            tops = [mounts / controllers, mounts / controller]
        else:
            continue
        top = next((top for top in reversed(tops) if top.is_dir()), tops[0])
        # A path may name groups outside of the container, which has no folders for them.
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names) + 1):
            yield top.joinpath(*names[:depth]), not controllers


def _text(path: Path) -> str:
    """A small file's text; "" where it cannot be read."""
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""
