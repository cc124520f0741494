"""A job trained alone, by plain transformers, PEFT and torch.optim: what `verify` compares with.

Nothing here compiles, packs or fuses. Rows are padded on the right, the model is called as any user
would call it, and a transformers model takes its own loss. With masks on, every dropout draws the
job's keyed masks instead of a generator's; the rest stays as it is.

Shared with the fused path is what defines a job: the fields of its job file, the base's weights,
the tokens and labels of its samples, and of the keyed masks Philox and the number of a site.
Everything from samples to the loss is written here once more: which samples a step takes, padding,
the shift of the labels, the count of targets, the loss over them, and each token's index in the
step, by which its dropout draws.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlora_fx.config.functions import UserFunction, callable_of
from tlora_fx.config.job import BETA, Job
from tlora_fx.config.job_optimizer import optimizer_arguments, optimizer_class, own_schedule
from tlora_fx.config.losses import LOSSES
from tlora_fx.errors import OracleError
from tlora_fx.numerics.noise import disturbed_embeddings
from tlora_fx.ops.noise import noise_rows
from tlora_fx.runtime.adapters.files import own_copy
from tlora_fx.runtime.adapters.starts import constant_part
from tlora_fx.runtime.data.labels import decoded
from tlora_fx.runtime.data.sample_order import NO_TARGET, Line, SampleOrder, pad
from tlora_fx.runtime.keyed_dropout import KeyedDropout, choose_attention
from tlora_fx.tracing.adapters import wrap_with_peft

if TYPE_CHECKING:
    from peft import PeftModel

    from tlora_fx.runtime.data.samples import JobData, Sample

#: Tensors that a job trains, each with its value in what the job compares with.
Reference = Sequence[tuple[nn.Parameter, Tensor]]
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class SoloTrainer:
    """One job on a copy of the base.

    base_model   a transformers causal LM, or any module from ids [B, S] to logits [B, S, V], with
                 real weights; neither it nor its config is changed, and its matrices are shared
    data         the job's samples
    start        every tensor that the job trains, by PEFT's names
    masks        True: dropout as the job file says, by keyed masks; False: every rate is zero
    order        which samples each of its steps takes
    raises       OracleError when `start` does not fit, or a dropout has no keyed masks
    """

    def __init__(
        self,
        job: Job,
        base_model: nn.Module,
        data: JobData,
        start: Mapping[str, Tensor],
        masks: bool,
    ) -> None:
        self.job, self.order = job, SampleOrder(job, data.samples, data.units)
        base = own_copy(base_model)
        if not masks:
            _silence_dropout(base)
        choose_attention(base)
        self._model = _wrapped(job, base, masks)
        self.load(start)
        self._model.train()
        trained = [param for param in self._model.parameters() if param.requires_grad]
        kept = [(param, param.detach().clone()) for param in trained]
        self._reference = kept if job.has_adapter_reference else None
        self._drop = (
            KeyedDropout(self._model, job.seed, pools=job.base.is_classifier) if masks else None
        )
        self._padding = _padding_of(job, base, data.samples)
        self._params = [param for param in self._model.parameters() if param.requires_grad]
        self._optimizer, self._schedule = _optimizer(job, self._model, self.order.steps)
        self._largest_norm = job.max_grad_norm or float("inf")

    def load(self, adapter: Mapping[str, Tensor]) -> None:
        """Take the values of every tensor that the job trains.

        raises   OracleError when they are not the job's
        """
        from peft import set_peft_model_state_dict

        own = {name: tensor.shape for name, tensor in _saved(self._model).items()}
        given = {name: tensor.shape for name, tensor in adapter.items()}
        differ = sorted(
            name for name in own.keys() | given.keys() if own.get(name) != given.get(name)
        )
        if differ:
            raise OracleError(
                "the adapter to start from is not the one that PEFT makes for this job",
                tensor=differ[0],
                expected=_shown(own.get(differ[0])),
                found=_shown(given.get(differ[0])),
                help="start both sides from the adapter of one job",
            )
        with _adalora(self._model, rank_pattern=None):
            copies = {name: tensor.clone() for name, tensor in adapter.items()}
            set_peft_model_state_dict(self._model, copies)

    def gradients(
        self, batches: Sequence[Sequence[Line]], step: int
    ) -> tuple[float, dict[str, Tensor]]:
        """The loss of one optimizer step, and the gradients by PEFT's names.

        step   by which its dropouts draw
        """
        self._optimizer.zero_grad()
        with _adalora(self._model, orth_reg_weight=0.0):
            loss = self._backward(batches, step)
        _regularise(self._model)
        return loss, _gradients(self._model)

    def _backward(self, batches: Sequence[Sequence[Line]], step: int) -> float:
        """Add the gradients of one optimizer step; returns its loss."""
        model, job, reference = self._model, self.job, self._reference
        compared = sum(map(len, batches)) // 2
        labels = [line.labels for batch in batches for line in batch]
        targets = sum(label != NO_TARGET for line in labels for label in line[job.label_shift :])
        device = next(model.parameters()).device
        total = 0.0
        for batch in batches:
            ids, labels_of, attended, index = (part.to(device) for part in pad(batch))
            noise = _noise(model, job, step, index, max(len(line.ids) for line in batch))
            with noise, nullcontext() if self._drop is None else self._drop.row(step, index):
                if job.method == "kto":
                    wanted = torch.tensor([line.desirable is True for line in batch], device=device)
                    found = _compared(model, ids, labels_of, attended, reference)
                    loss = _kto_loss(job, *found, wanted) / compared
                elif job.method == "reward":
                    ids = ids.masked_fill(attended == 0, self._padding)
                    loss = _reward_loss(model, job, ids, labels_of, attended) / compared
                elif job.named_loss is not None:
                    own = _token_losses(model, ids, labels_of, attended)
                    loss = _summed_losses(job, batch, own) / targets
                elif job.is_preference:
                    loss = _pair_loss(model, job, ids, labels_of, attended, reference) / compared
                elif job.base.is_classifier:
                    ids = ids.masked_fill(attended == 0, self._padding)
                    loss = _label_loss(model, job, ids, labels_of, attended) / targets
                else:
                    loss = _loss(model, job, ids, labels_of, attended, targets)
            torch.autograd.backward(loss)
            total += loss.item()
        return total

    def disturbed(self, draw: int) -> AbstractContextManager[None]:
        """Move every output of an embedding by about a rounding, within this context.

        draw   the number of the disturbance, which decides it
        """
        return disturbed_embeddings(self._model, draw)

    def update(self) -> float:
        """Take an optimizer step; returns the norm of the gradients before clipping."""
        constant = self._constant()
        for _, gradient in constant:
            gradient.zero_()
        kept = [value.clone() for value, _ in constant]
        norm = torch.nn.utils.clip_grad_norm_(self._params, self._largest_norm)
        self._optimizer.step()
        allocate = getattr(self._model.base_model, "update_and_allocate", None)
        if allocate is not None:
            allocate(self._schedule.last_epoch)
        self._schedule.step()
        for (value, _), before in zip(constant, kept, strict=True):
            value.copy_(before)
        return float(norm)

    def _constant(self) -> list[tuple[Tensor, Tensor]]:
        """What the job does not update, and its gradients: views."""
        halves = []
        for name, param in self._model.named_parameters():
            value = constant_part(self.job, name, param.detach())
            if value is not None and param.grad is not None:
                gradient = constant_part(self.job, name, param.grad)
                assert gradient is not None
                halves.append((value, gradient))
        return halves

    def adapters(self) -> dict[str, Tensor]:
        """Copies of the trained tensors, by PEFT's names."""
        return {name: tensor.detach().clone() for name, tensor in _saved(self._model).items()}


