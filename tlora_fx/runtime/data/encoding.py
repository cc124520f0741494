"""What a row of a job's data becomes: by its columns a format, by its texts tokens.

Texts are tokenised as TRL's trainers do: the prompt alone, and prompt and completion as one text.
An end-of-sequence token closes a sample. The beginning-of-sequence token is whatever the tokenizer
adds, and stands once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, get_args

from tlora_fx.config.job import (
    COLUMNS_OF,
    OPTIONAL_COLUMNS,
    BaseSpec,
    ColumnName,
    DataSpec,
    Format,
    Job,
    columns_of,
)
from tlora_fx.errors import AmbiguousFormatError, MissingColumnError, nearest
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
from tlora_fx.runtime.data.rendered import Encoded, Rendered, behind, common, tokenize, whole
from tlora_fx.runtime.data.tables import TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMATS: tuple[Format, ...] = (
    "prompt-completion", "messages", "text", "alpaca", "sharegpt", "preference", "label",
)  # fmt: skip
CHATS = ("messages", "sharegpt")

#: What data sets often call our columns.
_USUAL: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "input", "query", "problem"),
    "completion": ("answer", "output", "response", "target", "solution"),
    "messages": ("conversation", "chat", "dialog"),
    "text": ("content", "document"),
    "chosen": ("preferred", "accepted", "response_chosen", "answer_chosen"),
    "rejected": ("dispreferred", "response_rejected", "answer_rejected"),
    "label": ("labels", "class", "category", "score", "target"),
}
_GUESSES = (("chosen", "rejected"), ("prompt", "completion"), ("messages",), ("text",))
_LABELLED = (("text", "label"),)


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """How rows become samples.

    format         what a row holds
    columns        our column names mapped to those of the data, optional ones that it has too
    on_completion  whether only the completion, or the assistant's turns, are trained
    """

    format: Format
    columns: Mapping[str, str]
    on_completion: bool

    def line(self) -> str:
        """What a user is told of it."""
        order = get_args(ColumnName)
        names = [
            name if name == theirs else f"{name} from {theirs}"
            for name, theirs in sorted(self.columns.items(), key=lambda at: order.index(at[0]))
        ]
        if self.format == "label":
            return f"read as label ({', '.join(names)})"
        what = "the assistant's turns" if self.format in CHATS else "completions"
        if self.format == "preference":
            what = "the difference of both"
        trained = what if self.on_completion else "all tokens"
        return f"read as {self.format} ({', '.join(names)}); trained on {trained}"


def find_layout(job: Job, columns: Iterable[str], *, where: str) -> SampleLayout:
    """The layout of a job's data with these columns.

    where   the row that the columns are of
    raises  MissingColumnError, AmbiguousFormatError
    """
    spec, present = job.data, set(columns)
    formats = _wanted(job)
    fitting = [name for name in formats if present.issuperset(_needed(spec, name).values())]
    if len(fitting) > 1:
        raise AmbiguousFormatError(
            f"the columns fit the formats {' and '.join(fitting)}",
            file=where,
            job=job.name,
            help=f"set format in the job's data, such as format: {fitting[0]}",
        )
    if not fitting:
        raise _missing(job, formats, sorted(present), where)
    [format] = fitting
    optional = {name: spec.columns.get(name, name) for name in sorted(OPTIONAL_COLUMNS[format])}  # type: ignore[call-overload]
    has = {name: theirs for name, theirs in optional.items() if theirs in present}
    on_completion = trains_completions(job, format, where)
    return SampleLayout(format, _needed(spec, format) | has, on_completion)


def trains_completions(job: Job, format: Format, where: str) -> bool:
    """Whether completions alone are trained; raises MissingColumnError where there are none.

    where    the row or file that errors name
    """
    if format in ("preference", "label"):
        return True
    chat = format in CHATS
    mine, other = "completion_only_loss", "assistant_only_loss"
    if chat:
        mine, other = other, mine
    asked = getattr(job, mine)
    if getattr(job, other) and asked is None:
        raise MissingColumnError(
            f"the data is read as {format}, which '{other}' says nothing of",
            file=where,
            job=job.name,
            found=f"{other}: true",
            help=f"write {mine}: true, or map the columns that are meant",
        )
    if job.data.loss_on != "auto":
        asked = job.data.loss_on == "completion"
    if format == "text" and asked:
        raise MissingColumnError(
            "the data is plain text and has no completion to train on",
            file=where,
            job=job.name,
            help="set loss_on: all, or map the columns prompt and completion",
        )
    return format != "text" if asked is None else bool(asked)


def _wanted(job: Job) -> list[Format]:
    """The formats that a job's data may have."""
    if job.data.format != "auto":
        return [job.data.format]
    if job.method != "sft":
        return ["preference"]
    if job.base.is_classifier:
        return ["label"]
    formats: list[Format] = [format for format in FORMATS if format not in ("preference", "label")]
    if job.data.columns:
        return [name for name in formats if set(job.data.columns) <= columns_of(name)]
    return formats


