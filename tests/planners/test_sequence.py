"""A model whose hidden states are cut along tokens computes what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests import models
from tests.planners import tensor_cases as cases
from tests.planners.processes import run_processes
from tlora_fx.driver import compile
from tlora_fx.errors import LaunchError, PlanNotRunnable
from tlora_fx.planners.apply import demand_nano
from tlora_fx.planners.plan import MeshShape, Plan
from tlora_fx.planners.prepared import planned_passes, prepared
from tlora_fx.planners.protocol import Planner, find_planner
from tlora_fx.runtime import launch
from tlora_fx.runtime.launch import Launch, choose_plan


def folder(tmp_path: str) -> Path:
    """Where this process writes configs."""
    return Path(tmp_path) / str(dist.get_rank())


def biased(tmp_path: str) -> list[str]:
    """Llama with biases everywhere, 15 tokens, then its layers as torch.compile traces them."""
    base = cases.base_of(folder(tmp_path), "llama")
    return cases.equal_to_one_process(cases.dropping_jobs(base), traced=True, tokens=True)


def families(tmp_path: str) -> None:
    """Norms behind sums; dropout on pieces, tokens alone in a dimension; q, k, v in one matrix."""
    where = folder(tmp_path)
    for family, changes in (("gemma2", {}), ("gpt2", {"resid_pdrop": 0.3}), ("phi3", {})):
        base = cases.base_of(where, family, **changes)
        cases.equal_to_one_process(cases.dropping_jobs(base), tokens=True)


def beside_others(tmp_path: str) -> list[str]:
    """A job with DoRA on q_proj, and one that trains copies of layers' norms."""
    base = cases.base_of(folder(tmp_path), "llama")
    dora = models.job("dora", base, 5, r=4, use_dora=True, target_modules=["q_proj"])
    norms = ["input_layernorm", "post_attention_layernorm"]
    copy = models.job("copy", base, 7, r=4, target_modules=["up_proj"], modules_to_save=norms)
    jobs = cases.dropping_jobs(base, dora, copy)
    return cases.equal_to_one_process(jobs, traced=True, tokens=True)


