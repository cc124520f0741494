"""A pass that fails leaves a folder, from which it fails again alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import pytest
import torch

from tests.models import base_of, error_of, job, save_config
from tlora_fx.compiler import DEFAULT_PIPELINE, compile, prepare, resolve_pipeline
from tlora_fx.errors import GraphInvalid, PassFailed, PipelineError, ReplayNotReadable, TagsBroken
from tlora_fx.ir.verifier import owners
from tlora_fx.pipeline import REGISTRY, Event, JobPass, Runner
from tlora_fx.tools.bisect import trace_states
from tlora_fx.tools.replay import keep_replay, load_replay, run_replay, write_replay

aten = torch.ops.aten
PASSES = DEFAULT_PIPELINE.split(",")


def operators(graphs):
    """The operators of the largest graph that a pass rewrites."""
    graph = max(owners(graphs)[0].graphs(), key=lambda graph: len(graph.nodes))
    return [node for node in graph.nodes if node.op == "call_function"]


def raises(graphs):
    """Gives up in the middle of its nodes."""
    nodes = operators(graphs)
    for number, node in enumerate(nodes):
        if number > len(nodes) // 2:
            raise ValueError(f"a fault at {node.name}")


def reads_too_early(graphs):
    """A node reads one that comes after it."""
    early, *_, late = operators(graphs)
    early.update_arg(0, late)


def wrong_shape(graphs):
    """A product of a value with itself, which does not fit."""
    node = next(node for node in operators(graphs) if node.target is aten.linear.default)
    node.args = (node.args[0], node.args[0])


def wrong_tag(graphs):
    """A role that nobody knows."""
    for node in operators(graphs):
        node.meta["role"] = "stranger"


FAULTS = {
    raises: PassFailed,
    reads_too_early: GraphInvalid,
    wrong_shape: GraphInvalid,
    wrong_tag: TagsBroken,
}


def faulty(name, fault):
    """A pass of ours with a fault behind what it does."""
    cls = REGISTRY[name]

    @dataclass(frozen=True, slots=True)
    class Faulty(cls):
        def run(self, graphs):
            cls.run(self, graphs)
            fault(graphs)

    return Faulty


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A small job."""
    base = base_of(tmp_path_factory.mktemp("llama"), "llama", "float32", num_hidden_layers=2)
    return [job("few", base, r=2, target_modules=["q_proj"], lora_dropout=0.1)]


@pytest.fixture(scope="module")
def traced(jobs):
    """What is compiled, and its states after every pass."""
    given = prepare(jobs)
    return given, trace_states(given, resolve_pipeline())


def each_fault_in_each_pass():
    """Every pair; those that are not slow have every pass and every fault."""
    for turn, name in enumerate(PASSES):
        for number, fault in enumerate(FAULTS):
            marks = [] if number == turn % len(FAULTS) else [pytest.mark.slow]
            yield pytest.param(name, fault, id=f"{name}-{fault.__name__}", marks=marks)


@pytest.mark.parametrize(("name", "fault"), each_fault_in_each_pass())
def test_a_fault_in_any_pass_is_named_and_replayed(traced, tmp_path, monkeypatch, name, fault):
    """The error names pass and node, and the replay gives the same error."""
    given, states = traced
    place = PASSES.index(name) + 1
    monkeypatch.setitem(REGISTRY, name, faulty(name, fault))
    runner = Runner(resolve_pipeline())

    def event():
        group = states.after(place - 1).group
        item = runner.pipeline.passes[place - 1]
        alone = isinstance(item, JobPass)
        return Event(
            place, item, "job few" if alone else "group", group.jobs[0] if alone else group
        )

    with pytest.raises(FAULTS[fault]) as first:
        runner.run_one(event())
    write_replay(tmp_path, given, event(), runner, first.value)
    again = run_replay(tmp_path)

    assert f"in pass {name}" in "\n".join(first.value.__notes__)
    assert "node" in first.value.facts or "%" in str(first.value)
    assert str(again) == str(first.value)
    assert again.__notes__ == first.value.__notes__
    assert (tmp_path / "error.txt").read_text().count(first.value.what) >= 1


@pytest.mark.parametrize("name", ["fold-layers", "lower-adapters"])
def test_a_failing_compilation_leaves_a_folder(jobs, tmp_path, monkeypatch, name):
    """With the graphs as they were before the pass; the error says how to run it again."""
    monkeypatch.setitem(REGISTRY, name, faulty(name, raises))
    folder = tmp_path / "replay"

    with pytest.raises(PassFailed) as failed:
        compile(jobs, on_failure=partial(keep_replay, folder))

    assert f"tlora-fx replay {folder}" in failed.value.__notes__[-1]
    assert load_replay(folder).name == name
    assert {path.name for path in folder.iterdir()} == {
        "before.py", "error.txt", "graph", "inputs.json", "pipeline.txt", "replay.json",
    }  # fmt: skip
    assert str(run_replay(folder)) == str(failed.value)


@pytest.fixture(scope="module")
def folder(traced, tmp_path_factory):
    """A replay folder of a pass that is whole again."""
    given, states = traced
    path = tmp_path_factory.mktemp("replay")
    runner = Runner(resolve_pipeline())
    event = Event(5, runner.pipeline.passes[4], "group", states.after(4).group)
    write_replay(path, given, event, runner, PassFailed("pass 'fuse-backbone' raised"))
    return path


