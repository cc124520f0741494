"""Checkpoints are written while rounds go on, and nobody can tell but by the clock."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.errors import CheckpointError, MetricsError, RunFolderError
from tlora_fx.host import storage
from tlora_fx.runtime.checkpoints import store as checkpoint
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.rounds.run_checkpoints import Commits
from tlora_fx.runtime.run_folder import MetricsLog
from tlora_fx.runtime.trainer import Trainer, TrainerCallback

#: A writer that waits for what never comes goes on after so long.
PATIENCE_SECONDS = 600.0


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


class Heard(TrainerCallback):
    """Keeps what it hears, and opens gates: events by the step of job a that they wait for."""

    def __init__(self, gates: Mapping[int, threading.Event] | None = None) -> None:
        self.gates = gates or {}
        self.told: list[tuple[str, int]] = []
        self.warnings: list[str] = []
        self.threads: set[threading.Thread] = set()

    def stepped(self, report):
        if report.job == "a":
            self.told.append(("stepped", report.step))
            if report.step in self.gates:
                self.gates[report.step].set()

    def saved(self, path, runs):
        self.threads.add(threading.current_thread())
        self.told += [("saved", run.step) for run in runs if run.job.name == "a"]

    def ended(self, run):
        if run.job.name == "a":
            self.told.append(("ended", run.step))

    def warned(self, text):
        self.warnings.append(text)


def two_jobs(base, **fields):
    return [
        make_job(base, "a", seed=1, max_steps=6, lora={"r": 8, "lora_dropout": 0.1}, **fields),
        make_job(base, "b", seed=2, max_steps=6, optim="sgd"),
    ]


def trainer_of(jobs, folder, callback=None, **options):
    data = make_data(jobs)
    model = compile(jobs)
    return Trainer(model, output=folder, device="cpu", data=data, callback=callback, **options)


def hold_back(monkeypatch, gate, *, at):
    """Let the checkpoint of a round wait for a gate, as a slow disk; returns which gates came."""
    opened, plain = [], CheckpointStore.save

    def save(self, step, *given, **named):
        if step == at:
            opened.append(gate.wait(PATIENCE_SECONDS))
        return plain(self, step, *given, **named)

    monkeypatch.setattr(CheckpointStore, "save", save)
    return opened


def test_rounds_go_on_while_a_checkpoint_is_written(base, tmp_path, monkeypatch):
    """That of step 2 is written when step 4 is done; it is told later, as what it holds."""
    gate = threading.Event()
    heard = Heard({4: gate})
    opened = hold_back(monkeypatch, gate, at=2)
    trainer_of(two_jobs(base, save_steps=2), tmp_path / "run", heard).run()

    assert opened == [True]
    steps = [entry for entry in heard.told if entry[0] == "stepped"]
    assert heard.told.index(("saved", 2)) > heard.told.index(("stepped", 4))
    assert [entry for entry in heard.told if entry[0] == "saved"] == [
        ("saved", 2), ("saved", 4), ("saved", 6),
    ]  # fmt: skip
    assert steps == [("stepped", step) for step in range(1, 7)]
    assert heard.threads == {threading.main_thread()}


def test_a_checkpoint_is_told_before_older_ones_go(base, tmp_path, monkeypatch):
    """Who waits for it does not wait for their files; at the end they are gone."""
    gate, heard, tidied = threading.Event(), Heard(), []
    plain, tell = CheckpointStore.tidy, heard.saved

    def tidy(self):
        tidied.append(gate.wait(PATIENCE_SECONDS))
        plain(self)

    def saved(path, runs):
        gate.set()
        tell(path, runs)

    heard.saved = saved
    monkeypatch.setattr(CheckpointStore, "tidy", tidy)
    trainer_of(two_jobs(base, save_steps=1), tmp_path / "run", heard).run()

    assert tidied
    assert all(tidied)
    folder = tmp_path / "run" / "checkpoints"
    names = (folder / "latest").read_text().split()
    assert sorted(path.name for path in folder.glob("step-*")) == sorted(names)
    assert len(names) <= 3


def test_a_user_is_told_why_older_checkpoints_stay(base, tmp_path, monkeypatch):
    """The run goes on all the same."""

    def tidy(self):
        raise OSError("no way")

    heard = Heard()
    monkeypatch.setattr(CheckpointStore, "tidy", tidy)
    trainer_of(two_jobs(base, save_steps=3), tmp_path / "run", heard).run()

    assert heard.told[-1] == ("saved", 6)
    assert set(heard.warnings) == {"older checkpoints stay: no way"}


def test_the_end_of_a_job_is_told_after_the_checkpoints_before_it(base, tmp_path, monkeypatch):
    """It waits for the one that is being written; the run ends with the last one."""
    gate = threading.Event()
    heard = Heard({6: gate})
    hold_back(monkeypatch, gate, at=4)
    trainer_of(two_jobs(base, save_steps=4), tmp_path / "run", heard).run()

    assert heard.told[-4:] == [("stepped", 6), ("saved", 4), ("ended", 6), ("saved", 6)]
    status = json.loads((tmp_path / "run" / "a" / "status.json").read_text())
    assert (status["status"], status["step"]) == ("done", 6)


def written(base, folder, monkeypatch, prepare):
    """The checksums of each checkpoint's tensors and all its counters, by its round."""
    found, plain = {}, CheckpointStore.save
    with monkeypatch.context() as changes:

        def save(self, step, *given, **named):
            path = plain(self, step, *given, **named)
            sums = json.loads((path / "manifest.json").read_text())["sha256"]
            state = json.loads((path / "state.json").read_text())
            del sums["state.json"]
            # An evaluation's time is nobody's number.
            state["jobs"]["a"]["evaluation"]["last"].pop("eval_runtime")
            found[step] = sums, state
            return path

        changes.setattr(CheckpointStore, "save", save)
        heard = prepare(changes)
        more = {"optim": "adamw_torch", "eval_strategy": "steps", "eval_steps": 2}
        jobs = two_jobs(
            base, save_steps=2, load_best_model_at_end=True, eval_data={"path": "unused.jsonl"},
            **more,
        )  # fmt: skip
        trainer_of(jobs, folder, heard).run()
    return found


