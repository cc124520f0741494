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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from tlora_fx.cost.estimator import Estimator
from tlora_fx.errors import ReplayOptionWrong, SubmittedTwice
from tlora_fx.scheduler.executor import (
    Committed,
    Drained,
    Executor,
    ExecutorEvent,
    Failed,
    Finished,
    GroupEvent,
    GroupStarted,
    NodeBack,
    NodeLost,
    Noted,
    Progress,
    Warned,
)
from tlora_fx.scheduler.formations import (
    Callback,
    Credits,
    Formation,
    Formations,
    LayoutOf,
    StepTimes,
)
from tlora_fx.scheduler.state import (
    ActiveJob,
    ChangeCosts,
    Decision,
    FailureRecord,
    Group,
    JobRequest,
    Policy,
    SchedulerState,
    arrival,
    decision_of,
)

if TYPE_CHECKING:
    from tlora_fx.scheduler.store import Ledger


#: A bound that no group of two or more can keep.
ALONE = 1e-9


#: How `Loop.ended` begins of a job that never ran; it may be submitted again.
REFUSED = "refused: "


#: Failures alone in a row, kills among them, after which a job is given up: it may be the job
#: that takes the machine's memory.
MAX_KILLS = 5


class RetryPolicy:
    """The jobs whose groups failed: run alone to find who is at fault, and given up at last.

    A group that fails without naming a job says nothing of who it was. Its jobs are under suspicion
    and run alone, until one of them has got further than it was; a job that was suspected too often
    stays alone for good.

    tries   failures alone, without progress between, after which a job is given up; where groups
            were killed from outside, that says less of their job, and `MAX_KILLS` are borne
    keep    hears of records that have changed, by job; None: the job has none any more
    """

    def __init__(
        self, tries: int, keep: Callable[[Mapping[str, object]], None] = lambda records: None
    ) -> None:
        self.tries = tries
        self._keep = keep
        self._records: dict[str, FailureRecord] = {}

    def restore(self, name: str, saved: FailureRecord) -> None:
        """Go on with a job's record of an earlier process, as `keep` heard it.

        Suspicion alone does not outlive a process, unless the job failed alone and was not killed:
        where machines die often, jobs would never train together again. Failures in groups are
        counted anew, for progress does not lower them.
        """
        suspect = saved.suspect and saved.alone > saved.killed
        self._records.setdefault(name, replace(saved, shared=0, suspect=suspect))

    def failed(self, jobs: Iterable[ActiveJob], *, killed: bool = False) -> list[ActiveJob]:
        """A group failed; its jobs' steps are settled. Returns those to give up.

        killed   its processes were killed, and had told nothing
        """
        members = list(jobs)
        lost = []
        for job in members:
            record = self._records.setdefault(job.name, FailureRecord(steps=job.steps_done))
            if job.steps_done > record.steps:
                record.alone = record.killed = 0
            record.steps = job.steps_done
            record.suspect = True
            if len(members) > 1:
                record.shared += 1
            else:
                record.alone += 1
                record.killed += killed
            own = record.alone - record.killed
            if own >= self.tries or record.alone >= max(self.tries, MAX_KILLS):
                lost.append(job)
        self._keep({job.name: asdict(self._records[job.name]) for job in members})
        return lost

    def failures(self, name: str) -> int:
        """Failures of a job alone since it last got further."""
        record = self._records.get(name)
        return record.alone if record else 0

    def committed(self, steps: Mapping[str, float]) -> None:
        """Jobs got further: suspicion ends, unless it was raised too often."""
        changed: dict[str, object] = {}
        for name, done in steps.items() if self._records else ():
            record = self._records.get(name)
            if record is not None and done > record.steps:
                before = asdict(record)
                record.suspect = record.shared >= self.tries
                record.alone = record.killed = 0
                changed |= {name: asdict(record)} if asdict(record) != before else {}
        if changed:
            self._keep(changed)

    def forget(self, name: str) -> None:
        """Forget a job that has ended."""
        if self._records.pop(name, None) is not None:
            self._keep({name: None})

    def suspects(self, name: str) -> bool:
        """Whether a job must run alone."""
        record = self._records.get(name)
        return record is not None and record.suspect

    def shown(self, jobs: Mapping[str, ActiveJob]) -> dict[str, ActiveJob]:
        """Jobs as a policy shall see them: suspects bear no neighbour."""
        seen = dict(jobs)
        for name in self._records:
            if name in seen and self.suspects(name):
                job = seen[name]
                request = replace(job.request, max_slowdown=ALONE, max_slowdown_opt_in=0.0)
                seen[name] = ActiveJob(request, job.solo_seconds, job.steps_done, job.credit)
        return seen

    def parted(self, group: Group) -> Group:
        """A group of a policy that looks at no bounds, without suspects; of suspects the first."""
        if not self._records or len(group.jobs) < 2:
            return group
        rest = tuple(name for name in group.jobs if not self.suspects(name))
        if len(rest) == len(group.jobs):
            return group
        return replace(group, jobs=rest or group.jobs[:1])


