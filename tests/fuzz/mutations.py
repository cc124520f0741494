"""Strategies that damage a file: its bytes, or values inside the document that it holds."""

from __future__ import annotations

import copy
import math
from typing import Any

from hypothesis import strategies as st

#: What readers stumble over: numbers out of range, other encodings, nesting, names of places.
WORDS = (
    b"", b"0", b"-1", b"1e999", b"NaN", b"-Infinity", b"1" + b"0" * 40, b"9" * 5000, b"0.1e-400",
    b"null", b"true", b'""', b'"\\ud800"', b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b"\xf0\x9f\x98",
    b"[" * 3000, b"{" * 3000, b'{"a":' * 1500, b"[]", b"{}", b'"', b"'", b",", b"\n", b"\r\n",
    b"\x1b[31m", b"../../etc/passwd", b"/dev/zero", b"&a [*a, *a]", b"!!python/name:os.system",
    b"1:30", b"0x1F", b"2023-03-31", b"%s", b"#", b": ", b"- ",
)  # fmt: skip

VALUES = st.sampled_from(
    [
        None, True, 0, -1, 1, 2, 7, 10**30, -(10**30), 2**31, 2**63, 1e308, 1e-320, 0.5, math.nan,
        math.inf, -math.inf, "", "x", "x" * 3000, "\ud800", "\x00", "\x1b[31m", "0", "NaN", "1e999",
        "../../etc/passwd", "/dev/zero", "q_proj", "(a+)+$", "cpu", "float32", [], [None], ["", 0],
        [[[[[]]]]], {}, {"": None}, {"a": {"b": []}}, {"r": 10**9}, [0] * 50,
    ]
).map(copy.deepcopy)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with one to four changes of its bytes."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(changed)))
        end = min(len(changed), start + draw(st.sampled_from([0, 1, 1, 2, 5, 40, 10**6])))
        how = draw(st.sampled_from(["word", "word", "bytes", "cut", "twice", "flip"]))
        if how == "word":
            changed[start:end] = draw(st.sampled_from(WORDS))
        elif how == "bytes":
            changed[start:end] = draw(st.binary(max_size=6))
        elif how == "cut":
            del changed[start:end]
        elif how == "twice":
            changed[start:start] = changed[start:end][:2000]
        elif start < len(changed):
            changed[start] ^= 1 << draw(st.integers(0, 7))
    return bytes(changed)


@st.composite
def altered(draw: st.DrawFn, document: Any) -> Any:
    """The document, of mappings and lists, with one to three values replaced, left out or added."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        holders = list(_holders(changed))
        if not holders:
            return draw(VALUES)
        holder = holders[draw(st.integers(0, len(holders) - 1))]
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = draw(st.sampled_from(keys))
        how = draw(st.sampled_from(["value", "value", "value", "gone", "more", "swap"]))
        if how == "value":
            holder[key] = draw(VALUES)
        elif how == "gone":
            del holder[key]
        elif how == "swap":
            holder[key] = copy.deepcopy(holder[draw(st.sampled_from(keys))])
        elif isinstance(holder, dict):
            holder[draw(st.sampled_from(["", "more", "__class__", "r", "path", "\ud800"]))] = draw(
                VALUES
            )
        else:
            holder.append(draw(VALUES))
    return changed


def _holders(value: Any) -> Any:
    """All mappings and lists with something in them, the outermost first."""
    if isinstance(value, dict | list) and value:
        yield value
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _holders(item)
