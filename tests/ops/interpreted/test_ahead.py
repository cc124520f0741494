"""What is computed while kernels are compiled ahead leaves nothing that later calls rely on."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.ops.interpreted.test_packed import assert_close
from tlora_fx.codegen import launching
from tlora_fx.codegen.ahead import ahead
from tlora_fx.ops import multi_lora_linear
from tlora_fx.ops.kernels import extend_weight, select
from tlora_fx.ops.kernels.packed import as_compiled


class Started:
    """Notes the forms of kernels that are started, or would be if launchers started any now."""

    def __init__(self, monkeypatch):
        self.forms, start = set(), launching.Interpreted._start

        def noted(launcher, grid, *arguments, **meta):
            module = launcher.function.fn.__module__
            self.forms.add((module, *map(_specialized, arguments), *sorted(meta.items())))
            start(launcher, grid, *arguments, **meta)

        monkeypatch.setattr(launching.Interpreted, "_start", noted)

    def taken(self):
        forms, self.forms = self.forms, set()
        return forms


def _specialized(value):
    """What Triton makes a form of its own for."""
    if isinstance(value, TensorDescriptor):
        return *value.block_shape, *_specialized(value.base)
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    return (value == 1, value % 16 == 0) if isinstance(value, int) else value


@pytest.mark.parametrize("plan", select.PLANS)
def test_calls_after_some_that_started_nothing_start_all(lora, plan, monkeypatch):
    """As layers of one shape do it: a later call is served from what one before had started.

    What was asked for is what later calls start.
    """
    made = lora((17, 0, 1), (3, 2, 18), (0.3, 0.0, 0.2), features=(48, 80), dtype=torch.float32)
    made.weight = extend_weight(made.weight, 64)
    x, a, b = made.leaves()
    dy = torch.randn(1, 18, 80, generator=torch.Generator().manual_seed(1))

    def gradients():
        y = multi_lora_linear(*made.arguments(x=x, a=a, b=b), max_rank=18, drops=True)
        return y.detach(), *torch.autograd.grad(y, (x, a, b), dy)

    forms = Started(monkeypatch)
    with select.force_plan(plan):
        with ahead.asking():
            launching.tape.started = started = []
            try:
                nothing = [gradients() for _ in range(3)][-1]
            finally:
                launching.tape.started = None
        asked = forms.taken()
        found = [gradients() for _ in range(3)]
    expected = made.reference(x, a, b)
    wanted = expected.detach(), *torch.autograd.grad(expected, (x, a, b), dy.double())

    assert asked == forms.taken()
    assert all(torch.isfinite(value).all() for value in nothing)
    assert not [launch for launch in started if not launch.by_address]
    for values in found:
        assert_close(values, wanted)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_layers_ask_for_what_they_start_once_they_are_compiled(tmp_path, monkeypatch, rate):
    """Without being compiled: with columns behind their inputs where adapters may stand."""
    from tests.models import base_of, job, ready, row_of, tokens

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    base = base_of(tmp_path, "llama", **sizes)
    model = ready([
        job(name, base, r=rank, target_modules="all-linear", lora_dropout=rate)
        for name, rank in (("a", 4), ("b", 8))
    ])  # fmt: skip
    row, weights = row_of(model, [tokens([10, 7]), tokens([9])]), torch.ones(2).double()
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    counter = CompileCounterWithBackend("aot_eager")
    model.compile(backend=counter)
    started = Started(monkeypatch)

    def run():
        losses = model.weighted(row, weights)
        torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        return started.taken()

    with ahead.asking(), as_compiled():
        asked = run()
    assert counter.frame_count == 0

    assert asked == run()
    assert counter.frame_count > 0
    assert any("tail" in module for module, *_ in asked)
