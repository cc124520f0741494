"""Bases with a loss of their own: a tiny decoder, what its forward makes of labels, and an oracle.

A recipe is weights of tokens, a reduction, a way to write the cross entropy, and terms beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.silence.modules import Decoder, causal, seeded
from tests.silence.oracle import VOCABULARY
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import OwnLossDiffers
from tlora_fx.model.backbone import load_backbone
from tlora_fx.tracing.own_loss import require_common_loss, sample_rows

#: From the model, logits [B, S, V], labels [B, S] and hidden states [B, S, H] to a loss.
Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
IGNORED = -100


class WithLoss(Decoder):
    """A decoder that takes labels, and returns its own loss of them beside its logits."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(causal)
        self.loss = loss
        self.register_buffer("rates", torch.linspace(0.5, 2, VOCABULARY))
        self.further = nn.Linear(8, VOCABULARY)
        with torch.no_grad():
            self.head.weight.mul_(20)  # logits as far apart as those of a trained model

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Any:
        """Logits, and where labels are given a loss."""
        x = self.run(self.embedded(input_ids, None))
        logits = self.logits(x)
        loss = None if labels is None else self.loss(self, logits, labels, x)
        return SimpleNamespace(loss=loss, logits=logits)


def with_loss(loss: Loss) -> nn.Module:
    """The decoder with a loss, in float64."""
    return seeded(lambda: WithLoss(loss))()


