"""Rounds: in each, every running job does one optimizer step, in as few rows as fit.

A job's micro-batch stays whole in one row, as it would be alone, so that what depends on a
micro-batch (longrope's switch) is the same. Micro-batches of different jobs share rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tlora_fx.config.job import BETA, Job
from tlora_fx.config.losses import FIELDS, LOSSES, NEEDS
from tlora_fx.cost.load import balanced_cuts
from tlora_fx.errors import LossFunctionError
from tlora_fx.model.batch import IGNORED, SMALLEST, JobTokens, PackedBatch, pack, pad, size_of_jobs
from tlora_fx.model.objectives import (
    LACKS_GRADIENT,
    Objective,
    OwnLoss,
    Scores,
    mismatched,
    sequence_losses,
)
from tlora_fx.model.preference import Preference
from tlora_fx.model.row_ladder import RowLadder, RowSize, repeating_length
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.runtime.data.loss_inputs import loss_of, numbers_of_targets, target_places
from tlora_fx.runtime.data.samples import JobData, Sample
from tlora_fx.tracing.refusals import model_line

MicroBatches = Sequence[Sequence[Sample]]
Row = list[JobTokens]
#: Multiples of it, modulo 1, are all unlike each other.
GOLDEN = 0.6180339887


def rows_of_round(
    jobs: Sequence[Job],
    batches: Mapping[int, MicroBatches],
    steps: Mapping[int, int],
    max_row_tokens: int,
    before: Mapping[int, int] | None = None,
    objectives: Mapping[int, Sequence[Objective]] | None = None,
) -> Iterator[list[JobTokens]]:
    """The rows of one round; each is what `pack` or `pad` takes.

    jobs             all jobs, in table order
    batches          by job index, the micro-batches of the step that it is at
    steps            by job index, that step
    max_row_tokens   a row is closed before it grows beyond this; a larger micro-batch has one alone
    before           by job index, tokens of the same step that earlier rounds had
    objectives       by job index, losses of a loop of one's own, of each micro-batch
    """
    own = objectives or {}
    offsets = dict.fromkeys(batches, 0) | dict(before or {})
    for number in range(max(map(len, batches.values()), default=0)):
        row = _empty(jobs)
        size = 0
        for index, micro_batches in batches.items():
            if number >= len(micro_batches):
                continue
            samples = micro_batches[number]
            objective = own[index][number] if index in own else objective_of(jobs[index], samples)
            sequences, labels = _sequences(jobs[index], samples, objective)
            tokens = sum(map(len, sequences))
            if size and size + tokens > max_row_tokens:
                yield row
                row, size = _empty(jobs), 0
            row[index] = JobTokens(
                sequences,
                labels,
                jobs[index].seed,
                steps[index],
                offsets[index],
                preference_of(jobs[index]),
                jobs[index].label_shift,
                objective,
            )
            offsets[index] += tokens
            size += tokens
        yield row


def preference_of(job: Job) -> Preference | None:
    """How a job compares pairs, None where it learns from each sample by itself."""
    match job.method:
        case "dpo" | "orpo" as method:
            return Preference(method, BETA if job.beta is None else job.beta)
        case "reward" as method:
            return Preference(method, center=job.center_rewards_coefficient or 0.0)
    return None


def objective_of(
    job: Job, samples: Sequence[Sample], scores: Scores | None = None
) -> Objective | None:
    """The loss of a job's micro-batch, where its own fields ask for another one than usual.

    scores    get what is found, where somebody asks
    """
    scores = Scores() if scores is None else scores
    if (loss := loss_of(job)) is not None:
        return objective_by(loss, job.loss_options, samples, job.label_shift, scores)
    if job.method == "kto":
        options = {
            "beta": BETA if job.beta is None else job.beta,
            "desirable_weight": job.desirable_weight,
            "undesirable_weight": job.undesirable_weight,
        }
        return judged(options, samples, scores)
    if job.label_smoothing_factor:
        smoothed = {"label_smoothing": job.label_smoothing_factor}
        return Objective("cross_entropy", smoothed, (), scores)
    return None


def objective_by(
    loss: str | OwnLoss,
    options: Mapping[str, float],
    samples: Sequence[Sample],
    shift: int,
    scores: Scores,
) -> Objective:
    """The loss of a micro-batch whose samples say what it reads.

    options   of a loss with a name, where they are not the default
    scores    get what is found
    """
    if not isinstance(loss, str):
        given = [numbers_of_targets(each, shift, (*FIELDS[1:], *each.inputs)) for each in samples]
        return Objective(loss, {}, given, scores)
    every = {**LOSSES[loss], **options}
    if loss == "kto":
        return judged(every, samples, scores)
    given = [numbers_of_targets(each, shift, NEEDS[loss]) for each in samples]
    return Objective(loss, every, given, scores)


def try_function(
    job: Job,
    samples: Sequence[Sample],
    classes: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: str,
) -> None:
    """Call a job's function as loss on a micro-batch with equal log-probabilities.

    Where its value or gradient is not finite, that of unequal ones decides.

    classes   how many tokens there are
    dtype     of the base
    device    that trains
    rows      which rows these are, for errors
    raises    LossFunctionError, JobError
    """
    loss = loss_of(job)
    if loss is None or isinstance(loss, str):
        return
    objective = objective_by(loss, {}, samples, job.label_shift, Scores())
    counts = [len(target_places(sample, job.label_shift)) for sample in samples]
    wide = torch.promote_types(torch.float32, dtype)
    equal = torch.full((sum(counts),), math.log(classes), dtype=wide, device=device)
    # A deviation of equal numbers has no gradient, which nothing is wrong with.
    unlike = equal * (0.5 + torch.arange(len(equal), device=device) * GOLDEN % 1)
    for losses in (equal, unlike):
        try:
            [own] = sequence_losses([objective], [0], [counts])
            wrong = _not_finite(own.to(device).loss, losses.requires_grad_())
        except Exception as error:
            raise LossFunctionError(
                "a function as loss failed",
                job=job.name,
                function=job.named_loss,
                rows=rows,
                at=model_line(error),
                expected="a function of (logprobs, inputs), which returns the sum of the losses",
                found=f"{type(error).__name__}: {error}",
                help="it gets " + ", ".join(objective.given[0]) + " of each sequence's target "
                "tokens: columns that hold a number in each row",
            ) from error
        if wrong is None:
            return
    raise LossFunctionError(
        "a function as loss gives a number that is not finite",
        job=job.name,
        function=job.named_loss,
        rows=rows,
        expected="a finite loss and finite gradients, of any log-probabilities below 0",
        found=wrong,
        help="it gets " + ", ".join(objective.given[0]) + " of each sequence's target tokens: look "
        "for logarithms, roots and divisions that these do not suit",
    )


def _not_finite(loss: Callable[[Tensor], Tensor], losses: Tensor) -> str | None:
    """What of a function's value and its gradient is not finite; None where all is.

    losses   negative log-probabilities
    raises   what the function raises; TypeError where nothing depends on them
    """
    total = loss(losses)
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(total, losses, allow_unused=True)
    if gradients[0] is None:
        raise TypeError(LACKS_GRADIENT)
    if total.is_meta:
        return None
    if not math.isfinite(value := float(total.detach())):
        return f"the loss is {value}"
    wrong = (~gradients[0].isfinite()).nonzero()
    if not len(wrong):
        return None
    value = -float(gradients[0][wrong[0]])
    where = "the first target token" if not wrong[0] else f"target token {int(wrong[0]) + 1}"
    return f"the loss is a finite number, and its gradient is {value} at {where}"


def judged(options: Mapping[str, float], samples: Sequence[Sample], scores: Scores) -> Objective:
    """The kto loss of a micro-batch."""
    given = [{"desirable": (float(bool(sample.desirable)),)} for sample in samples]
    return Objective("kto", options, given, scores)


def _sequences(
    job: Job, samples: Sequence[Sample], objective: Objective | None
) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Token ids and labels of the sequences of a micro-batch; kto adds those that it compares."""
    ids = [sample.input_ids for sample in samples]
    labels = [sample.labels for sample in samples]
    if objective is None or objective.loss != "kto":
        return [*ids], [*labels]
    more = _mismatched(job, samples)
    return [*ids, *more[0]], [*labels, *more[1]]


