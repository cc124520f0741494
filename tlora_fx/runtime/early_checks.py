"""Checks of commands before torch is imported: names, files, columns, meshes.

All of it is checked again where it is used. Here it is told within a second, not after the seconds
that importing torch, and reading and compiling, take.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from tlora_fx.config.base_files import require_base_config, require_base_files
from tlora_fx.config.base_task import read_base_config, require_task
from tlora_fx.config.hub import hub_cache, is_hub_id, why_offline
from tlora_fx.config.job import Job
from tlora_fx.cost.hardware import find_gpu
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import ROOFLINE, known_profiles, same_gpu
from tlora_fx.errors import (
    BaseNotLoadable,
    ControllerWrong,
    JobFolderError,
    PlanFileError,
    RunFolderError,
    UnknownPlanner,
    nearest,
)
from tlora_fx.runtime.data.encode_data import bad_row
from tlora_fx.runtime.data.layout import WINDOW, LaidOutRows
from tlora_fx.runtime.data.rows import evaluated, is_local, read_rows, require_files
from tlora_fx.runtime.data.text_files import suffix_of
from tlora_fx.runtime.run_folder import RunFolder

#: What the modules of planners and controllers define, which cannot be imported without torch.
#: Of job files.
SUFFIXES = (".yaml", ".yml")
PLANNERS = ("auto", "fsdp", "pipeline", "replicated", "single", "tensor")
CONTROLLERS = ("keep-best", "aimd", "fixed")


def require_folder(path: Path) -> None:
    """Refuse a folder that is not there; raises JobFolderError."""
    if not path.exists():
        raise JobFolderError(
            "there is no folder of job files",
            folder=path,
            help="make it, and put job files into it at any time",
        )


def job_files(path: Path) -> list[Path]:
    """The job files of a folder, or the one file; none where the folder is gone."""
    if path.is_file():
        return [path]
    try:
        listed = sorted(path.iterdir())
    except OSError:
        return []  # what was submitted goes on
    return [p for p in listed if p.suffix in SUFFIXES and not p.name.startswith(".")]


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
    """Refuse jobs whose data files are not there, are of a type that is not read, or do not fit.

    Of a file that is read line by line the first rows are looked at.

    raises    DataError
    """
    for job in jobs:
        require_files(job)
        for spec in (*job.data.parts, evaluated(job)):
            if spec is not None and suffix_of(Path(spec.path)) in _BY_LINE:
                _require_layout(job.model_copy(update={"data": spec}))


#: Files of which a row can be read without the rest.
_BY_LINE = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")


def _require_layout(job: Job) -> None:
    first = read_rows(job.data, job.name, limit=WINDOW)
    for row in LaidOutRows(job, first, is_whole=False):
        if row.fields is None and not job.data.skip_bad_rows:
            raise bad_row(job, row.where, row.reason, by_template=False)


def require_trainable(jobs: Sequence[Job]) -> None:
    """Refuse a base that is not made for its task, by its config.json.

    raises    BaseRefused, BaseFileDamaged
    """
    base = jobs[0].base
    require_base_config(base)
    config = read_base_config(base)
    if config is not None:
        require_task(config, base)


def require_base(jobs: Sequence[Job]) -> None:
    """Refuse a base that cannot be trained: by its task, and by the headers of its files.

    raises    BaseRefused, BaseFileDamaged, BaseFileRefused
    """
    require_trainable(jobs)
    require_base_files(jobs[0].base)


def require_hub(jobs: Sequence[Job]) -> None:
    """Refuse a base or data of the hub that is not cached where the hub is not reached.

    It is asked once; what is loaded later knows the answer.

    raises    BaseNotLoadable, DataFileError
    """
    base, cache = jobs[0].base, hub_cache()
    for source in filter(is_hub_id, (base.model, base.tokenizer)):
        why = why_offline()
        if why and not (cache / f"models--{str(source).replace('/', '--')}").is_dir():
            raise BaseNotLoadable(
                "the base is not on this machine, and the hub is not reached",
                base=source,
                found=why,
                help="name a folder that holds the model, or mend the connection",
            )
    for job in jobs:
        for spec in (*job.data.parts, job.eval_data):
            if spec is not None and not is_local(spec.path):
                why_offline()  # `datasets` knows itself what it has


def require_gpu(name: str | None) -> None:
    """Refuse a GPU to plan for that nobody has measured or described.

    raises    UnknownGpu, ProfileFileError
    """
    if name is None:
        return
    if name.endswith(".json"):
        Profile.load(name)
    elif not any(same_gpu(profile.hardware.gpu, name) for profile in known_profiles()):
        find_gpu(name.removeprefix(ROOFLINE))
