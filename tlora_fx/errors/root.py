"""The root of all errors, and the nearest right name."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

#: What a terminal obeys instead of showing it: controls but tabs and ends of lines, other ends of
#: lines, what turns the direction of writing, and halves of characters.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

#: Our package.
_OURS = __name__.partition(".")[0]


def printable(text: str) -> str:
    """Text of strangers, as a terminal can show it: what it would obey is spelled out."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class TloraError(Exception):
    """The root of all errors that tlora-fx raises on purpose.

    code      of the class, given as `class Mistake(TloraError, code="T0101")`
    shared    every process of a run raises it at the same place: it is enough that one tells
    """

    code: ClassVar[str] = "T0000"
    shared: ClassVar[bool] = False

    def __init_subclass__(cls, code: str = "", shared: bool = False) -> None:
        """Set what the class's header gives; a class that gives nothing is as its parent."""
        if code:
            cls.code = code
        cls.shared = cls.shared or shared

    def __init__(self, what: str, *, help: str = "", **facts: object) -> None:
        """Make an error.

        what    one line: the mistake
        help    one line: what to do
        facts   what is printed between, in order, such as file=, job=, expected=, found=
        """
        self.what = what
        self.help = help
        self.facts = {name: str(value) for name, value in facts.items() if value is not None}
        super().__init__(self.render())

    def __reduce__(self) -> tuple[Callable[..., TloraError], tuple[object, ...], dict[str, object]]:
        """What another process makes of it: the same error, with its notes."""
        return _again, (type(self), self.what, self.help, self.facts), self.__dict__

    def render(self) -> str:
        """The whole error as text of several lines."""
        rows = dict(self.facts)
        if self.help:
            rows["help"] = self.help
        width = max((len(name) for name in rows), default=0)
        lines = [f"error[{self.code}] {self.what}"]
        for name, value in rows.items():
            # Before lines are parted: a carriage return parts none.
            first, *rest = printable(value).splitlines() or [""]
            lines.append(f"  {name:<{width}}  {first}")
            lines.extend(f"  {'':<{width}}  {line}" for line in rest)
        return printable("\n".join(lines))

    def with_notes(self) -> str:
        """The text, and below it the notes that were added."""
        return "\n  ".join([str(self), *getattr(self, "__notes__", ())])


@contextmanager
def errors_as(
    kind: type[TloraError],
    what: str,
    *caught: type[Exception],
    named: bool = False,
    help: str = "",
    **facts: object,
) -> Iterator[None]:
    """Inside, an error of others is raised as one of ours, with its text in `found`.

    caught   kinds of errors; by default OSError
    named    the name of its class stands before its text
    """
    kinds = caught or (OSError,)
    try:
        yield
    except kinds as error:
        found = f"{type(error).__name__}: {error}" if named else error
        raise kind(what, help=help, **facts, found=found) from error


def _again(kind: type[TloraError], what: str, help: str, facts: Mapping[str, str]) -> TloraError:
    return kind(what, help=help, **facts)


def nearest(name: str, choices: Iterable[str], likeness: float = 0.5) -> str | None:
    """The choice that a user who wrote `name` most likely meant, or None.

    One that differs in upper and lower case alone comes first.

    likeness    how much the choice must be like the name at least, from 0 to 1, as difflib measures
    """
    choices = list(choices)
    same = [choice for choice in choices if choice.casefold() == name.casefold()]
    found = same or difflib.get_close_matches(name, choices, n=1, cutoff=likeness)
    return found[0] if found else None


def did_you_mean(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Help for a wrong name: the choice that was most likely meant, else another text."""
    near = nearest(name, choices)
    return f"did you mean '{near}'?" if near else otherwise


def first_of(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first of some names, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def failed_at(error: BaseException) -> str | None:
    """The line of a plug-in at which an error came: "plan.py:7  x = y / 0".

    The plug-in is the first package that is called and is not tlora-fx. Its last line counts,
    however deep the libraries that it calls fail; where there is no plug-in, the last line of all.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    plugin = next((package for package in packages if package != _OURS), _OURS)
    own = [each for each, package in zip(frames, packages, strict=True) if package == plugin]
    for line in traceback.StackSummary.extract(iter(own[-1:])):
        return f"{Path(line.filename).name}:{line.lineno}  {line.line}"
    return None
