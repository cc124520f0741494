"""Job files as the scheduler sees them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.models import base_of as base_in
from tests.models import job
from tlora_fx import compiler
from tlora_fx.config.job import BaseSpec
from tlora_fx.config.job_file import load_job_file
from tlora_fx.cost.load import demand_of
from tlora_fx.cost.model_facts import BASES, find_base
from tlora_fx.errors import BaseUnknown, JobError, StepsUnknown
from tlora_fx.runtime.data.samples import load_job_data
from tlora_fx.runtime.data.tokenizer import load_tokenizer
from tlora_fx.runtime.job_evaluation import JobEvaluation
from tlora_fx.scheduler import requests
from tlora_fx.scheduler.local.admission_worker import prepare
from tlora_fx.scheduler.requests import (
    base_of,
    demand_of_facts,
    facts_of_job,
    request_of,
    shape_of,
    steps_of,
)

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "jobs.yaml"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of four layers, as tests of costs and planners trace it."""
    folder = tmp_path_factory.mktemp("base")
    return base_in(folder, "llama", dtype="bfloat16", num_hidden_layers=4)


def test_a_request_is_what_the_job_says(base):
    """Batch, accumulation, lengths and what it asks of the scheduler."""
    asked = {"gpus": 2, "max_slowdown": 2.0, "deadline": 60.0, "max_slowdown_opt_in": 3.0}
    one = job("one", base, target_modules=LINEARS).model_copy(
        update={
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 7,
            "schedule": job("x", base).schedule.model_copy(update=asked),
        }
    )
    found = request_of(one, lengths=[10, 20, 5000], submitted=5.0)

    assert (found.name, found.gpus, found.steps, found.max_slowdown) == ("one", 2, 7, 2.0)
    assert (found.submitted, found.deadline, found.max_slowdown_opt_in) == (5.0, 65.0, 3.0)
    assert found.longest == one.max_length
    assert found.demand.samples == 8
    assert found.demand.tokens == pytest.approx(8 * (30 + one.max_length) / 3)


@pytest.mark.parametrize(
    ("changes", "evaluations", "answers"),
    [
        ({"eval_strategy": "steps", "eval_steps": 4}, 3, 0),
        ({"eval_strategy": "epoch"}, 4, 0),
        ({"eval_strategy": "no"}, 0, 0),
        ({"eval_strategy": "steps", "eval_steps": 4, "sample_prompts": ["Hi"]}, 3, 3),
        ({"eval_strategy": "no", "sample_prompts": ["Hi"], "sample_steps": 5}, 0, 2),
        ({"eval_strategy": "no", "sample_prompts": ["Hi", "Ho"]}, 0, 1),
    ],
)
def test_a_request_counts_evaluations_and_answers(base, changes, evaluations, answers):
    """Of ten steps, of which three are an epoch: 20 sequences in batches of eight, 64 tokens."""
    fields = {"per_device_train_batch_size": 4, "max_steps": 10, "per_device_eval_batch_size": 8}
    one = job("one", base, target_modules=LINEARS).model_copy(update={**fields, **changes})
    found = request_of(one, lengths=[10] * 12, evaluated=[7] * 20).demand

    assert found.evaluation_rows == pytest.approx(evaluations * 3 / 10)
    assert found.evaluation_tokens == pytest.approx(evaluations * 140 / 10)
    assert found.decoding_steps == pytest.approx(answers * 64 / 10)


