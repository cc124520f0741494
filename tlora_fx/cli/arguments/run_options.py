"""Options of `run` and `serve`, the executor of their groups, and signals to stop."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from tlora_fx.cli.arguments.options import MaxRowTokens, PipelineOptions, option, seconds
from tlora_fx.errors import RayNotInstalled, RunRefused
from tlora_fx.runtime.launching.interrupts import leave_terminal, stop_signals
from tlora_fx.scheduler.estimates import Estimates, machine
from tlora_fx.scheduler.local.admission import AdmissionLimits
from tlora_fx.scheduler.loop import LoopOptions
from tlora_fx.scheduler.state import ChangeCosts

if TYPE_CHECKING:
    from tlora_fx.cost.hardware import Cluster
    from tlora_fx.scheduler.service import RunOptions, SchedulerService

TURN_SECONDS = 0.05
EXECUTORS = ("local", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommandOptions(PipelineOptions):
    """Options of the command line."""

    jobs: Annotated[Path, typer.Argument(help="Folder of job files (YAML), or one file.")]
    output: Path | None = option(
        None,
        "Output folder for adapters, metrics and checkpoints; runs/DATE-TIME if not given.",
        "-o",
        "--output",
    )
    policy: str = option(
        "tlora",
        "Scheduling policy, which decides which jobs train together: tlora, "
        "megatron:backfill=true, ...",
    )
    horizon: str = option("60s", "Time between scheduling decisions, such as 60s or 5m.")
    slots: int | None = option(
        None,
        "Number of GPUs to use (with Ray, on each node). On the CPU, number of slots to divide it "
        "into. If not given, all GPUs, or the CPU as one slot.",
        min=1,
    )
    device: str | None = option(
        None, "Kind of device to train on: cpu or cuda; if not given, cuda if there is a GPU."
    )
    executor: str = option(
        "local", "Where groups of jobs run: local (this machine) or ray (a Ray cluster)."
    )
    ray_address: str | None = option(
        None,
        "HOST:PORT of the head node of a Ray cluster; if not given, the cluster that runs on this "
        "machine.",
    )
    profile: list[Path] | None = option(
        None, "Profile file of a base model, written by `tlora-fx profile`; repeatable."
    )
    until_empty: bool = option(
        False, "Exit as soon as every job has ended, without waiting for new job files."
    )
    forever: bool = option(
        False, "Do not exit when every job has ended: wait for more job files until Ctrl-C."
    )
    save_every: str = option("60s", "Time between checkpoints of a group, such as 60s or 5m.")
    max_row_tokens: MaxRowTokens = 16384
    compiled: bool = option(
        False, "Compile the layers with torch.compile; groups take longer to start.", "--compile"
    )
    prepare_seconds: float = option(
        120.0,
        "Seconds that reading and checking a job may take; a job that takes longer is refused.",
        min=1,
    )
    prepare_memory: float | None = option(
        None,
        "Memory that reading and checking a job may take, in GiB; a quarter of the machine's "
        "memory if not given.",
        min=0.1,
    )
    stall: str | None = option(
        None,
        "Time without progress after which a group is killed, such as 10m; if not given, 20 times "
        "its longest step, and at least 5 minutes (30 with --compile).",
    )
    grace: str = option("60s", "How long groups may take to stop after Ctrl-C, such as 60s.")
    callback: list[str] | None = option(
        None,
        "Class of your own to call at events of each group: a subclass of "
        "tlora_fx.TrainerCallback, as FILE.py:CLASS; repeatable.",
    )
    accept_changes: bool = option(
        False, "Continue jobs even if their data or base model have changed."
    )

    def service(self, kind: str, estimates: Estimates) -> RunOptions:
        """Service options of the run that the command line asks for, on kind "cpu" or "cuda"."""
        from tlora_fx.scheduler.local.executor import LocalOptions
        from tlora_fx.scheduler.local.watchdog import COMPILING_SECONDS, STEP_SECONDS, StallLimits
        from tlora_fx.scheduler.service import RunOptions

        horizon = seconds(self.horizon, "--horizon")
        saving = seconds(self.save_every, "--save-every")
        stall = StallLimits(
            None if self.stall is None else seconds(self.stall, "--stall"),
            min_seconds=COMPILING_SECONDS if self.compiled else STEP_SECONDS,
        )
        return RunOptions(
            LoopOptions(horizon, switch_seconds=10.0, changes=ChangeCosts()),
            linger=None if self.forever else 0.0 if self.until_empty else horizon,
            layout_of=estimates.layout_of,
            admission=self._admission(),
            grace_seconds=seconds(self.grace, "--grace"),
            local=LocalOptions(
                device=kind,
                save_seconds=saving,
                max_row_tokens=self.max_row_tokens,
                compiled=self.compiled,
                stall=stall,
                # None: the default passes.
                pipeline=str(self.passes())
                if self.pipeline or self.add_pass or self.load
                else None,
                extensions=tuple(map(_absolute, self.load or ())),
                accept_changes=self.accept_changes,
                callbacks=tuple(map(_absolute, self.callback or ())),
                memory_of=estimates.memory_of,
            ),
        )

    def _admission(self) -> AdmissionLimits:
        memory = self.prepare_memory
        return AdmissionLimits(
            self.prepare_seconds,
            None if memory is None else int(memory * (1 << 30)),
            self.trust_remote_code,
        )


def _absolute(name: str) -> str:
    """A file's name, or what stands in it, as workers in other folders find it."""
    source, colon, attribute = name.partition(".py")
    return f"{Path(source).absolute()}{colon}{attribute}" if colon else name


