"""An explanation as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from tlora_fx.tools.explain import Attempt, Explanation, JobAnswer

STATES = {
    "lowered": "lowered",
    "as it is": "runs as it is",
    "not targeted": "not targeted",
    "inside": "no site of its own",
    "around": "adapters inside",
}
INDENT = "  "


def render(found: Explanation) -> str:
    """The whole text, with a line feed at its end."""
    lines = [f"{found.module}   {found.kind}".rstrip()]
    if found.node:
        lines.append(f"node      {found.node}")
    if found.others:
        lines.append(f"also      {found.others} other modules have this name")
    lines += ["", "Adapters"]
    for answer in found.jobs:
        lines += _answer(answer)
    sections = (("Dropout", found.dropouts), ("Sharing", found.sharing), ("Layers", found.layers))
    for title, told in sections:
        lines += ["", title]
        for item in told or ("none",):
            lines += [INDENT + line for line in item.splitlines()]
    return "\n".join(lines) + "\n"


def _answer(answer: JobAnswer) -> Iterator[str]:
    yield f"{INDENT}{answer.job}: {STATES[answer.state]}: {answer.told}"
    if answer.state == "lowered":
        return
    for attempt in answer.attempts:
        yield from (2 * INDENT + line for line in _attempt(attempt))


def _attempt(attempt: Attempt) -> Iterator[str]:
    if attempt.fits:
        yield f"{attempt.what}: fits"
        return
    held = len(attempt.held)
    yield f"{attempt.what}: does not fit; {held or 'no'} condition{'s' * (held != 1)} held before"
    for condition in attempt.held:
        yield f"{INDENT}held      {condition}"
    yield f"{INDENT}failed    {attempt.why}"
    if attempt.node:
        yield f"{INDENT}at        {attempt.node}"
    if attempt.source:
        yield f"{INDENT}from      {attempt.source}"
    yield f"{INDENT}to match  {attempt.wanted}"
    for place, line in enumerate(attempt.pattern.splitlines()):
        yield f"{INDENT}{'nearest   ' if not place else 10 * ' '}{line}"
