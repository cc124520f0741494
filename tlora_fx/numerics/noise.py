"""How far a base's own numbers move when the same tokens stand in another batch.

A sum rounds otherwise in another shape, so a base without adapters gives the same tokens other last
bits alone than in a padded batch. How far they move depends on the base: on its depth, its scales,
and on what it computes in a narrower dtype than its weights have. What compares a fused model with
its base measures this noise and lets it widen the bound, up to a ceiling that no noise lifts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

# Two layouts are two draws of the rounding error. Fused against alone is a third one, which may
# well be some times larger than the two happened to lie apart.
FACTOR = 8.0


def lifted(floor: float, noise: float, ceiling: float) -> float:
    """The largest difference that passes where the base itself moves by `noise`.

    floor     passes whatever the noise
    ceiling   never passed; noise beyond it is no rounding but another result, and lifts nothing
    """
    if not noise <= ceiling:
        return floor
    return max(floor, min(FACTOR * noise, ceiling))


@dataclass(frozen=True, slots=True)
class BaseNoise:
    """Largest relative differences of a base from itself in another batch layout.

    logits      of any line, norm of the difference over the norm
    gradients   of all parameters asked for together, 0 where none were
    """

    logits: float
    gradients: float


def base_noise(
    base: nn.Module, lines: Sequence[Sequence[int]], parameters: Sequence[nn.Parameter] = ()
) -> BaseNoise:
    """Run lines alone and as one batch, padded on the right, and compare.

    base         a transformers causal LM, which is told what is padding, or any module from ids
                 [B, S] to logits [B, S, V]; it runs in evaluation mode, with the attention that
                 it is set to
    lines        token ids of two lines or more, of different lengths
    parameters   whose gradients are measured too, those of one fixed function of all logits
    """
    assert len(lines) > 1
    weights: list[Tensor] = []
    with _evaluating(base):
        together = _outcome(base, [lines], parameters, weights)
        alone = _outcome(base, [[line] for line in lines], parameters, weights)
    pairs = zip(together.logits, alone.logits, strict=True)
    return BaseNoise(
        max(_apart([one], [two]) for one, two in pairs),
        _apart(together.gradients, alone.gradients) if parameters else 0.0,
    )


def rounding_unit(base: nn.Module, line: Sequence[int]) -> float:
    """The machine epsilon of the narrowest float dtype that a base computes in on a line.

    Many bases in float64 compute their norms, softmax or loss in float32.
    """
    watch = _FloatDtypes()
    device = _device_of(base)
    with _evaluating(base), torch.no_grad(), watch:
        _logits(base, torch.tensor([list(line)], device=device), None)
    return max((torch.finfo(dtype).eps for dtype in watch.seen), default=0.0)


def disturb_embeddings(model: nn.Module, draw: int = 0) -> list[RemovableHandle]:
    """Move what every embedding of a model gives by about a rounding, until the hooks are removed.

    draw   the number of the disturbance, which decides it
    """
    generator = torch.Generator().manual_seed(draw)

    def disturb(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        unit = 2 * torch.finfo(output.dtype).eps
        noise = torch.randn(output.shape, generator=generator).to(output.device, torch.float64)
        return output + (output.double() * unit * noise).to(output.dtype)

    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    return [table.register_forward_hook(disturb) for table in tables]


@dataclass(slots=True)
class _Outcome:
    logits: list[Tensor]
    gradients: list[Tensor]


def _outcome(
    base: nn.Module,
    batches: Sequence[Sequence[Sequence[int]]],
    parameters: Sequence[nn.Parameter],
    weights: list[Tensor],
) -> _Outcome:
    """Every line's logits [its tokens, V], and the gradients of their sum under `weights`.

    weights   one tensor a line, drawn when it is empty
    """
    with torch.set_grad_enabled(bool(parameters)):
        logits = [line for batch in batches for line in _lines(base, batch)]
    gradients: list[Tensor] = []
    if parameters:
        if not weights:
            weights.extend(_drawn(logits))
        total = torch.stack([(a * w).sum() for a, w in zip(logits, weights, strict=True)]).sum()
        found = torch.autograd.grad(total, list(parameters), allow_unused=True)
        gradients = [gradient for gradient in found if gradient is not None]
    return _Outcome([line.detach() for line in logits], gradients)


def _lines(base: nn.Module, batch: Sequence[Sequence[int]]) -> list[Tensor]:
    """A batch's logits, padding left out."""
    rows = [torch.tensor(list(line), device=_device_of(base)) for line in batch]
    ids = pad_sequence(rows, batch_first=True)
    attended = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = _logits(base, ids, attended)
    return [part[: len(line)] for part, line in zip(logits, batch, strict=True)]


def _logits(base: nn.Module, ids: Tensor, attended: Tensor | None) -> Tensor:
    from transformers import PreTrainedModel

    found: Any
    if isinstance(base, PreTrainedModel):
        found = base(input_ids=ids, attention_mask=attended, use_cache=False)
    else:
        found = base(ids)
    logits: Tensor = getattr(found, "logits", found)
    return logits


def _drawn(logits: Sequence[Tensor]) -> Iterator[Tensor]:
    for number, line in enumerate(logits):
        generator = torch.Generator().manual_seed(number)
        yield torch.randn(line.shape, generator=generator, dtype=torch.float64).to(line)


def _apart(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of the second; infinite for NaN."""
    one, two = (torch.cat([part.flatten().double() for part in parts]) for parts in (mine, theirs))
    difference, size = float((one - two).norm()), float(two.norm())
    if not (difference >= 0 and size >= 0):
        return float("inf")
    return difference / size if size else (float("inf") if difference else 0.0)


class _FloatDtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the float dtypes of all values that operators give."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.seen.add(value.dtype)
        return found


@contextmanager
def _evaluating(base: nn.Module) -> Iterator[None]:
    """A base's modules in evaluation mode, each back in its own mode afterwards."""
    modes = {module: module.training for module in base.modules()}
    base.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _device_of(base: nn.Module) -> torch.device:
    return next(base.parameters()).device
