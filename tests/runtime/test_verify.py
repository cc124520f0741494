"""`verify` sees what it should see: equality where there is one, and a difference where not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tests.alone import train_alone
from tests.models import SIZES, VOCABULARY
from tests.runtime.groups import make_data, make_job, tiny_base
from tests.sampled import sampled
from tlora_fx.cli.verify import _table
from tlora_fx.compiler import compile, resolve_pipeline
from tlora_fx.config.job import BaseSpec
from tlora_fx.model.adapter_bank import AdapterBank
from tlora_fx.runtime.adapters.files import adapter_tensors, plain_base
from tlora_fx.runtime.adapters.quantised import trained_base
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.job_run import RoundReport
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.verification import verify as verifying
from tlora_fx.runtime.verification.verify import (
    MASKED,
    PLAIN,
    Differences,
    JobDifference,
    adapter_difference,
    bounds_of,
    declared,
    extreme_batches,
    verify,
)

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


def jobs_on(base, dropout=0.1):
    lora = {"r": 8, "lora_dropout": dropout, "target_modules": "all-linear"}
    return [
        make_job(base, "a", seed=1, lora=lora, max_steps=20, learning_rate=1e-3),
        make_job(base, "b", seed=2, gradient_accumulation_steps=2, learning_rate=1e-3),
        make_job(base, "c", seed=3, lora={"use_dora": True}, learning_rate=1e-3),
    ]


@pytest.mark.parametrize(
    ("dtype", "steps"), sampled([("float32", 6), ("float32", 20), ("float64", 20)])
)
def test_adamw_steps_equal_plain_peft(tmp_path, dtype, steps):
    """Losses within 2e-6 and adapters within 1e-5 of each job alone, without dropout and with."""
    jobs = jobs_on(tiny_base(tmp_path, dtype))

    found = list(verify(jobs, steps=steps, device="cpu", data=make_data(jobs)))

    assert [(row.job, row.against) for row in found] == [
        (job.name, way) for way in (PLAIN, MASKED) for job in jobs
    ]
    assert [row.steps for row in found] == [steps, 4, 4] * 2
    beyond = [row for row in found if not row.within(bounds_of(dtype, "cpu"))]
    assert not beyond, "\n".join(map(str, beyond))


def test_without_any_dropout_there_is_one_way_only(tmp_path):
    """The second table would repeat the first."""
    jobs = jobs_on(tiny_base(tmp_path), dropout=0.0)

    found = list(verify(jobs, steps=1, device="cpu", data=make_data(jobs)))

    assert {row.against for row in found} == {PLAIN}


FLOAT8 = "quantize-base{to=float8 products=true at-least=256}@before:lower-adapters"


@pytest.mark.slow
def test_a_pass_that_declares_other_numbers_is_measured_and_not_judged(tmp_path, monkeypatch):
    """Losses part by what rounding costs, and no step is looked into."""
    pipeline = resolve_pipeline(None, [FLOAT8])
    monkeypatch.setattr(verifying, "_at_a_kink", lambda *given: pytest.fail("looked into"))
    jobs = [make_job(tiny_base(tmp_path, "bfloat16"), "a", lora={"r": 4})]

    (row,) = verify(jobs, steps=1, device="cpu", data=make_data(jobs), pipeline=pipeline)

    assert 0 < row.loss < 0.05
    assert 0.01 < row.gradient < 0.6


def test_where_other_numbers_are_declared_no_bound_is_told():
    """Differences are; the passes that declare it are known by name."""
    assert declared(resolve_pipeline(None, [FLOAT8])) == ["quantize-base"]
    assert declared(None) == []
    apart = Differences(0.008, 0.3, 0.02)
    row = JobDifference("a", PLAIN, "packed", 3, 0.008, 0.3, 0.02, apart)
    told = [list(column.cells) for column in _table([row], None).columns]

    assert [*told[0], *told[3], *told[-1]] == ["a", "8.0e-03", "declared"]


def test_a_wrong_scaling_is_found(tmp_path, monkeypatch):
    """A scaling that is one in a thousand off is beyond the bounds."""
    plain = AdapterBank.materialize

    def spoilt(self, device):
        plain(self, device)
        self.scales *= 1.001

    monkeypatch.setattr(AdapterBank, "materialize", spoilt)
    jobs = jobs_on(tiny_base(tmp_path, "float32"), dropout=0.0)

    found = list(verify(jobs, steps=3, device="cpu", data=make_data(jobs)))

    beyond = {row.job for row in found if not row.within(bounds_of("float32", "cpu"))}
    assert beyond == {"a", "b", "c"}


def test_steps_that_are_never_brought_together_again_equal_plain_peft(tmp_path):
    """Twenty steps in a row, and neither side ever sees the other's adapters."""
    jobs = jobs_on(tiny_base(tmp_path, "float32"))
    data = make_data(jobs)
    model = compile(jobs)
    trainer = Trainer(model, output=tmp_path / "run", device="cpu")
    trainer.prepare(data)
    start = {job.name: adapter_tensors(model.job_parameters(job.name)) for job in jobs}
    losses = {job.name: [] for job in jobs}
    while active := [run for run in trainer.runs if run.status == "running"]:
        batches = {run.index: run.batches() for run in active}
        found = trainer.gradients(batches)
        for run in active:
            losses[run.job.name].append(found[run.index])
            norm = run.optimizer.gradient_norm()
            run.finish_step(found[run.index], batches[run.index], RoundReport(1, 0, 0.0), norm)

    base = plain_base(model.backbone)
    for job, steps in zip(jobs, (20, 4, 4), strict=True):
        solo = train_alone(job, base, data[job.name], start[job.name], steps, masks=True)
        assert losses[job.name] == pytest.approx(solo.losses, rel=2e-6)
        after = adapter_tensors(model.job_parameters(job.name))
        assert adapter_difference(after, solo.adapters) <= 1e-5


