"""Method reward: equal to plain PEFT with torch, alone, beside a classifier, and as by TRL."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, set_peft_model_state_dict
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.runtime.groups import draw_samples, evaluations_of, losses_of, make_job
from tests.runtime.groups import tiny_base as causal_base
from tests.runtime.test_kto import Start, data_of, tokenizer, word
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec, DataSpec, Job
from tlora_fx.errors import JobError, MalformedRowError, StepMisuse
from tlora_fx.model.batch import JobTokens, pack
from tlora_fx.model.loss import row_losses
from tlora_fx.model.preference import Preference
from tlora_fx.runtime.adapters.files import base_tensors, canonical_names
from tlora_fx.runtime.data.samples import Sample, load_job_data
from tlora_fx.runtime.group_step import Batch, GroupStep
from tlora_fx.runtime.trainer import Trainer
from tlora_fx.runtime.verification.verify import bounds_of, verify

__all__ = ["tokenizer"]

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
NUMBERS = st.floats(-20, 20, width=32)


def bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def scoring_base(folder: Path, **fields: Any) -> BaseSpec:
    """A Llama with a head of one number; token 0 pads."""
    base = causal_base(folder, pad_token_id=0, num_hidden_layers=1)
    return BaseSpec(config=base.config, dtype="float64", seed=7, task="SEQ_CLS", labels=1, **fields)


def pairs(count: int = 24, margins: bool = True) -> list[dict[str, Any]]:
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        prompt = word(draw, 6)
        row = {"chosen": prompt + "a" + word(draw, 5), "rejected": prompt + "b" + word(draw, 7)}
        rows.append(row | ({"margin": draw.choice([0.0, 0.25, 1.5])} if margins else {}))
    return rows


def group(folder: Path, **fields: Any) -> list[Job]:
    """A job that learns rewards, with margins and without, and one that learns numbers."""
    base, draw = scoring_base(folder / "base"), random.Random(1)
    texts = [{"text": word(draw, 9), "label": draw.uniform(-2, 2)} for _ in range(24)]
    rows = {"margins": pairs(), "plain": pairs(margins=False), "numbers": texts}
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, each)))
    settled = {"shuffle": False, "gradient_accumulation_steps": 2, "max_steps": 4, **fields}
    reward = {"method": "reward", "per_device_train_batch_size": 3}
    own = {"margins": reward, "plain": {**reward, "seed": 3}, "numbers": {"seed": 5}}
    return [
        make_job(base, name, lora=LORA, **settled | more).model_copy(
            update={"data": DataSpec(path=str(folder / f"{name}.jsonl"))}
        )
        for name, more in own.items()
    ]


def plain_model(backbone: Any) -> Any:
    """The base by transformers' own class."""
    config = AutoConfig.from_pretrained(backbone.spec.config, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64)
    values, canonical = base_tensors(backbone), canonical_names(backbone)
    with torch.no_grad():
        for key, parameter in model.named_parameters(remove_duplicate=False):
            parameter.copy_(values[canonical[key]])
    return model


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.01, 1.5]),
)
def test_pairs_are_compared_as_by_trl(
    drawn: list[tuple[float, float, float]], center: float
) -> None:
    """From the numbers of two sequences and a margin, whatever other targets stand beside."""
    labels = [own for *_, margin in drawn for own in ((-100, bits(margin)), (-100, bits(0.0)))]
    other = JobTokens([(1, 2)], [(-100, bits(0.5))], shift=0)
    preference = Preference("reward", center=center)
    mine = JobTokens([(1, 2)] * len(labels), labels, shift=0, preference=preference)
    row = pack([other, mine]).to("cpu")
    scores = torch.tensor([0.25, *(x for one in drawn for x in one[:2])], dtype=torch.float64)
    scores.requires_grad_()

    losses = row_losses(scores[:, None], row.targets, "regression")
    assert float(losses[0]) == 0.0625
    [own] = row.pairs
    found = own.loss(losses[1:])
    margins = torch.tensor([margin for *_, margin in drawn], dtype=torch.float64)
    expected = -F.logsigmoid(scores[1::2] - scores[2::2] - margins).sum()
    expected = expected + center * ((scores[1::2] + scores[2::2]) ** 2).sum()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [
        torch.autograd.grad(each, scores, retain_graph=True)[0] for each in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_jobs_train_as_they_would_alone(tmp_path: Path, tokenizer: Any) -> None:
    """With dropout and without, and with DoRA, against plain PEFT and TRL's formula."""
    jobs = group(tmp_path)
    dropping = [job.model_copy(update={"lora": {**LORA, "lora_dropout": 0.2}}) for job in jobs]
    dropping[0] = dropping[0].model_copy(update={"center_rewards_coefficient": 0.3})
    dropping[1] = dropping[1].model_copy(update={"lora": {**LORA, "use_dora": True}})
    rows = list(verify(dropping, 2, device="cpu", data=data_of(dropping, tokenizer)))

    assert len(rows) == 6
    beyond = [row for row in rows if not row.within(bounds_of("float64", "cpu"))]
    assert not beyond, "\n".join(map(str, beyond))
    assert max(row.gradient for row in rows) < 1e-11


@pytest.mark.parametrize(("index", "center"), [(0, 0.2), (1, None)])
def test_a_reward_model_trains_as_by_trl(
    tmp_path: Path, tokenizer: Any, index: int, center: float | None
) -> None:
    """In float64 beside others, against TRL's own trainer on texts; PEFT loads what it leaves."""
    jobs, start = group(tmp_path, max_steps=4, lr_scheduler_type="constant"), Start()
    jobs[index] = jobs[index].model_copy(update={"center_rewards_coefficient": center})
    model = compile(jobs)
    trainer = Trainer(model, output=tmp_path / "run", data=data_of(jobs, tokenizer), callback=start)
    trainer.run()
    name = jobs[index].name
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, **jobs[index].lora_fields)
    wrapped = get_peft_model(plain_model(model.backbone), lora)
    set_peft_model_state_dict(wrapped, start.adapters[name])
    losses = trained_by_trl(wrapped, tokenizer, pairs(margins=index == 0), tmp_path, center)

    assert losses_of(tmp_path / "run", jobs)[name] == pytest.approx(losses, abs=1e-6)
    loaded = PeftModel.from_pretrained(plain_model(model.backbone), tmp_path / "run" / name)
    ids = torch.tensor([[5, 6, 7, 1]])
    scores = [each.eval()(input_ids=ids).logits for each in (loaded, wrapped)]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


