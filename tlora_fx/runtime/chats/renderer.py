"""Conversations as a chat template writes them, and which characters of that are trained.

TRL's trainers take another template in the place of a few public ones when they train the
assistant's turns. Such a template is known by its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tlora_fx.errors import nearest
from tlora_fx.runtime.chats.conversations import BadRowError, Conversation, require_encodable
from tlora_fx.runtime.chats.rendered import Rendered, Span
from tlora_fx.runtime.chats.turns import Message, TurnError, TurnFinder, Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Roles that chat templates print as they come; another must stand in the template by its name.
_ROLES = ("system", "developer", "user", "assistant", "tool")

#: What a user should know of a template, by what is seen of it in a row.
ENDS_NO_TURN = (
    "the chat template writes nothing behind an assistant's last turn, so no end is trained: set "
    "append_eos: true in the job's data"
)
HIDES_REASONING = (
    "the chat template leaves the reasoning out of some of the assistant's turns: it is not trained"
)

ENDS_OTHERWISE = (
    "the chat template ends the assistant's last turn otherwise than earlier ones: where both "
    "differ, the ends of earlier ones are not trained"
)


class UnlocatedTurnError(BadRowError):
    """A turn of the assistant cannot be found in what a chat template renders."""


@dataclass(slots=True)
class ChatRenderer:
    """Renders conversations by the chat template of one tokenizer.

    tokenizer     whose template it is
    on_assistant  whether the assistant's turns are trained, or else all characters
    append_eos    end a conversation by the end-of-sequence token where the template does not
    clock         what a template that asks for the time is told; None: the time it is then
    notes         what a user should know of the template, as far as rows have shown it
    """

    tokenizer: PreTrainedTokenizerBase
    on_assistant: bool = True
    append_eos: bool = False
    clock: datetime | None = None
    notes: dict[str, None] = field(default_factory=dict)
    _finders: dict[str, TurnFinder] = field(default_factory=dict)
    _known: TrainingTemplate | None = None

    def __post_init__(self) -> None:
        if self.on_assistant:
            self._known = training_template(template_of(self.tokenizer))

    def render(self, chat: Conversation, tools: Any) -> Rendered:
        """A conversation, of which the assistant's turns or all characters are trained.

        raises   BadRowError; UnlocatedTurnError where the template does not show what is trained
        """
        messages, template = chat.messages, self._template(tools)
        self._require_known_roles(messages)
        text, marks = self._rendered(messages, tools, template)
        turns = self._turns(messages, tools, template, text)
        if turns is not None:
            self._note(messages, turns)
        if not self.on_assistant:
            spans = self._all_but(chat, turns, text)
        elif marks is not None:
            spans = self._marked(chat, marks, turns)
        else:
            spans = self._located(chat, turns, text)
            self._note_known(messages, tools, text)
        return self._ended(text, spans)

    def render_reply(self, prompt: Conversation, reply: Conversation, tools: Any) -> Rendered:
        """A prompt and what is said to it, of which the latter is trained.

        raises   BadRowError
        """
        if reply.untrained:
            raise BadRowError("a message of a completion is not to be trained: give messages")
        whole = prompt.messages + reply.messages
        self._require_known_roles(whole)
        template = template_of(self.tokenizer, tools)
        before, _ = self._rendered(prompt.messages, tools, template, prompt=True, marked=False)
        text, _ = self._rendered(whole, tools, template, marked=False)
        turns = self._turns(whole, tools, template, text)
        if turns is not None:
            self._note(whole, turns)
        if not self.on_assistant:
            return self._ended(text, None)
        return Rendered(self._ended(text, None).text, prompt=before)

    # What is trained.

    def _turns(
        self, messages: Sequence[Message], tools: Any, template: str, text: str
    ) -> Turns | None:
        """Where the messages stand; None where that is not known."""
        finder = self._finders.get(template)
        if finder is None:
            finder = self._finders[template] = TurnFinder()
        offered = json.dumps(tools, default=str) if tools else ""

        def render(some: Sequence[Message], prompt: bool) -> str:
            return self._rendered(some, tools, template, prompt=prompt, marked=False)[0]

        try:
            return finder.find(messages, text, render, offered)
        except TurnError as error:
            role = messages[error.message]["role"]
            if error.is_left_out and role != "assistant":
                raise BadRowError(f"the chat template {error} the role '{role}' says") from None
            if error.is_left_out and self.on_assistant:
                raise self._unlocated(error) from None
            return None

    def _located(self, chat: Conversation, turns: Turns | None, text: str) -> tuple[Span, ...]:
        spans = []
        for index, message in enumerate(chat.messages):
            if message["role"] != "assistant" or index in chat.untrained:
                continue
            span = turns.spans[index] if turns is not None else None
            if not isinstance(span, tuple):
                raise self._unlocated(span or TurnError(index))
            if self._known is not None:
                span = self._known.widened(span, text)
            spans.append(span)
        return tuple(spans)

    def _marked(
        self, chat: Conversation, marks: Sequence[Span], turns: Turns | None
    ) -> tuple[Span, ...]:
        """What the template marks as written by the assistant, without what others wrote."""
        roles = [message["role"] for message in chat.messages]
        if turns is None:
            if chat.untrained:
                raise self._unlocated(TurnError(min(chat.untrained)))
            return tuple(marks)
        others = [span for index, span in turns.texts if roles[index] != "assistant"]
        others += [turns.reach(index) for index in chat.untrained if roles[index] == "assistant"]
        spans = list(marks)
        for start, end in others:
            spans = [
                part
                for left, right in spans
                for part in ((left, min(right, start)), (max(left, end), right))
                if part[0] < part[1]
            ]
        return tuple(spans)

    def _all_but(
        self, chat: Conversation, turns: Turns | None, text: str
    ) -> tuple[Span, ...] | None:
        """All characters but those of turns that are not trained."""
        left_out = [i for i in sorted(chat.untrained) if chat.messages[i]["role"] == "assistant"]
        if not left_out:
            return None
        spans, at = [], 0
        for index in left_out:
            span = turns.spans[index] if turns is not None else None
            if not isinstance(span, tuple):
                raise self._unlocated(span or TurnError(index))
            spans.append((at, span[0]))
            at = span[1]
        return *spans, (at, len(text))

    def _ended(self, text: str, spans: tuple[Span, ...] | None) -> Rendered:
        """The text with an end-of-sequence token behind it, where that is wanted and missing."""
        eos = self.tokenizer.eos_token
        if not self.append_eos or eos is None or text.rstrip().endswith(str(eos)):
            return Rendered(text, spans)
        size = len(text) + len(str(eos))
        if spans and spans[-1][1] == len(text):
            spans = (*spans[:-1], (spans[-1][0], size))
        return Rendered(text + str(eos), spans)

    def _note(self, messages: Sequence[Message], turns: Turns) -> None:
        if not turns.is_ended and messages[-1]["role"] == "assistant" and not self.append_eos:
            self.notes[ENDS_NO_TURN] = None
        if turns.hidden:
            self.notes[HIDES_REASONING] = None
        if turns.loose:
            self.notes[ENDS_OTHERWISE] = None

    def _note_known(self, messages: Sequence[Message], tools: Any, text: str) -> None:
        """Tell that a template was taken for a known one, once that has made a difference."""
        known = self._known
        if known is None or not known.note or known.note in self.notes:
            return
        said = [str(m.get("content") or "") for m in messages if m["role"] == "assistant"]
        if len(said) > 1 or any("</think>" in text for text in said):
            public, _ = self._rendered(messages, tools, known.original, marked=False)
            if public != text:
                self.notes[known.note] = None

    def _unlocated(self, error: TurnError) -> UnlocatedTurnError:
        name = self.tokenizer.name_or_path
        of = f" of {name}" if name else ""
        return UnlocatedTurnError(f"the template{of} {error} turn {error.message + 1}{error.how}")

    # What the template writes.

    def _template(self, tools: Any) -> str:
        template = template_of(self.tokenizer, tools)
        known = self._known
        return known.text if known is not None and known.original == template else template

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Any,
        template: str,
        *,
        prompt: bool = False,
        marked: bool = True,
    ) -> tuple[str, list[Span] | None]:
        """A rendering, and the characters that the template marks where it marks any.

        prompt   with the generation prompt behind it
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        for message in messages:
            require_encodable(message.get("content") or "")
        marks = marked and _GENERATION.search(template) is not None
        values: Any = self.tokenizer.special_tokens_map
        try:
            with _stopped(template, self.clock):
                rendered: Any = render_jinja_template(
                    conversations=[[dict(message) for message in messages]],
                    tools=tools or None,
                    chat_template=template,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=prompt,
                    **values,
                )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRowError(f"the chat template refuses the messages: {error}") from error
        texts, spans = rendered
        require_encodable(texts[0])
        return texts[0], list(spans[0]) if marks else None

    def _require_known_roles(self, messages: Sequence[Message]) -> None:
        """Refuse roles that the template does not know."""
        for role in {message["role"] for message in messages}.difference(_ROLES):
            if not re.search(rf"['\"]{re.escape(role)}['\"]", template_of(self.tokenizer)):
                near = nearest(role, _ROLES)
                known = f"did you mean '{near}'?" if near else f"it may be {', '.join(_ROLES)}"
                raise BadRowError(f"the chat template knows no role '{role}'; {known}")


