"""What must hold between data and base."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.models import plain
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.errors import DataDoesNotFit
from tlora_fx.model.backbone import load_backbone
from tlora_fx.runtime import checks
from tlora_fx.runtime.checks import check_fits, unusual
from tlora_fx.runtime.data.samples import Sample


@pytest.mark.parametrize(("classes", "fits"), [(9, True), (8, False), (2, False), (None, True)])
def test_a_target_without_a_logit_is_refused_before_training(classes, fits):
    """A model that classifies tokens has two logits a token; torch would say: out of bounds."""
    backbone = load_backbone(BaseSpec(module=plain(), dtype="float64"))
    samples = [Sample((1, 20, 8), (-100, 2, 8))]
    data = {"one": SimpleNamespace(samples=samples, evaluation=())}

    if fits:
        check_fits(backbone, data, classes)
    else:
        with pytest.raises(DataDoesNotFit, match="no logits"):
            check_fits(backbone, data, classes)


def test_samples_that_are_too_long_are_all_told(monkeypatch):
    """How many each job has, which they are, and what is to be set."""
    monkeypatch.setattr(checks, "longest_sequence", lambda model: 4)
    backbone = load_backbone(BaseSpec(module=plain(), dtype="float64"))

    def of(*lengths):
        return [Sample((1,) * length, (1,) * length) for length in lengths]

    data = {
        "one": SimpleNamespace(samples=of(4, 5, 1, 2000, 6, 7), evaluation=of(5)),
        "two": SimpleNamespace(samples=of(4, 4), evaluation=()),
        "three": SimpleNamespace(samples=of(1, 9), evaluation=of(3)),
    }
    with pytest.raises(DataDoesNotFit) as caught:
        check_fits(backbone, data)

    assert caught.value.facts == {
        "job": "one, three",
        "expected": "at most 4 tokens",
        "found": "one: 4 of 6 samples, up to 2,000 tokens "
        "(sample 2 with 5, sample 4 with 2,000, sample 5 with 6, …)\n"
        "one, evaluation: 1 of 1 sample, up to 5 tokens (sample 1 with 5)\n"
        "three: 1 of 2 samples, up to 9 tokens (sample 2 with 9)",
    }
    assert "max_length: 4 or less" in caught.value.help


@pytest.mark.parametrize(
    ("fields", "warned"),
    [({"warmup_steps": 3}, True), ({"warmup_steps": 2}, False), ({"warmup_ratio": 1.0}, True)],
)
def test_a_warmup_that_no_step_comes_after_is_warned_of(fields, warned):
    """The job would train below its learning rate from the first step to the last."""
    job = Job.model_validate(
        {
            "name": "a",
            "base": {"model": "someone/base"},
            "lora": {"r": 2},
            "data": {"path": "rows.csv"},
        }
        | {"max_steps": 3, **fields}
    )
    data = {"a": SimpleNamespace(steps=3, lengths=[8])}

    texts = [text for text in unusual([job], data, 64) if "of warmup" in text]
    assert bool(texts) is warned


def test_jobs_of_one_mistake_are_warned_of_in_one_line():
    """A default that is most likely not meant is that of sixty jobs."""
    rates = {"a": 30.0, "b": 0.0, "c": 30.0, "d": 30.0, "e": 30.0, "f": 1e-4, "g": 30.0}
    jobs = [
        Job(name=name, base={"model": "m"}, lora={}, data={"path": "a.csv"}, learning_rate=rate)
        for name, rate in rates.items()
    ]
    data = {name: SimpleNamespace(steps=3, lengths=[8]) for name in rates}

    assert list(unusual(jobs, data, 64)) == [
        "jobs 'a', 'c', 'd' and 2 more: learning_rate 30: adapters take 1e-5 to 1e-2",
        "job 'b': learning_rate 0: nothing is trained",
    ]


@pytest.mark.parametrize(
    ("batch", "lengths", "tokens"),
    [(4, [8] * 9, None), (9, [8] * 9, 72), (100, [8] * 9, 72), (3, [10, 20, 60], 90)],
)
def test_a_micro_batch_beyond_the_largest_row_is_warned_of(batch, lengths, tokens):
    """It is one forward pass, which a user who lowers --max-row-tokens must know."""
    job = Job(
        name="a", base={"model": "m"}, lora={}, data={"path": "a.csv"},
        per_device_train_batch_size=batch,
    )  # fmt: skip
    data = {"a": SimpleNamespace(steps=3, lengths=lengths)}

    texts = list(unusual([job], data, 64))
    assert texts == ([] if tokens is None else texts[:1])
    assert tokens is None or f"about {tokens} tokens" in texts[0]


def test_a_sample_beyond_the_largest_row_is_warned_of_once():
    """Its micro-batch is too large as well, which the same warning says."""
    job = Job(name="a", base={"model": "m"}, lora={}, data={"path": "a.csv"})
    data = {"a": SimpleNamespace(steps=3, lengths=[100, 100])}

    [text] = unusual([job], data, 64)
    assert "a sample has 100 tokens" in text
