"""One row as a job's data reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_fx.runtime.chats.conversations import BadRowError
from tlora_fx.runtime.chats.rendered import Encoded, whole
from tlora_fx.runtime.data.encoding import TextEncoder


def encode_pair(encoder: TextEncoder, fields: Mapping[str, Any]) -> list[Encoded]:
    """The sequences of a row of preferences; raises BadRowError."""
    return _encoded(encoder, fields, encoder.draft_pair)


def encode(encoder: TextEncoder, fields: Mapping[str, Any]) -> Encoded:
    """The sequence of a row, trained as its layout says; raises BadRowError."""
    [encoded] = _encoded(encoder, fields, encoder.draft)
    return encoded if encoder.layout.on_completion or encoder.has_chats else whole(encoded.ids)


def _encoded(encoder: TextEncoder, fields: Mapping[str, Any], draft: Any) -> list[Encoded]:
    [made] = encoder.encode_rows([fields], draft)
    if isinstance(made, BadRowError):
        raise made
    return [
        Encoded([*row.ids], (*zip(row.spans[::2], row.spans[1::2], strict=True),), row.differs)
        for row in made
    ]