@contextmanager
def _stopped(template: str, clock: datetime | None) -> Iterator[None]:
    """Let a template that asks for the time be told this one."""
    if clock is None or not asks_for_the_time(template):
        yield
        return
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # What the template sees by other ways than its environment is rebuilt as plain data.
    names = _compile_jinja_template(template).environment.globals
    running = names["strftime_now"]
    names["strftime_now"] = clock.strftime
    try:
        yield
    finally:
        names["strftime_now"] = running


def asks_for_the_time(template: str) -> bool:
    """Whether a chat template may print the time."""
    return "strftime_now" in template


def template_of(tokenizer: PreTrainedTokenizerBase, tools: object = None) -> str:
    """The chat template of plain conversations, or with tools; nothing where there is none."""
    try:
        return str(tokenizer.get_chat_template(tools=tools or None))  # type: ignore[arg-type]
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class TrainingTemplate:
    """How the turns of a known template are trained.

    headers   what of the generation prompt is trained: the first of these that it ends with
    edits     parts of the template, each with what TRL writes in its place
    note      what a user should know of it
    original  the template
    text      what renders in its place
    """

    headers: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()
    note: str = ""
    original: str = ""
    text: str = ""

    def widened(self, span: Span, text: str) -> Span:
        """The span of a turn with what of its header is trained."""
        start, end = span
        header = next((each for each in self.headers if text.endswith(each, 0, start)), "")
        return start - len(header), end


