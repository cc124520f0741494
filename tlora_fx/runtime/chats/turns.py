"""Where a chat template shows the turns of a conversation.

A turn is looked for in the rendering of the whole conversation, since templates show the start of
one otherwise than the whole: they drop reasoning from earlier turns, or end the last one in another
way. The conversation is rendered once more with a mark in place of each text, which shows what the
template writes between the texts. What it writes behind the same text when the conversation ends
there is compared with that, and tells where a turn starts and ends.

Nothing is guessed: the marks are replaced by the texts again, and must give the rendering.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from tlora_fx.runtime.chats.rendered import Span, common

Message = Mapping[str, Any]
#: Renders messages, with the generation prompt behind them or without.
Render = Callable[[Sequence[Message], bool], str]

#: Fields of a message that are text, in the order in which templates show them.
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXTS = (*_REASONING, "content")
_THINK = re.compile(r"(</?think>)")
#: The shortest conversation.
_SAID = "Xq7j"
_PAIR: Sequence[Message] = (
    {"role": "user", "content": "a"}, {"role": "assistant", "content": _SAID},
)  # fmt: skip
#: Conversations of one structure share an outline; so many are kept.
_KEPT = 256


class TurnError(ValueError):
    """A turn cannot be found. Internal: callers name the row.

    message      the message's index
    is_left_out  the template does not show it
    """

    def __init__(self, message: int, *, is_left_out: bool = False) -> None:
        super().__init__("leaves out what" if is_left_out else "shows")
        self.message, self.is_left_out = message, is_left_out
        self.how = " says" if is_left_out else " otherwise in the whole chat"


@dataclass(frozen=True, slots=True)
class Turns:
    """Where a rendering shows the messages of a conversation, in characters.

    spans     per message, from the end of the generation prompt to where the next message begins,
              or why it was not found; None for those that no assistant wrote
    texts     per piece of text that is shown: whose it is, by index, and where it stands
    size      characters of the rendering
    is_ended  whether the template writes something behind the last turn's text
    hidden    messages whose reasoning is not shown
    loose     messages whose end is another in the whole than where a conversation ends there
    """

    spans: tuple[Span | TurnError | None, ...]
    texts: tuple[tuple[int, Span], ...]
    size: int
    is_ended: bool
    hidden: frozenset[int]
    loose: frozenset[int]

    def reach(self, message: int) -> Span:
        """The characters between what is said before a message and behind it."""
        before = [end for index, (_, end) in self.texts if index < message]
        behind = [start for index, (start, _) in self.texts if index > message]
        return max(before, default=0), min(behind, default=self.size)


@dataclass(slots=True)
class TurnFinder:
    """Finds turns in what one template renders."""

    _kept: OrderedDict[str, _Outline] = field(default_factory=OrderedDict)

    def find(
        self, messages: Sequence[Message], text: str, render: Render, tools: str = ""
    ) -> Turns:
        """The turns of a conversation in its rendering.

        render    what made the rendering
        tools     what else it depends on
        raises    TurnError for a text that the template leaves out
        """
        roles = {str(message["role"]) for message in messages}
        # Where the template reads a text, such as a user's, it may not know the mark.
        ways = [(roles, False), (roles & {"assistant"}, False), (set[str](), False)]
        if any(not str(message.get("content") or "").strip() for message in messages):
            ways.insert(0, (roles, True))
        for marked, empty in ways:
            stencil = _stencil(messages, marked, avoid=text, empty=empty)
            outline = self._outline(stencil, render, tools, cached=marked == roles)
            if outline is not None and (turns := outline.applied(stencil, text)) is not None:
                return turns
        raise TurnError(len(messages) - 1)

    def _outline(
        self, stencil: _Stencil, render: Render, tools: str, *, cached: bool
    ) -> _Outline | None:
        key = tools + json.dumps(stencil.messages, default=str)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        try:
            outline = _outlined(stencil, render)
        except ValueError as error:
            if isinstance(error, TurnError):
                raise
            return None  # It refuses the marks.
        if cached:
            self._kept[key] = outline
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return outline


@dataclass(frozen=True, slots=True)
class _Piece:
    """A text that a mark stands for."""

    message: int
    text: str
    is_reasoning: bool


@dataclass(frozen=True, slots=True)
class _Stencil:
    """A conversation with marks in place of texts; white space around them is as it was."""

    messages: list[dict[str, Any]]
    pieces: list[_Piece]
    mark: re.Pattern[str]


def _stencil(
    messages: Sequence[Message], marked: set[str], *, avoid: str, empty: bool = False
) -> _Stencil:
    """Put marks in place of what some roles say.

    avoid    what marks must not stand in
    empty    where nothing is said, too
    """
    letter = next(word for n in count() if (word := f"Xq{n}k") not in avoid)
    pieces: list[_Piece] = []

    def mark(message: int, text: str, *, is_reasoning: bool) -> str:
        core = text.strip()
        if not core and (is_reasoning or not empty):
            return text
        pieces.append(_Piece(message, core, is_reasoning))
        return text.replace(core, f"{letter}{len(pieces) - 1}z", 1)

    changed: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        new = dict(message)
        changed.append(new)
        if message["role"] not in marked:
            continue
        for name in _TEXTS:
            if not isinstance(message.get(name), str):
                continue
            parts = _THINK.split(message[name])
            thinks = "</think>" in parts and message["role"] == "assistant"
            if not thinks:
                parts = [message[name]]
            behind = len(parts) - 1
            # What is said beside a call may be its reasoning.
            calls = bool(message.get("tool_calls"))
            new[name] = "".join(
                part
                if thinks and at % 2
                else mark(index, part, is_reasoning=at < behind or name in _REASONING or calls)
                for at, part in enumerate(parts)
            )
        if message.get("tool_calls"):
            new["tool_calls"] = [
                _renamed(call, partial(mark, index, is_reasoning=False))
                for call in message["tool_calls"]
            ]
    return _Stencil(changed, pieces, re.compile(rf"{letter}(\d+)z"))


def _renamed(call: Any, mark: Callable[[str], str]) -> Any:
    """A call of a tool whose name is a mark."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _renamed(call["function"], mark)}
    return {**call, "name": mark(call["name"])} if isinstance(call.get("name"), str) else call


