"""What is measured at the start of a run whose base nobody has profiled."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.cost.facts import small_model, small_round
from tests.parallel.processes import run_processes
from tests.runtime.groups import make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import NotProfilable
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.planners.auto import search
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.launching.launch import Launch
from tlora_fx.runtime.profiling.calibrating import calibrate, row_sizes
from tlora_fx.runtime.profiling.timing import collective_works

CPU = torch.device("cpu")


def test_a_model_is_calibrated_and_stays_without_weights(tmp_path: Path) -> None:
    """Its layers get the times of this machine, whatever it is; a plan is found by them."""
    model = small_model(tmp_path)
    profile = calibrate(model, Ranks(Mesh.alone(CPU)), Launch(), small_round(), CPU)

    assert not model.ready
    assert all(parameter.is_meta for parameter in model.net.parameters())
    assert profile.source == "calibrated"
    assert profile.estimated
    assert profile.hardware.gpu == "cpu"
    assert all(point.forward_ms > 0 for layer in profile.layers for point in layer.points)
    assert search(model, profile, small_round(), 4).best().estimate is not None


def test_a_base_without_layers_is_refused_with_the_plan_to_name(tmp_path: Path) -> None:
    """Of one layer none folds, so that `auto` has nothing to choose a plan by."""
    model = compile([make_job(tiny_base(tmp_path / "base", num_hidden_layers=1), "a")])
    with pytest.raises(NotProfilable) as refused:
        calibrate(model, Ranks(Mesh.alone(CPU)), Launch(), small_round(), CPU)

    for text in ("--plan single", "--plan replicated", "tlora-fx explain JOBS --node "):
        assert text in refused.value.help


def calibrated_together(folder: Path) -> tuple[str, list[str], int]:
    """The profile that a process has, its collectives, and how many layers it knows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(MeshShape(dp=size), CPU, rank, dp_rank=rank, world=dist.group.WORLD)
    launch = Launch(rank, size, rank, size)
    model = small_model(folder / str(rank))
    profile = calibrate(model, Ranks(mesh), launch, small_round(), CPU)
    known = {f"{one.operation} {one.tier} {one.processes}" for one in profile.collectives}
    covered = {layer.structure for layer in profile.layers}
    assert all(layer.structure in covered for layer in facts_of(model).layers)
    return profile.model_dump_json(), sorted(known), len(profile.collectives)


def warned_by_collectives() -> list[str]:
    """What is printed beside the progress of a start while collectives are measured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for work in collective_works(CPU, dist.group.WORLD, 1, 8).values():
            work()
    return [str(warning.message) for warning in caught]


def test_measuring_collectives_warns_of_nothing() -> None:
    """torch's deprecated names print a warning for each process of a user's start."""
    assert run_processes(1, warned_by_collectives) == [[]]


def test_processes_have_one_profile_with_their_collectives(tmp_path: Path) -> None:
    """Measured together; only one times layers."""
    (one, known, count), (two, _, _) = run_processes(2, calibrated_together, tmp_path)

    assert one == two
    assert known == ["all-gather node 2", "all-reduce node 2", "send node 2"]
    assert count == 6


@pytest.mark.parametrize(
    ("sequences", "length", "processes", "sizes"),
    [(16, 64, 4, (512, 2048)), (16, 64, 1, (1024, 2048)), (1, 8, 4, (64, 128)),
     (400, 1024, 8, (1024, 8192))],
)  # fmt: skip
def test_rows_are_measured_as_a_plan_will_cut_them(
    sequences: int, length: int, processes: int, sizes: tuple[int, int]
) -> None:
    """One process's part and the whole round, within bounds."""
    assert row_sizes(small_round(sequences, length), processes) == sizes
