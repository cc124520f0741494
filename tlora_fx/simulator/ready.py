"""What is looked at before anything is replayed, so that no mistake is found hours later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tlora_fx.errors import ReplayChoiceWrong, TooManyForOracle
from tlora_fx.scheduler.oracle import MOST_JOBS
from tlora_fx.scheduler.policies import policy_of
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.simulator.sweep import Plan, Scenario, load
from tlora_fx.simulator.sweep_run import workload_in


def demand_ready(plan: Plan) -> None:
    """Refuse replays that cannot be begun: their GPUs, bases, profiles, jobs and policies.

    raises    ReplayChoiceWrong, UnknownGpu, BaseUnknown, ProfileMismatch, TooManyForOracle, and
              all that reading a trace does
    """
    base = plan.main[0]
    demand_times(base)
    trace = load(base.source, base.seed)
    if base.month is not None:
        trace = trace.month(base.month)
    made = workload_in(base, trace)
    demand_few_for_oracle({one.policy for one in plan.scenarios()}, base.runnable, made.requests)


def demand_times(scenario: Scenario) -> None:
    """Refuse times that make no sense.

    raises    ReplayChoiceWrong
    """
    for name, found, fine, expected in (
        ("horizon", scenario.horizon, scenario.horizon > 0, "seconds above 0"),
        ("switch-seconds", scenario.switch_seconds, scenario.switch_seconds >= 0, "0 or more"),
    ):
        if not fine:
            raise ReplayChoiceWrong(f"--{name} makes no sense", expected=expected, found=found)


def demand_few_for_oracle(
    policies: Iterable[str], runnable: int, requests: Iterable[JobRequest]
) -> None:
    """Refuse the exact policy where it might see more jobs of a base than it can part.

    runnable   jobs that a policy sees at once
    raises     TooManyForOracle
    """
    if runnable <= MOST_JOBS or all(policy_of(name).name != "oracle" for name in policies):
        return
    [(base, most)] = Counter(one.base for one in requests).most_common(1)
    if most > MOST_JOBS:
        raise TooManyForOracle(
            "the exact policy might see too many jobs of one base",
            expected=f"at most {MOST_JOBS} at once",
            found=f"{most:,} jobs of base '{base}', and --runnable {runnable}",
            help=f"add --runnable {MOST_JOBS}, or leave the policy 'oracle' out",
        )
