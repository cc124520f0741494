"""Method kto and label smoothing: equal to plain PEFT with torch, alone, mixed, and as by TRL."""

from __future__ import annotations

import json
import random
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.runtime.groups import draw_samples, evaluations_of, losses_of, make_job, tiny_base
from tests.runtime.test_step_losses import by_peft, job_of
from tlora_fx.compiler import compile
from tlora_fx.config.job import DataSpec, Job
from tlora_fx.errors import JobError, StepMisuse
from tlora_fx.runtime.adapters.files import adapter_tensors, plain_base
from tlora_fx.runtime.data.samples import JobData, load_job_data
from tlora_fx.runtime.group_step import Batch, GroupStep
from tlora_fx.runtime.trainer import Trainer, TrainerCallback
from tlora_fx.runtime.verification.verify import bounds_of, verify

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
OPTIONS = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a letter."""
    letters = ["<pad>", "</s>", *string.ascii_lowercase]
    core = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(letters)}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>")


def word(draw: random.Random, longest: int) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, longest)))


def judged() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [
        {"prompt": word(draw, 8), "completion": word(draw, 9), "label": draw.random() < 0.6}
        for _ in range(24)
    ]


def group(folder: Path, steps: int, **fields: Any) -> list[Job]:
    """A job of kto, one that smooths its labels, and a plain one."""
    base, draw = tiny_base(folder / "base"), random.Random(1)
    texts = [{"text": word(draw, 12) + "ab"} for _ in range(24)]
    for name, rows in (("judged", judged()), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settled = {"shuffle": False, "gradient_accumulation_steps": 2, "max_steps": steps, **fields}
    own = {
        "kto": ("judged", {"method": "kto", **OPTIONS, "per_device_train_batch_size": 3}),
        "smooth": ("texts", {"label_smoothing_factor": 0.2, "seed": 3}),
        "plain": ("texts", {"seed": 5}),
    }
    return [
        make_job(base, name, lora=LORA, **settled | more).model_copy(
            update={"data": DataSpec(path=str(folder / f"{data}.jsonl"))}
        )
        for name, (data, more) in own.items()
    ]


def data_of(jobs: list[Job], tokenizer: Any) -> dict[str, JobData]:
    return {job.name: load_job_data(job, tokenizer) for job in jobs}


def test_jobs_train_as_they_would_alone(tmp_path: Path, tokenizer: Any) -> None:
    """With dropout and without, against plain PEFT and the formulas of TRL and torch."""
    jobs = group(tmp_path, steps=2)
    dropping = [job.model_copy(update={"lora": {**LORA, "lora_dropout": 0.2}}) for job in jobs]
    rows = list(verify(dropping, 2, device="cpu", data=data_of(dropping, tokenizer)))

    assert len(rows) == 6
    beyond = [row for row in rows if not row.within(bounds_of("float64", "cpu"))]
    assert not beyond, "\n".join(map(str, beyond))
    # transformers' own loss, of the plain job, is in float32.
    assert max(row.gradient for row in rows if row.job != "plain") < 1e-11


class Start(TrainerCallback):
    """Keeps what every adapter starts from."""

    def started(self, runs: Any) -> None:
        self.adapters = {
            run.job.name: {k: v.clone() for k, v in adapter_tensors(run.parameters).items()}
            for run in runs
        }


@pytest.mark.parametrize(("steps", "max_length"), [(12, 1024), (4, 10)])
def test_a_job_of_kto_trains_as_by_trl(
    tmp_path: Path, tokenizer: Any, steps: int, max_length: int
) -> None:
    """Steps in float64 beside others, against TRL's own trainer on texts of its own.

    Completions that are cut are compared with other, shorter prompts as far as these have room.
    """
    options = {"lr_scheduler_type": "constant", "max_length": max_length}
    jobs, start = group(tmp_path, steps=steps, **options), Start()
    model = compile(jobs)
    trainer = Trainer(model, output=tmp_path / "run", data=data_of(jobs, tokenizer), callback=start)
    mine = adapter_tensors(trainer.run()[0].parameters)
    wrapped = get_peft_model(plain_base(model.backbone), jobs[0].lora_config())
    set_peft_model_state_dict(wrapped, start.adapters["kto"])
    losses = trained_by_trl(wrapped, tokenizer, tmp_path, max_steps=steps, max_length=max_length)
    theirs = get_peft_model_state_dict(wrapped)

    assert losses_of(tmp_path / "run", jobs)["kto"] == pytest.approx(losses, abs=1e-6)
    assert max(float((theirs[name] - mine[name]).abs().max()) for name in mine) < 1e-5


def trained_by_trl(model: Any, tokenizer: Any, folder: Path, **fields: Any) -> list[float]:
    """The losses of TRL's KTOTrainer on the same rows in the same order."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    args = KTOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=3,
        gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="constant",
        weight_decay=0.0, logging_steps=1, report_to=[], use_cpu=True, bf16=False, fp16=False,
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, **OPTIONS, **fields,
    )  # fmt: skip
    trainer = KTOTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(judged()),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def kto_by_hand(logps: list[torch.Tensor], base: list[torch.Tensor], wanted: list[bool]) -> Any:
    """Equation 7 of KTO, sample by sample, as TRL estimates the divergence."""
    half = len(wanted)
    gains = [own - other for own, other in zip(logps, base, strict=True)]
    far = max(sum(float(gain) for gain in gains[half:]) / half, 0.0)
    total = logps[0].new_zeros(())
    for gain, good in zip(gains[:half], wanted, strict=True):
        value = torch.sigmoid(OPTIONS["beta"] * ((gain - far) if good else (far - gain)))
        weight = OPTIONS["desirable_weight" if good else "undesirable_weight"]
        total = total + weight * (1 - value)
    return total


