"""Kernels that add gradients themselves leave what a sum behind them leaves, to the bit."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.models import base_of, job, ready, row_of, tokens
from tests.ops.adapted import Adapted, both, name_adapters
from tlora_fx.ops.kernels import added_gradients, launch
from tlora_fx.parallel import capturing
from tlora_fx.parallel.capturing import add_gradients, throw_gradients_away

SHAPE = (32, 48)
#: A job of few tokens, of more than the chunk of its rule has, and of more than a short row has.
LENGTHS = {"short": (4, 0, 9), "wide chunk": (4, 0, 600), "long": (4, 0, 800)}


@pytest.fixture
def summed(monkeypatch):
    """How many gradients `add_gradients` has added itself."""
    counts = []
    together = torch._foreach_add_

    def add(ones, others):
        counts.append(len(ones))
        together(ones, others)

    monkeypatch.setattr(torch, "_foreach_add_", add)
    return counts


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_kernels_add_what_is_summed_behind_them(lora, summed, monkeypatch, length, rate):
    """Of jobs with and without tokens; nothing is left for the sum then."""
    made = lora(LENGTHS[length], (3, 2, 4), (rate,) * 3, dtype=torch.float32, features=SHAPE)
    one, two = both(lambda: Adapted(made), monkeypatch)

    assert all(map(torch.equal, one, two))
    assert summed == [2]


def test_a_bank_that_is_no_parameter_gives_its_gradient_back(lora, summed, monkeypatch):
    """What autograd does on the way to the parameter is not left out."""
    made = lora((4, 9), (3, 4), dtype=torch.float32, features=SHAPE)
    one, two = both(lambda: Adapted(made, scaled=True), monkeypatch)

    assert all(map(torch.equal, one, two))
    assert summed == [2, 2]


def test_what_is_thrown_away_has_an_address_each_and_takes_one_place(lora):
    """Of the largest; launches tell tensors by their addresses."""
    leaves = [torch.zeros(rows, 8, dtype=dtype) for dtype in (torch.float32, torch.float16)
              for rows in (3, 0, 5)]  # fmt: skip
    pairs = added_gradients.thrown_away(leaves)
    targets = [target for _, target in pairs]

    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [(t.shape, t.dtype) for t in targets]
    assert len({target.data_ptr() for target in targets if target.numel()}) == 4
    assert not any(target.data_ptr() % 16 for target in targets)
    assert len({target.untyped_storage().data_ptr() for target in targets}) == 2
    assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in targets}
               .values()) == (160 + 6 * 16) + (80 + 6 * 16)  # fmt: skip


def test_a_target_that_stands_twice_in_a_launch_is_none(lora, monkeypatch):
    """Programs would read it before others of them have written it."""
    made = lora((4, 9), (3, 4), dtype=torch.float32, features=SHAPE)
    model = Adapted(made)
    with added_gradients.adding([(model.a, model.a.grad), (model.b, model.b.grad)]):
        assert added_gradients.targets_of([model.a, model.b]) is not None
        assert added_gradients.targets_of([model.a, model.a, model.b, model.b]) is None
        assert added_gradients.targets_of([model.a, made.b]) is None
    assert added_gradients.targets_of([model.a, model.b]) is None


def test_a_hook_sees_the_gradient(lora, summed, monkeypatch):
    """What it returns is what is added."""
    made = lora((4, 9), (3, 4), dtype=torch.float32, features=SHAPE)
    name_adapters(monkeypatch)
    model, seen = Adapted(made), []
    model.a.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 0)
    before = model.a.grad.clone()
    add_gradients(model(), model, 10**9)

    assert seen
    assert seen[0].count_nonzero()
    assert torch.equal(model.a.grad, before)


@pytest.mark.parametrize("kept", [10**9, 0])
def test_what_is_thrown_away_starts_the_kernels_of_what_is_added(lora, monkeypatch, kept):
    """A capture can load none; gradients that there are stay, and zeros stay zeros."""
    made = lora((4, 9), (3, 4), dtype=torch.float32, features=SHAPE)
    name_adapters(monkeypatch)
    started, whole = [], launch.KernelCall.whole_gradients

    def note(self, *args):
        started.append(args[-1])
        whole(self, *args)

    monkeypatch.setattr(launch.KernelCall, "whole_gradients", note)
    # No recipe of an earlier call.
    monkeypatch.setattr(
        launch.KernelCall, "serve", lambda self, function, *args: function(self, *args)
    )
    model = Adapted(made)
    before = [model.a.grad.clone(), model.b.grad.clone()]
    throw_gradients_away(model(), model, kept)
    assert all(map(torch.equal, before, [model.a.grad, model.b.grad]))
    add_gradients(model(), model, kept)

    assert started == [kept > 0] * 2
    assert not torch.equal(before[0], model.a.grad)
    assert not added_gradients._targets
    blocks = [block for each in added_gradients._blocks.values() for block in each]
    assert not any(block.count_nonzero() for block in blocks)


def test_rows_without_adapters_add_nothing(lora, monkeypatch):
    """No job has a rank here: no kernel runs."""
    made = lora((4, 9), (0, 0), dtype=torch.float32, features=SHAPE)
    made.a, made.b = torch.zeros(2, SHAPE[0]), torch.zeros(2, SHAPE[1])
    name_adapters(monkeypatch)
    monkeypatch.setattr("tlora_fx.ops.kernels.dispatch._adapter_gradients", None)
    model = Adapted(made)
    before = [model.a.grad.clone(), model.b.grad.clone()]
    add_gradients(model(), model, 10**9)

    assert all(map(torch.equal, before, [model.a.grad, model.b.grad]))


def trained(model, parts):
    """Gradients of a model's parameters behind some rows."""
    for leaf in model.parameters():
        leaf.grad = torch.zeros_like(leaf) if leaf.requires_grad else None
    for part in parts:
        row = row_of(model, part)
        losses = model.weighted(row, torch.ones(len(model.jobs), dtype=torch.float64))
        add_gradients(losses, model, 10**9)
    return {name: leaf.grad for name, leaf in model.named_parameters() if leaf.requires_grad}


