"""Texts of which some characters are trained, and what a tokenizer makes of them.

Rendering and tokenising are two steps, so that many texts are tokenised by one call.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text that a chat template wrote, special tokens in it.

    text     the whole of it
    spans    characters that are trained, from and to, in their order; None: all are
    prompt   where it is given, `spans` is not read: what is trained starts at the first token in
             which the tokens of the text differ from those of this prompt
    """

    text: str
    spans: tuple[Span, ...] | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of one row before truncation.

    ids             token ids
    spans           tokens that are trained, from and to, in their order
    prefix_differs  the prompt's tokens alone are no prefix of the sample's
    """

    ids: list[int]
    spans: tuple[Span, ...]
    prefix_differs: bool = False


def whole(ids: list[int]) -> Encoded:
    """Tokens that are all trained."""
    return Encoded(ids, ((0, len(ids)),))


def behind(prompt: Sequence[int], ids: list[int]) -> Encoded:
    """Tokens that are trained from where they part from those of a prompt."""
    start = common(prompt, ids)
    return Encoded(ids, ((start, len(ids)),), start < len(prompt))


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Rendered]) -> list[Encoded]:
    """The tokens of each text, by one call of a fast tokenizer.

    A token is trained if a character of it is: a token that reaches into a span is of the span.
    """
    if not texts:
        return []
    # A prompt is tokenised beside the texts, once where neighbours share it.
    lines = [each.text for each in texts]
    prompts = list(dict.fromkeys(each.prompt for each in texts if each.prompt is not None))
    wants_offsets = tokenizer.is_fast and any(each.spans for each in texts)
    encoding = tokenizer(
        [*lines, *prompts],
        add_special_tokens=False,
        truncation=False,
        verbose=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=wants_offsets,
    )
    ids: list[list[int]] = [list(line) for line in encoding["input_ids"]]
    before = dict(zip(prompts, ids[len(lines) :], strict=True))
    encoded = []
    for at, each in enumerate(texts):
        if each.prompt is not None:
            encoded.append(behind(before[each.prompt], ids[at]))
        elif each.spans is None:
            encoded.append(whole(ids[at]))
        elif wants_offsets:
            encoded.append(_by_offsets(ids[at], encoding["offset_mapping"][at], each.spans))
        else:
            encoded.append(_by_prefixes(tokenizer, ids[at], each))
    return encoded


def common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many items both start with."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _by_offsets(ids: list[int], offsets: Sequence[Span], spans: Sequence[Span]) -> Encoded:
    """Train the tokens from the first to the last that has a character of a span.

    Characters that a tokenizer drops, such as white space, are of no token.
    """
    trained = []
    for start, end in spans:
        first = bisect_right(offsets, start, key=itemgetter(1))
        trained.append((first, bisect_left(offsets, end, lo=first, key=itemgetter(0))))
    return Encoded(ids, merged(trained))


def _by_prefixes(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: Rendered) -> Encoded:
    """Find the tokens of spans without offsets: by prefixes of the text that end with a token."""
    trained = []

    def tokens_before(at: int) -> int | None:
        """How many tokens a prefix of the text has, if a token of the whole ends with it."""
        prefix = tokenizer(text.text[:at], add_special_tokens=False, verbose=False)["input_ids"]
        return len(prefix) if ids[: len(prefix)] == list(prefix) else None

    for start, end in text.spans or ():
        if start == end:
            continue
        first = next((n for at in range(start, -1, -1) if (n := tokens_before(at)) is not None), 0)
        ends = range(end, len(text.text))
        last = next((n for at in ends if (n := tokens_before(at)) is not None), len(ids))
        trained.append((first, last))
    return Encoded(ids, merged(trained))


def merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans without empty ones, and those that touch or overlap as one."""
    found: list[Span] = []
    for start, stop in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)
