"""The memory of a process under a plan."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cost.facts import small_cost, small_model, small_round
from tlora_fx.cost.hardware import GIB
from tlora_fx.cost.load import Round
from tlora_fx.cost.memory import (
    device_bytes,
    fits,
    in_flight,
    largest_length,
    memory_of,
    require_fits,
    usable_bytes,
)
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import JobTooLong

FEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def plan(**fields):
    mesh = MeshShape(**{key: fields.pop(key) for key in ("pp", "dp", "tp") if key in fields})
    return Plan(planner="test", mesh=mesh, **fields)


@pytest.fixture(scope="module")
def cost(tmp_path_factory):
    return small_cost(small_model(tmp_path_factory.mktemp("base")))


def with_memory(cost, bytes_of):
    """The same model on a GPU with so much memory, all of which it may use."""
    profile = cost.profile
    hardware = profile.hardware.model_copy(update={"memory_gib": bytes_of / 0.96 / GIB + 1.5})
    made = type(cost)(cost.facts, profile.model_copy(update={"hardware": hardware}))
    assert usable_bytes(made.profile) == pytest.approx(bytes_of, rel=1e-3)
    return made


def test_what_stands_between_steps_is_counted_exactly(cost):
    """The base, and sixteen bytes for each number that AdamW trains in float32."""
    found = memory_of(cost, plan(), small_round())
    tails = sum(layer.tail_bytes for layer in cost.facts.layers)

    assert found.base == cost.facts.base_bytes + tails
    assert found.adapters == 16 * sum(cost.facts.trained)
    assert found.gathered == 0


def test_shards_are_parts_and_gathered_layers_come_on_top(cost):
    """A quarter of the base on four replicas; kept, all of it is there as well."""
    facts, work = cost.facts, small_round()
    sharded = memory_of(cost, plan(dp=4, shard_base=True), work)
    kept = memory_of(cost, plan(dp=4, shard_base=True, keep_gathered=True), work)

    assert sharded.base == facts.base_bytes / 4
    # While the loss runs, embeddings are not gathered.
    assert sharded.gathered < kept.gathered == facts.base_bytes - facts.root_bytes


def test_stages_hold_their_shards_and_the_layers_that_are_gathered(cost):
    """A fourth of the stage with the head; two of its layers, or what is kept for the round."""
    facts, work = cost.facts, small_round()
    layer = facts.layers[0].weight_bytes
    fields = {"pp": 2, "dp": 4, "cuts": (3,), "micro_batches": 2}
    whole = memory_of(cost, plan(**fields), work)
    sharded = memory_of(cost, plan(**fields, shard_base=True), work)
    kept = memory_of(cost, plan(**fields, shard_base=True, keep_gathered=True), work)

    # The stage of three layers and the embedding is the fuller one.
    assert sharded.base == (3 * layer + facts.root_bytes) / 4
    assert whole.base == 3 * layer + facts.root_bytes + 3 * facts.layers[0].tail_bytes
    assert (whole.adapters, whole.activations) == (sharded.adapters, sharded.activations)
    assert (whole.gathered, sharded.gathered) == (0, 2 * layer)
    assert kept.gathered == 3 * layer
    # While the loss runs, the head, and the last layer for its backward; or all that is kept.
    fields["cuts"] = (1,)
    last = memory_of(cost, plan(**fields, shard_base=True), work)
    assert last.gathered == facts.head_bytes + layer
    last = memory_of(cost, plan(**fields, shard_base=True, keep_gathered=True), work)
    assert last.gathered == facts.head_bytes + 3 * layer


@FEW
@given(length=st.integers(2, 2000), cut=st.integers(1, 3))
def test_stages_that_keep_what_is_gathered_hold_more(cost, length, cut):
    """Than those that let go of it, but never more than all of it beside the shards."""
    work, facts = small_round(16, length), cost.facts
    fields = {"pp": 2, "dp": 4, "cuts": (cut,), "micro_batches": 2, "shard_base": True}
    used = memory_of(cost, plan(**fields), work)
    kept = memory_of(cost, plan(**fields, keep_gathered=True), work)

    assert used.total <= kept.total
    assert kept.total - used.total <= facts.base_bytes
    assert kept.gathered <= facts.base_bytes + facts.root_bytes


@FEW
@given(length=st.integers(2, 2000), more=st.integers(0, 2000))
def test_longer_samples_never_take_less(cost, length, more):
    """Under any plan, as long as rows are not cut into more parts."""
    for one in (plan(), plan(recompute=True), plan(pp=2, cuts=(2,), micro_batches=2)):
        short = memory_of(cost, one, small_round(4, length)).total
        assert short <= memory_of(cost, one, small_round(4, length + more)).total


def test_recomputing_keeps_less(cost):
    """One value a layer."""
    work = small_round(length=1024)

    plain, again = memory_of(cost, plan(), work), memory_of(cost, plan(recompute=True), work)
    assert again.activations < 0.3 * plain.activations
    half = memory_of(cost, plan(recompute=True, recompute_budget=0.5), work)
    assert half.activations == pytest.approx((plain.activations + again.activations) / 2)


def test_micro_batches_in_flight_follow_the_schedule():
    """1F1B holds as many as stages follow, GPipe all of them."""
    staged = plan(pp=4, cuts=(1, 2, 3), micro_batches=8)

    assert [in_flight(staged, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    piped = staged.model_copy(update={"schedule": "gpipe"})
    assert in_flight(piped, 3, 8) == 8
    twice = plan(pp=2, cuts=(1, 2, 3), micro_batches=8, schedule="interleaved")
    assert in_flight(twice, 0, 8) > in_flight(twice, 1, 8) > 1


def test_a_job_too_long_is_named_with_what_fits(cost):
    """And with that length it fits."""
    work = Round((((64,) * 4, (512,) * 4),))
    wanted = memory_of(cost, plan(), work).total
    small = with_memory(cost, 0.8 * wanted)

    with pytest.raises(JobTooLong) as error:
        require_fits(small, plan(), work)
    length = largest_length(small, plan(), work, 1)
    assert "job 'two'" in error.value.what
    assert f"max_length to {length} or less" in error.value.help
    assert fits(small, memory_of(small, plan(), work.shortened(1, length)))
    assert not fits(small, memory_of(small, plan(), work.shortened(1, length + 1)))


def test_a_model_too_large_says_so(cost):
    """No length helps."""
    small = with_memory(cost, 0.5 * cost.facts.base_bytes)

    with pytest.raises(JobTooLong, match="even its shortest samples do not fit"):
        require_fits(small, plan(), small_round())


def test_a_process_takes_what_fits_into_what_is_usable_and_its_graphs_on_top(cost):
    """Without activations a base that fills what is usable takes the whole device."""
    profile = with_memory(cost, 8 * GIB).profile
    size, base = profile.hardware.memory_gib * GIB, {"base": usable_bytes(profile)}

    assert device_bytes(base) == pytest.approx(size)
    assert device_bytes(base | {"activations": 96.0}) == pytest.approx(size + 200.0)
