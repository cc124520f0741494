"""Why numbers are what they are, and where they differ from the paper's: computed facts.

Each paragraph is made from numbers of the replays, and is left out where they are not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tlora_fx.cost.load import Demand, demand_of
from tlora_fx.simulator.comparison import (
    ALLOCATED,
    BASELINES,
    COMPLETION,
    OURS,
    PAPER_BUSY,
    PAPER_COMPLETION,
    PAPER_THROUGHPUT,
    QUEUE,
    SLOWDOWN,
    Metric,
    Policies,
    Ratio,
    part_ratios,
    ratio_text,
    spread,
)
from tlora_fx.simulator.figures import shown
from tlora_fx.simulator.sweep import Scenario, ScenarioResult, estimator_of

LESS_THAN_ROOM = (
    " With less work than room, throughput while jobs arrive is near what arrives, whatever the "
    "policy."
)
BETTER_ALONE = (
    " Alone, then, a job is faster without them by what was measured: policies that run many jobs "
    "alone gain by unfused kernels, which is a fact about short rows and not about grouping."
)


def reasons(policies: Policies, ratios: Sequence[Ratio]) -> list[str]:
    """Paragraphs, each about one cause."""
    if OURS not in policies:
        return []
    return [
        *(
            f"Against {ratio.baseline}: throughput {ratio_text(ratio.throughput)}, "
            f"{place(ratio.throughput.mean, PAPER_THROUGHPUT)}; mean completion, theirs over ours, "
            f"{ratio_text(ratio.completion)}, {place(ratio.completion.mean, PAPER_COMPLETION)}; "
            f"GPUs busy {ratio_text(ratio.busy)}, the paper's +{PAPER_BUSY - 1:.0%} at most."
            for ratio in ratios
        ),
        *_load(policies),
        *_held(policies),
        *_bound(policies),
        *_idle(policies),
        *_spare(policies),
        *_parts(policies),
        *_kernels(policies),
        *_bounds_kept(policies),
        *_setting(policies[OURS][0].scenario, policies[OURS][0]),
    ]


def place(value: float, paper: tuple[float, float]) -> str:
    """Where a number stands to the paper's range."""
    low, high = paper
    if value < low:
        return f"below the paper's {low:g}–{high:g}"
    return f"above the paper's {low:g}–{high:g}" if value > high else f"within {low:g}–{high:g}"


def _mean(policies: Policies, name: str, metric: Metric) -> float | None:
    over_seeds = spread(metric, policies.get(name, []))
    return over_seeds.mean if over_seeds else None


def offered_load(outcome: ScenarioResult) -> float:
    """GPU-seconds that the jobs would take alone, over those that there are while they arrive."""
    summary = outcome.summary
    room = summary.gpus * summary.loaded.seconds
    return summary.whole.lone_gpu_seconds / room if room else 0.0


def _load(policies: Policies) -> Iterator[str]:
    loads = [offered_load(outcome) for outcome in policies[OURS]]
    load = sum(loads) / len(loads)
    parts = ", ".join(f"{part:.0%} under {name}" for name, part in _queue_parts(policies).items())
    yield (
        f"Load: alone, on the GPUs that they ask for, the jobs would take {load:.2f} times the GPU "
        f"time that the cluster has while they arrive. Queue is, of mean completion, {parts}."
        + (LESS_THAN_ROOM if load < 1 else "")
    )


def _queue_parts(policies: Policies) -> dict[str, float]:
    return {
        name: (_mean(policies, name, QUEUE) or 0.0) / completion
        for name in policies
        if (completion := _mean(policies, name, COMPLETION))
    }


def _held(policies: Policies) -> Iterator[str]:
    held = {
        name: sum(outcome.summary.whole.allocated_gpu_seconds for outcome in outcomes)
        for name, outcomes in policies.items()
    }
    others = [
        f"{held[name] / held[OURS]:.2f} times that under {name}"
        for name in policies
        if name in BASELINES and held[OURS] > 0
    ]
    if others:
        yield (
            f"GPU time: {OURS} held {shown(held[OURS] / 3600 / len(policies[OURS]))} GPU-hours to "
            f"do all the work; {', '.join(others)}. A group gives back GPUs on which its step "
            "would not be faster, and jobs that share a group share its GPUs."
        )
    blocked = [
        f"{name} ({allocated:.0f}% of the GPU time allocated)"
        for name, part in _queue_parts(policies).items()
        if part > 0.5 and (allocated := _mean(policies, name, ALLOCATED) or 0.0) < 75
    ]
    if blocked:
        yield (
            f"Blocked queues: jobs wait beside idle GPUs under {', '.join(blocked)}. A queue that "
            "is taken in order of arrival is blocked by a wide job at its head, which waits for "
            "enough GPUs at once; what overtaking alone brings shows in megatron:backfill=true."
        )