@contextmanager
def _noise(model: PeftModel, job: Job, step: int, index: Tensor, longest: int) -> Iterator[None]:
    """Within this, NEFTune's noise is added to embeddings, as TRL's hook does; it is the job's own.

    index     of each token in the job's step, [B, S]
    longest   tokens of the longest line
    """
    alpha = job.neftune_noise_alpha or 0.0

    def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        width = output.shape[-1]
        drawn = noise_rows(index.flatten(), width, (job.seed, step)).view(output.shape)
        return output + (drawn * alpha / math.sqrt(longest * width)).to(output.dtype)

    if not alpha:
        yield
        return
    base: Any = model.get_base_model()
    handle = base.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _loss(
    model: PeftModel, job: Job, ids: Tensor, labels: Tensor, attended: Tensor, targets: int
) -> Tensor:
    """The token losses of a micro-batch, summed, over the number of targets of the whole step."""
    smoothing = job.label_smoothing_factor
    if not _is_transformers(model):
        out = model(ids)
    elif job.loss is not None or smoothing:
        out = model(input_ids=ids, attention_mask=attended, use_cache=False)
    else:
        out = model(
            input_ids=ids,
            attention_mask=attended,
            labels=labels,
            num_items_in_batch=torch.tensor(targets, device=ids.device),
            use_cache=False,
        )
        loss: Tensor = out.loss
        return loss
    logits = _logits_of(out)
    wide = torch.promote_types(torch.float32, logits.dtype)
    flat, wanted = logits[:, :-1].to(wide).flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(flat, wanted, reduction="sum", label_smoothing=smoothing)
    return total / targets


