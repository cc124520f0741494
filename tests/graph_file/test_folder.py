"""Graph files on disk."""

from __future__ import annotations

import pytest

from tests.models import error_of
from tests.pipeline.graphs import small_graph
from tlora_fx.errors import GraphFileNotReadable
from tlora_fx.graph_file import load_graphs, save_graphs
from tlora_fx.ir.verifier import fingerprint


@pytest.mark.parametrize("name", ["new/state", "new/state.tfx"])
def test_graphs_are_saved_and_loaded(tmp_path, name):
    """Into a folder or file that is made for them."""
    graph = small_graph()

    save_graphs(graph, tmp_path / name)

    assert fingerprint(load_graphs(tmp_path / name)) == fingerprint(graph)


def test_the_file_names_the_versions_that_wrote_it(tmp_path):
    """For whoever finds it later."""
    save_graphs(small_graph(), tmp_path)
    first = (tmp_path / "graph.tfx").read_text().splitlines()[0]

    assert 'tlora_fx="' in first
    assert 'torch="' in first


@pytest.mark.parametrize("text", ["", "(", "[]", "graphs(1)", "x = 1", "graphs(3)", "(" * 999])
def test_a_broken_file_is_refused(tmp_path, text):
    """With an error of ours, whatever is in it."""
    (tmp_path / "graph.tfx").write_text(text)

    assert "graph file" in error_of(lambda: load_graphs(tmp_path), GraphFileNotReadable)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    """As damaged."""
    (tmp_path / "graph.tfx").write_bytes(b"\xff\xfe")

    assert "cannot be read" in error_of(lambda: load_graphs(tmp_path), GraphFileNotReadable)


def test_a_folder_without_graphs_is_refused(tmp_path):
    """The error says which file was looked for."""
    assert "graph.tfx" in error_of(lambda: load_graphs(tmp_path), GraphFileNotReadable)
