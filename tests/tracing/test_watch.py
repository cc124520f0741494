"""What a trace does not keep is refused by name: gradients, state, branches on the device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tests.models import (
    Plain,
    PlainLayer,
    assert_equals_peft,
    error_of,
    hand_written,
    ready,
    tokens,
)
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.errors import GradientLost, StateChanged, TracedOtherwise

WIDE = 1e-9
COUNTER = 0
LOG = [0]


class Changed(Plain):
    """A model that does something between its embedding and its layers."""

    def __init__(self, what) -> None:
        super().__init__(layers=1)
        self.what = what
        self.calls = 0
        self.ready = False
        self.cache = None
        self.history = {"rows": 0}
        self.register_buffer("decay", torch.ones(1, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden = self.what(self, self.embed(ids))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class StraightThrough(torch.autograd.Function):
    """Rounds, and hands the gradient through."""

    @staticmethod
    def forward(ctx, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


class Reversal(torch.autograd.Function):
    """Turns the gradient round."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Square(torch.autograd.Function):
    """A function whose backward is its derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Behind(PlainLayer):
    """A layer that changes its input by a function."""

    def __init__(self, what) -> None:
        super().__init__(0, 0.0)
        self.what = what

    def forward(self, hidden: Tensor) -> Tensor:
        """Residual attention."""
        return super().forward(self.what(hidden))


class Later(Plain):
    """A model whose second layer changes its input, which an adapter has made."""

    def __init__(self, what) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PlainLayer(0, 0.0), Behind(what)])


def hooked(x):
    """A gradient that a hook changes."""
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 3)
    return y


def inferred(x):
    """A value without a gradient."""
    with torch.inference_mode():
        y = x * 0.5
    return x + y.clone()


def in_autocast(x):
    """A value in another dtype."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + (x.float() @ torch.eye(32, device=x.device)).to(x.dtype)


LOST = {
    "straight-through": StraightThrough.apply,
    "reversal": Reversal.apply,
    "a hook": hooked,
    "inference mode": inferred,
    "autocast": in_autocast,
}


@pytest.mark.parametrize("name", sampled(LOST, len(LOST)))
def test_a_gradient_that_a_graph_loses_is_refused(name):
    """By the line that makes it."""
    text = error_of(lambda: compile(hand_written(Later(LOST[name]))), GradientLost)

    assert "test_watch.py" in text


def without_autocast(x):
    """What libraries do around a float32 part."""
    with torch.autocast("cpu", enabled=False):
        return x * 1.5


@pytest.mark.parametrize("what", [Square.apply, without_autocast, lambda x: x + x.detach()])
def test_a_gradient_that_a_graph_keeps_is_right(what):
    """A backward that is the derivative of its forward, autocast off, detach."""
    model = ready(hand_written(Later(what)))

    assert_equals_peft(model, [tokens([5, 7], seed=1)], WIDE)


def counting(self, x):
    """Louder with every forward."""
    self.calls += 1
    return x * (1 + 0.1 * self.calls)


def decaying(self, x):
    """A buffer that is another one each time."""
    self.decay = self.decay * 0.9
    return x * self.decay


def counting_elsewhere(self, x):
    """The number stands in the Python module."""
    global COUNTER  # noqa: PLW0603  (what is tested)
    COUNTER += 1
    return x * (1 + 0.1 * COUNTER)


def counting_in_a_list(self, x):
    """The number stands in a list of the Python module."""
    LOG[0] += 1
    return x * (1 + 0.1 * LOG[0])


def counting_in_a_dict(self, x):
    """The number stands in an attribute."""
    self.history["rows"] += 1
    return x * (1 + 0.1 * self.history["rows"])


def first_only(self, x):
    """Another value the first time."""
    if not self.ready:
        self.ready = True
        return x * 2
    return x


def drawing(self, x):
    """Skips at random."""
    return x * 2 if random.random() < 0.5 else x


