"""Basis of `--plan auto` in a run, where it is kept, and the plan that is proposed instead.

A measured profile of the base on this device goes first, then what the run has kept, then a
calibration. The run's folder keeps the plan and what was calibrated, so that a resumed run measures
nothing and trains by the same plan. After some rounds a plan that would be faster is written beside
them; only a run that is resumed with `--replan` takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.load import Round
from tlora_fx.cost.plan import MeshShape, Plan, model_fingerprint
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import covers, profile_for
from tlora_fx.errors import (
    NotProfilable,
    PlanFileError,
    ProfileMissing,
    TloraError,
    UnknownGpu,
)
from tlora_fx.host.environment import wants_strict_kernels
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.planners.proposals import proposal
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.checks import longest_round, typical_round
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.job_run import JobRun, StepReport
from tlora_fx.runtime.launching.launch import Launch
from tlora_fx.runtime.profiling.calibrating import calibrate
from tlora_fx.runtime.profiling.profiler import hardware_of
from tlora_fx.runtime.run_folder import PLAN, PROFILE, PROPOSAL

#: Numbers of nano-batches that may be proposed to a run whose layers are compiled.
NANO_BATCHES = (2, 4)
#: Rounds that are looked at before a plan is proposed, and those of them that only warm up.
ROUNDS, WARM_UP_ROUNDS = 20, 5


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """Measurements by which the plan of a run is chosen.

    profile    None where the run goes on by the plan that it has, and measured nothing
    work       a typical round
    longest    the round that needs the most memory
    kept       the plan that the run had, or the one that was proposed to it
    """

    profile: Profile | None
    work: Round
    longest: Round
    kept: Plan | None = None


def plan_basis(
    model: SuperModel,
    data: Mapping[str, JobData],
    ranks: Ranks,
    launch: Launch,
    device: torch.device,
    *,
    folder: Path | None = None,
    mesh: MeshShape | None = None,
    replan: bool = False,
    max_row_tokens: int,
    compiled: bool = False,
    measuring: Callable[[], None] = lambda: None,
) -> PlanBasis:
    """Measurements by which `auto` chooses, the same on every process; all call this together.

    folder       of a run that is resumed; None: a new one
    mesh         that the plan must have
    replan       take the plan that was proposed to the run
    measuring    called before anything is measured
    raises       PlanFileError where nothing was proposed; TloraError as `calibrate` does
    """
    work = typical_round(model.jobs, data, max_row_tokens)
    longest = longest_round(model.jobs, data, max_row_tokens)

    def found() -> tuple[Profile | None, Plan | None]:
        if not ranks.mesh.leader:
            return None, None
        profile = _known_profile(model, device, folder)
        name = PROPOSAL if replan else PLAN
        return profile, _kept_plan(folder, name, model, mesh or launch.size)

    profile, kept = ranks.from_leader(ranks.together(found))
    if profile is None and kept is None:
        measuring()
        profile = calibrate(model, ranks, launch, work, device, compiled=compiled)
    return PlanBasis(profile, work, longest, kept)


def _known_profile(model: SuperModel, device: torch.device, folder: Path | None) -> Profile | None:
    """The measured profile of the base on this device; else the one that the run has kept."""
    facts, gpu = facts_of(model), hardware_of(device).gpu
    try:
        return profile_for(facts, gpu, allow_estimated=False)
    except (NotProfilable, ProfileMissing, UnknownGpu):
        pass
    if folder is None or not (folder / PROFILE).exists():
        return None
    kept = Profile.load(folder / PROFILE)
    return kept if kept.hardware.gpu == gpu and covers(kept, facts) else None


def _kept_plan(
    folder: Path | None, name: str, model: SuperModel, wanted: MeshShape | int
) -> Plan | None:
    """A plan in the run's folder, if it is for this model and as many processes.

    raises    PlanFileError where the proposed one is not there, or is for others
    """
    proposed = name == PROPOSAL
    if folder is None or not (folder / name).exists():
        if proposed:
            raise _no_proposal(folder, "no plan was proposed")
        return None
    plan = Plan.load(folder / name)
    mesh = plan.mesh if isinstance(wanted, MeshShape) else plan.mesh.size
    if mesh == wanted and plan.model == model_fingerprint(model):
        return plan
    if proposed:
        raise _no_proposal(folder, f"a plan for {plan.mesh}, or for other jobs")
    return None


def _no_proposal(folder: Path | None, found: str) -> PlanFileError:
    return PlanFileError(
        "the run has no proposed plan to switch to",
        file=None if folder is None else folder / PROPOSAL,
        found=found,
        help=f"leave --replan out: a plan is proposed after {ROUNDS} rounds if one would be faster",
    )


@dataclass(slots=True)
class PlanKeeper(TrainerCallback):
    """Keeps the plan of `auto` in the run's folder, and proposes one that would be faster.

    meshes         those to choose from; None: all
    tell           says what is proposed
    nano_batches   numbers of them to choose from beside one; empty: something else chooses them
    """

    folder: Path
    model: SuperModel
    plan: Plan
    basis: PlanBasis
    gpus_per_node: int
    meshes: Sequence[MeshShape] | None
    tell: Callable[[str], None]
    nano_batches: Sequence[int] = ()
    seconds: list[float] = field(default_factory=list)

    def started(self, runs: Sequence[JobRun]) -> None:
        """Write down what the run is trained by."""
        self.plan.save(self.folder / PLAN)
        profile = self.basis.profile
        if profile is not None and profile.source == "calibrated":
            profile.save(self.folder / PROFILE)
        proposed = self.folder / PROPOSAL
        if proposed.exists() and Plan.load(proposed) == self.plan:
            proposed.unlink()

    def stepped(self, report: StepReport) -> None:
        """Note what a round took; all jobs report the same of one round."""
        if len(self.seconds) >= ROUNDS or self.seconds[-1:] == [report.seconds]:
            return
        self.seconds.append(report.seconds)
        if len(self.seconds) == ROUNDS and not wants_strict_kernels():
            self._propose(median(self.seconds[WARM_UP_ROUNDS:]))

    def _propose(self, took: float) -> None:
        basis = self.basis
        if basis.profile is None:
            return
        try:
            better = proposal(
                self.model,
                self.plan,
                basis.profile,
                basis.work,
                took,
                gpus_per_node=self.gpus_per_node,
                longest=basis.longest,
                meshes=self.meshes,
                nano_batches=self.nano_batches,
            )
        except TloraError:
            return  # such as a plan of the user's that no profile describes
        if better is None or better.estimate is None:
            return
        path = self.folder / PROPOSAL
        better.save(path)
        expected = self.plan.estimate.step_seconds if self.plan.estimate else 0.0
        cut = f" with {better.nano_batches} nano-batches" if better.nano_batches > 1 else ""
        self.tell(
            f"a round takes {took:.3g} s ({expected:.3g} s were predicted); {better.mesh}{cut} "
            f"would take {better.estimate.step_seconds:.3g} s: --resume --replan switches to {path}"
        )
