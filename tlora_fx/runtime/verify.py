"""Show that jobs trained together train as each would alone.

Each job is trained alone by plain transformers, PEFT and torch.optim, and with all others in the
Shared Super-Model, from the same adapters and on the same data. Twice: with every dropout at 0
against PEFT as it is, and with dropout against PEFT whose dropouts draw the job's keyed masks.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tlora_fx.compiler import Jobs, as_jobs, compile
from tlora_fx.config.job import Job
from tlora_fx.errors import OracleError
from tlora_fx.model.backbone import Backbone, load_config
from tlora_fx.ops.dropout import keep_mask, keep_scale, threshold_of
from tlora_fx.ops.philox import sixteens
from tlora_fx.ops.tables import site_id
from tlora_fx.runtime.adapters import (
    adapter_tensors,
    base_tensors,
    canonical_names,
    load_adapter,
    read_adapter,
    saved_name,
)
from tlora_fx.runtime.checks import check_fits, load_all_data
from tlora_fx.runtime.data import JobData
from tlora_fx.runtime.distributed import device_named
from tlora_fx.runtime.trainer import Trainer

if TYPE_CHECKING:
    from peft import PeftModel

    from tlora_fx.runtime.data import Sample

PLAIN = "plain PEFT, dropout 0"
MASKED = "PEFT with the job's keyed masks"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative difference that passes."""

    loss: float
    gradient: float
    adapter: float


# In float32 and wider transformers' float32 loss sets the floor. On a GPU sums run in another order
# in each GEMM, which AdamW's first steps make larger. In half precision PEFT multiplies adapters in
# float32 and we in the base's dtype, unless adapter_compute is float32.
_WIDE = Bounds(2e-6, 2e-5, 1e-5)
_ON_GPU = Bounds(2e-6, 1e-4, 1e-4)
_HALF = {"bfloat16": Bounds(2e-3, 3e-2, 1e-2), "float16": Bounds(5e-4, 5e-3, 5e-3)}


def bounds_of(dtype: str, device: torch.device | str | None = None) -> Bounds:
    """What passes for a base of this dtype on this device (default: where training would run)."""
    if dtype in _HALF:
        return _HALF[dtype]
    if not isinstance(device, torch.device):
        device = device_named(device)
    gpu = device.type == "cuda"
    return _ON_GPU if gpu and dtype == "float32" else _WIDE


@dataclass(frozen=True, slots=True)
class JobDifference:
    """One job's largest relative differences between fused and alone, over all steps.

    loss       of any step, over the loss alone
    gradient   norm of the difference over the norm alone, of all that the job trains, any step
    adapter    of the adapter after the last step, see `adapter_difference`
    """

    job: str
    against: str
    steps: int
    loss: float
    gradient: float
    adapter: float

    def within(self, bounds: Bounds) -> bool:
        """Whether the job trained as it would alone."""
        pairs = ((self.loss, bounds.loss), (self.gradient, bounds.gradient))
        return all(x <= y for x, y in (*pairs, (self.adapter, bounds.adapter)))


def verify(
    jobs: Jobs,
    steps: int = 20,
    *,
    device: torch.device | str | None = None,
    data: Mapping[str, JobData] | None = None,
) -> Iterator[JobDifference]:
    """Compare every job trained fused with the job trained alone.

    steps     optimizer steps of each job, at most its own
    yields    for each way of dropout a `JobDifference` a job, as they become known
    """
    jobs = as_jobs(jobs)
    data = dict(data or load_all_data(jobs))
    for masks in (False, True):
        if not masks or _any_dropout(jobs):
            yield from _compare(jobs, data, steps, device, masks)


def _any_dropout(jobs: list[Job]) -> bool:
    """Whether the jobs or their base drop anything."""
    if any(float(job.lora_config().lora_dropout or 0) > 0 for job in jobs):
        return True
    base = jobs[0].base
    if base.module is not None:
        return any(isinstance(m, nn.Dropout) and m.p > 0 for m in base.module.modules())
    values = vars(load_config(base)).items()
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in values)


