"""Summaries of replays that never were, for tests of what is made of them."""

from __future__ import annotations

import numpy as np

from tlora_fx.cost.hardware import Cluster
from tlora_fx.simulator.metrics import Distribution, SeriesPoint, SizeClass, Span, Summary
from tlora_fx.simulator.sweep import JobSource, Scenario, ScenarioResult

#: Samples a second, mean completion.
SPEEDS = {"tlora": (40.0, 900.0), "mlora-fifo": (30.0, 2700.0), "megatron": (20.0, 3600.0)}


def summary(policy="tlora", seed=0, samples_per_second=None, completion=None, **others):
    """A summary whose few numbers that matter follow from the policy and the seed."""
    speed, mean = SPEEDS.get(policy, (25.0, 2000.0))
    speed = samples_per_second or speed * (1 + seed / 100)
    mean = completion or mean * (1 - seed / 100)
    draws = np.random.default_rng(seed).lognormal(0, 1, 200)
    completion_seconds = Distribution.of(draws / draws.mean() * mean)
    span = Span(1000.0, 128e3, 100e3, 28e3, 10e3, 1e3, speed * 1000, 30e3, 300e3)
    given = {
        "policy": policy,
        "gpus": 128,
        "horizon_seconds": 60.0,
        "switch_seconds": 20.0,
        "runnable": 128,
        "seed": seed,
        "options": {},
        "jobs": 200,
        "finished": 200,
        "failed": 0,
        "refused": 0,
        "unfinished": 0,
        "refusals": {},
        "completion_seconds": completion_seconds,
        "queue_seconds": Distribution.of(draws / draws.mean() * mean * 0.6),
        "run_seconds": Distribution.of(draws / draws.mean() * mean * 0.4),
        "slowdown": Distribution.of(1 + draws / 20),
        "stretch": Distribution.of(1 + draws),
        "violations": 0,
        "violating_job_share": 0.2 if policy == "mlora-fifo" else 0.0,
        "lent": 0,
        "grouping": tuple(
            SizeClass(name, 66, share, share)
            for name, share in (("small", 0.9), ("medium", 0.6), ("large", 0.8))
        ),
        "grouped_job_share": 0.77,
        "group_jobs": 2.5,
        "formations": 300,
        "switches": 40,
        "moves": 80,
        "joins": 0,
        "leaves": 0,
        "group_failures": 0,
        "node_losses": 0,
        "decisions": 500,
        "evaluations": 10_000,
        "decision_wall_seconds": Distribution.of([0.001, 0.002, 0.003]),
        "wall_seconds": 1.0,
        "whole": span,
        "loaded": span,
        "series": tuple(
            SeriesPoint(60.0 * n, 60.0, 128.0, 100.0, 10.0, 50.0, 5.0 * n, 20.0, speed, 30.0)
            for n in range(10)
        ),
    }
    return Summary(**(given | others))


def outcome(scenario, **others):
    """What came of a scenario."""
    trace = {
        "source": "synthetic, seed 0: AcmeTrace",
        "format": "synthetic",
        "synthetic": scenario.source.synthetic,
        "jobs": 200,
        "span_days": 0.3,
        "months": 1,
        "mean_gpus": 5.0,
        "gpu_hours": 1000.0,
        "mean_duration_seconds": 800.0,
        "types": {"Eval": 200},
        "rules": ["synthetic: <b>Poisson</b> arrivals"],
    }
    dropped = [
        ("wrong", "negative duration", 3, "line 7"),
        ("rule", "asks for no GPU", 1200, "job 1"),
    ]
    found = summary(scenario.policy, scenario.seed, **others)
    return ScenarioResult(scenario, found, trace, dropped, 1.0)


def base(**others):
    """A scenario to vary."""
    return Scenario("tlora", source=JobSource(jobs=200), cluster=Cluster(128), **others)
