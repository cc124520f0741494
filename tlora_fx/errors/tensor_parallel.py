"""Matrices that are cut over processes."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class TensorGroupMissing(TloraError):
    """A graph whose matrices are cut into pieces runs, and no group of processes is named for it.

    Planners name the groups of their mesh. Who runs such a graph by hand calls
    `tlora_fx.ops.use_group("tp", group)` in each process, before anything is compiled.
    """

    code = "T0830"
