"""Jobs whose rows say what their losses read: losses with a name, and functions."""

from __future__ import annotations

import json
import math
import random
import signal

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from tests.api import functions
from tests.api.bases import LORA, ROWS, SHORT, adapter, assert_same, loaded, save_base
from tests.runtime.test_step_losses import alone_loss
from tlora_fx import Job, OpenSlots, Trainer, TrainerCallback, load_job_file, train
from tlora_fx.compiler import compile
from tlora_fx.config.functions import UserFunction, function_of
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import (
    JobError,
    LossFunctionError,
    MalformedRowError,
    MissingColumnError,
    PlanNotRunnable,
    ResumeMismatch,
)
from tlora_fx.ops.kernels.select import strict
from tlora_fx.parallel.apply import require_whole_pairs
from tlora_fx.runtime.checks import load_all_data, try_functions
from tlora_fx.runtime.group_step import Batch, GroupStep
from tlora_fx.runtime.verification.verify import bounds_of, verify

NAMED = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
FIELDS = ("weights", "logprobs", "advantages")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


def rollouts(key, count=12):
    """Rows of token ids with numbers of each token, and one of the row; some are padded."""
    draw = random.Random(key)
    rows = []
    for number in range(count):
        ids = [draw.randrange(5, 60) for _ in range(draw.randint(4, 9))]
        prompt = draw.randint(1, len(ids) - 2)
        row = {
            "input_ids": ids,
            "labels": [-100] * prompt + ids[prompt:],
            "logprobs": [-draw.uniform(3.5, 4.5) for _ in ids],
            "advantages": [draw.uniform(-1, 1) for _ in ids],
            "reward": draw.uniform(-1, 1),
            "scale": [draw.uniform(0, 2) for _ in ids],
        }
        if number % 3 == 0:
            row["weights"] = draw.uniform(0.2, 2)
        if number % 4 == 0:
            row = {
                name: [*value, 1] if isinstance(value, list) else value
                for name, value in row.items()
            } | {"attention_mask": [1] * len(ids) + [0]}
        rows.append(row)
    return rows


def job_of(base, name, loss, **fields):
    settled = {
        "lora": LORA, "data": rollouts(name), "shuffle": False, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_grad_norm": None, "seed": len(name),
    }  # fmt: skip
    return Job(name, base=base, loss=loss, **settled | SHORT | fields)


def numbers_of(row):
    """What a row says of each target, by name, and where the targets stand."""
    count = sum(row.get("attention_mask", [1] * len(row["input_ids"])))
    places = [at for at in range(1, count) if row["labels"][at] != -100]
    names = [*FIELDS, "reward", "scale"]
    listed = {
        name: value if isinstance(value, list) else [value] * count
        for name, value in ({"weights": 1.0} | row).items()
        if name in names
    }
    said = {
        name: torch.tensor([value[at] for at in places], dtype=torch.float64)
        for name, value in listed.items()
    }
    return row["input_ids"][:count], places, said


def micro_loss(model, job, rows):
    """The sum of the losses of a micro-batch by plain PEFT, and how many targets it has."""
    logprobs, said, count = [], [], 0
    for row in rows:
        ids, places, numbers = numbers_of(row)
        logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        logprobs.append(torch.stack([logits[at - 1, ids[at]] for at in places]))
        said.append(numbers)
        count += len(places)
    if isinstance(job.loss, UserFunction):
        return job.loss.call(logprobs, said)[0], count
    if job.loss is None:
        return -torch.cat(logprobs).sum(), count
    pairs = zip(logprobs, said, strict=True)
    return sum(alone_loss(job.loss, job.loss_options, *pair) for pair in pairs), count


