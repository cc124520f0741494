"""Checks of commands before torch is imported: names, files, columns, meshes.

All of it is checked again where it is used. Here it is told within a second, not after the seconds
that importing torch, and reading and compiling, take.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from tlora_fx.config.base_files import (
    require_base_config,
    require_base_files,
    safetensors_header,
    weight_files,
)
from tlora_fx.config.base_task import read_base_config, require_task
from tlora_fx.config.hub import hub_cache, is_hub_id, why_offline
from tlora_fx.config.job import BaseSpec, DataSpec, Job
from tlora_fx.config.plugins import plugin_names
from tlora_fx.cost.hardware import GIB, find_gpu
from tlora_fx.cost.mesh_fits import cut_obstacles, every_mesh
from tlora_fx.cost.model_facts import ITEM_BYTES
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import (
    ROOFLINE,
    known_profiles,
    no_gpu_to_plan_for,
    same_gpu,
)
from tlora_fx.errors import (
    BaseNotLoadable,
    CallbackWrong,
    ControllerWrong,
    DataFileError,
    DeviceUnknown,
    EmptyDataError,
    JobFolderError,
    JobsDiffer,
    MeshDoesNotFit,
    NoPlanFits,
    PlanFileError,
    PlanNotRunnable,
    RunFolderError,
    UnknownPlanner,
    did_you_mean,
    nearest,
)
from tlora_fx.host.environment import wants_strict_kernels
from tlora_fx.host.gpus import largest_gpu_bytes, visible_gpus
from tlora_fx.host.memory import total_bytes
from tlora_fx.runtime.chats.conversations import BadRowError
from tlora_fx.runtime.data.encode_data import bad_row
from tlora_fx.runtime.data.encoding import require_readable
from tlora_fx.runtime.data.layout import WINDOW, LaidOutRows
from tlora_fx.runtime.data.rows import (
    NO_ROWS_HELP,
    evaluated,
    is_local,
    read_rows,
    require_files,
)
from tlora_fx.runtime.data.samples import samples_of_steps
from tlora_fx.runtime.data.text_files import suffix_of
from tlora_fx.runtime.run_folder import RunFolder

#: Of job files.
SUFFIXES = (".yaml", ".yml")
#: What the modules of planners and controllers define, which cannot be imported without torch.
PLANNERS = ("auto", "fsdp", "pipeline", "replicated", "single", "tensor")
CONTROLLERS = ("keep-best", "aimd", "fixed")
#: Jobs that one model holds by the default pipeline.
MAX_JOBS = 64


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


def require_plan_file(name: str) -> None:
    """Refuse the name of a plan's file where there is none; raises PlanFileError."""
    if Path(name).suffix == ".json" and not Path(name).exists():
        raise PlanFileError(
            "there is no such plan",
            file=name,
            help="name a file that is there, or write one with `tlora-fx plan -o`",
        )


def require_planner(name: str) -> None:
    """Refuse a plan's name that nobody has, and a file that holds no plan.

    raises    UnknownPlanner, PlanFileError
    """
    require_plan_file(name)
    if Path(name).is_file():
        Plan.load(name)
        return
    known = plugin_names("tlora_fx.planners", PLANNERS)
    if name not in known:
        raise UnknownPlanner(
            f"there is no planner '{name}'",
            nearest=nearest(name, known),
            help="known planners: " + ", ".join(known),
        )


def require_replannable(*, resume: bool, plan: str | None) -> None:
    """Refuse to switch plans where nothing was proposed, or where numbers must repeat.

    raises    PlanNotRunnable
    """
    reasons = {
        "without --resume: a plan is switched at a checkpoint": not resume,
        f"--plan {plan}: only a plan of auto is replaced": plan not in (None, "auto"),
        "TLORA_FX_STRICT=1: another plan sums in another order": wants_strict_kernels(),
    }
    if why := next((text for text, wrong in reasons.items() if wrong), None):
        raise PlanNotRunnable(
            "--replan cannot switch plans here",
            found=why,
            help="leave --replan out, or use it with --resume and --plan auto",
        )


def require_controller(name: str | None) -> None:
    """Refuse a controller's name that nobody has; raises ControllerWrong."""
    if name is None or name in CONTROLLERS:
        return
    raise ControllerWrong(
        f"no controller is called '{name}'",
        expected=", ".join(CONTROLLERS),
        help=did_you_mean(name, CONTROLLERS, "'keep-best' is the default"),
    )


def require_device(name: str | None) -> None:
    """Refuse a device that no machine has, and a GPU where none can be seen.

    raises    DeviceUnknown
    """
    is_gpu = visible_gpus() and re.fullmatch(r"cuda(:\d+)?", name or "")
    if name in (None, "cpu") or is_gpu:
        return
    raise DeviceUnknown(
        f"this machine has no device '{name}'",
        expected="cpu, cuda, or cuda:N of a GPU" if visible_gpus() else "cpu",
        found=name,
        help="leave the device out: then it is a GPU where there is one",
    )


