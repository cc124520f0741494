"""Trackers get each job as a run of its own, and can hold up or end none."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.job_run import SampleReport
from tlora_fx.runtime.reports import trackers
from tlora_fx.runtime.reports.trackers import Trackers
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.runtime.trainer import Trainer

EVALUATED = {"eval_data": {"path": "unused.jsonl"}, "eval_steps": 2}


class Listen(TrainerCallback):
    """Keeps warnings."""

    def __init__(self):
        self.texts = []

    def warned(self, text):
        self.texts.append(text)


class Fake:
    """A tracker that keeps what it gets, and fails where it is told to."""

    def __init__(self, tracked, kept, fails):
        self.name, self.kept, self.fails = tracked.job.name, kept, fails
        self.note("open", tracked.identity)

    def log(self, step, values):
        self.note("log", step, values)

    def texts(self, step, texts):
        self.note("texts", step, texts)

    def close(self, status):
        self.note("close", status)

    def note(self, event, *facts):
        if (self.name, event) in self.fails:
            raise OSError("no such host")
        self.kept.append((self.name, event, *facts))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module", autouse=True)
def patient():
    """Trackers have all the time that a busy machine takes to import them and to close."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trackers, "CLOSING_SECONDS", 900.0)
        yield


@pytest.fixture
def faked(monkeypatch):
    """Puts a fake in a tracker's stead; what it got is returned."""

    def fake(fails=()):
        kept = []
        opener = {"wandb": lambda tracked: Fake(tracked, kept, fails)}
        monkeypatch.setattr(trackers, "OPENERS", {**trackers.OPENERS, **opener})
        return kept

    return fake


def jobs_of(base, **fields):
    """One job is reported, the other is not."""
    return [
        make_job(base, "a", max_steps=3, report_to=["wandb"], **fields),
        make_job(base, "b", max_steps=3),
    ]


def train(jobs, folder, **options):
    listen = Listen()
    trainer = Trainer(
        compile(jobs), output=folder, device="cpu", data=make_data(jobs), callback=listen, **options
    )
    trainer.run()
    return trainer, listen.texts


def test_a_tracker_gets_what_the_metrics_file_has(base, tmp_path, faked):
    """Each step's numbers and each evaluation's, of the job that is reported alone."""
    kept = faked()
    train(jobs_of(base, **EVALUATED), tmp_path)
    rows = read_metrics(tmp_path / "a" / "metrics.jsonl")

    assert [event[:2] for event in kept] == [("a", "open"), *[("a", "log")] * 5, ("a", "close")]
    told = [
        (step, values.get("train/loss", values.get("eval/loss")))
        for _, _, step, values in kept[1:-1]
    ]
    assert told == [(row["step"], row.get("loss", row.get("eval_loss"))) for row in rows]
    assert kept[-1] == ("a", "close", "done")


@pytest.mark.parametrize("event", ["open", "log", "close"])
def test_a_tracker_that_fails_costs_a_warning_and_no_bit(base, tmp_path, faked, event):
    """The job trains as without it; the warning names tracker, job and reason."""
    kept = faked(fails=[("a", event)])
    jobs = jobs_of(base)
    _, texts = train(jobs, tmp_path / "fails")
    train([job.model_copy(update={"report_to": []}) for job in jobs], tmp_path / "without")

    assert losses_of(tmp_path / "fails", jobs) == losses_of(tmp_path / "without", jobs)
    assert texts == ["wandb hears no more of job 'a': OSError: no such host"]
    assert len(kept) == {"open": 0, "log": 1, "close": 4}[event]


def test_a_tracker_that_hangs_holds_up_no_step(base, tmp_path, faked, monkeypatch):
    """Training ends while it hangs; what it did not take is told."""
    free = threading.Event()
    monkeypatch.setattr(trackers, "CLOSING_SECONDS", 0.01)
    monkeypatch.setattr(trackers, "OPENERS", {"wandb": lambda tracked: free.wait()})
    try:
        trainer, texts = train(jobs_of(base), tmp_path)
    finally:
        free.set()

    assert [run.status for run in trainer.runs] == ["done", "done"]
    assert texts == ["wandb did not take the last 5 events in time"]