_ALL_THINK = (
    ("loop.index0 > ns.last_query_index", "true"),
    ("loop.last or (not loop.last and reasoning_content)", "true"),
)
_THINKS = (
    "the chat template shows thinking in the last turn alone: it is trained in each turn, as in TRL"
)
_KEEPS_REASONING = (("{% set content = content.split('</think>')[-1] %}", ""),)
_REASONS = "the chat template leaves reasoning out: it is shown and trained, as in TRL"
_ARGUMENTS_AS_JSON = (("tool['function']['arguments']", "tool['function']['arguments'] | tojson"),)
_QWEN = ("<think>\n\n</think>\n\n", "<think>\n")
_DEEPSEEK = (
    "<｜Assistant｜><think>\n",
    "<｜Assistant｜><think>",
    "<｜Assistant｜>",
    "<｜tool▁outputs▁end｜>",
)
_HARMONY = TrainingTemplate(("<|start|>assistant",))
_NEMOTRON_3 = TrainingTemplate(("<think>\n", "<think>"))

#: By the first 16 digits of a template's digest.
_KNOWN: Mapping[str, TrainingTemplate] = {
    # Qwen 3; twice 3.5; 3.6; 3.8; 2.5.
    "a55ee1b1660128b7": TrainingTemplate((), _ALL_THINK, _THINKS),
    "a4aee8afcf2e0711": TrainingTemplate(_QWEN, _ALL_THINK, _THINKS),
    "273d8e0e683b8850": TrainingTemplate(_QWEN, _ALL_THINK, _THINKS),
    "e84f32a23fdda276": TrainingTemplate(_QWEN, _ALL_THINK, _THINKS),
    "c3cf9e34abf4f9e3": TrainingTemplate(_QWEN, _ALL_THINK),
    "cd8e9439f0570856": TrainingTemplate(("\n",)),
    # DeepSeek-R1-Distill and DeepSeek-V3.
    "56a1447ad31926fd": TrainingTemplate(_DEEPSEEK, _KEEPS_REASONING, _REASONS),
    "563b1ce7d61d50a9": TrainingTemplate(_DEEPSEEK, _ARGUMENTS_AS_JSON),
    # GPT-OSS and Muse Glimmer.
    "a4c9919cbbd4acdd": _HARMONY,
    "cfc67e5f349f3769": _HARMONY,
    "ab7813c3abdd9cb6": _NEMOTRON_3,
    "575fb74f54ed264d": _NEMOTRON_3,
    "82753bef5cedc493": _NEMOTRON_3,
    "58933db77d3099b4": _NEMOTRON_3,
}


@lru_cache(16)
def training_template(template: str) -> TrainingTemplate | None:
    """TRL's training version of a template; None for one that it does not change."""
    known = _KNOWN.get(hashlib.sha256(template.encode()).hexdigest()[:16])
    if known is None:
        return None
    text = template
    for old, new in known.edits:
        text = text.replace(old, new)
    return replace(known, original=template, text=text)
