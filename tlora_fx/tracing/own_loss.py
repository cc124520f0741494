"""A base's own loss, the one that its forward computes of labels, compared with that of the jobs.

Jobs train by the mean cross entropy of each next token, unless they have another method. A base
whose own loss is another one, by a term, a weight or a mean, would silently learn something else.
Its forward runs on rows of different lengths, with padding and with labels of -100, without its
matrices (`value_run`): only what lies between logits and loss costs anything. The value and its
gradient must equal ours.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlora_fx.errors import OwnLossDiffers
from tlora_fx.model.backbone import Backbone, text_config
from tlora_fx.model.batch import IGNORED
from tlora_fx.tracing.layers import plan_layers, pruned_copy
from tlora_fx.tracing.masks import unpacked_lines
from tlora_fx.tracing.value_run import NotEvaluated, ValueRun, quietly

#: Relative difference that passes in float64, where a sum of a thousand rounded numbers is off by
#: 1e-13; the smallest term that anybody adds on purpose is far larger.
EQUAL = 1e-9
#: And in float32, where a base's code does not run in float64.
EQUAL_NARROW = 1e-5
#: Names of a forward's argument that holds labels, transformers' first. Behind it are those that
#: hold the next token already.
LABELS, TARGETS = ("labels", "label", "lm_labels"), ("targets", "target", "y")
#: Logits of the rows that a base is tried on, as numbers, of those that run together, and of one.
MAX_LOGITS, MAX_BATCH, MAX_ROW = 1 << 25, 1 << 24, 1 << 22
#: Logits up to which the gradient of a row of one line is compared.
MAX_DERIVED = 1 << 20
#: Labels of a job's samples that are tried, the most frequent ones.
MAX_LABELS = 4096
#: Ids of which a loss may treat each unlike all others.
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "mask_token_id")
DEFINED = "the mean cross entropy of each next token"
HELP = (
    "set loss: cross_entropy in the job, which trains it by the cross entropy of the next token "
    "alone, or train this base with PEFT and its own loss"
)


@dataclass(frozen=True, slots=True)
class LossRow:
    """A batch to compare losses on.

    name      what it is, for people
    lines     ids of each sequence
    labels    of each, as long; -100: no target
    spread    standard deviation of the logits: 3 as of a trained model, 30 as of one that errs
    """

    name: str
    lines: tuple[tuple[int, ...], ...]
    labels: tuple[tuple[int, ...], ...]
    spread: float = 3.0

    @property
    def has_ignored(self) -> bool:
        """Whether a label counts for nothing, or a line is padded."""
        return self.is_padded or any(IGNORED in line for line in self.labels)

    @property
    def is_padded(self) -> bool:
        """Whether its lines have different lengths."""
        return len({len(line) for line in self.lines}) > 1

    def inputs(self, filler: int) -> dict[str, Tensor]:
        """ids, labels and mask of padding, [B, S]; padding stands behind."""
        width = max(map(len, self.lines))

        def padded(lines: Sequence[Sequence[int]], by: int) -> Tensor:
            return torch.tensor([[*line, *(width - len(line)) * [by]] for line in lines])

        return {
            "input_ids": padded(self.lines, filler),
            "labels": padded(self.labels, IGNORED),
            "attention_mask": padded([[1] * len(line) for line in self.lines], 0),
        }


@dataclass
class Comparison:
    """Result of a comparison on all rows.

    equal      the rows on which the losses are equal
    reasons    why a row could not be compared, by its name
    """

    equal: list[LossRow] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def note(self) -> str | None:
        """Note for the report, None where all rows were compared."""
        if not self.reasons:
            return None
        rows, reason = next(iter(self.reasons.items()))
        if not self.equal:
            return (
                f"the base's own loss was not compared with the cross entropy of the next token, "
                f"by which jobs train: {reason}"
            )
        return (
            f"the base's own loss equals the cross entropy of the next token, but was not compared "
            f"on {rows}: {reason}"
        )


def require_common_loss(
    backbone: Backbone, rows: Sequence[LossRow] = (), jobs: Sequence[str] = ()
) -> str | None:
    """Refuse a base whose own loss is not the mean cross entropy of each next token.

    rows      of the jobs' own samples; none: rows of ids of all kinds are made
    jobs      names of the jobs that train by cross entropy without saying so, for errors
    returns   what to report where the losses could not be compared, else None
    raises    OwnLossDiffers
    """
    if backbone.spec.is_classifier:
        return None
    named = _label_argument(backbone.model)
    if named is None:
        return None
    compared = Comparison()
    try:
        base = _OwnLoss(backbone, named, jobs)
        tried = rows or made_rows(base.vocabulary, special_ids(backbone))
    except Exception as error:  # noqa: BLE001  (a base's code may be any)
        compared.reasons["any row"] = _words(error)
        return compared.note()
    base.compare(tried, compared)
    if compared.equal and not rows:
        singled = sorted(i for i in base.singled_out if 0 <= i < base.vocabulary)[:256]
        base.compare(id_rows("ids that its loss names", singled, base.vocabulary), compared)
    return compared.note()


def special_ids(backbone: Backbone) -> list[int]:
    """Ids of a base's special tokens."""
    config = text_config(backbone.model)
    found = [getattr(config, name, None) for name in SPECIAL]
    flat = [item for value in found for item in (value if isinstance(value, list) else [value])]
    return [value for value in flat if type(value) is int]


