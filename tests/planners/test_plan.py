"""Plans, meshes, and what is refused before anything runs."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.groups import make_data, make_job, tiny_base
from tlora_fx import compile
from tlora_fx.cli.arguments.start_options import StartOptions, planned
from tlora_fx.cost.load import balanced_cuts
from tlora_fx.cost.plan import MeshShape, Plan, model_fingerprint
from tlora_fx.errors import (
    LaunchError,
    MeshDoesNotFit,
    NoGradient,
    NotElementwise,
    PlanFileError,
    PlanNotForModel,
    PlanNotRunnable,
    PluginBroken,
    RanksParted,
    UnknownPlanner,
)
from tlora_fx.model.batch import JobTokens
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import FirstStep, GradientBuckets, require_nano
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.parallel.prepare import fitting_meshes, planned_passes, prepared, require_fits
from tlora_fx.planners.builtin import activation_bytes, base_bytes, choose, trained_bytes
from tlora_fx.planners.protocol import Planner, find_planner, planner_names, planner_of
from tlora_fx.runtime.adapters.files import base_tensors
from tlora_fx.runtime.checks import longest_row
from tlora_fx.runtime.controllers import NanoBatches, find_controller
from tlora_fx.runtime.data.batching import Cutting, cut_round
from tlora_fx.runtime.distributed import _require_one_table, require_elementwise
from tlora_fx.runtime.launching.launch import Launch, choose_plan
from tlora_fx.runtime.trainer import Trainer, TrainerOptions


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def model(base: Any) -> SuperModel:
    return compile([make_job(base, "a"), make_job(base, "b", lora={"r": 2})])


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """All of it, in a folder that was not there."""
    plan = Plan(planner="pipeline", mesh=MeshShape(pp=2, dp=3), cuts=(4,), micro_batches=8)

    plan.save(tmp_path / "plans" / "plan.json")

    assert Plan.load(tmp_path / "plans" / "plan.json") == plan


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"planner": "x", "gpus": 4}', "gpus"),
        ('{"planner": "x", "mesh": {"pp": 2}}', "1 stages do not divide over pp=2"),
        ('{"planner": "x", "mesh": {"pp": 2}, "cuts": [4, 2, 6]}', "cuts must grow"),
        ('{"planner": "x", "schedule": "zero-bubble"}', "never measured on GPUs"),
        ('{"planner": "x", "sequence_parallel": true}', "slower than whole rows at every size"),
        ("no json", "Invalid JSON"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """The error says what is wrong with it."""
    (tmp_path / "plan.json").write_text(text)

    with pytest.raises(PlanFileError, match=told):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_written_before_rows_were_no_longer_cut_is_read(tmp_path: Path) -> None:
    """Its file says that they are not."""
    (tmp_path / "plan.json").write_text('{"planner": "x", "sequence_parallel": false}')

    assert Plan.load(tmp_path / "plan.json") == Plan(planner="x")


def test_a_mesh_is_named_by_its_dimensions() -> None:
    """What is left out is 1; anything else is refused."""
    assert MeshShape.parse("pp=2, tp=4") == MeshShape(pp=2, tp=4)
    assert str(MeshShape(dp=3)) == "pp=1,dp=3,tp=1"
    for text in ("dp=0", "ep=2", "dp=two", "dp=2,dp=4"):
        with pytest.raises(PlanFileError, match="no mesh"):
            MeshShape.parse(text)


def test_a_plan_for_another_model_is_refused(base: Any, model: SuperModel) -> None:
    """A job's rank is part of what a plan was made for."""
    other = compile([make_job(base, "a"), make_job(base, "b", lora={"r": 8})])
    plan = find_planner("single").plan(other)

    assert plan.model == model_fingerprint(other)
    with pytest.raises(PlanNotForModel):
        prepared(model, plan)


def test_a_mesh_that_does_not_fit_names_those_that_do(model: SuperModel) -> None:
    """Four heads with two of keys and two layers: tp=4 and pp=4 cannot run, tp=2 can."""
    with pytest.raises(MeshDoesNotFit) as error:
        require_fits(model, MeshShape(tp=4))

    assert "2 key-value heads do not divide by tp=4" in str(error.value)
    assert "(pp=1,dp=2,tp=2)" in str(error.value)
    assert MeshShape(pp=4) not in fitting_meshes(model, 4)
    assert MeshShape(pp=2, tp=2) in fitting_meshes(model, 4)


