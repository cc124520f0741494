"""`canonicalize`, `cse` and `dce`: less code, the same numbers."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.conftest import a_pass
from tests.passes.token_parallel.mixing import shared_values
from tlora_fx.numerics import Numerics
from tlora_fx.numerics.state import copy_state
from tlora_fx.passes.canonicalize import Canonicalize
from tlora_fx.passes.cse import Cse
from tlora_fx.passes.dce import Dce
from tlora_fx.pipeline import Event, Instrument, Pipeline, Runner
from tlora_fx.rewriting import Rewriter

aten = torch.ops.aten
FUSED = "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone"


class Counts(Instrument):
    """What passes counted."""

    def __init__(self):
        self.statistics = {}

    def after(self, done):
        """Keep it."""
        self.statistics.update(done.statistics)


@pytest.fixture
def cleaned(group_after, backbone):
    """Spoil a group, run a pass on it under all checks; what it counted."""

    def run(spoil, item):
        group = copy_state(group_after(FUSED, "plain", "few"))
        numerics, counts = Numerics(), Counts()
        numerics.know(backbone)
        runner = Runner(Pipeline(()), [numerics, counts], "numerics")
        runner.run_one(Event(1, a_pass(spoil, numerics="no"), "group", group))
        runner.run_one(Event(2, item, "group", group))
        return counts.statistics

    return run


def behind_norm(group, build):
    """Put something behind a norm of all jobs."""
    node = next(n for n, _ in shared_values(group) if "post_attention" in n.meta["path"])
    return node, Rewriter(node.graph).insert_after(node, lambda make: build(make, node))


def test_canonicalize_drops_what_changes_nothing(cleaned):
    """A product with 1 and two transpositions, behind each other."""

    def spoil(group):
        behind_norm(
            group,
            lambda make, x: make(
                aten.transpose.int,
                make(aten.transpose.int, make(aten.mul.Tensor, x, 1.0), 0, 1),
                0,
                1,
            ),
        )

    assert cleaned(spoil, Canonicalize())["dropped"] >= 2


def test_cse_computes_once(cleaned):
    """One of two equal calls goes, and what reads both reads one."""

    def spoil(group):
        behind_norm(
            group,
            lambda make, x: make(
                aten.mul.Tensor,
                make(aten.add.Tensor, make(aten.sin.default, x), make(aten.sin.default, x)),
                0.5,
            ),
        )

    assert cleaned(spoil, Cse())["merged"] >= 1


def test_dce_erases_what_nobody_reads(cleaned):
    """A chain of two."""

    def spoil(group):
        node = shared_values(group)[0][0]
        make = Rewriter(node.graph).at(node.next)
        make(aten.sin.default, make(aten.cos.default, node))

    assert cleaned(spoil, Dce())["erased"] == 2
