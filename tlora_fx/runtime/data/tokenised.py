"""Rows that hold tokens already: their ids, and which of them are trained.

source   TRL's SFTTrainer, which reads the columns input_ids, labels, completion_mask and
         assistant_masks; transformers' attention_mask, which is 0 at padding
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tlora_fx.runtime.chats.conversations import BadRowError
from tlora_fx.runtime.chats.rendered import Encoded
from tlora_fx.runtime.data.layout import TOKEN_MASKS

_NO_TARGET = -100


def encode_tokens(ours: Mapping[str, Any]) -> Encoded:
    """The tokens of a row without padding, trained where all of its labels and masks say so.

    ours       a row's values by our names; lists of whole numbers, one a token
    raises     BadRowError
    """
    ids = _numbers(ours, "input_ids", len(_numbers(ours, "input_ids")))
    wrong = next((at for at, token in enumerate(ids) if not 0 <= token < 2**31), None)
    if wrong is not None:
        raise BadRowError(f"input_ids[{wrong}] is {ids[wrong]}, which is no token")
    targets = [True] * len(ids)
    for name in TOKEN_MASKS:
        if ours.get(name) is not None:
            marks = _numbers(ours, name, len(ids))
            on = _trained(ids, marks) if name == "labels" else _marked(marks, name)
            targets = [both and each for both, each in zip(targets, on, strict=True)]
    start, end = 0, len(ids)
    if ours.get("attention_mask") is not None:
        start, end = _attended(_numbers(ours, "attention_mask", len(ids)))
    edges = np.flatnonzero(np.diff([0, *targets[start:end], 0]))
    spans = edges.reshape(-1, 2).tolist()
    return Encoded(ids[start:end], tuple((first, last) for first, last in spans))


def _numbers(ours: Mapping[str, Any], name: str, count: int | None = None) -> list[int]:
    values = ours[name]
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except ValueError:
            raise BadRowError(f"'{name}' holds text that is no JSON") from None
    if not isinstance(values, Sequence) or not all(isinstance(each, int) for each in values):
        raise BadRowError(f"'{name}' is no list of whole numbers")
    if count is not None and len(values) != count:
        raise BadRowError(f"'{name}' has {len(values)} numbers, and input_ids {count}")
    if not values:
        raise BadRowError(f"'{name}' is empty")
    return [int(each) for each in values]


def _trained(ids: list[int], labels: list[int]) -> list[bool]:
    for at, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, _NO_TARGET):
            raise BadRowError(
                f"labels[{at}] is {label}, neither input_ids[{at}], {token}, nor {_NO_TARGET}: "
                f"labels are not shifted"
            )
    return [label != _NO_TARGET for label in labels]


def _marked(marks: list[int], name: str) -> list[bool]:
    if any(mark not in (0, 1) for mark in marks):
        raise BadRowError(f"'{name}' is not a 0 or 1 for each token")
    return [bool(mark) for mark in marks]


def _attended(mask: list[int]) -> tuple[int, int]:
    """From where to where tokens are no padding; all of those between must be none."""
    on = _marked(mask, "attention_mask")
    if not any(on):
        raise BadRowError("'attention_mask' leaves no token")
    start, end = on.index(True), len(on) - on[::-1].index(True)
    if not all(on[start:end]):
        raise BadRowError("'attention_mask' hides tokens between others, which is not trained")
    return start, end
