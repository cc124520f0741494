"""A job trained alone, by plain transformers, PEFT and torch.optim: what `verify` compares with.

Nothing here compiles, packs or fuses. Rows are padded on the right, the model is called as any
user would call it, and a transformers model takes its own loss. With masks on, every dropout draws
the job's keyed masks instead of a generator's (see oracle_masks.py); the rest stays as it is.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlora_fx.errors import OracleError
from tlora_fx.runtime.oracle_masks import (
    EAGER,
    KeyedDropout,
    has_attention_dropout,
    register_attention,
)

if TYPE_CHECKING:
    from peft import PeftModel

    from tlora_fx.config.job import Job
    from tlora_fx.runtime.data import JobData, Sample

NO_TARGET = -100
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
Watch = Callable[[int, float, dict[str, Tensor]], None]


@dataclass(slots=True)
class SoloRun:
    """What a job did alone.

    losses      loss of each step: sum over its targets divided by their number
    norms       2-norm of each step's gradients, before clipping
    gradients   of each step before clipping, by the names of `adapters`; empty with a watcher
    adapters    the trained tensors after the last step, as PEFT's get_peft_model_state_dict
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    adapters: dict[str, Tensor] = field(default_factory=dict)


def train_alone(
    job: Job,
    base_model: nn.Module,
    data: JobData,
    start: Mapping[str, Tensor],
    steps: int,
    masks: bool,
    watch: Watch | None = None,
) -> SoloRun:
    """Train a job by itself for some steps from its start.

    base_model   a transformers causal LM, or any module from ids [B, S] to logits [B, S, V], with
                 real weights; neither it nor its config is changed, and its matrices are shared
    data         the job's batches; its `steps` are the length of the schedule
    start        every tensor that the job trains, by PEFT's names
    masks        True: dropout as the job file says, by keyed masks; False: every rate is zero
    watch        called with (step, loss, gradients) after each backward, in place of keeping them
    raises       OracleError when `start` does not fit, or a dropout has no keyed masks
    """
    own = _own_copy(base_model)
    if not masks:
        _silence_dropout(own)
    _choose_attention(own)
    model = _wrapped(job, own, masks)
    _load_start(model, start)
    model.train()
    drop = KeyedDropout(model, job.seed) if masks else None
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer, schedule = _optimizer(job, params, data.steps)
    run = SoloRun()
    for step in range(steps):
        optimizer.zero_grad()
        loss = _backward(model, data.step(step), drop, step)
        gradients = _gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(params, job.max_grad_norm or float("inf"))
        optimizer.step()
        schedule.step()
        run.losses.append(loss)
        run.norms.append(float(norm))
        if watch is None:
            run.gradients.append(gradients)
        else:
            watch(step, loss, gradients)
    run.adapters = {name: tensor.detach().clone() for name, tensor in _saved(model).items()}
    return run


