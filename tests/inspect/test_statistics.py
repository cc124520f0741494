"""Statistics of passes and of their rules."""

from __future__ import annotations

import io
import json
from collections import Counter

from tests.pipeline.graphs import Does, add_relu, aten, small_graph
from tlora_fx.inspect.statistics import PassStatistics
from tlora_fx.pipeline import Instrument, Pipeline, Runner
from tlora_fx.rewriting import RewriteRule, anything, call, constant, find, rewrite_greedily

ONE_RELU = RewriteRule(
    call(aten.relu.default, call(aten.relu.default, anything("x"), name="inner")),
    lambda found: lambda make: make(aten.relu.default, found["x"]),
    name="one relu",
)


def one_relu(graph):
    """Make one relu of two, by a rule; and look for what is not there."""
    assert rewrite_greedily(graph.root, [ONE_RELU]) == 1
    wanted = call(aten.relu.default, constant("c", int), name="relu of a number")
    assert not list(find(graph.root, wanted))


def statistics_of(*passes) -> PassStatistics:
    """What functions do as passes on a small graph."""
    statistics = PassStatistics(io.StringIO())
    runner = Runner(Pipeline(tuple(Does(item) for item in passes)), [statistics])
    runner.start()
    runner.run_job(graph := small_graph())
    statistics.finished(graph)
    return statistics


def test_nodes_and_shapes_are_counted():
    """Those of its graphs before and after it, and the operators that were given other values."""
    grows, shrinks = statistics_of(add_relu, one_relu).in_order()

    assert (grows.nodes_in, grows.nodes_out, grows.shapes) == (3, 4, 1)
    assert (shrinks.nodes_in, shrinks.nodes_out, shrinks.shapes) == (4, 3, 0)
    assert (shrinks.graphs, shrinks.changed, shrinks.rewrites) == (1, 1, 1)


def test_rules_tell_tries_matches_and_misses():
    """Each relu is a try; the reason of a miss is the condition that failed."""
    _, row = statistics_of(add_relu, one_relu).in_order()

    rule = row.rules["one relu"]
    assert (rule.tries, rule.matches) == (3, 1)
    assert rule.misses == Counter({"its inner is aten.relu.default": 2})
    missed = row.rules["relu of a number"]
    assert (missed.tries, missed.matches) == (1, 0)
    assert missed.misses == Counter({"its c is a constant int": 1})
    assert 0 < rule.seconds < row.run_seconds


def test_parts_are_the_whole():
    """Of a pass's time: its own, shapes, checks."""
    statistics = statistics_of(add_relu, one_relu)
    data = json.loads(statistics.to_json())

    for row in data["passes"]:
        parts = [row[name] for name in ("run_seconds", "shape_seconds", "check_seconds")]
        assert min(parts) > 0
        assert row["seconds"] == sum(parts)
    assert data["passes"][1]["rules"]["one relu"]["matches"] == 1


def test_the_tree_is_printed_when_all_passes_ran():
    """Pipeline, passes, rules, reasons."""
    lines = statistics_of(add_relu, one_relu).out.getvalue().splitlines()

    names = [line[:40].rstrip() for line in lines]
    assert names[1:5] == ["pipeline", "  does", "  does", "    one relu"]
    assert "1 of 3 nodes matched" in lines[4]
    assert lines[5].strip() == "2 × not: its inner is aten.relu.default"


def test_nothing_is_counted_where_nobody_asks():
    """Matching is as it was without an instrument that watches rules."""

    class Sees(Instrument):
        rules = None

        def after(self, done):
            self.rules = done.rules

    sees = Sees()
    Runner(Pipeline((Does(add_relu), Does(one_relu))), [sees]).run_job(small_graph())

    assert sees.rules == {}
