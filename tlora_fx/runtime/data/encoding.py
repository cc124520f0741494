"""Rows of a job's data as tokens, and which of them are trained.

Texts are tokenised as TRL's trainers do: the prompt alone, and prompt and completion as one text.
An end-of-sequence token closes a sample. The beginning-of-sequence token is whatever the tokenizer
adds, and stands once.

Rows may hold tokens already. Then their ids are taken, and what is trained of them as TRL's
SFTTrainer does from the columns input_ids, labels, completion_mask and assistant_masks, and from
transformers' attention_mask, which is 0 at padding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from tlora_fx.config.data_spec import COLUMNS_OF
from tlora_fx.config.job import BaseSpec
from tlora_fx.runtime.chats.beside import lead_of, led, masked
from tlora_fx.runtime.chats.conversations import (
    BadRowError,
    Conversation,
    conversation_of,
    is_conversation,
    require_encodable,
    tools_of,
)
from tlora_fx.runtime.chats.rendered import Encoded, Rendered, behind, common, tokenize, whole
from tlora_fx.runtime.chats.renderer import ChatRenderer, template_of
from tlora_fx.runtime.data.labels import label_code
from tlora_fx.runtime.data.layout import CHATS, TOKEN_MASKS, SampleLayout
from tlora_fx.runtime.data.number_columns import numbers_beside, require_log_probabilities
from tlora_fx.runtime.data.tables import NO_TARGET, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Which token of a sample has its label.
LabelPosition = Callable[[Sequence[int]], int]
DraftRow = Callable[[Mapping[str, Any]], "Draft"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A row before its texts are tokenised.

    chats     what the chat template rendered
    texts     other texts, which the tokenizer adds its tokens to
    plain     texts whose tokens are those that the tokenizer makes of them alone
    finish    makes the row's sequences of the tokens of both; raises BadRowError
    """

    finish: Callable[[Sequence[Encoded], Sequence[list[int]]], tuple[TokenRow, ...]]
    chats: tuple[Rendered, ...] = ()
    texts: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


