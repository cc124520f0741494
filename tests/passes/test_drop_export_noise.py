"""drop-export-noise: what goes, what stays, and what is written anew."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models import error_of
from tlora_fx.errors import BaseNotTraceable
from tlora_fx.ir.graph import JobGraph
from tlora_fx.ir.shapes import fake_like, propagate
from tlora_fx.passes.drop_export_noise import END, DropExportNoise

aten = torch.ops.aten


class Sketch:
    """A graph on x [2, 3] float32, written operator by operator."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = fake_like(FakeTensorMode(), (2, 3), torch.float32)

    def call(self, target, *args, **kwargs):
        """Append an operator."""
        made = self.graph.call_function(target, args, kwargs)
        made.meta.update(path="here", source="model.py:3  line")
        return made

    def cleaned(self, result):
        """The operators that are left when `result` is what the graph gives."""
        self.graph.output(result)
        propagate(self.graph)
        DropExportNoise().run(JobGraph("one", self.graph, "packed"))
        self.graph.lint()
        return [str(node.target) for node in self.graph.nodes if node.op == "call_function"]

    def run(self, x):
        """What the graph computes."""
        return fx.Interpreter(fx.GraphModule({}, self.graph)).run(x)


@pytest.fixture
def sketch():
    """An empty sketch."""
    return Sketch()


def test_assertions_on_metadata_go(sketch):
    """Export's checks of what it saw compute nothing."""
    sketch.call(aten._assert_tensor_metadata.default, sketch.x, None, None, torch.float32)

    assert sketch.cleaned(sketch.call(aten.relu.default, sketch.x)) == ["aten.relu.default"]


def test_casts_to_the_dtype_that_is_there_go(sketch):
    """Others stay."""
    same = sketch.call(aten.to.dtype, sketch.x, torch.float32)
    other = sketch.call(aten.to.dtype, same, torch.float64)

    assert sketch.cleaned(other) == ["aten.to.dtype"]
    assert sketch.run(torch.ones(2, 3)).dtype == torch.float64


def test_a_cast_to_a_device_is_a_cast_to_a_dtype(sketch):
    """A row lies on one device, whichever that is."""
    moved = sketch.call(aten.to.device, sketch.x, torch.device("meta"), torch.float64)

    assert sketch.cleaned(moved) == ["aten.to.dtype"]


@pytest.mark.parametrize(
    ("start", "stop", "step", "kept"),
    [(0, END, 1, False), (None, None, 1, False), (1, END, 1, True), (0, 2, 1, True),
     (0, END, 2, True)],
)  # fmt: skip
def test_slices_of_a_whole_dimension_go(sketch, start, stop, step, kept):
    """A slice that takes less stays."""
    part = sketch.call(aten.slice.Tensor, sketch.x, 1, start, stop, step)

    assert bool(sketch.cleaned(part)) == kept


def test_dead_code_goes(sketch):
    """What nobody uses, and what only that used."""
    sketch.call(aten.neg.default, sketch.call(aten.exp.default, sketch.x))

    assert sketch.cleaned(sketch.call(aten.relu.default, sketch.x)) == ["aten.relu.default"]


def test_detach_is_never_noise(sketch):
    """It keeps gradients out of what the model computes without them."""
    assert sketch.cleaned(sketch.call(aten.detach.default, sketch.x)) == ["aten.detach.default"]


def test_a_write_into_a_fresh_tensor_becomes_a_new_tensor(sketch):
    """Also where the result is read under the old name later."""
    fresh = sketch.call(aten.exp.default, sketch.x)
    sketch.call(aten.add_.Tensor, fresh, sketch.x)
    result = sketch.call(aten.mul.Tensor, fresh, 2.0)

    assert sketch.cleaned(result) == ["aten.exp.default", "aten.add.Tensor", "aten.mul.Tensor"]
    x = torch.randn(2, 3)
    torch.testing.assert_close(sketch.run(x), (x.exp() + x) * 2)


def test_a_write_keeps_the_dtype_of_what_it_writes_into(sketch):
    """As where an adapter in float32 is added to what a base in bfloat16 gave."""
    fresh = sketch.call(aten.exp.default, sketch.call(aten.to.dtype, sketch.x, torch.bfloat16))
    sketch.call(aten.add_.Tensor, fresh, sketch.x)
    result = sketch.call(aten.mul.Tensor, fresh, 2.0)

    assert sketch.cleaned(result)[2:] == ["aten.add.Tensor", "aten.to.dtype", "aten.mul.Tensor"]
    x = torch.randn(2, 3)
    expected = x.to(torch.bfloat16).exp().add_(x) * 2
    assert expected.dtype == torch.bfloat16
    assert torch.equal(sketch.run(x), expected)


def test_a_write_into_one_of_two_results_leaves_the_other(sketch):
    """The largest values and their places are two tensors, as routers divide the first."""
    largest = sketch.call(aten.topk.default, sketch.x, 2)
    values, places = (sketch.call(operator.getitem, largest, index) for index in (0, 1))
    sketch.call(aten.mul_.Tensor, values, 2.0)
    result = sketch.call(aten.add.Tensor, values, places)

    assert "aten.mul.Tensor" in sketch.cleaned(result)
    x = torch.randn(2, 3)
    expected = x.topk(2)
    torch.testing.assert_close(sketch.run(x), expected.values * 2 + expected.indices)


def test_a_write_into_a_part_of_a_split_is_refused_where_the_whole_is_read(sketch):
    """The parts are views."""
    fresh = sketch.call(aten.exp.default, sketch.x)
    part = sketch.call(operator.getitem, sketch.call(aten.split.Tensor, fresh, 1, 1), 0)
    written = sketch.call(aten.mul_.Tensor, part, 2.0)
    result = sketch.call(aten.add.Tensor, fresh, written)

    assert "read again" in error_of(lambda: sketch.cleaned(result), BaseNotTraceable)


def test_a_write_into_an_input_is_refused(sketch):
    """The row belongs to all jobs."""
    written = sketch.call(aten.add_.Tensor, sketch.x, 1.0)

    text = error_of(lambda: sketch.cleaned(written), BaseNotTraceable)

    assert "aten.add_.Tensor" in text
    assert "model.py:3" in text
    assert "writes into placeholder" in text


def test_a_write_behind_a_view_is_refused(sketch):
    """A view made before the write shows it; a new tensor would not."""
    fresh = sketch.call(aten.exp.default, sketch.x)
    view = sketch.call(aten.view.default, fresh, [6])
    sketch.call(aten.add_.Tensor, fresh, 1.0)

    text = error_of(lambda: sketch.cleaned(view_sum(sketch, view)), BaseNotTraceable)

    assert "read again" in text


def view_sum(sketch, view):
    """Something that reads the view."""
    return sketch.call(aten.relu.default, view)


def test_a_write_after_a_dropout_is_refused(sketch):
    """A dropout of rate 0 hands its input on, so both names may be one memory."""
    fresh = sketch.call(aten.exp.default, sketch.x)
    dropped = sketch.call(aten.dropout.default, fresh, 0.0, True)
    written = sketch.call(aten.add_.Tensor, dropped, 1.0)
    result = sketch.call(aten.mul.Tensor, written, fresh)

    assert "read again" in error_of(lambda: sketch.cleaned(result), BaseNotTraceable)
