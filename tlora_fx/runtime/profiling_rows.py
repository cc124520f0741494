"""Rows to measure on, and what a model's root calls its layers and loss with on each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from tlora_fx.cost.load import Load
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.errors import NotProfilable
from tlora_fx.model.batch import JobTokens, PackedBatch, pack, pad
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.passes.lower_loss import LOSS

#: The share of a row's tokens that each job has.
Mix = tuple[float, ...]
SEED = 11


def mixes_of(facts: ModelFacts) -> tuple[Mix, ...]:
    """All jobs alike; all tokens to the job with the largest adapter; all to the smallest."""
    jobs = len(facts.jobs)
    trained = facts.trained
    ends = {max(range(jobs), key=trained.__getitem__), min(range(jobs), key=trained.__getitem__)}
    alone = [tuple(float(job == own) for job in range(jobs)) for own in sorted(ends)]
    return (tuple(1 / jobs for _ in range(jobs)), *(alone if jobs > 1 else []))


def lengths_of(mix: Mix, tokens: int, length: int) -> list[list[int]]:
    """Lengths of each job's sequences in a row of so many tokens."""
    found: list[list[int]] = []
    given = 0
    for end in _ends(mix, tokens):
        left, own = end - given, []
        while left > 0:
            # What would be left alone as a single token goes with the last sequence.
            take = left if left <= length + 1 else length
            own.append(take)
            left -= take
        found.append(own)
        given = end
    return found


def row_of(model: SuperModel, mix: Mix, tokens: int, length: int) -> PackedBatch:
    """A row of random tokens, each but a sequence's first with a loss."""
    return (pack if model.group.form == "packed" else pad)(tokens_of(model, mix, tokens, length))


def tokens_of(model: SuperModel, mix: Mix, tokens: int, length: int) -> list[JobTokens]:
    """What each job brings to a row of random tokens."""
    draw = random.Random(SEED)  # noqa: S311  (what is drawn must be the same each time)
    vocabulary = model.group.vocabulary
    jobs = []
    for job, lengths in enumerate(lengths_of(mix, tokens, length)):
        drawn = [[draw.randrange(vocabulary) for _ in range(n)] for n in lengths]
        jobs.append(JobTokens(drawn, drawn, seed=job))
    return jobs


@dataclass(frozen=True, slots=True)
class Called:
    """One row, on the device.

    row      its tables
    layers   what each layer is called with
    hidden   place of the hidden state among that
    loss     what the loss is called with, the hidden state first
    """

    row: PackedBatch
    load: Load
    layers: Mapping[str, tuple[Any, ...]]
    hidden: int
    loss: tuple[Any, ...]


def calls_of(model: SuperModel, row: PackedBatch, device: torch.device) -> Called:
    """Run a model's root on a row with layers that hand on what they are given."""
    moved = row.to(device)
    place = hidden_place(model)
    seen: dict[str, tuple[Any, ...]] = {}

    def note(path: str, args: tuple[Any, ...]) -> Tensor:
        seen[path] = args
        found: Tensor = args[0 if path == LOSS else place]
        return found

    with torch.no_grad(), handing_on(model, note):
        model(moved)
    loss = seen.pop(LOSS)
    return Called(moved, Load.of_row(row), seen, place, loss)


@contextmanager
def handing_on(
    model: SuperModel, instead: Callable[[str, tuple[Any, ...]], Tensor]
) -> Iterator[None]:
    """Layers and loss do something else meanwhile.

    instead   is given a module's path and its arguments, and returns its value
    """
    paths = [*model.layer_order(), LOSS]
    modules = {path: model.net.get_submodule(path) for path in paths}
    before = {path: module.__dict__.get("forward") for path, module in modules.items()}
    for path, module in modules.items():
        module.__dict__["forward"] = _bound(instead, path)
    try:
        yield
    finally:
        for path, module in modules.items():
            _restore(module, before[path])


def hidden_place(model: SuperModel) -> int:
    """Which argument of a layer is what the layer before it gave.

    raises    NotProfilable where layers do not hand on one value
    """
    order = set(model.layer_order())
    calls = [
        node for node in model.group.root.nodes
        if node.op == "call_module" and str(node.target) in order
    ]  # fmt: skip
    places = {
        place
        for before, node in pairwise(calls)
        for place, given in enumerate(node.args)
        if isinstance(given, fx.Node) and (given is before or before in given.all_input_nodes)
    }
    if len(places) > 1:
        raise NotProfilable(
            "layers hand on more than one value, so none can be timed alone",
            base=model.backbone.title,
            found=f"arguments {sorted(places)} of a layer come from the layer before",
        )
    return next(iter(places), 0)


def _bound(instead: Callable[[str, tuple[Any, ...]], Tensor], path: str) -> Callable[..., Tensor]:
    return lambda *args: instead(path, args)


def _restore(module: nn.Module, forward: object) -> None:
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward


def _ends(mix: Sequence[float], tokens: int) -> Iterator[int]:
    """Where each job's tokens end in a row."""
    total = 0.0
    for place, share in enumerate(mix):
        total += share
        yield tokens if place == len(mix) - 1 else round(tokens * min(total, 1.0))