def _bound(policies: Policies) -> Iterator[str]:
    lone = [outcome.trace["mean_duration_seconds"] for outcome in policies[OURS]]
    mean = sum(lone) / len(lone)
    limits = [
        f"{completion / mean:.2f}× below {name}"
        for name in (OURS, *BASELINES)
        if mean > 0 and (completion := _mean(policies, name, COMPLETION)) is not None
    ]
    if limits:
        yield (
            f"Room: the jobs alone last {shown(mean)} s on the mean. With no queue and no slowdown "
            f"mean completion would be {', '.join(limits)}: more is gained only where a job runs "
            "faster in a group than alone, on GPUs of others."
        )


def _idle(policies: Policies) -> Iterator[str]:
    if "megatron" not in policies:
        return
    alone = [
        outcome.summary.loaded.busy_gpu_seconds / outcome.summary.loaded.allocated_gpu_seconds
        for outcome in policies["megatron"]
        if outcome.summary.loaded.allocated_gpu_seconds
    ]
    if not alone:
        return
    busy = sum(alone) / len(alone)
    ours = [outcome.summary.group_jobs for outcome in policies[OURS]]
    shared = [outcome.summary.grouped_job_share for outcome in policies[OURS]]
    yield (
        f"Idle hardware: jobs alone compute {busy:.1%} of the time of the GPUs that they hold (by "
        f"the estimator). Under {OURS} a group has {sum(ours) / len(ours):.2f} jobs on the mean, "
        f"and {sum(shared) / len(shared):.0%} of the jobs ever share."
    )


def _spare(policies: Policies) -> Iterator[str]:
    slow, held = _mean(policies, OURS, SLOWDOWN), _mean(policies, OURS, ALLOCATED)
    if slow is None or held is None or slow < 1.02 or held > 75:
        return
    yield (
        f"Room to spare: under {OURS} steps took {slow:.2f} times those alone while "
        f"{100 - held:.0f}% of the GPU time was in no group's hands. What sharing and giving back "
        "GPUs cost there no queue repays: a larger load would."
    )


def _parts(policies: Policies) -> Iterator[str]:
    brought = [
        f"{part}: throughput {ratio.throughput.mean:.2f}×, completion {ratio.completion.mean:.2f}×"
        for part, ratio in part_ratios(policies).items()
    ]
    if brought:
        yield f"Each part, by what its absence costs. {'; '.join(brought)}."


def _kernels(policies: Policies) -> Iterator[str]:
    """What fused kernels are worth by the estimator, for one job and for eight."""
    if "no-kernel-fuser" not in policies:
        return
    scenario = policies[OURS][0].scenario
    base, rank, batch = scenario.choices.bases[0], 8, 4
    demand = demand_of(base, rank, batch, scenario.choices.mean_tokens)
    rows = [demand.row(), Demand.total([demand] * 8).row()]
    sentences, lone = [], []
    for words, fused in (("with fused kernels", True), ("without", False)):
        estimator = estimator_of(scenario, [base], fused=fused)
        steps = estimator.seconds(base, np.array(rows), np.ones(2), ["gpu", "gpu"])
        lone.append(steps[0])
        alone, eight = (f"{1e3 * step:.0f} ms" for step in steps)
        sentences.append(f"{alone} for one job and {eight} for eight together {words}")
    yield (
        f"Kernels: by the estimator a step of {base} on one GPU (rank {rank}, {batch} samples of "
        f"{scenario.choices.mean_tokens:g} tokens) takes {', '.join(sentences)}."
        + (BETTER_ALONE if lone[1] < lone[0] else "")
    )


def _bounds_kept(policies: Policies) -> Iterator[str]:
    shares = [
        f"{share:.0%} of the jobs under {name}"
        for name, outcomes in policies.items()
        if (share := sum(o.summary.violating_job_share for o in outcomes) / len(outcomes)) > 0.0005
    ]
    bound = policies[OURS][0].scenario.choices.max_slowdown
    if shares:
        yield (
            f"Bounds: steps slower than {bound:g} times alone in a shared group were met by "
            f"{', '.join(shares)}, and by none under the others. A policy that breaks the bound "
            "buys throughput with it."
        )
    else:
        yield f"Bounds: no job was in a shared group slower than {bound:g} times alone."


def _setting(scenario: Scenario, outcome: ScenarioResult) -> Iterator[str]:
    kind = (
        "drawn from AcmeTrace's marginals (synthetic)"
        if scenario.source.synthetic
        else (
            f"from {outcome.trace['source']}"
            + (", with durations that are drawn" if outcome.trace["synthetic"] else "")
        )
    )
    yield (
        f"Setting: the paper replays the first month of AcmeTrace's Seren on 128 GPUs with speeds "
        f"measured on A100s and a simulator that it says is within 3%. Here jobs are {kind}, "
        f"{outcome.trace['jobs']:,} of them over {outcome.trace['span_days']:.2f} days, on "
        f"{scenario.cluster.gpus} {scenario.cluster.gpu} with layer profiles"
        f"{', estimated ones allowed' if scenario.allow_estimated else ''}; samples have "
        f"{scenario.choices.mean_tokens:g} tokens on the mean. The paper does not publish its "
        "replay's parameters beyond these, nor its baselines' settings."
    )