def four(tmp_path: str) -> None:
    """Heads, key heads and columns that divide by four; 15 tokens do not."""
    sizes = {"num_key_value_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1}
    base = cases.base_of(folder(tmp_path), "llama", **sizes)
    cases.equal_to_one_process(cases.dropping_jobs(base), tokens=True)


def test_two_processes_compute_what_one_does(tmp_path):
    """Losses and gradients to 1e-9, of a row that does not divide; also when traced."""
    assert run_processes(2, biased, str(tmp_path)) == [[], []]


@pytest.mark.slow
def test_other_bases_compute_what_one_process_does(tmp_path):
    """The same bound."""
    run_processes(2, families, str(tmp_path))


@pytest.mark.slow
def test_other_jobs_compute_what_one_process_does(tmp_path):
    """Trained copies of norms have their gradients summed; DoRA's branch reads whole rows."""
    first, second = run_processes(2, beside_others, str(tmp_path))

    assert first == second
    assert all("self_attn takes whole rows" in told or "model.layers" in told for told in first)


@pytest.mark.slow
def test_four_processes_compute_what_one_does(tmp_path):
    """The last of them holds fewer tokens than the others."""
    run_processes(4, four, str(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of two key heads, compiled."""
    base = cases.base_of(tmp_path_factory.mktemp("sequence"), "llama", num_hidden_layers=1)
    return compile(cases.dropping_jobs(base))


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    """The same with a layer for each of two stages."""
    base = cases.base_of(tmp_path_factory.mktemp("layers"), "llama", num_hidden_layers=2)
    return compile(cases.dropping_jobs(base))


def test_a_plan_says_that_rows_are_cut_and_keeps_it(model, tmp_path):
    """In its file, and in the passes that it runs."""
    plan = find_planner("tensor").plan(model, MeshShape(tp=2, dp=2), sequence_parallel=True)
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.sequence_parallel
    assert "shard-sequence{size=2}" in planned_passes(plan)


@pytest.mark.parametrize(
    ("name", "mesh", "told"),
    [
        ("single", "", "choose tensor, or auto, or pipeline with a mesh that has tp"),
        ("replicated", "dp=2", "choose tensor, or auto"),
        ("fsdp", "dp=2", "choose tensor, or auto"),
        ("tensor", "dp=2", "or use a mesh of (pp=1,dp=1,tp=2)"),
        ("tensor", "", "no mesh of 1 processes with tp fits this model"),
        ("pipeline", "pp=2", "or use a mesh of (pp=1,dp=1,tp=2)"),
    ],
)
def test_planners_that_cut_no_rows_say_so(two_layers, name, mesh, told):
    """Asked for it they make no plan without it; the error names what would do."""
    planner, shape = find_planner(name), MeshShape.parse(mesh)
    assert not planner.plan(two_layers, shape).sequence_parallel

    with pytest.raises(PlanNotRunnable) as error:
        planner.plan(two_layers, shape, sequence_parallel=True)

    assert told in str(error.value)


def test_a_plan_of_a_file_that_has_no_tp_is_refused(model):
    """Nothing would run it as it says."""
    plan = Plan(planner="single", sequence_parallel=True)

    with pytest.raises(PlanNotRunnable, match="the mesh has tp=1"):
        prepared(model, plan)


def test_a_file_s_plan_cuts_rows_where_that_is_asked_for(model, tmp_path):
    """As if it were in the file; a file whose mesh has no tp is refused, and another mesh too."""
    plan = find_planner("tensor").plan(model, MeshShape(tp=2))
    plan.save(tmp_path / "cut.json")
    Plan(planner="replicated", mesh=MeshShape(dp=2)).save(tmp_path / "replicas.json")
    two = Launch(size=2)

    def chosen(name, mesh=None, **options):
        return choose_plan(str(tmp_path / name), model, two, mesh, **options)

    assert chosen("cut.json") == plan
    asked = chosen("cut.json", sequence_parallel=True)
    assert asked == plan.model_copy(update={"sequence_parallel": True})
    with pytest.raises(PlanNotRunnable, match="or use a mesh of"):
        chosen("replicas.json", sequence_parallel=True)
    with pytest.raises(LaunchError, match="another mesh"):
        chosen("cut.json", MeshShape(dp=2))
    assert chosen("cut.json", MeshShape(tp=2)) == plan


class Deaf(Planner):
    """A planner of another package, which does not know of rows that are cut."""

    name = "deaf"

    def plan(self, model, shape=None, profile=None, **options):
        """One for two replicas."""
        return Plan(planner=self.name, mesh=MeshShape(dp=2))


def test_another_packages_planner_is_not_believed(model, monkeypatch):
    """A plan that does not cut rows is none that was asked for."""
    monkeypatch.setattr(launch, "find_planner", lambda name: Deaf())

    assert choose_plan("deaf", model, Launch(size=2), None).mesh == MeshShape(dp=2)
    with pytest.raises(PlanNotRunnable, match="the plan 'deaf' cannot cut rows"):
        choose_plan("deaf", model, Launch(size=2), None, sequence_parallel=True)


def test_nano_batches_and_padded_rows_are_refused_before_weights(model, tmp_path):
    """By the planner, by a plan from a file, and where a controller asks for nano-batches."""
    asked = {"sequence_parallel": True}
    tensor = find_planner("tensor")
    with pytest.raises(PlanNotRunnable, match="whole sequences"):
        tensor.plan(model, processes=2, nano_batches=2, **asked)
    with pytest.raises(PlanNotRunnable, match="whole sequences"):
        prepared(model, Plan(planner="tensor", mesh=MeshShape(tp=2), nano_batches=2, **asked))
    with pytest.raises(PlanNotRunnable, match="not cut into nano-batches"):
        demand_nano(tensor.plan(model, processes=2, **asked), wanted=True)
    base = cases.base_of(tmp_path, "llama", attention="batch", num_hidden_layers=1)
    with pytest.raises(PlanNotRunnable, match="padded"):
        tensor.plan(compile(cases.dropping_jobs(base)), processes=2, **asked)
