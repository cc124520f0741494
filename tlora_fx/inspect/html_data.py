"""The data inside an HTML page: every stage's nodes, packed into tables.

A node that a pass leaves as it was is one row, however many stages it lives through, and so is a
graph. Texts, lists and rows are numbered; the numbers stand in columns, which deflate shrinks well.
`assets/js/data.js` reads it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Hashable, Sequence
from typing import Any

from tlora_fx.inspect.html_parties import parties
from tlora_fx.inspect.program import GraphEntry, NodeEntry, Program, Stage
from tlora_fx.inspect.wording import layers_label

TEXTS = (
    "id", "key", "kind", "target", "code", "dtype", "module", "role", "site", "source", "made_by",
    "note",
)  # fmt: skip
LISTS = ("inputs", "jobs", "made_from")
NUMBERS = ("flop_per_token", "flop_per_length", "flop_per_row", "bytes", "launches")
# As in graph.py, which needs torch; a test compares them.
TABLES = ("cu_seqlens", "max_seqlen", "segments", "token_index", "keys")
RAW_DEFLATE = -15


class Table:
    """Values by number: the same value has the same number."""

    def __init__(self) -> None:
        self.places: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        """The number of a value, a new one if it is new."""
        return self.places.setdefault(value, len(self.places))

    def values(self) -> list[Any]:
        """All values in the order of their numbers."""
        return list(self.places)


class Packer:
    """Tables of texts, lists of texts, nodes and graphs, filled stage by stage."""

    def __init__(self) -> None:
        self.texts, self.lists, self.nodes, self.graphs = Table(), Table(), Table(), Table()
        self.history: dict[str, tuple[int, int, int]] = {}

    def stage(self, stage: Stage) -> dict[str, Any]:
        """One stage, its graphs as numbers."""
        self._remember(stage.program)
        return {
            "place": stage.place,
            "text": stage.text,
            "changed": stage.changed,
            "seconds": stage.seconds,
            "state": stage.program.state,
            "form": stage.program.form,
            "graphs": [self.graphs.number(self._graph(graph)) for graph in stage.program.graphs],
        }

    def tables(self) -> dict[str, Any]:
        """All tables; nodes as columns."""
        columns = zip(*self.nodes.values(), strict=True)
        names = (*TEXTS, "shape", *LISTS, *NUMBERS)
        return {
            "texts": self.texts.values(),
            "lists": self.lists.values(),
            "nodes": dict(zip(names, map(list, columns), strict=False)),
            "graphs": [_graph_data(graph) for graph in self.graphs.values()],
            "history": self.history,
        }

    def _graph(self, graph: GraphEntry) -> tuple[Any, ...]:
        rows = tuple(self.nodes.number(self._node(node)) for node in graph.nodes)
        return graph.name, graph.owner, tuple(graph.layers), rows

    def _node(self, node: NodeEntry) -> tuple[Any, ...]:
        return (
            *(self.texts.number(getattr(node, name)) for name in TEXTS),
            self.texts.number(_shape_text(node)),
            *(self._list(getattr(node, name)) for name in LISTS),
            *(getattr(node, name) for name in NUMBERS),
        )

    def _list(self, values: Sequence[str]) -> int:
        return self.lists.number(tuple(map(self.texts.number, values)))

    def _remember(self, program: Program) -> None:
        for key, gone in program.history.items():
            self.history[key] = (
                self.texts.number(gone.target),
                self.texts.number(gone.made_by),
                self._list(gone.made_from),
            )


def page_data(stages: Sequence[Stage]) -> str:
    """All that the page shows, as base64 of deflated JSON."""
    packer = Packer()
    last = stages[-1].program
    packed = {
        "base": last.base,
        "version": last.version,
        "tables": TABLES,
        "jobs": [
            {"name": job, "mark": party.mark, "party": party.place}
            for party in parties(stages)
            for job in party.jobs
        ],
        "stages": [packer.stage(stage) for stage in stages],
    } | packer.tables()
    text = json.dumps(packed, separators=(",", ":"), allow_nan=False)
    deflate = zlib.compressobj(9, zlib.DEFLATED, RAW_DEFLATE)
    return base64.b64encode(deflate.compress(text.encode()) + deflate.flush()).decode()


def _graph_data(graph: tuple[Any, ...]) -> dict[str, Any]:
    """A graph; its rows as steps from one to the next, which are mostly 1."""
    name, owner, layers, rows = graph
    return {
        "name": name,
        "owner": owner,
        "layers": layers,
        "label": _label(layers),
        "rows": [row - before for row, before in zip(rows, (0, *rows), strict=False)],
    }


def _label(layers: Sequence[str]) -> str:
    """The layers of a block in short; a block that is no layer, such as the loss, by its path."""
    if all(layer.rpartition(".")[2].isdecimal() for layer in layers):
        return layers_label(layers) if layers else ""
    return ", ".join(layers)


def _shape_text(node: NodeEntry) -> str:
    if not node.dtype:
        return ""
    return f"[{', '.join(map(str, node.shape))}]"