def by_peft(folder, job, start, rows, steps):
    """Losses, adapter and model after steps of plain PEFT with torch's AdamW in float64."""
    model = get_peft_model(loaded(folder), LoraConfig(**LORA, task_type="CAUSAL_LM"))
    set_peft_model_state_dict(model, {name: each.clone() for name, each in start.items()})
    own = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=job.learning_rate, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / job.max_steps)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        taken = [rows[(4 * step + at) % len(rows)] for at in range(4)]
        parts = [micro_loss(model, job, taken[at : at + 2]) for at in (0, 2)]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        decay.step()
    return losses, model


def assert_equal_to_peft(folder, results, jobs, start, rows_of):
    for job in jobs:
        losses, model = by_peft(folder, job, start[job.name], rows_of[job.name], job.max_steps)
        assert results[job.name].losses == pytest.approx(losses, rel=1e-9, abs=1e-9)
        expected, found = get_peft_model_state_dict(model), adapter(results, job.name)
        assert expected.keys() == found.keys()
        for name, each in expected.items():
            torch.testing.assert_close(found[name], each.to(found[name]), rtol=0, atol=1e-7)


def trained(folder, jobs, **options):
    return train(jobs, output=folder, device="cpu", verbose=False, **options)


def first_adapters(folder, jobs):
    """What no step has changed."""
    still = [job.model_copy(update={"max_steps": 1, "learning_rate": 0.0}) for job in jobs]
    results = trained(folder, still)
    return {job.name: adapter(results, job.name) for job in jobs}


def test_each_loss_equals_plain_peft_alone_and_among_others(base, tmp_path):
    """Losses by name, one with options, a function and cross entropy, all in the same rows."""
    model = loaded(base)
    jobs = [job_of(model, name, name) for name in NAMED]
    tight = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
    jobs.append(job_of(model, "tight", "ppo", loss_options=tight))
    jobs.append(job_of(model, "own", functions.rewarded))
    plain = [{n: r[n] for n in ("input_ids", "labels")} for r in rollouts("plain")]
    jobs.append(job_of(model, "plain", None, data=plain))
    rows_of = {job.name: job.data.rows for job in jobs}
    start = first_adapters(tmp_path / "start", jobs)

    together = trained(tmp_path / "run", jobs)

    assert_equal_to_peft(base, together, jobs, start, rows_of)
    for job in (jobs[1], jobs[4], jobs[6]):
        alone = trained(tmp_path / job.name, [job])
        assert_equal_to_peft(base, alone, [job], start, rows_of)


