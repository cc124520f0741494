"""A job alone, by plain transformers, PEFT and torch.optim: one sequence after the other, unpadded.

Nothing of tlora_fx is used but the base's weights, fields of the job, and keyed dropout masks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft
import torch
import torch.nn.functional as F
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer, lorafa
from torch import Tensor, nn
from transformers import Trainer, get_scheduler

from tests.silence.mixes.drawn import EPSILON
from tlora_fx.config.job import Job
from tlora_fx.runtime.data.samples import JobData, Sample
from tlora_fx.runtime.keyed_dropout import KeyedDropout, choose_attention

IGNORED = -100
CLASSES = {
    "adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad",
    "nadam": "NAdam", "radam": "RAdam", "adamax": "Adamax",
}  # fmt: skip
#: Starts that take a part of the base's weights away.
RESIDUAL = {"pissa", "olora"}


@dataclass
class Alone:
    """What a job came to.

    losses        of each step
    evaluations   loss over the evaluation samples after each step
    start, end    the trained tensors by the names of PEFT's files
    model         as it ended
    """

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)
    model: Any = None


def train_alone(
    job: Job, base: nn.Module, data: JobData, start: Mapping[str, Tensor], steps: int
) -> Alone:
    """Train a job for so many of its steps.

    base    with its weights; is changed
    start   the tensors that the job begins with; PEFT's own where they are computed from the base
    """
    model = _wrapped(job, base, start)
    drop = KeyedDropout(model, job.seed, pools=job.base.is_classifier)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(job, model, trained)
    schedule = get_scheduler(
        str(job.lr_scheduler_type), optimizer,
        num_warmup_steps=int(job.warmup_steps), num_training_steps=job.max_steps,
    )  # fmt: skip
    alone = Alone(start=_saved(model), model=model)
    size = job.per_device_train_batch_size * job.gradient_accumulation_steps
    for step in range(steps):
        samples = data.samples[step * size : (step + 1) * size]
        model.train()
        alone.losses.append(_gradients(model, job, samples, drop, step))
        _regularise(model, job)
        if job.max_grad_norm:
            # LoRA-FA's A has no gradient.
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        with mock.patch.object(lorafa, "is_bf16_available", return_value=False):
            optimizer.step()
        if _kind(job) == "ADALORA":
            model.base_model.update_and_allocate(step)
        schedule.step()
        optimizer.zero_grad()
        if data.evaluation:
            with torch.no_grad():
                alone.evaluations.append(_loss(model.eval(), job, data.evaluation))
    alone.end = _saved(model)
    return alone


def _kind(job: Job) -> str:
    return str((job.lora or {}).get("peft_type", "LORA"))


def _wrapped(job: Job, base: Any, start: Mapping[str, Tensor]) -> Any:
    """PEFT's model of a job, in float64."""
    fields = {key: value for key, value in (job.lora or {}).items() if key != "peft_type"}
    if job.base.is_classifier:
        base.config.pad_token_id = None  # each line is by itself
    choose_attention(base)
    residual = fields.get("init_lora_weights") in RESIDUAL
    if residual:
        # PEFT computes such a start in float32, and rounds what it leaves of the base.
        start = _saved(_by_peft(job, copy.deepcopy(base).float(), fields))
        fields["init_lora_weights"] = True
    model = _by_peft(job, base, fields)
    with _without_allocation(model):
        known = peft.set_peft_model_state_dict(model, dict(start))
    assert not known.unexpected_keys, known.unexpected_keys
    assert _saved(model).keys() == start.keys()
    for name, module in model.named_modules():
        if residual and len(getattr(module, "lora_A", ())):
            with torch.no_grad():
                module.base_layer.weight -= module.get_delta_weight("default")
        if name.endswith("ranknum"):
            module.requires_grad_(False)  # PEFT trains it in float64 alone
    return model


def _by_peft(job: Job, base: Any, fields: Mapping[str, Any]) -> Any:
    """PEFT's model in the base's dtype, as it starts."""
    make = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[_kind(job)]
    if _kind(job) == "VERA":
        fields = {**fields, "save_projection": False}
    task = "SEQ_CLS" if job.base.is_classifier else "CAUSAL_LM"
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        return peft.get_peft_model(base, make(task_type=task, **fields)).to(base.dtype)


def _without_allocation(model: Any) -> Any:
    """Within this, all ranks of an AdaLoRA are saved and loaded, those taken away too."""
    config = model.peft_config["default"]
    plain = config.peft_type != "ADALORA"
    return nullcontext() if plain else mock.patch.object(config, "rank_pattern", None)


def _saved(model: Any) -> dict[str, Tensor]:
    with _without_allocation(model):
        state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _optimizer(job: Job, model: Any, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    decay, lora = job.weight_decay, job.lora or {}
    if job.optim == "lorafa":
        optimizer: torch.optim.Optimizer = create_lorafa_optimizer(
            model, lora["r"], lora["lora_alpha"], job.learning_rate, decay, lora["use_rslora"]
        )
        optimizer.param_groups[0]["eps"] = EPSILON
        optimizer.defaults["lr"] = job.learning_rate  # from which a schedule's end is reckoned
        return optimizer
    make = getattr(torch.optim, CLASSES[str(job.optim)])
    arguments = {"lr": job.learning_rate} | ({} if job.optim == "sgd" else {"eps": EPSILON})
    if job.loraplus_lr_ratio is None:
        decayed = set(Trainer.get_decay_parameter_names(None, model))
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        return make([group for group in groups if group["params"]], **arguments)
    optimizer = create_loraplus_optimizer(
        model, make, loraplus_lr_ratio=job.loraplus_lr_ratio, loraplus_weight_decay=decay,
        **arguments,
    )  # fmt: skip
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _gradients(
    model: Any, job: Job, samples: Sequence[Sample], drop: KeyedDropout, step: int
) -> float:
    """Add the gradients of a step; its loss."""
    count, first, total = _targets(job, samples), 0, 0.0
    for sample in samples:
        index = torch.arange(first, first + len(sample.input_ids))[None]
        first += len(sample.input_ids)
        with drop.row(step, index):
            loss = _sum(model, job, sample) / count
        loss.backward()
        total += loss.item()
    return total


def _loss(model: Any, job: Job, samples: Sequence[Sample]) -> float:
    total = sum(float(_sum(model, job, sample)) for sample in samples)
    return total / _targets(job, samples)


def _targets(job: Job, samples: Sequence[Sample]) -> int:
    shift = 0 if job.base.is_classifier else 1
    return sum(label != IGNORED for sample in samples for label in sample.labels[shift:])


def _sum(model: Any, job: Job, sample: Sample) -> Tensor:
    """The cross entropies of a sequence, added up."""
    logits = model(input_ids=torch.tensor([sample.input_ids]), use_cache=False).logits[0]
    labels = torch.tensor(sample.labels)
    if job.base.is_classifier:
        return F.cross_entropy(logits, labels[-1])
    return F.cross_entropy(logits[:-1], labels[1:], reduction="sum")


def _regularise(model: Any, job: Job) -> None:
    """Add once a step the gradient of what PEFT adds to the loss of an AdaLoRA."""
    if _kind(job) != "ADALORA":
        return
    tuner, outputs = model.base_model, SimpleNamespace(loss=torch.zeros(()))
    with mock.patch.object(tuner.model, "forward", return_value=outputs):
        tuner.forward().loss.backward()
