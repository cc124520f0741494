"""`tlora-fx inspect`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.inspect.programs import fused, lowered
from tlora_fx.cli import main
from tlora_fx.inspect.marks import show_lines, width_of
from tlora_fx.inspect.program_text import program_lines
from tlora_fx.inspect.schema import Listing, PassStage, Program
from tlora_fx.inspect.text import WIDTH, listing_lines, render_text

DATA = (Path(__file__).parents[1] / "golden/inspect/quickstart.json").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """A folder with a dump's data."""
    (tmp_path / "ssm.json").write_text(DATA, encoding="utf-8")
    return tmp_path


@pytest.fixture
def small(tmp_path):
    """A dump with the data of every node, after two passes and at the end."""
    path = tmp_path / "small"
    (path / "passes").mkdir(parents=True)
    (path / "ssm.json").write_text(DATA, encoding="utf-8")
    (path / "program.json").write_text(lowered().to_json(), encoding="utf-8")
    (path / "ssm.py").write_text("class Layers_0_1(nn.Module):\n    pass\n", encoding="utf-8")
    for place, program in enumerate((fused(), lowered()), 5):
        stage = PassStage(place, program.state, True, 0.1, program)
        (path / f"passes/{place:02d}-{program.state}.json").write_text(stage.to_json())
    return path


def call(*arguments: object) -> int:
    """Run `tlora-fx inspect`; the exit status."""
    with pytest.raises(SystemExit) as end:
        main(["inspect", *map(str, arguments)])
    return int(end.value.code or 0)


def screen(width: int = 120) -> str:
    """The listing as a terminal of many colours gets it."""
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system="truecolor")
    show_lines(listing_lines(Listing.from_json(DATA), width_of(console, WIDTH)), console)
    return out.getvalue()


def test_a_pipe_gets_the_plain_listing(folder, capsys):
    """The same text as ssm.txt, full width, no colour."""
    with pytest.raises(SystemExit) as end:
        main(["inspect", str(folder)])

    assert end.value.code == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == render_text(Listing.from_json(DATA)).splitlines()


def test_json_is_the_data(folder, capsys):
    """As it lies in the folder."""
    with pytest.raises(SystemExit):
        main(["inspect", str(folder), "--json"])

    assert capsys.readouterr().out == DATA


def test_a_folder_without_a_dump_exits_with_1(tmp_path, capsys):
    """The error says how to make one."""
    with pytest.raises(SystemExit) as end:
        main(["inspect", str(tmp_path)])

    assert end.value.code == 1
    assert "error[T0601]" in capsys.readouterr().err


def test_a_terminal_gets_a_colour_a_job(monkeypatch):
    """Orange for the first, sky blue for the second, both beside their glyphs."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = screen()

    assert "\x1b[1;38;2;230;159;0m◆" in text
    assert "\x1b[1;38;2;86;180;233m▲" in text


def test_no_color_is_respected(monkeypatch):
    """Not one colour, and the glyphs still tell the jobs apart."""
    monkeypatch.setenv("NO_COLOR", "1")
    text = screen()

    assert "38;" not in text
    assert "◆" in text


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_screen_fits_the_terminal(width):
    """No line is wider, so nothing wraps."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen(width))

    assert "self_attn.q_proj" in plain
    assert max(map(len, plain.splitlines())) <= width


def test_the_code_is_ssm_py(small, capsys):
    """Into a pipe, letter by letter."""
    assert call(small, "--code") == 0
    assert capsys.readouterr().out == (small / "ssm.py").read_text()


def test_the_code_after_a_pass_shows_its_graphs(small, capsys):
    """By the pass's name."""
    assert call(small, "--after", "fuse-backbone") == 0
    assert "write_1 = tlora_fx.segment_write(write_0, lora_B_1)" in capsys.readouterr().out


def test_the_data_of_every_node_is_printed(small, capsys):
    """As it lies in program.json."""
    assert call(small, "--code", "--json") == 0
    assert Program.from_json(capsys.readouterr().out) == lowered()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_node_is_found_by_any_layers_number(small, capsys, layer):
    """Layers share code, and each has its own path."""
    assert call(small, "--node", f"model.layers.{layer}.mlp.up_proj") == 0
    assert "made by      lower-adapters" in capsys.readouterr().out