class Kinked(nn.Module):
    """A base that stands at the kink of a ReLU: half of its inputs are zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, VOCABULARY)
        with torch.no_grad():
            self.embed.weight[:, 1] = self.embed.weight[:, 0]
            self.mix.weight[::2] = 0
            self.mix.weight[::2, 0], self.mix.weight[::2, 1] = 1, -1

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of single tokens."""
        hidden = self.embed(ids)
        return self.head(hidden + torch.relu(self.mix(hidden)))


@pytest.mark.parametrize(
    ("apart", "kinks", "passes"), [(0, 0, True), (2e-7, 1, True), (1e-4, 0, False)]
)
def test_a_base_passes_a_rounding_beside_its_kink_and_no_further(monkeypatch, apart, kinks, passes):
    """One token's ReLUs open on one side only; nothing but their gradients is of any size."""

    def moved(jobs, **where):
        base = trained_base(jobs, **where)
        base.embed.weight.data[5, 0] += apart * base.embed.weight[5, 0].abs()
        return base

    monkeypatch.setattr(verifying, "trained_base", moved)
    base = BaseSpec(module=Kinked(), dtype="float32")
    job = make_job(base, "a", lora={"target_modules": ["mix"]}, shuffle=False)
    samples = [Sample((5, 7), (5, 7))]

    [row] = verify([job], steps=1, device="cpu", data={"a": JobData(job, samples, DataReport())})

    assert (row.kinks > 0) == (kinks > 0)
    assert row.within(bounds_of("float32", "cpu")) == passes


def growing(job, lengths=range(2, 14)):
    """Samples of these lengths, in this order."""
    samples = [Sample(tuple(range(1, n + 1)), tuple(range(1, n + 1))) for n in lengths]
    return {job.name: JobData(job, samples, DataReport())}


