"""The hunt: first the pass, then the rewrite inside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, log2
from pathlib import Path

from tlora_fx.bisect.folder import write_state
from tlora_fx.bisect.search import Bracket, Verdict, first_bad
from tlora_fx.bisect.states import State, States
from tlora_fx.bisect.touched import lines, touched
from tlora_fx.errors import BisectFails, NotFoldable, TloraError
from tlora_fx.inspect.wording import plural
from tlora_fx.tools.bisect import Check, Judged

WORDS = {"good": "good", "bad": "BAD", "skip": "cannot tell"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a hunt found.

    lines      for people
    place      of the pass that breaks the check, counted from 1; 0 where none could be named
    name       of that pass
    rewrite    its rewrite that does, "" where none could be named
    runs       of the check until the pass was named, and all in all
    """

    lines: tuple[str, ...]
    place: int = 0
    name: str = ""
    rewrite: str = ""
    runs: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Hunt:
    """One bisection.

    states     of the compilation
    retrace    traces anew, so that a pass may leave all as it is: for rewrites held back
    check      judges states
    folder     for the states that the check looks at
    base       as the job file names it
    say        told each run, and what the check printed
    """

    states: States
    retrace: Callable[[int], States]
    check: Check
    folder: Path
    base: str
    say: Callable[[str, str], None]
    runs: int = 0
    _kept: dict[int, State] = field(default_factory=dict)

    def find(self) -> Finding:
        """Name the pass and the rewrite.

        raises    BisectFails where the check cannot be run, or changes its mind
        """
        self.check.begin(self.states.start)
        passes = len(self.states.pipeline.passes)
        most = ceil(log2(passes + 2)) + 1
        self.say(
            f"{plural(passes, 'pass')}: at most {plural(most, 'run')} of the check until the pass "
            "is named, if it can judge every state",
            "",
        )
        found = first_bad(passes + 1, self._judge_pass)
        if not found.sure or found.bad in (0, passes + 1):
            return Finding(tuple(_unnamed(found, self._names())), runs=(self.runs, self.runs))
        self._demand_steady(found)
        place, named = found.bad, self.runs
        told = f"pass {place} '{self._names()[place]}' breaks the check"
        rewrite, more = self._find_rewrite(place)
        return Finding((told, *more), place, self._names()[place], rewrite, (named, self.runs))

    def _names(self) -> list[str]:
        """The name of the last pass of each state."""
        return ["trace", *(item.name for item in self.states.pipeline.passes)]

    def _judge_pass(self, place: int) -> Verdict:
        state = self.states.after(place)
        self._kept[place] = state
        return self._judge(state, f"after {place} {self._names()[place]}", f"{place:02}")

    def _judge(self, state: State, title: str, number: str) -> Verdict:
        self.runs += 1
        judged = self._verdict(state, number)
        told = f" ({judged.told})" if judged.told else ""
        self.say(f"run {self.runs:<3} {title:<40} {WORDS[judged.verdict]}{told}", judged.output)
        return judged.verdict

    def _verdict(self, state: State, number: str) -> Judged:
        name = self._names()[state.place]
        folder = self.folder / f"{number}-{name}"
        if self.check.needs_folder:
            write_state(state, folder, name, self.base)
        return self.check.judge(state, folder)

    def _demand_steady(self, found: Bracket) -> None:
        """The check fails again on the state that it failed on."""
        state, name = self._kept[found.bad], self._names()[found.bad]
        if self._judge(state, f"after {found.bad} {name}, again", f"{found.bad:02}") != "bad":
            raise BisectFails(
                "the check is not steady: the same graphs were bad, and then were not",
                state=f"after pass {found.bad} '{name}'",
                help="seed what is random in the check",
            )

    def _find_rewrite(self, place: int) -> tuple[str, list[str]]:
        """The rewrite, and what there is to say of it."""
        after = self._kept[place]
        if not after.rewrites:
            nodes = touched(self.states.after(place - 1).group, after.group)
            unasked = "it asks for no single rewrites, so all of it is meant"
            return "", [unasked, *lines(nodes)]
        try:
            self.states.after(place, 0)
        except NotFoldable:
            self.states = self.retrace(place)
            self.check.begin(self.states.start)
            after = self.states.after(place)
            if self._judge(after, f"after {place}, traced for holding back", "exact") != "bad":
                return "", ["traced so that rewrites can be held back, the check holds"]
        except TloraError as error:
            return "", [f"its rewrites cannot be held back: {error.what}"]
        total = len(after.rewrites)
        most = plural(ceil(log2(total + 1)), "run")
        self.say(
            f"{plural(total, 'rewrite')} in it: at most {most} more, if every state can be judged",
            "",
        )
        found = first_bad(total + 1, lambda n: self._judge_limit(place, n, total), last_is_bad=True)
        if found.bad == 0:
            held = plural(total, "rewrite")
            return "", [f"with its {held} held back, too: the fault is in the rest"]
        if not found.sure:
            between = after.rewrites[max(found.good, 0) : found.bad]
            return "", ["one of these rewrites, which could not be told apart:", *between[:20]]
        return self._told(place, found, after.rewrites)

    def _told(self, place: int, found: Bracket, rewrites: tuple[str, ...]) -> tuple[str, list[str]]:
        rewrite = rewrites[found.bad - 1]
        before, after = (self.states.after(place, n).group for n in (found.good, found.bad))
        told = f"rewrite {found.bad} of {len(rewrites)}: {rewrite}"
        return rewrite, [told, *lines(touched(before, after))]

    def _judge_limit(self, place: int, limit: int, total: int) -> Verdict:
        title = f"{limit} of {total} rewrites"
        try:
            state = self.states.after(place, limit)
        except TloraError as error:
            self.say(f"        {title:<40} cannot tell ({error.what})", "")
            return "skip"
        return self._judge(state, title, f"{place:02}-{limit:04}")


def _unnamed(found: Bracket, names: list[str]) -> list[str]:
    """What to say where no pass can be named."""
    if found.bad == 0:
        return [
            "the check fails before the first pass: no pass breaks it",
            "is the command right? `-v` shows what it prints, `--keep DIR` what it was given",
        ]
    if found.sure:
        return ["the check never fails: it holds after the last pass"]
    last = "the start" if found.good < 0 else f"pass {found.good} '{names[found.good]}'"
    if found.bad == len(names):
        return [f"no state is bad, and after {last} the check cannot tell"]
    blamed = ", ".join(
        f"{place} '{names[place]}'" for place in range(found.good + 1, found.bad + 1)
    )
    return [f"the check cannot tell apart which of these breaks it: {blamed}"]