def _needed(spec: DataSpec, format: Format) -> dict[str, str]:
    mapped: Mapping[str, str] = {str(ours): theirs for ours, theirs in spec.columns.items()}
    return {name: mapped.get(name, name) for name in sorted(COLUMNS_OF[format])}


def _missing(job: Job, formats: list[Format], present: list[str], where: str) -> MissingColumnError:
    found = ", ".join(present) or "none"
    usual = _mapping_help(present, _LABELLED if job.base.is_classifier else _GUESSES)
    if {"chosen", "rejected"} <= set(present) and job.method == "sft":
        usual = "these are preferences: set method: dpo (or orpo) in the job"
    if len(formats) != 1:
        return MissingColumnError(
            "the data has no prompt and completion, no messages, and no text",
            file=where,
            job=job.name,
            found=f"columns {found}",
            help=usual or "map the data's names under columns",
        )
    absent = [name for name in _needed(job.data, formats[0]).values() if name not in present]
    near = [near for name in absent if (near := nearest(name, present))]
    fits = [name for name in FORMATS if set(present) >= COLUMNS_OF[name]]
    if fits and job.data.format != "auto":
        usual = f"the columns are those of format: {fits[0]}"
    return MissingColumnError(
        f"the data has no column {' and no column '.join(repr(name) for name in absent)}",
        file=where,
        job=job.name,
        found=f"columns {found}",
        help=f"did you mean {' and '.join(repr(name) for name in near)}?"
        if near and not fits
        else usual or "map the data's names under columns",
    )


def _mapping_help(present: list[str], guesses: Sequence[Sequence[str]]) -> str:
    """The mapping that fits names which data sets often use, or nothing."""
    guess = {
        ours: next((name for name in (ours, *usual) if name in present), "")
        for ours, usual in _USUAL.items()
    }
    for names in guesses:
        if all(guess[name] for name in names):
            pairs = ", ".join(f"{name}: {guess[name]}" for name in names)
            return f"perhaps columns: {{{pairs}}}"
    return ""


# Turn rows into token ids and the spans of the tokens that are trained.

