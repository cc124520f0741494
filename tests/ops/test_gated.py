"""A linear behind a gated activation: eager it is two operators, traced it is one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tlora_fx.errors import AdapterTableError, FrozenGradientError
from tlora_fx.ops import multi_lora_gated_linear, multi_lora_linear
from tlora_fx.ops.kernels import extend_weight, packed, support
from tlora_fx.pipeline.joint_stage import JointStage

INNER, OUTER, ROOM = 32, 48, 64
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


@pytest.fixture
def traced_as_served(monkeypatch):
    """Traced graphs are made as if kernels served; what runs is PyTorch."""
    torch._dynamo.reset()
    sites = packed._sites

    def served_sites(like, group):
        with monkeypatch.context() as patch:
            patch.setattr(support, "kernel_group", support.KernelGroup.of)
            return sites(like, group)

    monkeypatch.setattr(packed, "_sites", served_sites)
    yield
    torch._dynamo.reset()


@pytest.fixture
def site(lora):
    """Makes arguments behind the activation, and leaves: gate and up side by side, a, b."""

    def make(rates=(0.3, 0.0)):
        own = lora((6, 5), (3, 2), rates, features=(INNER, OUTER), dtype=torch.float32)
        own.weight = extend_weight(own.weight, ROOM)
        both = torch.randn(1, own.row.tokens, 2 * INNER, generator=torch.Generator().manual_seed(2))
        return own.arguments()[1:], (both.requires_grad_(), *own.leaves()[1:])

    return make


def gated(activation, rest, both, a, b):
    """The operator."""
    gate, up = both.split(INNER, -1)
    weight, bias, _, _, *tables = rest
    return multi_lora_gated_linear(gate, up, activation, weight, bias, a, b, *tables, 3)


def apart(activation, rest, both, a, b):
    """The two operators of which it stands for."""
    gate, up = both.split(INNER, -1)
    weight, bias, _, _, *tables = rest
    return multi_lora_linear(ACTIVATIONS[activation](gate) * up, weight, bias, a, b, *tables, 3)


def step(run, leaves):
    """A result and its gradients."""
    y = run(*leaves)
    return y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_eager_it_is_the_two_operators(site, activation):
    """Bit for bit."""
    rest, leaves = site()
    found = step(partial(gated, activation, rest), leaves)

    for one, other in zip(found, step(partial(apart, activation, rest), leaves), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_traced_it_is_one_operator(site, traced_as_served, activation):
    """Its graph has no activation forwards; numbers are those of the two."""
    rest, leaves = site()
    graphs = []

    def note(module, inputs):
        graphs.append({str(node.target) for node in module.graph.nodes})
        return module

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=note, bw_compiler=note)
    run = torch.compile(partial(gated, activation, rest), fullgraph=True, backend=backend)
    found = step(run, leaves)

    forward, _ = graphs
    assert "tlora_fx.multi_lora_gated_forward.default" in forward
    assert not {"aten.silu.default", "aten.gelu.default", "aten.sigmoid.default"} & forward
    for one, other in zip(found, step(partial(apart, activation, rest), leaves), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_a_weight_that_learns_is_refused_traced_too(site, traced_as_served):
    """As by `multi_lora_linear`."""
    (weight, *rest), leaves = site()
    learning = weight.detach().requires_grad_()
    run = torch.compile(
        lambda *own: gated("silu", (learning, *rest), *own), fullgraph=True, backend="aot_eager"
    )

    refused = (FrozenGradientError, torch._dynamo.exc.BackendCompilerFailed)
    with pytest.raises(refused, match="no gradient for its weight"):
        run(*leaves).sum().backward()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"activation": "relu"}, "silu, gelu_tanh"),
        ({"up": torch.zeros(1, 11, INNER + 1)}, r"up \[1, 11, 32\]"),
        ({"up": torch.zeros(1, 11, INNER).double()}, "float32"),
    ],
    ids=["activation", "shape", "dtype"],
)
def test_what_does_not_fit_is_refused(site, changed, expected):
    """It says what was expected."""
    rest, (both, *_) = site()
    gate, up = both.detach().split(INNER, -1)
    given = {"gate": gate, "up": up, "activation": "silu"} | changed

    with pytest.raises(AdapterTableError, match=expected):
        multi_lora_gated_linear(given["gate"], given["up"], given["activation"], *rest)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_budget_computes_the_activation_again_and_no_product(site, traced_as_served, activation):
    """The product that the operator makes beside it is made once; gradients stay."""
    rest, leaves = site()
    usual, little = Noting(1.0), Noting(0.5)
    for stage in (usual, little):
        run = torch.compile(partial(gated, activation, rest), fullgraph=True, backend=stage.backend)
        found = step(run, leaves)
        for one, other in zip(found, step(partial(apart, activation, rest), leaves), strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()
        torch._dynamo.reset()

    assert "tlora_fx.multi_lora_gated_forward.default" in little.operators[0]
    assert "tlora_fx.multi_lora_gated_forward.default" not in little.operators[1]
    assert little.kept <= usual.kept - INNER * leaves[0].shape[1]


class Noting(JointStage):
    """Notes the operators of both parts, and how many numbers the backward gets of the forward."""

    def __init__(self, budget):
        super().__init__("layer", budget, ())

    def cut(self, joint, inputs, **more):
        parts = super().cut(joint, inputs, **more)
        self.operators = [{str(node.target) for node in part.graph.nodes} for part in parts]
        outputs = parts[0].graph.output_node().args[0][joint.results :]
        values = [node.meta["val"] for node in outputs if node.op != "placeholder"]
        self.kept = sum(value.numel() for value in values if isinstance(value, torch.Tensor))
        return parts
