"""The time of a step under a plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cost.facts import layer_cost, load, row, small_cost, small_model, small_round
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.load import Load, Round, round_of_jobs, work_of
from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.cost.pipeline_simulation import schedule_order, simulate
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.step_time import SQUARE, stage_times, step_time

FEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
ALONE = Plan(planner="test")


def plan(**fields):
    mesh = MeshShape(**{key: fields.pop(key) for key in ("pp", "dp", "tp") if key in fields})
    return Plan(planner="test", mesh=mesh, **fields)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def cost(model):
    return small_cost(model)


@pytest.fixture(scope="module")
def upper(tmp_path_factory):
    """Adapters in the upper half alone."""
    folder = tmp_path_factory.mktemp("upper")
    return small_cost(small_model(folder, target_modules=["q_proj"], layers_to_transform=[2, 3]))


def test_facts_count_what_the_model_holds(model):
    """All bytes of the base, and what each job trains."""
    facts = facts_of(model)
    held = sum(p.numel() * p.element_size() for p in model.backbone.model.parameters())
    buffers = facts.base_bytes - held

    assert 0 <= buffers < 256
    assert facts.trained == tuple(
        sum(p.numel() for p in model.net.parameters() if p.requires_grad) * r // 12 for r in (4, 8)
    )
    assert len({layer.structure for layer in facts.layers}) == 1


@FEW
@given(tokens=st.integers(2, 40_000), more=st.integers(1, 40_000), tp=st.sampled_from([1, 2, 4]))
def test_more_tokens_never_cost_less(cost, tokens, more, tp):
    """For a layer and for a whole row."""
    few, many = load(tokens), load(tokens + more)

    assert layer_cost(cost, 1, few, tp).forward <= layer_cost(cost, 1, many, tp).forward
    assert row(cost, plan(tp=tp), few) <= row(cost, plan(tp=tp), many)


@FEW
@given(tokens=st.integers(2, 20_000))
def test_more_ranks_never_cost_less(cost, tokens):
    """The same tokens of the job with the larger rank."""
    small, large = Load((tokens, 0), tokens * 8.0), Load((0, tokens), tokens * 8.0)

    assert layer_cost(cost, 1, small).forward <= layer_cost(cost, 1, large).forward


def merged(*loads):
    """The load of all their sequences in one row."""
    tokens = zip(*(each.tokens for each in loads), strict=True)
    others = zip(*((each.squares, each.sequences, each.targets) for each in loads), strict=True)
    return Load(tuple(map(sum, tokens)), *map(sum, others))


@FEW
@given(first=st.integers(0, 5000), second=st.integers(0, 5000))
def test_work_adds_up(cost, first, second):
    """Of two rows merged, all but the constants of a layer is the sum."""
    layer, hidden = cost.facts.layers[0], cost.facts.hidden
    one, two = load(first), load(second)
    found = work_of([layer], [one, two, merged(one, two)], hidden)

    for name in ("squares", "site_tokens", "rank_tokens"):
        first, second, both = getattr(found, name)[0, :, 0]
        assert both == pytest.approx(first + second)


def test_layers_below_the_lowest_adapter_have_no_backward(upper):
    """Nor do they keep anything."""
    below, first = layer_cost(upper, 1, load(512)), layer_cost(upper, 2, load(512))

    assert upper.facts.lowest == 2
    assert (below.backward, below.saved) == (0, 0)
    assert first.backward > 0


def test_a_sharded_stage_below_the_lowest_adapter_gathers_for_its_forward_alone(upper):
    """Its backward takes nothing."""
    staged = plan(pp=2, dp=2, cuts=(2,), micro_batches=2, shard_base=True)
    times = stage_times(upper, staged, [load(64)] * 2)

    assert min(times.forward[0]) > 0
    assert not np.any(times.backward[0])
    assert min(times.backward[1]) > 0


def test_an_estimate_of_a_pipeline_is_its_simulation(cost):
    """The event simulation of the same stage times, and nothing else but the ends of a step."""
    staged = plan(pp=2, cuts=(2,), micro_batches=4)
    work = small_round()
    loads = work.parts(4, SQUARE * cost.facts.hidden)
    order = schedule_order("1f1b", 2, 2, 4)
    found = simulate(order, stage_times(cost, staged, loads), 2)

    time = step_time(cost, staged, work)
    assert (time.compute + time.bubble) * 1e-3 == pytest.approx(found.makespan_seconds)
    assert time.compute * 1e-3 == pytest.approx(max(found.busy_seconds))


def test_a_pipeline_does_the_work_of_one_process(cost):
    """All stages together, but for communication."""
    loads = [load(256)] * 4
    times = stage_times(cost, plan(pp=2, cuts=(1,), micro_batches=4), loads)
    whole = sum(map(sum, (*times.forward, *times.backward))) * 1e3

    assert whole == pytest.approx(4 * row(cost, ALONE, load(256)))


def test_recomputing_costs_a_forward(cost):
    """Of every layer with a backward."""
    again = row(cost, plan(recompute=True), load(1024))
    forward = sum(layer_cost(cost, place, load(1024)).forward for place in range(4))

    assert again == pytest.approx(row(cost, ALONE, load(1024)) + forward)


def test_gathering_is_hidden_behind_compute(cost):
    """A large row pays for the first gather and for unpacking; a small one for all of them."""
    sharded, kept = plan(dp=4, shard_base=True), plan(dp=4, shard_base=True, keep_gathered=True)
    small = load(64)

    assert row(cost, plan(dp=4), small) < row(cost, kept, small)
    assert row(cost, kept, small) < row(cost, sharded, small)
    large = load(400_000)
    assert row(cost, sharded, large) < 1.05 * row(cost, plan(dp=4), large)


def test_stages_wait_for_the_weights_of_each_micro_batch(cost):
    """Or once a round where they are kept; a stage with a single layer can hide nothing."""
    fields = {"pp": 2, "dp": 4, "cuts": (3,), "micro_batches": 4}
    loads = [load(64)] * 4
    plain, used, kept = (
        stage_times(cost, plan(**fields, **more), loads)
        for more in ({}, {"shard_base": True}, {"shard_base": True, "keep_gathered": True})
    )

    for stage in (0, 1):
        first, *others = kept.forward[stage]
        assert min(used.forward[stage]) > max(plain.forward[stage])
        assert min(used.backward[stage]) > max(plain.backward[stage])
        assert first == used.forward[stage][0]
        assert max(others) < first
        assert kept.backward[stage] == pytest.approx(plain.backward[stage])
    # Only embeddings are gathered again.
    assert kept.forward[1][1:] == pytest.approx(plain.forward[1][1:])


def test_a_sharded_pipeline_gathers_what_replicas_gather(cost):
    """One after the other, stages do the work of one process, but for what they hide at cuts.

    On rows that neither runs as a graph.
    """
    one, given = plan(dp=4, shard_base=True), load(2 * CAPTURED_TOKENS)
    staged = plan(pp=2, dp=4, cuts=(2,), micro_batches=2, shard_base=True)
    times = stage_times(cost, staged, [given] * 2)
    whole = sum(column[0] for column in (*times.forward, *times.backward)) * 1e3

    assert 1 - 1e-9 < whole / row(cost, one, given) < 1.5


@FEW
@given(tokens=st.integers(2, 20_000), cut=st.integers(1, 3), kept=st.booleans())
def test_sharding_a_pipeline_never_makes_it_faster(cost, tokens, cut, kept):
    """And large rounds hide most of it."""
    fields = {"pp": 2, "dp": 4, "cuts": (cut,), "micro_batches": 2}
    work = Round((((tokens,) * 8, (tokens,) * 8),))
    plain = step_time(cost, plan(**fields), work)
    sharded = step_time(cost, plan(**fields, shard_base=True, keep_gathered=kept), work)

    assert sharded.seconds >= plain.seconds


def test_nano_batches_hide_the_shorter_part(cost):
    """On a large row two are faster than one; on a tiny one their launches cost more."""
    one, two = plan(tp=2), plan(tp=2, nano_batches=2)

    assert row(cost, two, load(4_000_000)) < row(cost, one, load(4_000_000))
    assert row(cost, two, load(16)) > 0.9 * row(cost, one, load(16))


def test_tensor_parallelism_between_nodes_costs_more(model):
    """Two processes a node, four pieces."""
    near, far = small_cost(model), small_cost(model, per_node=2)

    assert row(near, plan(tp=4), load(4096)) < row(far, plan(tp=4), load(4096))


def test_a_round_is_cut_as_it_will_be(model):
    """Between sequences, into a multiple of what a plan needs, nothing lost."""
    work = Round((((10, 20, 30), (40, 5)), ((7,), ())))
    parts = work.parts(4, 384.0)

    assert len(parts) == 4
    assert merged(*parts) == work.load


def test_a_round_follows_the_jobs(model):
    """Batch sizes, accumulation and length as their files say; scaled to a number of tokens."""
    jobs = [
        one.model_copy(update={"gradient_accumulation_steps": steps, "max_length": 32})
        for one, steps in zip(model.jobs, (1, 2), strict=True)
    ]
    plain = round_of_jobs(jobs)

    assert plain.load.tokens == (8 * 32, 2 * 8 * 32)
    assert len(plain.rows) == 2
    assert round_of_jobs(jobs, length=16).load.total == plain.load.total // 2
    assert round_of_jobs(jobs, tokens=plain.load.total * 3).load.total == plain.load.total * 3