def test_a_function_gets_numbers_of_rows_that_are_texts(base, tmp_path):
    """A number stands beside each token of the completion; the step's line has its metrics."""
    seen = []

    def loss(logprobs, inputs):
        seen.append([{name: of.tolist() for name, of in own.items()} for own in inputs])
        return -torch.cat(logprobs).sum(), {"first": logprobs[0][0], "bad": math.nan}

    rows = [
        row | {"reward": at, "note": "x", "is_good": at % 2 == 0} for at, row in enumerate(ROWS)
    ]
    shared = {"base": loaded(base), "lora": LORA, "shuffle": False, **SHORT}
    results = trained(tmp_path / "run", [Job("a", data=rows, loss=loss, **shared)])
    plain = trained(tmp_path / "plain", [Job("a", data=ROWS, **shared)])

    first = seen[1]  # The one before was a trial.
    assert [own["reward"][0] for own in first] == [float(at) for at in range(8)]
    assert [own["is_good"][0] for own in first] == [1.0, 0.0] * 4
    assert all(set(own) == {"weights", "reward", "is_good"} for own in first)
    assert results["a"].losses == pytest.approx(plain["a"].losses, abs=1e-12)
    lines = (tmp_path / "run" / "a" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    assert [own["bad"] for own in metrics] == [None] * 4
    assert all(own["first"] < 0 for own in metrics)


def test_metrics_are_means_over_micro_batches(base, tmp_path):
    """Two of a step, of two sequences each."""
    heard = []

    class Hears(TrainerCallback):
        def stepped(self, report):
            heard.append(report.metrics)

    job = job_of(loaded(base), "own", functions.rewarded)
    trained(tmp_path, [job], callbacks=[Hears()])

    rewards = [row["reward"] for row in job.data.rows]
    assert [own["sequences"] for own in heard] == [2.0] * 4
    expected = [sum(rewards[4 * at : 4 * at + 4]) / 4 for at in (0, 1, 2, 0)]
    assert [own["reward"] for own in heard] == pytest.approx(expected)


@pytest.mark.parametrize("loss", ["ppo", "gspo", functions.rewarded])
def test_an_evaluation_measures_the_jobs_loss(loss, base, tmp_path):
    """By the rows' own numbers, of the adapter after the last step, per target token."""
    rows = rollouts("evaluated", 5)
    job = job_of(
        loaded(base), "a", loss, eval_data=rows, eval_steps=4, per_device_eval_batch_size=2
    )
    start = first_adapters(tmp_path / "start", [job_of(job.base, "a", loss)])
    results = trained(tmp_path / "run", [job])
    _, model = by_peft(base, job, start["a"], job.data.rows, 4)

    with torch.no_grad():
        parts = [micro_loss(model, job, rows[at : at + 2]) for at in (0, 2, 4)]
    expected = float(sum(part for part, _ in parts)) / sum(count for _, count in parts)
    assert results["a"].evaluations[-1]["eval_loss"] == pytest.approx(expected, abs=1e-7)


def test_losses_resume_bitwise_in_strict_mode(base, tmp_path):
    """A function and a loss with a name, stopped in the middle."""
    jobs = [job_of(loaded(base), "a", functions.rewarded), job_of(loaded(base), "b", "gspo")]
    jobs[1] = jobs[1].model_copy(update={"base": jobs[0].base})

    class Stops(TrainerCallback):
        def stepped(self, report):
            if report.step == 2:
                signal.raise_signal(signal.SIGINT)

    with strict():
        whole = trained(tmp_path / "whole", jobs)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "run", jobs, callbacks=[Stops()])
        again = trained(tmp_path / "run", jobs, resume=True)

    assert_same(again, whole)
    first, second = adapter(again, "b"), adapter(whole, "b")
    assert again["b"].losses == whole["b"].losses
    assert all(torch.equal(first[name], second[name]) for name in first)


def stopped(folder, job):
    class Stops(TrainerCallback):
        def stepped(self, report):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trained(folder, [job], callbacks=[Stops()])


def test_resume_refuses_another_loss_and_other_numbers(base, tmp_path):
    """Another source, a loss with a name, none, and an advantage that has changed."""
    model = loaded(base)
    known = function_of(functions.rewarded)
    stopped(tmp_path / "own", job_of(model, "a", functions.rewarded))
    stopped(tmp_path / "ppo", job_of(model, "a", "ppo"))
    moved = rollouts("a")
    moved[0]["advantages"][3] += 0.5
    tokens = [{name: row[name] for name in ("input_ids", "labels")} for row in rollouts("a")]

    for folder, job, said in (
        ("own", job_of(model, "a", UserFunction(known.name, "0" * 12, known.call)), f"{known},"),
        ("own", job_of(model, "a", "ppo"), f"loss was {known}, is ppo"),
        ("ppo", job_of(model, "a", None, data=tokens), "loss was ppo, is unset"),
        ("ppo", job_of(model, "a", "ppo", data=moved), "other samples"),
        (
            "ppo",
            job_of(model, "a", "ppo", loss_options={"clip_low_threshold": 0.5}),
            "loss_options.clip_low_threshold was unset, is 0.5",
        ),
    ):
        with pytest.raises(ResumeMismatch) as caught:
            trained(tmp_path / folder, [job], resume=True)
        assert said in str(caught.value)
    changed = job_of(model, "a", UserFunction(known.name, "0" * 12, known.call))
    again = trained(tmp_path / "own", [changed], resume=True, accept_changes=True)
    assert again["a"].status == "done"