def _logits_of(out: Any) -> Tensor:
    """The logits of what a model returns."""
    logits: Tensor = out["logits"] if type(out) is dict else getattr(out, "logits", out)
    return logits


def _label_loss(
    model: PeftModel, job: Job, ids: Tensor, labels: Tensor, attended: Tensor
) -> Tensor:
    """The losses of a micro-batch's labels, summed; lines without a label count for nothing."""
    logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits
    marked = labels != NO_TARGET
    logits, codes = logits[marked.any(1)], labels[marked].cpu().numpy()
    wanted = torch.from_numpy(decoded(codes, job.base)).to(logits.device)
    if job.base.objective == "single_label_classification":
        return F.cross_entropy(logits, wanted, reduction="sum")
    if job.base.objective == "regression":
        return F.mse_loss(logits.squeeze(-1), wanted.to(logits.dtype), reduction="sum")
    losses = F.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="none")
    return losses.mean(1).sum()


def _reward_loss(
    model: PeftModel, job: Job, ids: Tensor, labels: Tensor, attended: Tensor
) -> Tensor:
    """The losses of a micro-batch's pairs, summed, whose labels are margins: see `_pair_loss`."""
    scores = model(input_ids=ids, attention_mask=attended, use_cache=False).logits.squeeze(-1)
    margins = labels[labels != NO_TARGET].to(torch.int32).view(torch.float32)[::2].to(scores)
    compared = -F.logsigmoid(scores[::2] - scores[1::2] - margins).sum()
    center = job.center_rewards_coefficient or 0.0
    loss: Tensor = compared + center * (scores[::2] + scores[1::2]).square().sum()
    return loss


def _padding_of(job: Job, base: nn.Module, samples: Sequence[Sample]) -> int:
    """What a classifier's lines are padded with: it reads the last token that is something else.

    Where its config names nothing, that is an id which no sample has.
    """
    if not job.base.is_classifier:
        return 0
    config = cast(Any, base.config).get_text_config()
    if config.pad_token_id is None:
        used = {token for sample in samples for token in sample.input_ids}
        config.pad_token_id = next(i for i in range(config.vocab_size) if i not in used)
    return int(config.pad_token_id)


def _pair_loss(
    model: PeftModel,
    job: Job,
    ids: Tensor,
    labels: Tensor,
    attended: Tensor,
    reference: Reference | None,
) -> Tensor:
    """The losses of a micro-batch's pairs, summed: chosen lines are even, rejected ones odd.

    reference    what the job trains, with its values in what dpo compares with; None: the base
    """
    beta = BETA if job.beta is None else job.beta
    if job.method == "dpo":
        base, losses = _compared(model, ids, labels, attended, reference)
        gain = (base - losses).sum(1)
        return -F.logsigmoid(beta * (gain[::2] - gain[1::2])).sum()
    losses = _token_losses(model, ids, labels, attended)
    trained = labels[:, 1:] != NO_TARGET
    # A chosen line's prompt counts for its likelihood, not for its odds.
    prompts = trained[1::2].int().argmax(1)
    behind = torch.arange(trained.shape[1], device=ids.device)[None] >= prompts[:, None]
    odds = []
    for line, counted in ((losses[::2], trained[::2] & behind), (losses[1::2], trained[1::2])):
        log = -(line * counted).sum(1) / counted.sum(1)
        odds.append(log - torch.log1p(-torch.exp(log)))
    likelihood = losses[::2][trained[::2]].mean() * len(prompts)
    return likelihood - beta * F.logsigmoid(odds[0] - odds[1]).sum()


