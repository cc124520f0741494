"""All jobs of a model train together, each to its own end, each as if it were alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.errors import CheckpointError, ResumeMismatch, RunFolderError
from tlora_fx.model.row_ladder import RowLadder, RowSize
from tlora_fx.runtime.adapters.files import adapter_tensors
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.rounds.row_schedule import rounds_to_pay
from tlora_fx.runtime.run_folder import MetricsLog, RunFolder, read_metrics
from tlora_fx.runtime.trainer import Trainer, TrainerCallback, TrainerOptions
from tlora_fx.runtime.verification.verify import adapter_difference


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


def three_jobs(base):
    return [
        make_job(base, "a", seed=1, lora={"r": 8, "lora_dropout": 0.1}, max_steps=5),
        make_job(base, "b", seed=2, gradient_accumulation_steps=3, max_steps=3, save_steps=2),
        make_job(base, "c", seed=3, lora={"r": 2, "target_modules": "all-linear"}, optim="sgd"),
    ]


def train(jobs, folder, **options):
    model = compile(jobs)
    trainer = Trainer(model, output=folder, device="cpu", data=make_data(jobs), **options)
    trainer.run()
    return model


def trained(model, name):
    return adapter_tensors(model.job_parameters(name))


def assert_close(one, two, bound):
    assert adapter_difference(one, two) <= bound


def test_each_job_stops_at_its_own_step_and_the_others_go_on(base, tmp_path):
    """Jobs of 5, 3 and 4 steps have as many metrics lines, and end as done."""
    jobs = three_jobs(base)
    train(jobs, tmp_path / "run")

    assert {name: len(v) for name, v in losses_of(tmp_path / "run", jobs).items()} == {
        "a": 5,
        "b": 3,
        "c": 4,
    }


def test_an_adapter_folder_loads_into_peft(base, tmp_path):
    """PeftModel.from_pretrained takes what a job leaves, tensor for tensor."""
    from peft import PeftModel, get_peft_model_state_dict

    from tlora_fx.runtime.adapters.files import plain_base

    jobs = three_jobs(base)
    model = train(jobs, tmp_path / "run")
    loaded = PeftModel.from_pretrained(plain_base(model.backbone), tmp_path / "run" / "a")

    expected = trained(model, "a")
    found = get_peft_model_state_dict(loaded)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_python_and_rows_of_any_size_give_the_same_adapters(base, tmp_path):
    """Rows closed at 8 tokens train every job as one large row does."""
    jobs = three_jobs(base)
    one = train(jobs, tmp_path / "large")
    two = train(jobs, tmp_path / "small", options=TrainerOptions(max_row_tokens=8))

    for job in jobs:
        assert_close(trained(one, job.name), trained(two, job.name), 1e-7)


def test_rows_lengthened_by_padding_give_the_same_adapters(base, tmp_path):
    """With dropout, a branch that runs as it is, and a last job that ends before the others."""
    jobs = [*three_jobs(base), make_job(base, "dora", lora={"use_dora": True}, max_steps=2)]
    plain = train(jobs, tmp_path / "plain")
    trainer = Trainer(compile(jobs), output=tmp_path / "long", device="cpu", data=make_data(jobs))
    trainer.group.bucketer.lengthened = True
    trainer.run()

    assert trainer.group.bucketer.padding > 0
    for job in jobs:
        assert_close(trained(plain, job.name), trained(trainer.model, job.name), 1e-7)


JOB = st.fixed_dictionaries(
    {
        "r": st.sampled_from([1, 3, 16, 64]),
        "lora_dropout": st.sampled_from([0.0, 0.2]),
        "targets": st.sampled_from([["q_proj"], ["v_proj", "down_proj"], "all-linear"]),
        "batch": st.integers(1, 3),
        "accumulation": st.integers(1, 3),
        "steps": st.integers(1, 3),
        "longest": st.sampled_from([2, 9]),
    }
)


@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(mix=st.lists(JOB, min_size=2, max_size=4), chosen=st.integers(0, 3), turned=st.booleans())
def test_a_job_trains_in_any_mix_as_it_does_alone(base, tmp_path_factory, mix, chosen, turned):
    """Losses within 1e-9 and adapters within 1e-7 of the same job alone, dropout included."""
    jobs = [
        make_job(
            base,
            f"job{place}",
            seed=place,
            lora={"r": f["r"], "lora_dropout": f["lora_dropout"], "target_modules": f["targets"]},
            per_device_train_batch_size=f["batch"],
            gradient_accumulation_steps=f["accumulation"],
            max_steps=f["steps"],
        )
        for place, f in enumerate(mix)
    ]
    job = jobs[chosen % len(jobs)]
    data = make_data(jobs, longest=mix[chosen % len(jobs)]["longest"])
    folder = tmp_path_factory.mktemp("runs")

    together = compile(jobs[::-1] if turned else jobs)
    Trainer(together, output=folder / "together", device="cpu", data=data).run()
    alone = compile([job])
    Trainer(alone, output=folder / "alone", device="cpu", data=data).run()

    assert_close(trained(alone, job.name), trained(together, job.name), 1e-7)
    one, two = (losses_of(folder / way, [job])[job.name] for way in ("alone", "together"))
    assert one == pytest.approx(two, rel=1e-9)


class Poison(TrainerCallback):
    """Puts a NaN into one job's adapter after its second step."""

    def __init__(self, model, job):
        self.model, self.job = model, job

    def stepped(self, report):
        if report.job == self.job and report.step == 2:
            next(iter(self.model.job_parameters(self.job).values())).data.fill_(float("nan"))