def test_a_node_as_data_comes_with_its_ancestors(small, capsys):
    """A list, for a name may stand for several places."""
    assert call(small, "--node", "mlp.up_proj", "--json") == 0
    (place,) = json.loads(capsys.readouterr().out)
    assert place["ancestry"]["base/up_proj:linear"]["made_by"] == "trace"


def test_two_passes_are_compared(small, capsys):
    """Of one dump."""
    assert call(small, "--diff", "fuse-backbone", "lower-adapters") == 0
    assert "launches          19         7          −12" in capsys.readouterr().out


def test_two_dumps_are_compared(small, capsys):
    """By their folders, without a model of their own."""
    assert call("--diff", small, small) == 0
    assert "changes: none" in capsys.readouterr().out


def test_a_difference_is_data_too(small, capsys):
    """With both sums."""
    assert call(small, "--diff", "5", "6", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["before"]["launches"] - found["after"]["launches"] == 12


def test_files_are_written_and_named(small, tmp_path, capsys):
    """Several at once; each is said."""
    files = {name: tmp_path / f"out.{name}" for name in ("html", "graphml", "dot")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]

    assert call(small, *options) == 0
    assert all(path.stat().st_size > 1000 for path in files.values())
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "there is nothing to inspect"),
        (["small", "--code", "--node", "x"], "--code and --node are two views"),
        (["small", "--code", "--dot", "x"], "--code and --dot are two views"),
        (["small", "--json", "--html", "x"], "--json prints data"),
        (["small", "--after", "trace", "--html", "x"], "--after shows one state"),
        (["small", "--add-pass", "x@after:y"], "passes run on a job file"),
    ],
    ids=["nothing", "two-views", "view-and-file", "json-and-file", "after-and-page", "passes"],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(arguments, told, capsys):
    """By name, with what to do."""
    assert call(*arguments) == 1
    error = capsys.readouterr().err
    assert "error[T0605]" in error
    assert told in error


@pytest.mark.parametrize(
    ("options", "code"),
    [(["--node", "mlp.upproj"], "T0603"), (["--after", "fuse-backbon"], "T0604"),
     (["--diff", "fuse-backbone", "nothing"], "T0604")],
    ids=["node", "after", "diff"],
)  # fmt: skip
def test_wrong_names_are_told_the_nearest(small, options, code, capsys):
    """Of a node, of a pass."""
    assert call(small, *options) == 1
    assert f"error[{code}]" in capsys.readouterr().err


def test_a_dump_without_stages_says_how_to_keep_them(folder, capsys):
    """`compile --states`."""
    assert call(folder, "--diff", "fuse-backbone", "lower-adapters") == 1
    error = capsys.readouterr().err
    assert "error[T0604]" in error
    assert "--states" in error


def test_a_dump_of_an_older_version_shows_its_listing_only(folder, capsys):
    """It has no program.json; the error names the file and how to write it."""
    assert call(folder) == 0
    assert call(folder, "--code") == 1
    assert "program.json" in capsys.readouterr().err


def test_a_job_file_is_compiled_for_it(tmp_path, capsys):
    """Without a dump; its passes can be compared at once."""
    file = Path(__file__).parents[2] / "examples/quickstart/jobs.yaml"

    assert call(file, "--diff", "fuse-backbone", "lower-adapters") == 0
    assert "+ multi_lora_linear, 6 tensors · for all 3 jobs" in capsys.readouterr().out


def test_a_node_is_coloured_by_its_job(small, monkeypatch):
    """Glyphs say the same without colour."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = StringIO()
    show_lines(
        program_lines(fused()), Console(file=out, force_terminal=True, color_system="truecolor")
    )

    assert "38;2;230;159;0mlora_A_0" in out.getvalue().replace("    ", "")


def test_inspecting_needs_no_torch(folder, small):
    """Neither does the list of commands."""
    code = (
        "import sys\nfrom tlora_fx.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    views = ([], ["--code"], ["--node", "norm"], ["--diff", "5", "6"], ["--dot", str(small / "x")])
    for arguments in (["--help"], *(["inspect", str(small), *view] for view in views)):
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
