"""The scripts of `tlora-fx kernels repro`: one in a process of its own, the others here."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest

from tlora_fx.codegen import loading
from tlora_fx.codegen.spec import KernelSpec
from tlora_fx.ops.kernels import launch
from tlora_fx.testing.kernels import repro_script

SHAPE = {"inner": 64, "outer": 48, "dtype": "float16"}
KINDS = {
    "shrink": {"dropout": True},
    "expand": {"inner": 48, "bias": True},
    "lora_a_backward": {"dropout": True, "whole": True},
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a script in this process, which knows no kernel: its exit code and what it prints."""
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.setenv("TLORA_FX_KERNELS", "interpret")

    def forget():
        launch.kernel.cache_clear()
        launch.loaded.cache_clear()

    def go(text):
        script = tmp_path / f"{tmp_path.name}.py"  # modules are known by their files' names
        script.write_text(text)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        return ended.value.code, capsys.readouterr().out

    forget()
    yield go
    forget()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_equals_float64_on_a_drawn_site(kind, run):
    """And was launched."""
    code, told = run(repro_script(KernelSpec(kind, **SHAPE | KINDS[kind]), 100, (4, 8, 16)))

    assert code == 0, told
    assert told.count("differs from float64 by") == 4


@pytest.fixture
def edited():
    """A script whose kernel has lost a scale."""
    text = repro_script(KernelSpec("shrink", **SHAPE), 100, (4, 8))
    assert "* scale[k]" in text
    return text.replace("* scale[k]", "* 1.0")


def test_an_edited_kernel_is_the_one_that_runs(run, edited):
    """What was scaled differs."""
    code, told = run(edited)

    assert code == 1, told
    assert told.count("differs from float64 by") == 4


@pytest.mark.slow
def test_a_script_runs_by_itself(tmp_path, edited):
    """As a user starts it."""
    script = tmp_path / "repro.py"
    script.write_text(edited)

    done = subprocess.run(
        [sys.executable, script],
        capture_output=True, text=True, check=False,
        env=os.environ | {"TLORA_FX_KERNELS": "interpret"},
    )  # fmt: skip

    assert done.returncode == 1, done.stderr
    assert done.stdout.count("differs from float64 by") == 4


def test_a_kernel_that_the_site_does_not_take_is_told(run):
    """With what it takes."""
    code, told = run(repro_script(KernelSpec("forward", **SHAPE, dropout=True), 100, (4, 8)))

    assert code == 2, told
    assert "takes\n  KernelSpec(kind='forward'" in told
