"""Sites that read one input share one operator; each keeps its result, its tags and its jobs."""

from __future__ import annotations

import operator

import pytest
import torch

from tests.models import base_of, error_of, job
from tlora_fx.compiler import run_passes
from tlora_fx.errors import TagsBroken
from tlora_fx.ir.graph import ancestry, is_call, origin_of
from tlora_fx.ir.lora_sites import lowered_site, lowered_sites, serves_several
from tlora_fx.ir.verifier import check_tags
from tlora_fx.numerics.state import copy_state
from tlora_fx.passes.share_input import ShareInput
from tlora_fx.pipeline import Event, Pipeline, Rewrites, Runner, counting

LOWER = "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone,lower-adapters"
# "plain" adapts q_proj and down_proj, "few" q_proj, "head" v_proj.
KINDS = ("plain", "few", "head")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """All linears of a Llama, lowered; one layer has a larger rank at k_proj."""
    base = base_of(tmp_path_factory.mktemp("wide"), "llama", num_hidden_layers=2)
    own = job("all", base, r=3, rank_pattern={"layers.1.self_attn.k_proj": 7},
              target_modules="all-linear")  # fmt: skip
    return run_passes([own], LOWER)


@pytest.fixture(scope="module")
def lowered(group_after):
    """Jobs of three kinds, lowered."""
    return group_after(LOWER, *KINDS)


@pytest.fixture(scope="module")
def shared(lowered):
    """The same after the pass."""
    return _after(lowered)


def _after(group, **options):
    """A copy of a group after the pass, checked as a pipeline checks it."""
    copied = copy_state(group)
    Runner(Pipeline(()), []).run_one(Event(1, ShareInput(**options), "group", copied))
    return copied


def _graph(group):
    (block,) = group.blocks.values()
    return block.graph


def _operators(group):
    return [node for node in _graph(group).nodes if serves_several(node)]


def _sets(group):
    """Names of the sites of every operator, in order."""
    found = {}
    for site in lowered_sites(_graph(group)):
        found.setdefault(site.call, []).append(site.path.rpartition(".")[2])
    return list(found.values())


def test_sites_of_one_input_share_one_operator(wide):
    """q, k and v; gate and up. What reads something else keeps an operator of its own."""
    assert _sets(_after(wide)) == [
        ["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]
    ]  # fmt: skip


def test_an_option_bounds_the_sites_of_one_operator(wide):
    """What is left over stays alone, and one site is no set."""
    found = _sets(_after(wide, max_sites=2))

    assert found[:2] == [["q_proj", "k_proj"], ["v_proj"]]
    assert all(len(names) == 1 for names in _sets(_after(wide, max_sites=1)))


def test_sites_of_different_jobs_share_an_operator(shared):
    """Each result serves its own jobs, the operator all of them, in the group's order."""
    (call,) = _operators(shared)
    results = {site.path: site for site in lowered_sites(_graph(shared)) if site.call is call}

    assert call.meta["jobs"] == KINDS
    assert call.meta["path"] == "self_attn"
    assert results["self_attn.q_proj"].jobs == ("plain", "few")
    assert results["self_attn.v_proj"].jobs == ("head",)
    assert results["self_attn.v_proj"].branches.keys() == {"head"}


def test_a_result_is_known_as_the_node_that_it_stands_for(lowered, shared):
    """Role, site, path and source line; and where it comes from."""
    before = {site.path: site for site in lowered_sites(_graph(lowered))}
    for site in lowered_sites(_graph(shared)):
        was = before[site.path].result
        for tag in ("role", "jobs", "site", "path", "source", "part", "axis"):
            assert site.result.meta.get(tag) == was.meta.get(tag)
        assert site.result.meta["val"].shape == was.meta["val"].shape
        if site.call is not site.result:
            assert origin_of(site.result).made_by == "share-input"
            assert origin_of(was).key in {past.key for past in ancestry(origin_of(site.result))}


def test_each_site_reads_what_it_read_alone(lowered, shared):
    """Weight, bias, bank and tables, by the names of multi_lora_linear."""
    before = {site.path: site for site in lowered_sites(_graph(lowered))}
    for site in lowered_sites(_graph(shared)):
        was = before[site.path].arguments
        assert list(site.arguments) == list(was)
        for name in ("weight", "a", "b", "ranks", "scales", "rates", "site", "segments"):
            assert site.arguments[name].target == was[name].target
        assert site.arguments["compute_dtype"] == was["compute_dtype"]


def test_an_operator_knows_the_largest_rank_and_whether_any_job_drops(wide, shared):
    """Of all layers that share its code, and of all sites that share it."""
    alone = {site.path: site.arguments for site in lowered_sites(_graph(wide))}
    assert alone["self_attn.q_proj"]["max_rank"] == 3
    assert alone["self_attn.k_proj"]["max_rank"] == 7
    assert alone["self_attn.k_proj"]["drops"] is False

    assert [call.args[-2:] for call in _operators(shared)] == [(4, True)]
    assert [call.args[-2:] for call in _operators(_after(wide))] == [(7, False), (3, False)]


def _site(group, name):
    return next(s for s in lowered_sites(_graph(group)) if s.path.endswith(name))


def test_a_site_that_reads_anothers_result_stays_alone(lowered):
    """A weight that is computed from q cannot be known before q is."""
    group = copy_state(lowered)
    q, v = _site(group, "q_proj").result, _site(group, "v_proj").result
    with _graph(group).inserting_before(v):
        v.update_arg(1, _graph(group).call_function(torch.ops.aten.mul.Tensor, (v.args[1], q)))

    ShareInput().run(group)

    assert _operators(group) == []


def test_what_a_later_site_reads_is_made_before_the_first(lowered):
    """Such as a weight that is stored in another form."""
    group = copy_state(lowered)
    v = _site(group, "v_proj").result
    with _graph(group).inserting_before(v):
        weight = _graph(group).call_function(torch.ops.aten.neg.default, (v.args[1],))
    weight.meta.update(v.args[1].meta)
    v.update_arg(1, weight)

    ShareInput().run(group)

    _graph(group).lint()
    assert _site(group, "v_proj").arguments["weight"] is weight
    assert serves_several(_site(group, "v_proj").call)


def test_a_bisection_may_hold_it_back(lowered):
    """Sites then keep operators of their own."""
    group = copy_state(lowered)
    rewrites = Rewrites(limit=0)
    with counting(rewrites):
        ShareInput().run(group)

    first, second = (f"layers_0_3.self_attn.{name}" for name in ("q_proj", "v_proj"))
    assert rewrites.descriptions == [f"multi_lora_linears at {first}, {second}"]
    assert _operators(group) == []


def test_a_result_that_nobody_takes_breaks_the_tags(shared):
    """The bank of its site would belong to no one."""
    group = copy_state(shared)
    result = _site(group, "v_proj").result
    result.replace_all_uses_with(_site(group, "q_proj").result)
    _graph(group).erase_node(result)

    assert "a getitem for each of its 2 sites" in error_of(lambda: check_tags(group), TagsBroken)


def test_other_results_are_no_sites(shared):
    """Attention gives several values too."""
    items = [n for n in _graph(shared).nodes if is_call(n, operator.getitem)]

    assert {lowered_site(n) is None for n in items} == {True, False}
