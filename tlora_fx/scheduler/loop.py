"""The online loop: jobs arrive, are grouped, run for a horizon, report, and are grouped again.

It is the paper's Algorithm 1 put right: groups run at the same time, a job that is taken from the
queue returns to it or is done, and what need not change goes on. The loop has no clock of its own
and never waits: `advance(now)` does what is due, over any executor, on any clock.

A decision is due when something changed and a horizon has passed since the last one; before that
where GPUs are free, a job waits for them, and a group has given GPUs back or, if so wanted, a job
has come (`at_once`); and after `refresh` horizons without either, since jobs grow late meanwhile.

source   tLoRA, Algorithm 1; field notes, "Reading Algorithm 1"
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Literal

from tlora_fx.errors import ReplayOptionWrong, SubmittedTwice
from tlora_fx.scheduler.estimating import Estimator
from tlora_fx.scheduler.executor import Executor
from tlora_fx.scheduler.failures import Trouble
from tlora_fx.scheduler.formations import Formations, LayoutOf
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.loop_check import check, solo_or_reason
from tlora_fx.scheduler.loop_credits import Credits
from tlora_fx.scheduler.loop_events import Events
from tlora_fx.scheduler.loop_runs import Run
from tlora_fx.scheduler.loop_times import StepTimes
from tlora_fx.scheduler.loop_watch import NoWatch, Watch
from tlora_fx.scheduler.queue_window import Window
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.state import ActiveJob, Decision, Policy, State

if TYPE_CHECKING:
    from tlora_fx.scheduler.store import Ledger

HORIZON_SECONDS = 60.0
SWITCH_SECONDS = 20.0
RUNNABLE = 128
REFRESH = 10
TRIES = 3
AtOnce = Literal["never", "end", "always"]
AT_ONCE: AtOnce = "always"


class Loop:
    """Runs submitted jobs until they are done.

    policy           decides
    estimator        predicts; T_solo is its
    executor         runs
    ledger           what must outlive this process; None: nothing
    horizon          seconds between decisions
    switch_seconds   what policies are told that forming a group costs
    runnable         most jobs that a policy sees
    at_once          what makes it decide before the horizon, if a job waits and a GPU is free: the
                     end of a job or a change of nodes ("end"), arrivals too ("always"), or nothing
    refresh          horizons after which it is decided anew though nothing changed; 0: never
    tries            failures alone, without progress between, after which a job is given up
    watch            is told of everything
    layout_of        how a group is spread over its GPUs; None: as the executor finds best
    times            step times shared with a simulated executor

    cluster          the GPUs, as last heard
    decision         the last one
    """

    def __init__(
        self,
        policy: Policy,
        estimator: Estimator,
        executor: Executor,
        ledger: Ledger | None = None,
        *,
        horizon: float = HORIZON_SECONDS,
        switch_seconds: float = SWITCH_SECONDS,
        runnable: int = RUNNABLE,
        at_once: AtOnce = AT_ONCE,
        refresh: int = REFRESH,
        tries: int = TRIES,
        watch: Watch | None = None,
        layout_of: LayoutOf | None = None,
        times: StepTimes | None = None,
    ) -> None:
        if not horizon > 0 or switch_seconds < 0 or runnable < 1 or refresh < 0 or tries < 1:
            raise ReplayOptionWrong(
                "an option of the loop cannot have this value",
                expected="horizon > 0, switch_seconds >= 0, refresh >= 0, runnable and tries >= 1",
                found=f"horizon {horizon}, switch_seconds {switch_seconds}, runnable {runnable}, "
                f"refresh {refresh}, tries {tries}",
            )
        self.policy, self.estimator, self.executor, self.ledger = (
            policy,
            estimator,
            executor,
            ledger,
        )
        self.horizon, self.switch_seconds, self.refresh = horizon, switch_seconds, refresh
        self.at_once = at_once
        self.watch: Watch = watch or NoWatch()
        self.times = times or StepTimes(estimator)
        self.window = Window(runnable)
        self.trouble = Trouble(tries)
        self.credits = Credits(switch_seconds)
        self.formations = Formations(executor, ledger, self.watch, layout_of)
        self.decision = Decision(())
        self.cluster = executor.inventory()
        self.ended: dict[str, str] = {}
        self.changed = self.prompted = False
        self.stopping = False
        self.now = self._decided = float("-inf")
        self._events = Events(self)

    @property
    def active(self) -> dict[str, ActiveJob]:
        """The jobs that a policy sees, by name, in order of submission; `window` has all."""
        return self.window.jobs

    @property
    def groups(self) -> dict[int, Group]:
        """What runs, by epoch; groups that were asked to stop and have not yet are among it."""
        return {epoch: run.group for epoch, run in self.formations.runs.items()}

    @property
    def runs(self) -> dict[int, Run]:
        """The same with all that is known of each."""
        return self.formations.runs

    @property
    def waiting(self) -> list[ActiveJob]:
        """Active jobs in no group, in order of submission, the queue behind the window last."""
        inside = {name for run in self.formations.runs.values() for name in run.jobs}
        near = [job for name, job in self.window.jobs.items() if name not in inside]
        return near + self.window.waiting()

    @property
    def idle(self) -> bool:
        """No job is active and nothing runs."""
        return not len(self.window) and not self.formations.runs

    @property
    def quiet(self) -> bool:
        """Nothing runs: what a loop that was told to stop comes to."""
        return not self.formations.runs

    def submit(
        self, request: JobRequest, steps_done: float = 0.0, credit: float = 0.0
    ) -> str | None:
        """A job arrives; the reason where it can never run, and is refused.

        steps_done   that are committed, where it is taken up again
        credit       GPU-seconds that it has given, likewise
        raises       SubmittedTwice
        """
        name = request.name
        if name in self.ended:
            raise SubmittedTwice(
                f"job '{name}' was submitted before",
                found=self.ended[name] or "it is active",
                help="give each job a name of its own",
            )
        solo, reason = self._solo(request)
        if reason is not None:
            self.ended[name] = f"refused: {reason}"
            if self.ledger:
                self.ledger.refuse(request, reason)
            self.watch.refused(self.now, request, reason)
            return reason
        self.ended[name] = ""
        if self.ledger:
            self.ledger.submit(request)
        job = ActiveJob(request, solo, min(steps_done, float(request.steps)), credit)
        self.credits.open(job)
        self.watch.submitted(max(self.now, request.submitted), job)
        if self.window.put(job):
            self.changed = True
            self.prompted |= self.at_once == "always"
        return None

    def advance(self, now: float) -> None:
        """Do all that is due at a moment; never waits.

        now    seconds, on the clock of the executor
        """
        self.now = now
        moved = True
        while moved:
            moved = self._events.take(now)
            if self._due(now):
                self.decide(now)
                moved = True
            if not self.stopping:
                launched, refused = self.formations.launch(self.window.jobs, now)
                self.changed |= refused
                moved |= launched

    def next_due(self, now: float) -> float | None:
        """When `advance` is due next if nothing happens until then; None: not at all."""
        if self.stopping or not self.window.jobs:
            return None
        if self.changed:
            return max(now, self._decided + self.horizon)
        if not self.refresh or len(self.window.jobs) < 2:
            return None
        return max(now, self._decided + self.horizon * self.refresh)

    def state(self, now: float) -> State:
        """What a policy is shown."""
        self._events.pull()
        for run in self.formations.runs.values() if self.credits.used else ():
            self.credits.settle(run, now)
        return State(
            now,
            self.cluster,
            self.estimator,
            self.trouble.shown(self.window.jobs),
            self.formations.standing(),
            self.horizon,
            self.switch_seconds,
        )

    def decide(self, now: float) -> Decision:
        """Ask the policy, and begin to do what it says."""
        state = self.state(now)
        evaluations, begun = self.estimator.evaluations, perf_counter()
        decision = self.policy.decide(state)
        wall = perf_counter() - begun
        evaluations = self.estimator.evaluations - evaluations
        check(self.policy.name, decision, state)
        self.changed = self.prompted = False
        self._decided = now
        self.decision = decision
        if self.ledger:
            self.ledger.decide(now, decision, {job.name: job.credit for job in state.jobs.values()})
        self.watch.decided(now, decision, wall, evaluations)
        self.formations.want([self.trouble.parted(group) for group in decision.groups])
        return decision

    def drain_all(self, now: float) -> None:
        """Ask every group to stop, and form no new ones; `advance` until `quiet`."""
        self.now, self.stopping = now, True
        self.formations.pending = []
        for run in list(self.formations.runs.values()):
            if not run.leaving:
                self.formations.drain(run)

    def _due(self, now: float) -> bool:
        if self.stopping or not self.window.jobs:
            return False
        if self.changed and now >= self._decided + self.horizon:
            return True
        if self.prompted and self.at_once != "never" and self._could_start():
            return True
        due = self.next_due(now)
        return due is not None and due <= now

    def _could_start(self) -> bool:
        """Whether a GPU is free and a job of the window waits."""
        if self.formations.spoken_for() >= self.cluster.capacity():
            return False
        standing = sum(len(group.jobs) for group in self.formations.standing())
        return standing < len(self.window.jobs)

    def _solo(self, request: JobRequest) -> tuple[float, str | None]:
        """T_solo, and why the job can never run."""
        most = self.cluster.gpus
        if request.steps < 1:
            return 0.0, f"it has {request.steps} steps"
        if not 1 <= request.gpus <= most:
            return 0.0, solo_or_reason(0.0, request.gpus, most, {})
        solo = self.estimator.solo(request.base, request.demand, request.gpus)
        if solo < float("inf"):
            return solo, None
        counts = {min(most, request.gpus << power) for power in range(1, most.bit_length() + 1)}
        others = {
            count: self.estimator.solo(request.base, request.demand, count) < float("inf")
            for count in counts
        }
        return solo, solo_or_reason(solo, request.gpus, most, others)
