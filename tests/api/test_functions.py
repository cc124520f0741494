"""Optimizers, schedulers, metrics and callbacks of a user's own are part of a job."""

from __future__ import annotations

import functools
import json
import signal

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from tests.api import functions
from tests.api.bases import LORA, ROWS, SHORT, adapter, assert_same, from_file, loaded, save_base
from tlora_fx import Job, TrainerCallback, train
from tlora_fx.config.functions import UserFunction, function_of
from tlora_fx.config.job_optimizer import optimizer_class
from tlora_fx.errors import JobError, OptimizerError, ResumeMismatch


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


def trained(folder, base, **arguments):
    job = Job("a", **{"base": loaded(base), "lora": LORA, "data": ROWS} | SHORT | arguments)
    return train([job], output=folder / "run", device="cpu", verbose=False)


SAME = {
    "a class that has a name": (
        {"optim": torch.optim.SGD, "optim_args": {"momentum": 0.9}},
        {"optim": "sgd", "optim_args": {"momentum": 0.9}},
    ),
    "a factory": (
        {"optim": functions.momentum, "optim_args": {"momentum": 0.9}},
        {"optim": "sgd", "optim_args": {"momentum": 0.9}},
    ),
    "a partial": (
        {"optim": functools.partial(torch.optim.SGD, momentum=0.9)},
        {"optim": "sgd", "optim_args": {"momentum": 0.9}},
    ),
    "a factory with LoRA+": (
        {"optim": functions.momentum, "loraplus_lr_ratio": 4.0},
        {"optim": "sgd", "loraplus_lr_ratio": 4.0},
    ),
    "a scheduler": (
        {"lr_scheduler": functions.linear, "warmup_steps": 2},
        {"warmup_steps": 2},
    ),
    "transformers' scheduler": (
        {"lr_scheduler": transformers.get_cosine_schedule_with_warmup, "warmup_steps": 1},
        {"lr_scheduler_type": "cosine", "warmup_steps": 1},
    ),
    "a class of torch's schedulers": (
        {
            "lr_scheduler": torch.optim.lr_scheduler.ConstantLR,
            "lr_scheduler_kwargs": {"factor": 1.0},
        },
        {"lr_scheduler_type": "constant"},
    ),
    "a scheduler by its name": ({"lr_scheduler": "cosine"}, {"lr_scheduler_type": "cosine"}),
}


@pytest.mark.parametrize("case", SAME)
def test_a_function_trains_as_what_job_files_have(case, base, tmp_path):
    """Losses and adapters are bitwise those of the same optimizer and schedule by name."""
    given, named = SAME[case]

    assert_same(trained(tmp_path, base, **given), from_file(tmp_path, base, **named))


def test_an_optimizer_of_ones_own_equals_peft_and_torch(base, tmp_path):
    """A class that replaces its parameters, with a scheduler, in float64 against plain PEFT."""
    found = trained(
        tmp_path, base, lora=LoraConfig(**LORA), optim=functions.SignDescent,
        optim_args={"decay": 0.5}, lr_scheduler=functions.halving, shuffle=False,
        per_device_train_batch_size=5, max_steps=5, max_grad_norm=None,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = get_peft_model(loaded(base), LoraConfig(**LORA, task_type="CAUSAL_LM"))
    start = _first_adapter(base, tmp_path)
    _load(model, start)
    trained_here = [param for param in model.parameters() if param.requires_grad]
    optimizer = functions.SignDescent(trained_here, lr=1e-2, decay=0.5)
    schedule = functions.halving(optimizer)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        rows = [_encoded(tokenizer, row) for row in ROWS[5 * step : 5 * step + 5]]
        targets = sum(label != -100 for _, labels in rows for label in labels)
        total = 0.0
        for ids, labels in rows:
            out = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(out, torch.tensor(labels[1:]), reduction="sum")
            (loss / targets).backward()
            total += loss.item() / targets
        losses.append(total)
        optimizer.step()
        schedule.step()

    assert found["a"].losses == pytest.approx(losses, abs=1e-9)
    expected, got = get_peft_model_state_dict(model), adapter(found)
    assert max(float((expected[n] - got[n]).abs().max()) for n in expected) <= 1e-7


def _first_adapter(base, folder):
    """The adapter that a job starts from: what no step has changed."""
    job = Job("a", base=loaded(base), lora=LORA, data=ROWS, max_steps=1, learning_rate=0.0)
    return adapter(train(job, output=folder / "start", device="cpu", verbose=False))


def _load(model, tensors):
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, tensors)


