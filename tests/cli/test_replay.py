"""`tlora-fx replay`."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial

import pytest

from tests.cli.test_compile import run
from tests.models import base_of, job
from tests.tools.test_replay import faulty, raises, wrong_tag
from tlora_fx.compiler import compile
from tlora_fx.errors import PassFailed
from tlora_fx.passes import find_passes
from tlora_fx.pipeline import REGISTRY
from tlora_fx.tools.replay import keep_replay, named_modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a faulty tag-roles left."""
    path = tmp_path_factory.mktemp("failed")
    base = base_of(path, "llama", "float32", num_hidden_layers=2)
    find_passes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTRY, "tag-roles", faulty("tag-roles", raises))
        with pytest.raises(PassFailed):
            compile(
                [job("a", base, r=2, target_modules=["q_proj"])],
                on_failure=partial(keep_replay, path / "replay"),
            )
    return path / "replay"


def test_the_same_error_exits_with_1(folder, monkeypatch, capsys):
    """With a traceback where one is asked for."""
    monkeypatch.setitem(REGISTRY, "tag-roles", faulty("tag-roles", raises))

    assert run("replay", folder, "--traceback") == 1

    err = capsys.readouterr().err
    assert "pass 2 'tag-roles' on base, alone, with verify=structure" in err
    assert "error[T0216] pass 'tag-roles' raised ValueError" in err
    assert "Traceback" in err
    assert "test_replay.py" in err


def test_a_pass_that_was_mended_exits_with_0(folder, capsys):
    """And is said to fail no more."""
    assert run("replay", folder) == 0

    assert "no longer fails" in capsys.readouterr().out


def test_another_error_is_told_apart(folder, monkeypatch, capsys):
    """The folder remembers which one it was."""
    monkeypatch.setitem(REGISTRY, "tag-roles", faulty("tag-roles", wrong_tag))

    assert run("replay", folder) == 1

    assert "another error than before, which was error[T0216]" in capsys.readouterr().err


def test_a_tag_that_the_file_lacks_is_told_once(folder, tmp_path, capsys):
    """With how many nodes had it."""
    copy = tmp_path / "replay"
    shutil.copytree(folder, copy)
    file = copy / "graph" / "graph.tfx"
    tags = [f"base: add_{number}: hint (mine.Hint)" for number in range(96)]
    lines = [f"left_out({tag!r})\n" for tag in (*tags, "base: mul: why (mine.Why)")]
    file.write_text(file.read_text() + "".join(lines))

    assert run("replay", copy) == 0

    told = [line for line in capsys.readouterr().err.splitlines() if "cannot keep" in line]
    assert told == [
        "warning: a graph file cannot keep this tag: hint (mine.Hint), of 96 nodes",
        "warning: a graph file cannot keep this tag: why (mine.Why), of 1 node",
    ]


def test_a_folder_of_something_else_is_refused(tmp_path, capsys):
    """With the file that was looked for."""
    assert run("replay", tmp_path) == 1

    assert "error[T0229]" in capsys.readouterr().err


@pytest.fixture
def stranger(folder, tmp_path, monkeypatch):
    """A replay folder that names a module, which leaves a mark where it is imported."""
    mark = tmp_path / "mark"
    (tmp_path / "stranger_pass.py").write_text(f"open({str(mark)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    copy = shutil.copytree(folder, tmp_path / "replay")
    file = copy / "replay.json"
    foreign = [{"name": "odd", "module": "stranger_pass", "package": ""}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "foreign": foreign}))
    return copy, mark


def test_a_module_that_a_folder_names_is_not_imported_unasked(stranger, capsys):
    """Where nobody can be asked, it is refused."""
    copy, mark = stranger
    assert run("replay", copy) == 1

    told = capsys.readouterr().err
    assert "error[T0244]" in told
    assert "stranger_pass" in told
    assert not mark.exists()


def test_with_consent_it_is_imported(stranger):
    """It registers nothing, which is another error."""
    copy, mark = stranger
    run("replay", copy, "--yes")

    assert mark.exists()


@pytest.mark.parametrize("hidden", ['was={"form": "os:system"}', '**{"form": "os:system"}'])
def test_a_function_of_a_stored_form_is_named_too(folder, tmp_path, hidden):
    """Graph files hold such names deep inside."""
    copy = shutil.copytree(folder, tmp_path / "replay")
    file = copy / "graph" / "graph.tfx"
    edited, times = re.subn(r"(@ tags\(.*)\)\n", rf"\1, {hidden})\n", file.read_text(), count=1)
    assert times == 1
    file.write_text(edited)

    assert named_modules(copy) == ["os"]