def require_output_and_times(
    options: RunCommandOptions, require_kind: Callable[[Path], None]
) -> bool:
    """Refuse times and profiles that cannot be read, and an output folder of something else.

    require_kind   refuses an output folder that another command goes on with
    returns        whether the output folder holds a run to go on with
    """
    from tlora_fx.cost.profile import Profile
    from tlora_fx.runtime.launching import early_checks as early
    from tlora_fx.runtime.run_folder import LEDGER, RUN_COMMAND_FILES, require_new

    for name in ("horizon", "save_every", "stall", "grace"):
        if (text := getattr(options, name)) is not None:
            seconds(text, f"--{name.replace('_', '-')}")
    for path in options.profile or ():
        Profile.load(path)
    early.require_callbacks(options.callback or ())
    if options.output is None:
        return False
    require_kind(options.output)
    begun = (options.output / LEDGER).exists()
    if not begun:
        require_new(options.output, among=RUN_COMMAND_FILES)
    return begun


def require_executor(options: RunCommandOptions) -> None:
    """Refuse names of executors that there are not, and Ray where it is not installed."""
    if options.executor not in EXECUTORS:
        raise RunRefused(
            "there is no such executor",
            expected=" or ".join(EXECUTORS),
            found=options.executor,
            help="leave --executor out to run on this machine",
        )
    if options.executor != "ray":
        if options.ray_address is not None:
            raise RunRefused(
                "--ray-address is of another executor",
                expected="--executor ray",
                found=f"--executor {options.executor}",
            )
    elif importlib.util.find_spec("ray") is None:
        raise RayNotInstalled(
            "--executor ray needs Ray, which is not installed here",
            help="pip install 'tlora-fx[ray]', on every node alike",
        )


def placed(
    options: RunCommandOptions,
) -> tuple[Cluster, str, Callable[[RunOptions], RunOptions]]:
    """Cluster of the run, "cuda" or "cpu", and a function that adapts the run's options to it.

    raises   RunRefused, RayUnreachable
    """
    if options.executor == "ray":
        from tlora_fx.scheduler.ray.cluster import RayCluster
        from tlora_fx.scheduler.ray.executor import on_ray

        nodes = RayCluster.join(options.ray_address, options.device, options.slots)
        return nodes.cluster, nodes.kind, partial(on_ray, nodes)

    cluster, kind = machine(options.device, options.slots)
    return cluster, kind, lambda service: service


class StopSignals:
    """Ctrl-C, SIGTERM or SIGHUP drains all groups; a second one leaves them to themselves."""

    def __init__(self, running: SchedulerService) -> None:
        self.running = running

    def __enter__(self) -> None:
        self.before = {number: signal.signal(number, self._hear) for number in stop_signals()}

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        elif self.running.stopping:
            raise KeyboardInterrupt
        self.running.stop()
