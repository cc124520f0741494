"""`tlora-fx opt`: pipelines on graphs of a file."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from tests.cli.test_compile import jobs  # noqa: F401  (a fixture)
from tests.cli.test_passes import refused, told
from tests.models import error_of
from tlora_fx.cli import main
from tlora_fx.compiler import run_passes
from tlora_fx.errors import GraphFileNotReadable, PipelineError
from tlora_fx.graph_file import (
    graph_text,
    graphs_of_text,
    load_document,
    load_graphs,
    save_graphs,
    split_document,
)
from tlora_fx.ir.verifier import fingerprint
from tlora_fx.numerics import instrument as numerics
from tlora_fx.pipeline import Runner, parse_pipeline, registry
from tlora_fx.tools.opt import run_on

REST = "lower-adapters,share-input,key-dropouts,lower-loss"
PASS = '''
"""A pass of somebody's own."""
from dataclasses import dataclass
from typing import ClassVar
from tlora_fx.pipeline import GroupPass, register


@register
@dataclass(frozen=True, slots=True)
class CountCalls(GroupPass):
    """Count calls."""

    name: ClassVar[str] = "count-calls"

    def run(self, group):
        assert list(group.graphs())
        return False
'''


LOSES = '''
from dataclasses import dataclass
from typing import ClassVar
from tlora_fx.pipeline import GroupPass, register


@register
@dataclass(frozen=True, slots=True)
class Lose(GroupPass):
    """Leave out what a job adds somewhere."""

    name: ClassVar[str] = "lose"
    preserves_numerics: ClassVar[str] = "bound"

    def run(self, group):
        for graph in group.graphs():
            for node in graph.nodes:
                if node.meta.get("part") == "sum":
                    node.replace_all_uses_with(node.args[0])
                    graph.eliminate_dead_code()
                    return True