def _kto_loss(job: Job, base: Tensor, losses: Tensor, wanted: Tensor) -> Tensor:
    """The losses of a micro-batch's samples, summed; lines of the second half are mismatched."""
    gain = (base - losses).sum(1)
    samples = len(gain) // 2
    far = gain[samples:].detach().mean().clamp(min=0)
    beta = BETA if job.beta is None else job.beta
    good = job.desirable_weight * (1 - torch.sigmoid(beta * (gain[:samples] - far)))
    bad = job.undesirable_weight * (1 - torch.sigmoid(beta * (far - gain[:samples])))
    return good[wanted[:samples]].sum() + bad[~wanted[:samples]].sum()


def _token_losses(model: PeftModel, ids: Tensor, labels: Tensor, attended: Tensor) -> Tensor:
    """The loss of each token but the first of each line, [B, S - 1]."""
    if _is_transformers(model):
        out = model(input_ids=ids, attention_mask=attended, use_cache=False)
    else:
        out = model(ids)
    logits = _logits_of(out)[:, :-1].transpose(1, 2)
    return F.cross_entropy(logits, labels[:, 1:], reduction="none")


def _summed_losses(job: Job, lines: Sequence[Line], token_losses: Tensor) -> Tensor:
    """The sum of a micro-batch's losses.

    lines          its sequences; those without targets count for nothing
    token_losses   [B, S - 1], of each token but the first
    """
    logprobs, said = [], []
    for line, losses in zip(lines, token_losses, strict=True):
        places = [at for at, label in enumerate(line.labels) if at and label != NO_TARGET]
        if not places:
            continue
        logprobs.append(-losses[[at - 1 for at in places]])
        numbers = {"weights": [1.0] * len(line.ids), **line.numbers}
        said.append(
            {
                name: logprobs[-1].new_tensor([values[at] for at in places])
                for name, values in numbers.items()
            }
        )
    loss = job.named_loss
    if isinstance(loss, UserFunction):
        found = callable_of(loss, "loss", job.name)(logprobs, said)
        total: Tensor = found[0] if isinstance(found, tuple) else found
        return total.reshape(())
    assert loss is not None
    options = {**LOSSES[loss], **job.loss_options}
    pairs = zip(logprobs, said, strict=True)
    return torch.stack([_sequence_loss(loss, options, *pair) for pair in pairs]).sum()


def _sequence_loss(
    loss: str, options: Mapping[str, float], logprobs: Tensor, said: Mapping[str, Tensor]
) -> Tensor:
    """The sum of a sequence's token losses, by the table of docs/group-step.md."""
    old, gains = said["logprobs"], said["advantages"]
    ratio = torch.exp(logprobs - old)
    if loss == "gspo":
        level = torch.exp((logprobs - old).mean().detach())
        ratio = level * torch.exp(logprobs - logprobs.detach())
    if loss == "importance_sampling":
        each = ratio * gains
    elif loss == "dro":
        each = gains * logprobs - options["beta"] / 2 * (logprobs - old) ** 2
    else:
        clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
        each = torch.minimum(ratio * gains, clipped * gains)
        if loss == "cispo":
            each = clipped.detach() * gains * logprobs
    return -(said["weights"] * each).sum()


def _compared(
    model: PeftModel,
    ids: Tensor,
    labels: Tensor,
    attended: Tensor,
    reference: Reference | None,
) -> tuple[Tensor, Tensor]:
    """Token losses of what a job compares with, and of the job itself."""
    was_training = model.training
    # Before the job's own losses, whose backward reads its tensors as they were.
    with torch.no_grad(), _as_reference(model.eval(), reference):
        base = _token_losses(model, ids, labels, attended)
    model.train(was_training)
    return base, _token_losses(model, ids, labels, attended)


@contextmanager
def _as_reference(model: PeftModel, reference: Reference | None) -> Iterator[None]:
    """Within this, a model is what its job compares with."""
    if reference is None:
        with model.disable_adapter():
            yield
        return
    kept = [param.detach().clone() for param, _ in reference]
    try:
        for param, value in reference:
            param.copy_(value)
        yield
    finally:
        for (param, _), value in zip(reference, kept, strict=True):
            param.copy_(value)


def _is_transformers(model: PeftModel) -> bool:
    """Whether the base takes labels and returns transformers' own loss."""
    from transformers import PreTrainedModel

    return isinstance(model.get_base_model(), PreTrainedModel)