@dataclass(slots=True)
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
        self._chats = ChatRenderer(
            self.tokenizer, self.layout.on_completion, self.append_eos, self.clock
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to the user about the chat template, as far as rows have shown it."""
        return tuple(self._chats.notes)

    def render(self, fields: Mapping[str, Any]) -> Rendered | None:
        """A row by the chat template; None for a row that is no conversation.

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
        if format in ("prompt-completion", "unpaired-preference"):
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
        """A chosen and a rejected completion by the chat template.

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

    def encode_rows(
        self, rows: Sequence[Mapping[str, Any]], draft: DraftRow
    ) -> list[tuple[TokenRow, ...] | BadRowError]:
        """The sequences of each row, or what is wrong with it.

        All texts are tokenised by one call, which a fast tokenizer spreads over all cores.

        draft    one of `draft`, `draft_pair`, `draft_label`
        """
        drafts: list[Draft | BadRowError] = []
        for fields in rows:
            try:
                drafts.append(draft(fields))
            except BadRowError as error:
                drafts.append(error)
        good = [each for each in drafts if isinstance(each, Draft)]
        chats = iter(tokenize(self.tokenizer, [chat for each in good for chat in each.chats]))
        texts = [text for each in good for text in each.texts]
        plain = [text for each in good for text in each.plain]
        ids = iter(self._ids(texts) if texts else self._tokens(plain))
        return [
            each if isinstance(each, BadRowError) else _finished(each, chats, ids)
            for each in drafts
        ]

    def draft(self, fields: Mapping[str, Any]) -> Draft:
        """A row of supervised training, before its texts are tokenised; raises BadRowError."""
        rendered = self.render(fields)
        if rendered is not None:
            return Draft(lambda chats, _: (_row(chats[0], final=True),), chats=(rendered,))
        ours, format = self._ours(fields), self.layout.format
        if format == "tokens":
            row = _row(encode_tokens(ours))
            return Draft(lambda _, __: (row,))
        if format == "text":
            text = _encodable(self._text(ours, "text"))
            return Draft(lambda _, ids: (_row(whole(self._closed(ids[0]))),), texts=(text,))
        if format == "alpaca":
            prompt, completion = f"{self._question(ours)}\n\n", self._text(ours, "output")
        else:
            prompt, completion = self._text(ours, "prompt"), self._text(ours, "completion")

        def finish(_: Sequence[Encoded], ids: Sequence[list[int]]) -> tuple[TokenRow, ...]:
            # A tokenizer may merge across the border. All tokens from the first that differs on
            # hold some of the completion.
            made = _row(behind(ids[0], self._closed(ids[1])))
            return (made if completion else made._replace(spans=()),)

        return Draft(finish, texts=(_encodable(prompt), _encodable(prompt + completion)))

    def draft_numbered(self, fields: Mapping[str, Any], *, reads_logprobs: bool) -> Draft:
        """A row with the numbers that the job's loss reads beside its tokens.

        reads_logprobs   whether `logprobs` are log-probabilities, and not what a function takes
        raises           BadRowError
        """
        ours, format, made = self._ours(fields), self.layout.format, self.draft(fields)
        given = len(_numbers(ours, "input_ids")) if format == "tokens" else None
        start, stop = (0, None) if given is None else _kept(ours, given)

        def finish(chats: Sequence[Encoded], ids: Sequence[list[int]]) -> tuple[TokenRow, ...]:
            [row] = made.finish(chats, ids)
            count = len(row.ids) if given is None else given
            columns = []
            for name in self.layout.numbers:
                theirs, default = self.layout.columns[name], 1.0 if name == "weights" else None
                value = ours.get(name, default)
                if value is None:
                    raise BadRowError(f"no value in the column '{theirs}', which the loss reads")
                numbers = numbers_beside(value, theirs, format, count)[start:stop]
                if name == "logprobs" and reads_logprobs:
                    require_log_probabilities(numbers, value, theirs, row.spans, start)
                columns.append(numbers)
            return (row._replace(numbers=[*chain(*columns)]),)

        return replace(made, finish=finish)

    def draft_judged(self, fields: Mapping[str, Any]) -> Draft:
        """A prompt, its completion, and whether that is desirable; raises BadRowError."""
        value = self._ours(fields)["label"]
        if value not in (True, False):
            raise BadRowError(f"the label of a completion is true or false, and here {value!r}")
        made = self.draft(fields)

        def finish(chats: Sequence[Encoded], ids: Sequence[list[int]]) -> tuple[TokenRow, ...]:
            return tuple(row._replace(code=int(value)) for row in made.finish(chats, ids))

        return replace(made, finish=finish)

    def draft_label(
        self, fields: Mapping[str, Any], base: BaseSpec, most: int, position: LabelPosition
    ) -> Draft:
        """A row of text with a label, before it is tokenised as the tokenizer alone does.

        most      tokens that are kept, as the tokenizer cuts them
        position  which token has the label, by the row's token ids
        raises    BadRowError
        """
        ours = self._ours(fields)
        text = _encodable(self._text(ours, "text"))
        try:
            code = label_code(ours["label"], base)
        except ValueError as error:
            raise BadRowError(str(error)) from None

        def finish(_: Sequence[Encoded], tokens: Sequence[list[int]]) -> tuple[TokenRow, ...]:
            [ids] = tokens
            is_cut = len(ids) > most
            if is_cut:
                ids = list(self.tokenizer(text, truncation=True, max_length=most)["input_ids"])
            at = position(ids) if ids else 0
            return (TokenRow(ids, (at, at + 1) if ids else (), code, cut=is_cut),)

        return Draft(finish, plain=(text,))

    def draft_pair(self, fields: Mapping[str, Any]) -> Draft:
        """A chosen and a rejected completion of one prompt, before they are tokenised.

        What is trained is where both part from the prompt's own tokens, as in TRL's DPOTrainer.

        raises   BadRowError
        """
        rendered = self.render_pair(fields)
        if rendered is not None:
            return Draft(lambda chats, _: paired(chats[0], chats[1]), chats=rendered)
        ours = self._ours(fields)
        chosen, rejected = self._text(ours, "chosen"), self._text(ours, "rejected")
        if "prompt" in ours:
            prompt = self._text(ours, "prompt")
        else:
            prompt = chosen[: _shared(chosen, rejected)]
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]

        def finish(_: Sequence[Encoded], ids: Sequence[list[int]]) -> tuple[TokenRow, ...]:
            first, second = (behind(ids[0], self._closed(line)) for line in ids[1:])
            return paired(first, second)

        texts = (prompt, prompt + chosen, prompt + rejected)
        return Draft(finish, texts=tuple(map(_encodable, texts)))

    def draft_scored(
        self, fields: Mapping[str, Any], base: BaseSpec, position: LabelPosition
    ) -> Draft:
        """The sequences of a pair, each read at one token as by TRL's RewardTrainer.

        position  of that token, by the sequence's token ids
        raises    BadRowError
        """
        try:
            codes = label_code(self._ours(fields).get("margin", 0.0), base), label_code(0.0, base)
        except ValueError as error:
            raise BadRowError(str(error).replace("label", "margin")) from None
        made = self.draft_pair(fields)

        def finish(chats: Sequence[Encoded], ids: Sequence[list[int]]) -> tuple[TokenRow, ...]:
            rows = made.finish(chats, ids)
            read = (position(row.ids) for row in rows)
            return tuple(
                row._replace(spans=(at, at + 1), code=code)
                for row, at, code in zip(rows, read, codes, strict=True)
            )

        return replace(made, finish=finish)

    def _ours(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return _ours(self.layout, fields)

    def _text(self, ours: Mapping[str, Any], name: str) -> str:
        return _text(self.layout, ours, name)

    def _question(self, ours: Mapping[str, Any]) -> str:
        """What a row of Alpaca's asks."""
        asked = self._text(ours, "instruction")
        more = self._text(ours, "input") if ours.get("input") else ""
        return f"{asked}\n\n{more}" if more.strip() else asked

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of texts with what the tokenizer adds before them, and nothing after them."""
        distinct = list(dict.fromkeys(texts))  # pairs have their prompt in common
        lines = zip(distinct, self._tokens(distinct), strict=True)
        known = {text: self._opened(text, ids) for text, ids in lines}
        return [known[text] for text in texts]

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of texts as the tokenizer makes them, its special tokens with them."""
        if not texts:
            return []
        encoding = self.tokenizer(
            list(texts),
            add_special_tokens=True,
            truncation=False,
            verbose=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return [list(line) for line in encoding["input_ids"]]

    def _opened(self, text: str, ids: list[int]) -> list[int]:
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

    def _closed(self, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _finished(
    draft: Draft, chats: Iterator[Encoded], ids: Iterator[list[int]]
) -> tuple[TokenRow, ...] | BadRowError:
    own = [next(chats) for _ in draft.chats], [next(ids) for _ in (*draft.texts, *draft.plain)]
    try:
        return draft.finish(*own)
    except BadRowError as error:
        return error


def _row(encoded: Encoded, *, final: bool = False) -> TokenRow:
    spans, differs = [*chain(*encoded.spans)], encoded.prefix_differs
    return TokenRow(encoded.ids, spans, differs=differs, final=final)


#: Columns of a format that hold text, or messages.
_SPOKEN: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "text": ("text",),
    "label": ("text",),
    "alpaca": ("instruction", "input", "output"),
    "prompt-completion": ("prompt", "completion"),
    "unpaired-preference": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),
}


def require_readable(layout: SampleLayout, fields: Mapping[str, Any]) -> None:
    """Refuse a row of which no tokenizer and no chat template makes a sample.

    What these two decide themselves, such as which roles there are, is not looked at.

    raises   BadRowError
    """
    ours = _ours(layout, fields)
    decisive = ["chosen" if layout.format == "preference" else "prompt"]
    if layout.is_instructed:
        decisive.append("prompt")
    is_chat = layout.format in CHATS or any(is_conversation(ours.get(name)) for name in decisive)
    for name in _SPOKEN.get(layout.format, ()):
        if name not in ours or (name == "input" and not ours[name]):
            continue
        if not is_chat:
            require_encodable(_text(layout, ours, name))
        elif name != "prompt" or is_conversation(ours[name]):
            for message in conversation_of(ours[name]).messages:
                require_encodable(message.get("content") or "")


def _ours(layout: SampleLayout, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The row's values by our names; optional ones only where they are there."""
    needed, ours = COLUMNS_OF[layout.format], {}
    for name, theirs in layout.columns.items():
        value = fields.get(theirs)
        if value is not None:
            ours[name] = value
        elif name in needed:
            raise BadRowError(f"no value in the column '{theirs}'")
    return ours


def _text(layout: SampleLayout, ours: Mapping[str, Any], name: str) -> str:
    value = ours[name]
    if isinstance(value, str):
        return value
    raise BadRowError(f"the column '{layout.columns[name]}' holds {type(value).__name__}, no text")


def _encodable(text: str) -> str:
    require_encodable(text)
    return text


def paired(chosen: Encoded, rejected: Encoded) -> tuple[TokenRow, TokenRow]:
    """Two completions of one prompt, both trained from where one of them parts from it.

    raises   BadRowError when they are the same
    """
    if chosen.ids == rejected.ids:
        raise BadRowError("the chosen completion is the rejected one")
    start = min(each.spans[0][0] if each.spans else len(each.ids) for each in (chosen, rejected))
    differs = chosen.prefix_differs or rejected.prefix_differs
    first, second = (
        TokenRow(each.ids, (min(start, len(each.ids)), len(each.ids)), differs=differs)
        for each in (chosen, rejected)
    )
    return first, second


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


def encode_tokens(ours: Mapping[str, Any]) -> Encoded:
    """The tokens of a row without padding, trained where all of its labels and masks say so.

    ours       a row's values by our names; lists of whole numbers, one a token
    raises     BadRowError
    """
    ids = _numbers(ours, "input_ids")
    wrong = next((at for at, token in enumerate(ids) if not 0 <= token < 2**31), None)
    if wrong is not None:
        raise BadRowError(f"input_ids[{wrong}] is {ids[wrong]}, which is no token")
    targets = [True] * len(ids)
    for name in TOKEN_MASKS:
        if ours.get(name) is not None:
            marks = _numbers(ours, name, len(ids))
            on = _trained(ids, marks) if name == "labels" else _marked(marks, name)
            targets = [both and each for both, each in zip(targets, on, strict=True)]
    start, end = _kept(ours, len(ids))
    edges = np.flatnonzero(np.diff([0, *targets[start:end], 0]))
    spans = edges.reshape(-1, 2).tolist()
    return Encoded(ids[start:end], tuple((first, last) for first, last in spans))


def _kept(ours: Mapping[str, Any], count: int) -> tuple[int, int]:
    """From where to where a row of `count` token ids has no padding; raises BadRowError."""
    if ours.get("attention_mask") is None:
        return 0, count
    return _attended(_numbers(ours, "attention_mask", count))


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
        if label not in (token, NO_TARGET):
            raise BadRowError(
                f"labels[{at}] is {label}, neither input_ids[{at}], {token}, nor {NO_TARGET}: "
                f"labels are not shifted"
            )
    return [label != NO_TARGET for label in labels]


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
