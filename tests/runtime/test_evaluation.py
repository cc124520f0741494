"""Jobs are evaluated while they train: measured as alone, and training does not notice."""

from __future__ import annotations

import json
import math
import signal

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.runtime.groups import (
    draw_samples,
    evaluations_of,
    losses_of,
    make_data,
    make_job,
    table_of,
    tiny_base,
)
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.errors import EmptyDataError, MetricFunctionError
from tlora_fx.runtime.adapters.files import adapter_tensors
from tlora_fx.runtime.checks import load_all_data
from tlora_fx.runtime.data.samples import held_out
from tlora_fx.runtime.trainer import Trainer, TrainerCallback, TrainerOptions
from tlora_fx.runtime.workers.protocol import EventReader, WorkerConfig
from tlora_fx.runtime.workers.training import EventCallback

EVALUATED = {"eval_data": {"path": "unused.jsonl"}, "eval_steps": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """A base of one layer that drops attention weights too."""
    folder = tmp_path_factory.mktemp("dropping")
    return tiny_base(folder, attention_dropout=0.3, num_hidden_layers=1)


def two_jobs(base, **fields):
    """A job that drops, evaluated or not, and one that is never evaluated."""
    lora = {"r": 8, "lora_dropout": 0.5, "target_modules": "all-linear"}
    return [
        make_job(base, "a", seed=1, lora=lora, max_steps=5, **fields),
        make_job(base, "b", seed=2, gradient_accumulation_steps=3, max_steps=6),
    ]


def train(jobs, folder, data=None, **options):
    data = data or make_data(jobs)
    trainer = Trainer(compile(jobs), output=folder, device="cpu", data=data, **options)
    trainer.run()
    return trainer


def trained(trainer, name):
    return adapter_tensors(trainer.model.job_parameters(name))


def saved(folder, name):
    return safetensors.torch.load_file(folder / name / "adapter_model.safetensors")


def status(folder, name):
    return json.loads((folder / name / "status.json").read_text())


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("of", sampled(["dropping", "base"]))
def test_evaluation_changes_no_bit_of_training(request, of, tmp_path):
    """Losses and adapters with and without evaluation are the same bits, dropout included."""
    made = request.getfixturevalue(of)
    without = train(two_jobs(made), tmp_path / "without")
    evaluated = train(two_jobs(made, **EVALUATED), tmp_path / "with")

    jobs = two_jobs(made)
    assert losses_of(tmp_path / "with", jobs) == losses_of(tmp_path / "without", jobs)
    assert all(same(trained(without, name), trained(evaluated, name)) for name in "ab")


def test_a_job_is_evaluated_every_so_many_steps_and_at_its_last(base, tmp_path):
    """At steps 2 and 4 of 5, and at 5; its neighbour never is."""
    jobs = two_jobs(base, **EVALUATED)
    train(jobs, tmp_path / "run")

    told = evaluations_of(tmp_path / "run", jobs)
    assert [row["step"] for row in told["a"]] == [2, 4, 5]
    assert told["b"] == []


def test_who_watches_a_worker_hears_before_and_after_what_takes_time(base, tmp_path):
    """An evaluation and a checkpoint are no step that hangs."""
    jobs = [make_job(base, "a", max_steps=2, **EVALUATED)]
    log = tmp_path / "events.jsonl"
    events = EventCallback(WorkerConfig(1, (), {}, "", "", str(log)))
    train(jobs, tmp_path / "run", callback=events)
    kinds = [line["kind"] for line in EventReader(log).lines()]

    # Steps that follow fast are told together.
    told = [kind for kind in kinds if kind != "progress"]
    assert told == ["started", "evaluating", "evaluated", "saving", "saved"]


def test_a_job_is_evaluated_after_each_epoch_by_default(base, tmp_path):
    """11 samples in batches of 2 are six steps; the last of 8 steps is evaluated too."""
    jobs = [make_job(base, "a", max_steps=8, eval_data={"path": "unused.jsonl"})]
    train(jobs, tmp_path / "run")

    assert [row["step"] for row in evaluations_of(tmp_path / "run", jobs)["a"]] == [6, 8]


def peft_scores(trainer, folder, name):
    """Loss, token accuracy and exact match of an adapter on its job's data, by plain PEFT."""
    from peft import PeftModel

    from tlora_fx.runtime.adapters.files import plain_base

    model = PeftModel.from_pretrained(plain_base(trainer.model.backbone), folder / name).eval()
    run = next(run for run in trainer.runs if run.job.name == name)
    losses, right = [], []
    for sample in run.data.evaluation:
        logits = model(input_ids=torch.tensor([sample.input_ids])).logits[0, :-1]
        targets = torch.tensor(sample.labels[1:])
        kept = targets != -100
        losses.append(F.cross_entropy(logits[kept], targets[kept], reduction="none"))
        right.append(logits[kept].argmax(-1) == targets[kept])
    return {
        "eval_loss": torch.cat(losses).mean().item(),
        "eval_mean_token_accuracy": torch.cat(right).double().mean().item(),
        "eval_exact_match": sum(bool(each.all()) for each in right) / len(right),
    }


def assert_equal_scores(found, expected):
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_an_evaluation_measures_what_plain_peft_measures(dropping, tmp_path):
    """Loss, token accuracy and exact match of the last step, sequence by sequence."""
    jobs = two_jobs(dropping, **EVALUATED)
    trainer = train(jobs, tmp_path / "run")

    last = evaluations_of(tmp_path / "run", jobs)["a"][-1]
    with torch.no_grad():
        assert_equal_scores(last, peft_scores(trainer, tmp_path / "run", "a"))


def test_a_learned_text_is_matched_exactly(base, tmp_path):
    """A job that is evaluated on what it learned by heart ends with every sample right."""
    job = make_job(
        base, "a", eval_steps=20, eval_data={"path": "unused.jsonl"}, max_steps=20,
        lora={"r": 16, "target_modules": "all-linear"}, learning_rate=3e-2,
    )  # fmt: skip
    data = make_data([job], longest=4, count=2)["a"]
    object.__setattr__(data, "evaluation", data.samples)
    train([job], tmp_path / "run", {"a": data})

    [told] = evaluations_of(tmp_path / "run", [job])["a"]
    assert (told["eval_mean_token_accuracy"], told["eval_exact_match"]) == (1, 1)


MIX = st.fixed_dictionaries(
    {
        "r": st.sampled_from([1, 3, 16]),
        "lora_dropout": st.sampled_from([0.0, 0.4]),
        "targets": st.sampled_from([["q_proj"], ["v_proj", "down_proj"], "all-linear"]),
        "eval_steps": st.integers(1, 3),
        "batch": st.integers(1, 6),
    }
)


def measured_apart(base, folder, mix, row):
    """Evaluations of the first job of a mix, beside the others and alone."""
    jobs = [
        make_job(
            base, f"job{place}", seed=place, max_steps=3,
            lora={"r": f["r"], "lora_dropout": f["lora_dropout"], "target_modules": f["targets"]},
            eval_data={"path": "unused.jsonl"}, eval_steps=f["eval_steps"],
            per_device_eval_batch_size=f["batch"],
        )
        for place, f in enumerate(mix)
    ]  # fmt: skip
    train(jobs, folder / "together", options=TrainerOptions(max_row_tokens=row))
    train(jobs[:1], folder / "alone")
    runs = (folder / "together", folder / "alone")
    return [evaluations_of(run, jobs[:1])["job0"] for run in runs]


def searched(examples):
    """Settings of a search without shrinking: an example takes seconds."""
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    phases = [Phase.explicit, Phase.generate]
    return settings(max_examples=examples, phases=phases, suppress_health_check=slow)


@searched(2)
@given(mix=st.lists(MIX, min_size=2, max_size=3), row=st.sampled_from([9, 16384]))
def test_a_job_is_measured_in_any_mix_as_it_is_alone(base, tmp_path_factory, mix, row):
    """Whatever its neighbours, its batches and the length of rows, to 1e-9."""
    together, alone = measured_apart(base, tmp_path_factory.mktemp("runs"), mix, row)

    assert [each["step"] for each in together] == [each["step"] for each in alone]
    for mine, theirs in zip(together, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.slow
@searched(20)
@given(mix=st.lists(MIX, min_size=2, max_size=4), row=st.sampled_from([9, 40, 16384]))
def test_a_job_is_measured_in_more_mixes_as_it_is_alone(base, tmp_path_factory, mix, row):
    """The same, searched longer."""
    together, alone = measured_apart(base, tmp_path_factory.mktemp("runs"), mix, row)

    assert len(together) == len(alone) > 0
    for mine, theirs in zip(together, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


def test_the_best_step_is_what_a_job_leaves(base, tmp_path):
    """With a rate that makes it worse, the first evaluation was best; PEFT measures its loss."""
    jobs = two_jobs(base, **EVALUATED, load_best_model_at_end=True, learning_rate=0.3)
    trainer = train(jobs, tmp_path / "run")

    told = evaluations_of(tmp_path / "run", jobs)["a"]
    best = min(told, key=lambda row: row["eval_loss"])
    assert best["step"] < 5
    assert status(tmp_path / "run", "a")["evaluation"]["best_step"] == best["step"]
    assert same(saved(tmp_path / "run", "a"), trained(trainer, "a"))
    with torch.no_grad():
        scores = peft_scores(trainer, tmp_path / "run", "a")
    assert_equal_scores(best, scores)


STOPPING = EVALUATED | {
    "eval_steps": 1,
    "learning_rate": 0.3,
    "early_stopping_patience": 2,
    "load_best_model_at_end": True,
}


def test_a_job_that_stops_early_leaves_as_if_its_steps_were_over(base, tmp_path):
    """It is done, says why, and its neighbour's bits are those beside a job of as many steps."""
    jobs = two_jobs(base, **STOPPING)
    stopping = train(jobs, tmp_path / "run")
    found = status(tmp_path / "run", "a")
    shorter = [jobs[0].model_copy(update={"max_steps": found["step"]}), jobs[1]]
    over = train(shorter, tmp_path / "over", make_data(shorter))

    assert found["status"] == "done"
    assert found["step"] < 5
    assert found["reason"].startswith("stopped early: for 2 evaluations eval_loss was not better")
    assert losses_of(tmp_path / "run", jobs)["b"] == losses_of(tmp_path / "over", jobs)["b"]
    assert same(trained(stopping, "b"), trained(over, "b"))


class Stop(TrainerCallback):
    """Ends the run after some steps of all jobs, as Ctrl-C would."""

    def __init__(self, steps):
        self.left = steps

    def stepped(self, report):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("steps", [3, 5])
def test_an_interrupted_run_stops_early_where_the_whole_one_does(base, tmp_path, steps):
    """Patience, the best adapter and the mean of losses go on from the checkpoint."""
    jobs = two_jobs(base, **STOPPING)
    train(jobs, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(jobs, tmp_path / "cut", callback=Stop(steps))
    train(jobs, tmp_path / "cut", resume=True)

    one, two = tmp_path / "whole", tmp_path / "cut"
    assert evaluations_of(two, jobs) == evaluations_of(one, jobs)
    assert losses_of(two, jobs) == losses_of(one, jobs)
    for name in "ab":
        mine, theirs = status(two, name), status(one, name)
        for told in (mine, theirs):
            told.get("evaluation", {"last": {}})["last"].pop("eval_runtime", None)
        assert mine == theirs
        assert same(saved(two, name), saved(one, name))


def test_a_job_that_stopped_early_stays_so_until_it_may_wait_longer(base, tmp_path):
    """Resumed as it was, nothing is trained; with more patience it goes on."""
    jobs = two_jobs(base, **STOPPING)
    train(jobs, tmp_path / "run")
    stopped = status(tmp_path / "run", "a")["step"]
    train(jobs, tmp_path / "run", resume=True)
    unchanged = status(tmp_path / "run", "a")["step"]
    patient = two_jobs(base, **{**STOPPING, "early_stopping_patience": 9})
    train(patient, tmp_path / "run", resume=True)

    assert unchanged == stopped
    assert status(tmp_path / "run", "a")["step"] == 5


def test_training_loss_stops_a_job_that_has_no_data_to_evaluate(base, tmp_path):
    """metric_for_best_model: train_loss compares the means of losses between evaluations."""
    job = make_job(
        base, "a", max_steps=9, eval_steps=2, metric_for_best_model="train_loss",
        early_stopping_patience=1, early_stopping_threshold=100.0,
    )  # fmt: skip
    train([job], tmp_path / "run")

    losses = losses_of(tmp_path / "run", [job])["a"]
    told = evaluations_of(tmp_path / "run", [job])["a"]
    assert [row["train_loss"] for row in told] == [sum(losses[:2]) / 2, sum(losses[2:4]) / 2]
    assert status(tmp_path / "run", "a")["step"] == 4
    assert status(tmp_path / "run", "a")["reason"] == (
        "stopped early: for 1 evaluation train_loss was not better by more than 100; "
        f"the best is {told[1]['train_loss']:.6g} at step 4"
    )


METRICS = """
def of(prediction):
    labels, tokens = prediction.label_ids[:, 1:], prediction.predictions[:, :-1]
    counted = labels != -100
    return {"right": (labels == tokens)[counted].mean(), "eval_targets": counted.sum()}

def bad(prediction):
    raise RuntimeError("no such thing")

def bare(prediction):
    return {}
"""


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.py"
    path.write_text(METRICS)
    return path


def test_a_function_of_the_user_measures_what_we_measure(base, tmp_path, metrics):
    """It gets tokens and labels as transformers' Trainer hands them on."""
    jobs = two_jobs(base, **EVALUATED, compute_metrics=f"{metrics}:of")
    trainer = train(jobs, tmp_path / "run")

    last = evaluations_of(tmp_path / "run", jobs)["a"][-1]
    evaluation = trainer.runs[0].data.evaluation
    assert last["eval_right"] == pytest.approx(last["eval_mean_token_accuracy"])
    assert last["eval_targets"] == sum(
        label != -100 for sample in evaluation for label in sample.labels[1:]
    )


class Listen(TrainerCallback):
    """Keeps what it hears."""

    def __init__(self):
        self.heard, self.reports = [], []

    def warned(self, text):
        self.heard.append(text)

    def evaluated(self, report):
        self.reports.append(report)


def test_a_function_that_fails_costs_its_metrics_and_not_the_run(base, tmp_path, metrics):
    """It is told at each evaluation."""
    listen = Listen()
    jobs = two_jobs(base, **EVALUATED, compute_metrics=f"{metrics}:bad")
    runs = train(jobs, tmp_path / "run", callback=listen).runs

    assert [run.status for run in runs] == ["done", "done"]
    assert len(listen.reports) == 3
    line = METRICS.splitlines().index('    raise RuntimeError("no such thing")') + 1
    told = f"RuntimeError: no such thing ({metrics.name}:{line})"
    assert sum(told in text for text in listen.heard) == 3


def test_a_metric_that_nobody_measures_ends_its_job_alone(base, tmp_path, metrics):
    """The job fails at its first evaluation and says what there is; its neighbour is done."""
    choice = {"metric_for_best_model": "f1", "load_best_model_at_end": True}
    jobs = two_jobs(base, **EVALUATED, **choice, compute_metrics=f"{metrics}:bare")
    first, second = train(jobs, tmp_path / "run").runs

    assert (first.status, first.step, second.status) == ("failed", 2, "done")
    assert "eval_f1" in first.reason
    assert "eval_exact_match" in first.reason


@pytest.mark.parametrize("name", ["no.such.module:of", "{}:missing", "{}x.py:of"])
def test_a_function_that_is_not_there_is_refused_before_training(base, metrics, name):
    """With the job and the reason."""
    job = make_job(base, "a", **EVALUATED, compute_metrics=name.format(metrics))

    with pytest.raises(MetricFunctionError, match="cannot be imported"):
        load_all_data([job])


def test_held_out_samples_are_not_trained(base):
    """Both parts together are the samples, in their order; the part is rounded up."""
    job = make_job(base, "a", eval_split=0.25)
    samples = table_of(draw_samples("some", 9, 11))
    trained_on, evaluated = held_out(samples, job)

    assert (len(trained_on), len(evaluated)) == (8, math.ceil(0.25 * 11))
    merged = {sample.input_ids for sample in (*trained_on, *evaluated)}
    assert merged == {sample.input_ids for sample in samples}
    assert [s for s in samples if s in list(trained_on)] == list(trained_on)


def test_nothing_left_to_train_on_is_refused(base):
    """One sample cannot be divided."""
    with pytest.raises(EmptyDataError, match="leaves none to train on"):
        held_out(table_of(draw_samples("some", 9, 1)), make_job(base, "a", eval_split=0.5))