def _compare(
    jobs: list[Job],
    data: dict[str, JobData],
    steps: int,
    device: torch.device | str | None,
    masks: bool,
) -> Iterator[JobDifference]:
    model = compile(jobs, dropout=masks)
    check_fits(model.backbone, data)
    with TemporaryDirectory() as folder:
        trainer = Trainer(model, output=Path(folder) / "run", device=device)
        trainer.prepare(data)
        for job in jobs:
            if job.adapter is not None:
                tensors = read_adapter(job.adapter).tensors
                load_adapter(model.job_parameters(job.name), tensors, str(job.adapter))
        start = {job.name: _tensors(model.job_parameters(job.name)) for job in jobs}
        fused = _train_fused(trainer, steps)
        after = {job.name: _tensors(model.job_parameters(job.name)) for job in jobs}
    base = plain_base(model.backbone).to(trainer.device)
    for job in jobs:
        steps_done = len(fused[job.name].losses)
        largest = _Largest(fused[job.name])
        solo = train_alone(job, base, data[job.name], start[job.name], steps_done, masks, largest)
        yield JobDifference(
            job.name,
            MASKED if masks else PLAIN,
            steps_done,
            largest.loss,
            largest.gradient,
            adapter_difference(after[job.name], solo.adapters),
        )


@dataclass(slots=True)
class _Fused:
    """One job's steps in the fused run; gradients before clipping."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def _train_fused(trainer: Trainer, steps: int) -> dict[str, _Fused]:
    fused = {run.job.name: _Fused([], []) for run in trainer.runs}
    while active := [run for run in trainer.runs if run.status == "running" and run.step < steps]:
        batches = {run.index: run.batches() for run in active}
        losses = trainer.gradients(batches)
        for run in active:
            fused[run.job.name].losses.append(losses[run.index])
            fused[run.job.name].gradients.append(
                {
                    saved_name(name): parameter.grad.detach().cpu().clone()
                    for name, parameter in run.parameters.items()
                    if parameter.grad is not None
                }
            )
            run.finish_step(losses[run.index], batches[run.index], 0.0)
    return fused


class _Largest:
    """The largest differences of the solo run from the fused one, whose gradients it lets go of."""

    def __init__(self, fused: _Fused) -> None:
        self.fused = fused
        self.loss = self.gradient = 0.0

    def __call__(self, step: int, loss: float, gradients: dict[str, Tensor]) -> None:
        fused_loss, fused_gradients = self.fused.losses[step], self.fused.gradients[step]
        self.loss = max(self.loss, abs(fused_loss - loss) / max(abs(loss), 1e-12))
        difference = _relative(_flat(fused_gradients), _flat(gradients))
        self.gradient = max(self.gradient, difference)
        self.fused.gradients[step] = {}


def adapter_difference(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Norm of the difference of two adapters over the norm of the second, all tensors together.

    Not tensor by tensor: a B that hardly got a gradient holds rounding noise, which AdamW makes as
    large as its step.
    """
    if mine.keys() != theirs.keys():
        return float("inf")
    return _relative(_flat(mine), _flat(theirs))


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double().cpu() for _, tensor in sorted(tensors.items())])


def plain_base(backbone: Backbone) -> nn.Module:
    """The base as plain transformers builds it, with the weights that the fused model has."""
    spec = backbone.spec
    if spec.module is not None:
        module: nn.Module = copy.deepcopy(spec.module)
        return module
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM

    dtype = getattr(torch, spec.dtype)
    if spec.model is not None:
        loaded: nn.Module = factory.from_pretrained(
            spec.model, dtype=dtype, use_safetensors=True, trust_remote_code=spec.trust_remote_code
        )
        return loaded
    model: nn.Module = factory.from_config(
        load_config(spec), dtype=dtype, trust_remote_code=spec.trust_remote_code
    )
    canonical = canonical_names(backbone)
    drawn = base_tensors(backbone)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn[canonical[name]])
    return model


def _tensors(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in adapter_tensors(parameters).items()}


