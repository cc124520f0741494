"""Columns beside a conversation: its system, its history, and marks of what is not trained.

source   LLaMA-Factory's columns `system` and `history`, the latter a list of [prompt, response]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tlora_fx.runtime.chats.conversations import BadRowError, Conversation


def lead_of(ours: Mapping[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """The messages before a conversation: its system, then the turns of its history.

    ours     a row's values by our names
    columns  our names of columns, with the data's, for messages
    raises   BadRowError
    """
    system = ours.get("system") or ""
    if not isinstance(system, str):
        theirs = columns["system"]
        raise BadRowError(f"the column '{theirs}' holds {type(system).__name__}, no text")
    messages = [{"role": "system", "content": system}] if system.strip() else []
    return messages + _turns(ours.get("history"), columns.get("history", "history"))


def led(chat: Conversation, lead: list[dict[str, Any]]) -> Conversation:
    """A conversation with these messages before it, but behind a system of its own.

    raises   BadRowError when it has another system
    """
    if not lead:
        return chat
    own = chat.messages[0] if chat.messages else {}
    if own.get("role") == "system":
        if lead[0]["role"] == "system":
            if lead[0]["content"] != own["content"]:
                raise BadRowError(
                    "the row has two systems: a column, and the first message; "
                    "with columns: {system: null} the column is not read"
                )
            lead = lead[1:]
        messages, shift = [own, *lead, *chat.messages[1:]], len(lead)
        moved = frozenset(at + shift if at else 0 for at in chat.untrained)
        return Conversation(messages, moved)
    moved = frozenset(at + len(lead) for at in chat.untrained)
    return Conversation([*lead, *chat.messages], moved)


def masked(chat: Conversation, mask: object, *, on_assistant: bool) -> Conversation:
    """A conversation without the turns that a row's `loss_mask` leaves out of training.

    mask          a 0 or 1 for each message
    on_assistant  whether turns of others are not trained anyway
    raises        BadRowError when the mask is no such list, or cannot be followed
    """
    if mask in (None, ""):
        return chat
    count, mask = len(chat.messages), _parsed(mask)
    if not isinstance(mask, list) or len(mask) != count or any(each not in (0, 1) for each in mask):
        raise BadRowError(f"loss_mask is not a 0 or 1 for each of {count} messages")
    for number, (message, on) in enumerate(zip(chat.messages, mask, strict=True), 1):
        if message["role"] != "assistant" and bool(on) is on_assistant:
            what = "asks to train" if on else "leaves out"
            why = "only turns of the assistant are" if on else "all tokens are trained"
            raise BadRowError(
                f"loss_mask {what} message {number}, whose role is '{message['role']}': {why}"
            )
    return Conversation(
        chat.messages, chat.untrained | {at for at, on in enumerate(mask) if not on}
    )


def _turns(history: object, theirs: str) -> list[dict[str, Any]]:
    history = _parsed(history)
    if not history:
        return []
    pairs = history if isinstance(history, list) else [None]
    messages = []
    for number, pair in enumerate(pairs, 1):
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(t, str) for t in pair)
        ):
            raise BadRowError(
                f"turn {number} of the column '{theirs}' is no pair of texts, a prompt and a "
                f"response; with columns: {{{theirs}: null}} it is not read"
            )
        messages += [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    return messages


def _parsed(value: object) -> object:
    """A value of a column of text, which holds lists as JSON."""
    if isinstance(value, str) and value.strip():
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
