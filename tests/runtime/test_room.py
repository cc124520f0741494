"""Jobs whose samples have no room are refused by name, whatever the plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.groups import make_data, make_job, tiny_base
from tlora_fx.cli.arguments import start_options
from tlora_fx.compiler import compile
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import GPUS
from tlora_fx.cost.load import round_of_batches
from tlora_fx.cost.memory import memory_of
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.profile_sources import roofline_profile
from tlora_fx.cost.step_time import CostModel
from tlora_fx.errors import JobTooLong
from tlora_fx.model.row_ladder import repeating_length
from tlora_fx.runtime.checks import check_memory, longest_round, longest_row
from tlora_fx.runtime.clocks import JobClocks
from tlora_fx.runtime.data.batching import Cutting, cut_round, rows_of_round
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.launching.launch import Launch

PLAN = Plan(planner="single")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Two jobs, the second with samples of up to 60 tokens, and room for more by its file."""
    base = tiny_base(tmp_path_factory.mktemp("base"))
    few = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    return [make_job(base, "short"), make_job(base, "long", max_length=4096, **few)]


@pytest.fixture(scope="module")
def data(jobs):
    """Eleven samples each."""
    return make_data(jobs[:1]) | make_data(jobs[1:], longest=60)


@pytest.fixture(scope="module")
def model(jobs):
    """Their model."""
    return compile(jobs)


def profile_with(model, gib):
    """A data sheet's profile of a GPU with so much memory."""
    made = roofline_profile(GPUS["h100"], facts_of(model))
    hardware = made.hardware.model_copy(update={"memory_gib": gib})
    return made.model_copy(update={"hardware": hardware})


def gib_for(model, work):
    """Memory of a GPU in which a round just fits."""
    cost = CostModel(facts_of(model), profile_with(model, 80))
    return memory_of(cost, PLAN, work).total / 2**30 / 0.96 + 1.5


def test_the_longest_round_is_made_of_samples_that_there_are(jobs, data):
    """Not of max_length: batches of the longest, in order, as many as a step has."""
    found = longest_round(jobs, data, 100)

    lengths = sorted((len(one.input_ids) for one in data["long"].samples), reverse=True)
    assert [row[1] for row in found.rows if row[1]] == [tuple(lengths[:3]), tuple(lengths[3:6])]
    assert [len(row[0]) for row in found.rows if row[0]] == [2]
    assert found.longest() == (1, lengths[0])


def test_a_job_too_long_is_named_before_weights(jobs, data, model):
    """With a length that has room; where all has room nothing is said."""
    work = longest_round(jobs, data, 16384)
    enough, short = gib_for(model, work), gib_for(model, work.shortened(1, 20))
    check_memory(model, PLAN, data, 16384, profile_with(model, enough * 1.0001))

    with pytest.raises(JobTooLong) as error:
        check_memory(model, PLAN, data, 16384, profile_with(model, (short + enough) / 2))

    assert "job 'long'" in str(error.value)
    assert "set its max_length to" in str(error.value)


def test_without_a_measurement_nothing_is_refused(data, model, monkeypatch, tmp_path):
    """Estimates are no reason to refuse a run that its user asked for."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path))

    check_memory(model, PLAN, data, 16384)


def test_every_plan_of_the_command_line_is_looked_at(monkeypatch, tmp_path):
    """Before the trainer is made."""
    seen = []
    monkeypatch.setattr("tlora_fx.runtime.checks.check_memory", lambda *given: seen.append(given))
    monkeypatch.setattr(
        "tlora_fx.runtime.checks.load_all_data", lambda jobs, clocks: make_data(jobs)
    )
    base = tiny_base(tmp_path / "base")
    path = tmp_path / "jobs.yaml"
    path.write_text(
        f"base: {{config: {base.config}, dtype: float64}}\n"
        "jobs: [{name: a, lora: {r: 2, target_modules: [q_proj]}, data: {path: x.jsonl}}]\n"
    )
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    options = start_options.StartOptions(jobs=path, max_row_tokens=64, plan="single")

    samples, model = start_options.compiled_with_data(
        options, start_options.read_jobs(options), JobClocks()
    )
    plan = start_options.planned(options, Launch(), None, model, samples, None)

    ((given, chosen, _, tokens),) = seen
    assert (given, chosen, tokens) == (model, plan, 64)


def test_rows_close_before_they_grow_too_long():
    """As rounds of the jobs' own batches do."""
    made = round_of_batches([[(4, 4)], [(3,), (2, 2)]], 10)

    assert made.rows == (((4, 4), ()), ((), (3,)), ((), (2, 2)))


@given(
    lengths=st.lists(st.lists(st.integers(2, 90), min_size=1, max_size=12), min_size=1, max_size=3),
    sizes=st.tuples(*[st.integers(1, 3)] * 3),
    steps=st.tuples(*[st.integers(1, 4)] * 3),
    most=st.integers(16, 200),
    parts=st.sampled_from([1, 2, 4]),
    chance=st.randoms(use_true_random=False),
)
def test_no_row_exceeds_the_longest(jobs, lengths, sizes, steps, most, parts, chance):
    """However samples and jobs meet in a round, and however it is cut; and it is no wild guess."""
    own = [
        jobs[0].model_copy(update={
            "name": f"job-{place}", "per_device_train_batch_size": sizes[place],
            "gradient_accumulation_steps": steps[place],
        })
        for place in range(len(lengths))
    ]  # fmt: skip
    data = {
        job.name: JobData(job, [Sample((1,) * n, (1,) * n) for n in each], DataReport())
        for job, each in zip(own, lengths, strict=True)
    }
    cutting = Cutting(False, 12.0 * 32, most)
    bound = longest_row(own, data, cutting, parts)
    for _ in range(5):
        taking = [place for place in range(len(own)) if chance.random() < 0.7] or [0]
        batches = {place: _batches(own[place], data, chance) for place in taking}
        rows = list(rows_of_round(own, batches, dict.fromkeys(batches, 0), most))
        for row in cut_round(rows, parts, cutting):
            assert sum(len(ids) for job in row for ids in job.sequences) <= bound
    assert bound <= repeating_length(max(most, *map(sum, _largest(own, lengths))))


def test_a_row_of_two_halves_is_not_as_long_as_both(jobs):
    """Memory stays free for a half of the largest round and one sequence, not for all of it."""
    job = jobs[0].model_copy(update={"per_device_train_batch_size": 8})
    data = {job.name: JobData(job, [Sample((1,) * 100, (1,) * 100)] * 8, DataReport())}

    cutting = Cutting(False, 12.0 * 4096, 16384)

    assert longest_row([job], data, cutting, parts=1) == 800
    assert longest_row([job], data, cutting, parts=2) <= 520


def _largest(own, lengths):
    """Each job's longest samples, as many as a micro-batch has."""
    return [
        sorted(each, reverse=True)[: job.per_device_train_batch_size]
        for job, each in zip(own, lengths, strict=True)
    ]


def _batches(job, data, chance):
    """The micro-batches of a step: samples in any order."""
    samples = list(data[job.name].samples)
    chance.shuffle(samples)
    size = job.per_device_train_batch_size
    count = min(job.gradient_accumulation_steps, -(-len(samples) // size))
    return [samples[n * size : (n + 1) * size] for n in range(count)]