def test_a_resumed_job_goes_on_with_its_run(base, tmp_path, faked):
    """It is the same run at the tracker, and was stopped in between."""
    kept = faked()
    jobs = jobs_of(base)

    class Stop(TrainerCallback):
        def stepped(self, report):
            if report.step == 2 and report.job == "b":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(
            compile(jobs), output=tmp_path, device="cpu", data=make_data(jobs), callback=Stop()
        ).run()
    train(jobs, tmp_path, resume=True)

    opened = [facts for _, event, *facts in kept if event == "open"]
    assert len(opened) == 2
    assert opened[0] == opened[1]
    assert [facts for _, event, *facts in kept if event == "close"] == [["stopped"], ["done"]]


# The trackers' own libraries, each read back by its own reader.


@pytest.fixture(scope="module")
def tracked(base, tmp_path_factory):
    """A job at all four trackers, none of which can reach anybody."""
    folder = tmp_path_factory.mktemp("tracked")
    job = make_job(base, "a", max_steps=3, report_to="all", **EVALUATED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("MLFLOW_TRACKING_URI", (folder / "mlflow").as_uri())
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        trainer, texts = train([job], folder / "run", resume=False)
        heard = Trackers("run", texts.append)
        # wandb names the folder of a start by its second.
        ended = int(time.time())
        while int(time.time()) == ended:
            time.sleep(0.01)
        # A second start of the same job, which says something.
        trainer.runs[0].status = "running"
        heard.started(trainer.runs)
        heard.sampled(SampleReport("a", 3, [("1+1=", "2")]))
        heard.close()
        yield folder, texts, read_metrics(folder / "run" / "a" / "metrics.jsonl")


def losses(rows):
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def test_nothing_is_said_of_trackers_that_work(tracked):
    """No warning, whatever they print."""
    assert tracked[1] == []


def test_tensorboard_reads_the_curves(tracked):
    """From the job's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _, rows = tracked
    events = EventAccumulator(str(folder / "run" / "a" / "tensorboard")).Reload()

    told = {event.step: event.value for event in events.Scalars("train/loss")}
    assert told == pytest.approx(dict(losses(rows)))
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 3]
    assert "samples/0/text_summary" in events.Tags()["tensors"]


def test_mlflow_reads_the_curves(tracked, monkeypatch):
    """One run, which was resumed."""
    from mlflow import MlflowClient

    folder, _, rows = tracked
    client = MlflowClient((folder / "mlflow").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("tlora-fx").experiment_id])

    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((each.step, each.value) for each in history) == losses(rows)
    assert run.data.params["learning_rate"] == "0.01"
    assert run.info.status == "KILLED"


def test_trackio_reads_the_curves(tracked):
    """One run, which was resumed."""
    from trackio.sqlite_storage import SQLiteStorage

    folder, _, rows = tracked
    identity = json.loads((folder / "run" / "a" / "tracker.json").read_text())["id"]
    told = SQLiteStorage.get_logs("tlora-fx", f"a-{identity}")

    assert [(row["step"], row["train/loss"]) for row in told if "train/loss" in row] == losses(rows)
    assert [row["samples"]["_value"] for row in told if "samples" in row] == [
        [{"prompt": "1+1=", "completion": "2"}]
    ]


def test_wandb_keeps_its_runs_offline(tracked):
    """In the job's folder, whence `wandb sync` sends them; two files of one run."""
    folder, _, _ = tracked
    identity = json.loads((folder / "run" / "a" / "tracker.json").read_text())["id"]
    files = sorted((folder / "run" / "a" / "wandb").glob("offline-run-*/*.wandb"))

    assert [path.name for path in files] == [f"run-{identity}.wandb"] * 2
    assert b"train/loss" in files[0].read_bytes()
    assert b"eval/loss" in files[0].read_bytes()
