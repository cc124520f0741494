"""This machine as a cluster, and an estimator that learns of bases as their jobs come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from tlora_fx.config.base_files import config_file, read_json
from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.config.job import Job
from tlora_fx.config.paths import is_file
from tlora_fx.cost.estimator import Layout, Prediction, ProfileEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.cost.memory import device_bytes
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import (
    ON_CPU,
    covers,
    known_profiles,
    profiles_for,
    require_profile,
    same_gpu,
)
from tlora_fx.errors import (
    BaseFileDamaged,
    ProfileMismatch,
    ProfileMissing,
    RunRefused,
    UnknownGpu,
)
from tlora_fx.host.memory import usable_cpus
from tlora_fx.inspect.wording import plural
from tlora_fx.scheduler.local.admission_worker import prepare
from tlora_fx.scheduler.state import Group, JobRequest

#: What configs call the columns between layers.
WIDTHS = ("hidden_size", "n_embd", "d_model")


def machine(device: str | None, slots: int | None) -> tuple[Cluster, str]:
    """This machine as a cluster of one node, and "cuda" or "cpu".

    device   None: the GPUs where there are some
    slots    GPUs to use, or parts of the CPU; None: all GPUs, or the CPU as a whole
    raises   RunRefused where there are fewer
    """
    import torch

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise RunRefused(
            "groups run on the CPU or on CUDA devices",
            expected="cpu or cuda",
            found=kind,
            help="leave --device out, and say how many GPUs to use with --slots",
        )
    there = torch.cuda.device_count() if kind == "cuda" else usable_cpus()
    wanted = slots or (there if kind == "cuda" else 1)
    if wanted > there or not there:
        raise RunRefused(
            f"this machine has {there} {'GPUs' if kind == 'cuda' else 'cores'}",
            expected=f"--slots of at most {there}",
            found=wanted,
        )
    gpu = torch.cuda.get_device_name(0) if kind == "cuda" else "cpu"
    return Cluster(wanted, gpus_per_node=wanted, nodes_per_rack=1, gpu=gpu), kind


@dataclass
class Estimates:
    """An estimator that learns of bases as their jobs come.

    files      profiles that the user names; others are looked for among the known ones
    raises     ProfileFileError; ProfileMismatch for a profile of other hardware, or one that was
               not measured
    """

    cluster: Cluster
    files: Sequence[Path] = ()
    estimator: ProfileEstimator = field(init=False)
    _given: list[Profile] = field(init=False)
    _unmeasured_for: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._given = [Profile.load(path) for path in self.files]
        for profile in self._given:
            require_profile(profile.name, profile, self.cluster.gpu, allow_estimated=False)
        self.estimator = ProfileEstimator({}, self.cluster)

    def request(self, job: Job, now: float) -> JobRequest:
        """Request of a job to the loop, prepared in this process.

        raises   TloraError: its data, its base or its targets are wrong, or nothing was measured
        """
        request, shape = prepare(job, now)
        self.learn(job.name, request.base, shape)
        return request

    def learn(self, job: str, base: str, shape: ModelFacts | None) -> None:
        """Find the profile of a job's base; shape None: there is nothing to learn.

        raises   ProfileMismatch, BaseUnknown
        """
        if shape is None or base in self.estimator.profiles:
            return
        try:
            profile = self._profile(base, shape)
        except ProfileMismatch:
            self._unmeasured_for.setdefault(base, job)
            raise
        self.estimator.add(base, profile, shape)

    def layout_of(self, group: Group, requests: Sequence[JobRequest]) -> Layout | None:
        """The layout that the estimator expects to be fastest."""
        return None if len(group.place) == 1 else self._expected(group, requests).layout

    def memory_of(self, group: Group, requests: Sequence[JobRequest]) -> float | None:
        """Bytes that a group's process takes of its GPU, or of main memory; None: not known."""
        expected = self._expected(group, requests)
        return device_bytes(expected.memory) if expected.layout is not None else None

    def _expected(self, group: Group, requests: Sequence[JobRequest]) -> Prediction:
        demand = Demand.total(request.demand for request in requests)
        tier = self.cluster.tier(group.place)
        return self.estimator.explain(requests[0].base, demand, len(group.place), tier)

    def threads(self) -> list[str]:
        """Warnings of CPU profiles measured with another number of cores than a slot has."""
        if self.cluster.gpu != "cpu":
            return []
        cores = max(1, usable_cpus() // self.cluster.gpus)
        return [
            f"{profile.name} was measured on {plural(profile.hardware.processors, 'core')}, a slot "
            f"has {cores}: measure it with OMP_NUM_THREADS={cores}"
            for profile in self._given
            if profile.hardware.processors != cores
        ]

    def _profile(self, base: str, shape: ModelFacts) -> Profile:
        covering = [profile for profile in self._given if covers(profile, shape)]
        try:
            profiles = profiles_for(
                [base],
                self.cluster.gpu,
                shapes={base: shape},
                given={base: covering[0]} if covering else None,
            )
        except (UnknownGpu, ProfileMissing, ProfileMismatch) as error:
            # Nothing can be scaled to hardware without a data sheet, such as a CPU; and what was
            # scaled is no ground to refuse or slow down somebody's job.
            raise self._unmeasured(base, error.facts.get("found")) from None
        return profiles[base]

    def _unmeasured(self, base: str, nearest: str | None) -> ProfileMismatch:
        """The whole mistake for the first job of a base, a line for the others."""
        if base in self._unmeasured_for:
            return ProfileMismatch(
                f"base '{base}' was not measured on this machine's {self.cluster.gpu}, as told of "
                f"'{self._unmeasured_for[base]}'"
            )
        return _unmeasured(base, self.cluster.gpu, self._given, nearest)


def require_measured(base: BaseSpec, gpu: str, files: Sequence[Path] = ()) -> None:
    """Refuse a base that nobody has measured on a kind of GPU, as far as its config.json says so.

    A base that is not on this machine, and one whose config does not say its sizes, passes; so does
    one of whose layers some were not measured. `Estimates.learn` refuses those. Without torch.

    files    profiles that the user names
    raises   ProfileMismatch, ProfileFileError
    """
    if (widths := _widths_of(base)) is None:
        return
    given = [Profile.load(path) for path in files]
    for profile in chain(given, known_profiles()):
        shape = profile.shape
        # A classifier's head is another one.
        same = shape.hidden == widths[0] and (base.is_classifier or shape.vocabulary == widths[1])
        same = same and (base.quantize is not None or shape.dtype == base.dtype)
        if same and same_gpu(profile.hardware.gpu, gpu) and not profile.estimated:
            return
    raise _unmeasured(str(base.model or base.config), gpu, given)


def _widths_of(base: BaseSpec) -> tuple[int, int] | None:
    """Columns between a base's layers and its vocabulary, by its config.json; None if not known."""
    file = config_file(base)
    if file is None or not is_file(file):
        return None
    try:
        config = read_json(file)
    except BaseFileDamaged:
        return None
    for each in (config, config.get("text_config")):
        named = each if isinstance(each, dict) else {}
        hidden = next((named[name] for name in WIDTHS if name in named), None)
        vocabulary = named.get("vocab_size")
        if isinstance(hidden, int) and isinstance(vocabulary, int):
            return hidden, vocabulary
    return None


def _unmeasured(
    base: str, gpu: str, given: Sequence[Profile], nearest: str | None = None
) -> ProfileMismatch:
    others = ", ".join(profile.name for profile in given)
    how = ON_CPU if gpu == "cpu" else " --eager"
    return ProfileMismatch(
        f"base '{base}' was not measured on this machine's {gpu}",
        found=f"profiles of other bases: {others}" if others else nearest or "no profile",
        help=f"measure it with `tlora-fx profile JOBS.yaml{how}`, then start anew "
        "with --profile FILE",
    )