def test_a_checkpoint_holds_what_was_when_it_was_taken(base, tmp_path, monkeypatch):
    """Bitwise: files that are made two steps later are those of a run that waits for them."""

    def slow(changes):
        gate = threading.Event()
        hold_back(changes, gate, at=2)
        return Heard({4: gate})

    def waiting(changes):
        plain = Commits.begin

        def begin(self, *given, **named):
            plain(self, *given, **named)
            self.settle()

        changes.setattr(Commits, "begin", begin)
        return Heard()

    beside = written(base, tmp_path / "beside", monkeypatch, slow)
    alone = written(base, tmp_path / "alone", monkeypatch, waiting)

    assert len(beside[2][0]) == 5
    assert beside == alone


def test_there_is_never_more_than_one_copy(base, tmp_path, monkeypatch):
    """A checkpoint waits for the one before, whose error costs nobody else."""
    inside, most, plain = [], [], CheckpointStore.save

    def save(self, step, *given, **named):
        inside.append(step)
        most.append(len(inside))
        try:
            if step == 2:
                raise CheckpointError("no space left", help="free some")
            return plain(self, step, *given, **named)
        finally:
            inside.remove(step)

    monkeypatch.setattr(CheckpointStore, "save", save)
    heard = Heard()
    trainer_of(two_jobs(base, save_steps=1), tmp_path / "run", heard).run()

    assert max(most) == 1
    assert [text for text in heard.warnings if "no space left" in text] == heard.warnings != []
    saved = [step for what, step in heard.told if what == "saved"]
    assert saved == [1, 3, 4, 5, 6]


def refuse(step, *given, **named):
    raise CheckpointError("no space left", help="free some")


def test_the_last_checkpoint_s_error_ends_the_run(base, tmp_path, monkeypatch):
    """With its code, whatever was written before."""
    monkeypatch.setattr(CheckpointStore, "save", refuse)
    heard = Heard()
    with pytest.raises(CheckpointError, match="no space left") as caught:
        trainer_of(two_jobs(base, save_steps=4), tmp_path / "run", heard).run()

    assert CheckpointError.code in str(caught.value)
    assert [CheckpointError.code in text for text in heard.warnings] == [True]