def _wrapped(job: Job, model: nn.Module, dropout: bool) -> PeftModel:
    config = job.lora_config()
    if not dropout and job.dropout_field is not None:
        setattr(config, job.dropout_field, 0.0)
    if "labels" not in inspect.signature(model.forward).parameters:
        config.task_type = None  # PEFT's class for language models hands on arguments it lacks.
    return wrap_with_peft(model, config, job.adapter_dtype)


def _shown(shape: torch.Size | None) -> str:
    return "nothing" if shape is None else str(list(shape))


def _saved(model: PeftModel, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The trained tensors by PEFT's names; of `state`, by parameter names, where given."""
    from peft import get_peft_model_state_dict

    with _adalora(model, rank_pattern=None):  # all ranks, those that are taken away too
        tensors: dict[str, Tensor] = get_peft_model_state_dict(
            model, state_dict=state, save_embedding_layers=False
        )
    return tensors


def _adalora(model: PeftModel, **fields: Any) -> AbstractContextManager[object]:
    """Within this, the config of an AdaLoRA has these fields."""
    config: Any = model.peft_config["default"]
    return patch.multiple(config, **fields) if config.peft_type == "ADALORA" else nullcontext()


def _regularise(model: PeftModel) -> None:
    """Add, once a step, the gradient of what PEFT adds to each loss of an AdaLoRA."""
    tuner: Any = model.base_model
    if model.peft_config["default"].peft_type == "ADALORA":
        outputs = SimpleNamespace(loss=torch.zeros(()))
        with patch.object(tuner.model, "forward", lambda: outputs):
            tuner.forward().loss.backward()


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


def _loraplus(
    job: Job, model: PeftModel, make: Any, arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """PEFT's optimizer for LoRA+, less the groups that are empty, which some optimizers refuse."""
    from peft.optimizers import create_loraplus_optimizer

    assert job.loraplus_lr_ratio is not None
    embedding = job.loraplus_lr_embedding
    optimizer: torch.optim.Optimizer = create_loraplus_optimizer(
        model,
        make,
        loraplus_lr_ratio=job.loraplus_lr_ratio,
        loraplus_weight_decay=arguments.pop("weight_decay", 0.0),
        **({} if embedding is None else {"loraplus_lr_embedding": embedding}),
        **arguments,
    )
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _lorafa(job: Job, model: PeftModel, arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """PEFT's optimizer for LoRA-FA, its product not rounded to bfloat16, A's gradients compared."""
    from peft.optimizers import create_lorafa_optimizer, lorafa

    config: Any = model.peft_config["default"]
    optimizer = create_lorafa_optimizer(model, config.r, config.lora_alpha, job.learning_rate)
    optimizer.param_groups[0].update(arguments)
    optimizer.defaults["lr"] = job.learning_rate  # where schedules read it
    plain = optimizer.step

    def step(_: Any, closure: Any = None) -> Any:
        with patch.object(lorafa, "is_bf16_available", lambda: False):
            return plain(closure)

    vars(optimizer)["step"] = MethodType(step, optimizer)
    for name, param in model.named_parameters():
        if ".lora_A." in name:
            param.requires_grad_(True)
    return optimizer


def _by_decay(model: PeftModel, *, decays: bool) -> list[dict[str, Any]]:
    """What a model trains, biases and norms apart from what decays, as transformers' Trainer."""
    from transformers import Trainer

    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not decays:
        return [{"params": list(named.values())}]
    decayed = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
    own = [param for name, param in named.items() if name in decayed]
    spared = [param for name, param in named.items() if name not in decayed]
    groups: list[dict[str, Any]] = [{"params": own}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _optimizer(
    job: Job, model: PeftModel, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    from transformers import get_scheduler

    make: Any = optimizer_class(job)
    arguments = optimizer_arguments(job)
    optimizer: torch.optim.Optimizer
    if job.optim == "lorafa":
        optimizer = _lorafa(job, model, arguments)
    elif job.loraplus_lr_ratio is not None:
        optimizer = _loraplus(job, model, make, arguments)
    else:
        optimizer = make(_by_decay(model, decays=job.weight_decay > 0), **arguments)
    if (own := own_schedule(job, optimizer, steps)) is not None:
        return optimizer, own
    schedule = get_scheduler(
        str(job.lr_scheduler_type),
        optimizer,
        num_warmup_steps=job.warmup(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(job.lr_scheduler_kwargs),
    )
    return optimizer, schedule
