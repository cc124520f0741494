"""The plan of `auto` in a run: what it rests on, what is kept, what is proposed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.cost.facts import small_model
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import GPUS
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import Hardware, Profile
from tlora_fx.cost.profile_sources import roofline_profile
from tlora_fx.errors import PlanFileError, PlanNotRunnable
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.planners.auto import search
from tlora_fx.runtime import auto_plan
from tlora_fx.runtime.auto_plan import ROUNDS, PlanBasis, PlanKeeper, plan_basis
from tlora_fx.runtime.checks import typical_round
from tlora_fx.runtime.data.samples import Sample
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.job_run import StepReport
from tlora_fx.runtime.launching.early_checks import require_replannable
from tlora_fx.runtime.launching.launch import Launch

CPU = torch.device("cpu")
LENGTHS = {"one": [4] * 90 + [40] * 10, "two": list(range(10, 60))}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def profile(model):
    """What a calibration of this machine would be."""
    roof = roofline_profile(GPUS["h100"], facts_of(model))
    return roof.model_copy(update={"source": "calibrated", "hardware": Hardware(gpu="cpu")})


@pytest.fixture
def calibrations(monkeypatch, profile, tmp_path):
    """How often something was measured; nobody has profiled anything."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path / "profiles"))
    times = []
    monkeypatch.setattr(auto_plan, "calibrate", lambda *_, **__: times.append(1) or profile)
    return times


def data():
    return {
        name: SimpleNamespace(
            samples=[Sample((1,) * n, (1,) * n) for n in lengths],
            lengths=np.array(lengths), count=len(lengths), units=None,
        )
        for name, lengths in LENGTHS.items()
    }  # fmt: skip


def basis(model, size=2, **options):
    launch = Launch(0, size, 0, size)
    ranks = Ranks(Mesh.alone(CPU))
    return plan_basis(model, data(), ranks, launch, CPU, max_row_tokens=16384, **options)


def keeper(folder, model, plan, profile, said):
    work = typical_round(model.jobs, data(), 16384)
    return PlanKeeper(folder, model, plan, PlanBasis(profile, work, work), 8, None, said.append)


def report(seconds, job="one"):
    return StepReport(job, 1, 0.0, 0.0, 0.0, 0, seconds)


def test_a_typical_round_has_samples_of_all_lengths(model):
    """As often as the data have them."""
    jobs = [job.model_copy(update={"per_device_train_batch_size": 10}) for job in model.jobs]
    [(one, two)] = typical_round(jobs, data(), 16384).rows

    assert sorted(one) == [4] * 9 + [40]
    assert sorted(two) == [12, 17, 22, 27, 32, 37, 42, 47, 52, 57]


def test_a_new_run_is_calibrated(model, profile, calibrations):
    """It has neither a plan nor a profile."""
    found = basis(model)

    assert (found.profile, found.kept) == (profile, None)
    assert len(calibrations) == 1


def test_a_resumed_run_measures_nothing(model, profile, calibrations, tmp_path):
    """It has its plan and its profile; another number of processes plans anew by that profile."""
    plan = search(model, profile, typical_round(model.jobs, data(), 16384), 2).best()
    keeper(tmp_path, model, plan, profile, []).started([])

    assert basis(model, folder=tmp_path).kept == plan
    assert basis(model, folder=tmp_path).profile == profile
    assert basis(model, 4, folder=tmp_path).kept is None
    assert basis(model, folder=tmp_path, mesh=MeshShape(pp=2)).kept in (None, plan)
    assert calibrations == []


def test_a_faster_plan_is_proposed_after_some_rounds(model, profile, tmp_path):
    """Reports of one round count once; only `--replan` takes it."""
    work, said = typical_round(model.jobs, data(), 16384), []
    slow = max(search(model, profile, work, 2).running, key=lambda one: one.time.seconds).plan
    keeps = keeper(tmp_path, model, slow, profile, said)
    keeps.started([])
    took = slow.estimate.step_seconds
    for number in range(ROUNDS - 1):
        for job in ("one", "two"):
            keeps.stepped(report(took * (1 + number / 1e6), job))
    assert said == []
    keeps.stepped(report(took))

    proposed = Plan.load(tmp_path / "proposed-plan.json")
    assert len(said) == 1
    assert "--resume --replan switches to" in said[0]
    assert basis(model, folder=tmp_path).kept == slow
    assert basis(model, folder=tmp_path, replan=True).kept == proposed != slow
    # Who goes on without it may take it later; who takes it has it as the plan.
    keeper(tmp_path, model, slow, profile, said).started([])
    assert (tmp_path / "proposed-plan.json").exists()
    keeper(tmp_path, model, proposed, profile, said).started([])
    assert not (tmp_path / "proposed-plan.json").exists()
    assert basis(model, folder=tmp_path).kept == proposed


def test_nothing_is_proposed_in_strict_mode(model, profile, tmp_path, monkeypatch):
    """There numbers repeat bit by bit."""
    monkeypatch.setenv("TLORA_FX_STRICT", "1")
    work = typical_round(model.jobs, data(), 16384)
    slow = max(search(model, profile, work, 2).running, key=lambda one: one.time.seconds).plan
    keeps = keeper(tmp_path, model, slow, profile, [])
    keeps.started([])
    for number in range(ROUNDS):
        keeps.stepped(report(slow.estimate.step_seconds + number))

    assert not (tmp_path / "proposed-plan.json").exists()


def test_a_run_without_a_proposal_cannot_switch(model, profile, calibrations, tmp_path):
    """Nor to one for other processes."""
    with pytest.raises(PlanFileError, match="no proposed plan"):
        basis(model, folder=tmp_path, replan=True)
    plan = search(model, profile, typical_round(model.jobs, data(), 16384), 4).best()
    plan.save(tmp_path / "proposed-plan.json")
    with pytest.raises(PlanFileError, match="no proposed plan"):
        basis(model, folder=tmp_path, replan=True)


@pytest.mark.parametrize(
    ("resume", "plan", "strict", "refused"),
    [(True, None, "0", False), (True, "auto", "0", False), (False, None, "0", True),
     (True, "fsdp", "0", True), (True, None, "1", True)],
)  # fmt: skip
def test_plans_are_switched_at_a_checkpoint_and_never_in_strict_mode(
    monkeypatch, resume, plan, strict, refused
):
    """It is told before torch is imported."""
    monkeypatch.setenv("TLORA_FX_STRICT", strict)
    if not refused:
        require_replannable(resume=resume, plan=plan)
        return
    with pytest.raises(PlanNotRunnable, match="--replan cannot switch"):
        require_replannable(resume=resume, plan=plan)


def test_a_calibrated_profile_is_a_file_of_the_run(model, profile, tmp_path):
    """A measured one stays where it is."""
    plan = search(model, profile, typical_round(model.jobs, data(), 16384), 2).best()
    keeper(tmp_path, model, plan, profile, []).started([])

    assert Profile.load(tmp_path / "profile.json") == profile
    assert json.loads((tmp_path / "plan.json").read_text())["planner"] == "auto"
    measured = profile.model_copy(update={"source": "measured"})
    (tmp_path / "other").mkdir()
    keeper(tmp_path / "other", model, plan, measured, []).started([])
    assert not (tmp_path / "other" / "profile.json").exists()
