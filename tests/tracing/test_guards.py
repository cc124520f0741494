"""A branch on a size is refused; a condition that every row fulfils, and an assertion, is not."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor

from tests.models import Plain, assert_equals_peft, error_of, hand_written, ready, tokens
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.errors import BranchOnSize, CompileError
from tlora_fx.tracing.guards import holds

WIDE = 1e-9
S = sympy.Symbol("s", integer=True, positive=True)


class Branching(Plain):
    """A model whose code looks at the sizes of the ids."""

    def __init__(self, scale) -> None:
        super().__init__(layers=1)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of scaled embeddings."""
        hidden = self.embed(ids) * self.scale(*ids.shape)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def asserting(lines, width):
    """No branch: the other side is an error."""
    assert width <= 64
    if width > 1000:
        raise ValueError("too long")
    return 1.5


BRANCHES = {
    "longer than": lambda b, s: 2.0 if s > 64 else 1.0,
    "at most": lambda b, s: 2.0 if s <= 5 else 1.0,
    "even": lambda b, s: 2.0 if s % 2 == 0 else 1.0,
    "equal": lambda b, s: 2.0 if s == 16 else 1.0,
    "as wide as there are lines": lambda b, s: 2.0 if s == b else 1.0,
    "more than some lines": lambda b, s: 2.0 if b > 3 else 1.0,
    "an int of it": lambda b, s: float(int(s)),
}


@pytest.mark.parametrize("name", sampled(BRANCHES))
def test_a_branch_on_a_size_is_refused_with_its_line(name):
    """One side would be traced, whatever the rows."""
    text = error_of(lambda: compile(hand_written(Branching(BRANCHES[name]))), BranchOnSize)

    assert "source" in text
    assert "test_guards.py" in text
    assert "lambda b, s" in text


@pytest.mark.parametrize(
    "scale", [asserting, lambda b, s: 2.0 if s > 1 else 1.0, lambda b, s: 0.5 if s * b >= 2 else 1]
)
def test_what_every_row_fulfils_is_no_branch(scale):
    """And what is asserted, else an error, changes no number."""
    model = ready(hand_written(Branching(scale)))

    assert_equals_peft(model, [tokens([5, 9], seed=1)], WIDE)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (S > 1, True),
        (S <= 64, False),
        (sympy.Ne(S, 4097), False),
        (sympy.Ne(S, 12345), False),
        (S < 2**40, False),
        (sympy.Eq(sympy.Mod(S, 2), 1), False),
        (sympy.Eq(sympy.Mod(4 * S, 2), 0), True),
        (sympy.Ne(3 * S, 0), True),
        (sympy.Ne(7 * S, 7 * 12345), False),
    ],
)
def test_a_condition_holds_where_it_does_for_every_size(condition, expected):
    """Tried around its own numbers, too."""
    assert holds(condition) is expected


def test_a_padded_row_is_no_wider_than_the_longest_sequence():
    """A table that is cut to the row, as MPT's biases are: wider rows have no place in it."""
    width = sympy.Symbol("width", integer=True, positive=True)
    condition = sympy.Eq(width, 128 - sympy.Max(0, 128 - width))

    assert holds(condition, longest=128)
    assert not holds(condition)
    assert not holds(condition.xreplace({width: S}), longest=128)


def test_a_forward_ends_at_the_first_branch_that_is_refused():
    """What follows may take minutes to trace."""
    followed = []

    def scale(lines, width):
        factor = 2.0 if width > 64 else 1.0
        followed.append(factor)
        return factor

    error_of(lambda: compile(hand_written(Branching(scale), "batch")), BranchOnSize)

    assert followed == []


class Chunked(Plain):
    """A model that pads its tokens to whole chunks, as state-space models do."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits with a mean over each chunk of eight."""
        hidden = self.embed(ids)
        more = (8 - hidden.shape[1] % 8) % 8
        if more > 0:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, more))
        chunks = hidden.reshape(hidden.shape[0], -1, 8, 32)
        return self.head((chunks + chunks.cumsum(2)).flatten(1, 2)[:, : ids.shape[1]])


def test_chunks_of_a_row_are_named():
    """The first line says what the mixer does."""
    jobs = hand_written(Chunked(layers=1), targets=("head",))

    first, *rest = error_of(lambda: compile(jobs), BranchOnSize).splitlines()

    assert "cuts the row into chunks of 8 tokens" in first
    assert any("PEFT alone" in line for line in rest)


class PackedBranch(Branching):
    """The same with positions, so that rows may be packed."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Tensor:
        """Logits of each token by itself."""
        hidden = self.embed(input_ids) * self.scale(*input_ids.shape)
        for layer in self.layers:
            hidden = hidden + layer.out(torch.tanh(hidden))
        return self.head(hidden)


@pytest.mark.parametrize("name", ["longer than", "even", "equal"])
def test_a_branch_on_the_tokens_of_a_packed_row_is_refused(name):
    """There the size is that of all jobs together."""
    jobs = hand_written(PackedBranch(BRANCHES[name]), "packed")

    assert "tokens" in error_of(lambda: compile(jobs), CompileError)
