"""Memory and CPUs under a container's limits, read from made-up folders."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.host.memory import free_bytes, total_bytes, usable_cpus

GIB = 1 << 30
TOTAL, AVAILABLE = 64 * GIB, 40 * GIB
#: What version 1 has where there is no limit.
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch):
    """The process may run on eight."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))


@pytest.fixture
def host(tmp_path):
    """A root folder with 64 GiB of memory, 40 of them free, and no control groups."""
    return bare_host(tmp_path)


def bare_host(root: Path) -> Path:
    write(root, "proc/meminfo", f"MemTotal: {TOTAL >> 10} kB\nMemAvailable: {AVAILABLE >> 10} kB\n"
          "HugePages_Total: 0\n")  # fmt: skip
    return root


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def put_v2(root: Path, group: str, limit: object, used: int = 0, inactive: int = 0) -> None:
    folder = f"sys/fs/cgroup{group}"
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.current", used)
    write(root, f"{folder}/memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file 7")


def put_v1(root: Path, folder: str, limit: int, used: int = 0, inactive: int = 0) -> None:
    write(root, f"{folder}/memory.limit_in_bytes", limit)
    write(root, f"{folder}/memory.usage_in_bytes", used)
    write(root, f"{folder}/memory.stat", f"inactive_file 5\ntotal_inactive_file {inactive}")


def test_without_control_groups_the_machine_counts(host):
    """Nothing lies in /proc/self/cgroup or under /sys/fs/cgroup."""
    assert (total_bytes(host), free_bytes(host), usable_cpus(host)) == (TOTAL, AVAILABLE, 8)


def test_a_containers_limit_counts_and_its_file_cache_does_not(host):
    """The kernel gives inactive files up before it kills."""
    write(host, "proc/self/cgroup", "0::/")
    put_v2(host, "", 8 * GIB, used=5 * GIB, inactive=2 * GIB)

    assert total_bytes(host) == 8 * GIB
    assert free_bytes(host) == 5 * GIB


def test_the_lowest_limit_of_all_groups_counts(host):
    """A group's own limit may be higher than that of one above; "max" is none."""
    write(host, "proc/self/cgroup", "0::/slice/pod/here")
    put_v2(host, "/slice", 16 * GIB, used=15 * GIB)
    put_v2(host, "/slice/pod", "max", used=15 * GIB)
    put_v2(host, "/slice/pod/here", 12 * GIB, used=4 * GIB)

    assert total_bytes(host) == 12 * GIB
    assert free_bytes(host) == 1 * GIB


def test_version_1_is_read(host):
    """Its folder is the controller's, and its path may be one that only the host sees."""
    write(host, "proc/self/cgroup", "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/")
    put_v1(host, "sys/fs/cgroup/memory", 4 * GIB, used=3 * GIB, inactive=GIB)
    write(host, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 350000)
    write(host, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100000)

    assert (total_bytes(host), free_bytes(host)) == (4 * GIB, 2 * GIB)
    assert usable_cpus(host) == 3


def test_version_1_without_a_limit_changes_nothing(host):
    """Its limit is a huge number, and its quota -1."""
    write(host, "proc/self/cgroup", "4:memory:/\n1:cpu:/")
    put_v1(host, "sys/fs/cgroup/memory", UNLIMITED_V1, used=30 * GIB)
    write(host, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", -1)
    write(host, "sys/fs/cgroup/cpu/cpu.cfs_period_us", 100000)

    assert (total_bytes(host), free_bytes(host), usable_cpus(host)) == (TOTAL, AVAILABLE, 8)


def test_a_machine_with_both_versions_has_the_second_in_a_folder_of_its_own(host):
    """Systemd calls it unified."""
    write(host, "proc/self/cgroup", "4:memory:/\n0::/app")
    put_v1(host, "sys/fs/cgroup/memory", UNLIMITED_V1)
    put_v2(host, "/unified/app", 2 * GIB)

    assert total_bytes(host) == 2 * GIB


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8),
     ("", 8), ("100000 0", 8)],
)  # fmt: skip
def test_a_quota_limits_cpus(host, text, cpus):
    """It is rounded down, to one at least."""
    write(host, "proc/self/cgroup", "0::/")
    write(host, "sys/fs/cgroup/cpu.max", text)

    assert usable_cpus(host) == cpus


@given(
    path=st.lists(st.sampled_from(["..", "a", "b"]), max_size=5),
    limits=st.lists(st.none() | st.integers(0, 2**45), min_size=3, max_size=3),
    used=st.integers(0, 2**45),
    inactive=st.integers(0, 2**45),
)
def test_limits_only_lower_what_the_machine_has(path, limits, used, inactive):
    """Whatever groups say, memory is neither negative nor more than the machine's or a limit."""
    with tempfile.TemporaryDirectory() as folder:
        root = bare_host(Path(folder))
        write(root, "proc/self/cgroup", "0::/" + "/".join(path))
        for group, limit in zip(["", "/a", "/a/b"], limits, strict=True):
            put_v2(root, group, "max" if limit is None else limit, used, inactive)
        total, free = total_bytes(root), free_bytes(root)

    highest = TOTAL if limits[0] is None else limits[0]
    assert 0 <= total <= min(TOTAL, highest)
    assert 0 <= free <= min(AVAILABLE, total)


def test_this_machine_can_be_read():
    """Its own files are as they are expected."""
    assert 0 < free_bytes() <= total_bytes()
    assert 1 <= usable_cpus() <= 8
