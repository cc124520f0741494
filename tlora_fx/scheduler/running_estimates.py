"""What a run expects of its jobs, from profiles that were measured on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tlora_fx.config.job import Job
from tlora_fx.cost.cluster import Cluster
from tlora_fx.cost.demand import Demand
from tlora_fx.cost.estimator import ProfileEstimator
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import covers
from tlora_fx.errors import ProfileMismatch, ProfileMissing, RunRefused, UnknownGpu
from tlora_fx.model.backbone import Backbone, load_backbone
from tlora_fx.runtime.checks import check_fits, load_tokenizer
from tlora_fx.runtime.data import load_job_data
from tlora_fx.scheduler.estimating import Layout
from tlora_fx.scheduler.estimator_profiles import demand_profile, profiles_for
from tlora_fx.scheduler.group import Group
from tlora_fx.scheduler.request import JobRequest
from tlora_fx.scheduler.requests import base_of, facts_of_job, request_of, shape_of


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
    there = torch.cuda.device_count() if kind == "cuda" else len(os.sched_getaffinity(0))
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

    cluster    of the run
    files      profiles that the user names; others are looked for among the known ones
    raises     ProfileFileError; ProfileMismatch for a profile of other hardware, or one that was
               not measured
    """

    cluster: Cluster
    files: Sequence[Path] = ()
    estimator: ProfileEstimator = field(init=False)
    _given: list[Profile] = field(init=False)
    _backbones: dict[str, Backbone] = field(default_factory=dict)
    _told: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._given = [Profile.load(path) for path in self.files]
        for profile in self._given:
            demand_profile(profile.name, profile, self.cluster.gpu, allow_estimated=False)
        self.estimator = ProfileEstimator({}, self.cluster)

    def request(self, job: Job, now: float) -> JobRequest:
        """What the loop is told of a job, once all is checked that needs no weights.

        raises   TloraError: its data, its base or its targets are wrong, or nothing was measured
        """
        facts = facts_of_job(job)
        self.learn(job)
        data = load_job_data(job, load_tokenizer(job.base))
        check_fits(self._backbones[base_of(job)], {job.name: data})
        lengths = [len(sample.input_ids) for sample in data.samples]
        return request_of(job, lengths=lengths, submitted=now, facts=facts)

    def learn(self, job: Job) -> None:
        """Find the profile of a job's base.

        raises   ProfileMismatch, BaseUnknown, and what compiling raises
        """
        base = base_of(job)
        if base not in self._backbones:
            shape = shape_of(job)
            try:
                profile = self._profile(base, shape)
            except ProfileMismatch:
                self._told.setdefault(base, job.name)
                raise
            self.estimator.add(base, profile, shape)
            self._backbones[base] = load_backbone(job.base)

    def layout_of(self, group: Group, requests: Sequence[JobRequest]) -> Layout | None:
        """The layout that the estimator expects to be fastest."""
        if len(group.place) == 1:
            return None
        demand = Demand.total(request.demand for request in requests)
        tier = self.cluster.tier(group.place)
        return self.estimator.explain(requests[0].base, demand, len(group.place), tier).layout

    def threads(self) -> list[str]:
        """What profiles of a CPU were measured with another number of cores than a slot has."""
        if self.cluster.gpu != "cpu":
            return []
        cores = max(1, len(os.sched_getaffinity(0)) // self.cluster.gpus)
        return [
            f"{profile.name} was measured on {profile.hardware.processors} cores, a slot has "
            f"{cores}: measure it with OMP_NUM_THREADS={cores}"
            for profile in self._given
            if profile.hardware.processors != cores
        ]

    def _profile(self, base: str, shape: ModelFacts) -> Profile:
        given = [profile for profile in self._given if covers(profile, shape)]
        try:
            found = profiles_for(
                [base],
                self.cluster.gpu,
                shapes={base: shape},
                given={base: given[0]} if given else None,
            )
        except (UnknownGpu, ProfileMissing, ProfileMismatch) as error:
            # Nothing can be scaled to hardware without a data sheet, such as a CPU; and what was
            # scaled is no ground to refuse or slow down somebody's job.
            raise self._unmeasured(base, error.facts.get("found")) from None
        return found[base]

    def _unmeasured(self, base: str, nearest: str | None) -> ProfileMismatch:
        """The whole mistake for the first job of a base, a line for the others.

        nearest   what is there instead, if anything
        """
        where = f"on this machine's {self.cluster.gpu}"
        if base in self._told:
            return ProfileMismatch(
                f"base '{base}' was not measured {where}, as told of '{self._told[base]}'"
            )
        others = ", ".join(profile.name for profile in self._given)
        there = f"profiles of other bases: {others}" if others else nearest or "no profile"
        shorter = " --tokens 64,256,1024 --lengths 32" if self.cluster.gpu == "cpu" else ""
        return ProfileMismatch(
            f"base '{base}' was not measured {where}",
            found=there,
            help=f"measure it with `tlora-fx profile JOBS.yaml --eager{shorter}`, then start anew "
            "with --profile FILE",
        )
