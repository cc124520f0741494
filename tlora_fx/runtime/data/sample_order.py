"""Which samples each step of a job takes, and in which batches, computed apart for `verify`.

What trains takes them from `samples` and `batching`; `verify` holds them against this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tlora_fx.config.job import Job

if TYPE_CHECKING:
    from tlora_fx.runtime.data.samples import Sample

NO_TARGET = -100


@dataclass(frozen=True, slots=True)
class Line:
    """A sequence as one line of a batch.

    labels     not shifted, -100 where a token is no target
    first      index of its first token in the job's step
    desirable  of kto, whether the completion is wanted
    numbers    what a loss with a name, or a function, reads beside each token, by name
    """

    ids: Sequence[int]
    labels: Sequence[int]
    first: int
    desirable: bool | None = None
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleOrder:
    """Which samples each optimizer step of a job takes: a part of what defines the job.

    An epoch takes each sample once, in the order of the file, or where the job shuffles in the
    permutation that NumPy's default generator draws from (seed, epoch). Micro-batches hold
    `per_device_train_batch_size` samples, steps `gradient_accumulation_steps` micro-batches; the
    last of each may be smaller. Steps are counted through all epochs. A unit counts as one sample.
    """

    job: Job
    samples: Sequence[Sample]
    units: np.ndarray | Sequence[Sequence[int]] | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole job."""
        if self.job.max_steps is not None:
            return self.job.max_steps
        return math.ceil((self.job.num_train_epochs or 1.0) * len(self._steps_of_epoch()))

    def batches(self, step: int) -> list[list[Line]]:
        """The micro-batches of a step."""
        starts = self._steps_of_epoch()
        epoch, number = divmod(step, len(starts))
        units = [(i,) for i in range(len(self.samples))] if self.units is None else self.units
        order = np.arange(len(units))
        if self.job.shuffle:
            order = np.random.default_rng((self.job.seed, epoch)).permutation(len(units))
        taken = [units[int(index)] for index in order[starts[number] :][: starts.step]]
        size = self.job.per_device_train_batch_size
        batches = (taken[first : first + size] for first in range(0, len(taken), size))
        most = self.job.max_length if self.job.method == "kto" else None
        samples = [[self.samples[at] for unit in own for at in unit] for own in batches]
        return lines_of(samples, most)

    def _steps_of_epoch(self) -> range:
        """Where in the order of an epoch each of its steps begins."""
        size = self.job.per_device_train_batch_size * self.job.gradient_accumulation_steps
        return range(0, len(self.samples if self.units is None else self.units), size)


def lines_of(batches: Sequence[Sequence[Sample]], most: int | None = None) -> list[list[Line]]:
    """The micro-batches of one step, whose tokens are counted through all of them.

    most    of kto, the longest sequence: behind its samples a batch has each prompt again, with the
            completion of the sample before it
    """
    lines: list[list[Line]] = []
    first = 0
    for batch in batches:
        lines.append([])
        for sample in batch:
            said = sample.desirable, sample.numbers
            lines[-1].append(Line(sample.input_ids, sample.labels, first, *said))
            first += len(sample.input_ids)
        for own, other in zip(batch, [*batch[-1:], *batch[:-1]], strict=True) if most else ():
            prompt = [own.input_ids[at] for at in range(_prompt(own))]
            at = _prompt(other)
            ids = [*prompt, *other.input_ids[at:], *other.beyond][:most]
            labels = [*[NO_TARGET] * len(prompt), *other.labels[at:], *other.beyond][:most]
            lines[-1].append(Line(ids, labels, first))
            first += len(ids)
    return lines


def _prompt(sample: Sample) -> int:
    """Tokens before the first target."""
    return int(np.argmax(np.array(sample.labels) != NO_TARGET))


def in_another_layout(
    batches: Sequence[Sequence[Line]], *, whole: bool = False
) -> list[list[Line]]:
    """The same step in batches of other shapes: the same numbers but for rounding.

    Each line of a batch has a batch of its own. A line that had one shares it with a copy of
    itself, which has no targets. Lines that are compared with each other stay as they are.
    """
    if whole:
        return [list(batch) for batch in batches]
    layout: list[list[Line]] = []
    for batch in batches:
        if len(batch) > 1:
            layout.extend([line] for line in batch)
        else:
            layout.extend([line, _without_targets(line)] for line in batch)
    return layout


def _without_targets(line: Line) -> Line:
    return Line(line.ids, [NO_TARGET] * len(line.ids), line.first)


def pad(batch: Sequence[Line]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, labels, attention mask and token indices, int64 [B, S], padded on the right.

    The indices of a line count on through its padding, where nothing reads them.
    """
    width = max(len(line.ids) for line in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    labels, attended = torch.full_like(ids, NO_TARGET), torch.zeros_like(ids)
    for row, line in enumerate(batch):
        ids[row, : len(line.ids)] = torch.tensor(line.ids)
        labels[row, : len(line.ids)] = torch.tensor(line.labels)
        attended[row, : len(line.ids)] = 1
    first = torch.tensor([line.first for line in batch])
    return ids, labels, attended, first[:, None] + torch.arange(width)
