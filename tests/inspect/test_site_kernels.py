"""The generated kernels in a dump."""

from __future__ import annotations

import re

import pytest

from tlora_fx.codegen.kernels import intact
from tlora_fx.codegen.spec import KINDS
from tlora_fx.inspect.dump import dump, kernel_files


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
