"""A model that is cut over processes computes what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests import models
from tests.parallel import tensor_cases as cases
from tests.parallel.processes import run_processes
from tlora_fx.compiler import compile
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import MeshDoesNotFit, PlanNotRunnable
from tlora_fx.planners.protocol import find_planner


def folder(tmp_path: str) -> Path:
    """Where this process writes configs."""
    return Path(tmp_path) / str(dist.get_rank())


def biased(tmp_path: str) -> list[str]:
    """Llama with biases everywhere, then its layers as torch.compile traces them."""
    base = cases.base_of(folder(tmp_path), "llama")
    return cases.equal_to_one_process(cases.dropping_jobs(base), traced=True)


def families(tmp_path: str) -> None:
    """Tied embeddings and soft caps, stored [in, out], padded rows."""
    where = folder(tmp_path)
    for base in (
        cases.base_of(where, "gemma2"),
        cases.base_of(where, "gpt2"),
        cases.base_of(where, "llama", attention="batch", num_hidden_layers=1),
    ):
        cases.equal_to_one_process(cases.dropping_jobs(base))


def beside_others(tmp_path: str) -> None:
    """A job with DoRA on q_proj, one with an adapted head, one that trains copies of norms."""
    base = cases.base_of(folder(tmp_path), "llama", num_hidden_layers=1)
    dora = models.job("dora", base, 5, r=4, use_dora=True, target_modules=["q_proj"])
    head = models.job("head", base, 6, r=4, target_modules=["lm_head", "down_proj"])
    copy = models.job(
        "copy", base, 7, r=4, target_modules=["up_proj"], modules_to_save=["input_layernorm"]
    )
    cases.equal_to_one_process(cases.dropping_jobs(base, dora, head, copy))


def four(tmp_path: str) -> list[str]:
    """Heads, key heads and columns that divide by four."""
    sizes = {"num_key_value_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1}
    base = cases.base_of(folder(tmp_path), "llama", **sizes)
    return cases.equal_to_one_process(cases.dropping_jobs(base))


def test_two_processes_compute_what_one_does(tmp_path):
    """Losses and gradients to 1e-9, masks at all sites, nothing whole; also when traced."""
    assert run_processes(2, biased, str(tmp_path)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("case", [families, beside_others])
def test_other_bases_and_jobs_compute_what_one_process_does(tmp_path, case):
    """The same bound."""
    run_processes(2, case, str(tmp_path))


def test_four_processes_compute_what_one_does(tmp_path):
    """One key head a process."""
    assert run_processes(4, four, str(tmp_path)) == [[]] * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of two key heads, compiled."""
    base = cases.base_of(tmp_path_factory.mktemp("tensor"), "llama", num_hidden_layers=1)
    return compile(cases.dropping_jobs(base))


def test_a_tensor_plan_has_pieces_and_replicas(model):
    """From a number of processes, or from a mesh."""
    planner = find_planner("tensor")

    assert planner.plan(model, options={"processes": 2}).mesh == MeshShape(tp=2)
    assert planner.plan(model, MeshShape(tp=2, dp=2)).mesh == MeshShape(tp=2, dp=2)


def test_a_tensor_plan_refuses_stages_and_heads_that_do_not_divide(model):
    """Each with what would do."""
    with pytest.raises(PlanNotRunnable, match="pipeline"):
        find_planner("tensor").plan(model, MeshShape(tp=2, pp=2))
    with pytest.raises(MeshDoesNotFit, match="key-value heads"):
        find_planner("tensor").plan(model, options={"processes": 4})


def test_a_tensor_plan_refuses_a_model_of_which_nothing_can_be_cut(tmp_path):
    """Attention draws masks, and DoRA's branch reads both of the MLP's; the reasons are told."""
    base = cases.base_of(tmp_path, "gpt2", vocab_size=61, n_layer=1, attn_pdrop=0.1)
    own = {"r": 4, "use_dora": True, "target_modules": ["c_fc"]}
    whole = compile([models.job("one", base, **own)])

    with pytest.raises(PlanNotRunnable, match="c_attn stays whole") as refused:
        find_planner("tensor").plan(whole, options={"processes": 2})
    assert "draws masks by the number of the head" in str(refused.value)
