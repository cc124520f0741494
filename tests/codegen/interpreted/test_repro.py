"""The scripts of `tlora-fx kernels repro`, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tlora_fx.codegen.spec import KernelSpec
from tlora_fx.testing.kernels import repro_script

SHAPE = {"inner": 64, "outer": 48, "dtype": "float16"}
KINDS = {
    "shrink": {"dropout": True},
    "expand": {"inner": 48, "bias": True},
    "lora_a_backward": {"dropout": True, "whole": True},
}


@pytest.fixture
def run(tmp_path):
    """Run a script: its exit code and what it prints."""

    def go(text):
        script = tmp_path / "repro.py"
        script.write_text(text)
        environment = os.environ | {"TLORA_FX_KERNELS": "interpret"}
        command = [sys.executable, script]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.returncode, done.stdout + done.stderr

    return go


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_equals_float64_on_a_drawn_site(kind, run):
    """And was launched."""
    code, told = run(repro_script(KernelSpec(kind, **SHAPE | KINDS[kind]), 100, (4, 8, 16)))

    assert code == 0, told
    assert told.count("differs from float64 by") == 4


def test_an_edited_kernel_is_the_one_that_runs(run):
    """A scale is lost: what it scaled differs."""
    text = repro_script(KernelSpec("shrink", **SHAPE), 100, (4, 8))
    assert "* scale[k]" in text

    code, told = run(text.replace("* scale[k]", "* 1.0"))

    assert code == 1, told


def test_a_kernel_that_the_site_does_not_take_is_told(run):
    """With what it takes."""
    code, told = run(repro_script(KernelSpec("forward", **SHAPE, dropout=True), 100, (4, 8)))

    assert code == 2, told
    assert "takes\n  KernelSpec(kind='forward'" in told
