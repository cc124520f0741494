"""One HTML file that shows a compilation: every pass, every module, every node, offline.

The page holds its data, style and scripts. Its content policy lets these scripts run and nothing
else, and allows no request; text from job files is only ever set as text.

The data are tables. A node that a pass leaves as it was is one row, however many stages it lives
through, and so is a graph. Texts, lists and rows are numbered; the numbers stand in columns, which
deflate shrinks well. `assets/js/data.js` reads them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Hashable, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from tlora_fx.inspect.marks import JobMark, job_marks
from tlora_fx.inspect.schema import GraphEntry, NodeEntry, PassStage, Program, write_file
from tlora_fx.inspect.wording import layers_label

TITLE = "tlora-fx"
TEMPLATE = "page.html.j2"
STYLES = ("page.css", "jobs.css", "tree.css", "side.css")
# Each script names only those before it.
SCRIPTS = (
    "dom", "words", "data", "items", "roles", "rows", "costs", "colours", "find", "tree_view",
    "layer_bars", "node_view", "code_view", "layout", "overview", "drawing", "main",
)  # fmt: skip
VENDOR = ("vendor/dagre/dagre.min.js",)
# Fields of NodeEntry, by what stands in their columns.
TEXTS = (
    "id", "key", "kind", "target", "code", "dtype", "module", "role", "site", "source", "made_by",
    "note",
)  # fmt: skip
# Columns whose text is another field's.
SHOWN = {"note": "notes_text", "ranks": "ranks_texts"}
LISTS = ("inputs", "jobs", "made_from", "ranks")
NUMBERS = ("flop_per_token", "flop_per_length", "flop_per_row", "bytes", "launches")
# As in graph.py, which needs torch; a test compares them.
TABLES = ("cu_seqlens", "max_seqlen", "segments", "token_index", "keys")
RAW_DEFLATE = -15


def write_html(stages: Sequence[PassStage], path: Path, title: str = TITLE) -> None:
    """Write the page of what each pass left, at least one; raises DumpNotWritable."""
    write_file(path, render_html(stages, title), "the page")


def render_html(stages: Sequence[PassStage], title: str = TITLE) -> str:
    """The page as text."""
    assert stages, "a page shows at least one stage"
    assets = files("tlora_fx.inspect") / "assets"
    style = "\n".join(_text(assets / name) for name in STYLES)
    scripts = (*VENDOR, *(f"js/{name}.js" for name in SCRIPTS))
    script = "\n".join(_script(assets / name) for name in scripts)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(_text(assets / TEMPLATE)).render(
        title=title,
        style=style,
        script=script,
        data=page_data(stages),
        # This style and this script by their hashes, and nothing else.
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}",
        licence=_text(assets / "vendor/dagre/LICENSE"),
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _script(file: Traversable) -> str:
    """A script without the line that would send a debugger for its source map."""
    text = _text(file)
    assert "</script" not in text, file.name
    return "\n".join(line for line in text.splitlines() if "sourceMappingURL=" not in line)


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def page_data(stages: Sequence[PassStage]) -> str:
    """All that the page shows, as base64 of deflated JSON."""
    packer = _Packer()
    last = stages[-1].program
    data = {
        "base": last.base,
        "version": last.version,
        "tables": TABLES,
        "jobs": [
            {"name": job, "mark": mark.mark, "party": mark.index}
            for mark in page_marks(last)
            for job in mark.jobs
        ],
        "stages": [packer.stage(stage) for stage in stages],
    } | packer.tables()
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    deflate = zlib.compressobj(9, zlib.DEFLATED, RAW_DEFLATE)
    return base64.b64encode(deflate.compress(text.encode()) + deflate.flush()).decode()


def page_marks(program: Program) -> list[JobMark]:
    """Marks of a program's jobs; those of one letter have adapters at the same modules."""
    sites: dict[str, set[object]] = {job: set() for job in program.jobs}
    for graph, node in program.nodes():
        if node.role == "adapter" and node.kind == "call":
            for job in node.jobs:
                sites[job].add((graph.name, node.site or node.module, node.target))
    return job_marks(program.jobs, lambda job: frozenset(sites[job]))


class _Numbers(dict[Any, int]):
    """Values by number: a new value has the next number."""

    def __missing__(self, value: Hashable) -> int:
        self[value] = len(self)
        return self[value]


class _Packer:
    """Tables of texts, lists of texts, nodes and graphs, filled stage by stage."""

    def __init__(self) -> None:
        self.texts, self.lists, self.nodes, self.graphs = (_Numbers() for _ in range(4))
        self.history: dict[str, tuple[int, int, int]] = {}

    def stage(self, stage: PassStage) -> dict[str, Any]:
        for key, gone in stage.program.history.items():
            texts = self.texts[gone.target], self.texts[gone.made_by]
            self.history[key] = (*texts, self._list(gone.made_from))
        return {
            "place": stage.place,
            "text": stage.text,
            "changed": stage.changed,
            "seconds": stage.seconds,
            "state": stage.program.state,
            "form": stage.program.form,
            "graphs": [self.graphs[self._graph(graph)] for graph in stage.program.graphs],
        }

    def tables(self) -> dict[str, Any]:
        columns = zip(*self.nodes, strict=True)
        names = (*TEXTS, "shape", *LISTS, *NUMBERS)
        return {
            "texts": list(self.texts),
            "lists": list(self.lists),
            "nodes": dict(zip(names, map(list, columns), strict=False)),
            "graphs": [_graph_data(*graph) for graph in self.graphs],
            "history": self.history,
        }

    def _graph(self, graph: GraphEntry) -> tuple[Any, ...]:
        rows = tuple(self.nodes[self._node(node)] for node in graph.nodes)
        return graph.name, graph.owner, tuple(graph.layers), rows

    def _node(self, node: NodeEntry) -> tuple[Any, ...]:
        shape = f"[{', '.join(map(str, node.shape))}]" if node.dtype else ""
        return (
            *(self.texts[getattr(node, SHOWN.get(name, name))] for name in TEXTS),
            self.texts[shape],
            *(self._list(getattr(node, SHOWN.get(name, name))) for name in LISTS),
            *(getattr(node, name) for name in NUMBERS),
        )

    def _list(self, values: Sequence[str]) -> int:
        return self.lists[tuple(self.texts[value] for value in values)]


def _graph_data(
    name: str, owner: str, layers: Sequence[str], rows: Sequence[int]
) -> dict[str, Any]:
    """A graph; its rows as steps from one to the next, which are mostly 1."""
    numbered = all(layer.rpartition(".")[2].isdecimal() for layer in layers)
    return {
        "name": name,
        "owner": owner,
        "layers": layers,
        # A block that is no layer, such as the loss, goes by its path.
        "label": layers_label(layers) if layers and numbered else ", ".join(layers),
        "rows": [row - before for row, before in zip(rows, (0, *rows), strict=False)],
    }
