"""A module that stands for those which graphs name, so that what fx offers runs in passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.ir.verifier import owners


class PathModule(nn.Module):
    """Has a module at any path: graphs name tensors and layers that are loaded much later."""

    def __getattr__(self, name: str) -> Any:
        """Another one; what begins with _ is fx's or torch's, and is not there."""
        return super().__getattr__(name) if name.startswith("_") else PathModule()


@contextmanager
def owning_modules(graphs: JobGraph | GroupGraph) -> Iterator[None]:
    """Inside, graphs have an owning module, as those of a `fx.GraphModule` do.

    So `graph.eliminate_dead_code()` and `fx.GraphModule(graph.owning_module, graph)` run.
    """
    before = [graph for owner in owners(graphs) for graph in owner.graphs()]
    for graph in before:
        graph.owning_module = PathModule()  # type: ignore[assignment]  # fx asks for no more
    try:
        yield
    finally:
        after = [graph for owner in owners(graphs) for graph in owner.graphs()]
        for graph in (*before, *after):
            graph.owning_module = None
