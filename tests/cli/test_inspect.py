"""`tlora-fx inspect`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tlora_fx.cli import main
from tlora_fx.inspect.schema import Listing
from tlora_fx.inspect.screen import show
from tlora_fx.inspect.text import render_text

DATA = (Path(__file__).parents[1] / "golden/inspect/quickstart.json").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """A folder with a dump's data."""
    (tmp_path / "ssm.json").write_text(DATA, encoding="utf-8")
    return tmp_path


def screen(width: int = 120) -> str:
    """The listing as a terminal of many colours gets it."""
    out = StringIO()
    show(
        Listing.from_json(DATA),
        Console(file=out, width=width, force_terminal=True, color_system="truecolor"),
    )
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


def test_inspecting_needs_no_torch(folder):
    """Neither does the list of commands."""
    code = (
        "import sys\nfrom tlora_fx.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    for arguments in (["inspect", str(folder)], ["--help"]):
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
