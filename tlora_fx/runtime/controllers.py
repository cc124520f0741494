"""Choose how many nano-batches a step is cut into, from how long steps take.

A controller names a count N, hears how long each step with it took, and names the next one. Times
are measured in horizons of several steps, because single steps are noisy. `Aimd` is the rule of the
tLoRA paper, `KeepBest` the default, `Fixed` stays where it is. Every horizon leaves a
`ControllerDecision`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, ClassVar

from tlora_fx.errors import ControllerWrong
from tlora_fx.parallel.nano_batches import COUNTS
from tlora_fx.runtime.launching.early_checks import require_controller

#: Steps with a count before it can be left as hopeless: one alone may be a hiccup.
MIN_STEPS = 2
#: The largest shift that it can take to end a rest.
MAX_ALARM = 0.5


@dataclass(frozen=True, slots=True)
class ControllerDecision:
    """Decision of a controller at the end of a horizon.

    horizon          counted from 1
    count            N of the next horizon
    median_seconds   of the steps of the horizon that ended
    why              in words
    """

    horizon: int
    count: int
    median_seconds: float
    why: str


@dataclass(slots=True, kw_only=True)
class Controller:
    """Names a count of nano-batches and learns from the time of steps, horizon by horizon.

    horizon     steps of a horizon, whose median is compared
    decisions   every horizon's, in order
    """

    name: ClassVar[str]

    horizon: int = 8
    decisions: list[ControllerDecision] = field(default_factory=list, init=False)
    _seconds: list[float] = field(default_factory=list, init=False)

    def next(self) -> int:
        """N of the next step, at least 1."""
        raise NotImplementedError

    def observe(self, step_seconds: float) -> None:
        """Hear how long a step with `next()` nano-batches took; a horizon's last one decides.

        step_seconds   on the slowest rank
        """
        self._seconds.append(step_seconds)
        if len(self._seconds) < self.horizon and not self._is_hopeless():
            return
        took = median(self._seconds)
        self._seconds.clear()
        why = self._judge(took)
        self.decisions.append(ControllerDecision(len(self.decisions) + 1, self.next(), took, why))

    def _is_hopeless(self) -> bool:
        """Whether a horizon need not be waited for."""
        return False

    def _judge(self, took: float) -> str:
        """Learn from a horizon, and say why the next count was chosen."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class Fixed(Controller):
    """Always the same count.

    count     N
    """

    name: ClassVar[str] = "fixed"

    count: int = 1
    horizon: int = 16

    def __post_init__(self) -> None:
        _require(self.count >= 1 and self.horizon >= 1, self)

    def next(self) -> int:
        """N of the next step."""
        return self.count

    def _judge(self, took: float) -> str:
        return "fixed"


@dataclass(slots=True, kw_only=True)
class Aimd(Controller):
    """The paper's rule: N + alpha after a horizon that was faster, else max(1, floor(beta N)).

    Faster means T_t <= T_(t-1) - tau; the first horizon has none before it and counts as faster.
    The rule stays at N = 1 once it is there, until a horizon happens to be faster by tau.

    alpha         added, at least 1
    beta          multiplied, in (0, 1)
    tau_seconds   by how much a horizon must be faster
    source        tLoRA, section 3.3, adaptive nano-batching
    """

    name: ClassVar[str] = "aimd"

    alpha: int = 4
    beta: float = 0.5
    tau_seconds: float = 0.0
    _count: int = field(default=1, init=False)
    _before: float = field(default=float("inf"), init=False)

    def __post_init__(self) -> None:
        _require(self.alpha >= 1 and 0 < self.beta < 1 and self.horizon >= 1, self)

    def next(self) -> int:
        """N of the next step."""
        return self._count

    def _judge(self, took: float) -> str:
        faster, self._before = took <= self._before - self.tau_seconds, took
        if faster:
            self._count += self.alpha
            return f"faster: + {self.alpha}"
        self._count = max(1, int(self.beta * self._count))
        return f"not faster: times {self.beta}"