Key = tuple[float, str]


class Window:
    """The oldest jobs that are not done, and the queue of the others.

    The window holds at most `runnable` jobs. A job enters it in order of submission and leaves it
    only when it ends, so the window is always the oldest jobs, and none of them starves behind
    younger ones. Whatever the queue's length, nothing here costs more than its logarithm.

    runnable   most jobs in the window
    """

    def __init__(self, runnable: int) -> None:
        self.runnable = runnable
        self.jobs: dict[str, ActiveJob] = {}
        self._queue: list[tuple[float, str, ActiveJob]] = []
        self._last: Key = (float("-inf"), "")

    def __len__(self) -> int:
        """Jobs in the window and in the queue."""
        return len(self.jobs) + len(self._queue)

    @property
    def full(self) -> bool:
        """Whether a job that comes now would have to wait behind the window."""
        return len(self.jobs) + len(self._queue) >= self.runnable

    def put(self, job: ActiveJob) -> bool:
        """A job comes; whether it entered the window."""
        heappush(self._queue, (job.request.submitted, job.name, job))
        return self.fill()

    def fill(self) -> bool:
        """Admit jobs while there are free slots; returns whether any came."""
        came = False
        while self._queue and len(self.jobs) < self.runnable:
            submitted, name, job = heappop(self._queue)
            self.jobs[name] = job
            if (submitted, name) < self._last:
                # It was submitted late: put the window into order again.
                self.jobs = {one.name: one for one in sorted(self.jobs.values(), key=arrival)}
            else:
                self._last = (submitted, name)
            came = True
        return came

    def take(self, name: str) -> ActiveJob | None:
        """Take a job out of the window or of the queue; None where it was in neither."""
        job = self.jobs.pop(name, None)
        if job is not None:
            return job
        job = next((entry[2] for entry in self._queue if entry[1] == name), None)
        if job is not None:
            self._queue = [entry for entry in self._queue if entry[1] != name]
            heapify(self._queue)
        return job

    def waiting(self) -> list[ActiveJob]:
        """The queue behind the window, in order."""
        return [job for _, _, job in sorted(self._queue, key=lambda entry: entry[:2])]


