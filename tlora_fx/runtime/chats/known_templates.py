"""Public chat templates that TRL trains otherwise than as they are, and how.

TRL's trainers take another template in the place of such a one when they train the assistant's
turns. A template is known by its SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tlora_fx.runtime.chats.rendered import Span


@dataclass(frozen=True, slots=True)
class TrainingTemplate:
    """How the turns of a known template are trained.

    name      the models'
    original  the template
    text      what renders in its place
    headers   what of the generation prompt is trained: the first of these that it ends with
    note      what a user should know of it
    """

    name: str
    original: str
    text: str
    headers: tuple[str, ...] = ()
    note: str = ""

    def widened(self, span: Span, text: str) -> Span:
        """The span of a turn with what of its header is trained."""
        start, end = span
        header = next((each for each in self.headers if text.endswith(each, 0, start)), "")
        return start - len(header), end


@dataclass(frozen=True, slots=True)
class _Known:
    name: str
    headers: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()
    note: str = ""


_ALL_THINK = (
    ("loop.index0 > ns.last_query_index", "true"),
    ("loop.last or (not loop.last and reasoning_content)", "true"),
)
_THINKS = (
    "the chat template shows thinking in the last turn alone: it is trained in each turn, as in TRL"
)
_KEEPS_REASONING = (
    (
        "{% set content = content.split('</think>')[-1] %}",
        "",
    ),
)
_REASONS = "the chat template leaves reasoning out: it is shown and trained, as in TRL"
_ARGUMENTS_AS_JSON = (("tool['function']['arguments']", "tool['function']['arguments'] | tojson"),)

#: By the first 16 digits of a template's digest.
_KNOWN: Mapping[str, _Known] = {
    "a55ee1b1660128b7": _Known("Qwen3", (), _ALL_THINK, _THINKS),
    "a4aee8afcf2e0711": _Known(
        "Qwen3.5", ("<think>\n\n</think>\n\n", "<think>\n"), _ALL_THINK, _THINKS
    ),
    "273d8e0e683b8850": _Known(
        "Qwen3.5", ("<think>\n\n</think>\n\n", "<think>\n"), _ALL_THINK, _THINKS
    ),
    "e84f32a23fdda276": _Known(
        "Qwen3.6", ("<think>\n\n</think>\n\n", "<think>\n"), _ALL_THINK, _THINKS
    ),
    "c3cf9e34abf4f9e3": _Known("Qwen3.8", ("<think>\n\n</think>\n\n", "<think>\n"), _ALL_THINK, ""),
    "cd8e9439f0570856": _Known("Qwen2.5", ("\n",), (), ""),
    "56a1447ad31926fd": _Known(
        "DeepSeek-R1-Distill",
        (
            "<｜Assistant｜><think>\n",
            "<｜Assistant｜><think>",
            "<｜Assistant｜>",
            "<｜tool▁outputs▁end｜>",
        ),
        _KEEPS_REASONING,
        _REASONS,
    ),
    "563b1ce7d61d50a9": _Known(
        "DeepSeek-V3",
        (
            "<｜Assistant｜><think>\n",
            "<｜Assistant｜><think>",
            "<｜Assistant｜>",
            "<｜tool▁outputs▁end｜>",
        ),
        _ARGUMENTS_AS_JSON,
        "",
    ),
    "a4c9919cbbd4acdd": _Known("GPT-OSS", ("<|start|>assistant",), (), ""),
    "cfc67e5f349f3769": _Known("Muse Glimmer", ("<|start|>assistant",), (), ""),
    "ab7813c3abdd9cb6": _Known("Nemotron 3", ("<think>\n", "<think>"), (), ""),
    "575fb74f54ed264d": _Known("Nemotron 3", ("<think>\n", "<think>"), (), ""),
    "82753bef5cedc493": _Known("Nemotron 3", ("<think>\n", "<think>"), (), ""),
    "58933db77d3099b4": _Known("Nemotron 3", ("<think>\n", "<think>"), (), ""),
}


@lru_cache(16)
def training_template(template: str) -> TrainingTemplate | None:
    """What TRL trains of a template; None for one that it does not change."""
    known = _KNOWN.get(hashlib.sha256(template.encode()).hexdigest()[:16])
    if known is None:
        return None
    text = template
    for old, new in known.edits:
        text = text.replace(old, new)
    return TrainingTemplate(known.name, template, text, known.headers, known.note)
