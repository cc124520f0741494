"""Draw synthetic traces with the marginals of AcmeTrace.

Types, durations of each type, GPUs, and the GPU-time that each number of GPUs takes are AcmeTrace's
(cluster Seren). Everything else is not in the marginals and is an assumption: type and GPUs are
independent given the duration, jobs arrive one by one at the trace's mean rate, and there are
neither bursts, unless they are asked for, nor days, users or months. What is drawn here is labelled
synthetic wherever it goes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainValidator, TypeAdapter

from tlora_fx.errors import MarginalsFileError, ReplayChoiceWrong
from tlora_fx.simulator.traces import MONTH_SECONDS, Trace, TraceJob


def _shares(value: Any) -> NDArray[Any]:
    numbers = np.array(value, dtype=float)
    return np.asarray(numbers / numbers.sum(axis=-1, keepdims=True))


Numbers = NDArray[Any]
#: As they are read from a file.
Floats = Annotated[Numbers, PlainValidator(partial(np.array, dtype=float))]
Shares = Annotated[Numbers, PlainValidator(_shares)]
SHIPPED = Path(__file__).parent / "assets" / "acme_seren_fit.json"
#: March to August 2023.
TRACE_DAYS = 184
ROUNDS = 300
#: Greatest intensity and burstiness; the least is 1 / MAX_ARRIVAL_CHANGE.
MAX_ARRIVAL_CHANGE = 1e4


@dataclass(frozen=True)
class Fit:
    """Distributions that the generator draws from.

    The marginals say how many jobs have at most so many GPUs, and which part of all GPU-time these
    take, so that the mean duration of each number of GPUs is known. The joint table of GPUs and
    durations is the one with these sums that departs least from independence: each number of GPUs
    tilts the distribution of durations by a power of the duration (iterated proportional fitting).

    type_shares   [t] of all jobs
    buckets       [t, b] of each type's jobs, by duration in (2^(i-1), 2^i] seconds
    gpus          [c] counts
    log_weights   [c] of each count at a duration of one second
    tilts         [c] power of the duration that each count's weight grows with
    """

    source: str
    jobs_per_second: float
    types: tuple[str, ...]
    type_shares: Shares
    buckets: Shares
    gpus: tuple[int, ...]
    log_weights: Floats
    tilts: Floats

    @cached_property
    def gpus_given_bucket(self) -> Numbers:
        """[b, c] rows sum to 1."""
        logs = self.log_weights + self.tilts * np.log(bucket_means(self.buckets.shape[1]))[:, None]
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))


_FIT = TypeAdapter(Fit)


def bucket_means(count: int) -> Numbers:
    """Mean seconds of a log-uniform draw in each (2^(i-1), 2^i]."""
    return np.asarray(2.0 ** np.arange(count) * 0.5 / np.log(2))


def shipped_fit() -> Fit:
    """The fit that comes with tlora-fx."""
    return _read_fit(_loaded(SHIPPED), SHIPPED)


def fit_of_file(path: Path) -> Fit:
    """A fit by a file of exact marginals, or a fit that was written before.

    raises    MarginalsFileError
    """
    given = _loaded(path)
    if "log_weights" in given:
        return _read_fit(given, path)
    try:
        return _fitted(given)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MarginalsFileError(
            "the marginals are not those of a distribution",
            file=path,
            found=f"{type(error).__name__}: {error}",
            expected="counts of jobs with at most x, rising to the number of jobs",
        ) from None


def _loaded(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise MarginalsFileError(
            "there is no such file of marginals" if missing else "the marginals cannot be read",
            file=path,
            found=None if missing else error,
            help="name a file of marginals, or leave --marginals out for the shipped fit",
        ) from None
    if not isinstance(given, dict):
        raise MarginalsFileError("the marginals are no JSON object", file=path)
    return given


def _read_fit(given: Mapping[str, Any], path: Path) -> Fit:
    try:
        return _FIT.validate_python(given)
    except (TypeError, ValueError) as error:
        raise MarginalsFileError("a fit that lacks something", file=path, found=error) from None


def _fitted(given: Mapping[str, Any], cluster: str = "Seren") -> Fit:
    by_type = given[f"{cluster}_duration_le_2^i_by_type"]
    types = tuple(by_type)
    counts = np.array([_steps(by_type[name]) for name in types])
    totals = counts.sum(axis=1)
    gpus, jobs, shares = gpu_table(
        given["gpu_num_cdf_jobs"][cluster], given["gpu_num_cdf_gputime"][cluster]
    )
    log_weights, tilts = tilted(jobs, shares / np.array(gpus), counts.sum(axis=0))
    return Fit(
        source=f"fitted to the marginals of {given['source']}",
        jobs_per_second=float(totals.sum()) / (TRACE_DAYS * 86400),
        types=types,
        type_shares=totals / totals.sum(),
        buckets=counts / totals[:, None],
        gpus=gpus,
        log_weights=log_weights,
        tilts=tilts,
    )


def _steps(cumulative: list[float]) -> Numbers:
    counts = np.diff(np.array(cumulative, dtype=float), prepend=0.0)
    if (counts < 0).any() or counts.sum() <= 0:
        raise ValueError("counts that fall")
    return counts


def gpu_table(
    jobs: Mapping[str, float], time: Mapping[str, float]
) -> tuple[tuple[int, ...], Numbers, Numbers]:
    """GPU counts with their jobs and their part of all GPU-time.

    A step of the distribution lies between two keys; its count is the one in between with the most
    factors of two. Key 0 is where the plot's axis begins: those jobs have one GPU.
    """
    edges = sorted(int(key) for key in jobs if key != "0")
    step = np.diff(np.array([jobs[str(edge)] for edge in edges], dtype=float), prepend=0.0)
    known = sorted((int(key), part) for key, part in time.items())
    part = np.array([max(p for key, p in known if key <= edge) for edge in edges])
    parts = np.diff(part, prepend=0.0)
    values = [rounder(low, high) for low, high in zip([0, *edges], edges, strict=False)]
    kept = (step > 0) & (parts > 0)
    if (step < 0).any() or (parts < 0).any() or not kept.any():
        raise ValueError("GPU counts that fall")
    gpus = tuple(value for value, keep in zip(values, kept, strict=True) if keep)
    return gpus, step[kept], parts[kept] / parts[kept].sum()


def rounder(low: int, high: int) -> int:
    """The number in (low, high] with the most factors of two."""
    return max(range(low + 1, high + 1), key=lambda count: (count & -count, count))


def tilted(jobs: Numbers, per_gpu: Numbers, durations: Numbers) -> tuple[Numbers, Numbers]:
    """Weights and tilts of each GPU count.

    jobs       [c] jobs of each count
    per_gpu    [c] each count's part of GPU-time over its GPUs: its part of all seconds
    durations  [b] jobs by duration
    returns    log weights [c], tilts [c], with weight_c * seconds^tilt_c to draw a count by
    """
    means = bucket_means(len(durations))
    logs = np.log(means)
    total = float(jobs.sum())
    columns = durations * (total / durations.sum())
    seconds = (columns * means).sum() * per_gpu / per_gpu.sum()
    target = np.clip(seconds / jobs, means[0] * 1.01, means[-1] * 0.99)
    base, tilts = columns / total, np.zeros(len(jobs))
    weights = jobs / total
    for _ in range(ROUNDS):
        tilts = _tilts(base, logs, target, means)
        shape = base * np.exp(np.outer(tilts, logs))
        weights = jobs / shape.sum(axis=1)
        base = base * columns / (weights[:, None] * shape).sum(axis=0).clip(1e-300)
    return np.log(weights / weights.sum()), tilts


def _tilts(base: Numbers, logs: Numbers, target: Numbers, means: Numbers) -> Numbers:
    """[c] tilts under which each count's mean duration is its target, by bisection."""
    low, high = np.full(len(target), -4.0), np.full(len(target), 4.0)
    for _ in range(50):
        middle = (low + high) / 2
        shape = base * np.exp(np.outer(middle, logs))
        mean = (shape * means).sum(axis=1) / shape.sum(axis=1)
        low, high = np.where(mean < target, middle, low), np.where(mean < target, high, middle)
    return np.asarray((low + high) / 2)