def test_what_parts_beyond_the_first_samples_is_found(tmp_path, monkeypatch):
    """Steps of short samples agree; the longest sample, which no step takes, does not."""
    plain = Trainer.gradients

    def spoilt(self, batches):
        longest = max(len(s.input_ids) for b in batches.values() for part in b for s in part)
        return {at: x * (1.01 if longest > 8 else 1) for at, x in plain(self, batches).items()}

    monkeypatch.setattr(Trainer, "gradients", spoilt)
    job = make_job(tiny_base(tmp_path, "float32"), "a", shuffle=False)

    [row] = verify([job], steps=2, device="cpu", data=growing(job))

    assert not row.within(bounds_of("float32", "cpu"))
    assert row.loss == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [[9], [2]]),
        (2, [[7, 9], [2, 3], [9, 2]]),
        (4, [[4, 5, 7, 9], [2, 3, 4, 5], [7, 9, 2, 3]]),
        (8, [[5, 7, 9, 2, 3, 4]]),
    ],
)
def test_extremes_are_the_longest_the_shortest_and_both(size, expected):
    """Micro-batches as large as the job's, none of them twice."""
    samples = [Sample(tuple(range(n)), tuple(range(n))) for n in (5, 9, 3, 2, 7, 4)]

    job = make_job(BaseSpec(model="m"), "a")
    batches = extreme_batches(JobData(job, samples, DataReport()), size)

    assert [[len(sample.input_ids) for sample in batch] for batch in batches] == expected


def test_a_base_that_is_a_little_wrong_is_found(tmp_path, monkeypatch):
    """One layer's weights are a ten-thousandth too large on one side."""

    def wrong(jobs, **where):
        base = trained_base(jobs, **where)
        with torch.no_grad():
            for parameter in base.model.layers[1].parameters():
                parameter.mul_(1 + 1e-4)
        return base

    monkeypatch.setattr(verifying, "trained_base", wrong)
    jobs = jobs_on(tiny_base(tmp_path, "float32"), dropout=0.0)

    found = list(verify(jobs, steps=3, device="cpu", data=make_data(jobs)))

    assert not any(row.within(bounds_of("float32", "cpu")) for row in found), found


@pytest.mark.parametrize(("noise", "passes"), [(0, False), (9e-6, True), (3e-5, True), (1, False)])
def test_the_noise_of_a_base_widens_its_bounds(noise, passes):
    """A gradient of 6e-5 passes where the base itself moves a little, not where it moves much."""
    row = JobDifference("a", PLAIN, "packed", 1, 0.0, 6e-5, 0.0, Differences(0.0, noise, 0.0))

    assert row.within(bounds_of("float32", "cpu")) == passes


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["glm4", "ctrl", "apertus", "hunyuan_v1_dense", "arcee"])
def test_decoders_that_make_much_of_rounding_pass(tmp_path, decoder):
    """Trained alone in two layouts, such bases part by up to 1e-3 within twenty steps."""
    AutoConfig.for_model(decoder, **SIZES, head_dim=8).save_pretrained(tmp_path)
    base = BaseSpec(config=tmp_path, dtype="float32", seed=3)
    lora = {"r": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
    jobs = [make_job(base, "a", lora=lora, max_steps=20), make_job(base, "b", lora=lora)]

    found = list(verify(jobs, steps=20, device="cpu", data=make_data(jobs, longest=40)))

    beyond = [row for row in found if not row.within(bounds_of("float32", "cpu"))]
    assert not beyond, "\n".join(map(str, beyond))


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not beside the repository")
def test_gsm8k_jobs_train_fused_as_alone():
    """Two steps of the eight jobs of examples/gsm8k on real data."""
    from tlora_fx.config.job_file import load_job_file

    jobs = load_job_file(Path(__file__).parents[2] / "examples" / "gsm8k" / "jobs.yaml")

    found = list(verify(jobs, steps=2, device="cpu"))

    assert len({row.job for row in found}) == 8
    beyond = [row for row in found if not row.within(bounds_of(jobs.base.dtype, "cpu"))]
    assert not beyond, "\n".join(map(str, beyond))
