"""Times of rows that run as CUDA graphs: in profiles, and in what planners expect."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cost.estimators import shipped
from tests.cost.facts import layer_cost, load, row, small_model, small_round, term_at
from tests.parallel.graph_times import with_graphs
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.fit import LayerTimes
from tlora_fx.cost.hardware import GPUS
from tlora_fx.cost.model_facts import BASES, CAPTURED_TOKENS
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import roofline_profile, scaled
from tlora_fx.cost.step_time import CostModel, step_time

SMALL, LARGE = CAPTURED_TOKENS // 2, 16384


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return facts_of(small_model(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def plain(facts):
    """Layers so large that the device's time grows as the tokens do."""
    found = roofline_profile(GPUS["h200"], facts).model_copy(update={"source": "measured"})
    layers = [
        layer.model_copy(update={"points": [_large(point) for point in layer.points]})
        for layer in found.layers
    ]
    return found.model_copy(update={"layers": layers})


def _large(point):
    ms = (1 + point.sites / 10) * point.tokens * 1e-3
    first = None if point.first_ms is None else 1.5 * ms
    frozen = None if point.frozen_ms is None else ms
    times = {"forward_ms": ms, "backward_ms": 2 * ms, "first_ms": first, "frozen_ms": frozen}
    return point.model_copy(update=times)


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
            assert (two.forward_ms, two.backward_ms) == (one.forward_ms, one.backward_ms)
            assert two.saved_bytes == one.saved_bytes
    assert plain.as_captured() == plain


@pytest.mark.parametrize("gpu", ["a100", "b200"])
def test_scaling_scales_what_the_device_takes(profile, plain, facts, gpu):
    """To a GPU of another speed; the host takes what it took, or the device longer."""
    found, graphs = (scaled(one, GPUS[gpu], facts) for one in (profile, plain))
    points = [
        (before, after, graph)
        for one, two, three in zip(profile.layers, found.layers, graphs.layers, strict=True)
        for before, after, graph in zip(one.points, two.points, three.points, strict=True)
        if after.captured is not None
    ]

    assert points
    for before, after, graph in points:
        assert after.captured.forward_ms == pytest.approx(graph.forward_ms)
        assert after.captured.backward_ms == pytest.approx(graph.backward_ms)
        if before.waits("forward_ms"):
            assert after.forward_ms == max(before.forward_ms, after.captured.forward_ms)
    assert any(before.waits("forward_ms") for before, _, _ in points)


def test_a_launched_layer_takes_as_long_as_the_slower_of_host_and_device(profile, plain):
    """The host as long for few tokens as for many; the device what graphs take."""
    for layer, alone in zip(profile.layers, plain.layers, strict=True):
        times, device = LayerTimes.of(layer), LayerTimes.of(alone)
        for point in layer.points:
            start, site, job_site = times.hosts["forward"]
            host = start + site * point.sites + job_site * point.job_sites
            waited = max(host, term_at(times.forward, point))
            assert waited == pytest.approx(point.forward_ms, rel=0.05)
            assert term_at(times.forward, point) == term_at(device.forward, point)
        assert times.hosts["forward"].any()
        assert not device.hosts["forward"].any()


def test_the_host_takes_as_long_for_a_layer_that_is_cut():
    """Of sites and of all else apart, which only bare layers tell: they are measured whole."""
    facts = BASES["llama-3-8b"].facts({"job": 8})
    cost = CostModel(facts, shipped("llama-3-8b"))
    given = load(512, jobs=1)
    whole, cut = (layer_cost(cost, 1, given, tp) for tp in (1, 2))
    alone, half = (layer_cost(cost, 1, given, tp, launched=False) for tp in (1, 2))

    assert half.forward < 0.7 * alone.forward
    assert (cut.forward, cut.backward) == (whole.forward, whole.backward)
    start, site, _ = np.moveaxis(cost.clock((2,)).tables.host, -1, 0)
    assert (start > 0).all()
    assert (site > 0).all()


@pytest.mark.parametrize(
    ("fields", "captured"),
    [
        ({}, True),
        ({"mesh": MeshShape(dp=2)}, True),
        ({"mesh": MeshShape(tp=2)}, True),
        ({"mesh": MeshShape(dp=2), "shard_base": True}, True),
        ({"mesh": MeshShape(pp=2), "cuts": (1,)}, True),
        ({"mesh": MeshShape(pp=2, dp=2), "cuts": (1,), "shard_base": True}, False),
        ({"nano_batches": 2}, False),
    ],
)
def test_only_plans_that_capture_expect_it(profile, plain, facts, fields, captured):
    """Small rows of a plan that runs them as graphs; under other plans the host launches them."""
    plan = Plan(planner="test", **fields)
    whole, device = CostModel(facts, profile), CostModel(facts, plain)

    assert plan.captures is captured
    small, large = (row(whole, plan, load(n)) / row(device, plan, load(n)) for n in (SMALL, LARGE))
    assert large == pytest.approx(1)
    assert small == pytest.approx(1) if captured else small > 1.5


def test_a_row_that_processes_cut_among_them_may_be_larger(profile, facts):
    """Each has less to do of it, and as much to launch."""

    def slower(point):
        times = {"forward_ms": 100 * point.forward_ms, "backward_ms": 100 * point.backward_ms}
        return point.model_copy(update=times if point.captured else {})

    layers = [
        layer.model_copy(update={"points": [slower(point) for point in layer.points]})
        for layer in profile.layers
    ]
    cost = CostModel(facts, profile.model_copy(update={"layers": layers}))
    given = load(2 * CAPTURED_TOKENS)
    alone, cut = (row(cost, Plan(planner="test", mesh=MeshShape(tp=tp)), given) for tp in (1, 2))

    assert cut < 0.1 * alone


def test_a_base_that_is_sharded_over_nodes_is_launched(profile, plain, facts):
    """A collective gathers it, which no graph holds."""
    plan = Plan(planner="test", mesh=MeshShape(dp=2), shard_base=True)
    near, far, device = (
        row(CostModel(facts, one, per_node), plan, load(SMALL))
        for one, per_node in ((profile, 2), (profile, 1), (plain, 1))
    )

    assert near < device < far


@pytest.mark.parametrize(
    ("gpu", "mesh", "hides"),
    [("NVIDIA H200", MeshShape(), True), ("NVIDIA H200", MeshShape(dp=2), True),
     ("cpu", MeshShape(), False)],
)  # fmt: skip
def test_rows_are_packed_while_gpus_run_the_round_before(profile, facts, gpu, mesh, hides):
    """Cores that compute have no time left; beyond the round, packing is waited for everywhere."""
    hardware = profile.hardware.model_copy(update={"gpu": gpu})
    plan = Plan(planner="replicated" if mesh.dp > 1 else "single", mesh=mesh)

    def told(ms):
        points = [point.model_copy(update={"ms": ms}) for point in profile.host]
        own = profile.model_copy(update={"host": points, "hardware": hardware})
        return step_time(CostModel(facts, own), plan, small_round())

    rest = told(0.0).seconds * 1e3

    assert told(rest / 2).host == pytest.approx(0.0 if hides else rest / 2)
    assert told(rest * 3).host == pytest.approx(rest * 2 if hides else rest * 3)