class Failing(Planner):
    """A planner of a package, with a mistake in it."""

    name = "failing"

    def make(self, model, shape, options, profile):
        """Read what is no JSON, in a library."""
        return json.loads("{")


class Planless(Planner):
    """A planner that forgets to return its plan."""

    name = "planless"

    def make(self, model, shape, options, profile):
        """Do nothing."""


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Failing, r"planner 'failing' raised JSON\w+\n  at     test_plan.py:\d+  return json"),
        (Planless, r"planner 'planless' made no plan\n  expected  a tlora_fx.cost.plan.Plan"),
    ],
)
def test_a_foreign_planner_that_fails_is_blamed_by_name(model: SuperModel, kind, told) -> None:
    """With the line of its own code."""
    with pytest.raises(PluginBroken, match=told):
        kind().plan(model)


def test_an_unknown_planner_is_told_with_the_nearest() -> None:
    """Planners are found by their names."""
    assert {"single", "replicated", "fsdp"} <= set(planner_names())
    with pytest.raises(UnknownPlanner, match="replicated"):
        find_planner("replicate")


@pytest.mark.parametrize(
    ("plan", "whole", "grows"),
    [
        (Plan(planner="single"), True, True),
        (Plan(planner="replicated", mesh=MeshShape(dp=2)), True, False),
        (Plan(planner="fsdp", mesh=MeshShape(dp=2), shard_base=True), False, False),
        (Plan(planner="tensor", mesh=MeshShape(tp=2)), False, False),
        (Plan(planner="pipeline", mesh=MeshShape(pp=2), cuts=(2,)), False, False),
        (Plan(planner="auto", mesh=MeshShape(dp=2)), True, False),
        (Plan(planner="auto", mesh=MeshShape(dp=2), shard_base=True), False, False),
        (Plan(planner="auto", mesh=MeshShape(dp=2, tp=2)), False, False),
        (Plan(planner="of-another-package"), False, False),
    ],
    ids=str,
)
def test_planners_say_what_their_plans_allow(plan: Plan, whole: bool, grows: bool) -> None:
    """One that is not installed, or does not answer, allows nothing."""
    planner = planner_of(plan)

    assert (planner.holds_whole_base(plan), planner.may_grow(plan)) == (whole, grows)


def test_planners_of_replicas_refuse_other_dimensions(model: SuperModel) -> None:
    """Single is for one process, fsdp for replicas."""
    with pytest.raises(PlanNotRunnable, match="one process"):
        find_planner("single").plan(model, MeshShape(dp=2))
    with pytest.raises(PlanNotRunnable, match="replicas only"):
        find_planner("fsdp").plan(model, MeshShape(tp=2))


def test_a_plan_with_a_budget_of_recomputation_says_so_in_the_code(model: SuperModel) -> None:
    """The pass is told the budget; nano-batches, which cut layers, are refused beside it."""
    plan = Plan(planner="single", recompute=True, recompute_budget=0.4)

    made = prepared(model, plan)

    assert planned_passes(plan) == ["recompute-layers{budget=0.4}"]
    assert made.source.count("@joint(budget=0.4)") == 1
    assert "@recomputed" not in made.source
    with pytest.raises(PlanNotRunnable, match="a budget of recomputation needs whole"):
        require_nano(plan, wanted=True)
    with pytest.raises(ValueError, match="recompute_budget needs recompute"):
        Plan(planner="single", recompute_budget=0.4)


def test_a_plan_that_recomputes_marks_the_layers(model: SuperModel) -> None:
    """The pass runs once, on a model without weights; the loss stays as it is."""
    plan = find_planner("single").plan(model, options={"recompute": True})

    made = prepared(model, plan)

    assert planned_passes(plan) == ["recompute-layers"]
    assert made.source.count("@recomputed") == 1
    with pytest.raises(PlanNotRunnable, match="compile the jobs again"):
        prepared(made, plan)


