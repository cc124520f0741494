"""Checkpoints: whole, kept, and found again whatever happened."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from tests.fresh import Program
from tlora_fx.errors import CheckpointError, NewerFormat
from tlora_fx.host.version import __version__
from tlora_fx.runtime.checkpoints import store as checkpoint
from tlora_fx.runtime.checkpoints.store import CheckpointStore, CheckpointWarning, JobState

OLD_FORMATS = Path(__file__).parents[1] / "old_formats"


def state_of(step: int) -> JobState:
    """A job's state whose tensors tell the step."""
    bank = torch.full((8, 6), float(step))
    return JobState(
        adapter={"base_model.model.q.lora_A.weight": bank[:4], "b": bank[4:].t()},
        optimizer={"exp_avg/a": torch.full((3,), step / 3, dtype=torch.float64)},
        optimizer_values={"schedule": {"_last_lr": [step / 7]}},
        step=step,
        micro_step=2 * step,
        tokens=100 * step,
        cursor={"step": step},
        status="failed",
        reason="loss is NaN",
    )


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A store in an empty folder."""
    return CheckpointStore(tmp_path)


def names(store: CheckpointStore) -> list[str]:
    """What lies in the store's folder."""
    return sorted(path.name for path in store.folder.iterdir())


def save(store: CheckpointStore, *steps: int) -> None:
    """Save two jobs at each of these steps."""
    for step in steps:
        store.save(step, {"a-1": state_of(step), "b.2": state_of(step + 1)}, {"seed": step})
        store.tidy()


def test_a_checkpoint_comes_back_as_it_was(store):
    """Tensors, numbers and words are bitwise what was saved."""
    save(store, 7)

    found = store.load()

    assert found is not None
    assert (found.step, found.run, list(found.jobs)) == (7, {"seed": 7}, ["a-1", "b.2"])
    for name, expected in {"a-1": state_of(7), "b.2": state_of(8)}.items():
        job = found.jobs[name]
        for ours, theirs in (
            (job.adapter, expected.adapter),
            (job.optimizer, expected.optimizer),
        ):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
            assert all(ours[key].dtype == theirs[key].dtype for key in theirs)
        plain = ("optimizer_values", "step", "micro_step", "tokens", "cursor", "status", "reason")
        assert all(getattr(job, key) == getattr(expected, key) for key in plain)


@pytest.mark.parametrize("size", [7, 96, 4096])
def test_a_large_file_is_summed_up_by_pieces(store, monkeypatch, size):
    """Its checksum says so; whatever the size of a piece, a bit that flips in one is noticed."""
    monkeypatch.setattr(checkpoint, "PIECE", size)
    save(store, 1, 2)
    sums = json.loads((store.folder / "step-000002" / "manifest.json").read_text())["sha256"]
    path = store.folder / "step-000002" / "jobs" / "b.2" / "adapter_model.safetensors"
    content = path.read_bytes()

    assert sums[f"jobs/b.2/{path.name}"].startswith("pieces:") == (len(content) > size)
    assert torch.equal(store.load().jobs["b.2"].adapter["b"], state_of(3).adapter["b"])
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.warns(CheckpointWarning, match="does not match its checksum"):
        assert store.load().step == 1


def test_a_checkpoint_goes_to_another_process_once(store):
    """Its tensors are views of files, of which pickle would write each whole for every tensor."""
    tensors = {f"lora_A.{index}": torch.randn(64, 16) for index in range(100)}
    store.save(1, {"a": JobState(tensors, tensors, {"rate": 1.0}, step=3, best=tensors)}, {})
    found = store.load()

    content = pickle.dumps(found)
    assert len(content) < 1.2 * 3 * 100 * 64 * 16 * 4
    there = pickle.loads(content)
    assert (there.path, there.step, there.jobs["a"].step) == (found.path, 1, 3)
    assert there.jobs["a"].optimizer_values == {"rate": 1.0}
    for group in ("adapter", "optimizer", "best"):
        one, two = (getattr(each.jobs["a"], group) for each in (found, there))
        assert one.keys() == two.keys()
        assert all(torch.equal(two[name], tensor) for name, tensor in one.items())


