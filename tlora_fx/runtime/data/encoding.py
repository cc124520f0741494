"""What a row of a job's data becomes: by its columns a format, by its texts tokens.

Texts are tokenised as TRL's trainers do: the prompt alone, and prompt and completion as one text.
An end-of-sequence token closes a sample. The beginning-of-sequence token is whatever the tokenizer
adds, and stands once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from tlora_fx.config.job import (
    COLUMNS_OF,
    OPTIONAL_COLUMNS,
    BaseSpec,
    ColumnName,
    DataSpec,
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
from tlora_fx.runtime.data.rendered import Encoded, Rendered, common, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Format = Literal[
    "prompt-completion", "messages", "text", "alpaca", "sharegpt", "preference", "label"
]
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
    on_completion = _trains_completions(job, format, where)
    return SampleLayout(format, _needed(spec, format) | has, on_completion)


def _trains_completions(job: Job, format: Format, where: str) -> bool:
    """Whether completions alone are trained; raises MissingColumnError where there are none."""
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


# Turn rows into token ids and the mask of the tokens that are trained.


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

    def encode(self, fields: Mapping[str, Any]) -> Encoded:
        """The tokens of a row; raises BadRowError when a column is missing or has a wrong type."""
        rendered = self.render(fields)
        if rendered is not None:
            return tokenize(self.tokenizer, [rendered])[0]
        ours, format = self._ours(fields), self.layout.format
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
