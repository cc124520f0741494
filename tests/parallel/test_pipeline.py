"""A pipeline of stages trains every job as one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.stage_clock import clocked_round
from tests.parallel.pipelines import (
    LENGTHS,
    Case,
    compiled,
    compiled_once,
    differences,
    load,
    rows_of,
)
from tests.parallel.processes import run_processes
from tlora_fx.cost.pipeline_simulation import Action
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import PlanNotRunnable, ScheduleRefused
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import part_of
from tlora_fx.parallel.mesh import open_mesh
from tlora_fx.parallel.pipeline import PipelineRunner
from tlora_fx.planners.protocol import find_planner

UPPER_HALF = {"upper": 2, "tied": True}
TWO = {
    "gpipe": Case(2, (2,), "gpipe", **UPPER_HALF),
    "1f1b": Case(2, (3,), "1f1b", **UPPER_HALF),
    "interleaved": Case(2, (1, 2, 3), "interleaved", **UPPER_HALF),
    "compiled": Case(2, (3,), "1f1b", **UPPER_HALF, compiled=True),
}
REPLAYED = {
    f"{name}, replayed": replace(case, replayed=True)
    for name, case in TWO.items() if not case.compiled
}  # fmt: skip
#: Cases of each test run; the others are slow.
QUICK = ("compiled", "1f1b, replayed", "interleaved, replayed")
#: On a model of its own, with adapters on every layer.
EVERY_REPLAYED = {"1f1b, every layer, replayed": Case(2, (2,), "1f1b", replayed=True)}
EVERY_LAYER = {"layers": 8}
FOUR = {
    "gpipe": Case(4, (2, 4, 6), "gpipe", **EVERY_LAYER),
    "1f1b": Case(4, (4, 5, 7), "1f1b", **EVERY_LAYER),
    "interleaved": Case(4, tuple(range(1, 8)), "interleaved", **EVERY_LAYER),
    "1f1b, two replicas": Case(2, (4,), "1f1b", 2, **EVERY_LAYER),
    "1f1b, sharded": Case(2, (4,), "1f1b", 2, **EVERY_LAYER, sharded="resharded"),
    "interleaved, sharded": Case(2, (2, 4, 6), "interleaved", 2, **EVERY_LAYER, sharded="kept"),
    "gpipe, sharded": Case(2, (2,), "gpipe", 2, **UPPER_HALF, sharded="resharded"),
    "compiled, sharded": Case(2, (3,), "1f1b", 2, **UPPER_HALF, compiled=True, sharded="kept"),
    "1f1b, matrices in two pieces": Case(2, (4,), "1f1b", tp=2, **EVERY_LAYER),
}


def all_differences(folder, cases, other=None):
    found = {name: differences(folder, case) for name, case in cases.items()}
    return found | ({} if other is None else {"other": other(folder)})


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Quick cases on two processes, and a clocked round, by rank."""
    cases = {name: case for name, case in (TWO | REPLAYED).items() if name in QUICK}
    return run_processes(2, all_differences, tmp_path_factory.mktemp("two"), cases, clocked)


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """All other cases on two processes, by rank."""
    cases = {name: case for name, case in (TWO | REPLAYED).items() if name not in QUICK}
    return run_processes(2, all_differences, tmp_path_factory.mktemp("more"), cases)


@pytest.fixture
def ranks(request, name):
    """What each rank found in a case."""
    return [rank[name] for rank in request.getfixturevalue("two" if name in QUICK else "more")]