def kto_by_peft(backbone: Any, job: Job, start: Any, batch: Batch) -> tuple[float, Any]:
    """Loss and adapter after one step of a batch, by PEFT alone in rows of one sequence."""
    model = get_peft_model(plain_base(backbone), job.lora_config())
    set_peft_model_state_dict(model, {name: each.clone() for name, each in start.items()})
    total, count = 0.0, 0
    for micro in batch.micro_batches:
        prompts = [next(at for at, x in enumerate(each.labels) if x != -100) for each in micro]
        lines = [(each.input_ids, start) for each, start in zip(micro, prompts, strict=True)]
        for at, each in enumerate(micro):
            donor = micro[at - 1].input_ids[prompts[at - 1] :]
            lines.append(((*each.input_ids[: prompts[at]], *donor), prompts[at]))

        def scored(lines: Any = lines) -> list[torch.Tensor]:
            found = []
            for ids, first in lines:
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                found.append(sum(logits[at - 1, ids[at]] for at in range(max(first, 1), len(ids))))
            return found

        with torch.no_grad(), model.disable_adapter():
            base = scored()
        total = total + kto_by_hand(scored(), base, [bool(each.desirable) for each in micro])
        count += len(micro)
    (total / count).backward()
    after = {
        name.replace(".default", ""): each.detach() - each.grad
        for name, each in model.named_parameters()
        if each.requires_grad
    }
    return float(total.detach() / count), after


def judged_samples(key: str, count: int) -> list[Any]:
    draw = random.Random(key)
    drawn = draw_samples(key, 9, count)
    return [replace(each, desirable=draw.random() < 0.5) for each in drawn]


@pytest.mark.parametrize("seed", [0, 1])
def test_kto_of_an_own_loop_equals_plain_peft(tmp_path: Path, seed: int) -> None:
    """Three jobs of other losses in a row, two micro-batches, gathered by two calls, float64."""
    base, draw = tiny_base(tmp_path), random.Random(seed)
    jobs = [job_of(base, name, rank) for name, rank in (("kto", 4), ("smooth", 2), ("plain", 3))]
    samples = judged_samples(f"kto {seed}", 7)
    cut = draw.randint(2, 5)
    batch = Batch([samples[:cut], samples[cut:]], loss="kto", loss_options=OPTIONS)
    texts = Batch(
        [draw_samples(f"texts {seed}", 9, 4)],
        loss="cross_entropy",
        loss_options={"label_smoothing": 0.3},
    )
    others = {"smooth": texts, "plain": Batch([draw_samples(f"plain {seed}", 9, 3)])}
    step = GroupStep(compile(jobs), device="cpu")
    step.prepare()
    for name in ("kto", "smooth"):  # adapters start without a difference from the base
        for each in step.member(name).parameters.values():
            each.data.add_(0.1 * torch.randn_like(each, generator=None))
    start = {name: step.member(name).final_adapter() for name in ("kto", "smooth", "plain")}
    out = step.accumulate({"kto": batch, **others})
    step.apply({job.name: {} for job in jobs})
    loss, after = kto_by_peft(step.model.backbone, jobs[0], start["kto"], batch)

    assert out["kto"].terms == 7
    assert out["kto"].loss == pytest.approx(loss, abs=1e-9)
    adapter = step.member("kto").final_adapter()
    assert max(float((adapter[name] - after[name]).abs().max()) for name in after) < 1e-7
    assert [len(of) for of in out["kto"].logprobs] == [
        sum(label != -100 for label in each.labels[1:]) for each in samples
    ]
    assert_smooth(step, jobs[1], start["smooth"], texts, out["smooth"].loss)
    plain = by_peft(step.model.backbone, jobs[2], start["plain"], [others["plain"]])
    assert out["plain"].loss == pytest.approx(plain[0], abs=1e-9)


