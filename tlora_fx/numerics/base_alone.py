"""A job alone on the base as its author wrote it, wrapped by PEFT: graphs are tried against it.

Nothing is traced, packed or fused. Dropout is off; the model is in training mode.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import is_frozen
from tlora_fx.ir.graph import PEFT_PREFIX
from tlora_fx.model.backbone import (
    Backbone,
    build_skeleton,
    classify_each_token,
    has_sdpa,
    named_logits,
)
from tlora_fx.numerics.interpreter import HALF
from tlora_fx.numerics.noise import disturbed_embeddings
from tlora_fx.numerics.tensors import Seeded, Unchecked
from tlora_fx.tracing.adapters import wrap_with_peft
from tlora_fx.tracing.layers import layer_list


class BaseFails(Unchecked):
    """The base itself raises on so many tokens."""

    def __init__(self, tokens: int, error: Exception) -> None:
        super().__init__(f"the base fails on {tokens} tokens: {type(error).__name__}: {error}")
        self.tokens = tokens


@dataclass(slots=True)
class Outcome:
    """One job's logits by sequence, and its gradients by name."""

    logits: list[Tensor]
    gradients: dict[str, Tensor]


@dataclass
class BaseAlone:
    """The base as its author wrote it, with the probe's weights; jobs are wrapped around it.

    still    whether dropouts are silenced, or precision widened, by a mode of torch
    """

    backbone: Backbone
    tensors: Seeded
    layers: frozenset[str]
    wide: torch.dtype | None
    still: bool
    module: nn.Module = field(init=False, default_factory=nn.Module)
    device: torch.device = field(init=False, default=torch.device("cpu"))
    _models: dict[str, Any] = field(init=False, default_factory=dict)
    _wants_positions: bool = field(init=False, default=False)

    def load(self) -> None:
        """Build the base.

        raises    Unchecked where it cannot be built with drawn weights
        """
        spec = self.backbone.spec
        if getattr(self.backbone.config, "quantization_config", None) is not None:
            raise Unchecked("the base is quantised")
        if spec.module is not None:
            shared = {id(t): t for t in (*spec.module.parameters(), *spec.module.buffers())}
            module = copy.deepcopy(spec.module, shared)
            if spec.is_classifier:
                classify_each_token(module, spec)
        else:
            wider = {} if self.wide is None else {"dtype": str(self.wide).removeprefix("torch.")}
            built: Any = build_skeleton(spec.model_copy(update=wider))
            module = built
            if has_sdpa(module):
                built.set_attn_implementation("sdpa")
        _leave_out(module, self.layers)
        self._take(module)
        self.module = module.train()
        self._models.clear()
        wanted = inspect.signature(module.forward).parameters.get("position_ids")
        self._wants_positions = wanted is not None and wanted.default is wanted.empty

    def _take(self, module: nn.Module) -> None:
        """Give every parameter its value, ties kept, and every buffer a copy of its own."""
        canonical = {
            name: self.backbone.names[id(tensor)]
            for name, tensor in self.backbone.model.named_parameters(remove_duplicate=False)
        }
        known: dict[str, nn.Parameter] = {}
        for path, part in module.named_modules():
            for slot, parameter in part._parameters.items():
                if parameter is None:
                    continue
                name = canonical[f"{path}.{slot}".strip(".")]
                if name not in known:
                    value = self.tensors.base(name, tuple(parameter.shape), parameter.dtype)
                    known[name] = nn.Parameter(value, requires_grad=False)
                part._parameters[slot] = known[name]
        if known:
            self.device = next(iter(known.values())).device
        for path, part in module.named_modules():
            for slot, buffer in part._buffers.items():
                if buffer is None:
                    continue
                # What the base rounded to half precision stays so.
                kept = self.backbone.values.get(f"{path}.{slot}".strip("."), buffer)
                value = kept if buffer.is_meta or kept.dtype in HALF else buffer
                kind = self.wide if self.wide is not None and value.dtype in HALF else value.dtype
                part._buffers[slot] = value.detach().clone().to(self.device, kind)

    def run(
        self,
        job: Job,
        sequences: Sequence[Sequence[int]],
        copies: int = 1,
        *,
        disturbed: bool = False,
    ) -> Outcome:
        """One forward and backward of each sequence alone.

        copies       lines of the batch that a sequence is run in, all the same
        disturbed    what embeddings give is moved by about a rounding
        raises       Unchecked where the base does not run
        """
        model = self._wrapped(job)
        with disturbed_embeddings(model) if disturbed else nullcontext():
            return self._run(model, sequences, copies)

    def _run(self, model: nn.Module, sequences: Sequence[Sequence[int]], copies: int) -> Outcome:
        outcome = Outcome([], {})
        for parameter in model.parameters():
            parameter.grad = None
        for sequence in sequences:
            ids = torch.tensor([sequence] * copies, device=self.device)
            logits = self._logits(model, ids)
            outcome.logits.append(logits[0].detach())
            loss = torch.stack([token_loss(line, ids[0]) for line in logits]).mean()
            if loss.requires_grad:
                torch.autograd.backward(loss)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                value = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                outcome.gradients[name.removeprefix(PEFT_PREFIX)] = value.detach()
        return outcome

    def outputs(self, job: Job, sequence: Sequence[int]) -> list[tuple[str, Tensor]]:
        """The value of every module for one sequence, in the order in which they end."""
        model = self._wrapped(job)
        seen: list[tuple[str, Tensor]] = []
        handles = []
        for path, module in model.named_modules():
            name = path.removeprefix(PEFT_PREFIX)

            def keep(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                parts = output if isinstance(output, tuple) else (output,)
                tensors = [part for part in parts if isinstance(part, Tensor)]
                # Of several, such as cosines and sines, nobody knows which one the graph has.
                if len(tensors) == 1:
                    seen.append((name, tensors[0].detach()))

            handles.append(module.register_forward_hook(keep))
        try:
            with torch.no_grad():
                self._logits(model, torch.tensor([list(sequence)], device=self.device))
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def _logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        try:
            # A mode that need not be there is one that a base's code could ask for.
            with _Still(self.wide) if self.still else nullcontext():
                if self.backbone.config is not None:
                    out: Any = model(input_ids=ids, use_cache=False)
                elif self._wants_positions:
                    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
                    out = model(ids, position_ids=positions)
                else:
                    out = model(ids)
        except Exception as error:
            raise BaseFails(ids.shape[1], error) from error
        logits: Any = named_logits(out)
        result: Tensor = logits[0] if isinstance(logits, tuple) else logits
        return result

    def _wrapped(self, job: Job) -> nn.Module:
        """The base with a job's adapters, by PEFT, drawn by name."""
        if job.name in self._models:
            model: nn.Module = self._models[job.name]
            return model
        shared = {
            id(tensor): tensor for tensor in (*self.module.parameters(), *self.module.buffers())
        }
        base: Any = copy.deepcopy(self.module, shared)
        wrapped = wrap_with_peft(base, job.lora_config(), job.adapter_dtype).train()
        fields = job.lora_fields
        for path, module in wrapped.named_modules():
            for slot, parameter in module._parameters.items():
                name = f"{path}.{slot}".removeprefix(PEFT_PREFIX)
                mine = parameter is not None and parameter.requires_grad
                if parameter is None or not (mine or is_frozen(fields, name)):
                    continue
                drawn = self.tensors.own(job.name, name, tuple(parameter.shape), parameter.dtype)
                value = nn.Parameter(drawn.detach().to(self.device), mine)
                module._parameters[slot] = value
        self._models = {job.name: wrapped}
        return wrapped


class _Skipped(nn.Module):
    """Stands for a layer that does not run: the hidden state goes on, in the form of the others.

    ran    what the layer that ran last returned
    """

    def __init__(self, ran: list[Any]) -> None:
        super().__init__()
        self.ran = ran

    def __deepcopy__(self, memo: Any) -> _Skipped:
        """Itself: hooks, which a copy keeps, tell `ran` what ran."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden state."""
        hidden = args[0] if args else next(iter(kwargs.values()))
        last = self.ran[-1] if self.ran else None
        return (hidden, *last[1:]) if isinstance(last, tuple) else hidden


def layers_left_out(model: nn.Module, layers: frozenset[str]) -> list[str]:
    """The layers that do not run; none where the graph is not folded."""
    return [path for path in layer_list(model) if path not in layers] if layers else []


def _leave_out(model: nn.Module, layers: frozenset[str]) -> None:
    """Put stand-ins in place of the layers that do not run."""
    left_out, ran = layers_left_out(model, layers), list[Any]()

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        ran[:] = [output]

    for path in layer_list(model) if left_out else ():
        if path in left_out:
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = _Skipped(ran)
        else:
            model.get_submodule(path).register_forward_hook(keep)


class _Still(TorchFunctionMode):
    """No dropout drops, and half precision that code asks for by name is wider."""

    def __init__(self, wide: torch.dtype | None) -> None:
        super().__init__()
        self._wide = wide

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else named["input"]
        if func is F.scaled_dot_product_attention:
            named.pop("dropout_p", None)
            args = (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:])
        if self._wide is not None:
            args = tuple(self._wider(arg) for arg in args)
            named = {name: self._wider(arg) for name, arg in named.items()}
            if func in (Tensor.half, Tensor.bfloat16):
                return args[0].to(self._wide)
        return func(*args, **named)

    def _wider(self, arg: Any) -> Any:
        return self._wide if isinstance(arg, torch.dtype) and arg in HALF else arg


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout,
}  # fmt: skip


def load_gpu_code(backbone: Backbone) -> Thread | None:
    """Have torch load, in the background, the GPU code that a base starts first.

    That of attention takes more than a second each for forward and backward, and Python is not held
    up meanwhile.

    returns   None where this process uses no GPU
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    size = getattr(backbone.config and backbone.config.get_text_config(), "head_dim", None) or 64
    given = torch.cuda.current_device(), backbone.dtype, size
    thread = Thread(target=_attend, args=given, name="GPU code")
    thread.start()
    return thread


def _attend(device: int | str, dtype: torch.dtype, size: int) -> None:
    with suppress(Exception):  # whoever comes to need it meets what is wrong
        x = torch.ones(1, 1, 16, size, device=device, dtype=dtype, requires_grad=True)
        attended = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        torch.autograd.grad((attended[0, 0] @ x[0, 0].mT).sum(), x)


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean token loss of a sequence, of the tokens themselves: any loss serves."""
    wide = logits.to(torch.promote_types(torch.float32, logits.dtype))
    if wide.shape[-1] == 1:
        return wide.square().mean()
    return F.cross_entropy(wide, ids % wide.shape[-1])
