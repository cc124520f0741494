"""The dump folder, and the generated kernels in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tlora_fx.codegen.kernels import intact
from tlora_fx.codegen.spec import KINDS
from tlora_fx.errors import DumpNotWritable
from tlora_fx.inspect.dump import dump, site_kernels
from tlora_fx.inspect.schema import Program
from tlora_fx.tools.subject import subject_of

ROOT = Path(__file__).parents[2]
FILES = {
    "ssm.py", "ssm.txt", "ssm.json", "graph.tfx", "model.json", "program.json", "report.txt",
    "kernels",
}  # fmt: skip


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


def test_a_full_disk_leaves_the_old_files_whole(folder, quickstart, monkeypatch):
    """The error names the folder, and no half file lies there."""
    before = _contents(folder)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tlora_fx.host.durable.os.fsync", full)
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
    return site_kernels(quickstart.group).files


def test_every_site_has_its_kernels_once(files):
    """Equal layers and equal sites share them; q, k and v share the read of x, gate and up too."""
    starts = [name.rpartition("_")[0] for name in files]

    assert len(set(starts)) == len(starts)
    assert "forward_128x128_fp32_r16_sm90" in starts
    assert "shrink_128x128_fp32_r16_drop_x3_sm90" in starts
    assert "shrink_128x352_fp32_r16_drop_x2_sm90" in starts
    assert "shrink_352x128_fp32_r16_drop_silu_sm90" in starts  # in compiled layers
    assert "shrink_352x128_fp32_r16_drop_sm90" in starts
    assert "input_gradient_128x64_fp32_r16_drop_add_sm90" in starts
    assert "expand_352x352_fp32_r16_sm90" in starts


def test_all_kinds_of_a_step_are_there(files):
    """Forward and backward, of both plans."""
    kinds = {re.match(r"[a-z_]+(?=_\d)", name)[0] for name in files}

    assert kinds == set(KINDS)


def test_the_report_says_which_site_runs_which_file(folder, quickstart, files):
    """Each site's own files, and the eight that q, k and v share; every file has a site."""
    of_sites = site_kernels(quickstart.group).of_sites
    told = " ".join((folder / "report.txt").read_text().partition("in kernels/")[2].split())

    assert {name for own in of_sites.values() for name in own} == set(files)
    shared = {name for name in of_sites["layers_0_3 self_attn.q_proj"] if "_x3_" in name}
    assert len(shared) == 8
    assert shared < set(of_sites["layers_0_3 self_attn.v_proj"])
    for site, own in of_sites.items():
        line = next(line for line in told.split(".py layers") if site.partition(" ")[2] in line)
        assert all(name.removesuffix(".py") in line for name in own)


ALONE = """
import sys
from importlib import import_module
import torch

sys.path.insert(0, "kernels")
names = dict(pair.split("=") for pair in sys.argv[1:])
pack, shrink = (import_module(names[kind]) for kind in ("pack", "shrink"))
rank, tokens, inner, outer = 3, 20, 128, 352
torch.manual_seed(0)
a, b, x = torch.randn(rank, inner), torch.randn(rank, outer), torch.randn(tokens, inner)
packed = [torch.zeros(16, inner), torch.zeros(16, outer), torch.zeros(1, 2)]
small = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
twice = lambda value: [value, value.clone()]
tables = map(twice, (small(0, rank), small(0, 16)))
outputs = [twice(value) for value in packed]
pack.launch(twice(a), twice(b), *tables, 1, *outputs)
packed = [value for value, _ in outputs]
s = [torch.empty(tokens, 16) for _ in range(2)]
bits = [torch.zeros(tokens, inner // 8, dtype=torch.uint8) for _ in range(2)]
two = lambda value: [value, value]
shrink.launch(
    x, two(packed[0]), two(packed[2]), small(0, tokens), torch.zeros(1, 2, dtype=torch.int32),
    torch.arange(tokens, dtype=torch.int32), two(small(0, 16)), two(torch.tensor([0.5])),
    two(small(0)), [1, 2], 1, s, bits,
)
for one in s:
    assert torch.allclose(one[:, :rank], 0.5 * x @ a.t(), atol=1e-5) and not one[:, rank:].any()
print("kernels run")

import ssm
ssm.Root(); ssm.Layers_0_3(); ssm.Head()
print("the code is imported")
"""


@pytest.fixture(scope="module")
def alone(folder, files):
    """What a process says that runs kernels and imports the code, in the folder."""
    pytest.importorskip("triton")
    stems = {"pack": "pack_128x352", "shrink": "shrink_128x352"}
    words = [
        f"{kind}={next(name for name in files if name.startswith(stem))[:-3]}"
        for kind, stem in stems.items()
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_kernels_of_a_dump_run_alone(alone):
    """In Triton's interpreter, without a GPU, the model, or what launches them in training."""
    assert "kernels run" in alone, alone


def test_the_code_of_a_dump_can_be_imported_alone(alone):
    """`import ssm` in the folder gives a class for each graph."""
    assert "the code is imported" in alone, alone


def test_a_dump_holds_the_kernels_of_its_model_only(files, quickstart, tmp_path):
    """Those of an earlier dump go, what is not ours stays."""
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "forward_8x8_bf16_r16_sm90_01234567.py").write_text("old")
    (kernels / "mine.py").write_text("mine")
    dump(quickstart, tmp_path)

    assert {path.name for path in kernels.iterdir()} == {*files, "mine.py"}
    assert all(intact((kernels / name).read_text()) for name in files)
