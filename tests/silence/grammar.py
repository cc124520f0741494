"""Bases that nobody wrote: trees of operators, as texts that a test can repeat.

A step is ("name", number) or ("wrapper", number, step). Right ones work on each token by itself or
on it and those before it; nasty ones mix tokens or lines, read sizes, keep state, look around, or
hide from autograd.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.silence.cases.autograd import Clipped, Reversed, StraightThrough, cast, hooked
from tests.silence.cases.environment import tries
from tests.silence.modules import (
    HIDDEN,
    Decoder,
    ahead,
    attended,
    before,
    blocks,
    distance,
    rows,
    seeded,
)

Step = tuple[Any, ...]
#: From the step's own module, hidden states and the step's number to hidden states.
Operator = Callable[[Any, Tensor, int], Tensor]


def spread(x: Tensor, n: int) -> int:
    """A distance between tokens, 1 to 14."""
    return 1 + n % 14


TOKEN_WISE: Mapping[str, Operator] = {
    "linear": lambda m, x, n: m.lin(x),
    "gelu": lambda m, x, n: F.gelu(x),
    "norm": lambda m, x, n: F.layer_norm(x, (HIDDEN,)),
    "glu": lambda m, x, n: m.lin(x).sigmoid() * x,
    "swap": lambda m, x, n: torch.cat(x.chunk(2, -1)[::-1], -1),
    "turn": lambda m, x, n: x.roll(n, -1),
    "scale": lambda m, x, n: x * (n / 9),
    "softmax": lambda m, x, n: x.softmax(-1),
    "sort": lambda m, x, n: x.sort(-1).values,
    "centre": lambda m, x, n: x - x.mean(-1, keepdim=True),
    "detached": lambda m, x, n: x * x.detach().abs().amax(-1, keepdim=True),
    "heads": lambda m, x, n: x.unflatten(-1, (2, 4)).softmax(-2).flatten(-2),
    "places": lambda m, x, n: x + x.new_ones(HIDDEN, HIDDEN)[n % HIDDEN],
}
CAUSAL: Mapping[str, Operator] = {
    "attention": lambda m, x, n: attended(x, distance(x) >= 0),
    "window": lambda m, x, n: attended(x, (distance(x) >= 0) & (distance(x) <= n)),
    "dilated": lambda m, x, n: attended(x, (distance(x) >= 0) & (distance(x) % (1 + n % 5) == 0)),
    "alibi": lambda m, x, n: attended(x, distance(x) >= 0, -0.1 * n * distance(x)),
    "before": lambda m, x, n: x + before(x, spread(x, n)),
    "running sum": lambda m, x, n: x.cumsum(1) / (1 + n),
    "running mean": lambda m, x, n: x.cumsum(1) / (rows(x) + 1)[:, None],
    "by place": lambda m, x, n: x * (rows(x) % (2 + n % 5))[:, None],
    "first": lambda m, x, n: x + x[:, :1],
}
MIXING: Mapping[str, Operator] = {
    "mean": lambda m, x, n: x - x.mean(1, keepdim=True),
    "lines": lambda m, x, n: x - x.mean(0, keepdim=True),
    "largest": lambda m, x, n: x / (1 + x.abs().amax(1, keepdim=True)),
    "tokens' softmax": lambda m, x, n: x.softmax(1) * 9,
    "flip": lambda m, x, n: x.flip(1),
    "roll": lambda m, x, n: x.roll(spread(x, n), 1),
    "roll lines": lambda m, x, n: x.roll(1, 0),
    "ahead": lambda m, x, n: x + F.pad(x, (0, 0, 0, spread(x, n)))[:, spread(x, n) :],
    "attention ahead": lambda m, x, n: ahead(1 + n)(m, x),
    "attention of all": lambda m, x, n: attended(x, None),
    "attention of lines": lambda m, x, n: attended(x.transpose(0, 1), None).transpose(0, 1),
    "blocks": lambda m, x, n: blocks(x, 2 + n % 9),
    "last": lambda m, x, n: x + x[:, -1:],
    "pool": lambda m, x, n: F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "backward": lambda m, x, n: (
        x + x.sum(n % 2, keepdim=True) - x.sum(n % 2, keepdim=True).detach()
    ),
    "exchanged": lambda m, x, n: x.reshape(x.shape[1], x.shape[0], -1).cumsum(n % 2).view_as(x),
}
SIZES: Mapping[str, Operator] = {
    "length": lambda m, x, n: x * x.shape[1] / 9,
    "count": lambda m, x, n: x * x.shape[0],
    "ones": lambda m, x, n: x * x.new_ones(x.shape[n % 2] + n).sum() / 9,
    "range": lambda m, x, n: x * torch.arange(x.shape[n % 2], x.shape[n % 2] + 1, device=x.device),
    "from the end": lambda m, x, n: x * (rows(x) - x.shape[1])[:, None] / 9,
    "eye": lambda m, x, n: x * torch.eye(x.shape[n % 2], device=x.device, dtype=x.dtype).sum(),
    "odd": lambda m, x, n: x * (1 + x.shape[n % 2] % 2),
    "most": lambda m, x, n: x * min(x.shape[1], 1 + n),
    "whole blocks": lambda m, x, n: x * max(1, x.shape[1] // (1 + n)),
    "line number": lambda m, x, n: x * torch.arange(x.shape[0], device=x.device)[:, None, None],
    "clamped": lambda m, x, n: x.clamp(max=x.shape[n % 2] / 9),
    "filled": lambda m, x, n: x * x.new_full((1,), x.shape[n % 2]),
}


def count_up(m: Any, x: Tensor, n: int) -> Tensor:
    """Weaker with each call."""
    m.calls += 1
    return x / m.calls


def move_on(m: Any, x: Tensor, n: int) -> Tensor:
    """Weaker with each call, by a buffer."""
    m.kept = m.kept + 1
    return x / m.kept


def add_on(m: Any, x: Tensor, n: int) -> Tensor:
    """Weaker with each call, by a buffer that is written."""
    m.kept += 1
    return x / m.kept


def remember(m: Any, x: Tensor, n: int) -> Tensor:
    """Scaled by the first length."""
    m.calls = m.calls or x.shape[1]
    return x * m.calls / 9


STATE: Mapping[str, Operator] = {
    "counter": count_up,
    "buffer": move_on,
    "written buffer": add_on,
    "memory": remember,
    "chance": lambda m, x, n: x if random.random() < 0.5 else x * 2,
    "noise": lambda m, x, n: x + torch.rand_like(x),
}
LOST: Mapping[str, Operator] = {
    "straight through": lambda m, x, n: StraightThrough.apply(x),
    "reversed": lambda m, x, n: Reversed.apply(x),
    "clipped": lambda m, x, n: Clipped.apply(x, x),
    "hook": lambda m, x, n: hooked(x),
    "autocast": lambda m, x, n: cast(x),
}
QUESTIONS: tuple[Callable[[Any, Tensor, int], bool], ...] = (
    lambda m, x, n: x.shape[1] > 2 * n,
    lambda m, x, n: x.shape[1] % (2 + n) == 0,
    lambda m, x, n: x.shape[0] > n % 4,
    lambda m, x, n: x.is_meta,
    lambda m, x, n: x.device.type == "cpu",
    lambda m, x, n: torch.compiler.is_compiling(),
    lambda m, x, n: torch.is_grad_enabled(),
    lambda m, x, n: m.training,
)


def ask(m: Any, x: Tensor, n: int) -> Tensor:
    """Weaker where a question is answered with yes."""
    return x / 2 if QUESTIONS[n % len(QUESTIONS)](m, x, n) else x


LOOKING: Mapping[str, Operator] = {"ask": ask, "tries": lambda m, x, n: tries(x)}
RIGHT = {**TOKEN_WISE, **CAUSAL}
OPERATORS: Mapping[str, Operator] = {**RIGHT, **MIXING, **SIZES, **STATE, **LOST, **LOOKING}


def late(m: Any, x: Tensor, n: int) -> Tensor:
    """Only tokens from the n-th on."""
    return torch.where((rows(x) >= n)[:, None], m.inner(x), x)


def when(m: Any, x: Tensor, n: int) -> Tensor:
    """Only where a question is answered with yes."""
    return m.inner(x) if QUESTIONS[n % len(QUESTIONS)](m, x, n) else x


WRAPPERS: Mapping[str, Operator] = {
    "residual": lambda m, x, n: x + m.inner(x),
    "gate": lambda m, x, n: x + m.gate(m.inner(x)),
    "late": late,
    "when": when,
    "backward only": lambda m, x, n: x + m.inner(x) - m.inner(x).detach(),
    "forward only": lambda m, x, n: x + m.inner(x).detach(),
    "lines of tokens": lambda m, x, n: m.inner(x.transpose(0, 1)).transpose(0, 1),
    "half": lambda m, x, n: torch.cat([m.inner(x)[..., : HIDDEN // 2], x[..., HIDDEN // 2 :]], -1),
}


class Tree(nn.Module):
    """A step and what it holds."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.kind, self.number = step[0], step[1]
        self.calls = 0
        self.register_buffer("kept", torch.ones(()))
        if len(step) > 2:
            self.inner = Tree(step[2])
        if self.kind == "gate":
            self.gate = nn.Linear(HIDDEN, HIDDEN)
            nn.init.zeros_(self.gate.weight)
        if self.kind in {"linear", "glu"}:
            self.lin = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [B, S, H]."""
        table = WRAPPERS if self.kind in WRAPPERS else OPERATORS
        return table[self.kind](self, x, self.number)


class Grown(nn.Module):
    """A layer of steps."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.steps = nn.Sequential(*map(Tree, steps))

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        return x + self.leave(self.steps(torch.tanh(self.enter(x))))


