"""The rewrites inside a pass, counted, so that `bisect` can find the one that breaks a check.

A pass asks `rewrite_allowed` before each rewrite that stands on its own. Where one is refused, the
pass leaves that place as it is; whether the refused ones matter is what a bisection finds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class Rewrites:
    """The rewrites of one pass, over all graphs that it ran on.

    limit          how many are allowed, None for all
    descriptions   what each was, in order, the refused ones too
    """

    limit: int | None = None
    descriptions: list[str] = field(default_factory=list)

    def take(self, what: str) -> bool:
        """Count one more; whether it may be made."""
        self.descriptions.append(what)
        return self.limit is None or len(self.descriptions) <= self.limit


_running: ContextVar[Rewrites | None] = ContextVar("rewrites", default=None)


@contextmanager
def counting(rewrites: Rewrites) -> Iterator[None]:
    """Count what is asked for inside."""
    token = _running.set(rewrites)
    try:
        yield
    finally:
        _running.reset(token)


def rewrite_allowed(what: str) -> bool:
    """Count a rewrite of the running pass; False where a bisection holds it back.

    what    where it rewrites and into what: "multi_lora_linear at layers_0_31.mlp.up_proj"
    """
    rewrites = _running.get()
    return rewrites is None or rewrites.take(what)