def test_memory_decides_what_is_kept(model: SuperModel) -> None:
    """With room for all, weights stay gathered; with little, layers are computed again."""
    needed = base_bytes(model) + activation_bytes(model, 4096)

    assert choose(model, 4, None, 4096) == (False, False)
    assert choose(model, 4, 3 * needed, 4096) == (True, False)
    assert choose(model, 4, needed // 2, 4096) == (False, True)


def test_memory_decides_by_what_layers_keep_as_they_run(model: SuperModel) -> None:
    """Compiled ones keep less, so more of them fit."""
    kept = activation_bytes(model, 512, compiled=True)
    room = base_bytes(model) + 2 * kept

    assert 2 * kept < activation_bytes(model, 512)
    assert choose(model, 4, room, 512, compiled=True) == (True, False)
    assert choose(model, 4, room, 512) == (False, True)


@pytest.mark.parametrize(
    ("compiled", "longest", "recomputes"), [(True, 8, False), (False, 8, True), (True, 40, True)]
)
def test_a_start_counts_its_longest_row_and_whether_layers_are_compiled(
    base: Any, model: SuperModel, compiled: bool, longest: int, recomputes: bool
) -> None:
    """On cards that hold what compiled layers keep of short samples, and not more."""
    data = make_data(model.jobs, longest=longest)
    row = longest_row(model.jobs, make_data(model.jobs, longest=8), Cutting.of(model, 4096), 2)
    memory = int(1.3 * (trained_bytes(model) + base_bytes(model)))
    memory += int(1.3 * activation_bytes(model, row, compiled=True))
    options = StartOptions(jobs=Path("jobs.yaml"), plan="fsdp", compiled=compiled)

    plan = planned(options, Launch(size=2), memory, model, data, None)

    assert plan.recompute == recomputes


def test_a_plan_needs_its_processes(model: SuperModel, tmp_path: Path) -> None:
    """Without torchrun the error prints the command."""
    with pytest.raises(LaunchError, match="torchrun --nproc-per-node 2 -m tlora_fx"):
        choose_plan("fsdp", model, Launch(), MeshShape(dp=2))
    Plan(planner="x", mesh=MeshShape(tp=2)).save(tmp_path / "plan.json")
    with pytest.raises(LaunchError, match="another mesh"):
        choose_plan(str(tmp_path / "plan.json"), model, Launch(size=2), MeshShape(dp=2))
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        Launch.found({"RANK": "0", "WORLD_SIZE": "2"})
    assert Launch.found({}) == Launch()


def test_optimizers_that_read_matrices_are_refused_under_tp(base: Any) -> None:
    """Adafactor's rows and columns are not a piece's."""
    jobs = [make_job(base, "a", optim="adafactor")]
    mesh = Mesh(MeshShape(tp=2), torch.device("cpu"))

    require_elementwise(jobs, Mesh.alone("cpu"))
    with pytest.raises(NotElementwise, match="job 'a'"):
        require_elementwise(jobs, mesh)


def test_a_lost_gradient_stops_the_run(model: SuperModel) -> None:
    """A first step whose backward reached no adapter is refused, by site and job."""
    model.materialize(base_tensors(model.backbone), "cpu")
    row = Cutting.of(model, 64)
    first = FirstStep(model, Mesh.alone("cpu"))

    with pytest.raises(NoGradient, match="q_proj: a, b"):
        first.require_gradients([_packed(model, row)])


def test_a_model_that_never_ran_is_given_back(base: Any) -> None:
    """What watches its first step does not keep it."""
    model = compile([make_job(base, "a")])
    model.materialize(base_tensors(model.backbone), "cpu")
    first = FirstStep(model, Mesh.alone("cpu"))
    known = weakref.ref(model)

    del model, first
    gc.collect()

    assert known() is None


def _packed(model: SuperModel, cutting: Cutting) -> Any:
    from tlora_fx.model.batch import pack

    tokens = [JobTokens([(1, 2, 3)], [(1, 2, 3)]) for _ in model.jobs]
    return pack(cut_round([tokens], 1, cutting)[0])


def test_gradients_move_into_one_buffer() -> None:
    """Every gradient is a view that begins on a boundary of 256 bytes."""
    net = torch.nn.Linear(3, 5)

    class Model:
        def __init__(self) -> None:
            self.net = net

        def partial_sums(self) -> list[Any]:
            return []

        def forget_views(self) -> None:
            pass

    group: Any = object()
    mesh = Mesh(MeshShape(dp=2), torch.device("cpu"), dp=group, dp_tp=group)
    net.weight.data = net.weight.data.t().contiguous().t()
    ((_, flat),) = GradientBuckets(Model(), mesh).buckets  # type: ignore[arg-type]

    net(torch.ones(2, 3)).sum().backward()

    assert flat.numel() == 128
    assert net.weight.grad is not None
    assert net.weight.grad.stride() == net.weight.stride()
    assert float(flat.sum()) == float(net.weight.grad.sum() + net.bias.grad.sum())


def test_ranks_that_part_are_named() -> None:
    """The rows of most count as right."""
    _require_one_table([7, 7, 7])
    with pytest.raises(RanksParted, match="others on rank 1"):
        _require_one_table([7, 8, 7])


JOBS = st.lists(st.lists(st.integers(1, 12), max_size=6), min_size=1, max_size=4)


@given(JOBS, st.integers(1, 6), st.integers(4, 30), st.booleans())
def test_cut_rows_hold_what_the_rows_held(
    lengths: list[list[int]], unit: int, longest: int, whole: bool
) -> None:
    """Every token keeps its index in the step, and no sequence is cut."""
    row = [
        JobTokens([tuple(range(n)) for n in own], [tuple(range(n)) for n in own], job, 3)
        for job, own in enumerate(lengths)
    ]

    parts = cut_round([row], unit, Cutting(whole, 100.0, longest))

    assert len(parts) % unit == 0
    for job, own in enumerate(row):
        pieces = [part[job] for part in parts if part[job].sequences]
        assert [ids for piece in pieces for ids in piece.sequences] == list(own.sequences)
        before = 0
        for piece in pieces:
            assert piece.offset == before
            before += sum(map(len, piece.sequences))
        if whole:
            assert len(pieces) <= 1
    if not whole and unit > 1:
        _require_short(parts, longest)


def _require_short(parts: Sequence[list[JobTokens]], longest: int) -> None:
    for part in parts:
        sequences = [ids for job in part for ids in job.sequences]
        assert sum(map(len, sequences)) <= longest or len(sequences) == 1


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 5))
def test_cuts_are_as_even_as_a_line_allows(costs: list[int], parts: int) -> None:
    """No other cut of the line has a cheaper dearest part."""
    cuts = balanced_cuts(costs, parts)

    assert len(cuts) == parts + 1
    assert (cuts[0], cuts[-1]) == (0, len(costs))
    dearest = max(sum(costs[a:b]) for a, b in pairwise(cuts))
    assert dearest == _least(tuple(costs), parts)


