"""Layers are one structure only if the model calls them alike, whichever of them were traced."""

from __future__ import annotations

import pytest
import transformers
from torch import Tensor, nn

from tests.models import (
    SIZES,
    Plain,
    PlainLayer,
    assert_equals_peft,
    hand_written,
    job,
    ready,
    tokens,
)
from tests.sampled import sampled
from tlora_fx.config.job import BaseSpec

ROUNDED, WIDE = 3e-6, 1e-9


class GainLayer(PlainLayer):
    """A layer that is given a number."""

    kind = "gain"

    def forward(self, hidden: Tensor, gain: float = 1.0) -> Tensor:
        """Residual attention."""
        return super().forward(hidden) * gain


class Library(Plain):
    """A model that passes for a library's own, of which two layers of a structure are traced."""

    def __init__(self, loop) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GainLayer(0, 0.0) for _ in range(6))
        self.gains = [1.0, 1.0, 1.0, 0.5, 0.5, 1.0]
        self.loop = loop

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.loop(self, self.embed(ids)))


Library.__module__ = GainLayer.__module__ = "transformers.models.tested"


def by_index(model, hidden):
    """Looks a number up for each layer."""
    for index, layer in enumerate(model.layers):
        hidden = layer(hidden, gain=model.gains[index])
    return hidden


def louder_later(model, hidden):
    """Treats one late layer otherwise."""
    for index, layer in enumerate(model.layers):
        hidden = layer(hidden * 2 if index == 4 else hidden)
    return hidden


def leaves_one_out(model, hidden):
    """Does not call every layer."""
    for index, layer in enumerate(model.layers):
        hidden = hidden if index == 3 else layer(hidden)
    return hidden


def backwards(model, hidden):
    """Runs the layers from last to first."""
    for layer in reversed(model.layers):
        hidden = layer(hidden)
    return hidden


def skipping(model, hidden):
    """Adds what an early layer returned to a late one."""
    early = hidden
    for index, layer in enumerate(model.layers):
        hidden = layer(hidden + early if index == 5 else hidden)
        early = hidden if index == 0 else early
    return hidden


def asking(model, hidden):
    """Reads an attribute of each layer."""
    for layer in model.layers:
        hidden = layer(hidden, 0.5 if layer.kind == "gain" and layer.ahead == 0 else 2.0)
    return hidden


LOOPS = {
    by_index: {4, 2}, louder_later: None, backwards: None,
    skipping: None, asking: {6},
}  # fmt: skip


@pytest.mark.parametrize("loop", sampled(LOOPS))
def test_a_loop_over_layers_is_folded_only_as_far_as_it_is_one(loop):
    """Whatever the model's own loop does, its jobs train as alone."""
    model = ready(hand_written(Library(loop)))

    sizes = {len(block.instances) for block in model.group.blocks.values() if block.name != "head"}
    if LOOPS[loop] is not None:
        assert sizes == LOOPS[loop]
    assert_equals_peft(model, [tokens([5, 3], seed=1)], WIDE)


def test_a_layer_that_is_never_called_stays_out():
    """Folding adds no call that the model does not make."""
    model = ready(hand_written(Library(leaves_one_out), targets=("head",)))

    assert_equals_peft(model, [tokens([5, 3], seed=1)], WIDE)


def test_layers_with_other_rotary_tables_are_other_structures(tmp_path):
    """Granite with sliding layers looks theta up in its config by the layer's number."""
    make = getattr(transformers, "GraniteSWAConfig", None)
    if make is None:
        pytest.skip("this transformers has no Granite with sliding layers")
    config = make(
        **{**SIZES, "num_hidden_layers": 2}, layer_types=["full_attention"] * 2,
        layer_rope_theta=[1e4, 0],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    base = BaseSpec(config=tmp_path, dtype="float64")
    model = ready([job("one", base, r=4, target_modules=["q_proj", "v_proj"])])

    blocks = [block.instances for block in model.group.blocks.values() if block.name != "head"]
    assert [len(instances) for instances in blocks] == [1, 1]
    assert_equals_peft(model, [tokens([9, 7], seed=1)], ROUNDED)
