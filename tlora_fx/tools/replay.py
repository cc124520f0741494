"""What `replay.json` says."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tlora_fx.durable import replace_file
from tlora_fx.errors import ReplayNotReadable
from tlora_fx.pipeline import Verify
from tlora_fx.version import __version__

FORMAT = 1
RECORD = "replay.json"
GRAPHS = "graph"
BUFFERS = "buffers.safetensors"
PACKAGES = ("torch", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class ForeignPass:
    """A pass of another package.

    module     where its class is defined
    package    the distribution and its version, "" where it is not known
    """

    name: str
    module: str
    package: str


@dataclass(frozen=True, slots=True)
class Replay:
    """A pass that failed.

    pipeline    the whole pipeline as text
    place       of the pass in it, counted from 1
    name        of the pass
    subject     the graphs that it ran on: "base", "job NAME" or "group"
    verify      the checks that ran after each pass
    code        of the error
    versions    of tlora-fx, Python and what traced
    foreign     passes of the pipeline that are not ours
    numerics    options of the numerical check: rows, seed, memory
    format      of the folder
    """

    pipeline: str
    place: int
    name: str
    subject: str
    verify: Verify
    code: str
    versions: dict[str, str]
    foreign: tuple[ForeignPass, ...]
    numerics: dict[str, int | None]
    format: int = FORMAT

    def __str__(self) -> str:
        return f"pass {self.place} '{self.name}' on {self.subject}"

    def other_versions(self) -> list[str]:
        """What is installed in another version than when the pass failed."""
        now = versions()
        return [
            f"{name} is {now.get(name, 'missing')}, was {was}"
            for name, was in self.versions.items()
            if now.get(name) != was
        ]

    def save(self, folder: Path) -> None:
        """Write the record; raises OSError."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        replace_file(folder / RECORD, text.encode())


def load_replay(folder: Path) -> Replay:
    """Read the record of a replay folder.

    raises    ReplayNotReadable
    """
    path = folder / RECORD
    if not path.is_file():
        raise ReplayNotReadable(
            "the folder is no replay folder",
            expected=path,
            help="name the folder that the error's last line names",
        )
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        found = data.get("format") if isinstance(data, dict) else None
        if found != FORMAT:
            raise ReplayNotReadable(
                "the replay folder is of another format",
                file=path,
                expected=FORMAT,
                found=found,
                help="replay it with the version that wrote it",
            )
        return TypeAdapter(Replay).validate_python(data)
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        raise ReplayNotReadable(
            "the replay folder cannot be read",
            file=path,
            found=error,
            help="the file is damaged; compile again to write it anew",
        ) from error


def versions() -> dict[str, str]:
    """The versions on which a failure may depend."""
    found = {"tlora-fx": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