@pytest.mark.parametrize("sums", [[], [["state.json", "x"]], {"state.json": 7}, "x", None])
def test_a_manifest_that_is_none_gives_way_to_the_one_before(store, sums):
    """Whatever stands in the place of its checksums."""
    save(store, 1, 2)
    manifest = {"format": 2, "sha256": sums}
    (store.folder / "step-000002" / "manifest.json").write_text(json.dumps(manifest))

    assert store.counters()["a-1"]["step"] == 1
    assert store.run() == {"seed": 1}
    assert store.holds() == frozenset()
    with pytest.warns(CheckpointWarning, match="step-000002"):
        assert store.load().step == 1


def test_a_file_of_absurd_size_gives_way_to_the_checkpoint_before(store):
    """No memory has room for it."""
    save(store, 1, 2)
    os.truncate(store.folder / "step-000002" / "jobs" / "a-1" / "optimizer.safetensors", 1 << 43)

    with pytest.warns(CheckpointWarning, match="cannot be read"):
        assert store.load().step == 1


def test_a_checkpoint_that_is_pointed_to_stays_though_its_save_failed(store, monkeypatch):
    """Its folder could not be synced any more; what is tidied afterwards is not it."""
    save(store, 1, 2)
    real = checkpoint.replace_file

    def replace(path, data):
        real(path, data)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(checkpoint, "replace_file", replace)
    with pytest.raises(CheckpointError):
        save(store, 3)
    store.tidy()

    assert store.load().step == 3


def test_a_checkpoint_of_many_jobs_needs_few_open_files(store):
    """As few as threads read and write."""
    jobs = {f"job-{index}": state_of(index) for index in range(60)}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 32, hard))
    try:
        store.save(1, jobs, {})
        found = store.load()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert {name: job.step for name, job in found.jobs.items()} == {
        name: job.step for name, job in jobs.items()
    }


def test_checkpoints_of_the_first_format_are_read_and_linked_to(store, monkeypatch):
    """Every checksum was that of a whole file; a run that goes on links to such files."""
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    save(store, 3)
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint, "PIECE", 64)

    assert store.load().jobs["a-1"].step == 3
    path = store.save(5, {"b.2": state_of(6)}, {}, unchanged=["a-1"])
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 2
    assert len(manifest["sha256"]["jobs/a-1/optimizer.safetensors"]) == 64
    assert store.load().path == path


def test_an_empty_store_loads_nothing(store):
    """A run that never saved has no checkpoint, and that is no error."""
    assert store.load() is None


def test_the_newest_two_stay(store):
    """Older checkpoints are removed after a newer one is pointed to."""
    save(store, 1, 2, 3, 4)

    assert names(store) == ["latest", "step-000003", "step-000004"]
    assert (store.folder / "latest").read_text() == "step-000004\nstep-000003\n"


def test_only_safetensors_and_json_are_written(store):
    """No file of a checkpoint is a pickle."""
    save(store, 1)

    files = [p for p in store.folder.rglob("*") if p.is_file() and p.name != "latest"]
    assert {p.suffix for p in files} == {".json", ".safetensors"}
    for path in files:
        with pytest.raises(Exception, match=r".+"):
            pickle.loads(path.read_bytes())


