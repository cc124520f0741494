"""Sizes of a row carry shapes and are no values, in either form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models import Plain, assert_equals_peft, error_of, hand_written, ready, tokens
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.errors import NotTokenParallel
from tlora_fx.passes.token_parallel.sizes import _overlap

WIDE = 1e-9


class Sized(Plain):
    """A model that does something with its embeddings [B, S, H] before its layers."""

    def __init__(self, what) -> None:
        super().__init__(layers=1)
        self.what = what

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden = self.what(self.embed(ids))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class PackedSized(Sized):
    """The same with positions and without attention, so that rows may be packed."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Tensor:
        """Logits of each token by itself."""
        hidden = self.what(self.embed(input_ids))
        for layer in self.layers:
            hidden = hidden + layer.out(torch.tanh(hidden))
        return self.head(hidden)


def like(x, value):
    """A value of the embeddings' dtype."""
    return value.to(x.dtype)


VALUES = {
    "a quotient": lambda x: x / x.shape[1],
    "a product of both": lambda x: x * (x.shape[0] * x.shape[1]),
    "a root": lambda x: x * (x.shape[1] + 1) ** 0.5,
    "a maximum": lambda x: x / max(1, x.shape[1] // 32),
    "an arange of one number": lambda x: (
        x + torch.arange(x.shape[1], x.shape[1] + 1, device=x.device)
    ),
    "ones summed": lambda x: x * torch.ones(x.shape[1] + 1, device=x.device).sum().to(x.dtype),
    "a filled tensor": lambda x: x * x.new_full((1,), x.shape[1]),
    "a scalar tensor": lambda x: x * torch.full((), x.shape[1] + 1, device=x.device).to(x.dtype),
    "the trace of an identity": lambda x: x * like(x, torch.eye(x.shape[1], device=x.device).sum()),
    "a product of ones": lambda x: (
        x * like(x, torch.ones(1, x.shape[1]) @ torch.ones(x.shape[1], 1)).to(x.device).sum()
    ),
}
OF_LINES = {
    "the number of lines": lambda x: x / x.shape[0],
    "an arange of lines": lambda x: x + torch.arange(x.shape[0], x.shape[0] + 1, device=x.device),
    "ones a line": lambda x: x * like(x, torch.ones(x.shape[0] + 1, device=x.device).sum()),
    "the end of a table": lambda x: x + torch.arange(x.shape[1], device=x.device)[-1],
    "a table from its end": lambda x: (
        x + torch.arange(x.shape[1], device=x.device).flip(0)[None, :, None]
    ),
    "half of the width": lambda x: x + x[:, : x.shape[1] // 2].sum(1, keepdim=True),
    "a part of the width": lambda x: x + x[:, : x.shape[1] - x.shape[1] // 3].amax(1, keepdim=True),
    "a mean over the width": lambda x: x - x.mean(1, keepdim=True),
}


@pytest.mark.parametrize("name", sampled([*VALUES, *OF_LINES], 9))
def test_a_size_of_a_padded_batch_is_no_value(name):
    """It changes with the neighbours' lines and lengths."""
    jobs = hand_written(Sized({**VALUES, **OF_LINES}[name]))

    text = error_of(lambda: compile(jobs), NotTokenParallel)

    assert "size of the row" in text
    assert "test_sizes.py" in text


@pytest.mark.parametrize("name", sampled(VALUES, 5))
def test_the_tokens_of_a_packed_row_are_no_value(name):
    """It is the number of all jobs' tokens."""
    jobs = hand_written(PackedSized(VALUES[name]), "packed")

    assert "test_sizes.py" in error_of(lambda: compile(jobs), NotTokenParallel)


SHAPES = {
    "positions": lambda x: x + torch.arange(x.shape[1], device=x.device)[None, :, None],
    "a table": lambda x: (
        x + torch.sin(torch.arange(64, device=x.device, dtype=x.dtype))[: x.shape[1], None]
    ),
    "ones": lambda x: x * torch.ones(x.shape[0], x.shape[1], 1, device=x.device, dtype=x.dtype),
    "an identity": lambda x: x + torch.eye(x.shape[1], device=x.device, dtype=x.dtype) @ x,
    "a running sum of ones": lambda x: (
        x + torch.ones(x.shape[:2], device=x.device, dtype=x.dtype).cumsum(1)[..., None]
    ),
    "a view": lambda x: x.view(x.shape[0], x.shape[1], 4, 8).flatten(2),
    "distances": lambda x: (
        x
        + torch.tril(
            torch.arange(x.shape[1], device=x.device)[None, :]
            - torch.arange(x.shape[1], device=x.device)[:, None]
        ).to(x.dtype)
        @ x
        * 0.1
    ),
}


@pytest.mark.parametrize("name", sampled(SHAPES, 4))
def test_a_size_may_be_a_shape(name):
    """What holds the same at every size is right in any row."""
    model = ready(hand_written(Sized(SHAPES[name])))

    assert_equals_peft(model, [tokens([5, 8], seed=1)], WIDE)


def test_scores_may_be_moved_as_a_whole():
    """Distances counted from the end (ALiBi) differ by one number a line, which softmax drops."""
    near, far = torch.arange(-4.0, 1.0), torch.arange(-9.0, 1.0)

    assert _overlap(near, far, shifts=True)
    assert not _overlap(near, far, shifts=False)
    assert not _overlap(near, 2 * far, shifts=True)