def test_a_job_is_prepared_with_what_its_evaluation_data_has():
    """A tenth of the quickstart's samples is held out, and evaluated twice in ten steps."""
    one = load_job_file(QUICKSTART).jobs[0]
    changes = {"max_steps": 10, "eval_strategy": "steps", "eval_steps": 5, "eval_split": 0.1}
    one = one.model_copy(update=changes)
    data = load_job_data(one, load_tokenizer(one.base))
    found = prepare(one, 0.0).request.demand

    assert found.evaluation_tokens == 2 * sum(len(each.input_ids) for each in data.evaluation) / 10
    assert found.evaluation_rows == pytest.approx(2 * -(-len(data.evaluation) // 8) / 10)


def test_requests_know_when_a_job_is_evaluated(base):
    """As often as the job's own run is."""
    one = job("one", base, target_modules=LINEARS).model_copy(
        update={"max_steps": 10, "eval_strategy": "steps", "eval_steps": 3}
    )
    run = JobEvaluation(one, SimpleNamespace(steps=10))
    found = request_of(one, lengths=[10] * 12, evaluated=[7]).demand

    assert found.evaluation_rows * 10 == pytest.approx(sum(map(run.is_due, range(1, 11))))


def test_a_job_is_compiled_once_for_all_ranks(base, monkeypatch):
    """What it trains is proportional to its rank, as compiling says too."""
    small, large = (job("one", base, r=rank, target_modules=LINEARS) for rank in (4, 12))
    facts_of_job(small)
    monkeypatch.setattr("tlora_fx.compiler.compile", None)

    found = facts_of_job(large)
    assert found.trained[0] == 3 * facts_of_job(small).trained[0]
    assert {site.ranks for layer in found.layers for site in layer.sites} == {(12,)}


def test_a_rank_that_no_machine_has_room_for_is_refused_though_its_base_is_known(base):
    """What was compiled for another rank says nothing of that."""
    facts_of_job(job("one", base, r=4, target_modules=LINEARS))

    with pytest.raises(JobError, match="does not fit into memory"):
        facts_of_job(job("two", base, r=10**42, target_modules=LINEARS))


def test_processes_that_name_a_folder_share_what_they_compile(base, tmp_path, monkeypatch):
    """Another one compiles nothing, until targets are others, or what was left is damaged."""
    monkeypatch.setattr(requests, "_kept_in", [])
    monkeypatch.setattr(requests, "_compiled", {})
    requests.keep_facts(tmp_path / "facts")
    one = job("one", base, r=4, target_modules=LINEARS)
    first = facts_of_job(one)

    monkeypatch.setattr(requests, "_compiled", {})
    compiles = []
    compile = compiler.compile
    monkeypatch.setattr(
        "tlora_fx.compiler.compile", lambda jobs: compiles.append(jobs) or compile(jobs)
    )
    assert facts_of_job(one) == first
    assert facts_of_job(job("two", base, r=8, target_modules=LINEARS)) != first
    assert compiles == []
    facts_of_job(job("one", base, target_modules=["q_proj", "v_proj"]))
    assert len(compiles) == 1

    for path in (tmp_path / "facts").iterdir():
        path.write_text("{}")
    monkeypatch.setattr(requests, "_compiled", {})
    assert facts_of_job(one) == first
    assert len(compiles) == 2


def test_a_base_whose_config_was_edited_is_compiled_again(base, tmp_path, monkeypatch):
    """What was left in the folder is of another model."""
    known, compiled = facts_of_job(job("one", base, target_modules=LINEARS)), []
    monkeypatch.setattr(requests, "_kept_in", [])
    monkeypatch.setattr(requests, "_compiled", {})
    monkeypatch.setattr(
        requests, "_facts_by_compiling", lambda one: compiled.append(one.name) or known
    )
    own = base_in(tmp_path / "base", "llama")
    (config,) = (tmp_path / "base").rglob("config.json")
    requests.keep_facts(tmp_path / "facts")
    for _ in range(2):
        requests._compiled.clear()
        facts_of_job(job("one", own))
    assert compiled == ["one"]

    config.write_text(config.read_text() + " ")
    requests._compiled.clear()
    facts_of_job(job("two", own))
    assert compiled == ["one", "two"]


def test_what_was_compiled_serves_other_seeds_and_no_other_code(base, monkeypatch, tmp_path):
    """A seed draws other numbers into the same shapes; other code or libraries may find others."""
    known, compiled = facts_of_job(job("one", base, target_modules=LINEARS)), []
    monkeypatch.setattr(requests, "_kept_in", [])
    monkeypatch.setattr(
        requests, "_facts_by_compiling", lambda one: compiled.append(one.name) or known
    )
    requests.keep_facts(tmp_path / "facts")
    for name, seed, code in (("one", 1, "x"), ("two", 2, "x"), ("three", 1, "y")):
        monkeypatch.setattr(requests, "_code", lambda code=code: [code])
        requests._compiled.clear()
        facts_of_job(job(name, base.model_copy(update={"seed": seed})))
    requests._compiled.clear()

    assert compiled == ["one", "three"]


def test_a_base_of_the_hub_that_came_anew_is_compiled_again(base, monkeypatch, tmp_path):
    """Its name is the same; the revision that lies in the hub's cache is another."""
    known, compiled = facts_of_job(job("one", base, target_modules=LINEARS)), []
    monkeypatch.setattr("tlora_fx.config.base_files.hub_cache", lambda: tmp_path)
    monkeypatch.setattr(requests, "_kept_in", [])
    monkeypatch.setattr(
        requests, "_facts_by_compiling", lambda one: compiled.append(one.name) or known
    )
    requests.keep_facts(tmp_path / "facts")
    stored = tmp_path / "models--org--base"
    (stored / "refs").mkdir(parents=True)
    for name, revision in (("one", "a"), ("two", "a"), ("three", "b")):
        (stored / "refs" / "main").write_text(revision)
        (stored / "snapshots" / revision).mkdir(parents=True, exist_ok=True)
        (stored / "snapshots" / revision / "config.json").write_text(f'"{revision}"')
        requests._compiled.clear()
        facts_of_job(job(name, BaseSpec(model="org/base")))
    requests._compiled.clear()

    assert compiled == ["one", "three"]


def test_the_newest_facts_are_kept(tmp_path, monkeypatch):
    """However many bases a service has seen; a folder that is not there has none."""
    requests.forget_old_facts(tmp_path / "facts")
    (tmp_path / "facts").mkdir()
    for second in range(5):
        (tmp_path / "facts" / f"{second}.json").touch()
        os.utime(tmp_path / "facts" / f"{second}.json", (second, second))
    monkeypatch.setattr(requests, "FACTS_KEPT", 2)
    requests.forget_old_facts(tmp_path / "facts")

    assert sorted(path.name for path in (tmp_path / "facts").iterdir()) == ["3.json", "4.json"]


def test_ranks_that_differ_by_module_are_compiled(base):
    """A pattern of ranks leaves nothing proportional."""
    mixed = job("one", base, r=4, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 8})

    facts = facts_of_job(mixed)
    assert [site.ranks for site in facts.layers[0].sites] == [(4,), (8,)]
    found = demand_of_facts(facts, 1, [16])
    assert found.adapters == 2
    assert found.parameters == facts.trained[0]


def test_a_base_tells_which_jobs_may_share_a_group(base, tmp_path):
    """Names, ranks and data do not count; dtype and adapter arithmetic do."""
    one, other = job("one", base, r=4), job("other", base, r=8)
    widened = one.model_copy(update={"adapter_compute": "float32"})
    halved = one.model_copy(update={"adapter_dtype": "bfloat16"})

    assert base_of(one) == base_of(other)
    assert len({base_of(one), base_of(widened), base_of(halved)}) == 3


def test_a_shape_knows_no_jobs(base):
    """It is what an estimator takes of a base that has no name."""
    found = shape_of(job("one", base, target_modules=LINEARS))

    assert found.jobs == ()
    assert not any(layer.sites for layer in found.layers)
    assert found.base_bytes > 0


def test_a_request_says_whether_its_rows_run_as_graphs(base):
    """By its own operators; a base's shape leaves that to its jobs."""
    plain = job("one", base, target_modules=LINEARS).model_copy(update={"max_steps": 3})
    dora = job("one", base, target_modules=["q_proj"], use_dora=True, lora_dropout=0.1)
    wide = plain.model_copy(update={"adapter_compute": "float32"})

    assert [facts_of_job(one).captures for one in (plain, dora, wide)] == [True, False, False]
    assert request_of(plain).demand.launched == 0
    assert request_of(dora.model_copy(update={"max_steps": 3})).demand.launched == 1
    assert shape_of(dora).captures


def test_epochs_need_the_number_of_samples(base):
    """Which the lengths of the samples tell."""
    one = job("one", base, target_modules=LINEARS).model_copy(
        update={"max_steps": None, "num_train_epochs": 2.0, "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 1}
    )  # fmt: skip

    assert steps_of(one, 9) == 6
    with pytest.raises(StepsUnknown, match="num_train_epochs"):
        request_of(one)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpus": 0}, "1 <= n"),
        ({"gpu": 1}, "did you mean 'gpus'"),
        ({"max_slowdown_opt_in": 1.2}, "below 'max_slowdown'"),
        ({"max_slowdown": 0.5}, "1 <= n"),
        ({"deadline": -1.0}, "0 < n"),
    ],
)
def test_what_a_job_cannot_ask_of_a_scheduler_is_told(base, given, said):
    """With what it could."""
    with pytest.raises(JobError, match=said):
        job("one", base).__class__.model_validate(
            {**job("one", base).model_dump(exclude={"schedule"}), "schedule": given}
        )


def test_an_unknown_base_is_told_with_the_nearest():
    """Those that are known by name are few."""
    with pytest.raises(BaseUnknown, match=r"llama-3-8b"):
        find_base("llama-3-8")


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_a_job_on_a_known_base_asks_for_what_its_name_says(base):
    """By compiling, and by the shape alone."""
    one = load_job_file(SHAPES / base / "jobs.yaml").jobs[3]
    found = request_of(one.model_copy(update={"max_steps": 5})).demand

    assert found == pytest.approx(demand_of(base, 16, 4, 1024))


def test_a_job_of_a_small_base_asks_for_what_its_model_has(base):
    """Adapters, columns and parameters of all linears, by its graph."""
    one = job("one", base, r=4, target_modules=LINEARS)
    facts = facts_of_job(one)
    found = demand_of_facts(facts, 2, [10, 30])

    assert found.adapters == len(LINEARS)
    assert found.parameters == facts.trained[0]
    assert found.tensors == facts.tensors[0]
    assert found.site_tokens == found.tokens * sum(site.width for site in facts.layers[0].sites)
    assert found.rank_tokens == 4 * found.site_tokens