def _encoded(tokenizer, row):
    """Ids and labels of a row: the completion and the end are trained."""
    prompt = tokenizer(row["prompt"]).input_ids
    ids = [*tokenizer(row["prompt"] + row["completion"]).input_ids, tokenizer.eos_token_id]
    return ids, [-100] * len(prompt) + ids[len(prompt) :]


def test_own_functions_resume_bitwise(base, tmp_path):
    """State in tensors and in groups, and a scheduler that knows only the rate before."""
    own = {"optim": functions.SignDescent, "lr_scheduler": functions.halving}
    whole = trained(tmp_path / "whole", base, **own)

    class Stops(TrainerCallback):
        def stepped(self, report):
            if report.step == 2:
                signal.raise_signal(signal.SIGINT)

    job = Job("a", base=loaded(base), lora=LORA, data=ROWS, **SHORT, **own)
    run = {"output": tmp_path / "run", "device": "cpu", "verbose": False}
    with pytest.raises(KeyboardInterrupt):
        train(job, **run, callbacks=[Stops()])

    assert_same(train(job, **run, resume=True), whole)


def stopped(folder, job):
    """A run that was stopped after its first step."""

    class Stops(TrainerCallback):
        def stepped(self, report):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(job, output=folder, device="cpu", verbose=False, callbacks=[Stops()])


@pytest.mark.parametrize("field", ["optim", "lr_scheduler", "compute_metrics"])
def test_resume_refuses_another_source(field, base, tmp_path):
    """A function of the same name that reads otherwise is another one, unless it is accepted."""
    names = {
        "optim": "SignDescent", "lr_scheduler": "halving", "compute_metrics": "accuracy",
    }  # fmt: skip
    known = function_of(getattr(functions, names[field]))
    changed = UserFunction(known.name, "0" * 12, known.call)
    evaluated = {"eval_split": 0.2, "eval_steps": 4}

    def job(function):
        given = {"base": loaded(base), "lora": LORA, "data": ROWS, **SHORT, **evaluated}
        return Job("a", **given, **{field: function})

    stopped(tmp_path / "run", job(known.call))
    run = {"output": tmp_path / "run", "device": "cpu", "verbose": False, "resume": True}
    with pytest.raises(ResumeMismatch) as caught:
        train(job(changed), **run)

    assert f"{known} " in str(caught.value) or f"{known}," in str(caught.value)
    assert "accept_changes=True" in str(caught.value)
    assert train(job(changed), **run, accept_changes=True)["a"].status == "done"


def test_a_checkpoint_names_functions(base, tmp_path):
    """job.json holds the qualified name and the hash of the source."""
    found = trained(tmp_path, base, optim=functions.SignDescent)
    written = json.loads((found["a"].adapter / "job.json").read_text())

    assert written["optim"] == str(function_of(functions.SignDescent))
    assert written["optim"].startswith("python:tests.api.functions:SignDescent#")
    again = Job.model_validate(written)
    with pytest.raises(JobError, match="not at hand"):
        optimizer_class(again)


def test_a_hash_tells_sources_and_arguments_apart():
    """Functions, partials and classes; what nobody changed keeps its hash."""
    made = [
        functions.halving, functions.linear, functions.SignDescent,
        functools.partial(functions.halving, a=1), functools.partial(functions.halving, a=2),
    ]  # fmt: skip
    known = [function_of(each) for each in made]

    assert len({(each.name, each.digest) for each in known}) == len(made)
    assert known == [function_of(each) for each in made]
    assert known[3] == function_of(functools.partial(functions.halving, a=1))


