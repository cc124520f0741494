"""Operators of other packages in fused graphs: by what they were registered with."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.models import error_of
from tests.numerics.conftest import a_pass
from tests.passes.token_parallel.mixing import calls, shared_values
from tlora_fx.errors import NotIsolated, TagsBroken
from tlora_fx.ir.graph import placeholders
from tlora_fx.ir.lora_sites import lowered_site
from tlora_fx.numerics.state import copy_state
from tlora_fx.ops import JobOperator, job_operator, register_operator
from tlora_fx.passes.token_parallel.rules import RULES, rule
from tlora_fx.pipeline import Event, Pipeline, Runner
from tlora_fx.rewriting import Rewriter

aten = torch.ops.aten
ops = torch.ops.tests_registered
LOWERED = (
    "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone,lower-adapters"
)


@torch.library.custom_op("tests_registered::gated", mutates_args=())
def gated(x: Tensor, by: Tensor, cu_seqlens: Tensor, power: float = 1.0) -> Tensor:
    """Stands for what works on sequences."""
    return x * by**power


@torch.library.custom_op("tests_registered::adapted", mutates_args=())
def adapted(
    x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, segments: Tensor
) -> Tensor:
    """Stands for adapters of all jobs."""
    return x.new_zeros(*x.shape[:-1], b.shape[1])


@torch.library.custom_op("tests_registered::scaled", mutates_args=())
def scaled(x: Tensor, by: list[Tensor], segments: Tensor, jobs: list[int]) -> Tensor:
    """Stands for what reads what each job trains."""
    return x.clone()


gated.register_fake(lambda x, *rest: torch.empty_like(x))
adapted.register_fake(lambda x, a, b, *rest: x.new_empty(*x.shape[:-1], b.shape[1]))
scaled.register_fake(lambda x, *rest: torch.empty_like(x))


class Gated(JobOperator):
    """By sequences."""

    target: ClassVar[Any] = ops.gated.default
    rows: ClassVar = {"x": 1, "by": 1}
    tables: ClassVar = ("cu_seqlens",)

    @classmethod
    def mixes(cls, arguments: Any) -> str:
        return "its power is zero" if arguments.get("power") == 0 else ""


class Adapted(JobOperator):
    """By banks."""

    target: ClassVar[Any] = ops.adapted.default
    rows: ClassVar = {"x": 1}
    tables: ClassVar = ("segments",)
    banks: ClassVar = ("a", "b")


class Scaled(JobOperator):
    """By what jobs train."""

    target: ClassVar[Any] = ops.scaled.default
    rows: ClassVar = {"x": 1}
    tables: ClassVar = ("segments",)
    per_job: ClassVar = ("by",)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """What is registered within a test is forgotten behind it."""
    monkeypatch.setattr(job_operator, "_known", dict(job_operator._known))


@pytest.fixture(scope="module")
def lowered(group_after):
    """Two plain jobs behind lower-adapters."""
    return copy_state(group_after(LOWERED, "plain", "few"))


@pytest.fixture
def run(lowered):
    """Run an edit as a pass; returns the graphs."""

    def run_behind(edit):
        group = copy_state(lowered)
        Runner(Pipeline(())).run_one(Event(1, a_pass(edit, numerics="no"), "group", group))
        return group

    return run_behind


def gate(by=lambda make, x: x, table="cu_seqlens", **options):
    """Put `gated` behind a value that a layer's jobs share."""

    def edit(group):
        x = next(n for n, _ in shared_values(group) if table in placeholders(n.graph))
        given = placeholders(x.graph)[table]

        def build(make):
            return make(ops.gated.default, x, by(make, x), given, **options)

        Rewriter(x.graph).insert_after(x, build)

    return edit


def test_what_is_not_registered_is_refused_with_the_way_to_do_it(run):
    """A token rule is not asked where a table of the row comes in, and the help says so."""
    text = error_of(lambda: run(gate()), NotIsolated)

    assert "it computes with a table of the whole row" in text
    assert "tlora_fx.ops.register_operator" in text


def test_a_token_rule_alone_does_not_open_tables(run, monkeypatch):
    """It knows dimensions, not tables."""
    monkeypatch.setattr("tlora_fx.passes.token_parallel.rules.RULES", dict(RULES))
    rule(ops.gated.default)(lambda node, axis_of: axis_of(node.args[0]))

    with pytest.raises(NotIsolated, match="table of the whole row"):
        run(gate())


