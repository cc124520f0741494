"""One row as a job's data reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_fx.runtime.chats.conversations import BadRowError
from tlora_fx.runtime.chats.rendered import Encoded, whole
from tlora_fx.runtime.data.encoding import TextEncoder
from tlora_fx.runtime.data.tables import TokenRow


def encode_pair(encoder: TextEncoder, fields: Mapping[str, Any]) -> list[Encoded]:
    """The sequences of a row of preferences; raises BadRowError."""
    return [_encoded(row) for row in _rows(encoder, fields, encoder.draft_pair)]


def encode(encoder: TextEncoder, fields: Mapping[str, Any]) -> Encoded:
    """The sequence of a row, trained as its layout says; raises BadRowError."""
    [row] = _rows(encoder, fields, encoder.draft)
    encoded = _encoded(row)
    return encoded if encoder.layout.on_completion or row.final else whole(encoded.ids)


def targets(encoded: Encoded) -> list[bool]:
    """Per token, whether it is trained."""
    trained = {at for span in encoded.spans for at in range(*span)}
    return [at in trained for at in range(len(encoded.ids))]


def _rows(encoder: TextEncoder, fields: Mapping[str, Any], draft: Any) -> tuple[TokenRow, ...]:
    [made] = encoder.encode_rows([fields], draft)
    if isinstance(made, BadRowError):
        raise made
    return made


def _encoded(row: TokenRow) -> Encoded:
    spans = (*zip(row.spans[::2], row.spans[1::2], strict=True),)
    return Encoded([*row.ids], spans, row.differs)