def test_the_last_checkpoint_of_a_worker_waits_for_a_full_disk(base, tmp_path, monkeypatch):
    """Those before it cost a warning, and training goes on."""
    monkeypatch.setattr(storage, "WAIT_SECONDS", 0.0)
    plain, tried = CheckpointStore.save, []

    def save(self, step, *given, **named):
        tried.append(step)
        if step == 4 or tried.count(6) in (1, 2):
            raise CheckpointError("no space left") from OSError(errno.ENOSPC, "full")
        return plain(self, step, *given, **named)

    monkeypatch.setattr(CheckpointStore, "save", save)
    heard = Heard()
    with storage.waits_for_room():
        trainer_of(two_jobs(base, save_steps=4), tmp_path / "run", heard).run()

    assert tried == [4, 6, 6, 6]
    assert [CheckpointError.code in text for text in heard.warnings] == [True]
    assert [step for what, step in heard.told if what == "saved"] == [6]


def test_metrics_that_are_not_on_the_disk_leave_no_checkpoint(base, tmp_path, monkeypatch):
    """Their error is told as one of the checkpoint."""
    plain = MetricsLog.sync

    def sync(self):
        if (self.path.parent / "full").exists():
            raise MetricsError("no space left", help="free some")
        plain(self)

    class Fill(Heard):
        def stepped(self, report):
            full = tmp_path / "run" / "a" / "full"
            full.touch() if report.step == 2 else full.unlink(missing_ok=True)
            super().stepped(report)

    monkeypatch.setattr(MetricsLog, "sync", sync)
    # Otherwise the next step may take the obstacle away before the thread has met it.
    monkeypatch.setattr(Commits, "look", Commits.settle)
    heard = Fill()
    trainer_of(two_jobs(base, save_steps=2), tmp_path / "run", heard).run()

    assert [MetricsError.code in text for text in heard.warnings] == [True]
    assert [step for what, step in heard.told if what == "saved"] == [4, 6]


def test_an_error_that_nobody_expects_ends_the_run(base, tmp_path, monkeypatch):
    """It is raised between later rounds, not lost with its thread."""

    def broken(self, step, *given, **named):
        raise ZeroDivisionError

    monkeypatch.setattr(CheckpointStore, "save", broken)
    with pytest.raises(ZeroDivisionError):
        trainer_of(two_jobs(base, save_steps=1), tmp_path / "run").run()


@pytest.mark.parametrize("is_written", [True, False])
def test_a_run_that_breaks_tells_of_what_it_was_writing(base, tmp_path, monkeypatch, is_written):
    """The checkpoint is there when `run` ends with its error, or the warning is."""
    gate = threading.Event()
    hold_back(monkeypatch, gate, at=2)
    if not is_written:
        monkeypatch.setattr(CheckpointStore, "save", refuse)

    class Break(Heard):
        def stepped(self, report):
            super().stepped(report)
            if report.step == 3:
                threading.Timer(0.2, gate.set).start()
                raise KeyboardInterrupt

    heard = Break()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(two_jobs(base, save_steps=2), tmp_path / "run", heard).run()

    found = CheckpointStore(tmp_path / "run").load()
    assert (found.step if found else 0) == (2 if is_written else 0)
    assert heard.told[-1] == (("saved", 2) if is_written else ("stepped", 3))
    assert len(heard.warnings) == (0 if is_written else 1)


def test_what_ends_a_run_is_heard_of_whatever_becomes_of_its_checkpoint(
    base, tmp_path, monkeypatch
):
    """An error that nobody expects in the thread is a warning then."""

    def full(*given, **named):
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(CheckpointStore, "save", full)

    class Break(Heard):
        def stepped(self, report):
            if report.step == 2:
                # Told between rounds, it would be what ends the run.
                monkeypatch.setattr(Commits, "look", lambda commits: None)
            if report.step == 3:
                raise KeyboardInterrupt

    heard = Break()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(two_jobs(base, save_steps=2), tmp_path / "run", heard).run()

    assert heard.warnings == ["no room for a copy"]


