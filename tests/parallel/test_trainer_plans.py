"""Training over several processes comes to what one process comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.processes import run_processes
from tests.parallel.training import (
    evaluations_part,
    mixed_jobs,
    parting,
    quiet_jobs,
    sampled_jobs,
    train_all,
    write_base,
)

SHORT = {"max_steps": 2, "save_steps": 1}
LATER: dict[str, Any] = {"jobs": quiet_jobs, "at_once": True, "later": True}
#: Nobody waits for the rounds of these.
LOOKED_AT_LATER: dict[str, dict[str, Any]] = {
    "later-faulty": {"planner": "fsdp", "mesh": "dp=2", "fault": "calm", **LATER},
}
MORE_LOOKED_AT_LATER: dict[str, dict[str, Any]] = {
    "later-staged": {
        "planner": "pipeline", "mesh": "pp=2", "options": {"micro_batches": 2}, **LATER,
    },
    "later-replicated": {"planner": "replicated", "mesh": "dp=2", **LATER},
    "later-cut": {"planner": "tensor", "mesh": "tp=2", **LATER},
}  # fmt: skip
#: `at_once`: rounds end as on GPUs. Of a pipeline the first stage has nothing of two jobs.
ON_TWO: dict[str, dict[str, Any]] = {
    "sharded": {"planner": "fsdp", "mesh": "dp=2", "at_once": True},
    "begun-cut": {"planner": "tensor", "mesh": "tp=2", "fields": SHORT},
    "ended-staged": {
        "planner": "pipeline", "mesh": "pp=2", "resume": True, "folder": "begun-cut",
        "at_once": True,
    },
    "faulty": {"planner": "tensor", "mesh": "tp=2", "fault": "slow"},
    "parted": {"planner": "replicated", "mesh": "dp=2", "other_data": True},
    "sampled": {"planner": "replicated", "mesh": "dp=2", "jobs": sampled_jobs},
} | LOOKED_AT_LATER  # fmt: skip
#: Slow; of each, ON_TWO has a case of another plan.
MORE_ON_TWO: dict[str, dict[str, Any]] = {
    "replicated": {"planner": "replicated", "mesh": "dp=2"},
    "begun-alone": {"planner": "fsdp", "mesh": "dp=2", "resume": True},
    "staged": {"planner": "pipeline", "mesh": "pp=2", "options": {"micro_batches": 4}},
    "cut": {"planner": "tensor", "mesh": "tp=2"},
    "nano-batches": {
        "planner": "tensor", "mesh": "tp=2", "options": {"nano_batches": 2}, "controller": "aimd",
        "at_once": True,
    },
    "begun-sharded": {"planner": "fsdp", "mesh": "dp=2", "fields": SHORT},
} | MORE_LOOKED_AT_LATER  # fmt: skip
COMPILED: dict[str, dict[str, Any]] = {
    "recomputed": {
        "planner": "fsdp", "mesh": "dp=2", "options": {"recompute": True, "keep_gathered": True},
        "compiled": True,
    },
    "cut-compiled": {"planner": "tensor", "mesh": "tp=2", "compiled": True},
}  # fmt: skip
ON_FOUR: dict[str, dict[str, Any]] = {
    "four-shards": {"planner": "fsdp", "mesh": "dp=4"},
    "cut-replicas": {"planner": "tensor", "mesh": "dp=2,tp=2"},
    "cut-recomputed": {
        "planner": "tensor", "mesh": "dp=2,tp=2", "options": {"recompute": True},
    },
    "staged-replicas": {"planner": "pipeline", "mesh": "pp=2,dp=2"},
    "staged-shards": {
        "planner": "pipeline",
        "mesh": "pp=2,dp=2",
        "options": {"shard_base": True},
    },
    "staged-shards-kept": {
        "planner": "pipeline",
        "mesh": "pp=2,dp=2",
        "options": {
            "shard_base": True, "keep_gathered": True, "recompute": True, "schedule": "gpipe",
        },
        "compiled": True,
    },
    "staged-cuts": {"planner": "pipeline", "mesh": "pp=2,tp=2"},
}  # fmt: skip
MOVED: dict[str, dict[str, Any]] = {
    "begun-for-four": ON_FOUR["staged-shards"] | {"resume": True},
    "begun-in-shards": ON_FOUR["staged-shards-kept"] | {"fields": SHORT},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plans")
    write_base(made, layers=2)
    cases: dict[str, dict[str, Any]] = {
        "alone": {"planner": "single"},
        "later-alone": {"planner": "single", "jobs": quiet_jobs},
        "sampled-alone": {"planner": "single", "jobs": sampled_jobs},
    }
    train_all(made, cases)
    return made


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_processes(2, train_all, folder, ON_TWO)


@pytest.fixture(scope="module")
def more(folder: Path) -> list[dict[str, Any]]:
    train_all(folder, {"begun-alone": {"planner": "single", "fields": SHORT}})
    return run_processes(2, train_all, folder, MORE_ON_TWO)


@pytest.fixture(scope="module")
def compiled(folder: Path) -> list[dict[str, Any]]:
    return run_processes(2, train_all, folder, COMPILED)


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    train_all(folder, {"begun-for-four": {"planner": "single", "fields": SHORT}})
    return run_processes(4, train_all, folder, ON_FOUR | MOVED)


def apart(folder: Path, name: str) -> tuple[float, float]:
    return parting(folder, "alone", name, mixed_jobs(folder))


def test_two_processes_train_and_measure_what_one_does(folder: Path, two: list[Any]) -> None:
    """Losses, adapters, and evaluations at the same steps are those of one process."""
    require_trained_as_alone(folder, two, "sharded")


def test_replicas_train_by_losses_with_a_name(folder: Path, two: list[Any]) -> None:
    """Losses, adapters and evaluations are those of one process."""
    jobs = sampled_jobs(folder)
    losses, adapters = parting(folder, "sampled-alone", "sampled", jobs)

    assert losses <= 1e-9, two[0]["sampled"]
    assert adapters <= 1e-7
    assert evaluations_part(folder, "sampled-alone", "sampled", jobs) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicated", "staged", "cut", "nano-batches"])
def test_two_processes_of_other_plans_train_and_measure_what_one_does(
    folder: Path, more: list[Any], name: str
) -> None:
    """Also of nano-batches with a controller."""
    require_trained_as_alone(folder, more, name)


def require_trained_as_alone(folder: Path, told: list[Any], name: str) -> None:
    losses, adapters = apart(folder, name)

    assert losses <= 1e-9, told[0][name]
    assert adapters <= 1e-7
    assert evaluations_part(folder, "alone", name, mixed_jobs(folder)) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", list(COMPILED))
def test_compiled_layers_train_and_measure_what_eager_ones_do(
    folder: Path, compiled: list[Any], name: str
) -> None:
    """On two processes; `test_pipeline.py` has compiled stages among its quick cases."""
    require_trained_as_alone(folder, compiled, name)
    _same_everywhere(compiled, COMPILED)


def test_what_breaks_a_job_on_one_process_ends_it_on_all(folder: Path, two: list[Any]) -> None:
    """The others train to their end, as one process trains them."""
    status = json.loads((folder / "faulty" / "slow" / "status.json").read_text())
    others = [job for job in mixed_jobs(folder) if job.name != "slow"]

    assert status["status"] == "failed", two[0]["faulty"]
    assert "ValueError: a callback that is broken" in status["reason"]
    assert max(parting(folder, "alone", "faulty", others)) <= 1e-7


@pytest.mark.slow
def test_no_order_of_a_set_parts_processes(folder: Path) -> None:
    """Weights of a sharded base are gathered in one order everywhere, as for DoRA's magnitudes."""
    case = {"own-hashes": ON_TWO["sharded"] | {"at_once": False}}
    told = run_processes(2, train_all, folder, case, own_hashes=True)

    assert max(apart(folder, "own-hashes")) <= 1e-7, told[0]