def assert_smooth(step: GroupStep, job: Job, start: Any, batch: Batch, loss: float) -> None:
    """The loss, and the adapter after a step, are those of torch's smoothed cross entropy."""
    model = get_peft_model(plain_base(step.model.backbone), job.lora_config())
    set_peft_model_state_dict(model, {name: each.clone() for name, each in start.items()})
    samples = [each for micro in batch.micro_batches for each in micro]
    count = sum(label != -100 for each in samples for label in each.labels[1:])
    total = sum(
        torch.nn.functional.cross_entropy(
            model(torch.tensor([each.input_ids])).logits[0, :-1],
            torch.tensor(each.labels[1:]),
            reduction="sum",
            label_smoothing=0.3,
        )
        for each in samples
    )
    (total / count).backward()
    assert loss == pytest.approx(float(total.detach() / count), abs=1e-9)
    adapter = step.member(job.name).final_adapter()
    for name, each in model.named_parameters():
        if each.requires_grad:
            mine = adapter[name.replace(".default", "")]
            torch.testing.assert_close(mine, each.detach() - each.grad, rtol=0, atol=1e-7)


def test_evaluations_compare_and_neighbours_are_as_alone(tmp_path: Path, tokenizer: Any) -> None:
    """eval_loss of kto is its loss; that of smoothed labels is the plain cross entropy."""
    jobs = group(tmp_path, steps=2, eval_split=0.25, eval_steps=1)
    data = data_of(jobs, tokenizer)
    Trainer(compile(jobs), output=tmp_path / "run", data=data, device="cpu").run()
    Trainer(compile(jobs[2:]), output=tmp_path / "alone", data=data, device="cpu").run()

    # Without a margin each sample costs half of its weight.
    taken = data["kto"].samples[:6]
    weights = [1.5 if sample.desirable else 0.5 for sample in taken]
    first = losses_of(tmp_path / "run", jobs)["kto"][0]
    assert first == pytest.approx(sum(weights) / 12, abs=1e-12)
    evaluated = evaluations_of(tmp_path / "run", jobs)
    assert [0.2 < row["eval_loss"] < 0.8 for row in evaluated["kto"]] == [True, True]
    plain, smooth = (evaluated[name][0]["eval_loss"] for name in ("plain", "smooth"))
    assert smooth == pytest.approx(plain, rel=0.05)
    alone = losses_of(tmp_path / "alone", jobs[2:])["plain"]
    assert losses_of(tmp_path / "run", jobs)["plain"] == pytest.approx(alone, abs=1e-12)


def test_what_kto_cannot_train_is_refused(tmp_path: Path) -> None:
    """Samples without a judgement, batches of one, adapters that have no base beside them."""
    base = tiny_base(tmp_path)
    jobs = [make_job(base, "a"), make_job(base, "dora", lora={"r": 2, "use_dora": True})]
    step = GroupStep(compile(jobs), device="cpu")
    plain, samples = draw_samples("x", 6, 2), judged_samples("y", 2)

    with pytest.raises(StepMisuse, match="sample 0 does not fit the loss kto"):
        step.accumulate({"a": Batch([plain], loss="kto")})
    with pytest.raises(StepMisuse, match="base alone is not at hand"):
        step.accumulate({"dora": Batch([samples], loss="kto")})
    with pytest.raises(StepMisuse, match="base alone is not at hand"):
        step.score({"dora": [samples]}, by_base=True)
    for fields, told in (
        ({"method": "kto", "per_device_train_batch_size": 1}, "a batch has one sample"),
        ({"method": "kto", "lora": {"use_dora": True}}, "'use_dora' changes beside A and B"),
        ({"method": "kto", "label_smoothing_factor": 0.1}, "needs method sft"),
        ({"desirable_weight": 2.0}, "needs method kto"),
    ):
        with pytest.raises(JobError, match=told):
            make_job(base, "b", **fields)
