"""Plans that are proposed to a run, by what its rounds took."""

from __future__ import annotations

import pytest

from tests.cost.facts import small_model, small_round
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import GPUS
from tlora_fx.cost.plan import MeshShape
from tlora_fx.cost.profile import CollectivePoint
from tlora_fx.cost.profile_sources import roofline_profile
from tlora_fx.cost.step_time import CostModel, step_time
from tlora_fx.planners.auto import search
from tlora_fx.planners.proposals import corrected, proposal

WORK = small_round()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def profile(model):
    """Over links by which it pays to cut each matrix."""
    fast = [
        CollectivePoint(operation=name, tier="node", processes=2, payload_bytes=size, ms=ms)
        for name in ("all-reduce", "all-gather", "send")
        for size, ms in ((2**16, 0.001), (2**24, 0.01))
    ]
    return roofline_profile(GPUS["h100"], facts_of(model)).model_copy(update={"collectives": fast})


@pytest.fixture(scope="module")
def tensor(model, profile):
    return search(model, profile, WORK, 2, meshes=[MeshShape(tp=2)]).best()


@pytest.mark.parametrize("slower", [0.5, 1, 3, 40])
def test_a_corrected_profile_predicts_what_was_measured(model, profile, tensor, slower):
    """Whatever it predicted before."""
    took = slower * tensor.estimate.step_seconds
    found = corrected(model, tensor, profile, WORK, took, 8)

    assert step_time(CostModel(facts_of(model), found), tensor, WORK).seconds == pytest.approx(
        took, rel=0.05
    )


def test_nothing_is_proposed_to_a_run_that_has_the_best_plan(model, profile):
    """Whose rounds take what was predicted."""
    best = search(model, profile, WORK, 2).best()
    took = best.estimate.step_seconds

    assert proposal(model, best, profile, WORK, took, gpus_per_node=8) is None


def test_a_faster_plan_is_proposed_with_its_estimate(model, profile):
    """A pipeline of one micro-batch leaves half of the processes idle."""
    slow = max(search(model, profile, WORK, 2).running, key=lambda one: one.time.seconds).plan
    took = slow.estimate.step_seconds
    better = proposal(model, slow, profile, WORK, took, gpus_per_node=8)

    assert better.estimate.step_seconds <= 0.9 * took
    assert better == search(model, profile, WORK, 2).best()


def test_a_proposal_keeps_to_the_meshes_that_are_wanted(model, profile):
    """Those of `--mesh`."""
    meshes = [MeshShape(pp=2)]
    slow = max(
        search(model, profile, WORK, 2, meshes=meshes).running, key=lambda one: one.time.seconds
    ).plan
    took = 2 * slow.estimate.step_seconds
    better = proposal(model, slow, profile, WORK, took, gpus_per_node=8, meshes=meshes)

    assert better is None or better.mesh == MeshShape(pp=2)


def linked(profile, rate):
    """The profile with links of so many bytes a millisecond."""
    points = [
        CollectivePoint(
            operation=name, tier="node", processes=2, payload_bytes=size, ms=size / rate
        )
        for name in ("all-reduce", "all-gather", "send")
        for size in (2**16, 2**24)
    ]
    return profile.model_copy(update={"collectives": points})


def slow_links(model, profile, tensor, work, rate):
    """The profile with links of this rate, and rows that do not wait for the host."""
    took = step_time(CostModel(facts_of(model), profile), tensor, work).seconds
    return linked(corrected(model, tensor, profile, work, 20 * took, 8), rate)


@pytest.mark.parametrize("slow", [False, True])
def test_nano_batches_are_proposed_where_links_are_slow(model, profile, tensor, slow):
    """Sums that take as long as computation can be hidden behind it."""
    work, meshes = small_round(512), [MeshShape(tp=2)]
    given = slow_links(model, profile, tensor, work, 1e6 if slow else 1e8)
    plan = search(model, given, work, 2, meshes=meshes).best()

    def proposed(plan, **how):
        took = step_time(CostModel(facts_of(model), given), plan, work).seconds
        return proposal(model, plan, given, work, took, gpus_per_node=8, meshes=meshes, **how)

    better = proposed(plan, nano_batches=(2, 4))
    assert (better is not None) is slow
    assert proposed(plan) is None
    if better is not None:
        assert better.nano_batches > 1
        assert better.estimate.step_seconds <= 0.9 * plan.estimate.step_seconds
        assert proposed(better, nano_batches=(2, 4)) is None


def test_jobs_whose_rows_run_whole_get_no_nano_batches(model, profile, tensor, monkeypatch):
    """A proposal that the run would refuse is none."""
    work, meshes = small_round(512), [MeshShape(tp=2)]
    given = slow_links(model, profile, tensor, work, 1e6)
    found = search(model, given, work, 2, meshes=meshes, nano_batches=(2, 4))
    assert found.best().nano_batches > 1

    noisy = [job.model_copy(update={"neftune_noise_alpha": 5.0}) for job in model.jobs]
    monkeypatch.setattr(model, "jobs", noisy)
    found = search(model, given, work, 2, meshes=meshes, nano_batches=(2, 4))
    assert {one.plan.nano_batches for one in found.running} == {1}