SOME = ["q_proj", "k_proj", "down_proj"]
ALL = "all-linear"


@pytest.mark.parametrize(
    ("targets", "lora_fields", "compiled"),
    [
        (ALL, {}, False),
        pytest.param(ALL, {}, True, marks=pytest.mark.slow),
        (SOME, {"use_dora": True}, False),
        (SOME, {"modules_to_save": ["norm"]}, True),
    ],
)
def test_a_model_has_the_gradients_of_a_sum_behind_the_backward(
    tmp_path, monkeypatch, summed, targets, lora_fields, compiled
):
    """Of two rows, launched and in compiled layers.

    Kernels add those of all adapters, but of DoRA, whose norms read the adapters too. Layers that
    are compiled share their code.
    """
    layers = 1 + compiled
    base = base_of(tmp_path, "llama", dtype="float32", num_hidden_layers=layers)
    jobs = [job(f"job-{n}", base, n, r=4 << n, target_modules=targets, **lora_fields)
            for n in range(2)]  # fmt: skip
    parts = [[tokens((5, 9), seed), tokens((6,), seed + 1)] for seed in (1, 3)]
    model = ready(jobs)
    if compiled:
        model.compile(backend="aot_eager")
    found = trained(model, parts)
    left = list(summed) or [0, 0]
    monkeypatch.setattr("tlora_fx.ops.kernels.dispatch.targets_of", lambda _: None)
    expected = trained(model, parts)

    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert any(value.count_nonzero() for value in found.values())
    adapters = 0 if "use_dora" in lora_fields else 2 * len(model.banks)
    assert [every - own for own, every in zip(left, summed[-2:], strict=True)] == [adapters] * 2


def test_adapters_that_a_row_reads_twice_are_left_to_autograd(tmp_path, monkeypatch):
    """As where a layer stands twice in a model."""
    base = base_of(tmp_path, "llama", dtype="float32", num_hidden_layers=2)
    jobs = [job("one", base, 0, r=4, target_modules=["q_proj", "down_proj"])]
    model = ready(jobs)
    assert len(capturing.adapters_read_once(model)) == 8

    [name] = [name for name in model.group.blocks if name != "head"]
    graph = copy.deepcopy(model.group.blocks[name].graph)
    bank = next(node for node in graph.nodes if str(node.target).endswith("down_proj.lora.a"))
    with graph.inserting_after(bank):
        graph.call_function(torch.ops.aten.square.default, (bank,))
    blocks = model.group.blocks | {name: replace(model.group.blocks[name], graph=graph)}
    model.group = replace(model.group, blocks=blocks)
    left = capturing.adapters_read_once(model)

    assert len(left) == 4
    assert all(bank.a is not each for path, bank in model.banks.items()
               for each in left if "down_proj" in path)  # fmt: skip
