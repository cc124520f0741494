"""Keyed masks for a model trained alone: every dropout draws its job's masks.

Dropout calls are caught as torch sees them, so a module of the base, PEFT's `lora_dropout` and a
call in a model's own code are one case. Attention weights get theirs from an eager attention
that is registered with transformers.

Adapted from transformers' eager attention: grouped heads, soft cap, attention sinks; the softmax
runs in float32 or the query's dtype where that is wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tlora_fx.errors import OracleError
from tlora_fx.ir.graph import PEFT_PREFIX
from tlora_fx.model.backbone import has_sdpa
from tlora_fx.ops.dropout import keep_scale, threshold_of
from tlora_fx.ops.philox import sixteens
from tlora_fx.ops.tables import site_id

EAGER = "tlora_oracle_eager"

_ACTIVE: ContextVar[KeyedDropout | None] = ContextVar("active", default=None)


class KeyedDropout:
    """Draws a model's dropouts from a job's keys.

    model   its modules name the sites: their path, without PEFT's prefix and adapter name
    seed    the job's
    pools   whether its head works on one token of each line
    """

    def __init__(self, model: nn.Module, seed: int, *, pools: bool = False) -> None:
        self.seed, self.pools = seed, pools
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
        """Run the model on a padded micro-batch, within this context.

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

        x        [B, S, ...] or [B * S, ...], of a head that pools [B, C]; what follows the tokens
                 flattens to columns
        raises   OracleError when the first dimensions are not the tokens
        """
        path = self.site()
        tokens = self.index.numel()
        rows = self.index.reshape(-1, 1)
        if self.pools and x.dim() == 2 and x.shape[0] == len(self.index):
            # What an encoder's head drops belongs to the first token of each line.
            rows, tokens = self.index[:, :1], len(self.index)
        elif x.shape[:2] != self.index.shape and x.shape[:1] != (tokens,):
            raise OracleError(
                "a dropout's values do not belong to single tokens, so they have no keyed mask",
                module=path,
                expected=f"[{self.index.shape[0]}, {self.index.shape[1]}, ...]",
                found=list(x.shape),
                help="set this dropout's rate to 0 in the base's config",
            )
        columns = x.numel() // tokens
        blocks = torch.arange(-(-columns // 8), device=x.device)
        third, zero = blocks.new_tensor(site_id(path)), blocks.new_zeros(())
        values = sixteens(rows, blocks, third, zero, (self.seed, self.step)).flatten(1)
        keep = values[:, :columns] >= threshold_of(rate) - 32768
        return torch.where(keep.reshape(x.shape), x * keep_scale(rate), 0.0).to(x.dtype)

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
    attention_mask   [B, 1, S, S], added: causality, window and padding; None: an encoder's module
                     sees all
    s_aux            [H], attention sinks
    returns          [B, S, H, D], and the weights [B, H, S, S]
    """
    sees_all = attention_mask is None and getattr(module, "is_causal", True) is False
    if (attention_mask is None and not sees_all) or key.shape[2] != query.shape[2]:
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
    scores = scores if attention_mask is None else scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)[..., : key.shape[2]]
    keyed = _ACTIVE.get()
    if dropout > 0 and keyed is not None:
        weights = keyed.drop_attention(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def choose_attention(model: Any) -> None:
    """Take PyTorch's attention, or eager attention where a class has no other.

    Ours is eager too. It is taken where attention drops, and in float64: there transformers' eager
    attention rounds to float32, in which a padded line that a window leaves empty becomes NaN.
    """
    if not hasattr(model, "set_attn_implementation"):
        return
    supported = has_sdpa(model)
    plain = "sdpa" if supported else "eager"
    if has_attention_dropout(model) or (not supported and model.dtype == torch.float64):
        register_attention()
        plain = EAGER
    model.set_attn_implementation(plain)
