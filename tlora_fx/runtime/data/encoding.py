"""What a row of a job's data becomes: tokens, and which of them are trained.

Texts are tokenised as TRL's trainers do: the prompt alone, and prompt and completion as one text.
An end-of-sequence token closes a sample. The beginning-of-sequence token is whatever the tokenizer
adds, and stands once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tlora_fx.config.job import COLUMNS_OF, BaseSpec
from tlora_fx.runtime.data.beside import lead_of, led, masked
from tlora_fx.runtime.data.chats import ChatRenderer, template_of
from tlora_fx.runtime.data.conversations import (
    BadRowError,
    Conversation,
    conversation_of,
    is_conversation,
    require_encodable,
    tools_of,
)
from tlora_fx.runtime.data.labels import label_code
from tlora_fx.runtime.data.layout import CHATS, SampleLayout
from tlora_fx.runtime.data.rendered import Encoded, Rendered, common, tokenize
from tlora_fx.runtime.data.tokenised import encode_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Labelled:
    """The tokens of a row that has a label, as many as are kept.

    code   the label as of `label_code`
    """

    ids: list[int]
    code: int
    is_truncated: bool = False


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Encodes the rows of one layout with one tokenizer.

    append_eos   end conversations by the end-of-sequence token where the template does not
    clock        what a chat template that asks for the time is told; None: the time it is then
    """

    tokenizer: PreTrainedTokenizerBase
    layout: SampleLayout
    append_eos: bool = False
    clock: datetime | None = None
    _chats: ChatRenderer = field(init=False)

    def __post_init__(self) -> None:
        chats = ChatRenderer(self.tokenizer, self.layout.on_completion, self.append_eos, self.clock)
        object.__setattr__(self, "_chats", chats)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the chat template, as far as rows have shown it."""
        return tuple(self._chats.notes)

    def render(self, fields: Mapping[str, Any]) -> Rendered | None:
        """What the chat template makes of a row; None for a row that is no conversation.

        raises   BadRowError
        """
        ours, format = self._ours(fields), self.layout.format
        if format in CHATS:
            self._require_template()
            chat = conversation_of(ours["messages" if format == "messages" else "conversations"])
            mask, on_assistant = ours.get("loss_mask"), self.layout.on_completion
            chat = led(masked(chat, mask, on_assistant=on_assistant), self._lead(ours))
            return self._chats.render(chat, tools_of(ours.get("tools")))
        if format == "alpaca":
            lead = self._text_lead(ours)
            if not template_of(self.tokenizer):
                return None
            said = (("user", self._question(ours)), ("assistant", self._text(ours, "output")))
            messages = [{"role": role, "content": text} for role, text in said]
            return self._chats.render(led(Conversation(messages), lead), None)
        if format == "prompt-completion":
            pair = self._said(ours, "completion")
            if pair is not None:
                prompt, reply = led(pair[0], self._lead(ours)), pair[1]
                return self._chats.render_reply(prompt, reply, tools_of(ours.get("tools")))
        return None

    def _said(self, ours: Mapping[str, Any], name: str) -> tuple[Conversation, Conversation] | None:
        """A prompt and what is said to it in the column `name`; None for plain texts."""
        if is_conversation(ours["prompt"]):
            self._require_template()
            return conversation_of(ours["prompt"]), conversation_of(ours[name])
        self._text_lead(ours)
        if not self.layout.is_instructed:
            return None
        prompt, reply = self._text(ours, "prompt"), self._text(ours, name)
        return (
            Conversation([{"role": "user", "content": prompt}]),
            Conversation([{"role": "assistant", "content": reply}]),
        )

    def _lead(self, ours: Mapping[str, Any]) -> list[dict[str, Any]]:
        return lead_of(ours, self.layout.columns)

    def _text_lead(self, ours: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What stands before a prompt that is text; raises BadRowError where no row had any."""
        lead = self._lead(ours)
        if lead and not self.layout.is_instructed:
            raise BadRowError(
                "the row has a system or a history, and none of the first rows has: move such a "
                "row to the front, or set columns: {system: null, history: null}"
            )
        return lead

    def _require_template(self) -> None:
        if not template_of(self.tokenizer):
            raise BadRowError("the row is a conversation, and the tokenizer has no chat template")

    def render_pair(self, fields: Mapping[str, Any]) -> tuple[Rendered, Rendered] | None:
        """What the chat template makes of a chosen and of a rejected completion.

        returns  None for completions that are no messages
        raises   BadRowError
        """
        ours = self._ours(fields)
        tools, lead = tools_of(ours.get("tools")), self._lead(ours)
        if not is_conversation(ours["chosen"]):
            return self._exchanges(ours, tools)
        self._require_template()
        chosen, rejected = (conversation_of(ours[name]) for name in ("chosen", "rejected"))
        if is_conversation(ours.get("prompt")):
            prompt = conversation_of(ours["prompt"])
        else:
            # A prompt given as text too stands at the start of both conversations anyway.
            shared = _shared(chosen.messages, rejected.messages)
            prompt = Conversation(chosen.messages[:shared])
            chosen, rejected = chosen.behind(shared), rejected.behind(shared)
        if not (prompt.messages and chosen.messages and rejected.messages):
            raise BadRowError("chosen and rejected have no prompt in common, or nothing behind it")
        prompt = led(prompt, lead)
        first, second = (self._chats.render_reply(prompt, c, tools) for c in (chosen, rejected))
        return first, second

    def _exchanges(self, ours: Mapping[str, Any], tools: Any) -> tuple[Rendered, Rendered] | None:
        """Two texts said to a prompt behind a system or a history; None where no row has these."""
        lead = self._text_lead(ours)
        if not self.layout.is_instructed:
            return None
        if "prompt" not in ours:
            raise BadRowError("a system or a history needs the column prompt behind it")
        pairs = [self._said(ours, name) for name in ("chosen", "rejected")]
        first, second = (
            self._chats.render_reply(led(pair[0], lead), pair[1], tools) for pair in pairs if pair
        )
        return first, second

    def encode(self, fields: Mapping[str, Any]) -> Encoded:
        """The tokens of a row; raises BadRowError when a column is missing or has a wrong type."""
        rendered = self.render(fields)
        if rendered is not None:
            return tokenize(self.tokenizer, [rendered])[0]
        ours, format = self._ours(fields), self.layout.format
        if format == "tokens":
            return encode_tokens(ours, is_masked=self.layout.on_completion)
        if format == "text":
            ids = self._closed(self._text(ours, "text"))
            return Encoded(ids, [True] * len(ids))
        if format == "alpaca":
            return self._completion(f"{self._question(ours)}\n\n", self._text(ours, "output"))
        return self._completion(self._text(ours, "prompt"), self._text(ours, "completion"))

    def encode_label(self, fields: Mapping[str, Any], base: BaseSpec, most: int) -> Labelled:
        """The tokens of a row's text as the tokenizer alone makes and cuts them, and its label.

        most     tokens that are kept
        raises   BadRowError
        """
        ours = self._ours(fields)
        text = self._text(ours, "text")
        require_encodable(text)
        try:
            code = label_code(ours["label"], base)
        except ValueError as error:
            raise BadRowError(str(error)) from None
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        if len(ids) <= most:
            return Labelled(ids, code)
        cut = self.tokenizer(text, truncation=True, max_length=most)["input_ids"]
        return Labelled(list(cut), code, is_truncated=True)

    def encode_pair(self, fields: Mapping[str, Any]) -> tuple[Encoded, Encoded]:
        """The tokens of a chosen and of a rejected completion of one prompt.

        What is trained is where both part from the prompt's own tokens, as in TRL's DPOTrainer.

        raises   BadRowError
        """
        rendered = self.render_pair(fields)
        if rendered is not None:
            return paired(*tokenize(self.tokenizer, rendered))
        ours = self._ours(fields)
        chosen, rejected = self._text(ours, "chosen"), self._text(ours, "rejected")
        if "prompt" in ours:
            prompt = self._text(ours, "prompt")
        else:
            prompt = chosen[: _shared(chosen, rejected)]
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        before = self._ids(prompt)
        first, second = (
            _behind(before, self._closed(prompt + completion)) for completion in (chosen, rejected)
        )
        return paired(first, second)

    def _ours(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The row's values by our names; optional ones only where they are there."""
        needed, ours = COLUMNS_OF[self.layout.format], {}
        for name, theirs in self.layout.columns.items():
            value = fields.get(theirs)
            if value is not None:
                ours[name] = value
            elif name in needed:
                raise BadRowError(f"no value in the column '{theirs}'")
        return ours

    def _text(self, ours: Mapping[str, Any], name: str) -> str:
        value = ours[name]
        if isinstance(value, str):
            return value
        theirs = self.layout.columns[name]
        raise BadRowError(f"the column '{theirs}' holds {type(value).__name__}, no text")

    def _question(self, ours: Mapping[str, Any]) -> str:
        """What a row of Alpaca's asks."""
        asked, more = self._text(ours, "instruction"), ours.get("input") or ""
        if not isinstance(more, str):
            raise BadRowError(f"the column 'input' holds {type(more).__name__}, no text")
        return f"{asked}\n\n{more}" if more.strip() else asked

    def _completion(self, prompt: str, completion: str) -> Encoded:
        before = self._ids(prompt)
        ids = self._closed(prompt + completion)
        # A tokenizer may merge across the border. All tokens from the first that differs on hold
        # some of the completion.
        start = common(before, ids)
        differs = start < len(before)
        if not self.layout.on_completion:
            return Encoded(ids, [True] * len(ids), differs)
        trained = bool(completion)
        return Encoded(ids, [trained and at >= start for at in range(len(ids))], differs)

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text with what the tokenizer adds before it, and nothing after it."""
        require_encodable(text)
        encoding = self.tokenizer(text, add_special_tokens=True, truncation=False, verbose=False)
        ids: list[int] = list(encoding["input_ids"])
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if (
            bos is not None
            and ids[:2] == [bos, bos]
            and text.startswith(_special(self.tokenizer, "bos"))
        ):
            ids = ids[1:]
        written = eos is not None and text.endswith(_special(self.tokenizer, "eos"))
        added = ids[-2:] == [eos, eos] if written else ids[-1:] == [eos]
        return ids[:-1] if eos is not None and added else ids

    def _closed(self, text: str) -> list[int]:
        ids = self._ids(text)
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def paired(chosen: Encoded, rejected: Encoded) -> tuple[Encoded, Encoded]:
    """Two completions of one prompt, both trained from where one of them parts from it.

    raises   BadRowError when they are the same
    """
    if chosen.ids == rejected.ids:
        raise BadRowError("the chosen completion is the rejected one")
    start = min(sum(not on for on in each.targets) for each in (chosen, rejected))
    differs = chosen.prefix_differs or rejected.prefix_differs
    first, second = (
        Encoded(each.ids, [at >= start for at in range(len(each.ids))], differs)
        for each in (chosen, rejected)
    )
    return first, second


def _behind(prompt: list[int], ids: list[int]) -> Encoded:
    start = common(prompt, ids)
    return Encoded(ids, [at >= start for at in range(len(ids))], start < len(prompt))


def _shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How much of two completions without a prompt is the prompt, as of TRL's `extract_prompt`.

    A space before the first difference is of the completions, and so is the last item of the
    shorter one that is the start of the other.
    """
    at = common(chosen, rejected)
    if at == min(len(chosen), len(rejected)):
        return max(at - 1, 0)
    return at - 1 if at and chosen[at - 1] == " " else at


def _special(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    return str(getattr(tokenizer, f"{name}_token"))