def test_a_function_without_a_file_has_a_hash():
    """What a console defines is known by what it is compiled to."""
    names = {}
    exec("def f(x):\n    return x + 1", names)
    one = function_of(names["f"])
    exec("def f(x):\n    return x + 2", names)

    assert one.digest != function_of(names["f"]).digest


def test_metrics_of_a_function_are_measured(base, tmp_path):
    """Its value is the token accuracy, which is also measured."""
    found = trained(
        tmp_path, base, compute_metrics=functions.accuracy, eval_split=0.2, eval_steps=2,
        metric_for_best_model="mine", greater_is_better=True,
    )  # fmt: skip

    evaluations = found["a"].evaluations
    assert [e["eval_mine"] for e in evaluations] == [
        e["eval_mean_token_accuracy"] for e in evaluations
    ]
    assert found["a"].metric == "eval_mine"


class Notes(TrainerCallback):
    """Notes what it hears."""

    def __init__(self):
        self.heard = []

    def started(self, runs):
        self.heard += [("started", run.job.name) for run in runs]

    def stepped(self, report):
        self.heard.append(("stepped", report.job))

    def ended(self, run):
        self.heard.append(("ended", run.job.name))


def test_callbacks_of_a_job_hear_of_it_alone(base, tmp_path):
    """Those of the run hear of all; one that raises costs a warning."""
    own, every = Notes(), Notes()

    class Fails(TrainerCallback):
        def stepped(self, report):
            raise ValueError("no")

    model = loaded(base)
    shared = {"base": model, "lora": LORA, "data": ROWS, "max_steps": 2}
    jobs = [Job("a", **shared, callbacks=[own, Fails()]), Job("b", **shared)]
    found = train(jobs, output=tmp_path, device="cpu", verbose=False, callbacks=[every])

    told = ["started", "stepped", "stepped", "ended"]
    assert own.heard == [(event, "a") for event in told]
    assert sorted(every.heard) == sorted((event, name) for event in told for name in "ab")
    assert any("Fails failed in stepped" in text for text in found.warnings)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optim": functions.momentum, "optim_args": {"lr": 1}}, "Job(optim_args=...): 'lr' does"),
        ({"optim": functions.momentum, "weight_decay": 0.1}, "Job(weight_decay=...): 'weight_dec"),
        ({"optim": "adamww"}, "did you mean 'adamw'?"),
        ({"optim": torch.optim.SGD, "optim_args": {"decay": 1}}, "unknown argument 'decay'"),
        ({"callbacks": [transformers.TrainerCallback()]}, "Job(callbacks=...): a callback is no"),
        ({"callbacks": [Notes]}, "Job(callbacks=...): a callback is no object"),
        ({"compute_metrics": functions.accuracy}, "'compute_metrics' needs 'eval_data'"),
        ({"lr_scheduler": "cosinus"}, "did you mean 'cosine'?"),
    ],
)
def test_a_mistake_is_told_by_its_argument(arguments, said):
    """Before anything is trained."""
    with pytest.raises(JobError) as caught:
        Job("a", base="m", lora=4, data="x.jsonl", **arguments)

    assert said in str(caught.value)


def closure_only(params, lr):
    return torch.optim.LBFGS(params, lr=lr)


def none_at_all(params, lr):
    return None


def other_parameters(params, lr):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def cycles(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)


def raises(optimizer):
    raise OSError("no disk")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optim": closure_only}, "closure"),
        ({"optim": none_at_all}, "no torch.optim.Optimizer"),
        ({"optim": other_parameters}, "does not hold the parameters"),
        ({"lr_scheduler": cycles}, "cycle_momentum=False"),
        ({"lr_scheduler": raises}, "no disk"),
        ({"lr_scheduler": none_at_all, "lr_scheduler_kwargs": {"lr": 1}}, "no scheduler"),
        ({"optim": functions.momentum, "optim_args": {"momentun": 1}}, "momentun"),
    ],
)
def test_what_cannot_train_is_refused_before_training(arguments, said, base, tmp_path):
    """The factory's own words are told."""
    with pytest.raises(OptimizerError, match=said):
        trained(tmp_path, base, **arguments)