class Events:
    """Takes events into a loop's jobs, formations and queue."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        # An executor that can tell progress at any moment is asked before each decision.
        self._progress: Callable[[], list[Progress]] | None = getattr(
            loop.executor, "progress", None
        )

    def pull(self) -> None:
        """Bring the progress of all formations up to date, where the executor can."""
        if self._progress:
            for event in self._progress():
                formation = self.loop.formations.running.get(event.epoch)
                if formation is not None:
                    formation.advanced(event.steps)

    def take(self, now: float) -> bool:
        """Take what has happened; whether anything has."""
        events = self.loop.executor.events()
        if any(isinstance(event, Failed) for event in events):
            self.pull()
        for event in events:
            if self.loop.ledger and not isinstance(event, Progress):
                self.loop.ledger.record(event)
            if isinstance(event, GroupEvent):
                formation = self.loop.formations.running.get(event.epoch)
                if formation is not None:
                    self._of_formation(event, formation)
            elif isinstance(event, Noted):
                self.loop.callback.noted(event.time, event.text)
            else:
                self._of_node(event, now)
        return bool(events)

    def _of_formation(self, event: GroupEvent, formation: Formation) -> None:
        match event:
            case Finished():
                self._finished(event, formation)
            case Progress():
                formation.advanced(event.steps)
            case Committed():
                self._committed(event.steps, formation)
                self._park(event, formation)
            case GroupStarted():
                formation.started, formation.paused = event.time, event.paused
            case Warned():
                self.loop.callback.warned(event.time, formation, event.text)
            case Drained():
                self._drained(event, formation)
            case Failed(job=None):
                self._failed(event, formation)
            case Failed():
                self._at_fault(event, formation)

    def _committed(self, steps: Mapping[str, float], formation: Formation) -> None:
        formation.committed.update(
            {name: done for name, done in steps.items() if name in formation.jobs}
        )
        formation.advanced(steps)
        self.loop.retries.committed(steps)

    def _park(self, event: Committed, formation: Formation) -> None:
        """Hold jobs back that are to be compared, before anybody forms a group of them."""
        if event.rungs and self.loop.ledger:
            undecided = {each.job for each in self.loop.ledger.undecided_rungs()}
            for name in event.rungs.keys() & formation.jobs.keys() & undecided:
                self.loop.park(name)

    def _drained(self, event: Drained, formation: Formation) -> None:
        self._settle(formation, event.time)
        self._committed(event.steps, formation)
        for name, steps in event.steps.items():
            if name in formation.jobs:
                formation.jobs[name].steps_done = steps
        if formation.successor is not None:
            self._miss(event.absent, formation.successor)
        self.loop.formations.end(formation, "drained", event.time)

    def _miss(self, absent: Mapping[str, str], formation: Formation) -> None:
        """Jobs whose files cannot be read did not join a formation, which goes on without them."""
        for name in absent.keys() & formation.jobs.keys():
            self._without(formation, name)
            self.loop.formations.freed(name)
        self._await_files(absent)

    def _await_files(self, absent: Mapping[str, str]) -> None:
        """Hold jobs back until their files can be read."""
        for name in absent.keys() & self.loop.window.jobs.keys():
            self.loop.absent[name] = absent[name]
            self.loop.hold(name)

    def _finished(self, event: Finished, formation: Formation) -> None:
        job = formation.jobs.get(event.job)
        if job is None:
            return
        job.steps_done = event.steps
        self._leaves(formation, event.job, "", event.time)

    def _at_fault(self, event: Failed, formation: Formation) -> None:
        """One job ends; its neighbours go on."""
        name = str(event.job)
        if name in formation.jobs:
            formation.jobs[name].steps_done = event.steps.get(name, formation.committed[name])
            self._leaves(formation, name, event.reason or "failed", event.time)

    def _leaves(self, formation: Formation, name: str, reason: str, time: float) -> None:
        loop = self.loop
        job = formation.jobs[name]
        self._settle(formation, time)
        loop.callback.left(time, formation, job, reason)
        loop.formations.freed(name)
        self.ends(name, reason)
        for each in (formation, formation.successor):
            if each is not None and name in each.jobs:
                self._without(each, name)
        loop.formations.touched()
        if not formation.jobs and (formation.successor is None or not formation.successor.jobs):
            loop.formations.end(formation, "finished", time)

    def _settle(self, formation: Formation, time: float) -> None:
        """Write down what a formation's jobs have given: no decision may come after this."""
        loop = self.loop
        loop.credits.settle(formation, time)
        if loop.ledger and loop.credits.used:
            loop.ledger.set_credit({job.name: job.credit for job in formation.jobs.values()})

    def _without(self, formation: Formation, name: str) -> None:
        others = [other.request for key, other in formation.jobs.items() if key != name]
        seconds = formation.group.seconds
        if others:
            seconds = self.loop.times.of(
                others, formation.launched.place, self.loop.cluster
            ).seconds
        formation.without(name, seconds)

    def ends(self, name: str, reason: str) -> None:
        """A job ends, done ("") or failed for a reason."""
        loop = self.loop
        if loop.held.pop(name, None) is None:
            del loop.window.jobs[name]
        loop.ended[name] = f"failed: {reason}" if reason else "done"
        loop.forget(name)

    def _failed(self, event: Failed, formation: Formation) -> None:
        """A whole formation ended: its jobs go on from their last commits."""
        loop = self.loop
        self._settle(formation, event.time)
        for each in filter(None, (formation.successor, formation)):
            for name, job in each.jobs.items():
                job.steps_done = event.steps.get(name, each.committed[name])
        self.loop.retries.committed(event.steps)
        formation.failure = event.reason
        loop.formations.end(formation, "failed", event.time)
        loop.changed = loop.prompted = True
        place = formation.launched.place
        self._await_files(event.absent)
        lost = any(loop.cluster.node(gpu) in loop.cluster.lost for gpu in place)
        if event.blameless or loop.stopping or lost:
            # A group that was told to stop may be killed for being late: no job is at fault.
            return
        for job in loop.retries.failed(formation.jobs.values(), killed=event.killed):
            times = loop.retries.failures(job.name)
            reason = f"its group failed {times} times alone: {event.reason}"
            if loop.ledger:
                loop.ledger.give_up(job.name, reason, event.time)
            loop.callback.gave_up(event.time, job, reason)
            self.ends(job.name, reason)

    def _of_node(self, event: ExecutorEvent, now: float) -> None:
        loop = self.loop
        if not isinstance(event, NodeLost | NodeBack):
            return
        loop.cluster = loop.executor.inventory()
        loop.changed = loop.prompted = True
        if isinstance(event, NodeLost):
            cluster, node = loop.cluster, event.node
            for formation in loop.formations.running.values():
                if any(cluster.node(gpu) == node for gpu in formation.launched.place):
                    formation.leaving = True
            loop.formations.drop(lambda group: any(cluster.node(g) == node for g in group.place))
            loop.formations.touched()
        loop.callback.capacity(now, loop.cluster.capacity())