def made_rows(vocabulary: int, special: Sequence[int] = ()) -> list[LossRow]:
    """Rows of all kinds: a short one, special and small ids, a prompt with gaps, a padded one."""
    longest = max(9, min(48, MAX_ROW // max(vocabulary, 1)))
    known = [i for i in special if 0 <= i < vocabulary]
    count = itertools.count(vocabulary // 2)

    def ids(length: int) -> tuple[int, ...]:
        return tuple((next(count) * 7919) % vocabulary for _ in range(length))

    middle, long = ids(8), ids(longest)
    small = tuple(i % vocabulary for i in (*known, *range(longest)))[:longest]
    prompt = longest // 3
    gaps = tuple(IGNORED if place < prompt or place % 3 == 1 else i for place, i in enumerate(long))
    return [
        LossRow("a row of 8 tokens", (middle,), (middle,)),
        LossRow(f"a row of {longest} special and small ids", (small,), (small,)),
        LossRow("a row with a prompt and other labels of -100", (long,), (gaps,)),
        LossRow(f"rows of 3 and {longest} tokens, padded", (ids(3), long), (long[:3], long), 30.0),
    ]


def sample_rows(
    samples: Sequence[tuple[Sequence[int], Sequence[int]]], vocabulary: int
) -> list[LossRow]:
    """Rows of a job's own samples: a short and a long one, both padded, and each frequent label.

    samples       ids and labels of some of them
    vocabulary    how many logits a token has; what a row may hold is bounded by it
    """
    longest = max(9, min(512, MAX_ROW // max(vocabulary, 1)))
    cut = [_piece(ids, labels, longest) for ids, labels in samples if len(ids) > 1]
    cut.sort(key=lambda pair: len(pair[0]))
    if not cut:
        return []
    (short, short_labels), (long, long_labels) = cut[0], cut[-1]
    rows = [LossRow(f"a sample of {len(long)} tokens", (long,), (long_labels,))]
    if len(short) < len(long):
        words = f"samples of {len(short)} and {len(long)} tokens, padded"
        rows.append(LossRow(words, (short, long), (short_labels, long_labels), 30.0))
    held = Counter(label for _, labels in samples for label in labels[1:] if label != IGNORED)
    frequent = sorted(label for label, _ in held.most_common(MAX_LABELS))
    return [*rows, *id_rows("labels of the samples", frequent, vocabulary)]


def _piece(
    ids: Sequence[int], labels: Sequence[int], longest: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A sample, of a long one the first tokens, or those from before the first that is trained."""
    first = next((place for place, label in enumerate(labels) if label != IGNORED), 0)
    start = 0 if first < longest - 1 else first - 1
    part = slice(start, start + longest)
    return tuple(map(int, ids[part])), tuple(map(int, labels[part]))


def id_rows(name: str, ids: Sequence[int], vocabulary: int) -> list[LossRow]:
    """Rows in which each of some ids is a target, as long as the logits may be.

    Lines of one length run together: a forward costs more than their logits.
    """
    length = max(8, min(256, MAX_ROW // max(vocabulary, 1)))
    most, together = (max(1, m // max(vocabulary * length, 1)) for m in (MAX_LOGITS, MAX_BATCH))
    starts = range(0, len(ids), length - 1)[:most]
    lines = [(ids[start], *ids[start : start + length - 1]) for start in starts]
    whole = [line for line in lines if len(line) == length]
    batches = [tuple(whole[n : n + together]) for n in range(0, len(whole), together)]
    batches += [(line,) for line in lines[len(whole) :]]
    return [LossRow(name, batch, batch) for batch in batches]


def _label_argument(model: nn.Module) -> str | None:
    """The argument of a model's forward that takes labels, if any."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in (*LABELS, *TARGETS) if name in taken), None)


#: Losses by which another one is known, computed where one is looked for.
_Kinds = Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class _Measured:
    """A loss and its gradient for everything that was drawn."""

    value: float
    gradients: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, loss: Tensor, leaves: Sequence[Tensor]) -> _Measured:
        if not loss.requires_grad:
            return cls(loss.item(), (None,) * len(leaves))  # as where none is compared
        found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        return cls(loss.item(), tuple(found))

    def off(self, other: _Measured) -> float:
        """The relative difference of the values; infinite where one is no number."""
        difference = abs(self.value - other.value) / max(abs(other.value), 1e-30)
        return float("inf") if math.isnan(difference) else difference

    def gradient_off(self, other: _Measured) -> float:
        """The relative difference of the gradients."""
        difference = scale = 0.0
        for mine, theirs in zip(self.gradients, other.gradients, strict=True):
            scale += _square(theirs) if theirs is not None else 0.0
            if mine is not None or theirs is not None:
                apart = (0 if mine is None else mine) - (0 if theirs is None else theirs)
                difference += _square(apart)  # type: ignore[arg-type]
        relative = (difference / max(scale, 1e-60)) ** 0.5
        return float("inf") if math.isnan(relative) else relative

    def reads_more(self, other: _Measured) -> bool:
        """Whether it depends on what the other does not."""
        return any(
            mine is not None and bool(mine.any()) and (theirs is None or not bool(theirs.any()))
            for mine, theirs in zip(self.gradients, other.gradients, strict=True)
        )


class _OwnLoss:
    """A base's own loss, ready to be compared row by row."""

    def __init__(self, backbone: Backbone, argument: str, jobs: Sequence[str]) -> None:
        self.backbone, self.argument, self.jobs = backbone, argument, jobs
        self.model: Any = pruned_copy(backbone, plan_layers(backbone))[0]
        self.taken = inspect.signature(self.model.forward).parameters
        self.filler = max(0, next(iter(special_ids(backbone)), 0))
        self.singled_out: set[int] = set()
        self.shifted = argument in TARGETS

    def compare(self, rows: Sequence[LossRow], into: Comparison) -> None:
        """Compare on rows.

        raises    OwnLossDiffers
        """
        for number, row in enumerate(rows, 1):
            try:
                reason = self._compare(number, row)
            except OwnLossDiffers:
                raise
            except Exception as error:  # noqa: BLE001  (a base's code may be any)
                reason = _words(error)
            if reason:
                into.reasons[row.name] = reason
            else:
                into.equal.append(row)
            if not into.equal:
                return

    def _compare(self, number: int, row: LossRow) -> str:
        """Compare on one row; returns why its gradient could not be, else nothing.

        raises    OwnLossDiffers, or whatever the base's code raises
        """
        try:
            own, ours, kinds = self._measured(row, widened=True)
            bound = EQUAL
        except Exception:
            if self.backbone.dtype is not torch.float32:
                raise
            own, ours, kinds = self._measured(row, widened=False)
            bound = EQUAL_NARROW
        if own.off(ours) > bound and self.argument in TARGETS and self.shifted:
            self.shifted = False  # labels of its own form, which it shifts itself
            try:
                return self._compare(number, row)
            except OwnLossDiffers:
                self.shifted = True
        if own.off(ours) <= bound and own.gradient_off(ours) > 10 * bound:
            own, ours, kinds = self._measured(row, widened=True, everywhere=True)
            if own.off(ours) <= bound and own.gradient_off(ours) <= 10 * bound:
                return (
                    "its value is equal, and its gradient is not known: a part of it runs with "
                    "autograd off, or has a backward of its own"
                )
        if max(own.off(ours), own.gradient_off(ours) / 10) > bound:
            raise self._differs(number, row, own, ours, kinds)
        return ""

    def _measured(
        self, row: LossRow, *, widened: bool, everywhere: bool = False
    ) -> tuple[_Measured, _Measured, _Kinds]:
        """The base's loss, ours, and what others by which a loss could be known are.

        everywhere    autograd is on where the base's code switches it off too
        """
        inputs = row.inputs(self.filler)
        wanted = inputs["labels"]
        following = torch.cat([wanted[:, 1:], torch.full_like(wanted[:, :1], IGNORED)], 1)
        inputs["labels"] = following if self.shifted else wanted
        run, out = self._run(inputs, widened=widened, spread=row.spread)
        loss, logits = _loss_of(out), _logits_of(out, wanted.shape)
        if logits is None:
            logits = self._logits_by_place(inputs, run, widened=widened)
        self.singled_out |= run.singled_out
        real, scores = run.value(loss).reshape(()), run.value(logits)
        if self._derives(row, scores.shape[-1]):
            del scores  # numbers of a row of logits are large: they are not kept twice
            with quietly():
                numbers = run.again(everywhere=everywhere)
            real, scores = numbers[id(loss)].reshape(()), numbers[id(logits)]
        ours = _cross_entropy(scores[:, :-1], wanted[:, 1:])
        own, common = _Measured.of(real, run.leaves), _Measured.of(ours, run.leaves)
        kinds = functools.partial(_other_kinds, scores.detach(), wanted)
        return own, common, kinds

    def _derives(self, row: LossRow, vocabulary: int) -> bool:
        """Whether gradients are compared too: on short rows, and where lines are padded.

        A value that is equal at random logits has an equal gradient, but for what is detached.
        """
        return row.is_padded or sum(map(len, row.lines)) * vocabulary <= MAX_DERIVED

    def _run(
        self, inputs: Mapping[str, Tensor], *, widened: bool, spread: float = 1.0
    ) -> tuple[ValueRun, Any]:
        run = ValueRun(inputs, self._vector, widened=widened, spread=spread)
        names = {"labels": self.argument}
        given = {names.get(key, key): value for key, value in run.stand_ins.items()}
        known: dict[str, Any] = {key: part for key, part in given.items() if key in self.taken}
        if "use_cache" in self.taken:
            known["use_cache"] = False
        with quietly(), unpacked_lines(padded=False), torch.enable_grad(), run:
            if "input_ids" not in known:  # the first argument takes them
                return run, self.model(run.stand_ins["input_ids"], **known)
            return run, self.model(**known)

    def _logits_by_place(
        self, inputs: Mapping[str, Tensor], run: ValueRun, *, widened: bool
    ) -> Tensor:
        """The logits of a forward that does not return them beside its loss.

        They are what the same operator makes that makes them without labels.
        """
        alone, out = self._run(
            {key: value for key, value in inputs.items() if key != "labels"}, widened=widened
        )
        logits = _logits_of(out, inputs["input_ids"].shape)
        for place, step in enumerate(alone.steps):
            if logits is None or id(logits) not in map(id, step.results):
                continue
            same = run.steps[place]
            [found] = [item for item in same.results if isinstance(item, Tensor)]
            if same.function is step.function and found.shape == logits.shape:
                return found
        raise NotEvaluated("its forward returns no logits beside its loss")

    def _vector(self, tensor: Tensor) -> Tensor | None:
        """Numbers of a vector or buffer; those that are not known are drawn around one."""
        name = self.backbone.names.get(id(tensor))
        if name is None or (isinstance(tensor, nn.Parameter) and tensor.dim() > 1):
            return None
        value = self.backbone.values.get(name)
        if value is None and tensor.dim() == 1 and tensor.is_floating_point():
            draw = torch.Generator().manual_seed(len(name))
            return 1 + torch.randn(tensor.shape, generator=draw) / 8
        return value

    @functools.cached_property
    def vocabulary(self) -> int:
        """How many logits a token has."""
        tiny = LossRow("", ((0, 0, 0),), ((0, 0, 0),)).inputs(0)
        del tiny["labels"]
        _, out = self._run(tiny, widened=True)
        logits = _logits_of(out, tiny["input_ids"].shape)
        if logits is None:
            raise NotEvaluated("its forward returns no logits")
        return int(logits.shape[-1])

    def _differs(
        self, number: int, row: LossRow, own: _Measured, ours: _Measured, kinds: _Kinds
    ) -> OwnLossDiffers:
        apart, how = own.off(ours), "loss"
        if apart <= EQUAL:
            apart, how = own.gradient_off(ours), "loss's gradient"
        alike = [
            words
            for words, value in kinds()
            if abs(own.value - float(value)) <= 1e-6 * abs(float(value)) and how == "loss"
        ]
        reason = alike[0] if alike else None
        if reason is None and own.reads_more(ours):
            reason = "it depends on more than the logits, such as a router or further predictions"
        if reason is None and (row.has_ignored and number > 1):
            reason = (
                "it treats padding, labels of -100, or rows of different lengths in another way"
            )
        percent = f"{100 * apart:.2g} %" if apart < 10 else f"{apart:.2g} times"
        return OwnLossDiffers(
            f"the base's own {how} differs by {percent} on row {number}, and jobs train by the "
            "cross entropy of the next token",
            base=self.backbone.title,
            job=", ".join(self.jobs) or None,
            row=row.name,
            expected=f"{ours.value:.6g}, {DEFINED}",
            found=f"{own.value:.6g}" + (f": {reason}" if reason else ""),
            help=HELP,
        )


def _square(tensor: Tensor) -> float:
    """The sum of squares, without a copy."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _other_kinds(logits: Tensor, labels: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Losses by which another one is known, with what is said of it."""
    yield "nothing is shifted, each token is compared with itself", _cross_entropy(logits, labels)
    scores, wanted = logits[:, :-1], labels[:, 1:]
    counted = wanted != IGNORED
    each = F.cross_entropy(scores.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
    yield "it is the sum of the tokens' losses, not their mean", each.sum()
    yield "it is the mean of each row's mean", (each.sum(1) / counted.sum(1)).mean()
    yield "labels of -100 count in its mean", each.mean()
    yield "its mean counts the last token, which has no target", each.sum() / labels.numel()


def _loss_of(out: Any) -> Tensor:
    """The loss among what a forward returns.

    raises    NotEvaluated
    """
    loss = _member(out, "loss")
    if loss is None and isinstance(out, (tuple, list)):
        loss = next((item for item in out if _is_scalar(item)), None)
    if loss is None and _is_scalar(out):
        loss = out
    if loss is None:
        raise NotEvaluated("its forward takes labels, and returns no loss")
    if not _is_scalar(loss):
        raise NotEvaluated("its forward returns a loss of several numbers")
    assert isinstance(loss, Tensor)
    return loss


def _is_scalar(item: Any) -> bool:
    return isinstance(item, Tensor) and item.numel() == 1 and item.is_floating_point()


def _logits_of(out: Any, row: Sequence[int]) -> Tensor | None:
    """The logits [B, S, V] among what a forward returns."""
    logits = _member(out, "logits")
    items = [logits] if logits is not None else [*out] if isinstance(out, (tuple, list)) else [out]
    shaped = (item for item in items if isinstance(item, Tensor) and item.dim() == 3)
    return next((item for item in shaped if tuple(item.shape[:2]) == tuple(row)), None)


def _member(out: Any, name: str) -> Any:
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def _words(error: Exception) -> str:
    """An error as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, NotEvaluated) else f"{type(error).__name__}: {text}"[:200]