@pytest.mark.parametrize(
    "file",
    ["manifest.json", "state.json", "jobs/a-1/adapter_model.safetensors"],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(store, file, damage):
    """A flipped bit, a cut file or a lost one is noticed, and said."""
    save(store, 1, 2)
    path = store.folder / "step-000002" / file
    content = path.read_bytes()
    if damage == "flip":
        # In the manifest a flipped bit may spoil a checksum, a file's name or the JSON.
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()

    with pytest.warns(CheckpointWarning, match=r"step-000002.*going on from step-000001"):
        found = store.load()

    assert found is not None
    assert found.step == 1


def test_a_run_goes_on_after_a_damaged_checkpoint(store):
    """The whole checkpoint outlives the damaged one, whose step may be saved anew."""
    save(store, 10, 20)
    (store.folder / "step-000020" / "state.json").write_bytes(b"{}")
    fresh = CheckpointStore(store.folder.parent)
    with pytest.warns(CheckpointWarning):
        fresh.load()

    save(fresh, 13)
    assert names(fresh) == ["latest", "step-000010", "step-000013"]
    save(fresh, 20)

    assert names(fresh) == ["latest", "step-000013", "step-000020"]
    found = fresh.load()
    assert found is not None
    assert found.step == 20


def test_the_same_step_may_be_saved_twice(store):
    """A step that is saved again gets a folder of its own, and the newer one is loaded."""
    save(store, 5)
    store.save(5, {"a-1": state_of(6)}, {"seed": "again"})

    found = store.load()

    assert found is not None
    assert found.run == {"seed": "again"}
    assert len(names(store)) == 3


def test_no_whole_checkpoint_is_an_error(store):
    """Where all are damaged, training does not silently begin anew."""
    save(store, 1, 2)
    for path in store.folder.glob("step-*/state.json"):
        path.write_bytes(b"")

    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        store.load()


def test_a_lost_pointer_is_no_loss(store):
    """Without `latest` the newest whole folder is found."""
    save(store, 1, 2)
    (store.folder / "latest").unlink()

    found = store.load()

    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("text", ["step-000009", "step-000009\nstep-000008", "", "\n", "../1"])
def test_a_wrong_pointer_gives_way_to_the_whole_checkpoint_beside_it(store, text):
    """It names what is not there, or nothing; the next save leaves two that are."""
    save(store, 1, 2)
    (store.folder / "latest").write_text(text)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = store.load()
    counters = store.counters()
    save(store, 3)

    assert found is not None
    assert found.step == 2
    assert counters["a-1"]["step"] == 2
    assert bool(told) is text.startswith("step")
    assert names(store) == ["latest", "step-000002", "step-000003"]


def test_a_newer_format_is_refused(store):
    """A checkpoint of a newer tlora-fx is not mistaken for a damaged one."""
    save(store, 1)
    manifest = store.folder / "step-000001" / "manifest.json"
    assert json.loads(manifest.read_text())["version"] == __version__
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 3'))

    with pytest.raises(NewerFormat, match="newer version of tlora-fx") as error:
        store.load()
    assert error.value.facts["found"] == f"format 3, by tlora-fx {__version__}"


@pytest.mark.parametrize("format", [1, 2])
def test_checkpoints_of_each_format_are_read(format, tmp_path):
    """They were written by the code of that format, before checkpoints told their version."""
    folder = shutil.copytree(OLD_FORMATS / f"checkpoint-{format}", tmp_path / "run")
    name = "base_model.model.layers.0.q_proj.lora_A.weight"
    store = CheckpointStore(folder)
    found = store.load()

    assert (found.step, found.run) == (3, {"rounds": 4, "seed": 1})
    job = found.jobs["math"]
    assert (job.step, job.micro_step, job.tokens) == (3, 6, 300)
    assert job.cursor == {"epoch": 0, "index": 3}
    assert torch.equal(job.adapter[name], torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
    assert torch.equal(job.optimizer[f"{name}.exp_avg"], torch.full((2, 2), 3.0))
    path = store.save(5, {"chat": job}, {}, unchanged=["math"])
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == (2, __version__)
    assert store.load().jobs["math"].step == 3


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a..b", "a\n"])
def test_a_job_name_cannot_lead_out(store, name):
    """A name that is no plain folder name is refused before anything is written."""
    with pytest.raises(CheckpointError):
        store.save(1, {name: state_of(1)}, {})

    assert not store.folder.exists()


@pytest.mark.parametrize("writes_before", range(7))
def test_a_full_disk_leaves_the_last_checkpoint_whole(store, monkeypatch, writes_before):
    """ENOSPC at any file of a checkpoint, or at the pointer, changes nothing that was there."""
    save(store, 1, 2)
    before = {p: p.read_bytes() for p in store.folder.rglob("*") if p.is_file()}
    fill_the_disk(monkeypatch, writes_before)

    with pytest.raises(CheckpointError, match="No space left") as caught:
        save(store, 3)

    assert isinstance(caught.value.__cause__, OSError)
    assert {p: p.read_bytes() for p in store.folder.rglob("*") if p.is_file()} == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = store.load()
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("before", [0, 1])
def test_a_full_disk_names_a_checkpoint_before_only_where_there_is_one(store, monkeypatch, before):
    """Without one there is nothing to resume from."""
    save(store, *range(before))
    fill_the_disk(monkeypatch, 0)

    with pytest.raises(CheckpointError) as caught:
        save(store, 5)
    told = "the checkpoint before is whole; free space and go on with --resume"
    assert caught.value.help == (told if before else "free space: there is no checkpoint yet")


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, writes_before: int) -> None:
    """Let so many files be written, then half of one, then nothing."""
    left = [writes_before]

    def write(path: Path, data: bytes) -> None:
        if left[0] == 0:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        left[0] -= 1
        path.write_bytes(data)

    monkeypatch.setattr(checkpoint, "write_synced", write)
    monkeypatch.setattr("tlora_fx.host.durable.write_synced", write)


FULL = """
import sys
import torch
from tests.runtime.test_checkpoint import CheckpointError, CheckpointStore, JobState
store = CheckpointStore(sys.argv[1])
try:
    for step in range(1, 100):
        tensors = {"a": torch.full((1000 * step,), float(step))}
        store.save(step, {"job": JobState(tensors, tensors)}, {})
        store.tidy()
except CheckpointError as error:
    assert "No space left" in str(error)
    found = store.load()
    assert found is not None and found.step == step - 1 > 2
    assert found.jobs["job"].adapter["a"].numel() == 1000 * found.step
    assert len(list(store.folder.iterdir())) == 3
    print("kept")
"""


def test_a_disk_that_is_really_full_keeps_the_last_checkpoint(tmp_path):
    """On a file system of half a mebibyte, checkpoints grow until the disk refuses."""
    mount = f"mount -t tmpfs -o size=512k none {tmp_path}"
    try:
        subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody mount a small file system")

    command = f'{mount} && exec "$0" -W error -c "$1" {tmp_path}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, sys.executable, FULL],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.stdout, done.returncode) == ("kept\n", 0), done.stderr


KILLED = """
import sys
from tests.runtime.test_checkpoint import CheckpointStore, save
store = CheckpointStore(sys.argv[1])
found = store.load()
step = found.step if found else 0
print("ready", flush=True)
while True:
    step += 1
    save(store, step)
    print(step, flush=True)
"""


def test_a_killed_process_leaves_a_store_that_loads(tmp_path):
    """kill -9 at some moments: what was reported saved is there, without a warning."""
    for attempt in range(2):
        child = Program("-c", KILLED, tmp_path, cwd=Path(__file__).parents[2])
        while len(child.files[0].read_text().splitlines()) < 2:
            assert child.poll() is None
            time.sleep(0.001)
        time.sleep(0.0037 + 0.0237 * attempt)
        child.process.kill()
        ready, *reports = child.wait().stdout.split()
        assert ready == "ready"
        reported = max(map(int, reports))

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = CheckpointStore(tmp_path).load()
        assert found is not None
        assert found.step >= reported > 0


KILLED_AT = """
import os, signal, sys, warnings
from pathlib import Path
from tests.runtime.test_checkpoint import CheckpointStore, save

def deadly(function, left):
    def call(*arguments, **named):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call

warnings.simplefilter("error")
store = CheckpointStore(sys.argv[1])
save(store, 1)
step, killed, calls = 1, 0, 0
while True:
    calls += 1
    child = os.fork()
    if child == 0:
        left = [calls]
        for owner, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink")):
            setattr(owner, name, deadly(getattr(owner, name), left))
        save(store, step + 1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = CheckpointStore(sys.argv[1]).load()
    assert found.step in (step, step + 1)
    step = found.step
    if status == 0:
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    killed += 1
print(killed, len(list(store.folder.iterdir())))
"""


def test_a_process_killed_at_any_call_leaves_a_store_that_loads(tmp_path):
    """kill -9 right before each fsync, rename and unlink of a save, one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    killed, entries = map(int, done.stdout.split())
    assert killed > 15
    assert entries == 3


def test_a_job_that_did_not_change_stays_as_it_was(store):
    """Its files are not written again, and its counters are those that belong to them."""
    save(store, 3)
    first = store.folder / "step-000003" / "jobs" / "a-1" / "optimizer.safetensors"
    assert store.holds() == {"a-1", "b.2"}
    path = store.save(5, {"b.2": state_of(6), "c": state_of(1)}, {}, unchanged=["a-1"])

    found = store.load()
    assert {name: job.step for name, job in found.jobs.items()} == {"a-1": 3, "b.2": 6, "c": 1}
    assert torch.equal(found.jobs["a-1"].adapter["b"], state_of(3).adapter["b"])
    assert (path / "jobs" / "a-1" / "optimizer.safetensors").samefile(first)


def test_a_job_that_came_from_another_run_is_linked_to_what_that_wrote(store, tmp_path):
    """Nothing is written twice; where it is gone, or damaged, the state itself is written."""
    other = CheckpointStore(tmp_path / "other")
    there = other.save(7, {"a-1": state_of(7)}, {})
    file = "jobs/a-1/optimizer.safetensors"
    states = {"a-1": state_of(7), "b.2": state_of(2)}

    path = store.save(1, states, {}, elsewhere={"a-1": there})
    assert (path / file).samefile(there / file)
    assert not (path / "jobs/b.2/optimizer.safetensors").samefile(there / file)
    assert store.load().jobs["a-1"].step == 7

    shutil.rmtree(other.folder)
    assert torch.equal(store.load().jobs["a-1"].adapter["b"], states["a-1"].adapter["b"])
    path = store.save(2, states, {}, elsewhere={"a-1": there})
    assert store.load().path == path
    assert torch.equal(store.load().jobs["a-1"].adapter["b"], states["a-1"].adapter["b"])


def test_two_checkpoints_stay_that_share_no_file(store):
    """A flipped bit in a file that several have takes nothing away that was written twice."""
    save(store, 1, 2)
    for step in (3, 4):
        store.save(step, {"b.2": state_of(step + 1)}, {}, unchanged=["a-1"])
        store.tidy()
    assert names(store) == ["latest", "step-000001", "step-000002", "step-000004"]

    (store.folder / "step-000004" / "jobs" / "a-1" / "optimizer.safetensors").write_bytes(b"")
    with pytest.warns(CheckpointWarning, match="step-000002"):
        assert store.load().step == 1
    with pytest.raises(CheckpointError, match="unchanged"):
        store.save(5, {}, {}, unchanged=["nobody"])


def test_a_checkpoint_that_is_tidied_away_while_it_is_read_gives_way_to_a_newer_one(
    store, monkeypatch
):
    """Its run goes on writing: an older one, which stays, would take steps back."""
    save(store, 1, 2)
    store.save(3, {"b.2": state_of(4)}, {}, unchanged=["a-1"])
    read = checkpoint._read

    def read_late(folder, only):
        if folder.name == "step-000003":
            store.save(4, {"b.2": state_of(5)}, {}, unchanged=["a-1"])
            store.tidy()
            assert not folder.exists()
        return read(folder, only)

    monkeypatch.setattr(checkpoint, "_read", read_late)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = CheckpointStore(store.folder.parent).load()

    assert (found.step, found.jobs["b.2"].step) == (4, 5)
