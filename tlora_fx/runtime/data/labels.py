"""Labels of a classifier's samples: what data writes, one integer a sample, and numbers again.

A sample holds integers, so a label is one: the number of a class, a mark a bit for each of several
labels, or the bits of a number in float32. None of them is -100, which is no number's bits either.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from tlora_fx.config.job import BaseSpec


def label_code(value: Any, base: BaseSpec) -> int:
    """A label as the integer that a sample has.

    value     a name, its number, or a number; of several labels a list of names, a list of a 0 or 1
              for each, or text with names between commas
    raises    ValueError, saying what is wrong
    """
    if base.objective == "regression":
        return _bits(value)
    names = base.label_names
    if base.objective == "single_label_classification":
        return _index(value, names)
    return sum(1 << index for index in set(_several(value, names)))


def decoded(codes: np.ndarray, base: BaseSpec) -> np.ndarray:
    """Labels that codes stand for: numbers of classes [N], numbers [N], or marks [N, labels]."""
    if base.objective == "regression":
        return codes.astype(np.int32).view(np.float32)
    if base.objective == "multi_label_classification":
        return codes[:, None] >> np.arange(len(base.label_names)) & 1
    return codes


def _bits(value: Any) -> int:
    try:
        number = float(value)
        [bits] = struct.unpack("<i", struct.pack("<f", number))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"the label {value!r} is no number") from None
    if not math.isfinite(number):
        raise ValueError(f"the label {value!r} is no finite number")
    return int(bits)


def _index(value: Any, names: Sequence[str]) -> int:
    if isinstance(value, str) and value.strip() in names:
        return names.index(value.strip())
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if isinstance(value, float) and value != number:
        number = -1
    if 0 <= number < len(names):
        return number
    known = ", ".join(names[:8]) + (", ..." if names[8:] else "")
    raise ValueError(f"the label {value!r} is none of {len(names)}: {known}")


def _several(value: Any, names: Sequence[str]) -> list[int]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"the labels {value!r} are no list")
    if all(isinstance(part, str) for part in value):
        return [_index(part, names) for part in value]
    if len(value) != len(names) or any(part not in (0, 1) for part in value):
        raise ValueError(f"the labels {value!r} are not a 0 or 1 for each of {len(names)}")
    return [index for index, part in enumerate(value) if part]