def quick_first(cases):
    """Names of cases, of which all but the quick ones are slow."""
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in cases]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Every case on four processes, by rank."""
    return run_processes(4, all_differences, tmp_path_factory.mktemp("four"), FOUR)


@pytest.mark.parametrize("name", quick_first(TWO))
def test_two_processes_train_as_one_does(ranks, name):
    """Under every schedule, with stages that have no backward, and with compiled layers."""
    check(ranks)


@pytest.mark.parametrize("name", quick_first(REPLAYED))
def test_micro_batches_that_come_again_are_replayed_and_train_as_one_process_does(ranks, name):
    """Each in a slot of its own until its backward is done; a stage without one needs none."""
    require_replayed(ranks, whole=name != "gpipe, replayed")


@pytest.mark.parametrize("name", EVERY_REPLAYED)
@pytest.mark.slow
def test_stages_with_adapters_on_every_layer_are_replayed_too(tmp_path, name):
    """The first stage has a backward in every micro-batch."""
    ranks = run_processes(2, all_differences, tmp_path, EVERY_REPLAYED)

    require_replayed([rank[name] for rank in ranks], whole=True)


def require_replayed(ranks, *, whole):
    check(ranks)
    for rank, (forwards, backwards) in enumerate(found.replays for found in ranks):
        assert forwards > 0
        assert (backwards > 0) == (whole or rank == 1)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.slow
def test_four_processes_train_as_one_does(four, name):
    """Replicas of stages, and stages whose matrices are cut, included."""
    check([rank[name] for rank in four])


def check(ranks):
    assert max(rank.losses for rank in ranks) <= 1e-9
    assert max(rank.gradients for rank in ranks) <= 1e-9
    assert not any(rank.missing for rank in ranks)
    assert set().union(*(rank.held for rank in ranks)) == ranks[0].sites


def clocked(folder):
    mesh = open_mesh(MeshShape(pp=2), "cpu")
    plan = Plan(planner="pipeline", mesh=mesh.shape, cuts=(2,))
    made = compiled_once(folder / str(mesh.rank), 4, 2, True)
    model = SuperModel(made.group, made.backbone, made.jobs)
    load(model, part_of(model, plan, mesh))
    return clocked_round(PipelineRunner(model, plan, mesh), rows_of(), torch.ones(3))


def test_a_clocked_round_names_every_piece_of_work(two):
    """All ranks know how long each stage took; one without adapters below has no backward."""
    one, other = (rank["other"] for rank in two)

    forwards = {Action(stage, "F", m) for stage in range(2) for m in range(len(LENGTHS))}
    assert one == other
    assert one.keys() == forwards | {Action(1, "B", m) for m in range(len(LENGTHS))}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("base"), 4, upper=2, tie_word_embeddings=True)


def test_the_planner_gives_more_layers_to_a_stage_without_backward(model):
    """Two layers without adapters cost less than two with adapters and the loss."""
    plan = find_planner("pipeline").plan(model, MeshShape(pp=2))

    assert plan.cuts == (3,)
    assert plan.micro_batches % 2 == 0


def test_an_interleaved_plan_has_several_stages_a_process(model):
    """By default two."""
    plan = find_planner("pipeline").plan(
        model, MeshShape(pp=2), options={"schedule": "interleaved"}
    )

    assert plan.stages == 4


def test_too_few_micro_batches_are_refused_by_the_planner(model):
    """1F1B fills its stages first."""
    with pytest.raises(ScheduleRefused, match="at least as many micro-batches"):
        find_planner("pipeline").plan(model, MeshShape(pp=4), options={"micro_batches": 3})


@pytest.mark.parametrize("options", [{"processes": 1}, {"processes": 2, "schedule": "1f2b"}])
def test_a_plan_that_is_no_pipeline_is_refused(model, options):
    """One stage, or a schedule that does not exist."""
    with pytest.raises(PlanNotRunnable):
        find_planner("pipeline").plan(model, options=options)


def test_a_schedule_that_was_taken_out_is_refused_with_the_reason(model):
    """By its name."""
    with pytest.raises(PlanNotRunnable, match="never measured on GPUs"):
        find_planner("pipeline").plan(model, MeshShape(pp=2), options={"schedule": "zero-bubble"})


def test_a_plan_goes_through_a_file(model, tmp_path: Path):
    """What is read is what was planned."""
    plan = find_planner("pipeline").plan(model, MeshShape(pp=2, dp=2))
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == plan
