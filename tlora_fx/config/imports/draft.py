"""A job file that is being made of another tool's config file, key by key.

Each key of the file ends in the job, in the list of what was left out, or in a mistake. None is
dropped in silence: `Draft.finish` sees to it.
"""

from __future__ import annotations

import os
import re
import reprlib
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlora_fx.config.base_spec import is_written_as_path
from tlora_fx.config.job_file import (
    BYTES_LIMIT,
    DATA_SUFFIXES,
    mistakes_of_text,
    yaml_text,
)
from tlora_fx.config.paths import is_there, with_home
from tlora_fx.config.sweep import KeyPath
from tlora_fx.errors import ImportRefused, nearest

UNKNOWN = "this version of tlora-fx does not know the key"
NO_VALUE = "it has no value"
OFF = "it says what a job does anyway"
NO_NUMBER = "it changes no number of the training"

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
#: Keys whose values are nobody's business; those of `env` may be of the same kind.
_SECRET = re.compile(
    r"hub_token|auth_token|api_?key|secret|passw|webhook|credential", re.IGNORECASE
)
#: Longest text of one mistake, in characters.
_LONGEST = 300
#: Longest line of the comment over a job file.
_WIDTH = 96
_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A key that stands in no job, or that says something else there.

    key      of the config file; in lists and nested mappings `datasets.0.type`
    value    its value; None of what may be a password or a token of a service
    why      why, or what says the same instead
    changes  whether the job trains otherwise than the other tool for it
    """

    key: str
    value: Any
    why: str
    changes: bool


@dataclass(frozen=True, slots=True)
class Imported:
    """A job file made of another tool's config file.

    tool      the tool's name
    source    the config file
    document  contents of the job file
    carried   by key of the config file, the key of the job file
    left      the other keys, and keys whose meaning is not wholly the same
    """

    tool: str
    source: Path
    document: Mapping[str, Any]
    carried: Mapping[str, str]
    left: tuple[LeftOut, ...]

    @property
    def changes(self) -> tuple[LeftOut, ...]:
        """Differences that make the job train otherwise than the other tool would."""
        return tuple(item for item in self.left if item.changes)

    def text(self) -> str:
        """The job file, under a comment that lists what was left out."""
        title = f"Made by tlora-fx import of {self.source.name}, a config file of {self.tool}."
        head = "".join(f"# {line}\n" for line in (_one_line(title), *self.lines(_WIDTH)))
        return f"{head}{yaml_text(dict(self.document))}"

    def lines(self, width: int) -> list[str]:
        """Options that were left out, by reason, in lines of at most this many characters."""
        same = [item for item in self.left if not item.changes]
        lines: list[str] = []
        for title, items in (
            ("Not carried over, or not in the same sense; the job trains otherwise:", self.changes),
            ("Not carried over; the job trains the same without it:", same),
        ):
            if items:
                lines.append(title)
            for text in _by_reason(items):
                shown = _one_line(text)
                lines += textwrap.wrap(
                    shown, width, initial_indent="  ", subsequent_indent="    ",
                    break_on_hyphens=False,
                )  # fmt: skip
        return lines


def _by_reason(items: Iterable[LeftOut]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for item in items:
        value = str(item.value).lower() if isinstance(item.value, bool) else _SHORT.repr(item.value)
        shown = item.key if item.value is None else f"{item.key}: {value}"
        reasons.setdefault(item.why, []).append(shown)
    return [f"{', '.join(shown)} ({why})" for why, shown in reasons.items()]


def _one_line(text: str) -> str:
    """Text in one line of YAML's characters."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


