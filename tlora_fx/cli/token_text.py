"""Samples as text: each token apart, and what is trained in brackets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens of a sample that are shown at its beginning, and as many at its end.
SHOWN_AT_EACH_END = 100
_INDENT = "    "
_NO_CHARACTER = "\ufffd"
_WORD_START = "▁"


class TokenTexts:
    """The text of single tokens, as people can read it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {at for at, token in added if token.special} | {*tokenizer.all_special_ids}
        self.text = lru_cache(maxsize=1 << 16)(self._text)

    def is_special(self, token: int) -> bool:
        """Whether a token stands for no text, such as the end of a sequence."""
        return token in self._special

    def _text(self, token: int) -> str:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return f"<token {token}>"
        if self.is_special(token):
            return piece
        if piece.startswith(_WORD_START):
            # Decoding one such token alone would drop the space.
            return piece.replace(_WORD_START, " ")
        text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        # A part of a character is no text: then as the vocabulary writes it.
        return piece if not isinstance(text, str) or not text or _NO_CHARACTER in text else text


def marked_text(ids: Sequence[int], trained: Sequence[bool], texts: TokenTexts) -> Text:
    """A sequence as text, which is broken where its own lines end.

    ids       token ids
    trained   of each token, whether it is trained
    """
    middle = range(SHOWN_AT_EACH_END, len(ids) - SHOWN_AT_EACH_END)
    marked, joins = Text(_INDENT), False
    for at, token in enumerate(ids):
        if at in middle:
            if at == middle.start:
                others = sum(trained[middle.start : middle.stop])
                what = f"{len(middle):,} tokens left out, {others:,} of them trained"
                marked.append(f"\n{_INDENT}… {what} …\n{_INDENT}", style="dim")
            joins = False
            continue
        text = texts.text(token)
        shown = text.replace("\n", "↵").replace("\t", "⇥")
        if trained[at]:
            marked.append(f"[{shown}]", style="bold green")
        else:
            marked.append("·" if joins else "", style="dim")
            marked.append(shown, style="magenta" if texts.is_special(token) else "")
        joins = not trained[at]
        if text.endswith("\n") and at + 1 not in {len(ids), middle.start if middle else None}:
            marked.append(f"\n{_INDENT}")
            joins = False
    return marked
