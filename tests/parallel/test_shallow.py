"""A model of few of its layers has one layer of each kind."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.pipelines import compiled, load, rows_of
from tests.runtime.groups import make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.shallow import fill_at_random, shallow, shallow_bytes, why_not_shallow


def test_layers_that_are_compiled_alike_are_left_out(tmp_path):
    """Adapters in layers 2 to 5: one layer below, the lowest that trains, one above, the last."""
    base = tiny_base(tmp_path, num_hidden_layers=6)
    lora = {"layers_to_transform": [2, 3, 4, 5]}
    model = compile([make_job(base, "a", lora=lora)])

    assert not why_not_shallow(model)
    assert shallow(model).layer_order() == [f"model.layers.{index}" for index in (0, 2, 3, 5)]
    assert len(model.layer_order()) == 6


def test_layers_that_are_there_compute_as_in_the_whole_model(tmp_path):
    """Where every layer is needed, losses are those of the whole model, bit for bit."""
    meta = compiled(tmp_path, 2)
    few, whole = shallow(meta), SuperModel(meta.group, meta.backbone, meta.jobs)
    load(few)
    load(whole)

    for row in rows_of():
        assert torch.equal(few(row), whole(row))


def test_random_weights_fill_what_is_read_alone(tmp_path):
    """Layers that were left out stay on the meta device; losses are finite."""
    whole = compiled(tmp_path, 4, upper=2, tie_word_embeddings=True)
    model, needed = shallow(whole), shallow_bytes(whole)
    fill_at_random(model, torch.device("cpu"))
    tensors = [*model.net.parameters(), *model.net.buffers()]
    there = sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)

    assert all(torch.isfinite(model(row)).all() for row in rows_of())
    assert there == pytest.approx(needed, rel=0.01)
    assert there < sum(tensor.nbytes for tensor in tensors) * 7 / 8