@dataclass(frozen=True, slots=True)
class _Outline:
    """What a template writes round the marks of a conversation.

    text     the rendering with marks
    marks    per mark that is shown: which one, and where it stands
    spans    of the assistant's turns in it
    loose    turns behind whose text the template writes something else than at the end of a chat
    """

    text: str
    marks: list[tuple[int, Span]]
    spans: list[Span | TurnError | None] = field(default_factory=list)
    loose: set[int] = field(default_factory=set)

    def applied(self, stencil: _Stencil, text: str) -> Turns | None:
        """The turns in a rendering; None if that is not this outline with its texts."""
        shown = {piece for piece, _ in self.marks}
        hidden = set()
        for number, piece in enumerate(stencil.pieces):
            if number in shown:
                continue
            if not piece.is_reasoning:
                raise TurnError(piece.message, is_left_out=True)
            hidden.add(piece.message)
        # Where marks end, in the outline and in the rendering.
        ends, texts, at, behind = [(0, 0)], [], 0, 0
        for number, (start, end) in self.marks:
            between, piece = self.text[behind:start], stencil.pieces[number]
            at += len(between)
            words: str | None = piece.text
            if not text.startswith(piece.text, at):
                words = next((w for w in _in_json(piece.text) if text.startswith(w, at)), None)
            if text[at - len(between) : at] != between or words is None:
                return None
            texts.append((piece.message, (at, at + len(words))))
            at, behind = at + len(words), end
            ends.append((behind, at))
        if text[at:] != self.text[behind:]:
            return None

        def moved(place: int) -> int:
            outline, rendering = next(pair for pair in reversed(ends) if pair[0] <= place)
            return place - outline + rendering

        spans = tuple(
            (moved(span[0]), moved(span[1])) if isinstance(span, tuple) else span
            for span in self.spans
        )
        is_ended = bool(text[at:].strip())
        return Turns(
            spans, tuple(texts), len(text), is_ended, frozenset(hidden), frozenset(self.loose)
        )


