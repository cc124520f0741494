"""Graph files on disk."""

from __future__ import annotations

import json

import pytest

from tests.models import error_of
from tests.pipeline.graphs import small_graph
from tlora_fx.errors import GraphFileNotReadable
from tlora_fx.graph_file import load_graphs, save_graphs
from tlora_fx.ir.verifier import fingerprint


def test_graphs_are_saved_and_loaded(tmp_path):
    """Into a folder that is made for them."""
    graph = small_graph()

    save_graphs(graph, tmp_path / "new" / "state")

    assert fingerprint(load_graphs(tmp_path / "new" / "state")) == fingerprint(graph)


def test_the_file_names_the_versions_that_wrote_it(tmp_path):
    """For whoever finds it later."""
    save_graphs(small_graph(), tmp_path)

    assert set(json.loads((tmp_path / "graph.json").read_text())["versions"]) == {
        "tlora-fx", "torch",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', "null", '"' * 9])
def test_a_broken_file_is_refused(tmp_path, text):
    """With an error of ours, whatever is in it."""
    save_graphs(small_graph(), tmp_path)
    (tmp_path / "graph.json").write_text(text)

    assert "graph file" in error_of(lambda: load_graphs(tmp_path), GraphFileNotReadable)


def test_a_cut_file_of_constants_is_refused(tmp_path):
    """Both files are needed."""
    save_graphs(small_graph(), tmp_path)
    (tmp_path / "constants.safetensors").write_bytes(b"12")

    assert "cannot be read" in error_of(lambda: load_graphs(tmp_path), GraphFileNotReadable)


def test_a_folder_without_graphs_is_refused(tmp_path):
    """The error says which file was looked for."""
    assert "graph.json" in error_of(lambda: load_graphs(tmp_path), GraphFileNotReadable)
