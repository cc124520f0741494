"""Losses of a loop of one's own: what a job's target tokens cost, by their log-probabilities.

A loss by token is a function of one token's log-probability and of what its sample says of the
token. Such losses of all jobs share a row, and the gradient of a frozen head is taken with them. A
loss by sequence needs the log-probabilities of a whole sequence before any of its gradients.

All losses are sums over tokens; who asks for a mean divides by a normalizer.

sources   importance sampling and the clipped ratio: Schulman et al., Proximal Policy Optimization
          Algorithms, equations 6 and 7; cispo: MiniMax-M1; gspo, in its token form: Zheng et al.,
          Group Sequence Policy Optimization; dro: Richemond et al., Offline Regularised
          Reinforcement Learning for Large Language Models Alignment; kto: Ethayarajh et al., KTO:
          Model Alignment as Prospect Theoretic Optimization, equation 7, with the estimate of the
          divergence that TRL's KTOTrainer makes; label smoothing: torch's cross entropy
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_fx.config.losses import BY_TOKEN, FIELDS

#: From the log-probabilities of a micro-batch's sequences, [n] each, and what their samples say of
#: these tokens, dicts of [n] by name, to the sum of the losses, or that and numbers to report by
#: name. Any, for functions say dict or Mapping.
OwnLoss: TypeAlias = Callable[[list[Tensor], list[Any]], Any]
_KINDS = {name: kind for kind, name in enumerate(BY_TOKEN)}


@dataclass(eq=False)
class Scores:
    """Values of a job that one call of `accumulate` finds beside its gradients.

    logprobs   by the first token of a micro-batch in the job's step: of its target tokens, [n]
    metrics    likewise: the numbers that an own loss reports, or tensors of one
    """

    logprobs: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss of one job in one row.

    loss      a name of `config.losses.LOSSES`, or a function of one's own
    options   all options of a loss with a name
    given     of each sequence, what its sample says of its target tokens, by name; () where none
              is asked. Of kto whether the sequence is desirable: one number, 0 or 1
    scores    where log-probabilities and metrics go
    """

    loss: str | OwnLoss
    options: Mapping[str, float]
    given: Sequence[Mapping[str, Sequence[float]]]
    scores: Scores

    @property
    def is_by_token(self) -> bool:
        """Whether it needs no other token's log-probability."""
        return isinstance(self.loss, str) and self.loss in BY_TOKEN


@dataclass(eq=False, slots=True)
class TokenTerms:
    """Losses by token of a row's target rows.

    values    [N, 6], float64: what FIELDS names, two options of the loss, and its kind
    asked     by job: the first token of its sequences in its step, where its scores go, and which
              of the row's target rows are its own
    smooths   whether a job's labels are smoothed
    logprobs  [N], once the row has run: of its target rows
    """

    values: Tensor
    asked: Mapping[int, tuple[int, Scores, slice]]
    smooths: bool = False
    logprobs: Tensor | None = None

    def to(self, device: torch.device | str) -> TokenTerms:
        """The same on a device."""
        return replace(self, values=self.values.to(device, non_blocking=True))

    def padded(self, rows: int) -> TokenTerms:
        """The same with so many more rows behind the others, which have no target."""
        return replace(self, values=F.pad(self.values, (0, 0, 0, rows)))

    def unasked(self) -> TokenTerms:
        """Values of its own, of which nobody gets the log-probabilities."""
        return replace(self, values=self.values.clone(), asked={}, logprobs=None)

    def keep(self, logprobs: Tensor) -> None:
        """Keep the log-probabilities of the row's target rows, [N], where jobs ask for theirs."""
        for first, scores, own in self.asked.values():
            scores.logprobs[first] = logprobs[own]


def token_losses(logprobs: Tensor, values: Tensor, means: Tensor | None = None) -> Tensor:
    """The loss of each token, [n], by the kind that stands in its row.

    logprobs   [n]
    values     [n, 6], as of `TokenTerms`
    means      [n], of the log-probabilities of all tokens there; None where no label is smoothed
    """
    values = values.to(logprobs.dtype)
    weights, old, advantages, first, second, kinds = values.unbind(1)
    is_kind = {name: kinds == kind for name, kind in _KINDS.items()}
    by_ratio = ~(is_kind["cross_entropy"] | is_kind["dro"])
    # Of other losses the ratio is 1, for one that is not finite would make their gradients NaN.
    ratio = torch.exp(torch.where(by_ratio, logprobs - old, 0.0))
    clipped = torch.minimum(torch.maximum(ratio, first), second)
    gains = {
        "cross_entropy": logprobs if means is None else (1 - first) * logprobs + first * means,
        "importance_sampling": ratio * advantages,
        "ppo": torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": clipped.detach() * logprobs * advantages,
        "dro": logprobs * advantages - 0.5 * first * (logprobs - old).square(),
    }
    total = torch.zeros_like(logprobs)
    for name, gain in gains.items():
        total = torch.where(is_kind[name], gain, total)
    return -weights * total