def test_rounds_that_are_looked_at_later_are_those_that_are_waited_for(
    folder: Path, two: list[Any]
) -> None:
    """A job that breaks itself, or is broken on one process, ends on both, and costs nobody."""
    require_same_as_waited_for(folder, two, "later-faulty")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MORE_LOOKED_AT_LATER))
def test_rounds_of_other_plans_that_are_looked_at_later_are_those_that_are_waited_for(
    folder: Path, more: list[Any], name: str
) -> None:
    """Replicated, staged, and of a base that is cut."""
    require_same_as_waited_for(folder, more, name)


def require_same_as_waited_for(folder: Path, told: list[Any], name: str) -> None:
    fault = (LOOKED_AT_LATER | MORE_LOOKED_AT_LATER)[name].get("fault", "")
    jobs = [job for job in quiet_jobs(folder) if job.name != fault]
    alone, wild = (
        json.loads((folder / run / "wild" / "status.json").read_text())
        for run in ("later-alone", name)
    )

    assert max(parting(folder, "later-alone", name, jobs)) <= 1e-7, told[0][name]
    assert wild["status"] == alone["status"] == "failed"
    assert (wild["step"], wild["reason"][:7]) == (alone["step"], alone["reason"][:7])
    if fault:
        broken = json.loads((folder / name / fault / "status.json").read_text())
        assert "ValueError: a callback that is broken" in broken["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ON_FOUR))
def test_four_processes_train_and_measure_what_one_does(
    folder: Path, four: list[Any], name: str
) -> None:
    """So are those of four."""
    require_trained_as_alone(folder, four, name)


def test_two_processes_end_with_the_same_numbers(two: list[Any]) -> None:
    """Losses are bitwise the same on every process, and adapters on every replica."""
    _same_everywhere(two, ON_TWO)


@pytest.mark.slow
def test_two_processes_of_other_plans_end_with_the_same_numbers(more: list[Any]) -> None:
    """Replicated, staged, cut and with nano-batches too."""
    _same_everywhere(more, MORE_ON_TWO)


@pytest.mark.slow
def test_four_processes_end_with_the_same_numbers(four: list[Any]) -> None:
    """Of four too."""
    _same_everywhere(four, ON_FOUR)


def _same_everywhere(told: list[Any], cases: dict[str, dict[str, Any]]) -> None:
    for name, case in cases.items():
        first = told[0][name]
        for other in (each[name] for each in told[1:]):
            replicas = case["mesh"].startswith("dp") and "tp" not in case["mesh"]
            assert _losses(other) == _losses(first), name
            assert other == first or not replicas, name


def _losses(told: list[tuple[str, float]] | str) -> list[str]:
    if isinstance(told, str):
        return [told]
    return [loss for loss, _ in told]


def test_a_checkpoint_moves_to_another_plan(folder: Path, two: list[Any]) -> None:
    """What a cut base has begun stages end, as if one process had done it all."""
    losses, adapters = apart(folder, "begun-cut")

    assert losses <= 1e-9, two[0]
    assert adapters <= 1e-7


@pytest.mark.slow
def test_a_checkpoint_of_one_process_moves_to_a_sharded_plan(folder: Path, more: list[Any]) -> None:
    """As if it had done it all."""
    losses, adapters = apart(folder, "begun-alone")

    assert losses <= 1e-9, more[0]
    assert adapters <= 1e-7


@pytest.mark.slow
def test_a_checkpoint_moves_back_to_one_process(folder: Path, more: list[Any]) -> None:
    """What a sharded plan has begun one process ends."""
    case = {"planner": "single", "resume": True, "folder": "begun-sharded"}

    assert not isinstance(train_all(folder, {"ended": case})["ended"], str), more[0]
    assert max(apart(folder, "begun-sharded")) <= 1e-7


@pytest.mark.slow
def test_a_checkpoint_moves_into_sharded_stages_and_out(folder: Path, four: list[Any]) -> None:
    """What one process has begun they end, and the other way round."""
    case = {"planner": "single", "resume": True, "folder": "begun-in-shards"}

    assert max(apart(folder, "begun-for-four")) <= 1e-7, four[0]["begun-for-four"]
    assert not isinstance(train_all(folder, {"ended": case})["ended"], str)
    assert max(apart(folder, "begun-in-shards")) <= 1e-7


def test_processes_with_other_rows_stop(two: list[Any]) -> None:
    """A process that would train on other rows stops all, by name."""
    for told in two:
        assert "RanksParted" in told["parted"]
        assert "rank" in told["parted"]