def test_a_job_read_from_a_file_has_no_function(base, tmp_path):
    """job.json names it; the job is refused before training."""
    results = trained(tmp_path / "run", [job_of(loaded(base), "a", functions.rewarded)])
    written = json.loads((results["a"].adapter / "job.json").read_text())
    assert written["loss"] == str(function_of(functions.rewarded))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts("a")))
    entry = {"name": "a", "lora": LORA, "data": {"path": "rows.jsonl"}, "loss": written["loss"]}
    file = {"base": {"model": str(base), "dtype": "float64"}, "jobs": [entry | SHORT]}
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(file))

    with pytest.raises(JobError, match="not at hand"):
        trained(tmp_path / "again", str(tmp_path / "jobs.yaml"))


def test_a_job_file_names_a_loss_and_maps_its_columns(base, tmp_path):
    """The same rows under other names, from a file, train as those of Python, bit for bit."""
    named = {"advantages": "gain", "logprobs": "old"}
    rows = rollouts("a")
    renamed = [{named.get(name, name): value for name, value in row.items()} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in renamed))
    entry = job_of(loaded(base), "a", "cispo").model_dump(
        mode="json", include={"loss", "seed", "shuffle", "gradient_accumulation_steps"}
    )
    entry |= {
        "name": "a", "lora": LORA, "data": {"path": "rows.jsonl", "columns": named},
        "per_device_train_batch_size": 2, "max_grad_norm": None,
    }  # fmt: skip
    file = {"base": {"model": str(base), "dtype": "float64"}, "jobs": [entry | SHORT]}
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(file))
    assert load_job_file(tmp_path / "jobs.yaml").jobs[0].loss == "cispo"

    by_file = trained(tmp_path / "file", str(tmp_path / "jobs.yaml"))

    assert_same(by_file, trained(tmp_path / "run", [job_of(loaded(base), "a", "cispo")]))


BAD = [
    ({"advantages": [0.5]}, "'advantages' has 1 numbers, and input_ids"),
    ({"advantages": None}, "no value in the column 'advantages', which the loss reads"),
    ({"advantages": math.nan}, "'advantages' is nan, which is no finite number"),
    ({"logprobs": "often"}, "'logprobs' holds text that is no number: 'often'"),
    ({"logprobs": {"a": 1}}, "'logprobs' is no number and no list of numbers: {'a': 1}"),
]
# A function reads columns as it likes.
BAD_OF_NAMES = [({"logprobs": 0.25}, "'logprobs' is 0.25, and a log-probability is at most 0")]


@pytest.mark.parametrize(
    ("loss", "change", "said"),
    [
        *(("ppo", *each) for each in BAD + BAD_OF_NAMES),
        *((functions.rewarded, *each) for each in BAD),
    ],
)
def test_a_bad_row_is_named_before_training(loss, change, said, base, tmp_path):
    """By its number, with what is wrong with it."""
    rows = rollouts("a", 3)
    rows[1] |= change

    with pytest.raises(MalformedRowError) as caught:
        trained(tmp_path / "run", [job_of(loaded(base), "a", loss, data=rows)])

    assert said in str(caught.value)
    assert "<list>: row 2" in str(caught.value)


