"""Processes that would not train the same model together part before they begin."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.parallel.processes import run_processes
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import DataError, PlanFileError, RankFailed, RanksDiffer, TloraError
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.launching import early_checks, launch
from tlora_fx.runtime.launching.launch import Peer
from tlora_fx.runtime.rounds.compilation import Compilation
from tlora_fx.runtime.run_folder import how_to_go_on


def everyone() -> Ranks:
    """The processes of the group, as replicas."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(MeshShape(dp=size), torch.device("cpu"), rank, dp_rank=rank, world=dist.group.WORLD)
    return Ranks(mesh)


def met(folder: Path) -> list[int]:
    """What all processes have put into the store of which a file in a folder tells."""
    os.environ["MASTER_PORT"] = "0"
    here = launch.Launch.found()
    store = launch._store(here, folder)
    store.set(f"said by {here.rank}", str(10 + here.rank))
    said = [int(store.get(f"said by {rank}")) for rank in range(here.size)]
    # The store ends with the first process.
    dist.barrier()
    return said


def test_processes_meet_at_a_port_that_the_first_one_chooses(tmp_path: Path) -> None:
    """A port is told by a file when the first process listens to it already."""
    assert run_processes(3, met, tmp_path) == [[10, 11, 12]] * 3


def told(action: Callable[[], object]) -> tuple[str, bool, str]:
    """The error that an action raises: its class, whether all have it, and its text."""
    try:
        action()
    except (TloraError, OSError) as error:
        return type(error).__name__, launch.is_shared(error), str(error)
    return "", False, ""


def other_versions() -> list[tuple[str, bool, str]]:
    """Rank 1 runs another torch, then another tlora-fx."""
    found = [told(lambda: launch._require_same_versions(everyone()))]
    own = torch.__version__, launch.__version__
    for module, old in ((torch, own[0]), (launch, own[1])):
        if dist.get_rank() == 1:
            module.__version__ = "0.0.1"
        found.append(told(lambda: launch._require_same_versions(everyone())))
        module.__version__ = old
    return found


def one_fails() -> tuple[str, bool, str]:
    """Rank 1 cannot read its data."""

    def read() -> int:
        if dist.get_rank() == 1:
            raise DataError("the file is gone", file="x.jsonl")
        return 7

    return told(lambda: everyone().together(read))


class FullRecord:
    """A record of somebody's own, on a disk that takes nothing more."""

    def read(self):
        return None

    def write(self, rounds):
        raise OSError(errno.ENOSPC, "no space left")


def a_record_fails() -> tuple[str, bool, str]:
    """The leader cannot keep after which round compiled layers took over."""
    ranks = everyone()
    group = SimpleNamespace(mesh=ranks.mesh, compile=lambda: None)
    layers = Compilation(group, FullRecord(), ranks, None, waits=False)
    return told(lambda: layers.take_over(2))


def test_no_process_waits_for_a_leader_whose_record_failed():
    """The leader has its error, and the others end with what it was."""
    leader, other = run_processes(2, a_record_fails)

    assert leader == ("OSError", True, "[Errno 28] no space left")
    assert other[:2] == (RankFailed.__name__, True)
    assert "OSError: [Errno 28] no space left" in other[2]


def test_processes_of_other_versions_all_stop():
    """Each raises what names the version and the rank; equal ones go on."""
    for found in run_processes(2, other_versions):
        assert found[0] == ("", False, "")
        for (kind, shared, text), name in zip(found[1:], ("torch", "tlora-fx"), strict=True):
            assert (kind, shared) == (RanksDiffer.__name__, True)
            assert f"different versions of {name}" in text
            assert "0.0.1 (rank 1)" in text


def test_a_process_that_is_gone_is_an_error_with_a_way_out(tmp_path):
    """In words, without a place in a library's sources, and with the last checkpoint."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-000012\nstep-000010\n")
    gloo = RuntimeError(
        "[/x/gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]:80. Good luck"
    )

    assert launch.is_loss(gloo)
    lost = launch._lost(gloo, lambda: how_to_go_on(tmp_path))
    text = str(lost)
    assert text.startswith("error[T0812] lost the connection to another process")
    assert "found  Connection closed by peer [::1]:80\n" in text
    assert "start again with --resume: the last checkpoint is step-000012" in text
    assert "no checkpoint yet" in str(launch._lost(gloo, lambda: how_to_go_on(tmp_path / "new")))
    assert not launch.is_loss(RuntimeError("out of memory"))
    assert not launch.is_loss(DataError("no file gloo.jsonl"))


def test_a_plan_that_is_not_there_is_not_called_a_wrong_one(tmp_path):
    """Names of planners are no files."""
    early_checks.require_plan_file("replicated")
    with pytest.raises(PlanFileError, match="there is no such plan"):
        early_checks.require_plan_file(str(tmp_path / "plan.json"))


def test_what_stops_one_process_stops_all():
    """The others say who it was, and why."""
    first, second = run_processes(2, one_fails)

    assert first[:2] == (RankFailed.__name__, True)
    assert "process 1 cannot go on" in first[2]
    assert "the file is gone" in first[2]
    assert second[:2] == (DataError.__name__, True)


def test_a_peer_that_hangs_is_killed_and_nobody_else() -> None:
    """Not one that has its number and began at another time, nor one of another machine."""
    child = subprocess.Popen(["sleep", "600"])
    child.send_signal(signal.SIGSTOP)
    here = Peer.here()
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    for other in (
        Peer(here.place, child.pid, str(int(started) + 1)),
        Peer("elsewhere", child.pid, started),
        here,
    ):
        other.kill()
    untouched = child.poll()
    Peer(here.place, child.pid, started).kill()

    assert untouched is None
    assert child.wait(900) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("device", "size", "said", "grow"),
    [
        ("cuda", 1, None, True),
        ("cuda", 1, "PYTORCH_ALLOC_CONF", False),
        ("cuda", 1, "PYTORCH_CUDA_ALLOC_CONF", False),
        ("cuda", 2, None, False),
        ("cpu", 1, None, False),
    ],
)
def test_segments_grow_in_one_process_on_a_gpu(monkeypatch, device, size, said, grow):
    """Unless the user says how torch allocates."""
    for name in launch.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if said:
        monkeypatch.setenv(said, "max_split_size_mb:512")
    settings = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)

    launch.let_segments_grow(torch.device(device), launch.Launch(size=size))

    assert settings == ["expandable_segments:True"] * grow


def test_a_driver_whose_segments_cannot_grow_is_asked_no_more(monkeypatch, caplog):
    """It refuses the first of them. The log has the reason, and nothing is said to the user."""
    for name in launch.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def refused(*_, **__):
        raise RuntimeError("CUDA driver error: operation not supported")

    settings = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    monkeypatch.setattr(torch, "empty", refused)
    with caplog.at_level("INFO"):
        launch.let_segments_grow(torch.device("cuda"), launch.Launch())

    assert settings == ["expandable_segments:True", "expandable_segments:False"]
    assert "operation not supported" in caplog.text


@pytest.mark.gpu
def test_torch_hears_that_segments_grow():
    """In a process of its own: the setting holds for all that it allocates later."""
    code = (
        "import torch; from tlora_fx.runtime.launching.launch import Launch, let_segments_grow; "
        "let_segments_grow(torch.device('cuda'), Launch()); torch.zeros(1, device='cuda'); "
        "print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in launch.ALLOCATOR_VARIABLES
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