def require_callbacks(names: Sequence[str]) -> None:
    """Refuse callbacks of files that are not there; raises CallbackWrong."""
    for name in names:
        source, _, attribute = name.rpartition(":")
        is_missing = source.endswith(".py") and not Path(source).is_file()
        if is_missing or not source or not attribute:
            raise CallbackWrong(
                "a callback cannot be made",
                callback=name,
                found=f"no file {source}" if is_missing else "no FILE.py:CLASS",
                help="write FILE.py:CLASS, a subclass of tlora_fx.TrainerCallback without "
                "arguments",
            )


# Whether a base can be cut over the processes, and whether it fits into their memory.


def mesh_of(plan: str | None, mesh: str | None, processes: int) -> MeshShape | None:
    """The mesh that is certain before anything is planned; None where a planner chooses it."""
    given = None if mesh is None else MeshShape.parse(mesh)
    if plan is not None and Path(plan).is_file():
        return Plan.load(plan).mesh
    if given is not None:
        return given
    sizes = {
        "single": MeshShape(),
        "replicated": MeshShape(dp=processes),
        "fsdp": MeshShape(dp=processes),
        "tensor": MeshShape(tp=processes),
        "pipeline": MeshShape(pp=processes),
    }
    return sizes.get(plan or ("single" if processes == 1 else "auto"))


