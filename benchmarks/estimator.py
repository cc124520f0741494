"""How many (group, GPUs) pairs the scheduler's estimator costs in a second, on one core.

    python -m benchmarks.estimator

Groups of 1 to 6 jobs on llama-3-8b with the shipped profile of an H200; seconds of processor time,
the fastest of a few rounds. Prints a table and writes JSON to results/.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks.results_file import RESULTS, described, write
from tlora_fx.cost.estimator import ProfileEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Array, Demand, demand_of
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import SHIPPED

BASE = "llama-3-8b"
GPUS = ((1,), (2,), (4,), (8,), (16,), (1, 2, 4, 8), (1, 2, 3, 5, 9, 12, 16, 24))
COUNTS = (1, 16, 256, 100_000)
RANKS, BATCHES, LENGTH, MAX_JOBS = (2, 4, 8, 16), (1, 2, 4, 8), 130, 6


def groups(count: int, random: np.random.Generator) -> Array:
    """Demands of random groups [count, 12]."""
    jobs = np.array([demand_of(BASE, r, b, LENGTH).row() for r in RANKS for b in BATCHES])
    sizes = random.integers(1, MAX_JOBS + 1, count)
    found = np.zeros((count, len(Demand._fields)))
    for place in range(MAX_JOBS):
        found += jobs[random.integers(0, len(jobs), count)] * (sizes > place)[:, None]
    return found


def measured(estimator: ProfileEstimator, gpus: tuple[int, ...], count: int, rounds: int) -> float:
    """Seconds of processor time of one call."""
    random = np.random.default_rng(0)
    demands, asked = groups(count, random), random.choice(gpus, count)
    tiers = [estimator.cluster.min_tier(int(one)) for one in asked]
    repeats = max(1, 2000 // count)
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            estimator.seconds(BASE, demands, asked, tiers)
        best = min(best, (time.process_time() - start) / repeats)
    return best


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    profile = Profile.load(SHIPPED / f"{BASE}-nvidia-h200.json")
    estimator = ProfileEstimator({BASE: profile}, Cluster(128))
    start = time.process_time()
    estimator.base(BASE)
    rows: list[dict[str, object]] = []
    print(f"tables of a base: {(time.process_time() - start) * 1e3:.1f} ms")
    for gpus in GPUS:
        for count in COUNTS:
            seconds = measured(estimator, gpus, count, rounds)
            rows.append({"gpus": gpus, "groups": count, "seconds": seconds})
            each = f"{seconds / count * 1e9:10.0f} ns a pair"
            print(f"{gpus!s:<28}{count:>8} groups {seconds * 1e6:10.0f} us a call {each}")
    found = described("estimator", "cpu") | {"rounds": rounds, "rows": rows}
    write(RESULTS / f"estimator-{found['date']}.json", found)


if __name__ == "__main__":
    main()
