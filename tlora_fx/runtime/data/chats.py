"""What becomes of a conversation: by a chat template text, by a tokenizer tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tlora_fx.errors import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: What a message of a role that a template shows is found again by.
_MARK = "Xq7Zk"
#: Roles that chat templates print as they come; another must stand in the template by its name.
_ROLES = ("system", "developer", "user", "assistant", "tool")
#: What ShareGPT's data sets call these roles.
_SHAREGPT: Mapping[str, str] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


class BadRowError(ValueError):
    """A row has values that make no sample. Internal: callers count it or name the row."""


class PrefixError(BadRowError):
    """A chat template renders the start of a conversation otherwise than the whole of it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of one row before truncation.

    ids             token ids
    targets         per token, whether it is trained
    prefix_differs  the prompt's tokens alone are no prefix of the sample's
    """

    ids: list[int]
    targets: list[bool]
    prefix_differs: bool = False


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Encodes conversations by the chat template of one tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    _shown: set[str] = field(default_factory=set)

    def encode(self, messages: list[dict[str, Any]], tools: Any, *, on_assistant: bool) -> Encoded:
        """The tokens of a conversation, of which the assistant's turns or all are trained."""
        if not on_assistant:
            ids = self.ids(messages, tools)
            return Encoded(ids, [True] * len(ids))
        if self.tokenizer.is_fast and _GENERATION.search(template_of(self.tokenizer)):
            self._require_roles(messages, tools)
            encoding = self._template(messages, tools, return_assistant_tokens_mask=True)
            trained = [bool(mask) for mask in encoding["assistant_masks"]]
            return Encoded(list(encoding["input_ids"]), trained)
        return self._by_prefix(messages, tools)

    def _by_prefix(self, messages: list[dict[str, Any]], tools: Any) -> Encoded:
        """Find each assistant turn as what it adds to the conversation before it."""
        ids = self.ids(messages, tools)
        targets = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            head = messages[:turn]
            before = self.ids(head, tools, add_generation_prompt=True) if head else []
            after = self.ids(messages[: turn + 1], tools)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise PrefixError(f"the template shows turn {turn + 1} otherwise in the whole chat")
            targets[len(before) : len(after)] = [True] * (len(after) - len(before))
        return Encoded(ids, targets)

    def ids(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> list[int]:
        """The tokens of a conversation as the template renders it."""
        self._require_roles(messages, tools)
        return list(self._template(messages, tools, **options)["input_ids"])

    def _require_roles(self, messages: list[dict[str, Any]], tools: Any) -> None:
        """Refuse roles that the template does not know, or whose words it leaves out."""
        for role in {message["role"] for message in messages} - self._shown:
            named = re.search(rf"['\"]{re.escape(role)}['\"]", template_of(self.tokenizer))
            if role not in _ROLES and not named:
                near = nearest(role, _ROLES)
                known = f"did you mean '{near}'?" if near else f"it may be {', '.join(_ROLES)}"
                raise BadRowError(f"the chat template knows no role '{role}'; {known}")
            said = [m for m in messages if m["role"] == role and m.get("content")]
            if not said:
                continue
            marked = [{**m, "content": _MARK} if m in said else m for m in messages]
            if _MARK not in self._template(marked, tools, tokenize=False, return_dict=False):
                raise BadRowError(f"the chat template leaves out what the role '{role}' says")
            self._shown.add(role)

    def _template(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
        from jinja2 import TemplateError

        for message in messages:
            require_encodable(message.get("content") or "")
        options = {"tokenize": True, "return_dict": True, **options}
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools or None, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRowError(f"the chat template refuses the messages: {error}") from error


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template that plain conversations use, or nothing when the tokenizer has none."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        return ""


def require_encodable(text: str) -> None:
    """Refuse half a character, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("ascii", "backslashreplace").decode()
        raise BadRowError(f"the text has half a character, {half} at {error.start + 1}") from None


def messages_of(value: object) -> list[dict[str, Any]]:
    """A conversation as chat templates take it, from OpenAI's form or from ShareGPT's.

    raises   BadRowError
    """
    if not isinstance(value, list) or not value:
        raise BadRowError("the messages are no list with at least one message")
    return [_message(number, message) for number, message in enumerate(value, 1)]


def _message(number: int, message: object) -> dict[str, Any]:
    if isinstance(message, dict) and "role" not in message and isinstance(message.get("from"), str):
        role = _SHAREGPT.get(message["from"], message["from"])
        message = {"role": role, "content": message.get("value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRowError(f"message {number} is no object with a role")
    kept = {key: item for key, item in message.items() if item is not None}
    if isinstance(message.get("content"), list):
        kept["content"] = _joined(number, message["content"])
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_call(number, call) for call in kept["tool_calls"]]
    elif not isinstance(kept.get("content"), str):
        raise BadRowError(f"message {number} has no text in 'content'")
    return kept


def _joined(number: int, parts: list[Any]) -> str:
    """The text of a message that stands in parts, as OpenAI's may."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    kinds = {str(part.get("type")) for part in parts if isinstance(part, dict)} - {"text"}
    if kinds or not all(isinstance(text, str) for text in texts):
        what = f" but {', '.join(sorted(kinds))}" if kinds else ""
        raise BadRowError(f"message {number} has no text in 'content'{what}")
    return "".join(map(str, texts))


def _call(number: int, call: object) -> object:
    """A tool call whose arguments are an object: OpenAI writes them as JSON in a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        raise BadRowError(f"message {number} calls a tool with no JSON: {error}") from None
    assert isinstance(call, dict)
    return {**call, "function": {**function, "arguments": arguments}}


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
