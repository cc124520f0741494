"""The solo trainer that `verify` compares with, held against simpler code still."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from tests.alone import SoloRun, train_alone
from tlora_fx.config.job import BaseSpec, DataSpec, Job
from tlora_fx.errors import OracleError
from tlora_fx.runtime.data.sample_order import SampleOrder, in_another_layout, lines_of
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.verification.solo import SoloTrainer

VOCABULARY, STEPS = 37, 3
DROPPED = ("llama", "gpt2", "opt", "gemma2", "mistral", "plain")


class PlainModel(nn.Module):
    """A causal model that knows nothing of transformers: ids [B, S] to logits [B, S, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Each position sees the mean of what came before it."""
        hidden = self.embed(ids).cumsum(1)
        places = torch.arange(1, ids.shape[1] + 1, dtype=hidden.dtype)[:, None]
        return self.head(self.drop(torch.tanh(self.mix(hidden / places))))


def model_of(kind: str) -> nn.Module:
    """A tiny base in float64 with dropout wherever its kind has it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "attention_dropout": 0.2,
    }
    if kind == "llama":
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=3))
    elif kind == "gemma2":
        soft = {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4, "sliding_window": 3}
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, **soft, pad_token_id=0))
    elif kind == "gpt2":
        config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=4)
        model = GPT2LMHeadModel(config)
    elif kind == "opt":
        small = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "pad_token_id": 1}
        rates = {"dropout": 0.1, "attention_dropout": 0.2, "word_embed_proj_dim": 16}
        model = OPTForCausalLM(
            OPTConfig(
                vocab_size=VOCABULARY,
                num_attention_heads=4,
                max_position_embeddings=64,
                **small,
                **rates,
            )
        )
    else:
        model = PlainModel()
    return model.double()


TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "mistral": ["q_proj", "v_proj"],
    "gemma2": ["q_proj", "v_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "opt": ["q_proj", "fc1"],
    "plain": ["mix"],
}


def job_of(kind: str, lora: dict[str, Any] | None = None, **fields: Any) -> Job:
    """A job on a tiny base, with dropout on its adapters."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": 3,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "seed": 5,
        "shuffle": False,
        "max_steps": 8,
    }
    adapter = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.3, "target_modules": TARGETS[kind]}
    return Job(
        name="job",
        base=BaseSpec(model="base", dtype="float64"),
        lora=adapter | (lora or {}),
        data=DataSpec(path="data.jsonl"),
        **given | fields,
    )


def data_of(job: Job, lengths: tuple[int, ...] = (5, 9, 2, 7, 3, 6)) -> JobData:
    """Sequences of these lengths, the first two tokens of each without loss."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for length in lengths:
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        free = min(2, length - 1)
        samples.append(Sample(tuple(ids), (*[-100] * free, *ids[free:])))
    return JobData(job, samples, DataReport())