@dataclass(frozen=True, slots=True)
class Draw:
    """Settings of the generator.

    intensity    arrivals, as a multiple of the trace's mean rate
    burstiness   coefficient of variation of the times between arrivals; 1 is Poisson
    """

    jobs: int
    intensity: float = 1.0
    burstiness: float = 1.0
    seed: int = 0


def generate(fit: Fit, draw: Draw) -> Trace:
    """A trace of so many jobs; 450,590 take a few seconds. Raises ReplayChoiceWrong."""
    low, high = 1 / MAX_ARRIVAL_CHANGE, MAX_ARRIVAL_CHANGE
    in_bounds = all(low <= value <= high for value in (draw.intensity, draw.burstiness))
    if draw.jobs < 1 or not in_bounds:
        raise ReplayChoiceWrong(
            "a synthetic trace that cannot be drawn",
            expected=f"jobs >= 1, intensity and burstiness of {low:g} to {high:g}",
            found=f"jobs {draw.jobs}, intensity {draw.intensity}, burstiness {draw.burstiness}",
        )
    random = np.random.default_rng([draw.seed, draw.jobs])
    kinds = random.choice(len(fit.types), draw.jobs, p=fit.type_shares)
    buckets = chosen(random, fit.buckets, kinds)
    seconds = np.ceil(2.0 ** (buckets - random.random(draw.jobs)))
    gpus = np.array(fit.gpus)[chosen(random, fit.gpus_given_bucket, buckets)]
    rate, shape = fit.jobs_per_second * draw.intensity, 1.0 / draw.burstiness**2
    arrivals = np.cumsum(random.gamma(shape, 1.0 / (rate * shape), draw.jobs))
    months = (arrivals // MONTH_SECONDS).astype(int)
    names = [fit.types[kind] for kind in kinds]
    table = zip(arrivals.tolist(), seconds.tolist(), gpus.tolist(), names, months, strict=True)
    jobs = tuple(
        TraceJob(f"synthetic-{place}", *row[:4], "", int(row[4])) for place, row in enumerate(table)
    )
    source = f"synthetic, seed {draw.seed}: {fit.source}"
    return Trace(jobs, source, "synthetic", synthetic=True, rules=rules(draw, fit))


def chosen(random: np.random.Generator, table: Numbers, rows: Numbers) -> Numbers:
    """One column of a table of probabilities for each given row.

    table    [r, c], rows sum to 1
    rows     [n] which row each draw is from
    returns  [n] columns
    """
    columns = np.zeros(len(rows), dtype=np.int64)
    draws = random.random(len(rows))
    for row in range(len(table)):
        drawn = rows == row
        columns[drawn] = np.searchsorted(np.cumsum(table[row])[:-1], draws[drawn], side="right")
    return columns


def rules(draw: Draw, fit: Fit) -> tuple[str, ...]:
    """Assumptions of the generator, one line each."""
    kind = "Poisson" if draw.burstiness == 1 else f"gamma renewal, variation {draw.burstiness:g}"
    rate = fit.jobs_per_second * draw.intensity * 3600
    return (
        "synthetic: types, durations by type, GPU counts and GPU-time by GPU count are AcmeTrace's",
        "synthetic: type and GPUs are independent given the duration",
        "synthetic: durations are log-uniform within powers of two, in whole seconds",
        (
            f"synthetic: {kind} arrivals, {rate:,.1f} an hour ({draw.intensity:g} x the trace's "
            "mean); no bursts by user, no days, no months"
        ),
    )