AtOnce = Literal["never", "end", "always"]


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Options of when decisions are made, and of what policies see.

    switch_seconds   cost of forming a group, as policies are told
    changes          and what joins and leaves cost a group that runs; None: groups form anew
    at_once          what makes it decide before the horizon, if a job waits and a GPU is free: the
                     end of a job or a change of nodes ("end"), arrivals too ("always"), or nothing
    refresh          horizons after which it is decided anew though nothing changed; 0: never
    tries            failures alone, without progress between, after which a job is given up
    raises           ReplayOptionWrong
    """

    horizon: float = 60.0
    switch_seconds: float = 20.0
    changes: ChangeCosts | None = None
    runnable: int = 128
    at_once: AtOnce = "always"
    refresh: int = 10
    tries: int = 3

    def __post_init__(self) -> None:
        counts = self.runnable >= 1 and self.refresh >= 0 and self.tries >= 1
        if not (counts and self.horizon > 0 and self.switch_seconds >= 0):
            raise ReplayOptionWrong(
                "an option of the loop cannot have this value",
                expected="horizon > 0, switch_seconds >= 0, refresh >= 0, runnable and tries >= 1",
                found=", ".join(f"{name} {value}" for name, value in asdict(self).items()),
            )


class Loop:
    """Runs submitted jobs until they are done.

    ledger           record that outlives this process; None: there is none
    layout_of        how a group is spread over its GPUs; None: as the executor finds best
    times            step times shared with a simulated executor

    switch_seconds   of the options; whoever knows better may change it
    held             active jobs that no policy sees: see `hold`
    parked           those of them that wait to be compared with others
    absent           those of them whose files cannot be read, each with the reason; whoever turns
                     the loop takes them out
    changes          what joins and leaves cost running groups, as policies are told; likewise
    """

    def __init__(
        self,
        policy: Policy,
        estimator: Estimator,
        executor: Executor,
        ledger: Ledger | None = None,
        *,
        options: LoopOptions | None = None,
        callback: Callback | None = None,
        layout_of: LayoutOf | None = None,
        times: StepTimes | None = None,
    ) -> None:
        self.policy, self.estimator, self.executor = policy, estimator, executor
        self.ledger = ledger
        self.options = options or LoopOptions()
        self.switch_seconds = self.options.switch_seconds
        self.changes = self.options.changes
        self.callback = callback or Callback()
        self.times = times or StepTimes(estimator)
        self.window = Window(self.options.runnable)
        keep = {} if ledger is None else {"keep": ledger.note_failures}
        self.retries = RetryPolicy(self.options.tries, **keep)
        self.credits = Credits(self.switch_seconds)
        self.formations = Formations(executor, ledger, self.callback, layout_of)
        self.decision = Decision(())
        self.cluster = executor.inventory()
        self.ended: dict[str, str] = {}
        self.held: dict[str, ActiveJob] = {}
        self.parked: set[str] = set()
        self.absent: dict[str, str] = {}
        self.changed = self.prompted = False
        self.stopping = False
        self.now = self._decided = float("-inf")
        self._events = Events(self)

    @property
    def active(self) -> dict[str, ActiveJob]:
        """The jobs that a policy sees, by name, in order of submission; `window` has all."""
        return self.window.jobs

    @property
    def running(self) -> dict[int, Formation]:
        """Running formations, by epoch, with those that were asked to stop and have not yet."""
        return self.formations.running

    @property
    def idle(self) -> bool:
        """No job is active and nothing runs."""
        return not len(self.window) and not self.held and not self.formations.running

    @property
    def quiet(self) -> bool:
        """Whether nothing runs, as a loop that was told to stop ends up."""
        return not self.formations.running

    def submit(
        self, request: JobRequest, steps_done: float = 0.0, credit: float = 0.0
    ) -> str | None:
        """A job arrives; the reason where it can never run, and is refused.

        steps_done   that are committed, where it is taken up again
        credit       GPU-seconds that it has given, likewise
        raises       SubmittedTwice
        """
        name = request.name
        ended = self.ended.get(name)
        if ended is not None and not ended.startswith(REFUSED):
            raise SubmittedTwice(
                f"job '{name}' was submitted before",
                found=ended or "it is active",
                help="give each job a name of its own",
            )
        solo, reason = self._solo(request)
        if reason is not None:
            self.ended[name] = f"{REFUSED}{reason}"
            self.retries.forget(name)
            if self.ledger:
                self.ledger.refuse(request, reason)
            self.callback.refused(self.now, request, reason)
            return reason
        self.ended[name] = ""
        if self.ledger:
            self.ledger.submit(request)
            if (saved := self.ledger.failures(name)) is not None:
                self.retries.restore(name, saved)
        job = ActiveJob(request, solo, min(steps_done, float(request.steps)), credit)
        self.credits.open(job)
        self.callback.submitted(max(self.now, request.submitted), job)
        if self.window.put(job):
            self.changed = True
            self.prompted |= self.options.at_once == "always"
        return None

    def cancel(self, name: str) -> bool:
        """Take a job back that is in no group; whether there was one."""
        if self.formations.holds(name):
            return False
        # It may have been set aside.
        self.retries.forget(name)
        return self.set_aside(name) is not None

    def set_aside(self, name: str) -> ActiveJob | None:
        """Take a job out that is in no group, until it is submitted again; None: there is none.

        How often it failed is remembered, until it ends or is cancelled.
        """
        if self.formations.holds(name):
            return None
        job = self.held.pop(name, None) or self.window.take(name)
        if job is not None:
            del self.ended[name]
            self._vacate(name)
        return job

    def forget(self, name: str) -> None:
        """Keep nothing of a job that is active no longer, and let others have its place."""
        self.retries.forget(name)
        self._vacate(name)

    def _vacate(self, name: str) -> None:
        """Let others have the place of a job that is active no longer."""
        self.parked.discard(name)
        self.absent.pop(name, None)
        self.window.fill()
        self.credits.close(name)
        self.formations.drop(lambda group: name in group.jobs)
        self.changed = self.prompted = True

    def hold(self, name: str) -> bool:
        """Hold back an active job until `let_go`, whatever policies say; whether it will be held.

        It leaves a group that can go on without it; another is drained, and its other jobs are
        grouped anew. No step is lost.
        """
        job = self.window.take(name)
        if job is None:
            return False
        self.held[name] = job
        self.window.fill()
        for formation in list(self.formations.running.values()):
            if name in (formation.successor or formation).jobs or name in formation.jobs:
                self.formations.part(formation, self.held)
        self.formations.drop(lambda group: name in group.jobs)
        self.changed = self.prompted = True
        return True

    def let_go(self, name: str) -> None:
        """A held job that is not parked may run again, in its old place of the queue."""
        if name in self.parked:
            return
        job = self.held.pop(name)
        if self.window.put(job):
            self.changed = self.prompted = True

    def park(self, name: str) -> None:
        """Hold an active job back until `unpark` or `finish`, whoever else would let it go."""
        self.parked.add(name)
        self.hold(name)

    def unpark(self, name: str) -> None:
        """A parked job may run again."""
        self.parked.remove(name)
        self.let_go(name)

    def finish(self, name: str) -> None:
        """A parked job that is in no group ends where it is."""
        self._events.ends(name, "")

    def advance(self, now: float) -> None:
        """Do all that is due at `now`, in seconds on the executor's clock; never waits."""
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
        """Time when `advance` is due next if nothing happens until then; None: not at all."""
        if self.stopping or not self.window.jobs:
            return None
        if self.changed:
            return max(now, self._decided + self.options.horizon)
        if not self.options.refresh or len(self.window.jobs) < 2:
            return None
        return max(now, self._decided + self.options.horizon * self.options.refresh)

    def state(self, now: float) -> SchedulerState:
        """State that a policy is shown."""
        self._events.pull()
        for formation in self.formations.running.values() if self.credits.used else ():
            self.credits.settle(formation, now)
        jobs, groups = self.retries.shown(self.window.jobs), self.formations.standing()
        return SchedulerState(
            now, self.cluster, self.estimator, jobs, groups, self.options.horizon,
            self.switch_seconds, self.changes,
        )  # fmt: skip

    def decide(self, now: float) -> Decision:
        """Ask the policy, and begin to do what it says."""
        state = self.state(now)
        evaluations, begun = self.estimator.evaluations, perf_counter()
        decision = decision_of(self.policy, state)
        wall = perf_counter() - begun
        evaluations = self.estimator.evaluations - evaluations
        self.changed = self.prompted = False
        self._decided = now
        self.decision = decision
        if self.ledger:
            self.ledger.decide(now, decision, {job.name: job.credit for job in state.jobs.values()})
        self.callback.decided(now, decision, wall, evaluations)
        self.formations.want([self.retries.parted(group) for group in decision.groups])
        return decision

    def drain_all(self, now: float) -> None:
        """Ask every group to stop, and form no new ones; `advance` until `quiet`."""
        self.now, self.stopping = now, True
        self.formations.pending = []
        for formation in list(self.formations.running.values()):
            if not formation.leaving:
                self.formations.drain(formation)

    def _due(self, now: float) -> bool:
        if self.stopping or not self.window.jobs:
            return False
        if self.changed and now >= self._decided + self.options.horizon:
            return True
        if self.prompted and self.options.at_once != "never" and self._could_start():
            return True
        due = self.next_due(now)
        return due is not None and due <= now

    def _could_start(self) -> bool:
        """Whether a GPU is free and a job of the window waits."""
        if self.formations.claimed_gpus() >= self.cluster.capacity():
            return False
        standing = sum(len(group.jobs) for group in self.formations.standing())
        return standing < len(self.window.jobs)

    def _solo(self, request: JobRequest) -> tuple[float, str | None]:
        """T_solo, and why the job can never run."""
        most, asked = self.cluster.gpus, request.gpus
        if request.steps < 1:
            return 0.0, f"it has {request.steps} steps"
        if asked < 1:
            return 0.0, f"it asks for {asked} GPUs"
        if asked > most:
            return 0.0, f"it asks for {asked} GPUs and the cluster has {most}"
        solo_on = partial(self.estimator.solo, request.base, request.demand)
        solo = solo_on(asked)
        if solo < float("inf"):
            return solo, None
        others = sorted({min(most, asked << power) for power in range(1, most.bit_length() + 1)})
        enough = [count for count in others if solo_on(count) < float("inf")]
        if not enough:
            return solo, f"no layout fits into memory, on {asked} GPUs or on all {most}"
        return solo, f"no layout fits into the memory of {asked} GPUs; {enough[0]} would do"