'''


@pytest.fixture(scope="module")
def files(jobs, tmp_path_factory):  # noqa: F811
    """Graph files of two stages: fused, and whole."""
    folder = tmp_path_factory.mktemp("graphs")
    fused = run_passes(jobs, stop_after="fuse-backbone")
    save_graphs(fused, folder / "fused.tfx")
    save_graphs(run_passes(jobs), folder / "whole.tfx")
    return folder


def test_a_pipeline_goes_on_where_another_stopped(files, capsys, tmp_path):
    """What the passes require is kept in the file; what comes out is what compiling leaves."""
    out = tmp_path / "out.tfx"
    told(capsys, "opt", files / "fused.tfx", "--pipeline", REST, "-o", out, "--print", "nothing")

    assert fingerprint(load_graphs(out)) == fingerprint(load_graphs(files / "whole.tfx"))


@pytest.mark.parametrize(
    "words",
    [
        ("opt", "fused.tfx", "--print", "nothing"),
        ("reduce", "fused.tfx", "--check", "true"),
        ("compile", "jobs.yaml", "--stop-after", "fuse-backbone"),
    ],
)
def test_graphs_that_cannot_be_written_are_told(files, jobs, capsys, tmp_path, words):  # noqa: F811
    """Where the folder is a file, or on a read-only or full disk."""
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out.tfx"
    command, name, *more = words
    given = jobs if command == "compile" else files / name
    err, status = refused(capsys, command, str(given), *more, "-o", str(out))

    assert status == 1
    assert "error[T0602] the graphs cannot be written" in err
    assert "choose another file with -o" in err


def test_group_passes_follow_where_a_job_pass_was_the_last(jobs, capsys, tmp_path):  # noqa: F811
    """What holds of the base and of every job holds of a group that is not fused."""
    save_graphs(run_passes(jobs, stop_after="tag-roles"), tmp_path / "tagged.tfx")
    later = f"fold-layers,check-token-parallel,fuse-backbone,{REST}"
    text = told(capsys, "opt", tmp_path / "tagged.tfx", "--pipeline", later, "--print", "graph")

    assert fingerprint(graphs_of_text(text)) == fingerprint(run_passes(jobs))


def test_code_is_printed_by_default(files, capsys):
    """Of the graphs as they are, without a pipeline."""
    text = told(capsys, "opt", files / "fused.tfx")

    assert "segment_read" in text
    assert "def forward" in text


def test_graphs_go_through_pipes(files, capsys, monkeypatch):
    """Standard input is read, and what is printed may be read again."""
    monkeypatch.setattr(sys, "stdin", io.StringIO((files / "fused.tfx").read_text()))
    text = told(capsys, "opt", "--pipeline", "lower-adapters", "--print", "graph")

    assert "lower-adapters" in graphs_of_text(text).facts


@pytest.mark.parametrize("edited", [False, True])
def test_an_edited_file_is_said_to_be_verified(files, capsys, tmp_path, edited):
    """Comments are free, and one is a change."""
    text = (files / "fused.tfx").read_text()
    (tmp_path / "mine.tfx").write_text(text + "# mine\n" * edited)

    err, status = refused(capsys, "opt", str(tmp_path / "mine.tfx"), "--print", "nothing")

    assert status == 0
    assert ("mine.tfx was changed since it was written: verified" in err) == edited


def test_passes_are_watched(files, capsys):
    """Printed after a pass, and timed."""
    words = ("--pipeline", REST, "--print", "nothing", "--time", "--print-after", "lower-adapters")
    with pytest.raises(SystemExit):
        main(["opt", str(files / "fused.tfx"), *words])
    err = capsys.readouterr().err

    assert "# after 1 lower-adapters on group" in err
    assert "branches in shared operators" in err


def test_a_pass_of_a_file_runs(files, capsys, tmp_path, monkeypatch):
    """`--load` imports it."""
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))  # no other test sees it
    (tmp_path / "count_calls_of_opt.py").write_text(PASS)

    told(capsys, "opt", files / "fused.tfx", "--pipeline", "count-calls",
         "--load", tmp_path / "count_calls_of_opt.py", "--print", "nothing")  # fmt: skip


def test_numbers_are_compared_and_told(files, capsys):
    """What was found of each pass that changed the code."""
    with pytest.raises(SystemExit) as stop:
        main(["opt", str(files / "fused.tfx"), "--pipeline", REST, "--print", "nothing",
              "--verify", "numerics"])  # fmt: skip
    err = capsys.readouterr().err

    assert stop.value.code == 0
    for name in REST.split(","):
        assert re.search(rf"numerics  {name} on group: (exact|within bound|not checked)", err), err


def test_strictly_what_cannot_be_compared_fails(files, capsys, monkeypatch):
    """With the reason, also where the check itself goes wrong."""

    def compare(self, held, done):
        raise ZeroDivisionError("in the check")

    monkeypatch.setattr(numerics.Numerics, "_compare", compare)
    words = ["opt", str(files / "fused.tfx"), "--pipeline", "lower-adapters", "--print", "nothing"]

    err, status = refused(capsys, *words, "--verify", "numerics")
    assert status == 0
    assert "not checked: ZeroDivisionError: in the check" in err

    err, status = refused(capsys, *words, "--strict")
    assert status != 0
    assert "were not compared" in err
    assert "ZeroDivisionError: in the check" in err


def test_a_pass_that_loses_an_adapter_is_caught_by_structure(files, capsys, tmp_path, monkeypatch):
    """Without running anything: it says that it keeps the numbers."""
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))  # no other test sees it
    (tmp_path / "loses_of_opt.py").write_text(LOSES)

    words = ["opt", str(files / "fused.tfx"), "--pipeline", "lose", "--print", "nothing"]
    err, status = refused(capsys, *words, "--load", str(tmp_path / "loses_of_opt.py"))

    assert status != 0
    assert "pass 'lose' drops adapters" in err


def test_graphs_are_printed_after_passes_that_changed_them(files, capsys):
    """And after no other."""
    with pytest.raises(SystemExit):
        main(["opt", str(files / "fused.tfx"), "--pipeline", "lower-adapters,key-dropouts,dce",
              "--print", "nothing", "--print-after-change"])  # fmt: skip

    printed = re.findall("# after .*", capsys.readouterr().err)
    assert printed == ["# after 1 lower-adapters on group", "# after 2 key-dropouts on group"]


def test_a_disabled_pass_does_not_run(files, capsys):
    """It is left out of the pipeline."""
    words = ["opt", files / "fused.tfx", "--print", "graph", "--pipeline"]
    disabled = ("--disable-pass", "dce", "--disable-pass", "lower-loss")

    without = told(capsys, *words, f"{REST},dce", *disabled)

    assert without == told(capsys, *words, REST.removesuffix(",lower-loss"))


@pytest.mark.parametrize(
    ("disabled", "message"),
    [
        ("key-dropout", "nearest  key-dropouts"),
        ("lower-adapters", "keep what is expected, or leave out this pass, too"),
    ],
)
def test_a_pass_that_others_need_is_not_disabled(files, capsys, disabled, message):
    """Nor one that the pipeline does not have."""
    words = ["opt", str(files / "fused.tfx"), "--pipeline", REST, "--disable-pass", disabled]
    text, status = refused(capsys, *words)

    assert status == 1
    assert message in text


@pytest.fixture
def several(files, tmp_path):
    """Two graphs in one file."""
    texts = [(files / name).read_text() for name in ("fused.tfx", "whole.tfx")]
    (tmp_path / "several.tfx").write_text("// -----\n".join(texts))
    return tmp_path / "several.tfx"


def test_a_file_of_several_graphs_is_split(files, several, capsys, tmp_path):
    """Each is run by itself; the result is such a file again."""
    out = tmp_path / "out.tfx"
    told(capsys, "opt", several, "--split-input-file", "--pipeline", "dce", "-o", out)

    for part, name in zip(split_document(load_document(out)), ("fused", "whole"), strict=True):
        told(capsys, "opt", files / f"{name}.tfx", "--pipeline", "dce", "-o", tmp_path / "one.tfx")
        assert part.text == (tmp_path / "one.tfx").read_text()


def test_other_graphs_of_a_file_run_where_one_fails(several, capsys):
    """Lines count from the file's begin; the exit status is 1."""
    lines = several.read_text().splitlines(keepends=True)
    wrong = lines.index("// -----\n") + 8
    lines.insert(wrong, "what(is, this)\n")
    several.write_text("".join(lines))

    with pytest.raises(SystemExit) as stop:
        main(["opt", str(several), "--split-input-file", "--print", "graph"])
    out, err = capsys.readouterr()

    assert stop.value.code == 1
    assert re.search(rf"line +{wrong + 1}\n", err)
    assert out.startswith("graphs(")


def test_a_file_of_several_graphs_says_so(several):
    """Where it is read as one."""
    message = error_of(lambda: load_graphs(several), GraphFileNotReadable)

    assert "opt --split-input-file" in message


def test_a_job_pass_is_refused_on_fused_graphs(files):
    """It would have nothing to run on."""
    group = load_graphs(files / "fused.tfx")
    runner = Runner(parse_pipeline("tag-roles", group.facts), held=group.facts)

    assert "a group that is fused" in error_of(lambda: run_on(group, runner), PipelineError)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("lower-adapter", "nearest  lower-adapters"),
        ("lower-adapters{", "the pipeline cannot be read"),
        ("lower-adapters{compte=base}", "nearest  compute"),
    ],
)
def test_a_wrong_pipeline_is_told_before_torch_is_imported(files, pipeline, message):
    """In an interpreter of its own."""
    code = (
        "import sys, tlora_fx.cli as c\n"
        "try: c.main(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, "opt", files / "fused.tfx", "--pipeline", pipeline]
    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout.strip() == "False"


def test_a_pass_that_lacks_what_it_requires_is_refused(files, capsys):
    """The file says what ran."""
    text, status = refused(capsys, "opt", str(files / "fused.tfx"), "--pipeline", "share-input")

    assert status == 1
    assert "stands before what it requires" in text


def test_a_graph_file_is_inspected(files, capsys):
    """As any state of graphs."""
    assert "multi_lora_linear" in told(capsys, "inspect", files / "whole.tfx")


def test_a_node_is_a_line_of_a_graph_file(files):
    """And the text is the same when it is written again."""
    text = (files / "fused.tfx").read_text()
    group = graphs_of_text(text)
    nodes = sum(len(graph.nodes) for graph in group.graphs())

    assert len(re.findall(r"\n  \w+(: .*)? = \w+", text)) >= nodes
    assert graph_text(group) == text
