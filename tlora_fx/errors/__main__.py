"""`python -m tlora_fx.errors` prints docs/errors.md from the docstrings of all error classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from operator import attrgetter

from tlora_fx.errors import TloraError

_HEAD = """# Errors

Every error that tlora-fx raises on purpose has a code and a class below `TloraError`. This page
is made from the classes by `python -m tlora_fx.errors`.
"""

#: By code, the arguments of an error that is worth showing.
_EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "T0102": {
        "what": "unknown key 'lerning_rate'",
        "file": "jobs.yaml:12",
        "job": "math-r16",
        "help": "did you mean 'learning_rate'?",
    },
}


def page() -> str:
    """The page as Markdown, in the order of the codes."""
    return "\n".join([_HEAD, *(_entry(kind) for kind in sorted(_kinds(), key=attrgetter("code")))])


def _kinds(root: type[TloraError] = TloraError) -> Iterator[type[TloraError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _entry(kind: type[TloraError]) -> str:
    text = f"## {kind.code} {kind.__name__}\n\n{inspect.cleandoc(kind.__doc__ or '')}\n"
    if kind.code not in _EXAMPLES:
        return text
    return f"{text}\n```\n{kind(**_EXAMPLES[kind.code]).render()}\n```\n"


if __name__ == "__main__":
    print(page(), end="")