@dataclass(frozen=True, slots=True)
class SequenceLoss:
    """Loss of one job's sequences in one row.

    job        its index
    objective  what it is
    first      first token of the job's sequences in its step
    bounds     where each sequence's target rows begin among the job's own, and where the last ends
    given      of each sequence what its sample says of its target tokens: by name, [n], float64
    base       losses of the job's target rows by the base alone, [N]; None where none are asked for
    """

    job: int
    objective: Objective
    first: int
    bounds: tuple[int, ...]
    given: tuple[Mapping[str, Tensor], ...]
    base: Tensor | None = None

    @property
    def needs_base(self) -> bool:
        """Whether the loss compares with the base."""
        return self.objective.loss == "kto"

    def with_base(self, losses: Tensor) -> SequenceLoss:
        """The same with the base's losses of the job's target rows, [N], or with more behind."""
        return replace(self, base=losses[: self.bounds[-1]])

    def to(self, device: torch.device | str) -> SequenceLoss:
        """The same with what samples say on a device."""
        moved = [
            {name: said.to(device, non_blocking=True) for name, said in of.items()}
            for of in self.given
        ]
        return replace(self, given=tuple(moved))

    def loss(self, losses: Tensor) -> Tensor:
        """The sum of the sequences' losses, [], from the job's token losses, [n] or with more."""
        losses = losses[: self.bounds[-1]]  # Behind them stands what fills up the row.
        logprobs = [-losses[start:stop] for start, stop in pairwise(self.bounds)]
        scores = self.objective.scores
        # What stands behind the sequences of samples is mismatched: see `mismatched`.
        scores.logprobs[self.first] = -losses.detach()[: self.bounds[len(self.given)]]
        given: list[dict[str, Tensor]] = [
            {name: said.to(losses) for name, said in of.items()} for of in self.given
        ]
        if self.objective.loss == "kto":
            return self._kto(losses, torch.cat([of["desirable"] for of in given]))
        if isinstance(self.objective.loss, str):
            options = self.objective.options
            terms = [_gspo(own, of, options) for own, of in zip(logprobs, given, strict=True)]
            return torch.stack(terms).sum()
        total, metrics = _total_and_metrics(self.objective.loss(logprobs, given))
        scores.metrics[self.first] = {n: _number(n, value) for n, value in metrics.items()}
        return _one_number(total, losses)

    def _kto(self, losses: Tensor, desirable: Tensor) -> Tensor:
        """The losses of sequences, the first half, by the divergence of the mismatched ones.

        desirable   [sequences], 0 or 1
        """
        assert self.base is not None, "the base was not asked"
        gains = self.base.to(losses) - losses
        sums = torch.stack([gains[start:stop].sum() for start, stop in pairwise(self.bounds)])
        own, others = sums.chunk(2)
        divergence = others.detach().mean().clamp(min=0)
        options = self.objective.options
        margins = torch.where(desirable > 0, own - divergence, divergence - own)
        weights = torch.where(
            desirable > 0, options["desirable_weight"], options["undesirable_weight"]
        )
        return (weights * (1 - torch.sigmoid(options["beta"] * margins))).sum()


Tokens: TypeAlias = Sequence[int]


def mismatched(
    sequences: Sequence[Tokens],
    labels: Sequence[Tokens],
    beyond: Sequence[Tokens],
    none: int,
    most: int,
) -> tuple[list[Tokens], list[Tokens]]:
    """Each sequence's prompt with the completion of the one before it, the first with the last's.

    By them kto estimates how far an adapter is from the base.

    labels    of each sequence, unshifted; the first that is a target begins the completion
    beyond    the end of each completion that its own sequence has no room for
    none      what a label is that is no target
    most      tokens of a sequence that are kept
    returns   sequences and labels
    """
    starts = [next(at for at, each in enumerate(own) if each != none) for own in labels]
    ids: list[Tokens] = []
    targets: list[Tokens] = []
    for index, start in enumerate(starts):
        begin = starts[index - 1]
        more = beyond[index - 1]
        ids.append([*sequences[index][:start], *sequences[index - 1][begin:], *more][:most])
        targets.append([*[none] * start, *labels[index - 1][begin:], *more][:most])
    return ids, targets


