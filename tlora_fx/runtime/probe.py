"""Before training in batch form: does the model look ahead, or see padding?

In batch form the model's own code runs on padded lines. That is right only where the logits of a
token change neither with later tokens, nor with padding behind it, nor with other lines. The probe
changes each of these and watches the loss of early tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from tlora_fx.batch import IGNORED, JobTokens, pad
from tlora_fx.errors import BatchFormUnsafe
from tlora_fx.passes.lower_loss import HEAD
from tlora_fx.graph import output_of
from tlora_fx.supermodel import SuperModel

LENGTH, WATCHED, WIDE = 12, 6, 21
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
HALF_TOLERANCE = 2e-2


def probe_batch_form(model: SuperModel) -> None:
    """Try a model that has its weights.

    raises    BatchFormUnsafe, saying what early logits change with
    """
    draw = random.Random(0)
    vocabulary = int(output_of(model.group.blocks[HEAD].graph).args[0].meta["val"].shape[-1])  # type: ignore[union-attr]

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    early = tokens(WATCHED)
    late, other = tokens(LENGTH - WATCHED), tokens(LENGTH)
    before = _loss(model, [early + late, other])
    changes = {
        "later tokens": [early + tokens(LENGTH - WATCHED), other],
        "padding behind it": [early + late, tokens(WIDE)],
        "other lines of the batch": [early + late, tokens(LENGTH)],
    }
    tolerance = TOLERANCE.get(model.backbone.dtype, HALF_TOLERANCE)
    for what, lines in changes.items():
        after = _loss(model, lines)
        if not abs(after - before) <= tolerance * max(1.0, abs(before)):
            raise BatchFormUnsafe(
                f"the base's logits for a token change with {what}",
                base=model.backbone.title,
                expected=f"loss {before:.9g} of the first {WATCHED} tokens",
                found=f"{after:.9g}",
                help="only causal models that do not see padding can share padded batches",
            )


@torch.no_grad()
def _loss(model: SuperModel, lines: Sequence[list[int]]) -> float:
    """Loss of the first tokens of the first line; all lines are the first job's."""
    watched = lines[0][:WATCHED] + [IGNORED] * (len(lines[0]) - WATCHED)
    labels = [watched, *([IGNORED] * len(line) for line in lines[1:])]
    first = JobTokens(list(lines), labels, model.jobs[0].seed)
    rest = [JobTokens((), (), job.seed) for job in model.jobs[1:]]
    device = next(model.parameters()).device
    return float(model(pad([first, *rest]).to(device))[0])