def _mismatched(
    job: Job, samples: Sequence[Sample]
) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    ids, labels = [each.input_ids for each in samples], [each.labels for each in samples]
    return mismatched(ids, labels, [each.beyond for each in samples], IGNORED, job.max_length)


def count_terms(job: Job, micro_batches: MicroBatches, loss: object = None) -> int:
    """Number of terms that the loss of an optimizer step is a mean over: pairs, samples, or tokens.

    loss   of a loop of one's own; None: the job's
    """
    if job.is_preference or loss == "kto":
        return sum(map(len, micro_batches)) // job.sequences_per_sample
    return count_targets(micro_batches, job.label_shift)


def count_targets(micro_batches: MicroBatches, shift: int = 1) -> int:
    """Target tokens of an optimizer step, after the shift inside each sequence."""
    return sum(
        label != IGNORED
        for samples in micro_batches
        for sample in samples
        for label in sample.labels[shift:]
    )


def count_tokens(micro_batches: MicroBatches) -> int:
    """Tokens of an optimizer step's samples."""
    return sum(len(sample.input_ids) for samples in micro_batches for sample in samples)


def count_row_tokens(job: Job, micro_batches: MicroBatches, loss: object) -> int:
    """Tokens that rows hold of an optimizer step; those that kto compares too.

    loss   of a loop of one's own; None: the job's
    """
    count = count_tokens(micro_batches)
    if "kto" in (loss, job.method):
        for samples in micro_batches:
            count += sum(map(len, _mismatched(job, samples)[0]))
    return count


def _empty(jobs: Sequence[Job]) -> list[JobTokens]:
    return [JobTokens((), (), job.seed) for job in jobs]


# Rows as tensors; on a GPU with a little padding, so that their lengths come again.
#
# What serves a row of one length is kept and started again for the next one: kernels' launches,
# and what `torch.compile` made. Rows of real data are hardly ever of one length, so they are
# padded to one of few: by a thirty-second at most, a sixty-fourth on average.


@dataclass(slots=True)
class RowBucketer:
    """Makes rows, and counts what it adds.

    packed       in packed form, else in batch form, whose padding is its own
    lengthened   packed rows get one of few lengths
    abreast      how many rows run at the same time, each on processes of its own
    ladder       steps that those rows are padded to, where one holds all of them
    tokens       of all rows so far, without padding
    padding      tokens that were added to packed rows
    """

    packed: bool
    lengthened: bool = False
    abreast: int = 1
    ladder: RowLadder = field(default_factory=RowLadder)
    tokens: int = 0
    padding: int = 0

    def made(self, rows: Sequence[Row]) -> list[PackedBatch]:
        """Each row as `pack` or `pad` lays it out."""
        if not self.packed:
            return [pad(row) for row in rows]
        made: list[PackedBatch] = []
        for start in range(0, len(rows), self.abreast):
            together = rows[start : start + self.abreast]
            step = self.ladder.step_for(size_abreast(together)) if self.lengthened else None
            made += [self._packed(row, step) for row in together]
        return made

    def _packed(self, row: Row, step: RowSize | None) -> PackedBatch:
        tokens = sum(len(sequence) for job in row for sequence in job.sequences)
        length = tokens
        if self.lengthened and tokens:
            length = repeating_length(tokens) if step is None else step.tokens
        length = max(SMALLEST, length)
        self.tokens += tokens
        self.padding += length - tokens
        return pack(row, length)


def size_abreast(rows: Sequence[Row]) -> RowSize:
    """The smallest size that holds each of these rows."""
    return reduce(RowSize.with_all_of, map(size_of_jobs, rows))


# A round is cut into as many parts as a plan's processes and micro-batches need.
#
# A loss is a sum over a job's whole step, and dropout counts tokens in the whole step, so it does
# not matter which forward a sequence is in. A job's sequences stay in order and a part holds one
# run of them, so that one offset says where they stand in the step.


@dataclass(frozen=True, slots=True)
class Cutting:
    """How the rows of a model may be cut.

    whole            a micro-batch stays whole in its row, because the base's graph depends on it,
                     or a job compares its sequences, or noise is as large as they are long
    square_tokens    a sequence of so many tokens costs as much in attention as in all else
    max_row_tokens   a part is at most as long, where its sequences allow it
    """

    whole: bool
    square_tokens: float
    max_row_tokens: int

    @staticmethod
    def of(model: SuperModel, max_row_tokens: int) -> Cutting:
        """How a model's rows may be cut."""
        switches = torch.ops.tlora_fx.segment_switch.default
        nodes = (node for graph in model.group.graphs() for node in graph.nodes)
        whole = any(node.op == "call_function" and node.target is switches for node in nodes)
        whole = whole or any(job.needs_whole_batches for job in model.jobs)
        # The products of a layer with hidden size h multiply 12 h² numbers a token, causal
        # attention h a token and token before it.
        hidden = getattr(model.backbone.config, "hidden_size", None) or 1024
        return Cutting(whole, 12.0 * hidden, max_row_tokens)

    def cost(self, tokens: int) -> float:
        """Cost of a sequence, in tokens."""
        return tokens + tokens * tokens / self.square_tokens


def cut_round(rows: Iterable[Row], unit: int, cutting: Cutting) -> list[Row]:
    """The rows of a round, cut into a multiple of `unit` parts of about equal cost.

    rows      as `rows_of_round` makes them
    returns   parts with the same sequences; some may be empty
    """
    given = list(rows)
    if unit == 1 or not given:
        return given
    parts = _by_jobs(given, unit, cutting) if cutting.whole else _by_sequences(given, unit, cutting)
    empty = [JobTokens((), (), job.seed, job.step) for job in given[0]]
    return parts + [list(empty) for _ in range(-len(parts) % unit)]


def _by_sequences(rows: Sequence[Row], unit: int, cutting: Cutting) -> list[Row]:
    """Cut anywhere between sequences."""
    jobs = [_joined([row[index] for row in rows]) for index in range(len(rows[0]))]
    lengths = [len(sequence) for job in jobs for sequence in job.sequences]
    costs = [cutting.cost(length) for length in lengths]
    before = [0, *accumulate(lengths)]
    parts = -(-max(1, -(-before[-1] // cutting.max_row_tokens)) // unit) * unit
    while True:
        cuts = balanced_cuts(costs, parts)
        longest = max(before[stop] - before[start] for start, stop in pairwise(cuts))
        fits = longest <= cutting.max_row_tokens
        if not fits and parts >= len(lengths):
            # No cut is shorter than each sequence by itself.
            cuts = [min(place, len(lengths)) for place in range(parts + 1)]
        if fits or parts >= len(lengths):
            return [_piece(jobs, start, stop) for start, stop in pairwise(cuts)]
        parts += unit


def _by_jobs(rows: Sequence[Row], unit: int, cutting: Cutting) -> list[Row]:
    """Cut each row between jobs, whose micro-batches stay whole."""
    pieces = max(1, unit // len(rows))
    made: list[Row] = []
    for row in rows:
        costs = [sum(cutting.cost(len(ids)) for ids in job.sequences) for job in row]
        ends = [0, *accumulate(len(job.sequences) for job in row)]
        cuts = balanced_cuts(costs, pieces)
        made.extend(_piece(row, ends[start], ends[stop]) for start, stop in pairwise(cuts))
    return made


def _joined(pieces: Sequence[JobTokens]) -> JobTokens:
    """One job's tokens of successive rows as one."""
    own = [piece for piece in pieces if piece.sequences]
    first = own[0] if own else pieces[0]
    sequences = [ids for piece in own for ids in piece.sequences]
    labels = [row for piece in own for row in piece.labels]
    return replace(first, sequences=sequences, labels=labels)


def _piece(jobs: Sequence[JobTokens], start: int, stop: int) -> Row:
    """The sequences start:stop, counted over all jobs."""
    row: Row = []
    passed = 0
    for job in jobs:
        count = len(job.sequences)
        low, high = (min(max(place - passed, 0), count) for place in (start, stop))
        skipped = sum(len(ids) for ids in job.sequences[:low])
        row.append(
            replace(
                job,
                sequences=job.sequences[low:high],
                labels=job.labels[low:high],
                offset=job.offset + skipped,
            )
        )
        passed += count
    return row


# Rows to come, from which the steps are made that rows are padded to.

#: Rounds that are looked at.
FORECAST_ROUNDS = 256
# Half of the steps suffice in a run of so few rounds, with rows of which a process computes so few
# tokens: such rows are captured after a few rounds, and half of the captures save more time than
# their padding costs (see `row_schedule.rounds_to_pay`, which decides when rows are captured).
FEW_STEPS, FEW_ROUNDS, FEW_TOKENS = 8, 2000, 3072


def ladder_of(
    jobs: Sequence[Job],
    data: Mapping[int, JobData],
    cutting: Cutting,
    parts: int,
    abreast: int,
    shared: int = 1,
) -> RowLadder:
    """The ladder for the rows of these jobs, as if all began together.

    It follows from the jobs and their data alone, and not from the step that they are at: a run
    that is resumed pads its rows as it did before.

    jobs       all jobs, in table order
    data       of those that train, by index
    parts      into how many a round is cut
    abreast    how many rows run at the same time
    shared     processes that compute each row together
    """
    sizes = _forecast(jobs, data, cutting, parts, abreast)
    rounds = max((own.steps for own in data.values()), default=0)
    tokens = sorted(size.tokens for size in sizes)[len(sizes) // 2] if sizes else 0
    if rounds <= FEW_ROUNDS and tokens <= FEW_TOKENS * shared:
        ladder = RowLadder.of(sizes, FEW_STEPS)
        if all(ladder.step_for(size) for size in sizes if size.tokens and size.targets):
            return ladder
    return RowLadder.of(sizes)


def _forecast(
    jobs: Sequence[Job], data: Mapping[int, JobData], cutting: Cutting, parts: int, abreast: int
) -> list[RowSize]:
    """Sizes of rows to come; see `ladder_of`."""
    sizes: list[RowSize] = []
    for number in range(FORECAST_ROUNDS):
        training = [index for index, own in data.items() if number < own.steps]
        if not training:
            break
        if parts == 1:
            sizes += _whole_rows([data[i].sizes(number) for i in training], cutting.max_row_tokens)
            continue
        batches = {index: data[index].step(number) for index in training}
        steps = dict.fromkeys(training, number)
        rows = cut_round(
            rows_of_round(jobs, batches, steps, cutting.max_row_tokens), parts, cutting
        )
        sizes += [size_abreast(rows[at : at + abreast]) for at in range(0, len(rows), abreast)]
    return sizes


def _whole_rows(sizes: Sequence[Sequence[RowSize]], max_row_tokens: int) -> Iterator[RowSize]:
    """Sizes of the rows that `rows_of_round` makes, from those of the jobs' micro-batches."""
    for number in range(max(map(len, sizes))):
        row: RowSize | None = None
        for own in sizes:
            if number >= len(own):
                continue
            batch = own[number]
            if row is not None and row.tokens + batch.tokens > max_row_tokens:
                yield row
                row = None
            row = batch if row is None else row.beside(batch)
        if row is not None:
            yield row
