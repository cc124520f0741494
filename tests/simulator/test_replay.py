"""Replays: what is conserved, what must scale, and what a policy cannot get away with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.looping import Plain, request
from tests.simulator.faults import Faults, FaultyExecutor
from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import ReplayStalled, SubmittedTwice
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.state import ChangeCosts, Decision
from tlora_fx.simulator import replay as replays
from tlora_fx.simulator.metrics import DONE, FAILED
from tlora_fx.simulator.replay import OPTIONS, replay

CLUSTER = Cluster(16, 4, 2)
POLICIES = ("tlora", "megatron", "mlora-fifo")


def draw(count=60, gap=20.0, seed=0, **changes):
    """Jobs that come now and then, most of them small."""
    random, time, jobs = Random(seed), 0.0, []
    for place in range(count):
        time += random.expovariate(1 / gap)
        fields = {
            "gpus": random.choice((1, 1, 1, 2, 4, 8)),
            "steps": random.randint(10, 400),
            "tokens": random.choice((500.0, 1000.0, 2000.0)),
            "base": random.choice(("one", "two")),
        }
        jobs.append(request(f"j{place:03d}", submitted=time, **(fields | changes)))
    return jobs


def run(jobs, policy="tlora", *, cluster=CLUSTER, estimator=None, **options):
    """A replay, a policy by its name."""
    chosen = find_policy(policy) if isinstance(policy, str) else policy
    own = ("horizon", "switch_seconds", "at_once", "changes")
    names = [name for name in own if name in options]
    loop = replace(OPTIONS, **{name: options.pop(name) for name in names})
    return replay(jobs, chosen, estimator or Plain(), cluster, options=loop, **options)


@pytest.fixture
def faults(monkeypatch):
    """Replays from now on have these faults; a list of their executors."""

    def set_faults(chaos):
        made = []

        def executor(*given, **named):
            made.append(FaultyExecutor(*given, faults=chaos, **named))
            return made[-1]

        monkeypatch.setattr(replays, "SimulatedExecutor", executor)
        return made

    return set_faults


def same(a, b):
    """Whether two tables say the same of every job."""
    columns = ("ended", "started", "run_seconds", "steps_done", "formations")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)


def test_an_end_is_told_once_it_is_written_and_keeps_the_gpu_until_then():
    """Of jobs one after another; a switch comes on top."""
    jobs = [request(f"j{place}", gpus=1, steps=100) for place in range(3)]
    common = {"cluster": Cluster(1, 1, 1), "switch_seconds": 5.0, "at_once": "always"}
    quick, slow = (
        run(jobs, "megatron", changes=ChangeCosts(end=end), **common) for end in (0.0, 3.0)
    )

    assert np.allclose(slow.jobs.ended - quick.jobs.ended, [3.0, 6.0, 9.0])
    assert np.allclose(slow.jobs.started - quick.jobs.started, [0.0, 3.0, 6.0])
    assert slow.summary.finished == 3


@given(seed=st.integers(0, 10_000), gap=st.sampled_from((1.0, 20.0, 200.0)))
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_and_gpu_seconds_are_conserved(policy, seed, gap):
    """P11, P12: every step of every job is counted once, and every GPU-second is held or idle."""
    jobs = draw(30, gap, seed)
    found = run(jobs, policy)
    whole = found.summary.whole

    assert found.summary.finished == len(jobs)
    np.testing.assert_allclose(found.jobs.steps_done, [job.steps for job in jobs], rtol=1e-9)
    assert whole.samples == pytest.approx(sum(4 * job.steps for job in jobs))
    together = whole.allocated_gpu_seconds + whole.idle_gpu_seconds
    assert together == pytest.approx(whole.capacity_gpu_seconds, rel=1e-12)
    assert whole.capacity_gpu_seconds == pytest.approx(whole.seconds * CLUSTER.gpus, rel=1e-12)


def test_jobs_alone_on_a_large_cluster_take_what_they_take_alone():
    """With room for all, the isolated policy gives each job its solo duration, to the last bit."""
    jobs = draw(40)
    found = run(jobs, "megatron", cluster=Cluster(512), switch_seconds=0.0, at_once="always")

    alone = [job.steps * Plain().solo(job.base, job.demand, job.gpus) for job in jobs]
    expected = [job.submitted + seconds for job, seconds in zip(jobs, alone, strict=True)]
    assert found.jobs.ended.tolist() == expected
    assert found.summary.queue_seconds.most == 0


@given(seed=st.integers(0, 10_000), policy=st.sampled_from(POLICIES))
def test_twice_as_long_times_give_twice_as_long_completions(seed, policy):
    """Metamorphic: doubling every time (arrivals, steps, switches, horizons) doubles all ends."""
    jobs = draw(25, 10.0, seed)
    slow = [replace(job, submitted=2 * job.submitted) for job in jobs]
    policies = [find_policy(policy), find_policy(policy)]
    if policy == "tlora":
        policies = [find_policy(policy, dwell_seconds=seconds) for seconds in (64.0, 128.0)]
    once = run(jobs, policies[0], horizon=64.0, switch_seconds=16.0)
    twice = run(slow, policies[1], estimator=Plain(scale=2.0), horizon=128.0, switch_seconds=32.0)

    assert twice.jobs.ended.tolist() == (2 * once.jobs.ended).tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_without_compatible_pairs_every_group_has_one_job(policy):
    """Metamorphic: jobs of as many bases never share."""
    jobs = [replace(job, base=job.name) for job in draw(30, 5.0)]
    found = run(jobs, policy)

    assert found.summary.grouped_job_share == 0
    assert found.summary.group_jobs == pytest.approx(1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_replay_twice_is_the_same(policy, faults):
    """Deterministic by seed, faults included, whatever the order of the requests."""
    chaos = Faults(
        seed=3,
        noise=0.2,
        group_failure_seconds=20_000.0,
        node_failure_seconds=5_000.0,
        repair_seconds=300.0,
        commit_seconds=60.0,
    )
    jobs = draw(40)
    faults(chaos)
    once, again = run(jobs, policy), run(jobs[::-1], policy)
    faults(replace(chaos, seed=4))
    other = run(jobs, policy)

    assert same(once.jobs, again.jobs)
    assert not same(once.jobs, other.jobs)


@pytest.mark.parametrize("policy", POLICIES)
def test_failures_and_lost_nodes_lose_no_job(policy, faults):
    """Every job ends, and its steps count once, however much was done twice."""
    chaos = Faults(
        seed=1,
        group_failure_seconds=50_000.0,
        node_failure_seconds=3_000.0,
        repair_seconds=200.0,
        commit_seconds=60.0,
    )
    jobs = draw(60)
    executors = faults(chaos)
    found = run(jobs, policy)
    summary, done = found.summary, found.jobs.outcome == DONE

    assert summary.node_losses > 0
    assert summary.group_failures > 0
    assert executors[0].steps_lost > 0
    assert summary.finished + summary.failed == len(jobs)
    assert set(found.jobs.outcome) <= {DONE, FAILED}
    steps = np.array([job.steps for job in jobs])
    np.testing.assert_allclose(found.jobs.steps_done[done], steps[done], rtol=1e-9)
    whole = summary.whole
    together = whole.allocated_gpu_seconds + whole.idle_gpu_seconds
    assert together == pytest.approx(whole.capacity_gpu_seconds, rel=1e-12)
    assert whole.capacity_gpu_seconds < whole.seconds * CLUSTER.gpus


def test_completion_is_queue_and_run():
    """The parts add up, job by job."""
    found = run(draw(60, 2.0)).summary

    assert found.completion_seconds.mean == pytest.approx(
        found.queue_seconds.mean + found.run_seconds.mean
    )
    assert found.queue_seconds.mean > 0


def test_refused_jobs_are_counted_with_their_reason():
    """They never run and hold nobody up."""
    found = run([request("wide", gpus=17), request("a")]).summary

    assert (found.finished, found.refused) == (1, 1)
    assert found.refusals == {"it asks for 17 GPUs and the cluster has 16": 1}


def test_the_loaded_span_ends_with_the_last_submission():
    """The tail in which the cluster runs empty is not in it."""
    jobs = draw(40, 5.0)
    summary = run(jobs).summary

    assert summary.loaded.seconds == pytest.approx(jobs[-1].submitted - jobs[0].submitted)
    assert summary.loaded.seconds < summary.whole.seconds
    assert summary.loaded.samples < summary.whole.samples


def test_nothing_to_replay_is_a_summary_of_nothing():
    """No jobs, no time."""
    summary = run([]).summary

    assert (summary.jobs, summary.finished, summary.whole.seconds) == (0, 0, 0.0)


@dataclass
class Idler:
    """Starts nothing."""

    name: str = "idler"

    def decide(self, state, *, explain=False):
        return Decision(())


@pytest.mark.parametrize("count", [1, 3])
def test_a_policy_that_starts_nothing_is_found_out(count):
    """A replay ends in an error rather than never."""
    with pytest.raises(ReplayStalled, match=f"starts none of {count} jobs"):
        run(draw(count), Idler())


def test_names_must_differ():
    """Two jobs of one name cannot be told apart."""
    with pytest.raises(SubmittedTwice):
        run([request("a"), request("a")])
