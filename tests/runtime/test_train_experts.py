"""Jobs on a mixture of experts, adapted as PEFT does by default, train as by PEFT alone."""

from __future__ import annotations

import itertools
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from tests.alone import train_alone
from tests.models import MIXTURES, in_float64, plain_model, ready
from tests.runtime.groups import make_data, make_job
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.runtime.adapters.files import (
    adapter_tensors,
    plain_base,
    read_adapter,
    start_adapters,
)
from tlora_fx.runtime.job_run import RoundReport
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.verification.verify import adapter_difference, bounds_of, verify

FAMILIES = ("qwen3-moe", "mixtral", "olmoe", "deepseek-v3", "glm4-moe")
#: A family whose code rounds to float32 by itself, whatever a test does.
ROUNDED = ("mixtral",)


def base_in(folder, family, **changes):
    """A family's base that no other test trains."""
    name, arguments = MIXTURES[family].config
    getattr(transformers, name)(**arguments | changes, rms_norm_eps=2e-6).save_pretrained(
        folder / "base"
    )
    return BaseSpec(config=folder / "base", dtype="float64", seed=7)


def experts_of(family):
    """The linears of experts, as transformers 4 had them."""
    return ["w1", "w2", "w3"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]


def saved_by_peft(base, folder, family):
    """An adapter of PEFT alone, with random numbers everywhere."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(base.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    targets = ["o_proj", "gate", *experts_of(family)]
    lora = LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, lora)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    wrapped.save_pretrained(folder)
    return folder


def wide_loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """transformers' loss, which rounds logits to float32, without rounding."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), shifted, reduction="sum")
    return total / (num_items_in_batch or (shifted != -100).sum())


def train(jobs, data, folder):
    """Train to the end; returns the model, the losses and the starts by job."""
    model = compile(jobs)
    trainer = Trainer(model, output=folder, device="cpu")
    trainer.prepare(data)
    starts = {job.name: adapter_tensors(model.job_parameters(job.name)) for job in jobs}
    losses = {job.name: [] for job in jobs}
    while active := [run for run in trainer.runs if run.status == "running"]:
        batches = {run.index: run.batches() for run in active}
        found = trainer.gradients(batches)
        for run in active:
            losses[run.job.name].append(found[run.index])
            norm = run.optimizer.gradient_norm()
            run.finish_step(found[run.index], batches[run.index], RoundReport(1, 0, 0.0), norm)
    for run in trainer.runs:
        run.write(adapter_tensors(model.job_parameters(run.job.name)), None)
    return model, losses, starts


@pytest.mark.parametrize("family", sampled(FAMILIES, len(FAMILIES)))
def test_jobs_on_experts_and_routers_end_as_by_peft_alone(tmp_path, family, monkeypatch):
    """All linears from a fresh start, and a list from PEFT's own folder; PEFT loads both."""
    base = base_in(tmp_path, family)
    in_float64(monkeypatch, family)
    start = saved_by_peft(base, tmp_path / "start", family)
    jobs = [
        make_job(base, "all", lora={"r": 4, "target_modules": "all-linear"}, max_steps=5, seed=1),
        Job(name="listed", base=base, adapter=start, data={"path": "unused.jsonl"}, seed=2,
            max_steps=3, learning_rate=1e-2, per_device_train_batch_size=3),
    ]  # fmt: skip
    data = make_data(jobs)

    model, losses, starts = train(jobs, data, tmp_path / "run")

    rounded = family in ROUNDED
    near = (bounds_of("float64").loss, bounds_of("float64").adapter) if rounded else (1e-9, 1e-7)
    assert adapter_difference(starts["listed"], read_adapter(start).tensors) == 0
    alone = plain_base(model.backbone)
    alone.loss_function = wide_loss
    for job, steps in zip(jobs, (5, 3), strict=True):
        solo = train_alone(job, alone, data[job.name], starts[job.name], steps, masks=False)
        after = adapter_tensors(model.job_parameters(job.name))
        assert losses[job.name] == pytest.approx(solo.losses, rel=near[0])
        assert adapter_difference(after, solo.adapters) <= near[1]
        assert_loads(plain_model(model), tmp_path / "run" / job.name, solo)


