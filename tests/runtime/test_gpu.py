"""On a GPU: the same promises, on the attention and GEMMs that run there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.asked_kernels import noted_kernels
from tests.runtime.groups import losses_of, make_data, make_job, shuffle_inductor_choices, tiny_base
from tlora_fx.codegen.ahead import Ahead
from tlora_fx.compiler import compile
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.parallel import apply
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.trainer import Trainer, TrainerCallback, TrainerOptions
from tlora_fx.runtime.verification.verify import bounds_of, verify

pytestmark = pytest.mark.gpu


def mixed_jobs(base):
    lora = {"r": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
    return [
        make_job(base, "a", seed=1, lora=lora, max_steps=6, learning_rate=1e-3),
        make_job(base, "b", seed=2, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-3),
        make_job(base, "c", seed=3, lora={"r": 3, "use_dora": True}, learning_rate=1e-3),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_jobs_train_fused_as_alone(tmp_path, dtype):
    """Every job stays within its dtype's bounds of plain PEFT, dropout off and on."""
    base = tiny_base(tmp_path, dtype, hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    jobs = mixed_jobs(base)

    found = list(verify(jobs, steps=6, device="cuda", data=make_data(jobs, longest=40)))

    assert len(found) == 6
    beyond = [row for row in found if not row.within(bounds_of(dtype, "cuda"))]
    assert not beyond, "\n".join(map(str, beyond))


def test_a_resumed_run_on_a_gpu_has_the_losses_of_an_uninterrupted_one(tmp_path):
    """Checkpoints hold all that a step depends on, on a GPU too."""
    base = tiny_base(tmp_path / "base", "float32")
    data = make_data(mixed_jobs(base))

    class Stop(TrainerCallback):
        def stepped(self, report):
            if report.step == 3:
                raise RuntimeError("killed")

    jobs = [job.model_copy(update={"save_steps": 2}) for job in mixed_jobs(base)]
    whole = Trainer(compile(jobs), output=tmp_path / "whole", device="cuda", data=data)
    whole.run()
    with pytest.raises(RuntimeError, match="killed"):
        Trainer(
            compile(jobs), output=tmp_path / "cut", device="cuda", data=data, callback=Stop()
        ).run()
    Trainer(compile(jobs), output=tmp_path / "cut", device="cuda", data=data, resume=True).run()

    one, two = losses_of(tmp_path / "whole", jobs), losses_of(tmp_path / "cut", jobs)
    for job in jobs:
        assert one[job.name] == pytest.approx(two[job.name], rel=1e-6)


def test_a_nan_leaves_its_neighbours_losses_alone(tmp_path):
    """The step in which one job turns NaN gives its neighbours the losses of a healthy run."""
    base = tiny_base(tmp_path / "base", "bfloat16", hidden_size=128, num_attention_heads=2)
    jobs = mixed_jobs(base)
    trainer = Trainer(compile(jobs), output=tmp_path / "run", device="cuda", data=make_data(jobs))
    trainer.prepare(make_data(jobs))
    batches = {run.index: run.batches() for run in trainer.runs}
    healthy = trainer.gradients(batches)
    gradients = {n: p.grad.clone() for n, p in trainer.runs[1].parameters.items()}
    for run in trainer.runs:
        run.optimizer.zero_grad()
    for parameter in trainer.runs[0].parameters.values():
        parameter.data.fill_(float("nan"))
    sick = trainer.gradients(batches)

    assert sick[0] != sick[0]
    assert [sick[1], sick[2]] == [healthy[1], healthy[2]]
    for name, parameter in trainer.runs[1].parameters.items():
        assert torch.equal(parameter.grad, gradients[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_of_all_jobs_is_that_of_each(dtype):
    """Kernels against torch.optim's: norms, parameters and moments, clipped or not."""
    from tests.ops.interpreted.test_adam import JOBS, give, parameters
    from tests.runtime.parameters import job_with
    from tlora_fx.runtime.optim.group_update import GroupUpdate
    from tlora_fx.runtime.optim.optimizer import JobOptimizer

    jobs = [job_with(**fields) for fields in JOBS.values()]
    sides = []
    for _ in range(2):
        params = [parameters(place, dtype, "cuda") for place in range(len(jobs))]
        each = [JobOptimizer(job, own, 9) for job, own in zip(jobs, params, strict=True)]
        sides.append((params, each))
    (mine, together), (theirs, alone) = sides
    update = GroupUpdate.of(together, range(len(jobs)))
    assert update is not None
    for step in range(5):
        for side in (mine, theirs):
            for params in side:
                torch.manual_seed(step)
                give(params, step)
        outcomes = update.launch(torch.ones(len(jobs), device="cuda")).read()
        for one, other, outcome in zip(together, alone, outcomes, strict=True):
            one.noted()
            assert outcome.updated
            assert outcome.norm == pytest.approx(other.step(), rel=1e-5)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(together, alone, strict=True):
        tensors = other.state_tensors()
        for name, tensor in one.state_tensors().items():
            torch.testing.assert_close(tensor, tensors[name], rtol=bound, atol=bound)
    for one, other in zip(mine, theirs, strict=True):
        for name, param in one.items():
            torch.testing.assert_close(param, other[name], rtol=bound, atol=bound)
            assert not param.grad.any()


@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_that_are_compiled_ahead_change_no_bit(tmp_path, monkeypatch, compiled):
    """A row that starts nothing comes before the first."""
    shuffle_inductor_choices(monkeypatch)
    base = tiny_base(tmp_path, "bfloat16", hidden_size=128, num_attention_heads=2)
    jobs = mixed_jobs(base)
    data, tried = make_data(jobs, longest=40), []
    start = apply.start_nothing
    monkeypatch.setattr(apply, "start_nothing", lambda *row: (start(*row), tried.append(row)))

    def losses(name):
        options = TrainerOptions(compiled=compiled, wait_for_compile=True)
        Trainer(
            compile(jobs), output=tmp_path / name, device="cuda", data=data, options=options
        ).run()
        return losses_of(tmp_path / name, jobs)

    one = losses("ahead")
    monkeypatch.setattr(Ahead, "try_once", lambda *_: None)

    assert losses("as they come") == one
    assert tried


@pytest.mark.parametrize("compiled", [False, True])
def test_all_kernels_of_ours_that_a_round_starts_were_asked_for(tmp_path, compiled):
    """Those of the row in the form in which it runs, and of the update; also of compiled layers.

    In a process that has started none of them.
    """
    code = (
        "import sys; from tests.runtime.test_gpu import print_kernels; print_kernels(*sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(compiled)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert kernels["asked for"]
    assert not kernels["not asked for"]


def print_kernels(folder, compiled):
    """Train two jobs on rows of many lengths; which kernels were asked for, and which were not."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 512}
    base = tiny_base(Path(folder), "bfloat16", **sizes)
    more = {"per_device_train_batch_size": 8, "max_steps": 6}
    jobs = [make_job(base, name, seed=1, lora={"r": 3}, **more) for name in "ab"]
    options = TrainerOptions(compiled=compiled == "True", wait_for_compile=True)
    with noted_kernels() as found:
        Trainer(
            compile(jobs), output=Path(folder) / "run", device="cuda",
            data=make_data(jobs, longest=300), options=options,
        ).run()  # fmt: skip
    sys.stdout.write(json.dumps(found))


class Comes(TrainerCallback):
    """After a job's steps others leave and join; notes how many graphs there are after each."""

    def __init__(self, changes):
        self.changes, self.graphs, self.said = changes, {}, []

    def stepped(self, report):
        if report.job != "a":
            return
        self.graphs[report.step] = self.trainer.graphs.captured
        if report.step in self.changes:
            self.changes[report.step](self.trainer)

    def noted(self, text):
        self.said.append(text)


def test_who_joins_a_running_row_finds_it_captured_until_banks_double(tmp_path):
    """A newcomer's rows have forms that were there; larger banks are captured anew, and told of."""
    base = tiny_base(tmp_path, "bfloat16", hidden_size=128, num_attention_heads=2)
    lora = {"r": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
    jobs = {
        name: make_job(base, name, seed=n, lora=lora, max_steps=60, learning_rate=1e-3)
        for n, name in enumerate("abcd")
    }
    samples = [Sample(ids, ids) for ids in (tuple(range(3, 19)), tuple(range(20, 36)))]
    data = {name: JobData(job, samples * 4, DataReport()) for name, job in jobs.items()}
    model = compile([jobs["a"], jobs["b"]], open=OpenSlots(rows=16, jobs=2, rank=8))
    comes = Comes({
        10: lambda trainer: trainer.pause("b"),
        20: lambda trainer: trainer.admit(jobs["c"], data["c"]),
        30: lambda trainer: trainer.admit(jobs["d"], data["d"]),
    })  # fmt: skip
    both = {name: data[name] for name in "ab"}
    comes.trainer = Trainer(
        model, output=tmp_path / "run", device="cuda", data=both, callback=comes
    )
    comes.trainer.run()

    graphs, forms = comes.graphs, len(comes.trainer.graphs.keys)
    assert comes.trainer.graphs.refused == ""
    assert 0 < graphs[9] < graphs[19] == graphs[30]
    assert graphs[60] > graphs[31] >= graphs[30]
    assert forms < graphs[60]
    assert any("doubled" in text for text in comes.said), comes.said
    assert {run.job.name: run.status for run in comes.trainer.runs} == {
        "a": "done", "b": "paused", "c": "done", "d": "done"
    }  # fmt: skip