NO_NUMBERS = {
    "longer than a float": 10**400,
    "longer than Python writes": 10**5000,
    "the same in a list": [10**400, 1, 1],
    "text that JSON cannot read": "[" * 100_000,
    "text in text": '""',
    "bytes": b"abc",
}


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_is_no_number_is_no_column_of_numbers(value, base):
    """A function trains without it, and a loss with a name tells the row."""
    rows = [
        {"input_ids": [5, 6, 7], "scale": 1.0, "logprobs": -1.0, "advantages": 1.0, "note": value}
    ] * 4
    fields = load_all_data([job_of(base, "a", summed, data=rows)])["a"].samples[0].numbers
    mapped = {"rows": rows, "columns": {"advantages": "note"}}

    assert "scale" in fields
    assert "note" not in fields
    with pytest.raises(MalformedRowError, match="'note' "):
        load_all_data([job_of(base, "a", "ppo", data=mapped)])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, 2.0, "often", 4.0], "row 3.*'scale' holds text that is no number: 'often'"),
        ([1.0, "a", "b", "c"], "row 2.*'scale' holds text that is no number: 'a'"),
        # Of text files with columns, all values are text.
        (["1.0", "2", "1.o", "4"], "row 3.*'scale' holds text that is no number: '1.o'"),
        ([1.0, None, 3.0, [2.0]], "row 2.*no value in the column 'scale'"),
        (["a", "b", "3", None], None),
        (["a", "b", "c", "d"], None),
        # A list of nothing says nothing of what others hold.
        ([[], ["a"], [], ["b", "c"]], None),
        ([[], [], [], []], None),
        ([[], [1.0, 2.0, 3.0], 1.0, 2.0], "row 1.*'scale' has 0 numbers, and input_ids 3"),
    ],
)
def test_a_row_without_a_number_in_a_column_of_numbers_is_named(values, said, base):
    """Its column is not left out for the whole data; a column of other texts is."""
    rows = [{"input_ids": [5, 6, 7]} | {"scale": value} for value in values]
    job = job_of(base, "a", summed, data=rows)
    if said is None:
        assert "scale" not in load_all_data([job])["a"].samples[0].numbers
        return
    with pytest.raises(MalformedRowError, match=f"(?s){said}"):
        load_all_data([job])
    ignored = {"rows": rows, "columns": {"scale": None}}
    assert load_all_data([job_of(base, "a", summed, data=ignored)])["a"].samples[0].numbers == {}


@pytest.mark.parametrize(
    "value",
    [np.float32(0.5), np.float64(0.5), [np.float32(0.5)] * 3, np.full(3, 0.5, np.float16),
     torch.tensor(0.5)],
)  # fmt: skip
def test_numbers_of_numpy_and_torch_are_numbers(value, base):
    """Alone, and among those of Python."""
    rows = [{"input_ids": [5, 6, 7], "scale": each} for each in (value, value, 0.5, value)]
    samples = load_all_data([job_of(base, "a", summed, data=rows)])["a"].samples

    assert [sample.numbers for sample in samples] == [{"scale": (0.5, 0.5, 0.5)}] * 4


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_log_probability_above_zero_is_named(loss, base):
    """With its row and place; rounding passes, and what stands beside tokens that nobody trains."""
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8], "advantages": 1.0,
         "logprobs": [9.0, -1.0, 1e-6, 0]}
        for _ in range(4)
    ]  # fmt: skip
    load_all_data([job_of(base, "a", loss, data=rows)])
    rows[2]["logprobs"][2] = 0.5

    with pytest.raises(
        MalformedRowError, match=r"row 3(?s:.*)'logprobs'\[2\] is 0.5, and a log-prob"
    ):
        load_all_data([job_of(base, "a", loss, data=rows)])


def test_an_infinite_number_of_a_token_is_named(base, tmp_path):
    """With its place."""
    rows = rollouts("a", 3)
    rows[2]["advantages"][1] = math.inf

    with pytest.raises(MalformedRowError, match=r"'advantages'\[1\] is inf"):
        trained(tmp_path / "run", [job_of(loaded(base), "a", "dro", data=rows)])


@pytest.mark.parametrize(
    ("rows", "fields", "said"),
    [
        (ROWS, {}, "no column 'logprobs' and no column 'advantages', which the loss 'ppo' reads"),
        ([r | {"logprobs": -1, "advantages": 1} for r in ROWS], {}, "and the rows are texts"),
        ([{"input_ids": [1, 2, 3], "logprobs": -1.0}], {}, "no column 'advantages'"),
    ],
)
def test_rows_that_a_loss_cannot_read_are_refused(rows, fields, said, base, tmp_path):
    """Before training, with the columns that it reads."""
    with pytest.raises(MissingColumnError) as caught:
        trained(tmp_path / "run", [job_of(loaded(base), "a", "ppo", data=rows, **fields)])

    assert said in str(caught.value)