def test_lora_fa_on_experts_and_routers_ends_as_by_peft_alone(tmp_path, monkeypatch):
    """Its steps divide by each branch's own scaling; epsilon is large, or Adam would hide that."""
    base = base_in(tmp_path, "qwen3-moe")
    in_float64(monkeypatch, "qwen3-moe")
    patterned = {
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
        "alpha_pattern": {"experts.down_proj": 3, "gate.weight": 5},
    }
    step = {"optim": "lorafa", "adam_epsilon": 1e-3, "max_steps": 3}
    jobs = [
        make_job(base, "patterned", lora=patterned, seed=1, **step),
        make_job(base, "all", lora={"target_modules": "all-linear", "use_rslora": True}, **step),
    ]
    data = make_data(jobs)

    model, losses, starts = train(jobs, data, tmp_path / "run")

    alone = plain_base(model.backbone)
    alone.loss_function = wide_loss
    for job in jobs:
        solo = train_alone(job, alone, data[job.name], starts[job.name], 3, masks=False)
        after = adapter_tensors(model.job_parameters(job.name))
        assert losses[job.name] == pytest.approx(solo.losses, rel=1e-9)
        assert adapter_difference(after, solo.adapters) <= 1e-7


def assert_loads(plain, folder, solo):
    """PEFT loads a job's folder without a word of missing tensors, and it says what PEFT saves."""
    saved = json.loads((folder / "adapter_config.json").read_text())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        loaded = PeftModel.from_pretrained(plain, folder)
    config = loaded.peft_config["default"]

    assert set(saved["target_parameters"]) == set(config.target_parameters)
    assert "gate.weight" in saved["target_parameters"]
    assert set(saved["target_modules"]) == set(config.target_modules)
    assert saved["rank_pattern"] == config.rank_pattern
    found = {
        name.replace(".default", ""): parameter
        for name, parameter in loaded.named_parameters()
        if "lora_" in name
    }
    assert found.keys() == solo.adapters.keys()
    for name, tensor in solo.adapters.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", sampled(("qwen3-moe", "mixtral"), 2))
def test_an_adapter_on_single_experts_is_continued_as_peft_loads_it(tmp_path, family):
    """As PEFT saved it with transformers 4, when each expert had linears of its own."""
    base = base_in(tmp_path, family, num_hidden_layers=1)
    folder, experts = tmp_path / "before", experts_of(family)
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"target_modules": experts}))
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    sizes = transformers.AutoConfig.from_pretrained(base.config)
    narrow = getattr(sizes, "moe_intermediate_size", sizes.intermediate_size)
    drawn = torch.Generator().manual_seed(0)
    tensors = {}
    for layer, expert in itertools.product(range(sizes.num_hidden_layers), range(4)):
        for name in experts:
            into = narrow if name in ("down_proj", "w2") else sizes.hidden_size
            out = sizes.hidden_size + narrow - into
            path = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(2, into, generator=drawn)
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, 2, generator=drawn)
    save_file(tensors, folder / "adapter_model.safetensors")
    own = Job(name="one", base=base, adapter=folder, data={"path": "unused.jsonl"})

    model = ready([own])
    start_adapters(model)

    theirs = dict(PeftModel.from_pretrained(plain_model(model), folder).named_parameters())
    mine = model.job_parameters("one")
    assert len(mine) == 4 * sizes.num_hidden_layers
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name].to(tensor.dtype))


@pytest.mark.slow
def test_verify_passes_on_experts_and_routers(tmp_path):
    """Against PEFT and torch.optim, in the dtype of the table of its bounds."""
    base = base_in(tmp_path, "mixtral")
    jobs = [
        make_job(base, "all", lora={"r": 4, "target_modules": "all-linear"}, seed=1),
        make_job(base, "listed", lora={"r": 2, "target_modules": ["w1", "w2", "w3"]}, seed=2),
    ]

    found = list(verify(jobs, steps=3, device="cpu", data=make_data(jobs)))

    assert len(found) == 2
    assert all(row.within(bounds_of("float64", "cpu")) for row in found)