def _backward(
    model: PeftModel,
    micro_batches: Sequence[Sequence[Sample]],
    drop: KeyedDropout | None,
    step: int,
) -> float:
    """Add the gradients of one optimizer step; returns its loss."""
    samples = [sample for batch in micro_batches for sample in batch]
    targets = sum(label != NO_TARGET for sample in samples for label in sample.labels[1:])
    device = next(model.parameters()).device
    total, offset = 0.0, 0
    for batch in micro_batches:
        ids, labels, attended = (part.to(device) for part in pad(batch))
        index = token_index(batch, offset, ids.shape[1]).to(device)
        offset += sum(len(sample.input_ids) for sample in batch)
        with nullcontext() if drop is None else drop.row(step, index):
            loss = _loss(model, ids, labels, attended, targets)
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def pad(batch: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels and attention mask, int64 [B, S], padded on the right to the longest sample."""
    width = max(len(sample.input_ids) for sample in batch)

    def rows(parts: Sequence[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*part, *[fill] * (width - len(part))] for part in parts])

    ids = rows([sample.input_ids for sample in batch], 0)
    labels = rows([sample.labels for sample in batch], NO_TARGET)
    attended = rows([[1] * len(sample.input_ids) for sample in batch], 0)
    return ids, labels, attended


def token_index(batch: Sequence[Sample], offset: int, width: int) -> Tensor:
    """Each position's index in the job's step, int64 [B, width]; padding counts on and is unused.

    offset   tokens of the micro-batches of this step before
    """
    starts = [offset]
    for sample in batch[:-1]:
        starts.append(starts[-1] + len(sample.input_ids))
    return torch.tensor(starts)[:, None] + torch.arange(width)


def _loss(model: PeftModel, ids: Tensor, labels: Tensor, attended: Tensor, targets: int) -> Tensor:
    """The token losses of a micro-batch, summed, over the number of targets of the whole step."""
    if _is_transformers(model):
        out = model(
            input_ids=ids,
            attention_mask=attended,
            labels=labels,
            num_items_in_batch=torch.tensor(targets, device=ids.device),
            use_cache=False,
        )
        loss: Tensor = out.loss
        return loss
    out = model(ids)
    logits = getattr(out, "logits", out)
    flat = logits[:, :-1].float().flatten(0, 1)
    return F.cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum") / targets


def _is_transformers(model: PeftModel) -> bool:
    """Whether the base takes labels and returns transformers' own loss."""
    from transformers import PreTrainedModel

    return isinstance(model.get_base_model(), PreTrainedModel)


def _own_copy(base_model: nn.Module) -> nn.Module:
    """A copy that shares the frozen matrices, so that a large base is held once.

    Vectors are copied: `bias: all` trains the base's own.
    """
    memo: dict[int, Any] = {
        id(param): nn.Parameter(param.detach(), requires_grad=False)
        for param in base_model.parameters()
        if param.dim() > 1
    }
    return copy.deepcopy(base_model, memo)


def _choose_attention(model: Any) -> None:
    """Take PyTorch's attention, or eager attention where a class has no other.

    Ours is eager too. It is taken where attention drops, and in float64: there transformers' eager
    attention rounds to float32, in which a padded line that a window leaves empty becomes NaN.
    """
    if not hasattr(model, "set_attn_implementation"):
        return
    supported = getattr(model, "_supports_sdpa", False)
    plain = "sdpa" if supported else "eager"
    if has_attention_dropout(model) or (not supported and model.dtype == torch.float64):
        register_attention()
        plain = EAGER
    model.set_attn_implementation(plain)


def _wrapped(job: Job, model: nn.Module, dropout: bool) -> PeftModel:
    from peft import get_peft_model

    config = job.lora_config()
    if not dropout:
        config.lora_dropout = 0.0
    if "labels" not in inspect.signature(model.forward).parameters:
        config.task_type = None  # PEFT's class for language models hands on arguments it lacks.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped: PeftModel = get_peft_model(
            model,
            config,
            autocast_adapter_dtype=job.adapter_dtype == "float32",
        )
    return wrapped


def _load_start(model: PeftModel, start: Mapping[str, Tensor]) -> None:
    from peft import set_peft_model_state_dict

    expected = _saved(model)
    differ = sorted(
        name
        for name in expected.keys() | start.keys()
        if name not in expected or name not in start or expected[name].shape != start[name].shape
    )
    if differ:
        raise OracleError(
            "the adapter to start from is not the one that PEFT makes for this job",
            tensor=differ[0],
            expected=_shape(expected.get(differ[0])),
            found=_shape(start.get(differ[0])),
            help="start both sides from the adapter of one job",
        )
    set_peft_model_state_dict(model, {name: tensor.clone() for name, tensor in start.items()})


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else str(list(tensor.shape))


def _saved(model: PeftModel, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The trained tensors by PEFT's names; of `state`, by parameter names, where given."""
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=state, save_embedding_layers=False
    )
    return found


def _gradients(model: PeftModel) -> dict[str, Tensor]:
    """Copies of the gradients, zeros where there is none, by PEFT's names."""
    gradients = {
        name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    return {name: tensor.detach() for name, tensor in _saved(model, gradients).items()}


def _silence_dropout(model: nn.Module) -> None:
    """Set every dropout rate of a base to zero: modules', attributes' and configs'."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(vars(owner).items() if owner is not None else ()):
                rate = isinstance(value, float) and ("dropout" in name or "pdrop" in name)
                if rate and value > 0:
                    setattr(owner, name, 0.0)


def _optimizer(
    job: Job, params: list[nn.Parameter], steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    from transformers import get_scheduler

    make: Any = getattr(torch.optim, job.optimizer_class())
    optimizer: torch.optim.Optimizer = make(params, **job.optimizer_arguments())
    schedule = get_scheduler(
        job.lr_scheduler_type,
        optimizer,
        num_warmup_steps=job.warmup(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(job.lr_scheduler_kwargs),
    )
    return optimizer, schedule
