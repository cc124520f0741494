"""Lowered sites written out in torch's operators, where no generated kernel serves them."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._dynamo.backends.debugging import aot_eager

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
from tlora_fx.backend import lower_graph, read_options
from tlora_fx.backend.decompose import decompose_sites

OURS = torch.ops.tlora_fx


class Decomposing(Lowering):
    """`Lowering`, and what becomes of the sites on a CPU."""

    def __post_init__(self):
        super().__post_init__()
        self.decomposed = 0

    def __call__(self, gm, inputs):
        self.counts.append(lower_graph(gm, read_options(None, self.options)))
        self.decomposed += decompose_sites(gm)
        self.graphs.append(gm)
        return aot_eager(gm, inputs)

    def ours(self):
        """Names of our operators that are left."""
        modules = [each for gm in self.graphs for each in gm.modules()]
        graphs = [each.graph for each in modules if isinstance(each, fx.GraphModule)]
        targets = (node.target for graph in graphs for node in graph.nodes)
        return {t._opname for t in targets if getattr(t, "namespace", "") == "tlora_fx"}


def both(model, x):
    """A step as the operators compute it, and one as what they are made of does."""
    steps = []
    for backend in (Lowering({"strict": True}), Decomposing({"strict": True})):
        torch.manual_seed(0)
        steps.append(train(model, backend.compile(model), x))
    return *steps, backend


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("kind", [Net, Transposed, Checkpointed])
def test_a_site_equals_its_operator(kind, dropout):
    """Results and gradients; a mask of dropout is the same, also where it is drawn again."""
    model = net(kind=kind, lora_dropout=dropout)
    expected, found, backend = both(model, torch.randn(2, 7, 12))

    assert_equal_steps(found, expected, 2e-6)
    assert backend.decomposed == backend.lowered == 2
    assert backend.ours() == ({"keyed_dropout"} if dropout else set())


def test_each_site_of_a_language_model_equals_its_operator():
    expected, found, backend = both(language_model("llama"), ids(2, 7))

    assert_equal_steps(found, expected, 2e-6)
    assert backend.decomposed == 3
    assert backend.ours() == set()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_site_of_two_dtypes_equals_its_operator(autocast):
    """Adapters in float32 on a base in bfloat16, and all under autocast."""
    dtype = torch.float32 if autocast else torch.bfloat16
    model = net(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, found, backend = both(model, torch.randn(4, 12).to(dtype))

    assert {each.dtype for each in found.gradients.values()} == {torch.float32}
    assert found.output.dtype == torch.bfloat16
    assert_equal_steps(found, expected, 3e-2)
    assert backend.decomposed == backend.lowered == 2


def test_another_scaling_is_read_from_its_table():
    """Of models that differ in lora_alpha, the second and third share a graph."""
    backend, x = Decomposing({"strict": True}), torch.randn(4, 12)
    for alpha in (8, 16, 32):
        model = net(lora_alpha=alpha)
        compiled = backend.compile(model)
        assert_equal_steps(train(model, compiled, x), train(model, model, x), 2e-6)

    assert backend.ours() == set()


def test_what_passes_made_stays():
    """Only a site as lower-adapters leaves it is written out."""
    model, x = net(kind=Gated), torch.randn(2, 7, 12)
    backend = Decomposing({"passes": ["share-input"]})

    assert_equal_steps(train(model, backend.compile(model), x), train(model, model, x), 2e-6)
    assert backend.ours() == {"multi_lora_linears"}


def test_operators_stay_where_kernels_run_on_a_cpu(monkeypatch):
    """As under Triton's interpreter."""
    monkeypatch.setenv("TLORA_FX_KERNELS", "interpret")
    backend = Decomposing()
    with torch.no_grad():
        backend.compile(net(r=4, lora_dropout=0.0).double())(torch.randn(2, 12).double())

    assert backend.decomposed == 0
    assert backend.ours() == {"multi_lora_linear"}
