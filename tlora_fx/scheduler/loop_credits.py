"""The account of who lent GPU time to whom, kept up while groups run.

A group is settled before each decision and whenever its jobs change, if one of its jobs consents to
lend or has a balance. Groups that break a bound without consent, as some baselines' do, are not:
what they take is not lent.
"""

from __future__ import annotations

from tlora_fx.scheduler.bounds import broken
from tlora_fx.scheduler.credits import CreditLedger
from tlora_fx.scheduler.loop_runs import Run
from tlora_fx.scheduler.state import ActiveJob


class Credits:
    """Settles the credit of running jobs.

    ledger           balances, in GPU-seconds
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
        """A job ended."""
        if self.ledger.balance(name):
            self.ledger.close(name)

    def settle(self, run: Run, now: float) -> None:
        """Write down what a run's jobs gave and took since it was settled last."""
        if not self.used:
            return
        begin = run.time + self.switch_seconds if run.started is None else run.started
        since, run.settled = max(run.settled, begin), now
        if len(run.jobs) < 2 or now <= since:
            return
        jobs = list(run.jobs.values())
        if any(self._concerns(job) for job in jobs):
            seconds = run.group.seconds
            if seconds > 0 and not broken(jobs, seconds, now):
                self.ledger.settle(jobs, seconds, now - since)

    def _concerns(self, job: ActiveJob) -> bool:
        request = job.request
        return request.lends > request.max_slowdown or job.credit != 0.0
