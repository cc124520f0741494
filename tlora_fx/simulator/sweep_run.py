"""One replay of a scenario: estimator, jobs, policy, engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tlora_fx.cost.estimator import ProfileEstimator
from tlora_fx.cost.profile import Profile
from tlora_fx.errors import ProfileMismatch
from tlora_fx.scheduler.estimator_profiles import profiles_for
from tlora_fx.scheduler.policies import policy_of
from tlora_fx.simulator.metrics import Summary
from tlora_fx.simulator.replay import replay
from tlora_fx.simulator.sweep import Scenario
from tlora_fx.simulator.traces import Trace
from tlora_fx.simulator.workload import Workload, workload_of


def replayed(scenario: Scenario, trace: Trace, **options: Any) -> tuple[Summary, Workload]:
    """Make jobs of a trace and replay them under the scenario's policy.

    A job's steps follow from its time alone with fused kernels, whatever the policy, so that all
    policies are given the same work.

    options    for the engine, such as `progress`
    """
    policy = policy_of(scenario.policy)
    workload = workload_in(scenario, trace)
    found = replay(
        workload.requests,
        policy,
        estimator_of(scenario, bases_of(scenario, trace), fused=getattr(policy, "fused", True)),
        scenario.cluster,
        horizon=scenario.horizon,
        switch_seconds=scenario.switch_seconds,
        runnable=scenario.runnable,
        seed=scenario.seed,
        **options,
    )
    return found.summary, workload


def workload_in(scenario: Scenario, trace: Trace) -> Workload:
    """The jobs of a scenario; a sweep over nano-batches keeps them as they are."""
    as_they_are = replace(scenario, nano_batches=None)
    alone = estimator_of(as_they_are, bases_of(scenario, trace), fused=True)
    return workload_of(trace, scenario.choices, scenario.cluster, alone)


def bases_of(scenario: Scenario, trace: Trace) -> list[str]:
    """Bases of the jobs: those that are chosen, or those of a trace of ours."""
    if trace.requests is None:
        return list(scenario.choices.bases)
    return sorted({request.base for request in trace.requests.values()})


def estimator_of(scenario: Scenario, bases: Iterable[str], *, fused: bool) -> ProfileEstimator:
    """The estimator of a scenario's policy.

    raises    ProfileMismatch, UnknownGpu, BaseUnknown
    """
    cluster = scenario.cluster
    profiles = _profiles(tuple(bases), cluster.gpu, scenario.allow_estimated)
    counts = (1, 2, 4, 8) if scenario.nano_batches is None else (scenario.nano_batches,)
    return ProfileEstimator(profiles, cluster, fused=fused, nano_batches=counts)


@lru_cache(maxsize=64)
def _profiles(bases: tuple[str, ...], gpu: str, allow_estimated: bool) -> dict[str, Profile]:
    try:
        return profiles_for(bases, gpu, allow_estimated=allow_estimated)
    except ProfileMismatch as error:
        help = "take scaled ones with --allow-estimated, or measure it with `tlora-fx profile`"
        raise ProfileMismatch(error.what, help=help, **error.facts) from None