#: Which token of a sample has its label.
LabelPosition = Callable[[Sequence[int]], int]
DraftRow = Callable[[Mapping[str, Any]], "Draft"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A row before its texts are tokenised.

    chats     what the chat template rendered
    texts     other texts, which the tokenizer adds its tokens to
    finish    makes the row's sequences of the tokens of both; raises BadRowError
    """

    finish: Callable[[Sequence[Encoded], Sequence[list[int]]], tuple[TokenRow, ...]]
    chats: tuple[Rendered, ...] = ()
    texts: tuple[str, ...] = ()


@dataclass(slots=True)
class TextEncoder:
    """Encodes the rows of one layout with one tokenizer.

    append_eos   end conversations by the end-of-sequence token where the template does not
    clock        what a chat template that asks for the time is told; None: the time it is then
    has_chats    whether a row was a conversation
    """

    tokenizer: PreTrainedTokenizerBase
    layout: SampleLayout
    append_eos: bool = False
    clock: datetime | None = None
    has_chats: bool = field(init=False, default=False)
    _chats: ChatRenderer = field(init=False)

    def __post_init__(self) -> None:
        self._chats = ChatRenderer(
            self.tokenizer, self.layout.on_completion, self.append_eos, self.clock
        )

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
            chat = conversation_of(ours["messages" if format == "messages" else "conversations"])
            return self._chats.render(chat, tools_of(ours.get("tools")))
        if format == "alpaca" and template_of(self.tokenizer):
            said = (("user", self._question(ours)), ("assistant", self._text(ours, "output")))
            messages = [{"role": role, "content": text} for role, text in said]
            return self._chats.render(Conversation(messages), None)
        if format == "prompt-completion" and is_conversation(ours["prompt"]):
            prompt, reply = (conversation_of(ours[name]) for name in ("prompt", "completion"))
            return self._chats.render_reply(prompt, reply, tools_of(ours.get("tools")))
        return None

    def render_pair(self, fields: Mapping[str, Any]) -> tuple[Rendered, Rendered] | None:
        """What the chat template makes of a chosen and of a rejected completion.

        returns  None for completions that are no messages
        raises   BadRowError
        """
        ours = self._ours(fields)
        if not is_conversation(ours["chosen"]):
            return None
        chosen, rejected = (conversation_of(ours[name]) for name in ("chosen", "rejected"))
        tools = tools_of(ours.get("tools"))
        if is_conversation(ours.get("prompt")):
            prompt = conversation_of(ours["prompt"])
        else:
            # A prompt given as text too stands at the start of both conversations anyway.
            shared = _shared(chosen.messages, rejected.messages)
            prompt = Conversation(chosen.messages[:shared])
            chosen, rejected = chosen.behind(shared), rejected.behind(shared)
        if not (prompt.messages and chosen.messages and rejected.messages):
            raise BadRowError("chosen and rejected have no prompt in common, or nothing behind it")
        first, second = (self._chats.render_reply(prompt, c, tools) for c in (chosen, rejected))
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
        ids = iter(self._ids([text for each in good for text in each.texts]))
        return [
            each if isinstance(each, BadRowError) else _finished(each, chats, ids)
            for each in drafts
        ]

    def draft(self, fields: Mapping[str, Any]) -> Draft:
        """A row of supervised training, before its texts are tokenised; raises BadRowError."""
        rendered = self.render(fields)
        if rendered is not None:
            self.has_chats = True
            return Draft(lambda chats, _: (_row(chats[0]),), chats=(rendered,))
        ours, format = self._ours(fields), self.layout.format
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
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        is_cut = len(ids) > most
        if is_cut:
            ids = list(self.tokenizer(text, truncation=True, max_length=most)["input_ids"])
        at = position(ids) if ids else 0
        row = TokenRow(ids, (at, at + 1) if ids else (), code, cut=is_cut)
        return Draft(lambda _, __: (row,))

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

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of texts with what the tokenizer adds before them, and nothing after them."""
        if not texts:
            return []
        distinct = list(dict.fromkeys(texts))  # pairs have their prompt in common
        encoding = self.tokenizer(
            distinct,
            add_special_tokens=True,
            truncation=False,
            verbose=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        lines = zip(distinct, encoding["input_ids"], strict=True)
        known = {text: self._opened(text, ids) for text, ids in lines}
        return [known[text] for text in texts]

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
    own = [next(chats) for _ in draft.chats], [next(ids) for _ in draft.texts]
    try:
        return draft.finish(*own)
    except BadRowError as error:
        return error


def _row(encoded: Encoded) -> TokenRow:
    return TokenRow(encoded.ids, [*chain(*encoded.spans)], differs=encoded.prefix_differs)


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