def wrapped(job: Job, base: nn.Module) -> peft.PeftModel:
    """The base with the job's adapter, none of whose tensors is zero."""
    config = job.lora_config()
    config.task_type = None
    model = peft.get_peft_model(copy.deepcopy(base), config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def start_of(job: Job, base: nn.Module) -> dict[str, Tensor]:
    """The tensors of `wrapped`, by PEFT's names."""
    state = peft.get_peft_model_state_dict(wrapped(job, base), save_embedding_layers=False)
    return {name: tensor.clone() for name, tensor in state.items()}


def run(kind: str, job: Job, *, masks: bool, **data: Any) -> SoloRun:
    """Train a job on a tiny base of its kind."""
    base = model_of(kind)
    return train_alone(job, base, data_of(job, **data), start_of(job, base), STEPS, masks)


def without_dropout(kind: str) -> nn.Module:
    """The tiny base as its config makes it with every rate at zero."""
    model = model_of(kind)
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@pytest.mark.parametrize("kind", DROPPED)
def test_without_masks_it_is_training_one_sample_at_a_time(kind):
    """Losses and adapters are those of unpadded samples, plain PEFT, and a loop by hand."""
    job = job_of(kind, lora={"lora_dropout": 0.0}, gradient_accumulation_steps=2, max_grad_norm=0.1)
    solo = run(kind, job, masks=False)

    model = wrapped(job, without_dropout(kind)).train()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + torch.tensor(torch.pi * step / 8).cos().item())
    )
    data = data_of(job)
    for step in range(STEPS):
        samples = [sample for batch in data.step(step) for sample in batch]
        count = sum(label != -100 for sample in samples for label in sample.labels[1:])
        optimizer.zero_grad()
        total = 0.0
        for sample in samples:
            out = model(torch.tensor([sample.input_ids]))
            logits = getattr(out, "logits", out)[0, :-1]
            loss = F.cross_entropy(logits, torch.tensor(sample.labels[1:]), reduction="sum") / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()
        schedule.step()
        assert solo.losses[step] == pytest.approx(total, rel=2e-6)
        assert solo.norms[step] == pytest.approx(norm.item(), rel=1e-5)
    adapters = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    for name, tensor in adapters.items():
        torch.testing.assert_close(solo.adapters[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", DROPPED)
def test_a_token_draws_one_mask_whatever_the_padding(kind):
    """Six samples in one padded batch train as three pairs, and as six batches of one."""
    runs = [
        run(kind, job_of(kind, **shape), masks=True)
        for shape in (
            {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6},
        )
    ]

    for other in runs[1:]:
        assert other.losses == pytest.approx(runs[0].losses, rel=1e-6)
        for ours, theirs in zip(other.gradients, runs[0].gradients, strict=True):
            for name in ours:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", DROPPED)
def test_masks_come_from_seed_and_step_alone(kind):
    """Two runs are bitwise equal whatever torch's generator did; another seed is another run."""
    torch.manual_seed(11)
    one = run(kind, job_of(kind), masks=True)
    torch.manual_seed(12)
    two = run(kind, job_of(kind), masks=True)
    other = run(kind, job_of(kind, seed=6), masks=True)
    none = run(kind, job_of(kind), masks=False)

    assert one.losses == two.losses
    assert all(torch.equal(one.adapters[name], two.adapters[name]) for name in one.adapters)
    assert one.losses[0] != other.losses[0]
    assert one.losses[0] != none.losses[0]
    assert none.losses == run(kind, job_of(kind, seed=6), masks=False).losses


@pytest.mark.parametrize(
    "lora",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all", "target_modules": ["c_attn"]},
        {"target_modules": ["wte", "c_attn"]},
    ],
    ids=["dora", "saved-head", "bias", "embedding"],
)
@pytest.mark.parametrize("masks", [False, True])
def test_all_that_a_job_trains_is_reported_by_pefts_names(lora, masks):
    """Gradients and adapters bear the names of the start, and all of it moves."""
    job = job_of("gpt2", lora=lora)
    base = model_of("gpt2")
    start = start_of(job, base)

    solo = train_alone(job, base, data_of(job), start, 1, masks)

    assert solo.gradients[0].keys() == solo.adapters.keys() == start.keys()
    assert all(not torch.equal(solo.adapters[name], start[name]) for name in start)
    assert all(solo.gradients[0][name].shape == start[name].shape for name in start)


@pytest.mark.parametrize("masks", [False, True])
def test_the_base_stays_as_it_was(masks):
    """Weights, biases, config, modes and hooks of the caller's model are not touched."""
    job = job_of("gpt2", lora={"bias": "all"})
    base = model_of("gpt2").eval()
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    config = copy.deepcopy(base.config.to_dict())

    train_alone(job, base, data_of(job), start_of(job, base), 1, masks)

    assert all(torch.equal(weights[name], tensor) for name, tensor in base.state_dict().items())
    assert base.config.to_dict() == config
    assert base.transformer.drop.p == 0.1
    assert not base.training
    assert all(param.requires_grad for param in base.parameters())
    assert not any(module._forward_hooks for module in base.modules())


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_a_start_of_another_job_is_refused(change):
    """Training from half an adapter would compare nothing."""
    job = job_of("llama")
    base = model_of("llama")
    start = start_of(job, base)
    name = min(start)
    if change == "shape":
        start[name] = start[name][:, :1]
    else:
        tensor = start.pop(name)
        if change == "unknown":
            start["another." + name] = tensor

    with pytest.raises(OracleError, match=name.replace(".", r"\.")):
        train_alone(job, base, data_of(job), start, 1, masks=False)


def test_a_schedule_of_lora_fa_ends_where_that_of_others_does():
    """PEFT's maker of the optimizer leaves the rate out where schedules read it."""
    job = job_of("gpt2", optim="lorafa", lr_scheduler_type="polynomial", max_steps=2)
    base = model_of("gpt2")
    solo = SoloTrainer(job, base, data_of(job), start_of(job, base), masks=False)

    for step in range(2):
        solo.gradients(solo.order.batches(step), step)
        solo.update()

    assert solo._schedule.get_last_lr() == [pytest.approx(1e-7)]


@given(
    count=st.integers(1, 30),
    batch=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    shuffle=st.booleans(),
    epochs=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_its_order_of_samples_is_the_trainers(count, batch, accumulation, shuffle, epochs):
    """Two writings of one definition agree on every step, and on their number."""
    job = job_of(
        "plain",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        shuffle=shuffle,
        max_steps=None,
        num_train_epochs=epochs,
    )
    data = data_of(job, tuple(range(2, count + 2)))
    order = SampleOrder(job, data.samples)

    assert order.steps == data.steps
    for step in range(data.steps):
        assert order.batches(step) == lines_of(data.step(step))


def test_another_layout_holds_the_same_step():
    """Each line alone, or beside a copy without targets, at its place in the step."""
    job = job_of("plain")
    first, second, third = data_of(job).samples[:3]

    pair, single = lines_of([[first, second], [third]])
    layout = in_another_layout([pair, single])

    assert [line.first for line in (*pair, *single)] == [0, 5, 14]
    assert layout[:2] == [[pair[0]], [pair[1]]]
    assert layout[2][0] == single[0]
    assert layout[2][1].ids == single[0].ids
    assert set(layout[2][1].labels) == {-100}
