"""How one process of a group ends, and what it says of its memory."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.errors import DataFileError, MetricFunctionError, OutOfMemory, RankFailed
from tlora_fx.runtime.clocks import JobClocks
from tlora_fx.runtime.launching.launch import Launch
from tlora_fx.runtime.workers import training as worker
from tlora_fx.runtime.workers.protocol import (
    FILES_ABSENT,
    OUT_OF_MEMORY,
    EventReader,
    WorkerConfig,
)

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"

FAILURES = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    OutOfMemory("there is no memory for a step of any job", job="a"),
]


@pytest.fixture
def config(tmp_path):
    """An order of no jobs."""
    log = str(tmp_path / "events.jsonl")
    return WorkerConfig(1, (), {}, str(tmp_path / "train"), str(tmp_path), log)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_worker_without_memory_says_so_by_its_exit_code(monkeypatch, config, failure):
    """Whether it was loading or training; the jobs that are named are told as ever."""

    def run():
        raise failure

    monkeypatch.setattr(worker, "_trainer", lambda *given: SimpleNamespace(run=run))
    with pytest.raises(SystemExit) as ended:
        worker._train(config, Launch())

    assert ended.value.code == OUT_OF_MEMORY
    told = [line["job"] for line in EventReader(worker.Path(config.event_log)).lines()]
    assert told == (["a"] if isinstance(failure, OutOfMemory) else [])


@pytest.mark.parametrize("gone", ["data", "base", None])
def test_a_worker_whose_files_cannot_be_read_blames_no_job(monkeypatch, tmp_path, config, gone):
    """Each job that lacks a file is named; where all are there, the error's job is at fault."""
    shutil.copytree(QUICKSTART / "base", tmp_path / "base")
    jobs = [_spec(tmp_path, name) for name in "ab"]
    lost = {"data": ["b"], "base": ["a", "b"], None: []}[gone]
    if gone:
        path = {"data": tmp_path / "b.jsonl", "base": tmp_path / "base"}[gone]
        path.rename(tmp_path / "elsewhere")

    def load(*given):
        raise DataFileError("the data file does not exist", path="b.jsonl", job="b")

    monkeypatch.setattr(worker, "_trainer", load)
    with pytest.raises(SystemExit) as ended:
        worker._train(replace(config, jobs=tuple(jobs)), Launch())

    [line] = EventReader(worker.Path(config.event_log)).lines()
    assert (ended.value.code == FILES_ABSENT) is bool(gone)
    assert (line["job"], sorted(line.get("absent", {}))) == (None if gone else "b", lost)


def _spec(folder, name):
    """A job whose data is a copy in a folder, and whose base lies in the same folder."""
    shutil.copy(QUICKSTART / "data" / "records.jsonl", folder / f"{name}.jsonl")
    base = BaseSpec(config=folder / "base" / "config.json", tokenizer=str(QUICKSTART / "base"))
    data = {"path": str(folder / f"{name}.jsonl")}
    job = Job(name=name, base=base, lora={"r": 4}, data=data, max_steps=5)
    return job.model_dump(mode="json")


_ABSENT = DataFileError("the data file does not exist", path="a.jsonl")
_OWN = MetricFunctionError("a metric function fails: ZeroDivisionError", job="a", function="m.f")


@pytest.mark.parametrize(
    ("error", "blames"),
    [
        (_OWN, True),
        (RankFailed("process 1 cannot go on", rank="1", reason=str(_OWN)), True),
        (RankFailed("process 1 cannot go on", rank="1", reason=str(_ABSENT)), False),
        (OSError("the folder is stale"), False),
    ],
)
def test_a_job_whose_file_is_gone_is_at_fault_for_what_is_not_of_files(
    monkeypatch, tmp_path, config, error, blames
):
    """Otherwise it waited for its file, and whoever looks would see nothing of its own mistake."""
    shutil.copytree(QUICKSTART / "base", tmp_path / "base")
    config = replace(config, jobs=(_spec(tmp_path, "a"),))
    (tmp_path / "a.jsonl").unlink()

    def run():
        raise error

    monkeypatch.setattr(worker, "_trainer", lambda *given: SimpleNamespace(run=run))
    with pytest.raises(SystemExit) as ended:
        worker._train(config, Launch())

    [line] = EventReader(worker.Path(config.event_log)).lines()
    assert (ended.value.code == FILES_ABSENT) is not blames
    assert ("absent" in line) is not blames
    assert line["reason"] == str(error)


def test_another_failure_is_none_of_memory(monkeypatch, config):
    """It goes on to whoever prints it."""
    monkeypatch.setattr(worker, "_trainer", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker._train(config, Launch())


def test_a_worker_on_a_cpu_knows_what_it_holds_alone():
    """What it has written since its fork: here nothing else comes, goes or becomes shared."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        before, after, size = pool.apply(_memory_around_an_allocation)

    assert before > 0
    assert after - before == pytest.approx(size, rel=0.05)


def _memory_around_an_allocation() -> tuple[int, int, int]:
    before, _ = worker.memory()
    written = b"\1" * (1 << 28)
    after, _ = worker.memory()
    return before, after, len(written)


@pytest.mark.parametrize("size", [1, 2])
def test_a_worker_alone_on_its_gpu_lets_segments_grow(monkeypatch, config, size):
    """Workers of one group may copy shards out of each other's memory."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", asked := [].append)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)

    device = worker._device(replace(config, device="cuda", gpus=(3, 5)), Launch(size=size))

    assert device == torch.device("cuda", 3)
    assert asked.__self__ == ["expandable_segments:True"] * (size == 1)


def test_who_only_leaves_waits_for_no_reader(monkeypatch, config, tmp_path):
    """Though one is busy with those who come to another group."""
    config.write(tmp_path / "worker.json")
    monkeypatch.setattr(worker, "_reader", SimpleNamespace(submit=None))

    takeover = worker.Takeover.of(tmp_path / "worker.json", {"a", "b"})

    assert takeover.arrivals.done()
    assert takeover.arrivals.result() == ({}, {}, {})


def test_a_joiners_data_and_checkpoint_are_read_beside_one_another(monkeypatch):
    """Each waits for the other to begin."""
    both = threading.Barrier(2, timeout=600)

    def read(what):
        both.wait()
        return what

    monkeypatch.setattr(
        worker, "load_all_data", lambda jobs, clocks: read({"a": SimpleNamespace(steps=1)})
    )
    monkeypatch.setattr(worker, "require_trainable", lambda *given: None)
    sources = SimpleNamespace(checkpoints=lambda: read("where it was"))

    data, states = worker._read([SimpleNamespace(name="a")], sources, JobClocks())

    assert list(data) == ["a"]
    assert states == "where it was"


@pytest.mark.parametrize("times", [1, 2])
def test_joiners_whose_file_is_back_are_read_once_more(monkeypatch, tmp_path, times):
    """A file that still cannot be read is told of by its own error."""
    shutil.copytree(QUICKSTART / "base", tmp_path / "base")
    failures = [_ABSENT] * times

    def read(*given):
        if failures:
            raise failures.pop()
        return {"a": "data"}, {}

    monkeypatch.setattr(worker, "_read", read)
    joining = [Job.model_validate(_spec(tmp_path, "a"))]
    if times == 2:
        with pytest.raises(DataFileError, match="does not exist"):
            worker._read_those_there(joining, SimpleNamespace(), JobClocks())
        return

    assert worker._read_those_there(joining, SimpleNamespace(), JobClocks()) == (
        {"a": "data"},
        {},
        {},
    )
