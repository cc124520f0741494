"""Passes of one's own behind lower-adapters, by the option `passes` of torch.compile."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import fx

from tests.backend.models import (
    Checkpointed,
    Gated,
    Lowering,
    Net,
    Transposed,
    assert_equal_steps,
    ids,
    language_model,
    net,
    train,
)
from tests.models import error_of
from tests.numerics.conftest import a_pass
from tlora_fx.backend import read_options
from tlora_fx.errors import BackendOptionError, GraphInvalid, PassFailed, PipelineError
from tlora_fx.ir.graph import TensorRef
from tlora_fx.ir.lora_sites import lowered_sites
from tlora_fx.pipeline import JobPass
from tlora_fx.rewriting import Rewriter

aten = torch.ops.aten
ops = torch.ops.tlora_fx


def operators(backend):
    """Names of our operators in all graphs, with their numbers."""
    modules = [each for gm in backend.graphs for each in gm.modules()]
    nodes = [n for each in modules if isinstance(each, fx.GraphModule) for n in each.graph.nodes]
    targets = (node.target for node in nodes if node.op == "call_function")
    return Counter(t._opname for t in targets if getattr(t, "namespace", "") == "tlora_fx")


def step(model, x, **options):
    """A step of a compiled model, and its backend."""
    torch.manual_seed(0)
    backend = Lowering(options)
    return train(model, backend.compile(model), x), backend


def apart(graphs):
    """Take each site's frozen linear and its adapters apart."""
    for graph in graphs.graphs():
        for site in list(lowered_sites(graph)):
            x, weight, bias, *tables = site.arguments.values()

            def build(make, given=(x, weight, bias), tables=tables):
                frozen = make.tagged(role="shared", site="")(aten.linear.default, *given)
                return make(ops.multi_lora_add.default, frozen, given[0], *tables)

            Rewriter(graph).replace(site.result, build)


APART = a_pass(apart, numerics="bound")


@pytest.mark.parametrize(
    ("passes", "dropout"), [("share-input", 0.25), (["share-input{max-sites=2}"], 0.0)]
)
def test_a_pass_of_ours_rewrites_what_dynamo_recorded(passes, dropout):
    """Sites that read one input share an operator, as in fused graphs; the masks are the same."""
    model, x = net(kind=Gated, lora_dropout=dropout), torch.randn(2, 7, 12)
    expected, _ = step(model, x)
    found, backend = step(model, x, passes=passes, strict=True)

    assert_equal_steps(found, expected, 1e-6)
    assert operators(backend)["multi_lora_linears"] == 1


def assert_taken_apart(model, x, bound):
    """By a pass as an object, with the numbers of a step without it."""
    expected, plain = step(model, x)
    found, backend = step(model, x, passes=[APART])

    assert_equal_steps(found, expected, bound)
    assert backend.counts == plain.counts
    assert operators(backend)["multi_lora_add"] > 0
    assert operators(backend)["multi_lora_linear"] == 0


@pytest.mark.parametrize(
    ("kind", "autocast"),
    [(Net, False), (Transposed, False), (Checkpointed, False), (Net, True)],
)
def test_a_pass_as_an_object_rewrites_what_dynamo_recorded(kind, autocast):
    """With weights [in, out], under autocast, and inside checkpointed regions."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_taken_apart(net(kind=kind), torch.randn(2, 7, 12), 2e-2 if autocast else 1e-5)


@pytest.mark.slow
def test_a_pass_as_an_object_rewrites_a_language_model():
    """All sites of its layer."""
    assert_taken_apart(language_model("llama"), ids(2, 7), 1e-5)


def test_passes_run_in_their_order():
    """The second finds what the first left: no two operators to share an input."""
    model = net(kind=Gated)
    _, backend = step(model, torch.randn(2, 7, 12), passes=[APART, "share-input"])

    assert set(operators(backend)) == {"multi_lora_add"}


def test_what_is_not_lowered_is_not_shown_to_passes():
    """A branch with a bias stays as it is."""
    _, backend = step(net(lora_bias=True), torch.randn(2, 12), passes=[APART])

    assert (backend.lowered, backend.left) == (0, 2)


@pytest.mark.parametrize(
    ("passes", "error", "told"),
    [
        (["share-inputs"], PipelineError, "nearest  share-input"),
        (["tag-roles"], BackendOptionError, "group passes"),
        ([a_pass(apart, JobPass)], BackendOptionError, "group passes"),
        (3, BackendOptionError, "group passes"),
        (["lower-loss{x=1}"], PipelineError, "lower-loss"),
    ],
)
def test_other_passes_are_refused(passes, error, told):
    """Unknown names, job passes, and what is no pass."""
    assert told in error_of(lambda: read_options(None, {"passes": passes}), error)


def dropping(graphs):
    """Forget the adapters."""
    for graph in graphs.graphs():
        for site in list(lowered_sites(graph)):
            x, weight, bias, *_ = site.arguments.values()
            tags = {"role": "shared", "site": ""}
            build = partial(frozen_alone, (x, weight, bias))
            Rewriter(graph).replace(site.result, build, tags=tags)


def frozen_alone(given, make):
    """The frozen linear."""
    return make(aten.linear.default, *given)


def strange(graphs):
    """Read tensors that the model does not have."""
    for graph in graphs.graphs():
        for number, site in enumerate(list(lowered_sites(graph))):
            value = site.result.meta["val"]
            with graph.inserting_before(site.call):
                stored = graph.create_node("get_attr", f"x{number}")
            ref = TensorRef("base", f"x{number}", tuple(value.shape), value.dtype)
            stored.meta.update(site.result.meta, role="shared", site="", tensor=ref)
            build = partial(added, (site.result, stored))
            Rewriter(graph).insert_after(site.result, build, tags={"role": "shared"})


def added(given, make):
    """The sum of two."""
    return make(aten.add.Tensor, *given)


def raising(graphs):
    """Fail."""
    raise ZeroDivisionError("by hand")


@pytest.mark.parametrize(
    ("spoil", "error", "told"),
    [
        (dropping, GraphInvalid, "drop an adapter"),
        (strange, GraphInvalid, "read what Dynamo's graph does not have"),
        (raising, PassFailed, "ZeroDivisionError"),
    ],
)
def test_a_wrong_pass_is_blamed_by_name(spoil, error, told):
    """Inside torch's own error."""
    model, options = net(), {"passes": [a_pass(spoil, numerics="no")]}

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        Lowering(options).compile(model)(torch.randn(2, 12))

    assert isinstance(caught.value.inner_exception, error)
    assert told in str(caught.value.inner_exception)
    assert "spoils" in str(caught.value.inner_exception)
