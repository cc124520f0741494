"""Probe a model in batch form: whether it looks ahead, or sees padding.

In batch form the model's own code runs on padded lines. That is right only where the hidden state
of a token, and so its logits, change neither with later tokens, nor with padding behind it, nor
with other lines. The probe changes each of these and watches the last hidden states of early
tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.errors import BatchFormUnsafe
from tlora_fx.ir.graph import output_of
from tlora_fx.model.batch import IGNORED, JobTokens, pad
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.passes.lower_loss import HEAD, LOSS

LENGTH, WATCHED, WIDE = 12, 6, 21
# Other tokens in equal shapes change no bit of a causal model; float32 and wider get some room.
# Other shapes round otherwise.
SAME_SHAPE, OTHER_SHAPE, HALF = 64, 1024, 4


def probe_batch_form(model: SuperModel) -> None:
    """Try a model that has its weights.

    raises    BatchFormUnsafe, saying what early logits change with
    """
    draw = random.Random(0)  # noqa: S311  (tokens to try, no secrets)
    logits: Any = output_of(model.group.blocks[HEAD].graph).args[0]
    vocabulary = int(logits.meta["val"].shape[-1])

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    early, late, other = tokens(WATCHED), tokens(LENGTH - WATCHED), tokens(LENGTH)
    before = _early_states(model, [early + late, other])
    scale = float(before.abs().max())
    changes = {
        "later tokens": ([early + tokens(LENGTH - WATCHED), other], SAME_SHAPE, 0),
        "other lines of the batch": ([early + late, tokens(LENGTH)], SAME_SHAPE, 0),
        "padding behind it": ([early + late, tokens(WIDE)], OTHER_SHAPE, HALF),
    }
    for what, (lines, wide, half) in changes.items():
        moved = float((_early_states(model, lines) - before).abs().max())
        kind = model.backbone.dtype
        allowed = (wide if kind.itemsize > 2 else half) * torch.finfo(kind).eps * scale
        if not moved <= allowed:
            raise BatchFormUnsafe(
                f"the base's logits for a token change with {what}",
                base=model.backbone.title,
                expected=f"the hidden states of the first {WATCHED} tokens within {allowed:.3g}",
                found=f"{moved:.3g}",
                help="only causal models that do not see padding can share padded batches",
            )


@torch.no_grad()
def _early_states(model: SuperModel, lines: Sequence[list[int]]) -> Tensor:
    """The last hidden states [WATCHED, H] of the first line; all lines are the first job's."""
    labels = [[IGNORED] * len(line) for line in lines]
    first = JobTokens(list(lines), labels, model.jobs[0].seed)
    rest = [JobTokens((), (), job.seed) for job in model.jobs[1:]]
    device = next(model.parameters()).device
    seen: list[Tensor] = []

    def watch(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0][0, :WATCHED])

    handle = model.net.get_submodule(LOSS).register_forward_pre_hook(watch)
    try:
        model(pad([first, *rest]).to(device))
    finally:
        handle.remove()
    return seen[0].to(torch.promote_types(seen[0].dtype, torch.float32))