def test_a_nan_stops_its_job_and_leaves_the_neighbours_alone(base, tmp_path):
    """The poisoned job fails with a reason; the others end as in a healthy run."""
    jobs = three_jobs(base)
    healthy = train(jobs, tmp_path / "healthy")
    model = compile(jobs)
    trainer = Trainer(
        model,
        output=tmp_path / "sick",
        device="cpu",
        data=make_data(jobs),
        callback=Poison(model, "a"),
    )
    runs = {run.job.name: run for run in trainer.run()}

    assert runs["a"].status == "failed"
    assert "step 3" in runs["a"].reason
    assert [runs[name].status for name in "bc"] == ["done", "done"]
    for name in "bc":
        assert_close(trained(healthy, name), trained(model, name), 1e-7)


class Stop(TrainerCallback):
    """Ends the process's run after some steps, as Ctrl-C would, or another signal that comes."""

    def __init__(self, steps, number=signal.SIGINT, times=1):
        self.left, self.number, self.times = steps, number, times

    def stepped(self, report):
        self.left -= 1
        if self.left == 0:
            for _ in range(self.times):
                signal.raise_signal(self.number)


def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on_bitwise(base, tmp_path):
    """Interrupted and resumed, losses and adapters equal those of a run that never stopped."""
    jobs = three_jobs(base)
    whole = train(jobs, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(jobs, tmp_path / "cut", callback=Stop(4))
    assert "stopped" in statuses(tmp_path / "cut", jobs)
    resumed = train(jobs, tmp_path / "cut", resume=True)
    assert statuses(tmp_path / "cut", jobs) == {"done"}

    assert losses_of(tmp_path / "cut", jobs) == losses_of(tmp_path / "whole", jobs)
    for job in jobs:
        one, two = trained(whole, job.name), trained(resumed, job.name)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_ctrl_c_while_the_last_step_ends_is_the_end(base, tmp_path):
    """All jobs are done: nobody is told to go on."""
    jobs = three_jobs(base)
    train(jobs, tmp_path / "whole")
    last = sum(len(losses) for losses in losses_of(tmp_path / "whole", jobs).values())

    train(jobs, tmp_path / "asked", callback=Stop(last))

    assert statuses(tmp_path / "asked", jobs) == {"done"}
    assert losses_of(tmp_path / "asked", jobs) == losses_of(tmp_path / "whole", jobs)


def statuses(folder, jobs):
    """What the jobs' folders say."""
    return {json.loads((folder / job.name / "status.json").read_text())["status"] for job in jobs}


@pytest.mark.usefixtures("hears_hangups")
def test_a_closed_terminal_leaves_a_checkpoint(base, tmp_path):
    """SIGHUP may come twice, from the shell and from the kernel."""
    with pytest.raises(KeyboardInterrupt, match="after a checkpoint"):
        train(three_jobs(base), tmp_path / "cut", callback=Stop(4, signal.SIGHUP, times=2))

    assert CheckpointStore(tmp_path / "cut").load().step == 2


def test_under_nohup_a_closed_terminal_ends_nothing(base, tmp_path):
    """What was ignored at the start stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train(three_jobs(base), tmp_path / "run", callback=Stop(4, signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)

    assert CheckpointStore(tmp_path / "run").load().step == 5


def test_a_new_run_folder_is_nobody_else_s(base, tmp_path):
    """One that was there keeps its permissions."""
    (tmp_path / "mine").mkdir(mode=0o755)
    for name in ("mine", "new"):
        with RunFolder(tmp_path / name).held(resume=False):
            pass

    assert [(tmp_path / n).stat().st_mode & 0o777 for n in ("mine", "new")] == [0o755, 0o700]


class Remove(TrainerCallback):
    """Takes the output folder away after some steps."""

    def __init__(self, folder):
        self.folder = folder

    def stepped(self, report):
        elsewhere = self.folder.with_name("elsewhere")
        if not elsewhere.exists():
            self.folder.rename(elsewhere)


def test_a_run_whose_folder_is_removed_ends_with_an_error(base, tmp_path):
    """It does not end as if its adapters were there."""
    with pytest.raises(RunFolderError, match="removed or replaced"):
        train(three_jobs(base), tmp_path / "run", callback=Remove(tmp_path / "run"))


def test_metrics_are_on_the_disk_with_each_checkpoint(base, tmp_path, monkeypatch):
    """All lines of the steps that it holds, of every job, before it is pointed to."""
    synced, plain = {}, CheckpointStore.save
    sync = MetricsLog.sync

    def note(self):
        sync(self)
        synced[self.path.parent.name] = len(read_metrics(self.path))

    def save(self, step, states, run, **unchanged):
        held = {name: state.step for name, state in states.items()}
        assert all(step <= synced[name] for name, step in held.items())
        return plain(self, step, states, run, **unchanged)

    monkeypatch.setattr(MetricsLog, "sync", note)
    monkeypatch.setattr(CheckpointStore, "save", save)
    train(three_jobs(base), tmp_path / "run")

    assert synced == {"a": 5, "b": 3, "c": 4}


def test_a_finished_run_can_be_resumed_for_more_steps(base, tmp_path):
    """max_steps may grow between runs; a constant rate then gives the longer run's losses."""
    short = [make_job(base, "a", max_steps=2, lr_scheduler_type="constant")]
    long = [make_job(base, "a", max_steps=5, lr_scheduler_type="constant")]
    train(short, tmp_path / "run")
    train(long, tmp_path / "run", resume=True)
    train(long, tmp_path / "other")

    assert losses_of(tmp_path / "run", long) == losses_of(tmp_path / "other", long)


def test_a_folder_in_use_is_not_overwritten(base, tmp_path):
    """Without --resume a run refuses a folder that holds anything."""
    jobs = [make_job(base, "a", max_steps=1)]
    train(jobs, tmp_path / "run")

    with pytest.raises(RunFolderError, match="holds something already"):
        train(jobs, tmp_path / "run")


def test_a_folder_that_another_run_holds_is_refused(base, tmp_path):
    """Two processes never write one folder."""
    jobs = [make_job(base, "a", max_steps=1)]
    with (
        RunFolder(tmp_path / "run").held(resume=False),
        pytest.raises(RunFolderError, match="another process"),
    ):
        train(jobs, tmp_path / "run", resume=True)


def test_resuming_with_other_jobs_is_refused(base, tmp_path):
    """A changed learning rate names job and field."""
    train([make_job(base, "a", max_steps=1)], tmp_path / "run")

    with pytest.raises(ResumeMismatch, match="learning_rate"):
        train([make_job(base, "a", max_steps=1, learning_rate=1.0)], tmp_path / "run", resume=True)


def test_a_full_disk_costs_one_checkpoint_and_not_the_run(base, tmp_path, monkeypatch):
    """The run warns and goes on; the checkpoint before stays whole."""
    heard = []

    class Listen(TrainerCallback):
        def warned(self, text):
            heard.append(text)

    plain = CheckpointStore.save

    def refuse_once(self, step, jobs, run, **unchanged):
        if not heard:
            raise CheckpointError("no space left", help="free some")
        return plain(self, step, jobs, run, **unchanged)

    monkeypatch.setattr(CheckpointStore, "save", refuse_once)
    jobs = [make_job(base, "a", save_steps=1)]
    train(jobs, tmp_path / "run", callback=Listen())

    assert len(heard) == 1
    assert CheckpointStore(tmp_path / "run").load().jobs["a"].step == 4


def test_a_job_goes_on_from_its_adapter_folder(base, tmp_path):
    """`adapter:` starts where the folder ended."""
    first = [make_job(base, "a", max_steps=2)]
    train(first, tmp_path / "run")
    fields = first[0].model_dump() | {"lora": None, "adapter": tmp_path / "run" / "a"}
    going_on = [type(first[0])(**fields | {"base": base, "learning_rate": 0.0})]
    model = train(going_on, tmp_path / "more")

    saved = safetensors.torch.load_file(tmp_path / "run" / "a" / "adapter_model.safetensors")
    assert_close(saved, trained(model, "a"), 0.0)


def test_a_first_adapter_does_not_depend_on_the_other_targets(base, tmp_path):
    """q_proj's A is the same for a job that also targets v_proj, and another for another seed."""
    jobs = [
        make_job(base, "a", seed=5, max_steps=1, learning_rate=0.0),
        make_job(
            base, "b", seed=5, max_steps=1, learning_rate=0.0, lora={"target_modules": "all-linear"}
        ),
        make_job(base, "c", seed=6, max_steps=1, learning_rate=0.0),
    ]
    model = train(jobs, Path(tmp_path) / "run")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    one, two, other = (trained(model, job)[name] for job in "abc")
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("tokens", "steps", "rounds"), [(64, 12, [3]), (64, 11, []), (9000, 16, [])]
)
def test_rows_are_captured_where_enough_rounds_follow(
    base, tmp_path, monkeypatch, tokens, steps, rounds
):
    """Some rounds after their sizes were chosen, once; of long rows more rounds must follow."""
    monkeypatch.setattr("tlora_fx.runtime.rounds.row_schedule.CAPTURE_AFTER", 3)
    ladder = RowLadder(
        (RowSize(tokens, 4, 16, 8), RowSize(tokens + 16, 4, 16, 8), RowSize(tokens + 32, 4, 16, 8))
    )
    captured = []
    jobs = [make_job(base, "a", seed=1, max_steps=steps)]
    model = compile(jobs)
    trainer = Trainer(model, output=tmp_path / "run", device="cpu", data=make_data(jobs))
    monkeypatch.setattr(
        trainer.group, "expect", lambda data: setattr(trainer.group.bucketer, "ladder", ladder)
    )
    monkeypatch.setattr(trainer.group, "capture", lambda: captured.append(trainer.rounds))
    trainer.run()

    assert captured == rounds


def test_fewer_rounds_pay_for_rows_of_fewer_tokens():
    """Launching takes as long for a few tokens as for many, and a GPU computes them faster."""
    rounds = [rounds_to_pay(tokens) for tokens in (16, 2048, 2240, 3072, 4000, 4300, 9000)]

    assert rounds == sorted(rounds)
    assert (rounds[0], rounds[1], rounds[-1]) == (3, 3, 40)
    assert rounds[3] < 10


def test_the_ladder_follows_the_jobs_that_train(base, tmp_path, monkeypatch):
    """It is chosen at the start, and when a job ends."""
    jobs = three_jobs(base)
    trainer = Trainer(compile(jobs), output=tmp_path / "run", device="cpu", data=make_data(jobs))
    expected = []
    monkeypatch.setattr(trainer.group, "expect", lambda data: expected.append(sorted(data)))
    trainer.run()

    assert expected == [[0, 1, 2], [0, 2], [0]]
