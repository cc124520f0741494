"""Times of rows that run as CUDA graphs: in profiles, and in what planners expect."""

from __future__ import annotations

import pytest

from tests.planners.facts import load, small_model
from tests.planners.graph_times import SHARE, with_graphs
from tlora_fx.planners.cost import Cluster, CostModel
from tlora_fx.planners.facts import facts_of
from tlora_fx.planners.hardware import GPUS
from tlora_fx.planners.model_facts import CAPTURED_TOKENS
from tlora_fx.planners.plan import MeshShape, Plan
from tlora_fx.planners.profile import Profile
from tlora_fx.planners.roofline import roofline_profile
from tlora_fx.planners.scaling import scaled
from tlora_fx.planners.step_time import row_ms
from tlora_fx.scheduler.estimator_fit import BaseFit

SMALL, LARGE = CAPTURED_TOKENS // 2, 16384


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return facts_of(small_model(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def plain(facts):
    return roofline_profile(GPUS["h200"], facts).model_copy(update={"source": "measured"})


@pytest.fixture(scope="module")
def profile(plain):
    return with_graphs(plain)


def test_it_survives_its_file(profile, tmp_path):
    """A profile without graphs, as older ones are, is read too."""
    profile.save(tmp_path / "profile.json")

    assert Profile.load(tmp_path / "profile.json") == profile
    assert '"captured"' in (tmp_path / "profile.json").read_text()


def test_graphs_replace_times_where_there_are_any(profile, plain):
    """And nothing else: bytes, noise, and rows that are too large stay."""
    for before, after in zip(plain.layers, profile.as_captured().layers, strict=True):
        for one, two in zip(before.points, after.points, strict=True):
            share = SHARE if one.tokens <= CAPTURED_TOKENS else 1
            assert two.forward_ms == pytest.approx(one.forward_ms * share)
            assert two.backward_ms == pytest.approx(one.backward_ms * share)
            assert two.saved_bytes == one.saved_bytes
    assert plain.as_captured() == plain


def test_scaling_scales_both(profile, facts):
    """To a GPU of another speed, times of graphs change as the others do."""
    found = scaled(profile, GPUS["a100"], facts)

    for layer in found.layers:
        for point in layer.points:
            if point.captured is not None:
                assert point.captured.forward_ms == pytest.approx(point.forward_ms * SHARE)
                assert point.captured.backward_ms == pytest.approx(point.backward_ms * SHARE)
    assert any(point.captured for layer in found.layers for point in layer.points)


@pytest.mark.parametrize(
    ("fields", "captured"),
    [
        ({}, True),
        ({"mesh": MeshShape(dp=2)}, True),
        ({"mesh": MeshShape(tp=2)}, True),
        ({"mesh": MeshShape(dp=2), "shard_base": True}, True),
        ({"mesh": MeshShape(pp=2), "cuts": (1,)}, False),
        ({"nano_batches": 2}, False),
    ],
)
def test_only_plans_that_capture_expect_it(profile, plain, facts, fields, captured):
    """Small rows of a plan that runs them as graphs; under other plans rows cost as before."""
    plan = Plan(planner="test", **fields)
    with_graphs, without = CostModel(facts, profile), CostModel(facts, plain)

    assert plan.captures is captured
    small, large = (
        row_ms(with_graphs, plan, load(n)) / row_ms(without, plan, load(n)) for n in (SMALL, LARGE)
    )
    if captured:
        # Slopes are fitted to rows of all sizes, so large rows are not quite as before.
        assert small < 0.9
        assert small < large < 1.05
    else:
        assert (small, large) == pytest.approx((1, 1))


def test_a_base_that_is_sharded_over_nodes_is_launched(profile, plain, facts):
    """A collective gathers it, which no graph holds."""
    plan = Plan(planner="test", mesh=MeshShape(dp=2), shard_base=True)
    near, far, without = (
        row_ms(CostModel(facts, one, Cluster(per_node)), plan, load(SMALL))
        for one, per_node in ((profile, 2), (profile, 1), (plain, 1))
    )

    assert near < far == without


def test_the_scheduler_expects_it_too(profile, plain, facts):
    """Its tables have the times of graphs, and behind them those without."""
    both, graphs, without = (
        BaseFit.of(facts, one, (1,)).forward for one in (profile, profile.as_captured(), plain)
    )

    assert (both[0] == graphs[0]).all()
    assert (both[1] == without[1]).all()
    assert (both[0] != both[1]).any()