def test_a_mapped_column_that_no_loss_reads_is_refused(base, tmp_path):
    """Cross entropy reads no advantages."""
    data = {"rows": rollouts("a"), "columns": {"advantages": "reward"}}

    with pytest.raises(MissingColumnError, match="'columns' maps 'advantages'"):
        trained(tmp_path / "run", [job_of(loaded(base), "a", None, data=data)])


def test_a_mapped_column_stands_in_for_one_of_that_name(base):
    """Also where the data has both, and the loss is a function."""
    rows, data = rollouts("a"), {"rows": rollouts("a"), "columns": {"advantages": "reward"}}

    samples = load_all_data([job_of(base, "a", summed, data=data)])["a"].samples

    assert set(samples[1].advantages) == {rows[1]["reward"]}
    assert "reward" not in samples[1].inputs


def fails(logprobs, inputs):
    return inputs[0]["rewards"].sum()


def detached(logprobs, inputs):
    return torch.cat(logprobs).sum().detach()


def several(logprobs, inputs):
    return torch.cat(logprobs)


def constant(logprobs, inputs):
    return torch.ones((), requires_grad=True)


def three(logprobs, inputs):
    return torch.cat(logprobs).sum(), {}, 1


def listed(logprobs, inputs):
    return torch.cat(logprobs).sum(), [1]


def worded(logprobs, inputs):
    return torch.cat(logprobs).sum(), {"seen": 1, "kind": "long"}


def vector(logprobs, inputs):
    return torch.cat(logprobs).sum(), {"seen": torch.ones(3)}


def rooted(logprobs, inputs):
    return torch.cat(logprobs).sqrt().sum()


def steep(logprobs, inputs):
    """Its gradient is infinite where its value is not."""
    own = torch.cat(logprobs)
    return own.sum() + (own - own.detach()).sqrt().sum()


def divided(logprobs, inputs):
    return torch.cat(logprobs).sum() / 0.0


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (rooted, "the loss is nan"),
        (divided, "the loss is -inf"),
        (steep, "the loss is a finite number, and its gradient is inf at the first target token"),
        (fails, "KeyError: 'rewards'"),
        (fails, '  return inputs[0]["rewards"].sum()\n'),
        (detached, "the loss does not depend on the log-probabilities"),
        (constant, "the loss does not depend on the log-probabilities"),
        (several, "found a tensor of shape ["),
        (three, "found a tuple of 3"),
        (listed, "found list in place of the dict"),
        (worded, "found 'kind' is 'long'"),
        (vector, "found 'seen' is a tensor of shape [3]"),
    ],
)
def test_a_function_that_fails_is_told_before_training(loss, said, base, tmp_path):
    """What it gets is told, too."""
    with pytest.raises(LossFunctionError) as caught:
        trained(tmp_path / "run", [job_of(loaded(base), "a", loss)])

    assert said in str(caught.value)
    assert "weights, logprobs, advantages, reward, scale" in str(caught.value)


def test_a_function_that_equal_log_probabilities_alone_do_not_suit_is_trained(base, tmp_path):
    """Nobody trains on such: their deviation has no gradient, and others have one."""

    def spread(logprobs, inputs):
        return torch.cat(logprobs).std()

    results = trained(tmp_path / "run", [job_of(loaded(base), "a", spread)])
    assert results["a"].status == "done"