def trained_by_trl(
    model: Any, tokenizer: Any, rows: list[Any], folder: Path, center: float | None
) -> list[float]:
    """The losses of TRL's RewardTrainer on the same rows in the same order."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    args = RewardConfig(
        output_dir=str(folder / "trl"), max_steps=4, per_device_train_batch_size=3,
        gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="constant",
        weight_decay=0.0, logging_steps=1, report_to=[], use_cpu=True, bf16=False, fp16=False,
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
        center_rewards_coefficient=center,
    )  # fmt: skip
    trainer = RewardTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(
        trainer.train_dataset
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def scored(key: str, count: int) -> list[Sample]:
    """Pairs for a loop of one's own; each chosen one has a margin."""
    draw, samples = random.Random(key), []
    for at, each in enumerate(draw_samples(key, 9, 2 * count)):
        margin = 0 if at % 2 else bits(draw.choice([0.0, 0.5]))
        samples.append(Sample(each.input_ids, (*[-100] * (len(each.input_ids) - 1), margin)))
    return samples


def test_rewards_in_an_own_loop_equal_plain_peft(tmp_path: Path) -> None:
    """Two jobs, one of them centered, two micro-batches gathered by two calls, float64."""
    base, draw = scoring_base(tmp_path), random.Random(0)
    jobs = [
        make_job(base, name, lora=LORA, method="reward", optim="sgd", learning_rate=1.0,
                 lr_scheduler_type="constant", max_grad_norm=None,
                 center_rewards_coefficient=center)
        for name, center in (("a", None), ("b", 0.3))
    ]  # fmt: skip
    step = GroupStep(compile(jobs), device="cpu")
    step.prepare()
    starts = {job.name: dict(step.member(job.name).final_adapter()) for job in jobs}
    starts = {name: {k: v.clone() for k, v in own.items()} for name, own in starts.items()}
    counts = {job.name: [draw.randint(1, 4) for _ in range(2)] for job in jobs}
    batches = {
        name: [scored(f"{name} {at}", count) for at, count in enumerate(own)]
        for name, own in counts.items()
    }
    losses = dict.fromkeys(batches, 0.0)
    for at in range(2):
        calls = {n: Batch([own[at]], normalizer=sum(counts[n])) for n, own in batches.items()}
        for name, out in step.accumulate(calls).items():
            assert out.error is None
            losses[name] += out.loss
    step.apply({job.name: {} for job in jobs})

    for job in jobs:
        model = get_peft_model(
            plain_model(step.model.backbone),
            LoraConfig(task_type=TaskType.SEQ_CLS, **job.lora_fields),
        )
        set_peft_model_state_dict(model, starts[job.name])
        total = torch.zeros((), dtype=torch.float64)
        for samples in batches[job.name]:
            found = [model(torch.tensor([each.input_ids])).logits.squeeze() for each in samples]
            for pair in range(0, len(samples), 2):
                [margin] = struct.unpack("<f", struct.pack("<i", samples[pair].labels[-1]))
                total = total - F.logsigmoid(found[pair] - found[pair + 1] - margin)
                if job.name == "b":
                    total = total + 0.3 * (found[pair] + found[pair + 1]) ** 2
        total = total / sum(counts[job.name])
        total.backward()
        assert losses[job.name] == pytest.approx(float(total.detach()), abs=1e-9)
        after = {
            name.replace(".default", ""): (each - each.grad).detach()
            for name, each in model.named_parameters()
            if each.requires_grad
        }
        mine = step.member(job.name).final_adapter()
        assert any("score" in name for name in mine)
        for name, tensor in mine.items():
            [own] = [
                each for key, each in after.items() if key.replace(".modules_to_save", "") == name
            ]
            assert float((own - tensor).abs().max()) < 1e-7


