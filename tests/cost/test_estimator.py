"""Times and memory of groups."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.estimators import BASE, estimator, seconds, shipped, some
from tests.parallel.graph_times import without_graphs
from tlora_fx.cost.estimator import ProfileEstimator, table_of
from tlora_fx.cost.hardware import Cluster, Tier
from tlora_fx.cost.load import Demand, demand_of
from tlora_fx.cost.model_facts import BASES
from tlora_fx.cost.profile_sources import profiles_for
from tlora_fx.errors import (
    BaseUnknown,
    DemandWrong,
    EstimatorOption,
    ProfileMismatch,
    TargetUnknown,
)

JOBS = st.builds(
    some,
    rank=st.sampled_from([2, 4, 8, 16, 64]),
    batch=st.integers(1, 32),
    length=st.integers(2, 4096),
)
GROUPS = st.lists(JOBS, min_size=1, max_size=8).map(Demand.total)
GPUS = st.integers(1, 128)


@pytest.fixture(scope="module")
def known():
    return estimator()


@pytest.fixture(scope="module")
def small():
    """GPUs with so little memory that some of everything happens."""
    return estimator(memory_gib=24, tp=(1, 2, 4, 8))


@given(GROUPS, GPUS, st.sampled_from(get_args(Tier)))
def test_an_explanation_is_what_the_scheduler_goes_by(known, group, gpus, tier):
    """The terms add up to the seconds that a batch of groups gets."""
    told = known.explain(BASE, group, gpus, tier)
    found = known.seconds(BASE, group.row()[None], np.array([gpus]), [tier])[0]

    assert sum(told.terms.values()) == pytest.approx(found, rel=1e-12)
    assert sum(told.memory.values()) == pytest.approx(told.memory_bytes, rel=1e-12)
    assert told.layout.mesh.size <= gpus


@given(GROUPS, GPUS)
def test_an_explanation_is_right_where_memory_is_short(small, group, gpus):
    """Also sharded bases and pipelines get the seconds that the scheduler goes by, or none."""
    tier = small.cluster.min_tier(gpus)
    told = small.explain(BASE, group, gpus, tier)

    assert told.seconds == pytest.approx(seconds(small, group, gpus), rel=1e-12)
    assert (told.layout is None) == (told.seconds == np.inf) == bool(told.why_not)


@given(st.lists(JOBS, min_size=1, max_size=6), GPUS, st.sampled_from(get_args(Tier)))
def test_one_job_that_cannot_run_in_a_graph_keeps_its_group_from_it(known, jobs, gpus, tier):
    """The group takes as long as one in which no job can, and never less than with graphs."""
    first, *others = jobs
    group = Demand.total([first._replace(launched=1.0), *others])
    every = Demand.total([one._replace(launched=1.0) for one in jobs])
    asked = group.row()[None], np.array([gpus]), [tier]

    assert group.launched == 1
    assert known.seconds(BASE, *asked) == known.seconds(BASE, every.row()[None], *asked[1:])
    before = known.explain(BASE, Demand.total(jobs), gpus, tier)
    told = known.explain(BASE, group, gpus, tier)
    assert told.seconds >= before.seconds
    assert told.memory_bytes == before.memory_bytes or told.layout != before.layout


def test_it_is_told_where_a_step_is_explained(known):
    """Only where it makes a difference: not where nothing is known of graphs, or none is run."""
    group = Demand.total([some()._replace(launched=1.0), some(), some()._replace(launched=1.0)])
    plain = ProfileEstimator({BASE: without_graphs(shipped())}, known.cluster)
    told = known.explain(BASE, group, 1, "gpu")

    assert told.launched == 2
    assert "no CUDA graphs: 2 of its jobs cannot run in one" in table_of(told)
    assert known.explain(BASE, some(), 1, "gpu").launched == 0
    assert plain.explain(BASE, group, 1, "gpu").launched == 0
    slow = estimator(fused=False)
    assert slow.explain(BASE, group, 1, "gpu").launched == 0
    long = some(batch=8, length=1024)._replace(launched=1.0)
    assert known.explain(BASE, long, 1, "gpu").launched == 0
    assert seconds(slow, group, 1) == seconds(slow, group._replace(launched=0.0), 1)


@given(GROUPS, GPUS, st.integers(1, 128))
def test_more_gpus_are_never_slower(known, group, gpus, more):
    """A layout need not use all of them."""
    assert seconds(known, group, gpus + more) <= seconds(known, group, gpus) * (1 + 1e-12)


@given(GROUPS, JOBS)
def test_on_one_gpu_a_job_more_never_takes_less_time(known, group, job):
    """Nor do two together take longer than one after the other.

    But for six hundredths: a layer on 16,384 tokens was measured 5.7 % above two on 8,192, so a
    job more may open a second, cheaper row, or close two rows to a dearer one.
    """
    both = seconds(known, group.plus(job), 1)
    each = seconds(known, group, 1), seconds(known, job, 1)

    assert max(each) <= both * 1.06
    assert both <= sum(each) * 1.06


@given(st.integers(1, 16), st.integers(16, 2048), st.integers(1, 512), GPUS)
def test_longer_samples_never_take_less_time(known, batch, length, more, gpus):
    """But for a hundredth: by what was measured two rows may be cheaper than a longer one."""
    before = seconds(known, some(batch=batch, length=length), gpus)

    assert seconds(known, some(batch=batch, length=length + more), gpus) >= 0.99 * before


@given(st.lists(st.tuples(GROUPS, GPUS), min_size=1, max_size=12))
def test_groups_are_costed_alone(small, groups):
    """What else is asked for in the same call changes nothing."""
    demands = np.array([group.row() for group, _ in groups])
    gpus = np.array([count for _, count in groups])
    tiers = [small.cluster.min_tier(count) for _, count in groups]
    together = small.seconds(BASE, demands, gpus, tiers)

    alone = [seconds(small, group, count) for group, count in groups]
    assert together == pytest.approx(np.array(alone), rel=1e-12)


@given(GROUPS, GPUS)
def test_what_fits_surely_fits(small, group, gpus):
    """The quick bound on memory is never below what is counted."""
    known = small.base(BASE)
    groups = known.groups(group.row()[None], np.array([1]), ["gpu"])
    told = small.explain(BASE, group, 1, "gpu")

    assert not known.fits_surely(groups)[0] or told.layout is not None


@given(GROUPS, GPUS)
def test_busy_is_a_part(known, group, gpus):
    """And grows with what shares the GPUs."""
    rows, count = group.row()[None], np.array([gpus])
    busy = known.busy(BASE, rows, count, np.array([seconds(known, group, gpus)]))[0]

    assert 0 < busy < 1


def test_merging_fills_a_gpu(known):
    """Eight small jobs together use more of it than one, which runs as a CUDA graph: 1.18 times."""
    busy = []
    for group in (some(), Demand.total([some()] * 8)):
        time = np.array([seconds(known, group, 1)])
        busy.append(known.busy(BASE, group.row()[None], np.array([1]), time)[0])

    assert busy[1] > 1.1 * busy[0]


def test_what_has_no_room_takes_for_ever(small):
    """It is said of each layout how much it needs."""
    told = small.explain(BASE, some(batch=1, length=60_000), 1, "gpu")

    assert told.seconds == np.inf
    assert "pp=1,dp=1,tp=1 needs" in told.why_not
    assert "nothing fits" in table_of(told)


def test_a_base_that_is_too_large_for_a_gpu_is_sharded():
    """Where tensor parallelism cannot be had and replicas can."""
    of = estimator(memory_gib=16, tp=(1,))

    told = of.explain(BASE, some(batch=8), 4, "node")
    assert told.layout.shard_base
    assert told.terms["gathers"] > 0
    assert seconds(of, some(batch=8), 1) == np.inf


def test_far_gpus_are_slower(known):
    """Over a rack than in a node, over the cluster than in a rack."""
    group = Demand.total([some(rank=64, batch=16)] * 4)
    near, rack, far = (
        known.seconds(BASE, group.row()[None], np.array([8]), [tier])[0]
        for tier in ("node", "rack", "cluster")
    )

    assert near < rack < far


def test_without_a_kernel_fuser_each_adapter_is_paid():
    """Eight jobs cost about eight times the adapters of one."""
    of = estimator(fused=False)
    terms = [
        of.explain(BASE, Demand.total([some(batch=1)] * count), 1, "gpu").terms for count in (1, 8)
    ]

    assert terms[1]["adapters"] == pytest.approx(8 * terms[0]["adapters"])
    assert seconds(of, Demand.total([some()] * 8), 1) > seconds(
        estimator(), Demand.total([some()] * 8), 1
    )


def test_nano_batches_hide_what_tensor_parallelism_says():
    """They are taken only where they pay."""
    plain, hidden = (
        estimator(nano_batches=counts, tp=(1, 2, 4, 8)).explain(
            BASE, some(batch=1, length=16_000), 8, "node"
        )
        for counts in ((1,), (1, 2, 4))
    )

    assert hidden.seconds <= plain.seconds
    assert hidden.terms.get("overlap", 0.0) <= 0
    assert hidden.terms["tensor-parallel"] > 0


def test_solo_times_are_kept_and_not_counted():
    """Only what policies ask for counts."""
    of = estimator()
    first, second = of.solo(BASE, some(), 2), of.solo(BASE, some(), 2)
    seconds(of, some(), 2)

    assert first == second == seconds(of, some(), 2)
    assert of.evaluations == 2


def test_only_measured_sizes_of_tensor_parallelism_are_chosen(known):
    """Others are scaled, and are chosen where they are asked for."""
    wide = estimator(tp=(1, 2, 4, 8)).explain(BASE, some(batch=1), 8, "node")
    told = known.explain(BASE, some(batch=1), 8, "node")

    assert told.layout.mesh.tp <= 2
    assert not told.estimated
    assert wide.estimated == (wide.layout.mesh.tp > 2)


def test_a_base_without_a_profile_is_named(known):
    """With those that have one."""
    with pytest.raises(BaseUnknown, match="llama-3-8b"):
        known.seconds("llama-3-9b", some().row()[None], np.array([1]), ["gpu"])


def test_a_profile_of_other_hardware_is_refused():
    """Whatever it is asked for."""
    of = ProfileEstimator({BASE: shipped()}, Cluster(8, gpu="h100"))

    with pytest.raises(ProfileMismatch, match="H200"):
        seconds(of, some(), 1)


def test_estimated_profiles_are_for_those_who_ask():
    """There is none of an A100 that was measured."""
    with pytest.raises(ProfileMismatch, match="not measured on 'a100'"):
        profiles_for([BASE], "a100")

    found = profiles_for([BASE], "a100", allow_estimated=True)
    assert found[BASE].estimated
    assert profiles_for([BASE], "h200")[BASE] == shipped()


@pytest.mark.parametrize("options", [{"nano_batches": ()}, {"nano_batches": (0, 1)}, {"tp": (2,)}])
def test_options_without_a_meaning_are_refused(options):
    """When the estimator is made."""
    with pytest.raises(EstimatorOption):
        estimator(**options)


def test_an_added_base_is_known_from_then_on():
    """Also where an older profile of it was asked before."""
    of = estimator()
    before = seconds(of, some(), 1)
    slower = [one.model_copy(update={"ms": 10 * one.ms}) for one in shipped().optimizer]
    of.add(BASE, shipped().model_copy(update={"optimizer": slower}), BASES[BASE].facts())

    assert seconds(of, some(), 1) > before


def test_a_target_that_a_base_does_not_have_is_named():
    """With those that it has."""
    with pytest.raises(TargetUnknown, match="q_proj"):
        demand_of(BASE, 8, 1, 100, targets=["q_prj"])


def test_lengths_may_be_those_of_all_samples():
    """A step has samples as long as they are on the mean."""
    mixed, equal = demand_of(BASE, 8, 4, [100, 200]), demand_of(BASE, 8, 4, 150)

    assert mixed.squares > equal.squares
    assert mixed._replace(squares=equal.squares) == equal


def test_a_table_names_every_term(known):
    """So that a user reads why a group takes as long as it does."""
    told = known.explain(BASE, some(batch=8), 8, "node")

    assert all(name in table_of(told) for name in told.terms)


ABSURD = st.sampled_from([float("nan"), float("inf"), -float("inf"), -1.0, -1e-300])


@given(GROUPS, st.sampled_from(Demand._fields), ABSURD)
def test_an_absurd_demand_has_no_time(known, group, field, value):
    """The error names the field, whoever asks and however."""
    wrong = group._replace(**{field: value})
    for ask in (
        lambda: known.explain(BASE, wrong, 1, "gpu"),
        lambda: known.solo(BASE, wrong, 1),
        lambda: known.seconds(
            BASE, np.array([group.row(), wrong.row()]), np.ones(2, int), ["gpu", "gpu"]
        ),
    ):
        with pytest.raises(DemandWrong) as told:
            ask()
        assert told.value.facts["field"] == field


@pytest.mark.parametrize("field", ["samples", "tokens"])
def test_a_demand_of_nothing_has_no_time(known, field):
    """Nothing can be divided by it."""
    with pytest.raises(DemandWrong):
        known.solo(BASE, some()._replace(**{field: 0.0}), 1)


@pytest.mark.parametrize("gpus", [0, -1, float("nan"), float("inf")])
def test_a_group_of_no_gpus_has_no_time(known, gpus):
    """Nor one of a number that is none."""
    with pytest.raises(DemandWrong, match="GPUs"):
        known.seconds(BASE, some().row()[None], np.array([gpus]), ["gpu"])


@given(GROUPS, st.sampled_from(Demand._fields), st.floats(1.0, 1e15))
def test_a_huge_demand_has_a_time_or_does_not_fit(known, group, field, value):
    """It is never NaN."""
    assert not np.isnan(seconds(known, group._replace(**{field: value}), 1))


MEASURED = st.tuples(st.floats(0.01, 50), st.floats(1, 1e5), st.floats(0, 500)).map(
    lambda each: Demand()._replace(
        evaluation_rows=each[0], evaluation_tokens=each[1], decoding_steps=each[2]
    )
)


@given(GROUPS, MEASURED, GPUS, st.sampled_from(get_args(Tier)))
def test_evaluations_and_answers_are_a_part_of_a_step(known, group, measured, gpus, tier):
    """A group that is evaluated takes longer, and the terms still add up."""
    demand = group.plus(measured)
    plain, told = (known.explain(BASE, one, gpus, tier) for one in (group, demand))
    found = known.seconds(BASE, demand.row()[None], np.array([gpus]), [tier])[0]

    assert found > plain.seconds
    assert sum(told.terms.values()) == pytest.approx(found, rel=1e-12)
    assert told.terms["evaluation"] > 0


def test_an_evaluation_costs_what_its_forwards_do(known):
    """Twice as many rows of one size take twice as long; answers take a forward a token."""

    def terms(**fields):
        return known.explain(BASE, some().plus(Demand(**fields)), 1, "gpu").terms

    once = terms(evaluation_rows=0.5, evaluation_tokens=500.0, decoding_steps=8.0)
    twice = terms(evaluation_rows=1.0, evaluation_tokens=1000.0, decoding_steps=16.0)

    for name in ("evaluation", "sampling"):
        assert twice[name] == pytest.approx(2 * once[name])


def test_replicas_divide_an_evaluation(known):
    """Each replica evaluates its part of the rows."""
    demand = some(batch=8).plus(Demand(evaluation_rows=8.0, evaluation_tokens=8e3))
    alone, four = (known.explain(BASE, demand, gpus, "node") for gpus in (1, 4))

    assert four.layout.mesh.dp == 4
    assert four.terms["evaluation"] == pytest.approx(alone.terms["evaluation"] / 4)


def test_a_job_alone_is_charged_for_its_own_evaluations(known):
    """What a job is compared with has its evaluations too, so they slow nobody but neighbours."""
    quiet = some()
    noisy = quiet.plus(Demand(evaluation_rows=20.0, evaluation_tokens=2e4, decoding_steps=64.0))
    alone = {one: known.solo(BASE, one, 1) for one in (quiet, noisy)}
    together = known.solo(BASE, quiet.plus(noisy), 1)

    assert alone[noisy] > 2 * alone[quiet]
    assert together / alone[noisy] < 1.5
    assert together / alone[quiet] > 2