def test_a_function_is_tried_with_what_it_gets_in_training(base, tmp_path):
    """Tensors of its own fit those: they have the type of the base, and are on the device."""
    weights, devices = torch.ones(1, dtype=torch.float64), []

    def projected(logprobs, inputs):
        devices.append(inputs[0]["scale"].device.type)
        return -torch.dot(weights.to(devices[-1]), torch.cat(logprobs).sum().reshape(1))

    job = job_of(loaded(base), "a", projected)
    assert trained(tmp_path / "run", [job])["a"].status == "done"
    devices.clear()
    try_functions(load_all_data([job]), 64, torch.float64, torch.device("meta"))

    assert devices == ["meta"]


def test_rows_to_evaluate_without_the_columns_are_told_before_training(base, tmp_path):
    """As the training rows are."""
    job = job_of(loaded(base), "a", functions.rewarded, eval_data=rollouts("b", 3))
    rows = [{n: row[n] for n in ("input_ids", "labels")} for row in rollouts("b", 3)]
    bare = job_of(job.base, "a", functions.rewarded, eval_data=rows)

    with pytest.raises(LossFunctionError, match="KeyError") as caught:
        trained(tmp_path / "bare", [bare])
    assert caught.value.facts["rows"] == "to evaluate"
    assert trained(tmp_path / "run", [job])["a"].status == "done"


def test_data_sets_have_the_same_numbers(base, tmp_path):
    """One that lacks a column is named; it may be left out of the other."""
    without = [{n: v for n, v in row.items() if n != "reward"} for row in rollouts("b")]
    sets = [{"rows": rollouts("a")}, {"rows": without}]

    with pytest.raises(MissingColumnError, match="no column 'reward' of numbers, and another has"):
        trained(tmp_path / "run", [job_of(loaded(base), "a", summed, data=sets)])
    sets[0]["columns"] = {"reward": None}
    assert trained(tmp_path / "run", [job_of(loaded(base), "a", summed, data=sets)])["a"].steps == 4


def summed(logprobs, inputs):
    said = zip(logprobs, inputs, strict=True)
    return -sum((own * of["scale"]).sum() for own, of in said)


def test_a_function_that_fails_later_ends_its_job_alone(base, tmp_path):
    """Its neighbour trains to the end as alone."""
    model, calls = loaded(base), []

    def late(logprobs, inputs):
        calls.append(1)
        if len(calls) > 4:
            raise ZeroDivisionError("mine")
        return -torch.cat(logprobs).sum()

    jobs = [job_of(model, "a", "ppo"), job_of(model, "late", late)]
    results = trained(tmp_path / "run", jobs)

    assert results["late"].status == "failed"
    assert "ZeroDivisionError: mine" in results["late"].reason
    assert results["late"].steps == 1
    alone = trained(tmp_path / "alone", jobs[:1])
    assert results["a"].losses == pytest.approx(alone["a"].losses, abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"loss": "pop"}, "wrong value of 'loss'"),
        ({"loss": "grpo"}, "loss 'grpo' learns from what the job samples"),
        ({"loss": "dpo"}, "'dpo' is a method"),
        ({"method": "ppo"}, "'ppo' is a loss"),
        ({"method": print}, "a method is no function"),
        ({"method": "dpo", "loss": "ppo"}, "'loss' needs method sft"),
        ({"loss": "ppo", "loss_options": {"clip": 1.0}}, "the loss 'ppo' has no 'clip'"),
        ({"loss": print, "loss_options": {"beta": 1.0}}, "a function has no 'beta'"),
        ({"loss_options": {"beta": 1.0}}, "the loss 'cross_entropy' has no 'beta'"),
        ({"loss": "dro", "loss_options": {"beta": math.inf}}, "a finite number"),
        ({"loss": "ppo", "label_smoothing_factor": 0.1}, "is of cross entropy"),
    ],
)
def test_a_mistake_is_told_by_its_argument(arguments, said):
    """Before data is read."""
    with pytest.raises(JobError) as caught:
        Job("a", base="m", lora=4, data="x.jsonl", **arguments)

    assert said in str(caught.value)