def common(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy of each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def each(logits: Tensor, labels: Tensor) -> Tensor:
    """That of each token, [B, S - 1]; 0 where there is no target."""
    scores = logits[:, :-1].transpose(1, 2)
    return F.cross_entropy(scores, labels[:, 1:], reduction="none")


def counted(labels: Tensor) -> Tensor:
    """Which tokens have a target, [B, S - 1]."""
    return labels[:, 1:] != IGNORED


def plain_mean(losses: Tensor, labels: Tensor) -> Tensor:
    """The mean of all that count."""
    return losses.sum() / counted(labels).sum()


def _skipping(logits: Tensor, labels: Tensor, *skipped: int) -> Tensor:
    labels = labels.clone()
    for token in skipped:
        labels[labels == token] = IGNORED
    return common(logits, labels)


def _flat(logits: Tensor, labels: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **more)


def _places(labels: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, labels.shape[1] - 1, dtype=torch.float64, device=labels.device)


def _further(m: Any, labels: Tensor, x: Tensor) -> Tensor:
    return common(m.further(x)[:, :-1], labels[:, 1:])


def _focal(losses: Tensor, power: float = 2.0) -> Tensor:
    return (1 - torch.exp(-losses)) ** power * losses


#: Losses that jobs do not train by.
OTHER: Mapping[str, Loss] = {
    "z-loss": lambda m, l, y, x: common(l, y) + 1e-4 * l.logsumexp(-1).square().mean(),
    "label smoothing": lambda m, l, y, x: _flat(l, y, label_smoothing=0.1),
    "focal loss": lambda m, l, y, x: plain_mean(_focal(each(l, y)), y),
    "class weights": lambda m, l, y, x: _flat(l, y, weight=m.rates.to(l.dtype)),
    "a skipped id": lambda m, l, y, x: _skipping(l, y, 3),
    "the mean of row means": lambda m, l, y, x: (each(l, y).sum(1) / counted(y).sum(1)).mean(),
    "weights by position": lambda m, l, y, x: plain_mean(each(l, y) * _places(y), y),
    "further predictions": lambda m, l, y, x: common(l, y) + 0.3 * _further(m, y, x),
    "a regulariser of parameters": lambda m, l, y, x: (
        common(l, y) + 1e-3 * sum(p.square().sum() for p in m.parameters())
    ),
    "a regulariser of hidden states": lambda m, l, y, x: common(l, y) + 1e-3 * x.square().mean(),
    "a contrastive term": lambda m, l, y, x: (
        common(l, y) + 0.1 * F.cosine_similarity(x[:, 1:], x[:, :-1], dim=-1).mean()
    ),
    "a mean over padding too": lambda m, l, y, x: each(l, y).mean(),
    "a sum": lambda m, l, y, x: each(l, y).sum(),
    "labels that are not shifted": lambda m, l, y, x: F.cross_entropy(l.flatten(0, 1), y.flatten()),
    "a zero that has a gradient": lambda m, l, y, x: common(l, y) + (x - x.detach()).sum(),
    "a clipped loss": lambda m, l, y, x: plain_mean(each(l, y).clamp(max=4.0), y),
    "a temperature": lambda m, l, y, x: common(l / 0.9, y),
    "twice where a label is ignored": lambda m, l, y, x: (
        common(l, y) * (2 if (y == IGNORED).any() else 1)
    ),
}  # fmt: skip

#: The loss that jobs train by, in other words.
SAME: Mapping[str, Loss] = {
    "flat": lambda m, l, y, x: common(l, y),
    "by a mask": lambda m, l, y, x: F.cross_entropy(l[:, :-1][counted(y)], y[:, 1:][counted(y)]),
    "written out": lambda m, l, y, x: plain_mean(
        torch.where(
            counted(y),
            l[:, :-1].logsumexp(-1) - l[:, :-1].gather(2, y[:, 1:, None].clamp(min=0))[..., 0],
            0.0,
        ),
        y,
    ),
    "in float32": lambda m, l, y, x: common(l.float(), y),
    "in chunks": lambda m, l, y, x: sum(
        each(l[:, i : i + 5], y[:, i : i + 5]).sum() for i in range(0, y.shape[1] - 1, 4)
    ) / counted(y).sum(),
    "asking a number": lambda m, l, y, x: each(l, y).sum() / max(int(counted(y).sum()), 1),
    "with a term of weight 0": lambda m, l, y, x: common(l, y) + 0.0 * x.square().mean(),
}  # fmt: skip

#: A job's own samples: of unlike lengths, one with a prompt.
SAMPLES: Sequence[tuple[list[int], list[int]]] = [
    ([1, 4, 9, 3], [1, 4, 9, 3]),
    ([*range(16), *range(5)], [*range(16), *range(5)]),
    ([2, 8, 5, 7, 3, 11, 0], [IGNORED, IGNORED, IGNORED, 7, 3, 11, 0]),
]


def verdict_on(module: nn.Module) -> str:
    """What a job on a base is told: "equal", "told: …" or "refused: …"."""
    backbone = load_backbone(BaseSpec(module=module, dtype="float64"))
    rows = sample_rows(SAMPLES, VOCABULARY)
    try:
        notes = [require_common_loss(backbone, part, ["one"]) for part in ((), rows)]
    except OwnLossDiffers as error:
        return f"refused: {error.render()}"
    told = [note for note in notes if note]
    return f"told: {told[0]}" if told else "equal"


def differs(module: Any) -> bool:
    """Whether a base's own loss, or its gradient, is another one on real numbers."""
    ids = torch.zeros(len(SAMPLES), max(len(line) for line, _ in SAMPLES), dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for place, (line, wanted) in enumerate(SAMPLES):
        ids[place, : len(line)] = torch.tensor(line)
        labels[place, : len(line)] = torch.tensor(wanted)
    batches = [(ids, labels), (ids[1:2], labels[1:2]), (ids[:1, :4], labels[:1, :4])]
    return any(_differs(module, *batch) for batch in batches)


def _differs(module: Any, ids: Tensor, labels: Tensor) -> bool:
    parameters = [p for p in module.parameters() if p.requires_grad]
    out = module(ids, labels=labels)
    ours = common(out.logits, labels)
    found, wanted = (
        torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        for loss in (out.loss, ours)
    )
    apart = [abs(float(out.loss.detach() / ours.detach()) - 1)]
    for mine, theirs in zip(found, wanted, strict=True):
        if mine is not None or theirs is not None:
            change = (0 if mine is None else mine) - (0 if theirs is None else theirs)
            apart.append(float(change.norm()))
    return max(apart) > 1e-6


# Losses that nobody wrote.

WEIGHTS: Mapping[str, Callable[[Any, Tensor, Tensor, int], Tensor]] = {
    "none": lambda m, losses, y, n: losses,
    "class": lambda m, losses, y, n: losses * m.rates.to(losses.dtype)[y[:, 1:].clamp(min=0)],
    "one class": lambda m, losses, y, n: torch.where(y[:, 1:] == n % VOCABULARY, 3.0, 1.0) * losses,
    "position": lambda m, losses, y, n: losses * _places(y),
    "late": lambda m, losses, y, n: losses * (torch.ones_like(losses).cumsum(1) >= n % 24),
    "focal": lambda m, losses, y, n: _focal(losses, 1 + n % 3),
    "clipped": lambda m, losses, y, n: losses.clamp(max=float(1 + n % 40)),
    "hard ones": lambda m, losses, y, n: torch.where(losses > n % 20, 1.5 * losses, losses),
}  # fmt: skip
REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": plain_mean,
    "sum": lambda losses, y: losses.sum(),
    "row means": lambda losses, y: (losses.sum(1) / counted(y).sum(1)).mean(),
    "all": lambda losses, y: losses.mean(),
    "per line": lambda losses, y: losses.sum() / len(y),
    "root": lambda losses, y: plain_mean(losses.square(), y).sqrt(),
    "largest": lambda losses, y: losses.max(),
}
TERMS: Mapping[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "z": lambda m, l, y, x: l.logsumexp(-1).square().mean(),
    "entropy": lambda m, l, y, x: -(l.softmax(-1) * l.log_softmax(-1)).sum(-1).mean(),
    "hidden": lambda m, l, y, x: x.square().mean(),
    "parameters": lambda m, l, y, x: sum(p.square().sum() for p in m.parameters()),
    "further": lambda m, l, y, x: _further(m, y, x),
    "smoothness": lambda m, l, y, x: (l[:, 1:] - l[:, :-1]).square().mean(),
    "backward only": lambda m, l, y, x: (l - l.detach()).sum(),
    "nothing": lambda m, l, y, x: (x * 0).sum(),
}
Recipe = tuple[str, int, str, tuple[tuple[str, float], ...]]


def of_recipe(recipe: Recipe) -> Loss:
    """The loss of a recipe."""
    weights, number, reduction, terms = recipe

    def loss(m: Any, logits: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        losses = WEIGHTS[weights](m, each(logits, labels), labels, number)
        total = REDUCTIONS[reduction](losses, labels)
        return total + sum(rate * TERMS[name](m, logits, labels, x) for name, rate in terms)

    return loss


def recipes() -> st.SearchStrategy[Recipe]:
    """Weights, a reduction and up to two terms; often the plain ones."""
    plain = st.just("none"), st.just("mean")
    term = st.tuples(st.sampled_from(sorted(TERMS)), st.sampled_from([0.0, 1e-6, 1e-3, 0.3, 1.0]))
    return st.tuples(
        st.one_of(plain[0], st.sampled_from(sorted(WEIGHTS))),
        st.integers(0, 40),
        st.one_of(plain[1], st.sampled_from(sorted(REDUCTIONS))),
        st.lists(term, max_size=2).map(tuple),
    )


def drawn(number: int) -> Recipe:
    """The second recipe that hypothesis draws by a seed; the first is the smallest for all."""
    kept: list[Recipe] = []

    @seed(number)
    @settings(max_examples=2, phases=[Phase.generate], database=None)
    @given(recipes())
    def keep(recipe: Recipe) -> None:
        kept.append(recipe)

    keep()
    return kept[-1]
