"""What stands in the HTML page, as text and as packed data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import zlib
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.inspect.pages import JOBS, stages
from tlora_fx.errors import DumpNotWritable
from tlora_fx.inspect import html
from tlora_fx.inspect.html import (
    LISTS,
    NUMBERS,
    SCRIPTS,
    STYLES,
    TEXTS,
    page_data,
    page_marks,
    render_html,
    write_html,
)
from tlora_fx.ir.graph import TABLES

ASSETS = Path(__file__).parents[2] / "tlora_fx/inspect/assets"
EVIL = "</script><img src=x onerror=alert(1)>"


def unpack(text: str) -> Any:
    """The data as the page reads it."""
    return json.loads(zlib.decompress(base64.b64decode(text), -15))


def nodes_of(data: Any, graph: Any) -> list[dict[str, Any]]:
    """A graph's nodes, put together from the tables."""
    texts, lists, columns = data["texts"], data["lists"], data["nodes"]
    found, row = [], 0
    for step in graph["rows"]:
        row += step
        node = {name: texts[columns[name][row]] for name in (*TEXTS, "shape")}
        node |= {name: [texts[t] for t in lists[columns[name][row]]] for name in LISTS}
        found.append(node | {name: columns[name][row] for name in NUMBERS})
    return found


class Reader(HTMLParser):
    """Collects elements with their attributes, and the text of styles and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, str] = {}
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

        self.inside = (dict(attrs).get("id") or tag) if tag in ("style", "script") else ""

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside:
            self.raw[self.inside] = data


def test_every_node_of_every_stage_is_in_the_data():
    """What the page reads back is what the stages hold."""
    given = stages()
    data = unpack(page_data(given))

    found = [
        [nodes_of(data, data["graphs"][place]) for place in stage["graphs"]]
        for stage in data["stages"]
    ]

    def told(node):
        fields = asdict(node)
        del fields["shape"], fields["notes"]
        shape = f"[{', '.join(map(str, node.shape))}]"
        return fields | {"shape": shape, "note": node.notes_text, "ranks": node.ranks_texts}

    assert found == [
        [[told(node) for node in graph.nodes] for graph in stage.program.graphs] for stage in given
    ]


def test_what_a_pass_leaves_alone_is_stored_once():
    """A stage that changes nothing adds no node and no graph."""
    given = stages()

    whole, shorter = unpack(page_data(given)), unpack(page_data(given[:-1]))

    assert len(whole["nodes"]["id"]) == len(shorter["nodes"]["id"])
    assert len(whole["graphs"]) == len(shorter["graphs"])


def test_nodes_that_are_gone_keep_their_history():
    """The provenance of a node that no stage shows any more can be looked up."""
    data = unpack(page_data(stages()))

    target, made_by, made_from = data["history"]["group/branch_0"]

    texts = data["texts"]
    assert (texts[target], texts[made_by]) == ("aten.mul.Tensor", "fuse-backbone")
    assert [texts[place] for place in data["lists"][made_from]] == ["base/l0_q_linear"]


def test_a_value_that_is_no_tensor_has_no_shape():
    """Scalars have a shape of no dimensions, other values none."""
    first, *rest = stages()
    graph = first.program.graphs[0]
    odd = replace(graph.nodes[0], shape=[], dtype="")
    scalar = replace(graph.nodes[1], shape=[], dtype="float32")
    program = replace(first.program, graphs=[replace(graph, nodes=[odd, scalar])])

    data = unpack(page_data([replace(first, program=program), *rest]))

    shapes = [node["shape"] for node in nodes_of(data, data["graphs"][0])]
    assert shapes == ["", "[]"]


def test_a_block_that_is_no_layer_is_shown_by_its_path():
    """The loss has a block too, whose path ends in no number."""
    given = stages()[-1]
    root, block = given.program.graphs
    head = replace(block, layers=["loss.head"])

    data = unpack(page_data([replace(given, program=replace(given.program, graphs=[root, head]))]))

    assert [graph["label"] for graph in data["graphs"]] == ["", "loss.head"]


def test_few_jobs_have_a_glyph_each():
    """As in the listing."""
    assert [(mark.mark, mark.jobs) for mark in page_marks(stages()[-1].program)] == [
        ("◆", (JOBS[0],)),
        ("▲", (JOBS[1],)),
    ]


def test_many_jobs_share_a_letter_with_those_of_the_same_modules():
    """Jobs that the same branches and operators serve share a mark."""
    jobs = [f"job-{number}" for number in range(12)]

    marks = page_marks(stages(jobs)[-1].program)

    assert [(mark.mark, mark.jobs) for mark in marks] == [("A", tuple(jobs))]


def test_the_title_is_text():
    """Markup in the title arrives as it was written."""
    page = render_html(stages(), title=EVIL)

    assert EVIL not in page
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in page


def test_names_of_jobs_cannot_become_markup():
    """Neither a tag nor the end of the script that holds the data."""
    page = render_html(stages((EVIL, "other")))

    assert "onerror" not in page


def test_the_policy_allows_its_own_style_and_script_and_nothing_else():
    """The hashes in the content policy are those of what the page holds."""
    page = Reader(render_html(stages()))
    policies = [a["content"] for tag, a in page.elements if "Policy" in (a.get("http-equiv") or "")]

    def digest(text):
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style, script = (
        f"{name}-src 'sha256-{digest(page.raw[name])}'" for name in ("style", "script")
    )
    assert policies == [f"default-src 'none'; {style}; {script}"]


def test_no_element_refers_to_another_file():
    """One file: nothing has a source, and links stay inside the page."""
    page = Reader(render_html(stages()))

    links = [a["href"] for _, a in page.elements if "href" in a]
    assert not [a for _, a in page.elements if "src" in a or "srcset" in a]
    assert all(link.startswith("#") for link in links)


def test_no_element_carries_code_or_style_of_its_own():
    """Handlers and style attributes would need a wider policy."""
    page = Reader(render_html(stages()))

    names = {name for _, attributes in page.elements for name in attributes}
    assert not [name for name in names if name == "style" or name.startswith("on")]


def test_the_page_leaves_the_same_tables_out_of_drawings_as_graphs_have():
    """The names are written down twice, because reading dumps needs no torch."""
    assert html.TABLES == TABLES


def test_writing_a_page_needs_no_torch():
    """A dump can be shown on a machine that could not train."""
    code = "import sys, tlora_fx.inspect.html; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_asset_is_in_the_page():
    """The lists in html.py name all scripts and styles that lie in the folder."""
    assert sorted(f"{name}.js" for name in SCRIPTS) == sorted(p.name for p in ASSETS.glob("js/*"))
    assert sorted(STYLES) == sorted(path.name for path in ASSETS.glob("*.css"))


def test_scripts_set_text_only():
    """No script of ours uses what would parse a name as markup or run it."""
    ways = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser")

    assert not [path.name for path in ASSETS.glob("js/*.js") if ways.search(path.read_text())]


def test_the_layout_library_is_the_one_that_is_pinned():
    """The bundled file has the checksum that is written beside it."""
    digest = hashlib.sha256((ASSETS / "vendor/dagre/dagre.min.js").read_bytes()).hexdigest()

    assert digest in (ASSETS / "vendor/README.md").read_text()


def test_the_page_carries_the_licence_of_the_layout_library():
    """Its licence goes with every copy."""
    page = render_html(stages())

    assert "Copyright (c) 2012-2014 Chris Pettitt" in page
    assert "THE SOFTWARE IS PROVIDED" in page


def test_the_file_is_the_page(tmp_path):
    """Folders are made, and what was there is replaced."""
    path = tmp_path / "new" / "page.html"
    write_html(stages(), path, title="first")

    write_html(stages(), path, title="second")

    assert path.read_text(encoding="utf-8") == render_html(stages(), title="second")


def test_a_file_that_cannot_be_written_is_our_error(tmp_path):
    """A folder stands where the page should go."""
    with pytest.raises(DumpNotWritable, match="the page cannot be written"):
        write_html(stages(), tmp_path)
