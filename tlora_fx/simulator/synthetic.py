"""Draw synthetic traces with the marginals of AcmeTrace.

Types, durations of each type, GPUs, and the GPU-time that each number of GPUs takes are AcmeTrace's
(cluster Seren). Everything else is not in the marginals and is an assumption: type and GPUs are
independent given the duration, jobs arrive one by one at the trace's mean rate, and there are
neither bursts, unless they are asked for, nor days, users or months. What is drawn here is labelled
synthetic wherever it goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlora_fx.errors import ReplayChoiceWrong
from tlora_fx.simulator.generator_fit import Fit
from tlora_fx.simulator.traces import MONTH_SECONDS, Trace, TraceJob

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Draw:
    """What is asked of the generator.

    jobs         how many
    intensity    arrivals, as a multiple of the trace's mean rate
    burstiness   coefficient of variation of the times between arrivals; 1 is Poisson
    seed         of every draw
    """

    jobs: int
    intensity: float = 1.0
    burstiness: float = 1.0
    seed: int = 0


def generate(fit: Fit, draw: Draw) -> Trace:
    """A trace of so many jobs; 450,590 take a few seconds.

    raises    ReplayChoiceWrong
    """
    if draw.jobs < 1 or not draw.intensity > 0 or not draw.burstiness > 0:
        raise ReplayChoiceWrong(
            "a synthetic trace that cannot be drawn",
            expected="jobs >= 1, intensity > 0, burstiness > 0",
            found=f"jobs {draw.jobs}, intensity {draw.intensity}, burstiness {draw.burstiness}",
        )
    random = np.random.default_rng([draw.seed, draw.jobs])
    kinds = random.choice(len(fit.types), draw.jobs, p=fit.type_shares)
    buckets = chosen(random, fit.buckets, kinds)
    seconds = np.ceil(2.0 ** (buckets - random.random(draw.jobs)))
    gpus = np.array(fit.gpus)[chosen(random, fit.gpus_given_bucket, buckets)]
    arrivals = _arrivals(random, fit.jobs_per_second * draw.intensity, draw)
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
    found = np.zeros(len(rows), dtype=np.int64)
    draws = random.random(len(rows))
    for row in range(len(table)):
        mine = rows == row
        found[mine] = np.searchsorted(np.cumsum(table[row])[:-1], draws[mine], side="right")
    return found


def _arrivals(random: np.random.Generator, rate: float, draw: Draw) -> Numbers:
    shape = 1.0 / draw.burstiness**2
    return np.cumsum(random.gamma(shape, 1.0 / (rate * shape), draw.jobs))


def rules(draw: Draw, fit: Fit) -> tuple[str, ...]:
    """What was assumed, one line each."""
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
