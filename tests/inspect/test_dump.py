"""The dump folder, and the generated kernels in it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tlora_fx.codegen.kernels import intact
from tlora_fx.codegen.spec import KINDS
from tlora_fx.errors import DumpNotWritable
from tlora_fx.inspect.dump import dump, kernel_files
from tlora_fx.inspect.schema import Program
from tlora_fx.tools.subject import subject_of

FILES = {"ssm.py", "ssm.txt", "ssm.json", "graph.tfx", "program.json", "report.txt", "kernels"}


@pytest.fixture(scope="module")
def folder(quickstart, tmp_path_factory):
    """A dump of the quickstart in a folder that held something before."""
    path = tmp_path_factory.mktemp("build")
    (path / "mine.txt").write_text("mine")
    (path / "ssm.txt").write_text("old")
    dump(quickstart, path)
    return path


def test_a_dump_leaves_other_files_alone(folder):
    """Six files and the kernels come, the user's stay, nothing else is left."""
    assert {path.name for path in folder.iterdir()} == FILES | {"mine.txt"}
    assert (folder / "mine.txt").read_text() == "mine"


def test_a_dump_replaces_an_older_one(folder):
    """The new listing, not the old."""
    assert (folder / "ssm.txt").read_text().startswith("SuperModel")


def test_the_code_of_a_dump_is_what_trains(folder, quickstart):
    """Letter by letter."""
    assert (folder / "ssm.py").read_text() == quickstart.source


def test_the_code_of_a_dump_can_be_imported_alone(folder):
    """`import ssm` in the folder gives a class for each graph."""
    code = "import ssm; ssm.Root(); ssm.Layers_0_3(); ssm.Head()"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr


def test_a_full_disk_leaves_the_old_files_whole(folder, quickstart, monkeypatch):
    """The error names the folder, and no half file lies there."""
    before = _contents(folder)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tlora_fx.durable.os.fsync", full)
    with pytest.raises(DumpNotWritable, match="No space left"):
        dump(quickstart, folder)

    assert _contents(folder) == before


def _contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if "__pycache__" not in path.parts}


def test_a_file_in_the_way_is_a_clear_error(quickstart, tmp_path):
    """The folder's name is taken by a file."""
    (tmp_path / "build").write_text("")

    with pytest.raises(DumpNotWritable):
        dump(quickstart, tmp_path / "build")


def test_stages_are_written_in_their_order(quickstart, quickstart_stages, tmp_path):
    """Numbered, each as data and to read; those of an earlier dump go."""
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes/99-gone.json").write_text("old")
    (tmp_path / "passes/mine.md").write_text("mine")
    dump(quickstart, tmp_path, quickstart_stages)
    names = sorted(path.name for path in (tmp_path / "passes").iterdir())

    assert names[:2] == ["00-trace.json", "00-trace.txt"]
    assert "05-fuse-backbone.json" in names
    assert "99-gone.json" not in names
    assert "mine.md" in names


def test_a_dump_without_stages_shows_none_of_an_earlier_one(
    quickstart, quickstart_stages, tmp_path
):
    """The views would show another compilation's; the user's files stay."""
    dump(quickstart, tmp_path, quickstart_stages)
    (tmp_path / "passes/mine.md").write_text("mine")

    dump(quickstart, tmp_path)

    assert subject_of(tmp_path).stages == []
    assert [path.name for path in (tmp_path / "passes").iterdir()] == ["mine.md"]


def test_written_stages_are_read_back(quickstart, quickstart_stages, quickstart_listing, tmp_path):
    """As they were recorded, with what the job file calls the base."""
    dump(quickstart, tmp_path, quickstart_stages)
    found = subject_of(tmp_path).stages

    assert [stage.text for stage in found] == [stage.text for stage in quickstart_stages]
    assert found[5].program.graphs == quickstart_stages[5].program.graphs
    assert {stage.program.base for stage in found} == {Program.load(tmp_path).base}


@pytest.fixture(scope="module")
def files(quickstart):
    """The kernels of the quickstart by file name."""
    return kernel_files(quickstart.group)


def test_every_site_has_its_kernels_once(files):
    """Equal layers and equal sites share them; q, k and v share the read of x, gate and up too."""
    starts = [name.rpartition("_")[0] for name in files]

    assert len(set(starts)) == len(starts)
    assert "forward_128x128_fp32_r16_sm90" in starts
    assert "shrink_128x128_fp32_r16_drop_x3_sm90" in starts
    assert "shrink_128x352_fp32_r16_drop_x2_sm90" in starts
    assert "input_gradient_128x64_fp32_r16_drop_add_sm90" in starts
    assert "expand_352x352_fp32_r16_sm90" in starts


def test_all_kinds_of_a_step_are_there(files):
    """Forward and backward, of both plans."""
    kinds = {re.match(r"[a-z_]+(?=_\d)", name)[0] for name in files}

    assert kinds == set(KINDS)


def test_a_dump_holds_the_kernels_of_its_model_only(files, quickstart, tmp_path):
    """Those of an earlier dump go, what is not ours stays."""
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "forward_8x8_bf16_r16_sm90_01234567.py").write_text("old")
    (kernels / "mine.py").write_text("mine")
    dump(quickstart, tmp_path)

    assert {path.name for path in kernels.iterdir()} == {*files, "mine.py"}
    assert all(intact((kernels / name).read_text()) for name in files)
