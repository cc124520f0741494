"""What `train` can refuse before torch is imported: names, files, meshes.

All of it is checked again where it is used. Here it is told within a second, not after the seconds
that importing torch, and reading and compiling, take.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from tlora_fx.config.job import Job
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import ControllerWrong, PlanFileError, RunFolderError, UnknownPlanner, nearest
from tlora_fx.runtime.rows import require_files
from tlora_fx.runtime.run_folder import RunFolder

#: What the modules of planners and controllers define, which cannot be imported without torch.
PLANNERS = ("auto", "fsdp", "galvatron", "pipeline", "replicated", "single", "tensor")
CONTROLLERS = ("keep-best", "aimd", "fixed")


def require_planner(name: str) -> None:
    """Refuse a plan's name that nobody has, and a file that holds no plan.

    raises    UnknownPlanner, PlanFileError
    """
    path = Path(name)
    if path.suffix == ".json" and not path.exists():
        raise PlanFileError(
            "there is no such plan",
            file=name,
            help="name a file that is there, or write one with `tlora-fx plan -o`",
        )
    if path.is_file():
        Plan.load(path)
        return
    offered = {entry.name for entry in entry_points(group="tlora_fx.planners")}
    known = sorted({*PLANNERS, *offered})
    if name not in known:
        raise UnknownPlanner(
            f"there is no planner '{name}'",
            nearest=nearest(name, known),
            help="known planners: " + ", ".join(known),
        )


def require_controller(name: str | None) -> None:
    """Refuse a controller's name that nobody has; raises ControllerWrong."""
    if name is None or name in CONTROLLERS:
        return
    near = nearest(name, CONTROLLERS)
    raise ControllerWrong(
        f"no controller is called '{name}'",
        expected=", ".join(CONTROLLERS),
        help=f"did you mean '{near}'?" if near else "'keep-best' is the default",
    )


def require_mesh(text: str | None) -> None:
    """Refuse what is no mesh."""
    if text is not None:
        MeshShape.parse(text)


def require_job_folders(jobs: Sequence[Job], output: Path) -> None:
    """Refuse names that the run needs itself, and names that one folder would have on some systems.

    raises    RunFolderError
    """
    folder = RunFolder(output)
    first: dict[str, str] = {}
    for job in jobs:
        folder.job(job.name)
        other = first.setdefault(job.name.lower(), job.name)
        if other != job.name:
            raise RunFolderError(
                "two jobs' names differ in upper and lower case alone",
                found=f"{other}, {job.name}",
                help="rename one of them: some file systems have one folder for both",
            )


def require_data(jobs: Sequence[Job]) -> None:
    """Refuse jobs whose data files are not there, or of a type that is not read.

    raises    DataFileError
    """
    for job in jobs:
        require_files(job)