def test_a_pass_that_was_mended_fails_no_more(folder):
    """The replay says so by giving no error."""
    assert run_replay(folder) is None


def test_the_inputs_are_told_with_the_names_of_their_sizes(folder):
    """And what these were while tracing."""
    told = json.loads((folder / "inputs.json").read_text())

    name = told["inputs"]["input_ids"]["shape"][1]
    assert told["inputs"]["input_ids"] == {"shape": [1, name], "dtype": "int64"}
    assert told["sizes"][name] > 1


def changed(folder, tmp_path, **fields):
    """A copy of the folder whose record says something else."""
    for path in folder.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    record = json.loads((folder / "replay.json").read_text())
    (tmp_path / "replay.json").write_text(json.dumps({**record, **fields}))
    return tmp_path


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"format": 7}, ReplayNotReadable, "another format"),
        ({"format": 1}, ReplayNotReadable, "replay it with the version that wrote it"),
        ({"place": "five"}, ReplayNotReadable, "place"),
        ({"place": 6}, ReplayNotReadable, "does not hold together"),
        ({"place": 1, "name": PASSES[0]}, ReplayNotReadable, "does not hold together"),
        ({"pipeline": "no-such-pass"}, PipelineError, "no-such-pass"),
        (
            {"foreign": [{"name": "gone", "module": "not_installed_here", "package": "gone 1"}]},
            ReplayNotReadable,
            "gone 1",
        ),
    ],
    ids=["format", "before-modules-moved", "type", "place", "graphs", "pipeline", "package"],
)
def test_a_folder_that_cannot_be_replayed_says_why(folder, tmp_path, fields, error, said):
    """Damaged, of another version, or of a package that is gone."""
    path = changed(folder, tmp_path, **fields)

    assert said in error_of(lambda: run_replay(path), error)


def test_a_folder_without_a_record_is_none(tmp_path):
    """Such as a folder of another command."""
    assert "replay.json" in error_of(lambda: load_replay(tmp_path), ReplayNotReadable)


def test_other_versions_are_told(folder, tmp_path):
    """They may be why a pass fails no more."""
    path = changed(folder, tmp_path, versions={"torch": "1.0"})

    assert load_replay(path).other_versions() == [f"torch is {version('torch')}, was 1.0"]


def test_a_folder_that_cannot_be_written_does_not_hide_the_error(jobs, tmp_path, monkeypatch):
    """The error notes that there is none."""
    monkeypatch.setitem(REGISTRY, "tag-roles", faulty("tag-roles", raises))
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(PassFailed) as failed:
        compile(jobs, on_failure=partial(keep_replay, tmp_path / "file" / "replay"))

    assert "no replay folder could be written" in failed.value.__notes__[-1]


def test_what_lies_in_the_way_is_left_alone(jobs, tmp_path, monkeypatch):
    """Another folder beside it is taken."""
    monkeypatch.setitem(REGISTRY, "tag-roles", faulty("tag-roles", raises))
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / "mine.txt").write_text("keep")

    with pytest.raises(PassFailed):
        compile(jobs, on_failure=partial(keep_replay, tmp_path / "replay"))

    assert [path.name for path in (tmp_path / "replay").iterdir()] == ["mine.txt"]
    assert load_replay(tmp_path / "replay-2").name == "tag-roles"


PLUGIN = '''
"""A pass with a fault."""
from dataclasses import dataclass
from typing import ClassVar
from tlora_fx.pipeline import GroupPass

@dataclass(frozen=True, slots=True)
class Gives(GroupPass):
    """Gives up.

    after   how many nodes
    """
    name: ClassVar[str] = "gives-up"
    after: int = 3

    def run(self, group):
        for number, node in enumerate(group.root.nodes):
            if number == self.after:
                raise ValueError("a fault of a stranger")
'''
JOBS = """
base: {config: llama, dtype: float32}
jobs:
  - {name: one, lora: {r: 4, target_modules: [q_proj]}, data: {path: x.jsonl}}
"""


def test_a_strangers_pass_is_replayed_in_a_process_of_its_own(tmp_path):
    """From the command line, by the entry point of another package."""
    save_config(tmp_path, "llama", num_hidden_layers=2)
    (tmp_path / "jobs.yaml").write_text(JOBS)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "quitters.py").write_text(PLUGIN)
    info = tmp_path / "quitters-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quitters\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text("[tlora_fx.passes]\ngives-up = quitters:Gives\n")

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "tlora_fx", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    added = "gives-up{after=4}@after:fuse-backbone"
    compiled = run("compile", "jobs.yaml", "-o", "build", "--add-pass", added)
    replayed = run("replay", "build/replay")

    assert compiled.returncode == replayed.returncode == 1
    (error, *_), (same, *_) = (
        [line for line in ran.stderr.splitlines() if line.startswith("error[")]
        for ran in (compiled, replayed)
    )
    assert error == same == "error[T0216] pass 'gives-up' raised ValueError"
    assert "in pass gives-up on group" in replayed.stderr
    assert load_replay(tmp_path / "build" / "replay").foreign[0].package == "quitters 2.1"
