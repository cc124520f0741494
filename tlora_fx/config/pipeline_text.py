"""The text form of pipelines, split into passes and options: no pass is imported for it.

`drop-export-noise,fuse-backbone{max-jobs=8},lower-adapters`
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tlora_fx.errors import PipelineError, nearest

_PASS_TEXT = re.compile(r"\s*([a-z0-9-]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")
_NAMED = re.compile(r'^    name: ClassVar\[str\] = "([a-z0-9-]+)"$', re.MULTILINE)


def split_pipeline(text: str) -> list[tuple[str, str]]:
    """The passes of a pipeline in order: name, and options as they are written.

    raises    PipelineError for what is no pipeline
    """
    passes: list[tuple[str, str]] = []
    position = 0
    while position < len(text.rstrip()):
        match = _PASS_TEXT.match(text, position)
        if match is None:
            raise PipelineError(
                "the pipeline cannot be read",
                at=text[position:],
                expected="name{option=value option=value},name,...",
                help="separate passes by commas, options by spaces",
            )
        passes.append((match[1], match[2] or ""))
        position = match.end()
    return passes


def require_known(names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a name that no pass has; raises PipelineError with the nearest one."""
    every = sorted(known)
    for name in names:
        if name not in every:
            raise PipelineError(
                f"there is no pass '{name}'",
                nearest=nearest(name, every),
                help="known passes: " + ", ".join(every),
            )


def names_in(folder: Path) -> Iterator[str]:
    """The names that passes in a folder's files give themselves, read without running them."""
    for file in sorted(folder.rglob("*.py")):
        yield from _NAMED.findall(file.read_text(encoding="utf-8"))
