"""One base, ready to be asked: its tables, its layouts, its clock and its memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlora_fx.cost.demand import COLUMN, Array
from tlora_fx.cost.layouts import Layouts
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.profile import Profile
from tlora_fx.scheduler.estimator_fit import TP, BaseFit
from tlora_fx.scheduler.estimator_memory import Room
from tlora_fx.scheduler.estimator_rows import Groups, Pairs
from tlora_fx.scheduler.estimator_time import StepClock, Terms


@dataclass(frozen=True, slots=True)
class Base:
    """One base, ready to be asked."""

    fit: BaseFit
    layouts: Layouts
    clock: StepClock
    room: Room


def where_it_fits(known: Base, groups: Groups, pairs: Pairs, ms: Array) -> Array:
    """The times of pairs that may not fit: as they are, with a sharded base, or infinite."""
    usable = known.fit.usable_bytes
    fits = added(known.room.terms(groups, pairs)) <= usable
    found = np.where(fits, ms, np.inf)
    dp, pp = known.layouts.dp[pairs.layout], known.layouts.pp[pairs.layout]
    other = np.flatnonzero(~fits & (dp > 1) & (pp == 1))
    if len(other):
        chosen = pairs.only(other)
        gathers = known.clock.gathers(groups, chosen)
        shards = added(known.room.terms(groups, chosen, sharded=True)) <= usable
        found[other] = np.where(shards, ms[other] + gathers, np.inf)
    return found


def added(terms: Terms) -> Array:
    """All terms together."""
    return np.asarray(sum(terms.values()))


def measured(profile: Profile) -> tuple[int, ...]:
    """Sizes of tensor parallelism that a profile has layers of, 1 always among them."""
    return tuple(sorted({1, *(layer.tp for layer in profile.layers)} & set(TP)))


def operations(facts: ModelFacts, demands: Array) -> Array:
    """Floating-point operations that a step of each of n groups needs [n]."""
    elements = sum(layer.elements for layer in facts.layers)
    width = sum(one.width for layer in facts.layers for one in layer.attention)
    tokens, targets, squares, adapters = (
        demands[:, COLUMN[name]] for name in ("tokens", "targets", "squares", "rank_tokens")
    )
    head = facts.hidden * facts.vocabulary
    # Causal attention: two products of half a square forwards, five backwards.
    attention = 7 * width * squares
    products = 4 * (elements * tokens + head * targets)
    return np.asarray(products + 6 * len(facts.layers) * adapters + attention)