def test_jobs_of_a_checkpoint_that_failed_are_in_the_next_one(base, tmp_path, monkeypatch):
    """Though that is of others: what an older one holds of them is not how they stand."""
    jobs = two_jobs(base)
    trainer = trainer_of(jobs, tmp_path / "run", Heard())
    data = make_data(jobs)
    (tmp_path / "run").mkdir()
    trainer.folder.begin(["a", "b"])
    trainer.checkpoints.describe(trainer.jobs, data)
    trainer.prepare(data)
    plain, kept = CheckpointStore.save, []

    def save(store, *given, unchanged, **others):
        kept.append(set(unchanged))
        return plain(store, *given, unchanged=unchanged)

    monkeypatch.setattr(CheckpointStore, "save", save)
    for only, fails in ((None, False), ({"a"}, True), ({"b"}, False), ({"b"}, False)):
        monkeypatch.setattr(CheckpointStore, "save", refuse if fails else save)
        trainer._save(last=False, only=only)
        trainer.commits.settle()

    assert kept == [set(), set(), {"a"}]


def test_a_run_that_is_asked_to_stop_ends_with_a_checkpoint_of_its_last_step(
    base, tmp_path, monkeypatch
):
    """After the one that was being written when SIGTERM came."""
    gate = threading.Event()
    hold_back(monkeypatch, gate, at=2)

    class Ask(Heard):
        def stepped(self, report):
            super().stepped(report)
            if (report.job, report.step) == ("a", 3):
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Timer(0.2, gate.set).start()

    heard = Ask()
    with pytest.raises(KeyboardInterrupt, match="step-000003"):
        trainer_of(two_jobs(base, save_steps=2), tmp_path / "run", heard).run()

    assert CheckpointStore(tmp_path / "run").load().step == 3
    assert [entry for entry in heard.told if entry[0] == "saved"] == [("saved", 2), ("saved", 3)]


def test_a_folder_that_goes_while_it_is_written_ends_the_run(base, tmp_path, monkeypatch):
    """Before anybody is told that the checkpoint is there."""
    gate = threading.Event()
    hold_back(monkeypatch, gate, at=2)

    class Remove(Heard):
        def stepped(self, report):
            super().stepped(report)
            if (report.job, report.step) == ("b", 3):
                (tmp_path / "run").rename(tmp_path / "elsewhere")
                gate.set()

    heard = Remove()
    with pytest.raises(RunFolderError, match="removed or replaced"):
        trainer_of(two_jobs(base, save_steps=2), tmp_path / "run", heard).run()

    assert ("saved", 2) not in heard.told


def test_a_run_killed_while_it_writes_goes_on_from_the_checkpoint_before(
    base, tmp_path, monkeypatch
):
    """Two steps after the commit point, in the middle of its files; it ends as one never killed."""
    jobs = two_jobs(base, save_steps=2)
    trainer_of(jobs, tmp_path / "whole").run()
    pid = os.fork()
    if pid == 0:
        try:
            gate = threading.Event()
            plain = checkpoint.write_synced

            def write(path, data):
                if (
                    ".tmp-" in str(path)
                    and "step-000004" in str(path)
                    and path.name == "state.json"
                ):
                    gate.wait(PATIENCE_SECONDS)
                    os.kill(os.getpid(), signal.SIGKILL)
                plain(path, data)

            monkeypatch.setattr(checkpoint, "write_synced", write)
            trainer_of(jobs, tmp_path / "cut", Heard({6: gate})).run()
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert CheckpointStore(tmp_path / "cut").load().step == 2
    status = json.loads((tmp_path / "cut" / "a" / "status.json").read_text())
    assert (status["status"], status["step"]) == ("running", 2)

    trainer_of(jobs, tmp_path / "cut", resume=True).run()

    assert losses_of(tmp_path / "cut", jobs) == losses_of(tmp_path / "whole", jobs)
    one, two = (CheckpointStore(tmp_path / name).load().jobs for name in ("cut", "whole"))
    for name in ("a", "b"):
        for kind in ("adapter", "optimizer"):
            assert_equal(getattr(one[name], kind), getattr(two[name], kind))


def assert_equal(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