@pytest.mark.parametrize("labels", [[(0, 0), (-100, 0)], [(-100, 0)]])
def test_what_is_no_pair_is_refused(tmp_path: Path, labels: list[tuple[int, ...]]) -> None:
    """Two labels of a sequence, or a sequence alone."""
    job = make_job(scoring_base(tmp_path), "a", lora=LORA, method="reward")
    step = GroupStep(compile([job]), device="cpu")
    step.prepare()

    with pytest.raises(StepMisuse, match="no pairs of which each sequence is read at one token"):
        step.accumulate({"a": [[Sample((3, 4), own) for own in labels]]})


def test_an_evaluation_says_how_often_the_chosen_one_has_more(
    tmp_path: Path, tokenizer: Any
) -> None:
    """A mean over pairs, and the part of them that is in order."""
    jobs = [job.model_copy(update={"eval_split": 0.25}) for job in group(tmp_path)[:2]]
    jobs = [job.model_copy(update={"eval_strategy": "epoch"}) for job in jobs]
    Trainer(compile(jobs), output=tmp_path / "run", data=data_of(jobs, tokenizer)).run()

    for rows in evaluations_of(tmp_path / "run", jobs).values():
        assert rows[-1]["eval_accuracy"] * 6 == round(rows[-1]["eval_accuracy"] * 6)
        assert 0 < rows[-1]["eval_loss"] < 3


def test_a_longer_text_is_left_out_with_its_pair(tmp_path: Path, tokenizer: Any) -> None:
    """As by TRL: its number would be that of another token."""
    job = group(tmp_path, max_length=12)[0]
    data = load_job_data(job, tokenizer)

    long = sum(max(len(row["chosen"]), len(row["rejected"])) + 1 > 12 for row in pairs())
    assert 0 < long < 24
    assert data.report.dropped_without_target == long


def test_a_margin_is_a_number(tmp_path: Path, tokenizer: Any) -> None:
    """Else the row is named."""
    job = group(tmp_path)[0]
    Path(job.data.path).write_text('{"chosen": "ab", "rejected": "ac", "margin": "much"}\n')

    with pytest.raises(MalformedRowError, match="margin 'much' is no number"):
        load_job_data(job, tokenizer)


@pytest.mark.parametrize(
    ("method", "value", "error"),
    [("dpo", 0.01, "needs method reward"), ("reward", -1.0, "0 <= n")],
)
def test_rewards_alone_are_centered(tmp_path: Path, method: str, value: float, error: str) -> None:
    """By a weight that pulls to zero, and does not push away."""
    base = {"reward": scoring_base, "dpo": causal_base}[method](tmp_path)
    given = {"method": method, "center_rewards_coefficient": value}
    with pytest.raises(JobError, match=error):
        Job("a", base=base, lora=4, data="x.jsonl", **given)


@pytest.mark.parametrize("base", [{}, {"task": "SEQ_CLS", "labels": 2}])
def test_rewards_need_a_head_of_one_number(base: dict[str, Any]) -> None:
    """The error says how to have one."""
    with pytest.raises(JobError, match="task='SEQ_CLS' and labels=1"):
        Job("a", base=BaseSpec(model="org/model", **base), lora=4, data="x.jsonl", method="reward")
