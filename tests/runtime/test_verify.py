"""`verify` sees what it should see: equality where there is one, and a difference where not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.groups import make_data, make_job, tiny_base
from tlora_fx.model.adapter_bank import AdapterBank
from tlora_fx.runtime.verify import MASKED, PLAIN, bounds_of, verify

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


def jobs_on(base, dropout=0.1):
    lora = {"r": 8, "lora_dropout": dropout, "target_modules": "all-linear"}
    return [
        make_job(base, "a", seed=1, lora=lora, max_steps=20, learning_rate=1e-3),
        make_job(base, "b", seed=2, gradient_accumulation_steps=2, learning_rate=1e-3),
        make_job(base, "c", seed=3, lora={"use_dora": True}, learning_rate=1e-3),
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_twenty_adamw_steps_equal_plain_peft(tmp_path, dtype):
    """Losses within 2e-6 and adapters within 1e-5 of each job alone, without dropout and with."""
    jobs = jobs_on(tiny_base(tmp_path, dtype))

    found = list(verify(jobs, steps=20, device="cpu", data=make_data(jobs)))

    assert [(row.job, row.against) for row in found] == [
        (job.name, way) for way in (PLAIN, MASKED) for job in jobs
    ]
    assert [row.steps for row in found] == [20, 4, 4] * 2
    beyond = [row for row in found if not row.within(bounds_of(dtype, "cpu"))]
    assert not beyond, "\n".join(map(str, beyond))


def test_without_any_dropout_there_is_one_way_only(tmp_path):
    """The second table would repeat the first."""
    jobs = jobs_on(tiny_base(tmp_path), dropout=0.0)

    found = list(verify(jobs, steps=1, device="cpu", data=make_data(jobs)))

    assert {row.against for row in found} == {PLAIN}


def test_a_wrong_scaling_is_found(tmp_path, monkeypatch):
    """A scaling that is one in a thousand off is beyond the bounds."""
    plain = AdapterBank.materialize

    def spoilt(self, device):
        plain(self, device)
        self.scales *= 1.001

    monkeypatch.setattr(AdapterBank, "materialize", spoilt)
    jobs = jobs_on(tiny_base(tmp_path, "float32"))

    found = list(verify(jobs, steps=3, device="cpu", data=make_data(jobs)))

    beyond = {row.job for row in found if not row.within(bounds_of("float32", "cpu"))}
    assert beyond == {"a", "b"}, "DoRA's branch does not read the bank's scaling"


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