@dataclass(slots=True, kw_only=True)
class KeepBest(Controller):
    """Hill climbing that keeps the best count seen, and looks again from time to time.

    Beside the best count it tries others of `counts`, `reach` places above and below, nearer ones
    after each round that found nothing, and moves only to one that is faster by `margin`. One whose
    first steps are all slower by `hopeless` is left at once. Then it rests at the best. A rest ends
    early where steps get slower or faster by `shift`, for two horizons in a row. Where looking
    again changed nothing, the next rest is longer, and, where a shift had ended the last one, it
    takes twice the shift to end the next.

    counts    that may be chosen, rising
    settle    steps after each change of count that are not measured
    margin    a fraction of the best count's time
    reach     places of `counts` that the first round goes
    rest      horizons of the first rest
    longest   horizons of the longest rest
    shift     a fraction of the best count's time
    hopeless  likewise
    """

    name: ClassVar[str] = "keep-best"

    counts: Sequence[int] = COUNTS
    settle: int = 1
    margin: float = 0.015
    reach: int = 2
    rest: int = 16
    longest: int = 256
    shift: float = 0.12
    hopeless: float = 0.15
    _best: int = field(default=0, init=False)
    _best_seconds: float = field(default=float("inf"), init=False)
    _now: int = field(default=0, init=False)
    _to_try: list[int] = field(default_factory=list, init=False)
    _step: int = field(default=0, init=False)
    _resting: int = field(default=0, init=False)
    _rest: int = field(default=0, init=False)
    _moved: bool = field(default=False, init=False)
    _shifted: bool = field(default=False, init=False)
    _alarm: float = field(default=0.0, init=False)
    _unmeasured: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        rising = list(self.counts) == sorted(set(self.counts)) and bool(self.counts)
        _require(rising and self.counts[0] >= 1 and min(self.horizon, self.reach) >= 1, self)
        _require(0 <= self.margin < 1 and self.settle >= 0 and 1 <= self.rest <= self.longest, self)
        self._step, self._rest, self._unmeasured = self.reach, self.rest, self.settle
        self._alarm = self.shift

    def next(self) -> int:
        """N of the next step."""
        return self.counts[self._now]

    def observe(self, step_seconds: float) -> None:
        """Count a step, unless it is one of the first after a change of count."""
        if self._unmeasured:
            self._unmeasured -= 1
            return
        before = self._now
        Controller.observe(self, step_seconds)
        if self._now != before:
            self._unmeasured = self.settle

    def _is_hopeless(self) -> bool:
        """Whether every step so far with another count was much slower than the best one."""
        if self._now == self._best or len(self._seconds) < MIN_STEPS:
            return False
        return min(self._seconds) > self._best_seconds * (1 + self.hopeless)

    def _judge(self, took: float) -> str:
        if self._resting:
            return self._rest_on(took)
        if self._now == self._best:
            self._best_seconds = took
            return self._try_next("measured the best count")
        tried = self.counts[self._now]
        if took < self._best_seconds * (1 - self.margin):
            away = 1 if self._now > self._best else -1
            self._best, self._best_seconds, self._moved = self._now, took, True
            # On in the same direction; the other one was just left.
            self._to_try = self._places(away * self._step)
            return self._try_next(f"{tried} is the best so far")
        return self._try_next(f"{tried} is no faster than {self.counts[self._best]}")

    def _try_next(self, why: str) -> str:
        """Go to the next count that is worth a try, or rest at the best."""
        while not self._to_try and self._step:
            self._to_try = self._places(self._step) + self._places(-self._step)
            self._step //= 2
        if self._to_try:
            self._now = self._to_try.pop(0)
            return f"{why}; trying {self.counts[self._now]}"
        self._now = self._best
        self._rest = self.rest if self._moved else min(2 * self._rest, self.longest)
        self._alarm = self.shift if self._moved else self._alarm
        self._resting = self._rest
        return f"{why}; resting at {self.counts[self._best]}"

    def _rest_on(self, took: float) -> str:
        """A horizon of a rest at the best count."""
        changed = abs(took - self._best_seconds) > self._alarm * self._best_seconds
        again, self._shifted = changed and self._shifted, changed
        self._resting -= 1
        if changed and not again:
            # What may be a hiccup is nothing to compare with.
            self._resting = max(1, self._resting)
        if not again and self._resting:
            return "steps took another time once" if changed else "resting"
        self._resting, self._moved, self._shifted = 0, False, False
        self._step = self.reach
        if again:
            self._rest, self._alarm = self.rest, min(2 * self._alarm, max(MAX_ALARM, self.shift))
        self._best_seconds = took
        return self._try_next("steps take another time" if again else "looking again")

    def _places(self, away: int) -> list[int]:
        place = self._best + away
        return [place] if 0 <= place < len(self.counts) else []


CONTROLLERS: dict[str, type[Controller]] = {kind.name: kind for kind in (KeepBest, Aimd, Fixed)}


def find_controller(name: str, **options: Any) -> Controller:
    """A controller by its name.

    options   fields of its class
    raises    ControllerWrong for a name that nobody has, and for options that it does not take
    """
    require_controller(name)
    try:
        return CONTROLLERS[name](**options)
    except TypeError as error:
        raise ControllerWrong(
            f"controller '{name}' does not take these options",
            found=error,
            help="its options are the fields of its class in tlora_fx/runtime/controllers.py",
        ) from None


class NanoBatches:
    """The count of nano-batches of each round, for a trainer.

    Only the leading rank decides; the count that it names travels with the next round's tables.

    controller   that decides
    counts       that can run, rising and beginning with 1; a controller's count that is not among
                 them becomes the next smaller one
    """

    def __init__(self, controller: Controller, counts: Sequence[int] = COUNTS) -> None:
        self.controller = controller
        self.counts = tuple(counts)
        _require(bool(counts) and counts[0] == 1 and list(counts) == sorted(set(counts)), counts)
        self._told = 0
        self._tokens = 0

    @property
    def count(self) -> int:
        """N of the next round."""
        wanted = max(1, self.controller.next())
        return max(count for count in self.counts if count <= wanted)

    def decide(self, max_seconds: float, tokens: int | None = None) -> int:
        """N of the next round, by the time that this round took.

        max_seconds   of the slowest rank
        tokens        of the round; given, times are compared a token, and told for as many tokens
                      as the first round had
        """
        if tokens:
            self._tokens = self._tokens or tokens
            max_seconds *= self._tokens / tokens
        self.controller.observe(max_seconds)
        return self.count

    def records(self) -> list[dict[str, Any]]:
        """The decisions since the last call, each a line of decisions.jsonl."""
        fresh = self.controller.decisions[self._told :]
        self._told += len(fresh)
        return [{"controller": self.controller.name, **asdict(decision)} for decision in fresh]


def _require(holds: bool, found: object) -> None:
    if not holds:
        raise ControllerWrong(
            "a controller cannot work with these numbers",
            found=found,
            expected="counts from 1 that rise, horizons of at least one step, fractions below 1",
            help="leave an option out to get its default",
        )
