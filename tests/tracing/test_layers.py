"""Which layers are equal, and which are traced for them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.models import base_of
from tlora_fx.config.job import BaseSpec
from tlora_fx.model.backbone import load_backbone
from tlora_fx.tracing.layers import layer_list, plan_layers


class Layer(nn.Module):
    """A layer with an attribute of the test's choice."""

    def __init__(self, note=None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.note = note


class Stack(nn.Module):
    """A model of layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def groups(model: nn.Module) -> list[int]:
    """For each layer the place of the layer that stands for it."""
    plan = plan_layers(load_backbone(BaseSpec(module=model, dtype="float32")))
    return [plan.layers.index(plan.representative[layer]) for layer in plan.layers]


def scaled() -> nn.Module:
    """A layer with a buffer."""
    layer = Layer()
    layer.register_buffer("scale", torch.ones(2))
    return layer


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([Layer(), Layer(), Layer()], [0, 0, 0]),
        ([Layer(1.0), Layer(2.0), Layer(1.0)], [0, 1, 0]),
        ([Layer("a"), Layer(["b"]), Layer(["b"])], [0, 1, 1]),
        ([Layer(functools.partial(torch.sum, dim=n)) for n in (0, 1, 0)], [0, 1, 0]),
        ([Layer(object()), Layer(object()), Layer()], [0, 1, 2]),
        ([Layer(n) for n in range(3)], [0, 0, 0]),
        ([Layer(n) for n in (0, 1, 1)], [0, 1, 1]),
        ([Layer(2 * n + 1) for n in range(3)], [0, 0, 0]),
        ([Layer(2 * n + 2) for n in range(3)], [0, 1, 2]),
        ([Layer(n) for n in (1, 3, 4)], [0, 1, 2]),
        ([scaled(), scaled(), Layer()], [0, 0, 2]),
    ],
)
def test_layers_are_equal_by_what_they_compute(layers, expected):
    """Attributes, partials, buffers; one that counts layers, or parts of them, is left out."""
    assert groups(Stack(*layers)) == expected


def test_buffers_count_by_content():
    """Two layers whose tables differ are two structures."""
    one, two = scaled(), scaled()
    two.scale.mul_(2)

    assert groups(Stack(one, two, scaled())) == [0, 1, 0]


def test_interleaved_structures_are_two(tmp_path):
    """Gemma 2: a window on every second layer; two layers of each are traced."""
    plan = plan_layers(load_backbone(base_of(tmp_path, "gemma2", num_hidden_layers=6)))

    assert [plan.layers.index(k) for k in plan.representative.values()] == [0, 1, 0, 1, 0, 1]
    assert [plan.layers.index(layer) for layer in plan.traced()] == [0, 1, 2, 3]


def test_all_layers_of_unknown_code_are_traced():
    """What transformers' own code does not do, a hand-written model may."""
    plan = plan_layers(
        load_backbone(BaseSpec(module=Stack(*(Layer() for _ in range(5))), dtype="float32"))
    )

    assert len(plan.traced()) == 5
    assert set(plan.twins().values()) == {plan.layers[0]}


def test_the_layers_are_the_longest_outermost_list():
    """Lists inside layers are part of the layers."""
    inner = [Stack(*(Layer() for _ in range(4))) for _ in range(3)]

    assert layer_list(Stack(*inner)) == ["layers.0", "layers.1", "layers.2"]
    assert layer_list(nn.Linear(2, 2)) == []