def _relative(mine: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm; 0 where both are 0, infinite for NaN."""
    difference = float(torch.linalg.vector_norm(mine - theirs))
    size = float(torch.linalg.vector_norm(theirs))
    if math.isnan(difference) or math.isnan(size):
        return float("inf")
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


# A job trained alone, by plain transformers, PEFT and torch.optim: what `verify` compares with.
#
# Nothing here compiles, packs or fuses. Rows are padded on the right, the model is called as any
# user would call it, and a transformers model takes its own loss. With masks on, every dropout
# draws the job's keyed masks instead of a generator's; the rest stays as it is.

NO_TARGET = -100
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
StepCallback = Callable[[int, float, dict[str, Tensor]], None]


@dataclass(slots=True)
class SoloRun:
    """What a job did alone.

    losses      loss of each step: sum over its targets divided by their number
    norms       2-norm of each step's gradients, before clipping
    gradients   of each step before clipping, by the names of `adapters`; empty with `on_step`
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
    on_step: StepCallback | None = None,
) -> SoloRun:
    """Train a job by itself for some steps from its start.

    base_model   a transformers causal LM, or any module from ids [B, S] to logits [B, S, V], with
                 real weights; neither it nor its config is changed, and its matrices are shared
    data         the job's batches; its `steps` are the length of the schedule
    start        every tensor that the job trains, by PEFT's names
    masks        True: dropout as the job file says, by keyed masks; False: every rate is zero
    on_step      called with (step, loss, gradients) after each backward, in place of keeping them
    raises       OracleError when `start` does not fit, or a dropout has no keyed masks
    """
    base = _own_copy(base_model)
    if not masks:
        _silence_dropout(base)
    _choose_attention(base)
    model = _wrapped(job, base, masks)
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
        if on_step is None:
            run.gradients.append(gradients)
        else:
            on_step(step, loss, gradients)
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

    tensors: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=state, save_embedding_layers=False
    )
    return tensors


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


# Keyed masks for a model trained alone: every dropout draws its job's masks.
#
# Dropout calls are caught as torch sees them, so a module of the base, PEFT's `lora_dropout` and a
# call in a model's own code are one case. Attention weights get theirs from an eager attention
# that is registered with transformers.
#
# Adapted from transformers' eager attention: grouped heads, soft cap, attention sinks; the softmax
# runs in float32 or the query's dtype where that is wider.

EAGER = "tlora_oracle_eager"
PEFT_PREFIX = "base_model.model."

_ACTIVE: ContextVar[KeyedDropout | None] = ContextVar("active", default=None)