@dataclass(slots=True)
class Draft:
    """A job file in the making.

    tool    the tool's name
    source  its config file
    target  where the job file will stand
    rest    keys of the config file that nobody has taken yet
    """

    tool: str
    source: Path
    target: Path
    rest: dict[str, Any]
    base: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    left: list[LeftOut] = field(default_factory=list)
    mistakes: dict[str, str] = field(default_factory=dict)
    _origins: dict[KeyPath, str] = field(default_factory=dict)
    _keys: frozenset[str] = frozenset()
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Remember the keys that have to be told of."""
        self._keys = frozenset(self.rest)

    def take(self, key: str) -> Any:
        """The value of a key, which is not looked at again; None where there is none."""
        is_there = key in self.rest
        value = self.rest.pop(key, None)
        if value is None and is_there:
            self.leave(key, None, NO_VALUE)
        return value

    def has(self, key: str) -> bool:
        """Whether a key that nobody has taken has a value."""
        return self.rest.get(key) is not None

    def put(self, key: str, where: str, value: Any) -> None:
        """Carry a value to a key of a job, such as `lora.r`, or of the base, as `base.dtype`."""
        self._told |= {key, key.partition(".")[0]}
        self.carried[key] = where
        path = where.split(".")
        self._origins[tuple(path)] = key
        at: dict[str, Any] = {"base": self.base} if path[0] == "base" else self.job
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = value

    def move(self, key: str, where: str) -> Any:
        """Carry a key's value as it is, if it has one."""
        if (value := self.take(key)) is not None:
            self.put(key, where, value)
        return value

    def move_flag(self, key: str, where: str) -> None:
        """Carry a key that is true or false."""
        if (value := self.take(key)) is not None:
            self.put(key, where, truth(value))

    def note(self, key: str, where: str) -> None:
        """Say that a key is carried by a part of what stands at a key of a job already."""
        self._told.add(key)
        self.carried[key] = where

    def leave(self, key: str, value: Any, why: str, *, changes: bool = False) -> None:
        """List a key as left out."""
        self._told |= {key, key.partition(".")[0]}
        shown = None if key == "env" or _SECRET.search(f"{key} {_keys_in(value)}") else value
        self.left.append(LeftOut(key, shown, why, changes))

    def leave_key(self, key: str, why: str, *, changes: bool = False) -> None:
        """List a key as left out, if it has a value; one that is off changes nothing."""
        value = self.take(key)
        if value is not None:
            is_on = value not in (False, 0, "", "none", [], {}) and truth(value) is not False
            self.leave(key, value, why if is_on else OFF, changes=changes and is_on)

    def leave_known(
        self, changes: Mapping[str, str], idle: Collection[str], prefixes: tuple[str, ...]
    ) -> None:
        """List keys whose effect is known: what they change, each with why, or no number."""
        for key, why in changes.items():
            self.leave_key(key, why, changes=True)
        for key in list(self.rest):
            if key in idle or key.startswith(prefixes):
                self.leave_key(key, NO_NUMBER)

    def is_left(self, key: str) -> bool:
        """Whether a key is listed as left out."""
        return any(item.key == key for item in self.left)

    def refuse(self, key: str, why: str) -> None:
        """List a key as a mistake: no job file can be made."""
        self._told |= {key, key.partition(".")[0]}
        self.mistakes.setdefault(key, why if len(why) <= _LONGEST else f"{why[:_LONGEST]} ...")

    def path(self, value: Any) -> Any:
        """A path of the config file as seen from the job file; a hub id as it is.

        The other tools look from the folder in which they are started.
        """
        if not isinstance(value, str) or not value or "\0" in value:
            return value
        written = with_home(value)
        folders = (Path.cwd(), self.source.absolute().parent)
        there = next((folder / written for folder in folders if is_there(folder / written)), None)
        if there is None and not is_written_as_path(value) and not value.endswith(DATA_SUFFIXES):
            return value
        if written.is_absolute():
            return str(written)
        seen = os.path.relpath(there or Path.cwd() / written, self.target.absolute().parent)
        return seen if is_written_as_path(seen) else f"./{seen}"

    def name(self, *wanted: Any) -> None:
        """Name the job by the first of these texts that a name can be made of."""
        for text in (*wanted, self.source.stem, "job"):
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", text if isinstance(text, str) else "")
            name = re.sub(r"\.\.+", ".", name).strip("-._")[:100].rstrip("-.")
            if name:
                self.job = {"name": name, **self.job}
                return

    def finish(self) -> Imported:
        """The job file.

        raises  ImportRefused, with all mistakes
        """
        for key, value in self.rest.items():
            if value is None:
                self.leave(key, None, NO_VALUE)
                continue
            near = nearest(key, [*self.carried, *(item.key for item in self.left)], 0.85)
            self.leave(key, value, UNKNOWN + (f"; like {near}" if near else ""), changes=True)
        self.rest = {}
        lost = self._keys - self._told
        assert not lost, f"keys that nobody took: {sorted(lost)}"
        document = {"base": self.base, "jobs": [self.job]}
        made = Imported(self.tool, self.source, document, self.carried, tuple(self.left))
        if len(made.text().encode()) > BYTES_LIMIT:
            self.mistakes["the file"] = f"the job file would have more than {BYTES_LIMIT} bytes"
        if not self.mistakes:
            for at, mistake in mistakes_of_text(made.text(), self.target):
                self.mistakes.setdefault(self._origin(at, mistake.loc), mistake.line())
        if self.mistakes:
            raise refused(self.source, self.mistakes)
        return made

    def _origin(self, at: KeyPath, loc: KeyPath) -> str:
        """The key of the config file that led to a place of the job file."""
        inside = at[2:] if at[:1] == ("jobs",) else at
        for path in (inside, loc):
            for end in range(len(path), 0, -1):
                if path[:end] in self._origins:
                    return self._origins[path[:end]]
        return ".".join(map(str, loc or inside)) or "the file"


def refused(source: Path, mistakes: Mapping[str, str]) -> ImportRefused:
    """The error for a config file, with what is wrong by key."""
    if len(mistakes) == 1:
        [(key, why)] = mistakes.items()
        return ImportRefused(f"no job file can be made: {key}: {why}", file=source)
    rows = {f"{number}": f"{key}: {why}" for number, (key, why) in enumerate(mistakes.items(), 1)}
    return ImportRefused("no job file can be made", file=source, **rows)


def _keys_in(value: Any) -> str:
    """The keys of nested mappings."""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_keys_in(inner)}" for key, inner in value.items())
    return " ".join(map(_keys_in, value)) if isinstance(value, list) else ""


def truth(value: Any) -> Any:
    """A value that the other tools read as true or false, as that; others as they are."""
    return _WORDS.get(value.lower(), value) if isinstance(value, str) else value


def names(value: Any) -> Any:
    """A list of names, which may be written as one text with commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value
