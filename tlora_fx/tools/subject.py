"""Subject of an inspection: the folder of a dump, or a job file, which is compiled for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tlora_fx.errors import StateNotFound, nearest
from tlora_fx.inspect.schema import STAGES_FOLDER, Listing, PassStage, Program, read_text

if TYPE_CHECKING:
    from tlora_fx.ir.graph import GroupGraph, JobGraph
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.pipeline import Pipeline

GRAPH_FILE = ".tfx"
JOB_FILES = (".yaml", ".yml")
SOURCE_FILE = "ssm.py"


class Subject:
    """A compiled model in the folder of a dump, read as far as a view asks for it. Needs no torch.

    path      of the folder, or of its ssm.json; every property raises DumpNotReadable
    bare      whether there are graphs alone, without a listing
    compiles  whether the first look at it takes a compilation
    """

    bare: ClassVar[bool] = False
    compiles: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        self.name, self.path = str(path), path
        self.folder = path if path.is_dir() else path.parent

    @cached_property
    def listing(self) -> Listing:
        """Listing with a row for each module."""
        return Listing.load(self.path)

    @cached_property
    def program(self) -> Program:
        """Program with an entry for each node."""
        if not (self.folder / Program.FILE).exists():
            Listing.load(self.path)  # which says what is wrong with the folder
        return Program.load(self.folder / Program.FILE)

    @property
    def compared(self) -> Program:
        """Program with all that a difference shows."""
        return self.program

    @cached_property
    def stages(self) -> list[PassStage]:
        """State after every pass, in order; empty where none was recorded."""
        files = sorted((self.folder / STAGES_FOLDER).glob("[0-9]*.json"))
        if not files:
            Listing.load(self.path)  # which says what is wrong with the folder
        return [PassStage.load(file) for file in files]

    @cached_property
    def source(self) -> str:
        """The text of ssm.py."""
        return read_text(self.folder / SOURCE_FILE, "the code of the compiled model is not here")

    def all_stages(self) -> list[PassStage]:
        """State after every pass, or the compiled model alone where none was recorded."""
        return self.stages or [PassStage(0, self.program.state, False, 0.0, self.program)]

    def state(self, name: str) -> Program:
        """State after a pass, by its name, its text or its index in the pipeline; "trace" too.

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


class CompiledSubject(Subject):
    """A job file, compiled on first use with the passes that `pipeline` makes; None: default."""

    compiles: ClassVar[bool] = True

    def __init__(
        self,
        path: Path,
        pipeline: Callable[[], Pipeline] | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(path)
        self.pipeline = pipeline
        self.trust_remote_code = trust_remote_code

    @cached_property
    def _compiled(self) -> tuple[SuperModel, Listing, list[PassStage]]:
        from tlora_fx.config.job_file import load_job_file

        # The file is read before torch is imported: a mistake in it is told at once.
        jobs = load_job_file(self.path, trust_remote_code=self.trust_remote_code)

        from tlora_fx.compiler import compile
        from tlora_fx.inspect.listing import make_listing
        from tlora_fx.inspect.program import Recorder

        recorder = Recorder()
        passes = self.pipeline() if self.pipeline is not None else None
        model = compile(jobs, passes, instruments=[recorder])
        listing = make_listing(model)
        return model, listing, [stage.of_base(listing.base.title) for stage in recorder.stages]

    @cached_property
    def listing(self) -> Listing:
        """Listing of the compiled model."""
        return self._compiled[1]

    @cached_property
    def program(self) -> Program:
        """Program after the last pass."""
        return self.stages[-1].program

    @cached_property
    def stages(self) -> list[PassStage]:
        """States that were recorded while compiling."""
        return self._compiled[2]

    @cached_property
    def source(self) -> str:
        """Source of the model as it would train."""
        return self._compiled[0].source


class GraphSubject(Subject):
    """Graphs of a graph file: a state of them, without a listing of modules."""

    bare = True

    @cached_property
    def graphs(self) -> JobGraph | GroupGraph:
        """Graphs in the file; raises GraphFileNotReadable."""
        from tlora_fx.graph_file import load_graphs

        return load_graphs(self.path)

    @cached_property
    def program(self) -> Program:
        """Program with an entry for each node, without joint graphs: passes need not be known."""
        return self._program(joint=False)

    @property
    def compared(self) -> Program:
        """Program with joint graphs; raises PipelineError where their passes are not known."""
        return self._program(joint=True)

    def _program(self, *, joint: bool) -> Program:
        from tlora_fx.inspect.program import make_program
        from tlora_fx.ir.graph import TRACE
        from tlora_fx.pipeline.facts import held_facts

        held = held_facts(self.graphs)
        passes = [fact for fact, by in held.items() if by.partition("{")[0] == fact]
        return make_program(self.graphs, passes[-1] if passes else TRACE, joint=joint)

    @cached_property
    def stages(self) -> list[PassStage]:
        """The one state that the file holds."""
        return [PassStage(0, self.program.state, False, 0.0, self.program)]

    @cached_property
    def source(self) -> str:
        """The code of all graphs."""
        from tlora_fx.inspect.instruments import state_source

        return state_source(self.graphs)


def subject_of(
    path: Path,
    pipeline: Callable[[], Pipeline] | None = None,
    *,
    trust_remote_code: bool = False,
) -> Subject:
    """A job file or a graph file by its suffix, else a dump; raises DumpNotReadable for neither."""
    if path.suffix == GRAPH_FILE and path.is_file():
        return GraphSubject(path)
    if path.suffix in JOB_FILES:
        return CompiledSubject(path, pipeline, trust_remote_code=trust_remote_code)
    return Subject(path)