class KeyedDropout:
    """Draws a model's dropouts from a job's keys.

    model   its modules name the sites: their path, without PEFT's prefix and adapter name
    seed    the job's
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.index = torch.empty(0, 0, dtype=torch.int64)
        self._inside: list[str] = []
        self._calls: dict[str, int] = {}
        for path, module in model.named_modules():
            site = path.removeprefix(PEFT_PREFIX).removesuffix(".default")
            module.register_forward_pre_hook(self._enter(site))
            module.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def row(self, step: int, index: Tensor) -> Iterator[None]:
        """Within this, the model runs a padded micro-batch.

        step    the job's optimizer step, from 0
        index   int64 [B, S], each position's token index in the job's step
        """
        self.step, self.index = step, index
        self._inside.clear()
        self._calls.clear()
        token = _ACTIVE.set(self)
        try:
            with _CatchDropout(self):
                yield
        finally:
            _ACTIVE.reset(token)

    def site(self) -> str:
        """The name of the running module's next dropout: its path, then path#1, path#2."""
        path = self._inside[-1] if self._inside else "dropout"
        number = self._calls[path] = self._calls.get(path, -1) + 1
        return f"{path}#{number}" if number else path

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Dropout of values that belong to tokens.

        x        [B, S, ...] or [B * S, ...]; what follows the tokens flattens to columns
        raises   OracleError when the first dimensions are not the tokens
        """
        path = self.site()
        tokens = self.index.numel()
        if x.shape[:2] != self.index.shape and x.shape[:1] != (tokens,):
            raise OracleError(
                "a dropout's values do not belong to single tokens, so they have no keyed mask",
                module=path,
                expected=f"[{self.index.shape[0]}, {self.index.shape[1]}, ...]",
                found=list(x.shape),
                help="set this dropout's rate to 0 in the base's config",
            )
        keep = keep_mask(
            torch.tensor([rate], dtype=torch.float64),
            torch.tensor([0, tokens], dtype=torch.int32),
            torch.tensor([[self.seed, self.step]]),
            self.index.reshape(-1),
            site_id(path),
            x.numel() // tokens,
        )
        return torch.where(keep.view(x.shape), x * keep_scale(rate), 0.0).to(x.dtype)

    def drop_attention(self, weights: Tensor, rate: float) -> Tensor:
        """Dropout of attention weights [B, H, S, S].

        A query takes a token's place, its keys that of columns; heads differ in the counter.
        """
        batch, heads, width, _ = weights.shape
        site, key = site_id(self.site()), (self.seed, self.step)
        device = weights.device
        head = torch.arange(1, heads + 1, device=device)[:, None, None]
        third = torch.tensor(site, device=device)
        keep = torch.empty(weights.shape, dtype=torch.bool, device=device)
        for line in range(batch):
            # A line's tokens are consecutive, so its keys fill a run of blocks of eight.
            first = int(self.index[line, 0])
            blocks = torch.arange(first // 8, (first + width - 1) // 8 + 1, device=device)
            query = self.index[line][None, :, None]
            values = sixteens(query, blocks, third, head, key).flatten(2)
            values = values[..., first % 8 : first % 8 + width]
            keep[line] = values >= threshold_of(rate) - 32768
        return torch.where(keep, weights * keep_scale(rate), 0.0).to(weights.dtype)

    def _enter(self, site: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._inside.append(site)

        return hook

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside.pop()


class _CatchDropout(TorchFunctionMode):
    """Hands F.dropout to keyed masks and refuses dropout that has none."""

    def __init__(self, keyed: KeyedDropout) -> None:
        super().__init__()
        self._keyed = keyed

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **named)
        if func in _UNKEYED and _rate_of(func, args, named) > 0:
            raise OracleError(
                "a dropout has no keyed masks",
                function=func.__name__,
                module=self._keyed.site(),
                help="set this dropout's rate to 0 in the base's config",
            )
        return func(*args, **named)

    def _dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return self._keyed.drop(x, p) if training and p > 0 else x


_UNKEYED = {
    F.scaled_dot_product_attention: ("dropout_p", 4, 0.0),
    F.multi_head_attention_forward: ("dropout_p", 10, 0.0),
    F.alpha_dropout: ("p", 1, 0.5),
    F.feature_alpha_dropout: ("p", 1, 0.5),
    F.dropout1d: ("p", 1, 0.5),
    F.dropout2d: ("p", 1, 0.5),
    F.dropout3d: ("p", 1, 0.5),
}


def _rate_of(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> float:
    """The rate that a call drops at, 0 outside of training."""
    name, index, default = _UNKEYED[func]
    training = named.get("training", args[2] if name == "p" and len(args) > 2 else True)
    rate = named.get(name, args[index] if len(args) > index else default)
    return float(rate) if training else 0.0


def has_attention_dropout(model: nn.Module) -> bool:
    """Whether a transformers model's config drops attention weights in training."""
    config = getattr(model, "config", None)
    return any(
        isinstance(rate, float) and rate > 0 and "att" in name and "drop" in name
        for name, rate in (vars(config) if config is not None else {}).items()
    )


def register_attention() -> None:
    """Make `attend` known to transformers as EAGER, with the masks of its own eager attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(EAGER, attend)
    AttentionMaskInterface.register(EAGER, eager_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention whose dropout draws keyed masks.

    query            [B, H, S, D]
    key, value       [B, H_kv, S, D]
    attention_mask   [B, 1, S, S], added: causality, window and padding
    s_aux            [H], attention sinks
    returns          [B, S, H, D], and the weights [B, H, S, S]
    """
    if attention_mask is None or key.shape[2] != query.shape[2]:
        raise OracleError(
            "attention with dropout needs a mask over the row's own tokens",
            module=type(module).__name__,
            help="set the attention dropout of the base's config to 0",
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)[..., : key.shape[2]]
    keyed = _ACTIVE.get()
    if dropout > 0 and keyed is not None:
        weights = keyed.drop_attention(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights
