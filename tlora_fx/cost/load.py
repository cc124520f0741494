"""Work of a round: tokens by job, and the lengths of sequences.

A round is rows; a row is each job's sequences. Plans cut a round between sequences into parts, one
for each replica and micro-batch; here it is cut in the same way, so that a plan can be costed
before any data is read. What layers have to do for many rows at once stands in arrays.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.model_facts import ALL_LINEAR, CAPTURED_TOKENS, BaseShape, LayerFacts, find_base
from tlora_fx.errors import DemandWrong, TargetUnknown, nearest

if TYPE_CHECKING:
    from tlora_fx.config.job import Job
    from tlora_fx.model.batch import PackedBatch

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]
#: Tokens of one forward, at most.
MAX_ROW_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Load:
    """Work of one forward.

    tokens      of each job
    squares     sum of squared lengths of sequences, what causal attention grows with
    sequences   how many there are
    targets     tokens with a loss, at most
    """

    tokens: tuple[int, ...]
    squares: float = 0.0
    sequences: int = 0
    targets: int = 0

    @property
    def total(self) -> int:
        """Tokens of all jobs."""
        return sum(self.tokens)

    @classmethod
    def of_lengths(cls, lengths: Sequence[Sequence[int]]) -> Load:
        """The load of a row.

        lengths   of each job's sequences
        """
        flat = [length for own in lengths for length in own]
        return cls(
            tokens=tuple(map(sum, lengths)),
            squares=float(sum(length * length for length in flat)),
            sequences=len(flat),
            targets=sum(max(0, length - 1) for length in flat),
        )

    @classmethod
    def of_row(cls, row: PackedBatch) -> Load:
        """The load of a packed row."""
        segments = row.segments.diff().tolist()
        lengths = row.cu_seqlens.diff().tolist()
        squares = float(sum(n * n for n in lengths))
        return cls(tuple(segments), squares, len(lengths), int(row.targets.shape[0]))


#: A row as lengths of each job's sequences.
Row = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Round:
    """Loads of one round of all jobs.

    rows             what one process would run one after the other
    max_row_tokens   no part is longer, where its sequences allow it
    """

    rows: tuple[Row, ...]
    max_row_tokens: int = MAX_ROW_TOKENS

    @property
    def load(self) -> Load:
        """Load of all rows together."""
        return Load.of_lengths([[*chain(*own)] for own in zip(*self.rows, strict=True)])

    def parts(self, unit: int, square_tokens: float) -> list[Load]:
        """The forwards of a round, cut as `rows.cut_round` cuts them.

        unit            their number is a multiple of it
        square_tokens   a sequence of so many tokens costs as much in attention as in all else
        """
        return list(_parts(self, unit, square_tokens))

    def longest(self) -> tuple[int, int]:
        """The job with the longest sequence, and its length."""
        lengths = [(max(own), job) for row in self.rows for job, own in enumerate(row) if own]
        length, job = max(lengths)
        return job, length

    def shortened(self, job: int, length: int) -> Round:
        """The same round with a job's sequences cut to a length."""
        rows = (
            tuple(
                tuple(min(n, length) for n in own) if place == job else own
                for place, own in enumerate(row)
            )
            for row in self.rows
        )
        return replace(self, rows=tuple(rows))


@lru_cache(maxsize=128)
def _parts(work: Round, unit: int, square_tokens: float) -> tuple[Load, ...]:
    if unit == 1:
        return tuple(Load.of_lengths(row) for row in work.rows)
    jobs = len(work.rows[0])
    flat = [(n, job) for job in range(jobs) for row in work.rows for n in row[job]]
    costs = [n + n * n / square_tokens for n, _ in flat]
    total = sum(n for n, _ in flat)
    count = -(-max(1, -(-total // work.max_row_tokens)) // unit) * unit
    while True:
        cuts = balanced_cuts(costs, count)
        made = [_piece(flat[start:stop], jobs) for start, stop in pairwise(cuts)]
        longest = max(load.total for load in made)
        if longest <= work.max_row_tokens or count >= len(flat):
            return tuple(made)
        count += unit


def _piece(sequences: Sequence[tuple[int, int]], jobs: int) -> Load:
    lengths: list[list[int]] = [[] for _ in range(jobs)]
    for length, job in sequences:
        lengths[job].append(length)
    return Load.of_lengths(lengths)


def round_of_jobs(
    jobs: Sequence[Job],
    *,
    length: int | None = None,
    tokens: int | None = None,
    max_row_tokens: int = MAX_ROW_TOKENS,
) -> Round:
    """The round of jobs as their files describe it.

    length           tokens of each sequence, at most the job's max_length; None: max_length
    tokens           of the whole round: batch sizes are scaled to it, at least one sequence a job
    max_row_tokens   a row is closed before it grows beyond this
    """
    lengths = [min(length or job.max_length, job.max_length) for job in jobs]
    counts = [job.per_device_train_batch_size * job.sequences_per_sample for job in jobs]
    steps = [job.gradient_accumulation_steps for job in jobs]
    if tokens is not None:
        asked = sum(n * c * s for n, c, s in zip(lengths, counts, steps, strict=True))
        counts = [max(1, round(c * tokens / asked)) for c in counts]
    batches = [[(n,) * c] * s for n, c, s in zip(lengths, counts, steps, strict=True)]
    return round_of_batches(batches, max_row_tokens)


def round_of_batches(
    batches: Sequence[Sequence[tuple[int, ...]]], max_row_tokens: int = MAX_ROW_TOKENS
) -> Round:
    """The round of these micro-batches.

    batches          for each job, for each of its micro-batches, the lengths of its sequences
    max_row_tokens   a row is closed before it grows beyond this
    """
    rows: list[Row] = []
    for place in range(max(map(len, batches))):
        row: list[tuple[int, ...]] = [()] * len(batches)
        size = 0
        for job, own in enumerate(batches):
            if place >= len(own):
                continue
            if size and size + sum(own[place]) > max_row_tokens:
                rows.append(tuple(row))
                row, size = [()] * len(batches), 0
            row[job] = own[place]
            size += sum(own[place])
        rows.append(tuple(row))
    return Round(tuple(rows), max_row_tokens)


def balanced_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """Places that cut a line of costs into parts of which the dearest is as cheap as can be.

    returns   parts + 1 places, from 0 to the number of costs
    """
    before = [0.0, *accumulate(costs)]
    bound = _bottleneck(before, parts)
    # first[p]: the earliest place from which p parts span the end.
    first = [len(costs)]
    for _ in range(parts):
        first.append(bisect_left(before, before[first[-1]] - bound - _slack(before)))
    cuts = [0]
    for left in range(parts - 1, 0, -1):
        start = cuts[-1]
        last = bisect_right(before, before[start] + bound + _slack(before)) - 1
        wanted = before[start] + (before[-1] - before[start]) / (left + 1)
        place = bisect_left(before, wanted)
        if place > start + 1 and wanted - before[place - 1] < before[min(place, last)] - wanted:
            place -= 1
        cuts.append(min(max(place, first[left], start), last))
    return [*cuts, len(costs)]


def _bottleneck(before: Sequence[float], parts: int) -> float:
    """The least bound that so many runs of a line, none dearer, can cover."""
    largest = max((stop - start for start, stop in pairwise(before)), default=0.0)
    low, high = max(largest, before[-1] / parts), before[-1]
    for _ in range(50):
        if high - low <= _slack(before):
            break
        middle = (low + high) / 2
        low, high = (low, middle) if _covers(before, parts, middle) else (middle, high)
    return high


def _covers(before: Sequence[float], parts: int, bound: float) -> bool:
    place = 0
    for _ in range(parts):
        place = bisect_right(before, before[place] + bound + _slack(before)) - 1
    return place == len(before) - 1


def _slack(before: Sequence[float]) -> float:
    return 1e-9 * before[-1]


class Demand(NamedTuple):
    """One optimizer step of a job, or the sum over a group.

    jobs          how many jobs: 1, or the group's size
    samples       sequences of the whole step, accumulation included
    tokens        of all samples
    squares       sum of squared lengths, what attention grows with
    targets       tokens with a loss
    adapters      adapters of one layer, summed over its sites: 7 for all linears of a Llama layer
    rank          sum of the ranks of these adapters, each times its site's (in + out) columns
    site_tokens   tokens times (in + out) columns, summed over a layer's adapted sites
    rank_tokens   tokens times rank times (in + out) columns, summed over a layer's adapters
    tensors       trained tensors of all layers
    parameters    trained numbers of all layers
    launched      jobs whose operators no CUDA graph can hold: 1, or 0; one of them keeps a group's
                  rows from running as graphs
    evaluation_rows     rows of evaluations, which are forwards only: those of all steps, divided by
                        the number of steps
    evaluation_tokens   tokens in these rows
    decoding_steps      forwards of one token after the other, by which prompts are answered while
                        the job trains: those of all steps, divided by the number of steps
    """

    jobs: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    targets: float = 0.0
    adapters: float = 0.0
    rank: float = 0.0
    site_tokens: float = 0.0
    rank_tokens: float = 0.0
    tensors: float = 0.0
    parameters: float = 0.0
    launched: float = 0.0
    evaluation_rows: float = 0.0
    evaluation_tokens: float = 0.0
    decoding_steps: float = 0.0

    def plus(self, other: Demand) -> Demand:
        """Sum of two demands."""
        return Demand(*(a + b for a, b in zip(self, other, strict=True)))

    def row(self) -> Array:
        """Row of this demand in a matrix of demands [15]."""
        return np.array(self, dtype=np.float64)

    @classmethod
    def total(cls, demands: Iterable[Demand]) -> Self:
        """The sum of some; zero where there are none."""
        rows = [demand.row() for demand in demands]
        return cls(*map(float, np.sum(rows, axis=0))) if rows else cls()


#: The column of each field in a matrix of demands.
COLUMN = {name: place for place, name in enumerate(Demand._fields)}
#: Columns by which others are divided.
_DIVISORS = [COLUMN["samples"], COLUMN["tokens"]]


def require_demands(demands: Array, gpus: Array) -> None:
    """Refuse groups for which no step time exists.

    demands   [n, 15] rows of `Demand`: finite, not negative, with samples and tokens above 0
    gpus      [n] GPUs of each: finite, at least 1
    raises    DemandWrong
    """
    if not len(demands):
        return
    # A comparison with NaN is false.
    bad = ~((demands >= 0) & (demands < np.inf))
    bad[:, _DIVISORS] |= demands[:, _DIVISORS] == 0
    if bad.any():
        group, column = map(int, np.argwhere(bad)[0])
        raise DemandWrong(
            "no step time can be estimated for this demand",
            group=group,
            field=Demand._fields[column],
            expected="finite numbers of at least 0, with samples and tokens above 0",
            found=demands[group, column],
            help="check the numbers of the job or of the trace that the demand comes from",
        )
    for index in np.flatnonzero(~((gpus >= 1) & (gpus < np.inf))):
        raise DemandWrong(
            "no step time can be estimated for this number of GPUs",
            group=int(index),
            expected="a finite number of at least 1",
            found=gpus[index],
            help="check the GPUs that the job asks for",
        )


def demand_of(
    base: BaseShape | str,
    rank: int,
    batch: int,
    lengths: float | Sequence[int],
    targets: str | Iterable[str] = ALL_LINEAR,
    accumulation: int = 1,
) -> Demand:
    """Demand of one step of a job on a known base.

    lengths        tokens of each sample, or the lengths of all samples, of which the mean counts
    targets        "all-linear", or ends of the linears' names
    accumulation   micro-batches of a step
    raises         BaseUnknown, TargetUnknown
    """
    shape = find_base(base) if isinstance(base, str) else base
    work = work_of_lengths(batch * accumulation, lengths)
    widths = [sum(shape.linears[name]) for name in _targets(shape, targets)]
    columns = float(sum(widths))
    return Demand(
        **work,
        adapters=float(len(widths)),
        rank=rank * columns,
        site_tokens=work["tokens"] * columns,
        rank_tokens=work["tokens"] * rank * columns,
        tensors=2.0 * len(widths) * shape.layers,
        parameters=rank * columns * shape.layers,
    )


def work_of_lengths(samples: int, lengths: float | Sequence[int]) -> dict[str, float]:
    """The part of a job's `Demand` that follows from its samples, whatever its adapters are."""
    each = np.atleast_1d(np.asarray(lengths, dtype=np.float64))
    return {
        "jobs": 1.0,
        "samples": float(samples),
        "tokens": samples * float(each.mean()),
        "squares": samples * float((each * each).mean()),
        "targets": samples * float(np.maximum(each - 1, 0).mean()),
    }


def _targets(shape: BaseShape, targets: str | Iterable[str]) -> list[str]:
    """Names of linears, each once; raises TargetUnknown."""
    known = list(shape.linears)
    if targets == ALL_LINEAR:
        return known
    wanted = [targets] if isinstance(targets, str) else list(targets)
    for name in wanted:
        if name not in known:
            raise TargetUnknown(
                f"base '{shape.name}' has no linear '{name}'",
                nearest=nearest(name, known),
                help=f"name some of {', '.join(known)}, or {ALL_LINEAR}",
            )
    return sorted(set(wanted), key=known.index)


class Work(NamedTuple):
    """Work of layers beside a row's tokens, in the units of a profile's points (see LayerPoint).

    Of n loads: each [k, n, t], of each kind of layer and size of tp, or 1 where all are alike.
    """

    squares: Array
    sites: Array
    job_sites: Array
    site_tokens: Array
    rank_tokens: Array


#: Of these, by index, a part of a load has a part; it has as many sites and adapters.
SHARED = (0, 3, 4)


@dataclass(slots=True)
class Rows:
    """m rows, each a part of one of n loads.

    tokens, targets   [m]
    size              [m] index of tp in tables
    launched          [m] whether the host launches what they do: they are no CUDA graphs
    load              [m] whose part they are, of n
    part              [m] of that load
    work              of the loads
    """

    tokens: Array
    targets: Array
    size: Indices
    launched: Mask
    load: Indices
    part: Array
    work: Work

    @classmethod
    def of(cls, layers: Sequence[LayerFacts], loads: Sequence[Load], hidden: int, tp: int) -> Rows:
        """Whole loads, each a row that is launched, by processes that cut matrices into tp parts.

        layers   one of each kind
        """
        count = len(loads)
        return cls(
            tokens=np.array([float(load.total) for load in loads]),
            targets=np.array([float(load.targets) for load in loads]),
            size=np.zeros(count, dtype=np.intp),
            launched=np.ones(count, dtype=bool),
            load=np.arange(count),
            part=np.ones(count),
            work=work_of(layers, loads, hidden, tp),
        )

    def only(self, chosen: Indices | Mask) -> Rows:
        """Rows at some indices."""
        return Rows(
            self.tokens[chosen], self.targets[chosen], self.size[chosen], self.launched[chosen],
            self.load[chosen], self.part[chosen], self.work,
        )  # fmt: skip

    def split(self, count: Array | float) -> Rows:
        """Rows whose loads are one of so many equal parts."""
        tokens, targets, part = (one / count for one in (self.tokens, self.targets, self.part))
        return replace(self, tokens=tokens, targets=targets, part=part)

    def each(self, field: int) -> Array:
        """Work of layers beside tokens, by the index of a field of Work [k, m]."""
        values = self.work[field]
        whole = values[:, self.load, self.size if values.shape[2] > 1 else 0]
        return whole * self.part if field in SHARED else whole


def work_of(layers: Sequence[LayerFacts], loads: Sequence[Load], hidden: int, tp: int = 1) -> Work:
    """Work of layers for loads, as profiles measure it: [k, n, 1] each.

    hidden   the columns that stay whole under tp; a site's other side is cut
    """
    tokens = np.array([load.tokens for load in loads], dtype=np.float64)
    total = tokens.sum(axis=1)
    squares = np.array([load.squares for load in loads], dtype=np.float64)

    def of(layer: LayerFacts) -> tuple[Array, ...]:
        widths = np.array([narrowed(site.width, hidden, tp) for site in layer.sites])
        ranks = np.array([site.ranks for site in layer.sites], dtype=np.float64)
        ranks = ranks.reshape(len(widths), tokens.shape[1])
        window = layer.attention[0].window if layer.attention else 0
        return (
            np.minimum(squares, 2 * total * window) if window > 0 else squares,
            len(widths) * (total > 0),
            (tokens > 0) @ (ranks > 0).sum(axis=0),
            total * widths.sum(),
            tokens @ (widths @ ranks),
        )

    each = zip(*map(of, layers), strict=True)
    return Work(*(np.array(values, dtype=np.float64)[:, :, None] for values in each))


def narrowed(width: float, hidden: int, tp: int) -> float:
    """Columns of an adapter in one process: those of the hidden state stay whole."""
    return width if tp == 1 else hidden + (width - hidden) / tp


def is_small(tokens: Array, tp: Array | float) -> Mask:
    """Whether rows run as CUDA graphs where they can [m]."""
    return tokens <= CAPTURED_TOKENS * tp
