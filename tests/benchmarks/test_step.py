"""The arms of `benchmarks.step` train the same model on the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.step_arms import (
    MIN_BOUND,
    Alone,
    Made,
    Ours,
    PackedArm,
    Peft,
    require_gradients,
    stirred,
)
from benchmarks.step_mixes import Mix, Shape

SHAPE = Shape(
    layers=2, hidden=32, intermediate=48, heads=4, key_value_heads=2, vocabulary=97, dtype="float32"
)
MIX = Mix("tiny", (1, 1, 2, 1, 1, 1, 3, 1), length=9)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(SHAPE, "cpu", tmp_path_factory.mktemp("step"))


def test_all_arms_begin_with_one_loss_and_train(made):
    """Adapters start at zero, so every arm's first loss is the frozen model's; then it falls."""
    packed = PackedArm(made, stacked=True)
    ours, theirs = Ours(made.base, made, made.folder / "ours"), Peft(made)
    for arm in (packed, ours, theirs):
        arm.load(MIX)

    first = ours.trainer.gradients(ours.batches)
    for run in ours.trainer.runs:
        run.optimizer.zero_grad()
    for index, ids in enumerate(MIX.ids(SHAPE, "cpu")):
        alone = theirs.model(input_ids=ids, labels=ids).loss.item()
        assert first[index] == pytest.approx(alone, rel=1e-5)
    whole = sum(loss * batch for loss, batch in zip(first.values(), MIX.batches, strict=True))
    assert packed_loss(packed) == pytest.approx(whole / sum(MIX.batches), rel=1e-5)

    for arm in (packed, ours, theirs):
        assert arm.step(count=4) > 0
    assert packed_loss(packed) < whole / sum(MIX.batches)
    later = ours.trainer.gradients(ours.batches)
    assert all(later[index] < first[index] for index in first)


class Zeros(PackedArm):
    """An arm whose gradients are zeros, as once by torch.compile."""

    calls = 0

    def gradients(self, *, eager=False):
        self.calls += 1
        return [tensor * (self.calls - 1) for tensor in super().gradients()]


class Loses(PackedArm):
    """Its compiled code gives the smallest gradient nothing: the first call is the compiled one."""

    calls = 0

    def gradients(self, *, eager=False):
        self.calls += 1
        found = super().gradients()
        trained = [tensor for tensor in found if tensor.count_nonzero()]
        if self.calls == 1:
            min(trained, key=torch.linalg.vector_norm).zero_()
        return found


def test_an_arm_that_trains_nothing_is_refused_before_it_is_timed(made, monkeypatch):
    """And one whose gradients are those of eager code is not; all are compared, A's too."""
    again = Ours(made.base, made, made.folder / "again")
    for arm in (PackedArm(made, stacked=True), again, Alone(made, graph=False)):
        arm.load(MIX)
        assert not any(tensor.any() for tensor in arm.ups)
        with stirred(arm.ups):
            assert all(tensor.any() for tensor in arm.gradients())
        assert require_gradients(arm) is not None
        assert not any(tensor.any() for tensor in arm.ups)
    arm = Zeros(made, stacked=True)
    arm.load(MIX)
    with pytest.raises(RuntimeError, match="it trains nothing"):
        require_gradients(arm)
    frozen = Zeros(made, stacked=False)
    frozen.load(MIX)
    with pytest.raises(RuntimeError, match="it trains nothing"):
        require_gradients(frozen)
    arm = Loses(made, stacked=True)
    arm.load(MIX)
    monkeypatch.setattr(made, "rounding", lambda: 0.1)
    with pytest.raises(RuntimeError, match="a tensor trains nothing: 1 off"):
        require_gradients(arm)


class InFloat8(Ours):
    """Its gradients are given: as compiled, as eager, and those of the base as it is."""

    def __init__(self, made, found, eager, exact):
        self.made, self.float8 = made, "copy"
        self.found, self.eager, self.exact = found, eager, exact

    def gradients(self, *, eager=False):
        return self.eager if eager else self.found

    def exact_gradients(self):
        return self.exact

    @property
    def ups(self):
        return []


def test_in_float8_a_tensor_may_be_as_far_off_as_eager_code_is(made):
    """Codes differ, so a small gradient may be noise to both; none may be lost or further off."""
    draw = torch.Generator().manual_seed(3)
    large, small = torch.full((64,), 50.0), torch.ones(64)
    noise, other = (1.2 * torch.randn(64, generator=draw) for _ in range(2))
    eager, exact = [large + 20 * noise, small + noise], [large, small]

    require_gradients(InFloat8(made, [large + 20 * noise, small + other], eager, exact))
    for lost in (0 * small, small + 3 * other):
        with pytest.raises(RuntimeError, match="a tensor trains nothing"):
            require_gradients(InFloat8(made, [large + 20 * noise, lost], eager, exact))


def test_what_rounding_does_is_measured(tmp_path):
    """In bf16 by parts in a hundred; in float32 there is nothing to round."""
    exact = Made(SHAPE, "cpu", tmp_path / "exact")
    rounded = Made(replace(SHAPE, dtype="bfloat16"), "cpu", tmp_path / "rounded")

    assert exact.rounding() == MIN_BOUND
    assert 1e-3 < rounded.rounding() < 5e-2


def packed_loss(arm):
    """The mean loss over all targets, as the arm computes it."""
    packed = arm.packed
    with torch.no_grad():
        embedded = packed.model.model.embed_tokens(packed.ids[None])
        hidden = packed.model.model(inputs_embeds=embedded, **packed.row)[0][0]
        return packed.loss(hidden).item()


def test_the_frozen_model_goes_down_to_its_embeddings(made):
    """Its step needs no trained parameter."""
    arm = PackedArm(made, stacked=False)
    arm.load(MIX)

    assert arm.packed.optimizer is None
    assert arm.step() > 0


def test_frozen_parameters_are_those_that_tokens_are_multiplied_with(made):
    """All matrices but the embedding."""
    matrices = [t for name, t in made.weights.items() if t.dim() == 2 and "embed" not in name]

    assert SHAPE.frozen_parameters() == sum(t.numel() for t in matrices)
