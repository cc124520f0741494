"""`quantize` of a base: jobs train, answer and merge as plain PEFT does on the quantised model."""

from __future__ import annotations

import copy
import json

import pytest
import safetensors.torch
import torch
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig

from tests.quantised import decoded
from tests.runtime.conftest import UNMARKED
from tests.runtime.groups import make_data, make_job
from tlora_fx.compiler import compile, resolve_pipeline, run_passes
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.errors import JobError, PipelineError, ResumeMismatch
from tlora_fx.ops.quantized import FORMS
from tlora_fx.runtime.adapters.files import adapter_tensors
from tlora_fx.runtime.generation import AdapterGenerator, Prompt, SamplingOptions
from tlora_fx.runtime.merge import adapter_of, merge
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.verification.verify import bounds_of, verify

PROMPTS = ["1+1=", "a b c x y z"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_tokenizer):
    """A base in float32 with weights and a tokenizer, and some data."""
    folder = tmp_path_factory.mktemp("quantised")
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    make_tokenizer(UNMARKED, adds_bos=True).save_pretrained(folder / "base")
    texts = ({"text": "1+1=2"}, {"text": "a b c"}, {"text": "2+2=?"}, {"text": "x=2"})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


def spec(folder, form="nf4"):
    return BaseSpec(model=str(folder / "base"), dtype="float32", quantize=form)


def restored_base(folder, form):
    """The model whose matrices are rounded by the definition of the form."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    for name, module in base.model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.numel() >= 4096, name
            parts = FORMS[form].quantise(module.weight.detach())
            module.weight.data = decoded(form, parts, module.weight.shape)
    return base.eval()


@pytest.fixture(scope="module")
def run(folder):
    """Two jobs trained in nf4, one with a copy of a module; both answer while they train."""
    loras = {"a": {"target_modules": "all-linear"}, "b": {"modules_to_save": ["o_proj"]}}
    jobs = [
        make_job(spec(folder), name, lora=lora, learning_rate=0.1, sample_prompts=PROMPTS,
                 sample_max_new_tokens=6)
        .model_copy(update={"data": make_job(spec(folder), name).data.model_copy(
            update={"path": str(folder / "data.jsonl")})})
        for name, lora in loras.items()
    ]  # fmt: skip
    Trainer(compile(jobs), output=folder / "run", device="cpu").run()
    return folder / "run"


@pytest.mark.parametrize("form", FORMS)
def test_adamw_steps_equal_peft_on_the_stored_base(folder, form):
    """Within the bounds of a base as it is, with dropout and a copy of a module beside."""
    lora = {"lora_dropout": 0.1, "target_modules": "all-linear"}
    jobs = [
        make_job(spec(folder, form), "a", lora=lora),
        make_job(spec(folder, form), "b", lora={"modules_to_save": ["o_proj"]}),
    ]
    found = list(verify(jobs, steps=3, device="cpu", data=make_data(jobs)))

    beyond = [row for row in found if not row.within(bounds_of("float32", "cpu"))]
    assert len(found) == 4
    assert not beyond, "\n".join(map(str, beyond))


def test_nf4_trains_as_peft_on_a_model_of_bitsandbytes(folder, tmp_path):
    """transformers quantises, PEFT adapts, torch steps; losses within what products round."""
    job = make_job(spec(folder), "a", lora={"target_modules": "all-linear"}, max_grad_norm=None)
    job = job.model_copy(update={"shuffle": False, "lr_scheduler_type": "constant"})
    data = make_data([job])
    trainer = Trainer(compile([job]), output=tmp_path / "run", device="cpu")
    trainer.prepare(data)
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float32, quantization_config=how, device_map="cpu"
    )
    (own,) = trainer.runs
    # In eval mode bitsandbytes multiplies in bfloat16 on some CPUs.
    model = get_peft_model(base.train(), job.lora_config())
    set_peft_model_state_dict(model, copy.deepcopy(adapter_tensors(own.parameters)))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    samples, expected = list(data["a"].samples), []
    for step in range(4):
        batch = samples[2 * step : 2 * step + 2]
        count = sum(label != -100 for sample in batch for label in sample.labels[1:])
        total = sum(
            nn.functional.cross_entropy(
                model(torch.tensor([sample.input_ids])).logits[0, :-1],
                torch.tensor(sample.labels[1:]),
                reduction="sum",
            )
            for sample in batch
        )
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        expected.append(float(total.detach() / count))
    found = []
    while own.status == "running":
        batches = {own.index: own.batches()}
        losses = trainer.gradients(batches)
        trainer.update(losses, batches)
        found.append(losses[own.index])

    assert found == pytest.approx(expected, abs=2e-4)


def test_jobs_answer_while_they_train_and_afterwards(folder, run):
    """As transformers and PEFT on the restored base, greedily; the copy of o_proj too."""
    generator = AdapterGenerator.of_folders({name: run / name for name in "ab"}, "cpu")
    asked = [(name, prompt) for prompt in PROMPTS for name in "ab"]
    said = generator.answers(
        [Prompt(name, generator.encode(prompt)) for name, prompt in asked], SamplingOptions(6)
    )
    tokenizer = AutoTokenizer.from_pretrained(run / "a")
    for (name, prompt), answer in zip(asked, said, strict=True):
        model = PeftModel.from_pretrained(restored_base(folder, "nf4"), run / name).eval()
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        written = model.generate(ids, max_new_tokens=6, do_sample=False)
        expected = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        rows = read_metrics(run / name / "metrics.jsonl")
        (samples,) = (row["samples"] for row in rows if "samples" in row)
        assert answer == expected
        assert {"prompt": prompt, "completion": expected} in samples


@pytest.mark.parametrize("job", ["a", "b"])
def test_a_merged_model_is_the_restored_base_with_the_adapter(folder, run, tmp_path, job):
    """In the base's dtype, loadable without any library of the form."""
    merged = AutoModelForCausalLM.from_pretrained(merge(adapter_of(run, job), tmp_path / "merged"))
    adapted = PeftModel.from_pretrained(restored_base(folder, "nf4"), run / job).eval()
    ids = torch.tensor([[5, 9, 3, 7]])

    assert torch.allclose(merged.eval()(ids).logits, adapted(ids).logits, atol=1e-4)
    names = safetensors.torch.load_file(next((tmp_path / "merged").glob("*.safetensors")))
    assert all(tensor.dtype == torch.float32 for tensor in names.values())


def test_the_form_is_told_in_one_place(folder):
    """A pipeline with the pass, and a dtype without the form, are refused."""
    passes = resolve_pipeline(None, ["quantize-base{to=int8}@before:lower-adapters"])
    with pytest.raises(PipelineError, match="both say how"):
        run_passes([make_job(spec(folder), "a")], passes)
    with pytest.raises(JobError, match="float64 has no matrices in nf4"):
        Job(name="a", base={"model": str(folder / "base"), "dtype": "float64", "quantize": "nf4"},
            lora=4, data=[{"text": "a"}])  # fmt: skip


def test_resume_refuses_another_form(folder, run):
    """The checkpoint says in which form the base was."""
    job = Job.model_validate(json.loads((run / "a" / "job.json").read_text()))
    other = job.model_copy(update={"base": spec(folder, None)})
    second = Job.model_validate(json.loads((run / "b" / "job.json").read_text()))
    jobs = [other, second.model_copy(update={"base": other.base})]
    with pytest.raises(ResumeMismatch, match="quantize was nf4, is unset"):
        Trainer(compile(jobs), output=run, device="cpu", resume=True).run()
