"""Which micro-batches of a pipeline's stages get graphs: what can be known of it without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.parallel.test_row_graphs import rows_of_lengths
from tlora_fx.parallel import cuda_graphs, stage_graphs
from tlora_fx.parallel.stage_graphs import StageGraphs


class Pretended:
    """Stands for the graphs of one form in one slot."""

    kept = 8

    def __init__(self, model, row, weights, device, lengths, stage, hidden):
        self.adapted_sites, self.released = model.adapted_sites, False

    def first(self, hidden):
        return "first"

    def capture(self, pool, stream):
        """Nothing to note."""

    def load(self, row, weights):
        """Nothing to overwrite."""

    def __call__(self, hidden):
        return "replayed"

    def release(self):
        self.released = True


@pytest.fixture
def graphs(monkeypatch):
    """Of one stage that learns, without a GPU."""
    monkeypatch.setattr(stage_graphs, "CapturedStage", Pretended)
    monkeypatch.setattr(cuda_graphs, "free_gpu_bytes", lambda device: 2**40)
    for name in ("graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    model = SimpleNamespace(adapted_sites=frozenset("a"))
    stage = SimpleNamespace(learns=True, needs_grad=False)
    return StageGraphs(model, [stage], torch.device("cpu"), 4096)


def round_of(graphs, rows, under_way=2):
    """Run micro-batches, so many at once; what became of each forward."""
    graphs.begin(rows, torch.ones(3))
    told = []
    for number in range(len(rows) + under_way):
        if number < len(rows):
            told.append(graphs.forward(0, number, None, lambda: "launched"))
        if number >= under_way - 1:
            graphs.done(0, number - under_way + 1)
    graphs.end()
    return told


def test_what_is_under_way_at_once_has_slots_of_its_own(graphs):
    """A form is captured for a slot when it comes there, once it has come before."""
    (row,) = rows_of_lengths(16)

    assert round_of(graphs, [row] * 4) == ["launched", "first", "first", "launched"]
    assert [key.slot for key in graphs._graphs] == [1, 0]
    assert round_of(graphs, [row] * 4) == ["replayed"] * 4
    assert round_of(graphs, [row] * 4, under_way=3) == ["replayed", "replayed", "first", "replayed"]


def test_many_forms_are_captured_once_each(graphs):
    """Those of a real mix come again and again, in any slot."""
    rows = rows_of_lengths(*range(16, 16 + 24 * 16, 16))
    for _ in range(4):
        round_of(graphs, rows)
    captured = graphs.captured

    assert captured == 24
    assert round_of(graphs, rows) == ["replayed"] * 24
    assert graphs.captured == captured


def test_a_rare_form_takes_no_place_from_a_frequent_one(graphs, monkeypatch):
    """Of the same stage and slot; one that comes more than twice as often does."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    one, other = rows_of_lengths(16, 300)
    for _ in range(5):
        round_of(graphs, [one], under_way=1)
    for _ in range(8):
        assert round_of(graphs, [other], under_way=1) == ["launched"]
    for _ in range(4):
        round_of(graphs, [other], under_way=1)

    assert round_of(graphs, [other], under_way=1) == ["replayed"]
    assert round_of(graphs, [one], under_way=1) == ["launched"]


def test_memory_stays_free_for_all_that_is_under_way(graphs, monkeypatch):
    """Also for rows that are too large for a graph."""
    small, large = rows_of_lengths(16, 300)
    monkeypatch.setattr(graphs, "most", 100)
    asked = []
    monkeypatch.setattr(graphs, "_fits_memory", lambda *_: asked.append(graphs._under_way) or False)
    for _ in range(2):
        round_of(graphs, [large, large, large, small], under_way=4)

    assert asked == [4]
    assert graphs.skipped_no_memory == 1
    assert graphs.keys == []


def test_a_round_that_failed_leaves_nothing_that_waits_for_a_graph(graphs):
    """What it had begun is let go of."""
    (row,) = rows_of_lengths(16)
    for _ in range(2):
        graphs.begin([row], torch.ones(3))
        graphs.forward(0, 0, None, lambda: "launched")
    (waiting,) = graphs._wanted.values()
    graphs.begin([row], torch.ones(3))

    assert waiting.released
    assert not graphs._wanted


def test_a_site_that_is_adapted_later_is_captured_anew(graphs):
    """Its kernels are in no graph of before."""
    (row,) = rows_of_lengths(16)
    for _ in range(3):
        round_of(graphs, [row])
    graphs.model.adapted_sites = frozenset("ab")

    assert round_of(graphs, [row]) == ["first"]
    assert round_of(graphs, [row]) == ["replayed"]
