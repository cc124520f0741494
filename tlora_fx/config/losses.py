"""Losses by name, for loops of one's own and the endpoint.

What each computes stands in `tlora_fx.model.objectives`.
"""

from __future__ import annotations

from collections.abc import Mapping

#: What a sample may say of a token, in the order of the columns of `TokenTerms.values`.
FIELDS = ("weights", "logprobs", "advantages")
#: Losses by token, each with its options and their defaults.
BY_TOKEN: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {"label_smoothing": 0.0},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
}
#: Losses by sequence, each with its options and their defaults.
BY_SEQUENCE: Mapping[str, Mapping[str, float]] = {
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
}
LOSSES = {**BY_TOKEN, **BY_SEQUENCE}
#: What a sample has to say of its tokens for a loss; `weights` are 1 where it says nothing.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": (),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro", "gspo"), FIELDS[1:]),
    "kto": ("desirable",),
}
