"""What a process holds of a matrix that is cut."""

from __future__ import annotations

from tests.parallel import tensor_cases as cases
from tlora_fx.compiler import compile
from tlora_fx.cost.plan import MeshShape
from tlora_fx.ir.storage import LocalShard
from tlora_fx.parallel.prepare import prepared
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.adapters.files import base_tensors


def test_a_piece_keeps_no_whole_matrix_in_memory(tmp_path):
    """Each frozen tensor's memory is as large as the tensor."""
    model = compile(cases.dropping_jobs(cases.base_of(tmp_path, "llama")))
    model = prepared(model, find_planner("tensor").plan(model, MeshShape(tp=2)))

    model.materialize(base_tensors(model.backbone), "cpu", LocalShard(None, 1))

    frozen = [leaf for leaf in model.net.parameters() if not leaf.requires_grad]
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in frozen)