class GrownDecoder(Decoder):
    """Layers of steps, and perhaps a step between them and the head."""

    def __init__(self, layers: int, steps: tuple[Step, ...], end: Step | None) -> None:
        super().__init__(layers=layers, make=lambda: Grown(steps))
        self.end = nn.Identity() if end is None else Tree(end)

    def logits(self, x: Tensor) -> Tensor:
        """The head."""
        return self.head(self.end(x))


Program = tuple[int, tuple[Step, ...], Step | None]


def build(program: Program) -> Callable[[], nn.Module]:
    """Makes the base of a program."""
    return seeded(lambda: GrownDecoder(*program))


def programs() -> st.SearchStrategy[Program]:
    """Right steps around one of any kind, wrapped up to twice."""
    number = st.integers(0, 40)

    def steps(names: Any) -> st.SearchStrategy[Step]:
        return st.tuples(st.sampled_from(sorted(names)), number)

    kinds = st.sampled_from([RIGHT, MIXING, SIZES, STATE, LOST, LOOKING])
    bare = kinds.flatmap(steps)
    wrapped = st.tuples(st.sampled_from(sorted(WRAPPERS)), number, bare)
    twice = st.tuples(st.sampled_from(sorted(WRAPPERS)), number, wrapped)
    chosen = st.one_of(bare, wrapped, wrapped, twice)
    right = st.lists(steps(RIGHT), max_size=1)
    layer = st.tuples(right, chosen, right).map(lambda t: (*t[0], t[1], *t[2]))
    end = st.one_of(st.none(), st.none(), st.none(), st.none(), chosen)
    return st.tuples(st.sampled_from([1, 1, 2]), layer, end)


def drawn(number: int) -> Program:
    """The program that hypothesis draws by a seed, the same each time.

    One a seed: in a longer run it changes what it drew before a little, and finds less. It is the
    second, for the first is the smallest for all.
    """
    kept: list[Program] = []

    @seed(number)
    @settings(max_examples=2, phases=[Phase.generate], database=None)
    @given(programs())
    def keep(program: Program) -> None:
        kept.append(program)

    keep()
    return kept[-1]
