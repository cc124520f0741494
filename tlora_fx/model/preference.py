"""The losses of jobs that learn from pairs: what of a row's token losses they compare.

A pair is two sequences behind each other, the chosen one first. DPO asks how much more the adapter
prefers the chosen one than its reference does: the base, or the adapter that the job continues.
ORPO asks for the chosen one's likelihood and for the odds of both. What is called the base here is
that reference. A reward head gives each sequence a number, and is asked for a greater one for the
chosen sequence, and for numbers around zero where they are centered.

source   Rafailov et al., Direct Preference Optimization, equation 7; Hong et al., ORPO, equations
         6 and 7; Bradley and Terry's model of pairs; Eisenstein et al., Helping or Herding,
         equation 2; all as TRL's trainers average them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_fx.model.objectives import SequenceLoss
from tlora_fx.ops import segment_sum

# Of a pair: the chosen sequence's prompt, where it counts, its completion, and the rejected one's.
_PARTS = 3


@dataclass(frozen=True, slots=True)
class Preference:
    """Comparison of the sequences of a pair, by a job's method.

    beta     that of the method
    center   of rewards: weight of the square of a pair's sum
    """

    method: Literal["dpo", "orpo", "reward"]
    beta: float = 0.0
    center: float = 0.0


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of one job in one row.

    job        its index
    segments   int32 [3 P + 1] on the CPU, among the job's own target rows: of each pair the targets
               of the chosen prompt, of the chosen completion, and of the rejected one
    base       of the same, the losses of the base alone, [3 P]; None where none are asked for
    margins    of centered rewards, [P]; else None

    Of rewards a token loss is a sequence's number, less the margin that a chosen one must have.
    """

    job: int
    preference: Preference
    segments: Tensor
    base: Tensor | None = None
    margins: Tensor | None = None

    @property
    def needs_base(self) -> bool:
        """Whether the loss compares with the base."""
        return self.preference.method == "dpo"

    def with_base(self, losses: Tensor) -> Pairs:
        """The same with the base's losses of the job's target rows, [N], or with more behind."""
        return replace(self, base=segment_sum(losses[: int(self.segments[-1])], self.segments))

    def to(self, device: torch.device | str) -> Pairs:
        """The same, with margins there; its table stays on the CPU."""
        return self if self.margins is None else replace(self, margins=self.margins.to(device))

    def loss(self, losses: Tensor) -> Tensor:
        """The sum of the pairs' losses.

        losses    [N], of the job's own target rows, or with more behind them
        returns   []
        raises    AssertionError where the base's losses are needed and not there
        """
        sums: Tensor = segment_sum(losses[: int(self.segments[-1])], self.segments)
        prompts, chosen, rejected = sums.view(-1, _PARTS).unbind(1)
        beta = self.preference.beta
        if self.preference.method == "reward":
            loss = -F.logsigmoid(chosen - rejected).sum()
            if self.margins is None:
                return loss
            both = chosen + self.margins.to(chosen) + rejected
            return loss + self.preference.center * both.square().sum()
        if self.preference.method == "dpo":
            assert self.base is not None, "the base was not asked"
            _, base_chosen, base_rejected = self.base.view(-1, _PARTS).unbind(1)
            margin = (rejected - base_rejected) - (chosen - base_chosen)
            return -F.logsigmoid(beta * margin).sum()
        counts = self.segments.diff().view(-1, _PARTS).to(sums)
        tokens = counts[:, :2].sum()
        likelihood = (prompts + chosen).sum() / tokens * len(counts)
        good, bad = -chosen / counts[:, 1], -rejected / counts[:, 2]
        odds = (good - bad) - (_log_of_rest(good) - _log_of_rest(bad))
        return likelihood - beta * F.logsigmoid(odds).sum()


def _log_of_rest(log: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, by the form that keeps its digits."""
    return torch.where(log < -0.6931, torch.log1p(-torch.exp(log)), torch.log(-torch.expm1(log)))


def pairs_of(job: int, preference: Preference, labels: Sequence[Sequence[int]], none: int) -> Pairs:
    """The pairs of a job's sequences.

    labels   of each sequence, unshifted; the rejected one's first says where a prompt ends
    none     what a label is that is no target
    """
    if preference.method == "reward":
        # A number of each sequence, and nothing of prompts.
        counts = torch.tensor([0, 1, 1], dtype=torch.int32).repeat(len(labels) // 2)
        segments = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        margins = _margins(labels[::2], none) if preference.center else None
        return Pairs(job, preference, segments, margins=margins)
    bounds = [0]
    for chosen, rejected in zip(labels[::2], labels[1::2], strict=True):
        prompt = next(at for at, label in enumerate(rejected) if label != none)
        for part in (chosen[1:prompt], chosen[max(1, prompt) :], rejected[1:]):
            bounds.append(bounds[-1] + sum(label != none for label in part))
    return Pairs(job, preference, torch.tensor(bounds, dtype=torch.int32))


def _margins(labels: Sequence[Sequence[int]], none: int) -> Tensor:
    """The number whose bits are the label of each chosen sequence."""
    codes = [label for own in labels for label in own if label != none]
    return torch.from_numpy(np.array(codes, dtype=np.int64).astype(np.int32).view(np.float32))


def with_preferences(
    sums: Tensor, losses: Tensor, segments: Tensor, pairs: Sequence[Pairs | SequenceLoss]
) -> Tensor:
    """Each job's loss, where some jobs compare pairs, or have losses of whole sequences.

    sums       [J], of the token losses
    losses     [N]
    segments   int32 [J + 1] on the CPU
    """
    spans = list(pairwise(segments.tolist()))
    each = list(sums.unbind())
    for own in pairs:
        start, stop = spans[own.job]
        each[own.job] = own.loss(losses[start:stop])
    return torch.stack(each)


def with_base(
    pairs: Sequence[Pairs | SequenceLoss], losses: Tensor, segments: Tensor
) -> tuple[Pairs | SequenceLoss, ...]:
    """The pairs with the base's losses.

    losses     [N], of a row in which jobs that compare with the base have the same targets
    segments   int32 [J + 1] on the CPU, of that row
    """
    spans = list(pairwise(segments.tolist()))
    return tuple(
        own.with_base(losses[slice(*spans[own.job])]) if own.needs_base else own for own in pairs
    )
