"""Turn rows into token ids and the mask of the tokens that are trained.

Texts are tokenised as TRL's SFTTrainer does: the prompt alone, and prompt and completion as one
text; an end-of-sequence token closes a sample. The beginning-of-sequence token is whatever the
tokenizer adds, and stands once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tlora_fx.runtime.columns import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
class Encoder:
    """Encodes the rows of one layout with one tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    layout: Layout

    def encode(self, fields: Mapping[str, Any]) -> Encoded:
        """The tokens of a row.

        raises  BadRowError when a column is missing or has a wrong type
        """
        for name in self.layout.columns.values():
            if fields.get(name) is None:
                raise BadRowError(f"no value in the column '{name}'")
        ours = {name: fields[theirs] for name, theirs in self.layout.columns.items()}
        if self.layout.format == "messages":
            return self._chat(_messages(ours["messages"]), _tools(fields.get("tools")))
        for name, value in ours.items():
            if not isinstance(value, str):
                theirs = self.layout.columns[name]
                raise BadRowError(f"the column '{theirs}' holds {type(value).__name__}, no text")
        if self.layout.format == "text":
            ids = self._closed(ours["text"])
            return Encoded(ids, [True] * len(ids))
        return self._completion(ours["prompt"], ours["completion"])

    def _completion(self, prompt: str, completion: str) -> Encoded:
        before = self._ids(prompt)
        ids = self._closed(prompt + completion)
        # A tokenizer may merge across the border. All tokens from the first that differs on hold
        # some of the completion.
        start = _common(before, ids)
        differs = start < len(before)
        if not self.layout.on_completion:
            return Encoded(ids, [True] * len(ids), differs)
        trained = bool(completion)
        return Encoded(ids, [trained and at >= start for at in range(len(ids))], differs)

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text with what the tokenizer adds before it, and nothing after it."""
        made = self.tokenizer(text, add_special_tokens=True, truncation=False, verbose=False)
        ids: list[int] = list(made["input_ids"])
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if (
            bos is not None
            and ids[:2] == [bos, bos]
            and text.startswith(_text(self.tokenizer, "bos"))
        ):
            ids = ids[1:]
        written = eos is not None and text.endswith(_text(self.tokenizer, "eos"))
        added = ids[-2:] == [eos, eos] if written else ids[-1:] == [eos]
        return ids[:-1] if eos is not None and added else ids

    def _closed(self, text: str) -> list[int]:
        ids = self._ids(text)
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

    def _chat(self, messages: list[dict[str, Any]], tools: Any) -> Encoded:
        if not self.layout.on_completion:
            ids = self._render(messages, tools)
            return Encoded(ids, [True] * len(ids))
        if self.tokenizer.is_fast and _GENERATION.search(template_of(self.tokenizer)):
            made = self._template(messages, tools, return_assistant_tokens_mask=True)
            return Encoded(list(made["input_ids"]), [bool(x) for x in made["assistant_masks"]])
        return self._by_prefix(messages, tools)

    def _by_prefix(self, messages: list[dict[str, Any]], tools: Any) -> Encoded:
        """Find each assistant turn as what it adds to the conversation before it."""
        ids = self._render(messages, tools)
        targets = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            head = messages[:turn]
            before = self._render(head, tools, add_generation_prompt=True) if head else []
            after = self._render(messages[: turn + 1], tools)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise PrefixError(f"the template shows turn {turn + 1} otherwise in the whole chat")
            targets[len(before) : len(after)] = [True] * (len(after) - len(before))
        return Encoded(ids, targets)

    def _render(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> list[int]:
        return list(self._template(messages, tools, **options)["input_ids"])

    def _template(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=True, return_dict=True, **options
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRowError(f"the chat template refuses the messages: {error}") from error


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template that plain conversations use, or nothing when the tokenizer has none."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        return ""


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRowError("the messages are no list with at least one message")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRowError(f"message {number} is no object with a role")
        content = message.get("content")
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise BadRowError(f"message {number} has no text in 'content'")
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def _tools(value: object) -> object:
    if value is None or isinstance(value, list):
        return value
    raise BadRowError(f"the column 'tools' holds {type(value).__name__}, no list")


def _common(left: list[int], right: list[int]) -> int:
    """How many tokens both start with."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _text(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    return str(getattr(tokenizer, f"{name}_token"))
