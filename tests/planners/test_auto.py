"""The planner that chooses among all plans."""

from __future__ import annotations

import pytest

from tests.cost.facts import small_model, small_round
from tlora_fx.cost import profile_sources
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import GPUS
from tlora_fx.cost.mesh_fits import every_mesh
from tlora_fx.cost.plan import MeshShape, Plan, model_fingerprint
from tlora_fx.cost.profile_sources import roofline_profile
from tlora_fx.errors import JobTooLong, MeshDoesNotFit, NoPlanFits, ProfileMissing
from tlora_fx.planners.auto import Auto, search
from tlora_fx.planners.protocol import find_planner


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def profile(model):
    return roofline_profile(GPUS["h100"], facts_of(model))


def test_every_mesh_has_all_gpus():
    """Each way once."""
    meshes = list(every_mesh(12))

    assert all(mesh.size == 12 for mesh in meshes)
    assert len(set(meshes)) == len(meshes) == 18


def test_the_best_comes_first_and_reasons_are_kept(model, profile):
    """Dropped plans stand last, each with why."""
    found = search(model, profile, small_round(), 8, 4)
    times = [one.time.seconds for one in found.running]

    assert times == sorted(times)
    assert found.best() == found.running[0].plan
    assert [one.runs for one in found.candidates] == sorted(
        (one.runs for one in found.candidates), reverse=True
    )
    reasons = {str(one.plan.mesh): one.reason for one in found.dropped}
    assert "node of 4" in reasons["pp=1,dp=1,tp=8"]
    assert "key-value heads" in reasons["pp=1,dp=2,tp=4"]
    assert "stages need a layer each" in reasons["pp=8,dp=1,tp=1"]


def test_a_cpu_without_a_profile_is_no_gpu_without_a_data_sheet(model, monkeypatch, tmp_path):
    """What helps is another plan, or measuring."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    for allowed in (False, True):
        with pytest.raises(ProfileMissing, match="on this CPU") as raised:
            Auto().plan(model, options={"processes": 2, "allow_estimated": allowed})
        assert "--plan replicated, tensor, fsdp or pipeline" in str(raised.value)
        assert "tlora-fx profile" in str(raised.value)


def test_a_plan_carries_its_estimate(model, profile):
    """What was expected, by which profile, and that nobody measured it."""
    plan = search(model, profile, small_round(), 2).best()

    assert plan.model == model_fingerprint(model)
    assert plan.estimate is not None
    assert plan.estimate.estimated
    assert plan.estimate.profile == profile.name
    assert plan.estimate.step_seconds > 0


def test_the_same_search_gives_the_same_plan(model, profile, tmp_path):
    """As a file too."""
    one, two = (search(model, profile, small_round(), 4).best() for _ in range(2))
    one.save(tmp_path / "plan.json")

    assert one == two == Plan.load(tmp_path / "plan.json")


def test_short_memory_makes_it_recompute_or_shard(model, profile):
    """Plans that hold the base whole do not fit into what two shards need."""
    facts = facts_of(model)
    gib = (0.85 * facts.base_bytes + 16 * sum(facts.trained)) / 0.96 / 2**30 + 1.5
    hardware = profile.hardware.model_copy(update={"memory_gib": gib})
    small = profile.model_copy(update={"hardware": hardware})
    mesh = MeshShape(dp=8)
    found = search(model, small, small_round(8, 2), 8, meshes=[mesh])

    assert all(one.plan.recompute for one in found.dropped if "GiB" not in one.reason)
    assert any("GiB" in one.reason for one in found.dropped)


def test_stages_are_sharded_where_they_do_not_fit_whole(model, profile):
    """A pipeline over replicas is offered with a sharded base; with little memory it runs alone."""
    facts, work, mesh = facts_of(model), small_round(8, 2), MeshShape(pp=2, dp=4)
    plenty = search(model, profile, work, 8, meshes=[mesh])
    gib = (0.35 * facts.base_bytes + 16 * sum(facts.trained)) / 0.96 / 2**30 + 1.5
    hardware = profile.hardware.model_copy(update={"memory_gib": gib})
    short = search(model, profile.model_copy(update={"hardware": hardware}), work, 8, meshes=[mesh])

    found = {(one.plan.shard_base, one.plan.keep_gathered) for one in plenty.running}
    assert found == {(False, False), (True, False), (True, True)}
    assert not plenty.best().shard_base
    assert short.running
    assert all(one.plan.shard_base for one in short.running)


def test_what_never_fits_is_an_error(model, profile):
    """The job is named, or the reasons are."""
    hardware = profile.hardware.model_copy(update={"memory_gib": 1.5001})
    small = profile.model_copy(update={"hardware": hardware})

    with pytest.raises(JobTooLong):
        Auto().plan(model, profile=small, options={"processes": 2, "round": small_round()})
    with pytest.raises(NoPlanFits, match="tp=3 does not stay inside"):
        search(model, profile, small_round(), 3, meshes=[MeshShape(tp=3)]).best()


def test_a_calibration_refuses_nothing_for_its_memory(model, profile):
    """It is an estimate: the plan with the least memory is tried."""
    hardware = profile.hardware.model_copy(update={"memory_gib": 1.5001})
    small = profile.model_copy(update={"hardware": hardware, "source": "calibrated"})
    plan = Auto().plan(model, profile=small, options={"processes": 2, "round": small_round()})
    dropped = search(model, small, small_round(), 2).dropped

    assert plan.estimate is not None
    assert plan.estimate.memory_bytes == min(
        round(one.memory.total) for one in dropped if one.memory is not None
    )


def test_memory_is_that_of_the_longest_round(model, profile):
    """Times are those of a typical one."""
    short, long = small_round(4), small_round(64)
    [one] = search(model, profile, short, 1, longest=long).running[:1]
    [same] = search(model, profile, short, 1).running[:1]
    [other] = search(model, profile, long, 1).running[:1]

    assert one.time == same.time
    assert one.memory == other.memory != same.memory


def test_a_mesh_that_does_not_fit_is_refused(model, profile):
    """As every planner does."""
    with pytest.raises(MeshDoesNotFit):
        Auto().plan(model, MeshShape(tp=3), profile)


def test_training_asks_for_measurements(model, monkeypatch, tmp_path):
    """Without a profile of the device at hand there is no plan."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path))
    monkeypatch.setattr(profile_sources, "SHIPPED", tmp_path)

    with pytest.raises(ProfileMissing, match="tlora-fx profile"):
        Auto().plan(model, profile="h200", options={"processes": 2})


def test_planners_are_found_by_name():
    """Those that a module of this room defines."""
    assert isinstance(find_planner("auto"), Auto)
