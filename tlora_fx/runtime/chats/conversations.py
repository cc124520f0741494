"""The conversation that a column of a row holds, in the form that chat templates take.

Read are OpenAI's form, ShareGPT's, and what LLaMA-Factory, Axolotl and ms-swift call roles and
turns that are not trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: What data sets call these roles.
_ROLES: Mapping[str, str] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
#: Of these, what no chat template has as a role of its own.
_ALIASES = ("human", "gpt", "chatgpt", "function_call")
#: Keys of a message that say whether it is trained: OpenAI's; ShareGPT's, Axolotl's; ms-swift's.
_TRAINED = ("weight", "train", "training", "loss")
#: Keys that say so in a way that is not read.
_UNREAD = ("mask", "loss_mask", "loss_weight", "train_detail", "training_detail", "weights")


class BadRowError(ValueError):
    """A row has values that make no sample. Internal: callers count it or name the row."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates take them.

    messages   each with a role, and content or tool calls
    untrained  indices of the messages that are not trained whatever their role is
    """

    messages: list[dict[str, Any]]
    untrained: frozenset[int] = frozenset()

    def behind(self, count: int) -> Conversation:
        """Text behind the first `count` messages."""
        later = frozenset(index - count for index in self.untrained if index >= count)
        return Conversation(self.messages[count:], later)


def conversation_of(value: object) -> Conversation:
    """A conversation from a list of messages, from one message, or from JSON text of these.

    raises   BadRowError
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRowError("the messages are no list, but text that is no JSON") from None
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRowError("the messages are no list with at least one message")
    messages, untrained = [], set()
    for index, message in enumerate(value):
        kept = _message(index + 1, message)
        if not _pop_trained(index + 1, kept):
            untrained.add(index)
        messages.append(kept)
    return Conversation(messages, frozenset(untrained))


def is_conversation(value: object) -> bool:
    """Whether a value of a column that may hold text holds messages."""
    if isinstance(value, Mapping):
        return "role" in value or "from" in value
    return isinstance(value, list)


def tools_of(value: object) -> object:
    """The tools that a row offers; raises BadRowError."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRowError("the column 'tools' holds text that is no JSON") from None
    if value is None or value == "" or isinstance(value, list):
        return value
    raise BadRowError(f"the column 'tools' holds {type(value).__name__}, no list")


def require_encodable(text: str) -> None:
    """Refuse half a character, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("ascii", "backslashreplace").decode()
        raise BadRowError(f"the text has half a character, {half} at {error.start + 1}") from None


def _message(number: int, message: object) -> dict[str, Any]:
    given = message if isinstance(message, dict) else {}
    kept = {key: item for key, item in given.items() if item is not None}
    said = kept.get("role")
    if said is None and isinstance(kept.get("from"), str):
        said, content = kept.pop("from"), kept.pop("value", None)
        kept = {"role": _ROLES.get(said, said), **({} if content is None else {"content": content})
                , **{key: item for key, item in kept.items() if key != "content"}}  # fmt: skip
    elif said in _ALIASES:
        kept["role"] = _ROLES[said]
    if not isinstance(kept.get("role"), str):
        raise BadRowError(f"message {number} is no object with a role")
    if isinstance(kept.get("content"), list):
        kept["content"] = _joined(number, kept["content"])
    if said == "function_call":
        kept["tool_calls"] = _calls_of_text(number, kept.pop("content", None))
    calls = kept.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRowError(f"message {number} has no list of objects in 'tool_calls'")
    if calls:
        kept["tool_calls"] = [_call(number, call) for call in calls]
    if not isinstance(kept.get("content", "" if calls else None), str):
        raise BadRowError(f"message {number} has no text in 'content'")
    return kept


def _pop_trained(number: int, message: dict[str, Any]) -> bool:
    """Whether a message may be trained by what it says itself, which no template reads."""
    for key in _UNREAD:
        if key in message:
            raise BadRowError(
                f"message {number} has '{key}', which looks like what is trained and is not read; "
                f"say it with 'weight' or 'train'"
            )
    trained = True
    for key in _TRAINED:
        if key not in message:
            continue
        value = message.pop(key)
        if not (isinstance(value, bool | int | float) and value in (0, 1)):
            raise BadRowError(f"message {number} has {key} {value!r}: a turn is trained or not")
        if value is True and message["role"] != "assistant":
            raise BadRowError(
                f"message {number} asks to be trained, and its role is '{message['role']}': "
                f"only turns of the assistant are"
            )
        trained = trained and bool(value)
    return trained


def _joined(number: int, parts: list[Any]) -> str:
    """The text of a message that stands in parts, as OpenAI's may."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    kinds = {str(part.get("type")) for part in parts if isinstance(part, dict)} - {"text"}
    if kinds or not all(isinstance(text, str) for text in texts):
        what = f" but {', '.join(sorted(kinds))}" if kinds else ""
        raise BadRowError(f"message {number} has no text in 'content'{what}")
    return "".join(map(str, texts))


def _calls_of_text(number: int, text: object) -> list[dict[str, Any]]:
    """The calls that LLaMA-Factory writes as JSON into the text of a turn of their own."""
    try:
        calls = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRowError(f"message {number} calls a tool with no JSON of name and arguments")
    return [{"type": "function", "function": {"arguments": {}, **call}} for call in calls]


def _call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object: OpenAI writes them as JSON in a text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        raise BadRowError(f"message {number} calls a tool with no JSON: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}