def _least(costs: tuple[int, ...], parts: int) -> int:
    if parts == 1 or not costs:
        return sum(costs)
    return min(
        max(sum(costs[:cut]), _least(costs[cut:], parts - 1)) for cut in range(len(costs) + 1)
    )


@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(planner="pipeline", mesh=MeshShape(pp=2), cuts=(1,)), "whole micro-batches"),
        (Plan(planner="fsdp", mesh=MeshShape(dp=2), shard_base=True), "called once a row"),
    ],
)
def test_nano_batches_of_stages_and_of_a_sharded_base_are_refused(
    model: SuperModel, tmp_path: Path, plan: Plan, why: str, controlled: bool
) -> None:
    """A stage takes whole micro-batches, and layers are gathered for one call a row."""
    plan = plan.model_copy(update={"nano_batches": 1 if controlled else 2})
    deciding = NanoBatches(find_controller("fixed")) if controlled else None
    options = TrainerOptions(nano_batches=deciding)

    with pytest.raises(PlanNotRunnable, match=why):
        Trainer(model, output=tmp_path, device="cpu", plan=plan, options=options)


@pytest.mark.parametrize(
    ("planner", "options", "told"),
    [
        ("tensor", {"sequence_parallel": True}, "sequence parallelism was taken out"),
        ("fsdp", {"recompte": True}, "nearest  *recompute"),
        ("pipeline", {"schedule": "1f2b"}, "1f1b"),
        ("single", {"processes": 0}, "option 'processes' cannot be 0"),
    ],
)
def test_an_option_that_a_planner_does_not_have_is_refused_by_its_name(
    model: SuperModel, planner: str, options: dict[str, Any], told: str
) -> None:
    """With the nearest name, the values there are, or why it was taken out."""
    with pytest.raises(PlanNotRunnable, match=told):
        find_planner(planner).plan(model, options=options)