def drawing_numpy(self, x):
    """Scales at random."""
    return x * float(np.random.rand())


def remembering(self, x):
    """Adds what the row before left."""
    y = x if self.cache is None else x + self.cache.mean()
    self.cache = x.detach()
    return y


CHANGING = {
    "calls": counting, "decay": decaying, "COUNTER": counting_elsewhere, "LOG": counting_in_a_list,
    "history": counting_in_a_dict, "ready": first_only, "Python": drawing, "NumPy": drawing_numpy,
    "cache": remembering,
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(CHANGING, len(CHANGING)))
def test_a_forward_that_changes_the_next_one_is_refused(name):
    """By the name of what it changes."""
    text = error_of(lambda: compile(hand_written(Changed(CHANGING[name]))), StateChanged)

    assert name in text


def initialised(self, x):
    """Notes that it ran, which changes nothing."""
    if not self.ready:
        self.ready = True
    return x * 2


def looked_at(self, x):
    """Keeps a value that nobody reads."""
    self.cache = x * 3
    return x


def cached(self, x):
    """Computes a table once for each length."""
    if self.cache is None or self.cache.shape[0] != x.shape[1]:
        self.cache = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    return x + torch.sin(self.cache)[:, None]


@pytest.mark.parametrize("what", [initialised, looked_at, cached])
def test_what_is_kept_and_changes_nothing_is_no_state(what):
    """A flag, a value for whoever looks on, a table by length."""
    model = ready(hand_written(Changed(what)))

    assert_equals_peft(model, [tokens([5, 7], seed=1)], WIDE)


def caught(self, x):
    """A number where there is one."""
    try:
        scale = float(x.abs().max())
    except RuntimeError:
        scale = 1.0
    return x / scale


OTHERWISE = {
    "device type": lambda self, x: x * 2 if x.device.type == "cpu" else x,
    "device": lambda self, x: x * 2 if x.device == torch.device("cpu") else x,
    "device words": lambda self, x: x * 2 if "cuda" in str(x.device) else x,
    "weight's device": lambda self, x: x * 2 if self.head.weight.device.type == "cpu" else x,
    "is_cuda": lambda self, x: x * 2 if not x.is_cuda else x,
    "is_meta": lambda self, x: x * 2 if not x.is_meta else x,
    "a caught error": caught,
}


@pytest.mark.parametrize("name", sampled(OTHERWISE, len(OTHERWISE)))
def test_a_branch_that_only_tracing_takes_is_refused(name):
    """Before it trains another model than the one that runs alone."""
    text = error_of(lambda: compile(hand_written(Changed(OTHERWISE[name]))), TracedOtherwise)

    assert "test_watch.py" in text


ALIKE = {
    "a device handed on": lambda self, x: x + torch.ones(1, device=x.device, dtype=x.dtype),
    "a device by keyword": lambda self, x: x + torch.tensor(2.0, device=x.device).to(x.device),
    "equal devices": lambda self, x: x * 2 if x.device == self.head.weight.device else x,
    "another kind": lambda self, x: x * 2 if x.device.type != "mps" else x,
    "an instance": lambda self, x: x * 2 if isinstance(x.device, torch.device) else x,
    "compiling": lambda self, x: x if torch.compiler.is_compiling() else x * 2,
    "compiling, imported": lambda self, x: x if is_compiling() else x * 2,
    "exporting": lambda self, x: x if torch.compiler.is_exporting() else x * 2,
    "grad mode": lambda self, x: x * 2 if torch.is_grad_enabled() else x,
}


@pytest.mark.parametrize("name", sampled(ALIKE, len(ALIKE)))
def test_what_asks_for_its_surroundings_trains_as_alone(name):
    """It hears what it hears in a run, or takes the branch of any device."""
    jobs = hand_written(Changed(ALIKE[name]))
    with torch.no_grad():
        model = compile(jobs)
    del model

    assert_equals_peft(ready(jobs), [tokens([5, 7], seed=1)], WIDE)
