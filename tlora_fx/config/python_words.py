"""What is said of a job in the words of Python, where others speak of a job file or of a command.

Messages are written once, as a job file has it: `loss_on: all`. Whoever hands a job over from
Python reads `loss_on='all'`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Options of the command line, and what says the same to `tlora_fx.train`.
_OPTIONS = {
    "--accept-changes": "accept_changes=True",
    "--resume": "resume=True",
    "--whole-base": "whole_base=True",
    "--max-row-tokens": "max_row_tokens",
    "-o FOLDER": "output=...",
    "-o": "output=...",
}
_OPTION = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in _OPTIONS))
#: What may follow the value of `key: value`: no word, but one that goes on with the advice.
_END = r"(?![\w.]*\w)(?! (?!(?:under|beside|in|and|or|to|on|with) )[a-z])"
_VALUE = r"(\{\w+: [\w.-]+\}|[A-Za-z_]\w*|\d+(?:\.\d+)?)"
_INNER = re.compile(r"\{(\w+): ([\w.-]+)\}")
#: Words of job files.
_WORDS = {
    r"\bunder 'base'": "in 'base'",
    r"\bnull\b": "None",
    r"\btrue or false\b": "True or False",
    r" in the job file\b": " in the job",
    r"\bjob file\b": "job",
}
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}


def in_python(text: str, keys: Iterable[str]) -> str:
    """Text of a message in Python's words.

    keys    of job files
    """
    pairs = rf"\b({'|'.join(sorted(keys, key=len, reverse=True))}): {_VALUE}{_END}"
    text = re.sub(pairs, lambda pair: f"{pair[1]}={_value(pair[2])}", text)
    text = _OPTION.sub(lambda option: _OPTIONS[option[0]], text)
    for words, instead in _WORDS.items():
        text = re.sub(words, instead, text)
    return text


def _value(text: str) -> str:
    inner = _INNER.fullmatch(text)
    if inner is not None:
        return f"{{{inner[1]!r}: {_value(inner[2])}}}"
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return text if text[0].isdigit() else repr(text)