def _in_json(text: str) -> tuple[str, ...]:
    """How a template may write a text inside JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]


def _marks(stencil: _Stencil, text: str) -> list[tuple[int, Span]]:
    return [(int(found[1]), found.span()) for found in stencil.mark.finditer(text)]


def _outlined(stencil: _Stencil, render: Render) -> _Outline:
    messages = stencil.messages
    text = render(messages, False)
    outline = _Outline(text, _marks(stencil, text))
    for index, message in enumerate(messages):
        span: Span | TurnError | None = None
        if message["role"] == "assistant":
            try:
                span = (
                    _start(stencil, outline, render, index),
                    _end(stencil, outline, render, index),
                )
                if span[0] > span[1]:
                    span = TurnError(index)
            except TurnError as error:
                span = error
        outline.spans.append(span)
    return outline


def _start(stencil: _Stencil, outline: _Outline, render: Render, index: int) -> int:
    """Where a turn starts in an outline: behind what asks the assistant for one."""
    own = [span for n, span in outline.marks if stencil.pieces[n].message == index]
    if index:
        asked = _rendered(render, stencil.messages[:index], True)
        if asked is not None and (pair := _beside(stencil, outline, asked, own)) is not None:
            at, asking, between = pair
            same = common(asking, between)
            # White space at the end may be of what asks, or of what is said.
            if same >= min(len(asking.rstrip()), len(between.rstrip())):
                header = _header(render)
                late = between.rfind(header, same) if header and own else -1
                return at + (same if late < 0 else late + len(header))
            # The template asks for more than it shows, such as reasoning.
            same = _shared_tags(asking, between)
            if same > len(asking) - len(_header(render)):
                return at + same
    return _behind_header(outline, render, index, own)


def _behind_header(outline: _Outline, render: Render, index: int, own: list[Span]) -> int:
    """Where a turn starts that has nothing before it to compare, or something else."""
    if not own:
        raise TurnError(index)
    first = own[0][0]
    begin = max((end for _, (_, end) in outline.marks if end <= first), default=0)
    between = outline.text[begin:first]
    header = _header(render)
    if not header:
        lead = _lead(render)
        return first - len(lead) * between.endswith(lead)
    # The header stands last where most of it stands.
    asking = header if header in between else header.lstrip()
    places = [found.start() for found in re.finditer(re.escape(asking[:1]), between)]
    sizes = {begin + at: _shared_tags(asking, between[at:]) for at in places}
    at = max(sizes, key=lambda place: (sizes[place], place), default=begin)
    if sizes.get(at, 0) < 3:
        raise TurnError(index)
    return at + sizes[at]


def _shared_tags(asking: str, between: str) -> int:
    """How much of a generation prompt stands at the start of a text: all of it, or whole tags."""
    same = common(asking, between)
    if same == len(asking):
        return same
    same = len(_whole_tags(asking[:same]))
    return same if asking[same] in "<[" or asking[same].isspace() else 0


def _lead(render: Render) -> str:
    """What a template writes between the generation prompt and what the assistant says."""
    asking, answered = (_rendered(render, _PAIR[:size], size == 1) for size in (1, 2))
    if asking is None or answered is None or not answered.startswith(asking):
        return ""
    return answered[len(asking) :].partition(_SAID)[0]


def _header(render: Render) -> str:
    """The generation prompt of a template."""
    with_header, without = (_rendered(render, _PAIR[:1], prompt) for prompt in (True, False))
    if with_header is None or without is None:
        return ""
    return _added(with_header, without)


def _added(longer: str, shorter: str) -> str:
    """What stands at the end of one rendering and not in the other, whole tags."""
    same = common(longer, shorter)
    return longer[same if same == len(shorter) else len(_whole_tags(longer[:same])) :]


def _whole_tags(text: str) -> str:
    """A text without a tag at its end that is not closed."""
    return re.sub(r"<[^<>\s]*$|\[[^\[\]\s]*$", "", text)


def _end(stencil: _Stencil, outline: _Outline, render: Render, index: int) -> int:
    """Where a turn ends in an outline: behind what the template writes at the end of a turn."""
    others = [n for n, _ in outline.marks if stencil.pieces[n].message > index]
    if index == len(stencil.messages) - 1 and not others:
        return len(outline.text)
    upto = stencil.messages[: index + 1]
    asked, silent = (_rendered(render, upto, prompt) for prompt in (True, False))
    endings = []
    header = _header(render)
    if asked is not None and silent is not None and asked.startswith(silent):
        endings.append(silent)
    elif asked is not None and header and asked.endswith(header):
        endings.append(asked[: -len(header)])
    if silent is not None:
        endings.append(silent)
    for ending in endings:
        pair = _beside(stencil, outline, ending, [])
        if pair is not None and pair[2].startswith(pair[1]):
            return pair[0] + len(pair[1])
    own = [(n, span) for n, span in outline.marks if stencil.pieces[n].message == index]
    content = str(stencil.messages[index].get("content") or "")
    if not own or not content.rstrip().endswith(outline.text[slice(*own[-1][1])]):
        raise TurnError(index)
    # The template refuses a conversation that ends here, or ends it otherwise. What is said is
    # trained, and behind it what is the same at the end of an answer to one question.
    asked, at = _rendered(render, _PAIR, True) or "", own[-1][1][1]
    tail = asked.rpartition(_SAID)[2].removesuffix(header)
    outline.loose.add(index)
    if outline.text.startswith(white := content[len(content.rstrip()) :], at):
        at += len(white)
    return at + len(_whole_tags(tail[: common(tail, outline.text[at:])]))


def _beside(
    stencil: _Stencil, outline: _Outline, part: str, own: list[Span]
) -> tuple[int, str, str] | None:
    """What a rendering of the start of a conversation has behind its last mark, and the whole.

    own       marks before whose first one that mark must stand
    returns   where that begins in the outline, and both texts; the second up to the next mark
    """
    marks = _marks(stencil, part)
    at, tail = 0, part
    if marks:
        number, (_, end) = marks[-1]
        tail = part[end:]
        places = [span for n, span in outline.marks if n == number]
        repeated = sum(n == number for n, _ in marks)
        if len(places) < repeated or (own and places[repeated - 1][1] > own[0][0]):
            return None
        at = places[repeated - 1][1]
    following = min((start for _, (start, _) in outline.marks if start >= at), default=None)
    return at, tail, outline.text[at:following]


def _rendered(render: Render, messages: Sequence[Message], prompt: bool) -> str | None:
    """A rendering, or nothing where the template refuses a conversation that ends there."""
    try:
        return render(messages, prompt)
    except ValueError:
        return None
