"""Seeded weights and rows, and what they take."""

from __future__ import annotations

import torch

from tests.models import error_of
from tlora_fx.numerics.memory import bytes_needed
from tlora_fx.numerics.rows import ProbeRows
from tlora_fx.numerics.state import copy_state, layers_to_run
from tlora_fx.numerics.tensors import Seeded, Unchecked

FOLDED = "drop-export-noise,tag-roles,fold-layers"


def test_a_tensor_has_its_values_by_name_whatever_was_drawn_before():
    """Other states read tensors in another order."""
    one, two = Seeded(0, {}), Seeded(0, {})
    two.base("other.weight", (3, 5), torch.float32)

    first = one.base("a.weight", (7, 5), torch.float32)

    assert torch.equal(first, two.base("a.weight", (7, 5), torch.float32))
    assert not torch.equal(first, Seeded(1, {}).base("a.weight", (7, 5), torch.float32))


def test_large_matrices_of_the_base_share_memory_and_not_values():
    """Each has its values by name, in whatever order and beside whatever else it is drawn."""
    shapes = {"a.weight": (600, 2048), "b.weight": (600, 2048), "c.weight": (1200, 2048)}
    one, two = Seeded(0, {}), Seeded(0, {})
    drawn = {name: one.base(name, shape, torch.float32) for name, shape in shapes.items()}
    turned = {name: two.base(name, shapes[name], torch.float32) for name in reversed(shapes)}

    assert all(torch.equal(drawn[name], turned[name]) for name in shapes)
    assert not torch.equal(drawn["a.weight"], drawn["b.weight"])
    assert len({tensor.untyped_storage().data_ptr() for tensor in turned.values()}) == 1
    assert all(len(set(tensor[:, 0].tolist())) > 590 for tensor in drawn.values())


def test_matrices_of_about_one_width_share_memory():
    """Of 2,048 and of 3,000; one of 8,192 has its own. Each is about as large as its width asks."""
    tensors = Seeded(0, {})
    shapes = {"a.weight": (600, 2048), "b.weight": (500, 3000), "c.weight": (300, 8192)}
    a, b, c = (tensors.base(name, shape, torch.float32) for name, shape in shapes.items())

    assert a.untyped_storage().data_ptr() != c.untyped_storage().data_ptr()
    assert torch.equal(a, Seeded(0, {}).base("a.weight", (600, 2048), torch.float32))
    for matrix in (a, b, c):
        assert 0.3 < float(matrix.std()) * matrix.shape[1] ** 0.5 < 0.8
    assert tensors._cloth.keys() == {(2048, torch.float32), (8192, torch.float32)}


def test_jobs_have_tensors_of_their_own():
    """A job that takes another's A computes something else."""
    tensors = Seeded(0, {})
    drawn = [tensors.own(job, "q.lora_A", (2, 4), torch.float32) for job in ("a", "b")]

    assert not torch.equal(*drawn)
    assert all(leaf.requires_grad and leaf.count_nonzero() == 8 for leaf in drawn)


def test_buffers_are_taken_as_they_are_and_unknown_integers_are_not_made_up():
    """A mask of random integers would check nothing."""
    tensors = Seeded(0, {"inv_freq": torch.tensor([1.0, 0.5])})

    assert tensors.base("inv_freq", (2,), torch.float32).tolist() == [1.0, 0.5]
    text = error_of(lambda: tensors.base("mask", (2,), torch.int64), Unchecked)
    assert "mask holds integers" in text


def test_a_job_has_the_same_tokens_alone_and_together():
    """And neighbours have different numbers of them."""
    rows = ProbeRows(["a", "b", "c"], "packed", 0, None, 61)
    together = rows.together()

    lengths = [stop - start for start, stop in zip(rows.segments, rows.segments[1:], strict=False)]
    assert len(set(lengths)) == 3
    assert together.segments.tolist() == rows.segments
    start, stop = rows.segments[1:3]
    assert torch.equal(rows.alone("b").input_ids, together.input_ids[:, start:stop])
    assert torch.equal(rows.alone("b").keys, together.keys[1:2])


def test_a_copy_of_a_state_is_left_alone(group_after):
    """What is done to the graphs afterwards does not reach it."""
    group = group_after(FOLDED, "few", fresh=True)
    copied = copy_state(group)
    (block,) = group.base.blocks.values()
    count = len(block.graph.nodes)

    block.graph.erase_node(block.graph.call_function(torch.relu, (next(iter(block.graph.nodes)),)))
    for node in block.graph.nodes:
        node.meta.clear()

    (kept,) = copied.base.blocks.values()
    assert len(kept.graph.nodes) == count
    assert all("origin" in node.meta for node in kept.graph.nodes)


def test_more_tokens_and_more_layers_need_more_memory(group_after):
    """Weights of the layers that run, and values of all tokens."""
    graph = group_after(FOLDED, "few").jobs[0]
    layers = layers_to_run(graph)
    few, many = (ProbeRows(["few"], "packed", 0, tokens, 61) for tokens in (8, 32))

    assert len(layers) == 2
    assert bytes_needed([graph], layers, few) < bytes_needed([graph], layers, many)
    assert bytes_needed([graph], frozenset(), few) < bytes_needed([graph], layers, few)


def test_the_bytes_of_weights_are_counted_once(group_after):
    """Two states of one graph share them: only values count anew."""
    graph = group_after(FOLDED, "few").jobs[0]
    rows = ProbeRows(["few"], "packed", 0, 8, 61)

    once = bytes_needed([graph], frozenset(), rows)

    assert bytes_needed([graph, copy_state(graph)], frozenset(), rows) == once