def _gspo(
    logprobs: Tensor, given: Mapping[str, Tensor], options: Mapping[str, float]
) -> Tensor:  # fmt: skip
    """Each token's clipped gain by the ratio of the whole sequence, whose gradient is its own."""
    if not len(logprobs):
        return logprobs.sum()
    sequence = (logprobs.detach() - given["logprobs"]).mean()
    ratio = torch.exp(sequence + logprobs - logprobs.detach())
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    gains = torch.minimum(ratio * given["advantages"], clipped * given["advantages"])
    return -(given["weights"] * gains).sum()


def _total_and_metrics(found: Any) -> tuple[Any, Mapping[str, Any]]:
    if not isinstance(found, tuple):
        return found, {}
    if len(found) != 2:
        raise _no_loss(f"a tuple of {len(found)}")
    if not isinstance(found[1], Mapping):
        raise _no_loss(f"{type(found[1]).__name__} in place of the dict")
    return found


def _number(name: str, value: Any) -> Any:
    """A number to report; one on a device stays there, for nothing waits for it yet."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = _shape(value) if isinstance(value, Tensor) else repr(value)[:80]
        raise _no_loss(f"{name!r} is {shape}") from None


def _one_number(total: Any, losses: Tensor) -> Tensor:
    if not isinstance(total, Tensor):
        raise _no_loss(type(total).__name__)
    if total.numel() != 1:
        raise _no_loss(_shape(total))
    # An evaluation has no gradients.
    if torch.is_grad_enabled() and not total.requires_grad:
        raise TypeError(LACKS_GRADIENT)
    return total.reshape(()).to(losses.dtype)


def _shape(tensor: Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)}"


def _no_loss(found: str) -> TypeError:
    return TypeError(
        "a function as loss returns a tensor of one number, or that and a dict of numbers; "
        f"found {found}"
    )


#: What is said of a loss from which no gradient comes.
LACKS_GRADIENT = (
    "the loss does not depend on the log-probabilities: compute it from them by torch's functions, "
    "without detach(), item(), numpy() or no_grad()"
)


def terms_of(
    objectives: Sequence[Objective | None], firsts: Sequence[int], counts: Sequence[int]
) -> TokenTerms | None:
    """The losses by token of a row; None where all are plain.

    objectives   of each job; None: cross entropy, which counts each token alike
    firsts       first token of each job's sequences in its step
    counts       target rows of each job
    """
    ends = [*accumulate(counts)]
    asked = {
        job: (first, own.scores, slice(end - count, end))
        for job, (own, first, end, count) in enumerate(
            zip(objectives, firsts, ends, counts, strict=True)
        )
        if own is not None and own.is_by_token
    }
    if not asked:
        return None
    values = torch.zeros(sum(counts), len(FIELDS) + 3, dtype=torch.float64)
    values[:, 0] = 1.0
    for own, (start, stop) in zip(objectives, pairwise([0, *ends]), strict=True):
        if own is None or not own.is_by_token or start == stop:
            continue
        assert isinstance(own.loss, str)
        for column, name in enumerate(FIELDS):
            if own.given and name in own.given[0]:
                said = [value for given in own.given for value in given[name]]
                values[start:stop, column] = torch.tensor(said, dtype=torch.float64)
        for column, option in enumerate(own.options.values(), len(FIELDS)):
            values[start:stop, column] = option
        values[start:stop, -1] = _KINDS[own.loss]
    smooths = any(own is not None and own.options.get("label_smoothing") for own in objectives)
    return TokenTerms(values, asked, smooths)


def sequence_losses(
    objectives: Sequence[Objective | None], firsts: Sequence[int], lengths: Sequence[Sequence[int]]
) -> tuple[SequenceLoss, ...]:
    """The losses by sequence of a row.

    lengths   target rows of each of a job's sequences; the others as of `terms_of`
    """
    made = []
    for job, (own, first, counts) in enumerate(zip(objectives, firsts, lengths, strict=True)):
        if own is None or own.is_by_token or not counts:
            continue
        given = tuple(
            {name: torch.tensor(said, dtype=torch.float64) for name, said in of.items()}
            for of in own.given
        )
        made.append(SequenceLoss(job, own, first, (0, *accumulate(counts)), given))
    return tuple(made)
