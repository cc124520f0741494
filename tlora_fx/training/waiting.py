"""How much may wait in the command log for answers, so that no client fills the disk."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, replace

from tlora_fx.errors import QueueFull


@dataclass(frozen=True, slots=True)
class Bound:
    """How much may wait for answers at a time: requests, and bytes of their bodies."""

    requests: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many requests may wait for answers.

    queue   of one model or sampler
    user    of one user
    whole   of all users
    """

    queue: Bound = Bound(4096, 1 << 30)
    user: Bound = Bound(16_384, 2 << 30)
    whole: Bound = Bound(65_536, 8 << 30)

    @classmethod
    def of_user(cls, size: int) -> Waiting:
        """Bounds by the bytes of one user: a model has half of them, all users have four times."""
        usual = cls()
        return cls(
            replace(usual.queue, bytes=size // 2), replace(usual.user, bytes=size),
            replace(usual.whole, bytes=size * 4),
        )  # fmt: skip

    def require_place(
        self, base: sqlite3.Connection, user: str, queue: str, size: int, *, runs_next: bool
    ) -> None:
        """Refuse another request where too many wait; raises QueueFull.

        A model's next request is what those behind it wait for. So its model always takes it. Users
        take twice as much of such requests, and any of them where nothing else could run.

        size        of its body
        runs_next   it is its model's next
        """
        scopes: list[tuple[str, Bound, str, tuple[str, ...]]] = [
            ("user", self.user, "AND user = ?", (user,)),
            ("service", self.whole, "", ()),
        ]
        if not runs_next:
            scopes.insert(0, ("model", self.queue, "AND user = ? AND queue = ?", (user, queue)))
        for scope, bound, where, values in scopes:
            sql = (
                "SELECT count(*) AS requests, coalesce(sum(length(body)), 0) AS bytes "  # noqa: S608
                f"FROM commands WHERE done IS NULL {where}"
            )
            row, factor = base.execute(sql, values).fetchone(), 1 + runs_next
            fits = row["requests"] < factor * bound.requests
            if fits and row["bytes"] + size <= factor * bound.bytes:
                continue
            if runs_next and not _is_runnable(base, where, values):
                continue
            raise QueueFull(
                f"too many requests of this {scope} wait for their answers",
                expected=f"{bound.requests} requests of {bound.bytes} bytes together at most",
                found=f"{row['requests']} requests of {row['bytes']} bytes, and one of {size}",
                help="send it again once some of them were answered",
            )


def _is_runnable(base: sqlite3.Connection, where: str, values: tuple[str, ...]) -> bool:
    """Whether a waiting request could run now, of those that a condition names."""
    where = where.replace("user", "c.user")
    sql = (
        "SELECT 1 FROM commands c LEFT JOIN models ON models.id = queue "  # noqa: S608
        f"WHERE done IS NULL AND seq = coalesce(ran + 1, seq) {where} LIMIT 1"
    )
    return base.execute(sql, values).fetchone() is not None
