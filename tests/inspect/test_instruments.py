"""Times, prints and numbered dumps of a pipeline run."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.models import error_of
from tests.pipeline.graphs import Does, add_relu, small_graph
from tlora_fx.errors import PipelineError
from tlora_fx.inspect.instruments import HEADER, DumpChanged, PrintAfter, Timing, Watch, watch_from
from tlora_fx.pipeline import Pipeline, Runner


def keep(graph):
    """Change nothing."""


@dataclass(frozen=True, slots=True)
class Keeps(Does):
    """A pass of another name."""

    name: ClassVar[str] = "keeps"


def watched(*instruments, passes=(add_relu, keep)):
    """Run two passes under instruments: one that changes the graph, one that does not."""
    runner = Runner(Pipeline(tuple(Does(item) for item in passes)), instruments)
    runner.start()
    runner.run_job(small_graph(with_ids=True))


def test_times_are_a_line_a_pass():
    """Pass, seconds, those of run and checks, and how many graphs changed; the sum above."""
    timing = Timing(io.StringIO())

    runner = Runner(Pipeline((Does(add_relu), Keeps(keep))), [timing])
    with runner.phase("all"):
        runner.run_job(small_graph(with_ids=True))

    title, total, changed, kept, *_ = timing.lines()
    assert title.split() == ["phase", "seconds", "run", "checks", "changed"]
    assert total.split()[0] == "all"
    assert changed.startswith("  does ")
    assert changed.endswith("1 of 1 graph")
    assert kept.startswith("  keeps ")
    assert kept.endswith("0 of 1 graph")


def test_times_add_up():
    """What has no name is a line of its own."""
    timing = Timing(io.StringIO())
    runner = Runner(Pipeline((Does(add_relu),)), [timing])

    with runner.phase("all"), runner.phase("one"):
        runner.run_job(small_graph(with_ids=True))

    whole = timing.root
    assert whole.seconds == pytest.approx(
        sum(s.seconds for s in whole.inside.values()) + whole.rest
    )
    assert list(whole.inside["one"].inside) == ["does"]
    assert whole.rest >= 0


@pytest.mark.parametrize(("wanted", "times"), [("changed", 1), ("all", 2), ("does", 2)])
def test_graphs_are_printed_after_a_pass(wanted, times):
    """Those of one pass, of all, or of those that changed the code."""
    out = io.StringIO()

    watched(PrintAfter(wanted, out))

    assert out.getvalue().count("# after") == times
    assert "aten.relu.default(relu)" in out.getvalue()


def test_a_pass_that_does_not_run_cannot_be_printed():
    """A name that the pipeline does not have is a mistake, told before anything runs."""
    assert "nearest  does" in error_of(lambda: watched(PrintAfter("dose")), PipelineError)


def test_dumps_are_numbered_and_old_ones_go(tmp_path):
    """What was traced, and what each pass left that changed something."""
    (tmp_path / "07-lower-loss.group.py").write_text(HEADER + ", from before")
    (tmp_path / "08-mine.group.py").write_text("print('mine')")
    (tmp_path / "notes.txt").write_text("mine")

    watched(DumpChanged(tmp_path))

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00-trace.job-one.py",
        "01-does.job-one.py",
        "08-mine.group.py",
        "notes.txt",
    ]


def test_the_environment_asks_for_the_same(tmp_path):
    """`TLORA_FX_LOG` has the words of the command line."""
    text = f"time, print-after=changed,print-after=fold-layers,dump-changed={tmp_path}"

    assert watch_from(text) == Watch(
        time=True, print_after=("changed", "fold-layers"), dump_changed=tmp_path
    )
    assert watch_from("verify=none,stop-after=x") == Watch(verify="none", stop_after="x")
    assert watch_from("") == Watch()


@pytest.mark.parametrize("word", ["tim", "verify=numbers", "stop-after", "time=3", "print-after="])
def test_an_unknown_word_is_refused(word):
    """It says what it takes."""
    assert "print-after=NAME" in error_of(lambda: watch_from(word), PipelineError)
