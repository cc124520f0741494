"""Data that a client sends to learn from, as batches of `GroupStep`.

A client's targets are shifted already: target i is predicted from tokens 0 to i. A `Sample` has
labels that are not shifted, so a sequence of n tokens with n targets becomes one of n + 1 tokens,
the last of which nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlora_fx.config.losses import FIELDS, LOSSES, MAX_LOGPROB, reads_logprobs
from tlora_fx.errors import CommandRefused
from tlora_fx.model.batch import IGNORED
from tlora_fx.model.objectives import Scores, sequence_losses, terms_of, token_losses
from tlora_fx.runtime.data.samples import Sample
from tlora_fx.runtime.step_batches import Batch
from tlora_fx.training.custom_loss import CustomLoss
from tlora_fx.training.messages import Datum, ForwardBackward

#: A request is cut into micro-batches of so many tokens, which depends on no other request.
MICRO_TOKENS = 2048
TARGETS = "target_tokens"
#: Losses that clients ask for and that the service does not have.
INSTEAD = {
    "stable_reinforce": "its definition is not public: use loss_fn='importance_sampling' or 'ppo'",
}


def batch_of(
    request: ForwardBackward,
    positions: int | None,
    custom: CustomLoss | None = None,
    cuts: Sequence[int] = (),
) -> Batch:
    """The batch that a request asks to learn from.

    positions   tokens of a sequence at most; None: any number
    custom      the loss "custom"; who runs a micro-batch tells it what its data say
    cuts        data of each micro-batch, where the request ran before
    raises      CommandRefused for a loss that is not there and data that does not fit it. Whether
                the base knows the tokens, and the loss the options, is `require_batch`'s to say
    """
    if custom is None and request.loss not in LOSSES:
        raise CommandRefused(
            "there is no such loss",
            expected=", ".join(LOSSES),
            found=request.loss,
            help=INSTEAD.get(request.loss, ""),
        )
    if request.loss == "kto" and request.forward_only:
        raise CommandRefused(
            "the loss 'kto' asks the base too, which a forward alone does not",
            help="call forward_backward, or forward with loss_fn='cross_entropy'",
        )
    options: dict[str, float] = {}
    for name, value in request.options.items() if custom is None else ():
        if isinstance(value, str):
            raise CommandRefused(f"option '{name}' of the loss is a text", expected="a number")
        options[name] = value
    if not request.data:
        raise CommandRefused("the request has no data")
    data = request.data
    if custom is not None:
        data = [replace(each, inputs=_only_targets(each.inputs)) for each in data]
    samples = [_sample(at, datum, request.loss, positions) for at, datum in enumerate(data)]
    loss: Any = custom or request.loss
    return Batch(_cut(samples, cuts), loss=loss, loss_options=options, reduction="sum")


def _sample(at: int, datum: Datum, loss: str, positions: int | None) -> Sample:
    tokens, inputs = datum.tokens, dict(datum.inputs)
    targets = inputs.pop(TARGETS, None)
    if targets is None or len(targets) != len(tokens) or not len(tokens):
        raise CommandRefused(
            f"datum {at} needs a target for each of its tokens",
            expected=f"{TARGETS} of {len(tokens)} numbers, and a token at least",
            found="none" if targets is None else len(targets),
        )
    if positions is not None and len(tokens) >= positions:
        raise CommandRefused(
            f"datum {at} is too long", expected=f"fewer than {positions} tokens", found=len(tokens)
        )
    if targets.dtype.kind != "i" or min(tokens.min(), targets.min()) < 0:
        raise CommandRefused(
            f"datum {at} has a token that is none", expected="whole numbers from 0"
        )
    if loss == "kto":
        return _judged(at, tokens, targets, inputs)
    if unknown := sorted(set(inputs) - set(FIELDS)):
        raise CommandRefused(
            f"the loss '{loss}' does not read {', '.join(unknown)} of datum {at}",
            expected=f"{TARGETS}, {', '.join(FIELDS)}",
        )
    old = inputs.get("logprobs")
    if reads_logprobs(loss) and old is not None and (old > MAX_LOGPROB).any():
        first = int(np.argmax(old > MAX_LOGPROB))
        raise CommandRefused(
            f"logprobs of datum {at} are no log-probabilities",
            expected="numbers of at most 0",
            found=f"{old[first]:g} of target {first}",
            help="send the logarithm, not the probability, or its negative",
        )
    said: dict[str, Any] = {name: (0.0, *map(float, values)) for name, values in inputs.items()}
    return Sample((*map(int, tokens), int(targets[-1])), (IGNORED, *map(int, targets)), **said)


def _judged(
    at: int, tokens: np.ndarray, targets: np.ndarray, inputs: Mapping[str, np.ndarray]
) -> Sample:
    """A datum of kto: its completion are the targets of weight 1, and `desirable` judges it."""
    weights, said = inputs.get("weights", np.ones(len(tokens))), inputs.get("desirable")
    fits = inputs.keys() <= {"weights", "desirable"} and said is not None
    fits = fits and all(len(each) == len(tokens) for each in inputs.values())
    if said is None or not fits or {*said} not in ({0}, {1}) or not {*weights} <= {0, 1}:
        raise CommandRefused(
            f"datum {at} does not fit the loss 'kto'",
            expected="desirable: 1 or 0 for all tokens; weights: 1 for those of the completion",
            found=", ".join(sorted(inputs)) or "neither",
        )
    labels = (int(each) if on else IGNORED for each, on in zip(targets, weights, strict=True))
    ids = (*map(int, tokens), int(targets[-1]))
    return Sample(ids, (IGNORED, *labels), desirable=bool(said[0]))


def _only_targets(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: each for name, each in inputs.items() if name == TARGETS}


def _cut(samples: Sequence[Sample], cuts: Sequence[int]) -> list[list[Sample]]:
    """Micro-batches of whole samples, each of MICRO_TOKENS at most or of one sample.

    cuts   samples of each; empty: none of them is known
    """
    if cuts:
        left = iter(samples)
        return [[*islice(left, count)] for count in cuts]
    cut: list[list[Sample]] = []
    size = MICRO_TOKENS
    for sample in samples:
        size += len(sample.input_ids)
        if size > MICRO_TOKENS:
            cut.append([])
            size = len(sample.input_ids)
        cut[-1].append(sample)
    return cut


def loss_of(batch: Batch, logprobs: Sequence[Tensor]) -> float:
    """The loss of a batch from its log-probabilities, where no gradients were asked for.

    logprobs   of each sample's targets, [n] each
    """
    total, rest = 0.0, [each.double().cpu() for each in logprobs]
    for objective in batch.objectives(Scores(), 1):
        own, rest = rest[: len(objective.given)], rest[len(objective.given) :]
        counts = [len(each) for each in own]
        if objective.is_by_token:
            terms = terms_of([objective], [0], [sum(counts)])
            assert terms is not None
            total += float(token_losses(torch.cat(own), terms.values).sum())
            continue
        (sequences,) = sequence_losses([objective], [0], [counts])
        total += float(sequences.loss((-torch.cat(own)).requires_grad_()))
    return total