def test_a_registered_operator_stands_where_jobs_share(run):
    """With the row's own table."""
    register_operator(Gated)

    assert calls(run(gate()), ops.gated.default)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (gate(table="segments"), "its cu_seqlens is not the row's own table"),
        (gate(lambda make, x: make(aten.sum.default, x)), "reads a number|reduces over the row"),
        (gate(lambda make, x: make(aten.ones.default, [4])), "its by does not hold the row"),
        (gate(lambda make, x: make(aten.transpose.int, x, 1, 0)), "its by holds the row elsewhere"),
        (gate(power=0.0), "its power is zero"),
    ],
)
def test_a_registered_operator_gets_what_it_was_registered_for(run, edit, told):
    """Another table, no row, the row elsewhere, and what it refuses itself."""
    register_operator(Gated)

    with pytest.raises(NotIsolated, match=told):
        run(edit)


def test_an_operator_that_mixes_the_rows_dimension_is_refused(run):
    """Of two dimensions that it mixes, one is the row."""
    register_operator(type("Wider", (Gated,), {"rows": {"x": 2, "by": 2}}))

    with pytest.raises(NotIsolated, match="it mixes what stands along dimension 1 of its x"):
        run(gate())


def adapt(swap=False):
    """Put `adapted` in the place of a site's operator."""

    def edit(group):
        for graph in group.graphs():
            for node in list(graph.nodes):
                site = lowered_site(node)
                if site is None:
                    continue
                a, b, x, ranks, scales = (
                    site.arguments[n] for n in ("a", "b", "x", "ranks", "scales")
                )
                bank = (a, site.arguments["weight"] if swap else b)

                def build(make, x=x, bank=bank, given=(ranks, scales, site.arguments["segments"])):
                    return make(ops.adapted.default, x, *bank, *given)

                Rewriter(graph).replace(node, build)
                return

    return edit


def test_adapters_of_all_jobs_need_a_registered_operator(run):
    """The error of its tags says how; with it the operator stands for the site."""
    text = error_of(lambda: run(adapt()), TagsBroken)
    assert "tlora_fx.ops.register_operator" in text

    register_operator(Adapted)
    group = run(adapt())

    (call,) = calls(group, ops.adapted.default)
    site = lowered_site(call)
    assert site.operator is ops.adapted.default
    assert set(site.branches) == set(site.jobs) == set(call.meta["jobs"])


def test_a_bank_is_a_bank(run):
    """A weight in its place is refused."""
    register_operator(Adapted)

    with pytest.raises(NotIsolated, match="its b is no bank of adapters"):
        run(adapt(swap=True))


def scale(jobs):
    """Let `scaled` read B of both jobs' branches, as if of `jobs`."""

    def edit(group):
        graph = next(graph for graph in group.graphs() if calls_in(graph))
        reads = calls_in(graph)
        own = {name: reads[name] for name in group.job_names}
        write = next(n for n in reversed(graph.nodes) if n.target is WRITE)
        segments = placeholders(graph)["segments"]

        def build(make):
            return make(ops.scaled.default, write, list(own.values()), segments, jobs)

        Rewriter(graph).insert_after(
            write, build, tags={"jobs": tuple(group.job_names), "role": "adapter"}
        )

    return edit


WRITE = torch.ops.tlora_fx.segment_write.default


def calls_in(graph):
    """A trained tensor of each job that a graph reads."""
    return {
        node.meta["jobs"][0]: node
        for node in graph.nodes
        if node.op == "get_attr" and node.meta["tensor"].owner == "job"
    }


def test_lists_of_what_jobs_train_are_in_the_jobs_order(group_after):
    """Each job's own tensor at its own place."""
    register_operator(Scaled)
    fused = group_after(LOWERED.removesuffix(",lower-adapters"), "plain", "few")

    def behind(edit):
        group = copy_state(fused)
        Runner(Pipeline(())).run_one(Event(1, a_pass(edit, numerics="no"), "group", group))
        return group

    assert calls(behind(scale([0, 1])), ops.scaled.default)
    with pytest.raises(NotIsolated, match="its by are not those of its jobs"):
        behind(scale([1, 0]))
