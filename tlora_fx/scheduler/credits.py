"""Credit of jobs for GPU time that they gave to others.

A job that consented to lend may run slower than its bound. What it gives up then, measured in
GPU-seconds of its own GPUs, is written to its credit and shared as debt by its neighbours, each by
the GPUs that it asked for. A creditor is repaid when a group makes it faster than it is alone, by
the neighbours that owe; and it is taken first from the queue. What is given is what is taken:
balances sum to zero, those that ended in debt or credit included.

source   tLoRA, section 3.4, elastic contribution; field notes: it needs an account
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tlora_fx.errors import CreditRefused
from tlora_fx.scheduler.formations import Formation
from tlora_fx.scheduler.state import ROUNDING, ActiveJob, broken


@dataclass(slots=True)
class CreditLedger:
    """Balances in GPU-seconds: positive has given, negative has taken; `closed` of ended jobs."""

    closed: float = 0.0
    _balances: dict[str, float] = field(default_factory=dict)

    def balance(self, job: str) -> float:
        """Balance of one job."""
        return self._balances.get(job, 0.0)

    def settle(self, jobs: Sequence[ActiveJob], step_seconds: float, seconds: float) -> None:
        """Write down what a group's jobs gave and took, and put it into their `credit`.

        seconds        for which it ran, switching not counted
        raises         CreditRefused
        """
        if len(jobs) < 2 or seconds <= 0:
            return
        given = {job.name: _given(job, step_seconds) * seconds for job in jobs}
        if any(given.values()):
            self._charge(jobs, given)
        self._repay(jobs, step_seconds, seconds)
        for job in jobs:
            job.credit = self.balance(job.name)

    def open(self, job: str, balance: float) -> None:
        """A job that has given or taken before comes back; `closed` stands against it."""
        self._add(job, balance)
        self.closed -= balance

    def close(self, job: str) -> float:
        """A job ended; its balance, which stays in `closed`."""
        balance = self._balances.pop(job, 0.0)
        self.closed += balance
        return balance

    def total(self) -> float:
        """Sum of all balances, ended jobs' included: zero but for rounding."""
        return self.closed + sum(self._balances.values())

    def _charge(self, jobs: Sequence[ActiveJob], given: Mapping[str, float]) -> None:
        """Each neighbour of a lender takes its share of what the lender gave."""
        for lender in jobs:
            amount = given[lender.name]
            if amount <= 0:
                continue
            others = [job for job in jobs if job.name != lender.name]
            asked = sum(job.request.gpus for job in others)
            self._add(lender.name, amount)
            for job in others:
                self._add(job.name, -amount * job.request.gpus / asked)

    def _repay(self, jobs: Sequence[ActiveJob], step_seconds: float, seconds: float) -> None:
        """Debtors pay creditors that run faster than alone by their help."""
        for creditor in jobs:
            owed = self.balance(creditor.name)
            faster = creditor.solo_seconds / step_seconds - 1
            debts = {job.name: max(0.0, -self.balance(job.name)) for job in jobs}
            most = min(owed, sum(debts.values()))
            if faster <= 0 or most <= 0:
                continue
            paid = min(most, faster * creditor.request.gpus * seconds)
            self._add(creditor.name, -paid)
            whole = sum(debts.values())
            for name, debt in debts.items():
                if debt > 0:
                    self._add(name, paid * debt / whole)

    def _add(self, job: str, amount: float) -> None:
        self._balances[job] = self.balance(job) + amount


def _given(job: ActiveJob, step_seconds: float) -> float:
    """GPU-seconds a second that a job gives up past its bound."""
    request = job.request
    slowdown = step_seconds / job.solo_seconds
    if slowdown <= request.max_slowdown:
        return 0.0
    if request.max_slowdown_opt_in <= request.max_slowdown:
        return 0.0
    if slowdown > request.max_slowdown_opt_in * (1 + 1e3 * ROUNDING):
        raise CreditRefused(
            f"job '{request.name}' did not consent to be slowed down so much",
            expected=f"at most {max(request.max_slowdown_opt_in, request.max_slowdown):.4g} times",
            found=f"{slowdown:.4g} times",
        )
    return request.gpus * (1 - request.max_slowdown / slowdown)


class Credits:
    """Settles the credit of running jobs.

    A group is settled before each decision and whenever its jobs change, if one of its jobs
    consents to lend or has a balance. Groups that break a bound without consent, as some baselines'
    do, are not: what they take is not lent.

    switch_seconds   from a launch, in which nobody gives anything, where a start is not told
    used             whether any job came that lends, or that has given
    """

    def __init__(self, switch_seconds: float) -> None:
        self.ledger = CreditLedger()
        self.switch_seconds = switch_seconds
        self.used = False

    def open(self, job: ActiveJob) -> None:
        """A job comes; it may have given before."""
        self.used = self.used or self._concerns(job)
        if job.credit:
            self.ledger.open(job.name, job.credit)

    def close(self, name: str) -> None:
        """Close the account of a job that has ended."""
        if self.ledger.balance(name):
            self.ledger.close(name)

    def settle(self, formation: Formation, now: float) -> None:
        """Write down what a formation's jobs gave and took since it was settled last."""
        if not self.used:
            return
        begin = (
            formation.time + self.switch_seconds if formation.started is None else formation.started
        )
        since, formation.settled = max(formation.settled, begin), now
        if len(formation.jobs) < 2 or now <= since:
            return
        jobs = list(formation.jobs.values())
        if any(self._concerns(job) for job in jobs):
            seconds = formation.group.seconds
            if seconds > 0 and not broken(jobs, seconds, now):
                self.ledger.settle(jobs, seconds, now - since)

    def _concerns(self, job: ActiveJob) -> bool:
        request = job.request
        return request.max_slowdown_opt_in > request.max_slowdown or job.credit != 0.0
