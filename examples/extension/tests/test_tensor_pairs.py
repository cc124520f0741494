"""`tensor-pairs`: its mesh, and that a plan is made."""

import pytest
from tlora_fx_extension.tensor_pairs import TensorPairs

import tlora_fx
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import PlanNotRunnable


def test_four_processes_are_two_pairs(jobs):
    """Replicas of pairs."""
    plan = TensorPairs().plan(tlora_fx.compile(jobs), options={"processes": 4})

    assert plan.mesh == MeshShape(dp=2, tp=2)


def test_a_mesh_without_pairs_is_refused(jobs):
    """The error says which it needs."""
    with pytest.raises(PlanNotRunnable, match="needs pairs"):
        TensorPairs().plan(tlora_fx.compile(jobs), MeshShape(dp=4))
