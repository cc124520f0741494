"""What is inspected: the folder of a dump, or a job file, which is compiled for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tlora_fx.errors import StateNotFound, nearest
from tlora_fx.inspect.schema import (
    PROGRAM_FILE,
    STAGES_FOLDER,
    Listing,
    PassStage,
    Program,
    load_listing,
    load_program,
    load_stages,
    read_text,
)

if TYPE_CHECKING:
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.pipeline import Pipeline

JOB_FILES = (".yaml", ".yml")
SOURCE_FILE = "ssm.py"


class Subject(ABC):
    """A compiled model, read as far as a view asks for it.

    name      as the user gave it
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def listing(self) -> Listing:
        """A row a module."""

    @property
    @abstractmethod
    def program(self) -> Program:
        """An entry a node."""

    @property
    @abstractmethod
    def stages(self) -> list[PassStage]:
        """What every pass left; empty where nobody wrote it down."""

    @property
    @abstractmethod
    def source(self) -> str:
        """The text of ssm.py."""

    def all_stages(self) -> list[PassStage]:
        """What every pass left, or the compiled model alone where nobody wrote that down."""
        return self.stages or [PassStage(0, self.program.state, False, 0.0, self.program)]

    def state(self, name: str) -> Program:
        """What a pass left, by its name, its text or its place in the pipeline; "trace" too.

        raises    StateNotFound
        """
        for stage in reversed(self.stages):
            if name in (stage.program.state, stage.text, str(stage.place)):
                return stage.program
        known = [stage.program.state for stage in self.stages]
        raise StateNotFound(
            "nobody wrote down what this pass left" if not known else "no such pass ran",
            model=self.name,
            found=name,
            nearest=nearest(name, known),
            help="known: " + ", ".join(known)
            if known
            else f"compile with --states, which writes {STAGES_FOLDER}/, or inspect the job file",
        )


class Dump(Subject):
    """The folder of a dump, or its ssm.json. Needs no torch."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        self.folder = path if path.is_dir() else path.parent

    @cached_property
    def listing(self) -> Listing:
        """From ssm.json."""
        return load_listing(self.path)

    @cached_property
    def program(self) -> Program:
        """From program.json."""
        if not (self.folder / PROGRAM_FILE).exists():
            load_listing(self.path)  # which says what is wrong with the folder
        return load_program(self.folder)

    @cached_property
    def stages(self) -> list[PassStage]:
        """From passes/."""
        stages = load_stages(self.folder)
        if not stages:
            load_listing(self.path)  # which says what is wrong with the folder
        return stages

    @cached_property
    def source(self) -> str:
        """From ssm.py."""
        return read_text(self.folder / SOURCE_FILE, "the code of the compiled model is not here")


class Compiled(Subject):
    """A job file, compiled on first use."""

    def __init__(self, path: Path, pipeline: Callable[[], Pipeline] | None = None) -> None:
        """Name a job file; pipeline makes the passes, None stands for the default."""
        super().__init__(str(path))
        self.path, self.pipeline = path, pipeline

    @cached_property
    def _compiled(self) -> tuple[SuperModel, Listing, list[PassStage]]:
        from tlora_fx.compiler import compile
        from tlora_fx.config.job_file import load_job_file
        from tlora_fx.inspect.listing import make_listing
        from tlora_fx.inspect.program import Recorder

        recorder = Recorder()
        passes = self.pipeline() if self.pipeline is not None else None
        model = compile(load_job_file(self.path), passes, instruments=[recorder])
        listing = make_listing(model)
        return model, listing, [stage.of_base(listing.base.title) for stage in recorder.stages]

    @property
    def listing(self) -> Listing:
        """Of the compiled model."""
        return self._compiled[1]

    @property
    def program(self) -> Program:
        """What the last pass left."""
        return self.stages[-1].program

    @property
    def stages(self) -> list[PassStage]:
        """As recorded while compiling."""
        return self._compiled[2]

    @property
    def source(self) -> str:
        """As it would train."""
        return self._compiled[0].source


def subject_of(path: Path, pipeline: Callable[[], Pipeline] | None = None) -> Subject:
    """A job file by its suffix, else a dump.

    pipeline    for job files
    raises      DumpNotReadable for what does not exist
    """
    if path.suffix in JOB_FILES:
        return Compiled(path, pipeline)
    return Dump(path)
