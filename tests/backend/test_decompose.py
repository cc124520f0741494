"""Lowered sites written out in torch's operators, where no generated kernel serves them."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._dynamo.backends.debugging import aot_eager

from tests.backend.models import Lowering, assert_equal_steps, ids, language_model, net, train
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
@pytest.mark.parametrize(("family", "sites"), [("llama", 3), ("gpt2", 2)])
def test_a_site_equals_its_operator(family, sites, dropout):
    """Results and gradients, with weights of both layouts; a mask of dropout is the same."""
    expected, found, backend = both(language_model(family, lora_dropout=dropout), ids(2, 7))

    assert_equal_steps(found, expected, 2e-6)
    assert backend.decomposed == sites
    assert backend.ours() == ({"keyed_dropout"} if dropout else set())


def test_a_site_in_a_checkpointed_region_equals_its_operator():
    """Masks of what is computed again are those of the forward."""
    model = language_model("llama", lora_dropout=0.25)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    expected, found, backend = both(model, ids(2, 7))

    assert_equal_steps(found, expected, 2e-6)
    assert backend.decomposed == 3


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
    model = language_model("llama")
    backend = Decomposing({"passes": ["share-input"]})

    assert_equal_steps(train(model, backend.compile(model), ids(2, 7)),
                       train(model, model, ids(2, 7)), 2e-6)  # fmt: skip
    assert backend.ours() == {"multi_lora_linears"}


def test_operators_stay_where_kernels_run_on_a_cpu(monkeypatch):
    """As under Triton's interpreter."""
    monkeypatch.setenv("TLORA_FX_KERNELS", "interpret")
    backend = Decomposing()
    with torch.no_grad():
        backend.compile(net(r=4, lora_dropout=0.0).double())(torch.randn(2, 12).double())

    assert backend.decomposed == 0
    assert backend.ours() == {"multi_lora_linear"}
