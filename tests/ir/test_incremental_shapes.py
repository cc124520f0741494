"""Values that were propagated pass by pass are those of running every operator anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch.utils._pytree as pytree
from torch import Tensor

from tests.models import FAMILIES, SHALLOW, base_of, mixed_jobs
from tests.sampled import sampled
from tlora_fx.compiler import DEFAULT_PIPELINE, run_passes
from tlora_fx.ir import shapes
from tlora_fx.ir.shapes import RUN, propagate
from tlora_fx.ir.verifier import owners
from tlora_fx.pipeline import Instrument

PASSES = f"{DEFAULT_PIPELINE},canonicalize,cse,dce,recompute-layers"


def form_of(value: Any) -> list[Any]:
    """Types, sizes, strides and symbols of a value; its offset in its storage is not traced."""
    leaves = pytree.tree_leaves(value)
    return [
        (leaf.dtype, leaf.device, str((*leaf.shape, *leaf.stride())))
        if isinstance(leaf, Tensor)
        else str(leaf)
        for leaf in leaves
    ]


class Anew(Instrument):
    """Propagates all graphs once more after each pass, with nothing known of what ran before."""

    def __init__(self, known: dict[Any, Any]) -> None:
        self.known = known
        self.ran: dict[str, list[int]] = {}

    def after(self, done):
        full = sum(self._compare(owner, done) for owner in owners(done.graphs))
        self.ran.setdefault(done.item.name, []).extend((done.shapes, full))

    def _compare(self, owner, done) -> int:
        nodes = [node for graph in owner.graphs() for node in graph.nodes]
        kept = [(node.meta.get("val"), node.meta.pop(RUN, None)) for node in nodes]
        self.known.clear()
        ran = sum(propagate(block.graph) for block in owner.blocks.values())
        ran += propagate(owner.root, owner.blocks) if len(owner.root.nodes) else 0
        for node, (value, run) in zip(nodes, kept, strict=True):
            anew = node.meta.get("val")
            assert form_of(anew) == form_of(value), f"{node} after {done}"
            node.meta.update({"val": value} if value is not None else {})
            node.meta.update({RUN: run} if run is not None else {})
        return ran


@pytest.mark.parametrize("family", sampled(FAMILIES, len(FAMILIES)))
def test_incremental_shapes_are_those_of_full_propagation(family, tmp_path, monkeypatch):
    """After every pass, on every graph; passes that change no operator run none."""
    known: dict[Any, Any] = {}
    monkeypatch.setattr(shapes, "_RESULTS", known)
    anew = Anew(known)

    base = base_of(tmp_path, family, "float32", **SHALLOW.get(family, {}))
    jobs = mixed_jobs(base, FAMILIES[family].targets)
    run_passes(jobs[1:], PASSES, instruments=[anew])

    assert set(anew.ran) == set(PASSES.split(","))
    for name in ("tag-roles", "check-token-parallel", "recompute-layers"):
        incremental, full = anew.ran[name][::2], anew.ran[name][1::2]
        assert sum(incremental) == 0
        assert sum(full) > 0