def test_verify_compares_such_jobs_with_jobs_alone(base):
    """Losses and gradients, with dropout and without."""
    model = loaded(base)
    lora = {**LORA, "lora_dropout": 0.2}
    losses = [*NAMED, functions.rewarded]
    jobs = [job_of(model, f"job{at}", loss, lora=lora) for at, loss in enumerate(losses)]

    found = list(verify(jobs, 2, device="cpu"))

    assert len(found) == 2 * len(jobs)
    beyond = [row for row in found if not row.within(bounds_of("float64", "cpu"))]
    assert not beyond, "\n".join(map(str, beyond))
    assert max(row.gradient for row in found) < 1e-11


@pytest.mark.parametrize(
    ("loss", "plan", "said"),
    [
        (functions.rewarded, {"planner": "replicated", "mesh": MeshShape(dp=2)}, "one process"),
        (functions.rewarded, {"planner": "tensor", "mesh": MeshShape(tp=2)}, "rows that run whole"),
        ("ppo", {"planner": "tensor", "mesh": MeshShape(tp=2)}, "rows that run whole"),
        ("gspo", {"planner": "fsdp", "mesh": MeshShape(dp=2), "shard_base": True}, "run whole"),
        ("gspo", {"planner": "single", "nano_batches": 2}, "rows that run whole"),
    ],
)
def test_plans_that_cut_rows_are_refused(loss, plan, said, base):
    """Replicas run losses with a name, and no functions."""
    job = job_of(loaded(base), "own", loss)

    with pytest.raises(PlanNotRunnable, match=said):
        require_whole_pairs([job], Plan(**plan), cuts="nano_batches" in plan)
    require_whole_pairs([job], Plan(planner="single"), cuts=False)
    if isinstance(loss, str):
        replicas = Plan(planner="replicated", mesh=MeshShape(dp=2))
        require_whole_pairs([job], replicas, cuts=False)


def test_a_loop_of_ones_own_takes_the_jobs_loss(base):
    """A batch that names none; what it reports is that of the same loss named by the batch."""
    job = job_of(loaded(base), "a", functions.rewarded)
    micro = load_all_data([job])["a"].step(0)
    outputs = [
        GroupStep(compile([job]), device="cpu").accumulate({"a": batch})["a"]
        for batch in (micro, Batch(micro, loss=functions.rewarded))
    ]

    assert outputs[0].loss == outputs[1].loss
    assert [dict(of) for of in outputs[0].metrics] == [dict(of) for of in outputs[1].metrics]
    assert [of["sequences"] for of in outputs[0].metrics] == [2.0, 2.0]


def test_a_job_joins_a_group_that_trains(base, tmp_path, monkeypatch):
    """It learns as alone; a group whose plan cuts rows does not take it."""
    model = loaded(base)
    jobs = [job_of(model, "a", "dro"), job_of(model, "late", functions.rewarded)]
    data = load_all_data(jobs)
    group = compile(jobs[:1], open=OpenSlots(("q_proj", "v_proj"), rows=16, jobs=2, rank=8))
    trainer = Trainer(group, output=tmp_path / "run", data={"a": data["a"]}, device="cpu")
    with monkeypatch.context() as patched:
        cut = Plan(planner="tensor", mesh=MeshShape(tp=2))
        patched.setattr(trainer.group, "plan", cut)
        with pytest.raises(PlanNotRunnable, match="rows that run whole"):
            trainer.admit(jobs[1], data["late"])
    trainer.admit(jobs[1], data["late"])

    runs = {run.job.name: run for run in trainer.run()}

    assert {name: run.status for name, run in runs.items()} == {"a": "done", "late": "done"}
    for name, run in runs.items():
        alone = trained(tmp_path / name, [job for job in jobs if job.name == name])
        assert run.loss == pytest.approx(alone[name].losses[-1], abs=1e-12)
