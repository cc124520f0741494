"""The backend beside the part of Inductor before its code: graphs, breaks, and numbers."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from tests.backend.models import Lowering, assert_equal_steps, ids, language_model, start, train
from tests.sampled import sampled

SHAPES = ((2, 7), (3, 11), (2, 13))


def lengths(model, runs):
    """Rows of other lengths, with dynamic sizes as torch finds them."""
    return [train(model, runs, ids(*shape)) for shape in SHAPES]


def one_line(model, runs):
    """Among such rows one of a single line, which has a graph of its own."""
    return [train(model, runs, ids(*shape)) for shape in (*SHAPES[:2], (1, 5), SHAPES[2])]


def autocast(model, runs):
    """As with bf16=True."""
    with torch.autocast("cpu", torch.bfloat16):
        return [train(model, runs, ids(2, 7)) for _ in range(2)]


def checkpointing(model, runs):
    """Layers run again in the backward."""
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return [train(model, runs, ids(*shape)) for shape in SHAPES[:2]]


def set_adapter(model, runs):
    """To another adapter, and back."""
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    start(model)
    steps = []
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        steps.append(train(model, runs, ids(2, 7)))
    return steps


SETTINGS = {
    "autocast": (autocast, 2e-2),
    "lengths": (lengths, 2e-6),
    "checkpointing": (checkpointing, 2e-6),
    "set_adapter": (set_adapter, 2e-6),
    "one_line": (one_line, 2e-6),
}


def compiled(backend, setting):
    """The steps of a fresh model, and what torch counts meanwhile."""
    torch._dynamo.reset()
    counters.clear()
    model = language_model("llama")
    steps = setting(model, torch.compile(model, backend=backend))
    return steps, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("name", sampled(SETTINGS, 5))
def test_no_graph_and_no_break_more_than_inductor(name):
    """And numbers equal those of eager mode."""
    setting, bound = SETTINGS[name]
    _, theirs, breaks = compiled(aot_eager, setting)
    backend = Lowering()

    steps, ours, own_breaks = compiled(backend, setting)

    assert ours <= theirs
    assert own_breaks <= breaks
    assert backend.left == 0 < backend.lowered
    model = language_model("llama")
    for found, expected in zip(steps, setting(model, model), strict=True):
        assert_equal_steps(found, expected, bound)


@pytest.mark.slow
def test_what_accelerate_prepared_is_compiled(monkeypatch):
    """With its autocast inside: equal numbers, no graph and no break more than Inductor's."""
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})
    monkeypatch.setattr(accelerate.state.PartialState, "_shared_state", {})
    ours, found = Lowering(), {}
    for name, backend in (("eager", None), ("theirs", aot_eager), ("ours", ours)):
        torch._dynamo.reset()
        counters.clear()
        model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(
            language_model("llama")
        )
        if backend is not None:
            model.compile(backend=backend)
        steps = [train(model, model, ids(*shape)) for shape in SHAPES[:2]]
        breaks = sum(counters["graph_break"].values())
        found[name] = steps, counters["stats"]["unique_graphs"], breaks

    for step, expected in zip(found["ours"][0], found["eager"][0], strict=True):
        assert_equal_steps(step, expected, 2e-2)
    assert found["ours"][1:] == found["theirs"][1:]
    assert ours.left == 0 < ours.lowered