def processes_of_torchrun() -> int:
    """Number of processes that torchrun says it has started; 1 where it has not."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() and int(text) else 1


def require_cuts(jobs: Sequence[Job], mesh: MeshShape | None) -> None:
    """Refuse a mesh over which a base's layers or heads cannot be divided, by its config.json.

    raises    MeshDoesNotFit, with the meshes of the same size that can
    """
    config = read_base_config(jobs[0].base)
    if mesh is None or config is None:
        return
    text = config.get("text_config") or config
    layers = text.get("num_hidden_layers") if isinstance(text, dict) else None
    if not isinstance(layers, int) or not isinstance(text.get("num_attention_heads"), int):
        return  # a family with other names, which transformers knows
    fields = SimpleNamespace(**text)
    reasons = cut_obstacles(mesh, layers, fields)
    if reasons:
        others = [one for one in every_mesh(mesh.size) if not cut_obstacles(one, layers, fields)]
        raise MeshDoesNotFit(
            f"a mesh of {mesh} cannot run this model",
            base=jobs[0].base.model or jobs[0].base.config,
            found="\n".join(reasons),
            help=f"these meshes of {mesh.size} can: {', '.join(f'({one})' for one in others)}",
        )


def require_base_fits(
    jobs: Sequence[Job], plan: str | None, processes: int, *, on_cpu: bool
) -> None:
    """Refuse a base whose weights alone are larger than the memory that a plan gives them.

    raises    NoPlanFits
    """
    base = jobs[0].base
    size, config = base_bytes(base), read_base_config(base)
    # One that is quantised takes another size in memory than its files say.
    if size is None or (config or {}).get("quantization_config"):
        return
    parts = 1 if plan in ("single", "replicated") or processes == 1 else processes
    # On a CPU all processes share one memory.
    needed = size * processes / parts if on_cpu else size / parts
    has = total_bytes() if on_cpu else largest_gpu_bytes()
    if not has or needed <= has:
        return
    raise NoPlanFits(
        "the weights of the base do not fit into memory",
        base=base.model,
        plan=plan or ("single" if processes == 1 else "auto"),
        expected=f"at most {has / GIB:.1f} GiB" + " a GPU" * (not on_cpu),
        found=f"{needed / GIB:.1f} GiB in {base.dtype}, without adapters and activations",
        help="use more GPUs with --plan auto, which can divide the base, or a smaller base",
    )


#: Of a number in a form, without scales; embeddings and the head keep the base's dtype.
_LEAST_BYTES = {"nf4": 0.5, "int8": 1, "float8": 1}


def base_bytes(base: BaseSpec) -> int | None:
    """Bytes that a base's weights take at least as they are loaded, by its files' headers.

    None where they are not on this machine, or a header cannot be read.
    """
    try:
        headers = [safetensors_header(path) for path in weight_files(base) or ()]
    except BaseNotLoadable:
        return None
    numbers = sum(math.prod(tensor.shape) for header in headers for tensor in header.values())
    item = _LEAST_BYTES[base.quantize] if base.quantize else ITEM_BYTES[base.dtype]
    return int(numbers * item) or None


def require_job_folders(jobs: Sequence[Job], output: Path) -> None:
    """Refuse names that the run needs itself, and names that one folder would have on some systems.

    raises    RunFolderError
    """
    folder = RunFolder(output)
    for job in jobs:
        folder.job(job.name)
    require_distinct_names(jobs)


def require_distinct_names(jobs: Sequence[Job]) -> None:
    """Refuse names that one folder would have on some systems; raises RunFolderError."""
    first: dict[str, str] = {}
    for job in jobs:
        other = first.setdefault(job.name.lower(), job.name)
        if other != job.name:
            raise RunFolderError(
                "two jobs' names differ in upper and lower case alone",
                found=f"{other}, {job.name}",
                help="rename one of them: some file systems have one folder for both",
            )


def require_one_model(jobs: Sequence[Job]) -> None:
    """Refuse more jobs than the default pipeline fuses into one model; raises JobsDiffer."""
    if len(jobs) > MAX_JOBS:
        raise JobsDiffer(
            "the job file has more jobs than one model may hold",
            expected=f"at most {MAX_JOBS}",
            found=len(jobs),
            help="split the file, or give it to `tlora-fx run`, which trains some jobs at a time",
        )


def require_data_and_base(jobs: Sequence[Job], *, weights: bool = True) -> None:
    """Refuse data or a base that cannot be trained on, by their files.

    weights   those of the base, too
    raises    TloraError
    """
    require_data(jobs)
    (require_base if weights else require_trainable)(jobs)
    require_hub(jobs)


def require_data(jobs: Sequence[Job]) -> None:
    """Refuse jobs whose data files are not there, are of a type that is not read, or do not fit.

    Of a file that is read line by line, and of rows in memory, the first are looked at.

    raises    DataError, of all files that are not there or not read at once
    """
    _require_all_files(jobs)
    for job in jobs:
        counts = [(part, _rows_to_judge(job)) for part in job.data.parts]
        for spec, count in [*counts, (evaluated(job), WINDOW)]:
            if spec is not None and _begins_with_rows(spec):
                _require_layout(job.model_copy(update={"data": spec}), count)


def _require_all_files(jobs: Sequence[Job]) -> None:
    """Refuse the data files of all jobs that cannot be used, in one DataFileError."""
    # Jobs that share a file share its mistake.
    found: dict[tuple[str, str | None], tuple[DataFileError, list[str]]] = {}
    for job in jobs:
        try:
            require_files(job)
        except DataFileError as error:
            key = error.what, error.facts.get("path")
            found.setdefault(key, (error, []))[1].append(job.name)
    lines = []
    for (what, path), (mistake, names) in found.items():
        if len(found) == 1:
            raise mistake
        help = f"; {mistake.help}" * bool(mistake.help)
        lines.append(f"job{'s' * (len(names) > 1)} {', '.join(names)}: {what}: {path}{help}")
    if lines:
        raise DataFileError(f"{len(lines)} data files cannot be used", mistakes="\n".join(lines))


#: Files of which a row can be read without the rest.
_BY_LINE = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")


def _begins_with_rows(spec: DataSpec) -> bool:
    """Whether the first rows can be read at once, and read again later."""
    if spec.rows is None:
        return suffix_of(Path(spec.path)) in _BY_LINE
    return hasattr(spec.rows, "__len__") and hasattr(spec.rows, "__getitem__")


def _rows_to_judge(job: Job) -> int:
    """How many first rows of its data a job reads in any case, at most WINDOW."""
    limit = samples_of_steps(job) if job.data.streaming else None
    return WINDOW if limit is None else min(WINDOW, limit)


def _require_layout(job: Job, count: int) -> None:
    """Refuse data whose first rows, `count` of them, cannot be trained; raises DataError."""
    first = [*read_rows(job.data, job.name, limit=count)]
    if not first:
        raise EmptyDataError(
            "the data has no rows", path=job.data.path, job=job.name, help=NO_ROWS_HELP
        )
    rows = LaidOutRows(job, first, is_whole=False)
    for row in rows:
        if job.data.skip_bad_rows:
            continue
        if row.fields is None or rows.layout is None:
            raise bad_row(job, row.where, row.reason, by_template=False)
        try:
            require_readable(rows.layout, row.fields)
        except BadRowError as error:
            raise bad_row(job, row.where, str(error), by_template=False) from error


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


def require_gpu(name: str | None, jobs: Sequence[Job]) -> None:
    """Refuse a GPU to plan for that nobody has measured or described.

    name      None: the device at hand
    raises    UnknownGpu, ProfileFileError, ProfileMissing
    """
    if name is None:
        _require_device_to_plan_for(jobs[0].base)
        return
    if name.endswith(".json"):
        Profile.load(name)
    elif not any(same_gpu(profile.hardware.gpu, name) for profile in known_profiles()):
        find_gpu(name.removeprefix(ROOFLINE))


def _require_device_to_plan_for(base: BaseSpec) -> None:
    """Refuse a machine without a GPU on which no base of this width was measured."""
    config = read_base_config(base)
    if visible_gpus() or config is None:
        return
    text = config.get("text_config") or config
    width = text.get("hidden_size") if isinstance(text, dict) else None
    measured = (one for one in known_profiles() if same_gpu(one.hardware.gpu, "cpu"))
    if width is None or any(one.shape.hidden == width for one in measured):
        return
    raise no_gpu_to_plan_for(base.model or base.config)
