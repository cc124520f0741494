"""What must hold of roles and jobs after every pass."""

from __future__ import annotations

import pytest
import torch

from tests.models import error_of
from tlora_fx.errors import TagsBroken
from tlora_fx.ir.graph import is_call
from tlora_fx.ir.verifier import check_tags

FUSED = "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone"
LOWERED = f"{FUSED},lower-adapters,key-dropouts,lower-loss"
READ = torch.ops.tlora_fx.segment_read.default


@pytest.fixture
def group(group_after):
    """Two jobs, fused and not yet lowered; each test breaks its own."""
    return group_after(FUSED, "plain", "dora", fresh=True)


def _adapter(group, job):
    return next(
        node
        for graph in group.graphs()
        for node in graph.nodes
        if node.meta.get("role") == "adapter"
        and node.meta["jobs"] == (job,)
        and is_call(node, torch.ops.aten.linear.default)
    )


def test_what_passes_leave_holds(group_after):
    """Jobs of all kinds, at every group pass."""
    for passes in (FUSED, LOWERED):
        check_tags(group_after(passes, "plain", "few", "dora", "head"))


def _no_role(group):
    del _adapter(group, "plain").meta["role"]


def _no_job(group):
    _adapter(group, "plain").meta["jobs"] = ()


def _two_jobs(group):
    _adapter(group, "plain").meta["jobs"] = ("plain", "dora")


def _unknown_job(group):
    _adapter(group, "plain").meta["jobs"] = ("stranger",)


def _read_by_another_job(group):
    mine, theirs = _adapter(group, "plain"), _adapter(group, "dora")
    read = next(n for n in theirs.graph.nodes if is_call(n, READ) and n.meta["jobs"] == ("dora",))
    assert mine.graph is theirs.graph
    theirs.update_arg(0, next(n for n in mine.all_input_nodes if n.op != "get_attr"))
    assert read.graph is mine.graph


def _shared_reads_one_job(group):
    node = _adapter(group, "plain")
    shared = [n for n in node.graph.nodes if n.meta.get("role") == "shared" and n.args]
    shared[-1].update_arg(0, node)


def _shared_serves_one(group):
    node = next(n for n in group.root.nodes if n.meta.get("role") == "shared")
    node.meta["jobs"] = ("plain",)


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        (_no_role, "role None"),
        (_no_job, "exactly one job"),
        (_two_jobs, "exactly one job"),
        (_unknown_job, "jobs among plain, dora"),
        (_read_by_another_job, "only"),
        (_shared_reads_one_job, "read by nodes of plain only"),
        (_shared_serves_one, "serves all jobs"),
    ],
)
def test_a_broken_tag_is_named(group, breaks, told):
    """The node, what was expected of it, what was found."""
    breaks(group)

    text = error_of(lambda: check_tags(group), TagsBroken)

    assert told in text
    assert "node" in text


def test_a_second_loss_is_refused(group_after):
    """The model returns one loss, an entry a job."""
    group = group_after(LOWERED, "plain", fresh=True)
    next(n for n in group.root.nodes if n.op == "placeholder").meta["role"] = "loss"

    assert "one loss" in error_of(lambda: check_tags(group), TagsBroken)
