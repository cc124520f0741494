"""On a GPU layers are compiled beside the first rounds too."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import torch

from tests.runtime.groups import losses_of, make_data, make_job, shuffle_inductor_choices, tiny_base
from tests.runtime.test_compilation import ROUNDS, Pretended, Snapshots
from tlora_fx.compiler import compile
from tlora_fx.runtime.adapters.files import adapter_tensors
from tlora_fx.runtime.group_step import Batch, GroupStep, StepOptions
from tlora_fx.runtime.rounds import compilation
from tlora_fx.runtime.rounds.compilation import CompileProcess, CompileRequest, example_row
from tlora_fx.runtime.run_folder import COMPILED
from tlora_fx.runtime.trainer import Trainer, TrainerOptions

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Two jobs whose rows have few sizes, on four layers that kernels take."""
    base = tiny_base(
        tmp_path_factory.mktemp("base"), "bfloat16", hidden_size=128, num_attention_heads=2,
        intermediate_size=256, num_hidden_layers=4,
    )  # fmt: skip
    lora = {"r": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
    fields = {"lora": lora, "max_steps": 8, "save_steps": 2}
    return [make_job(base, "a", seed=1, **fields), make_job(base, "b", seed=2, **fields)]


def test_the_process_fills_the_caches_that_training_reads(
    jobs, tmp_path, monkeypatch, fresh_dynamo
):
    """Layers with weights in wider buffers, and the loss with its norm, are not compiled again."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    data = make_data(jobs, longest=40)
    options = StepOptions(compiled=True, wait_for_compile=False)
    step = GroupStep(compile(jobs), device="cuda", options=options)
    process = CompileProcess(CompileRequest.of(step.model, example_row(step, data), ["cuda:0"]))
    step.prepare()
    while process.returncode is None:
        time.sleep(0.1)
    assert process.returncode == 0, process.reason()
    process.end()
    counters.clear()
    step.compile()
    step.accumulate({job.name: Batch(data[job.name].step(0)) for job in jobs})

    assert counters["aot_autograd"]["autograd_cache_hit"] == 2
    assert counters["aot_autograd"]["autograd_cache_miss"] == 0


def test_captured_rows_and_a_resumed_run_follow_the_switch(jobs, tmp_path, monkeypatch):
    """Rows are captured after it alone; a run cut before or behind it repeats its losses."""
    shuffle_inductor_choices(monkeypatch)
    monkeypatch.setattr(compilation, "CompileProcess", Pretended)
    monkeypatch.setattr("tlora_fx.runtime.rounds.row_schedule.CAPTURE_AFTER", 1)
    monkeypatch.setattr("tlora_fx.runtime.rounds.row_schedule.PAYS_SHORT", 0)
    data = make_data(jobs, longest=9, count=2)

    def trained(folder, *, resume=False):
        trainer = Trainer(
            compile(jobs), output=folder, device="cuda", data=data, resume=resume,
            callback=Snapshots(folder),
            options=TrainerOptions(compiled=True, wait_for_compile=False),
        )  # fmt: skip
        trainer.run()
        return trainer

    whole = trained(tmp_path / "run")
    assert json.loads((tmp_path / "run" / COMPILED).read_text())["round"] == ROUNDS
    assert whole.graphs is not None
    assert whole.graphs.captured >= 1
    for rounds in (2, 4):
        cut = next(tmp_path.glob(f"cut-step-*{rounds}"))
        shutil.copy(tmp_path / "run" / COMPILED, cut / COMPILED)
        resumed = trained(cut, resume=True)
        assert losses_of(cut, jobs) == losses_of(tmp_path / "run", jobs)
        for job in jobs:
            one, two = (
                adapter_tensors(each.model.job_parameters(job.name)) for each in (whole, resumed)
            )
            assert all(torch.equal(one[name], two[name]) for name in one)
