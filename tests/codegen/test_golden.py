"""What generated kernels read like: accepted files, one a kind at least."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from tests.interpreted import ROOT
from tlora_fx.codegen.kernels import build, shrink, stem
from tlora_fx.codegen.spec import KINDS, Extend, KernelSpec, Tile

EXTENDS: tuple[Extend, ...] = get_args(Extend)

SPECS = [
    KernelSpec("pack", 4096, 4096),
    KernelSpec("pack", 4096, 4096, extend="tail"),
    KernelSpec("shrink", 4096, 4096, dropout=True),
    KernelSpec("shrink", 4096, 4096, sites=2),
    KernelSpec("shrink", 4096, 4096, tile=Tile(32, 16, 128, 4, 5, slab=512)),
    KernelSpec("shrink", 14336, 4096, gated="silu", tile=Tile(16, 16, 128, 4, 4, slab=2048)),
    KernelSpec("forward", 4096, 14336),
    KernelSpec("forward", 768, 2304, dtype="float16", bias=True, weight_layout="in_out"),
    KernelSpec("input_gradient", 4096, 14336, dropout=True),
    KernelSpec("lora_b_backward", 4096, 4096),
    KernelSpec("sum_ds", 4096, 4096),
    KernelSpec("sum_s", 4096, 4096, sites=2, beside=(1024,), extend="tail"),
    KernelSpec("lora_a_backward", 4096, 4096, dropout=True),
    KernelSpec("sum_gradients", 4096, 4096),
    KernelSpec("expand", 4096, 4096, dropout=True, accumulate=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=stem)
def test_a_generated_kernel_reads_as_accepted(spec, golden):
    """Its file, without the hash of its name."""
    golden(f"kernels/{stem(spec)}.py", build(spec).text)


def test_every_kind_has_an_accepted_file_and_no_file_is_left_over():
    """The folder holds the specs of this test, nothing else."""
    files = {path.stem for path in (Path(ROOT) / "tests/golden/kernels").glob("*.py")}

    assert files == {stem(spec) for spec in SPECS}
    assert {spec.kind for spec in SPECS} == set(KINDS)


def test_the_rule_of_shrink_reads_as_accepted(golden):
    """The tile of each spec that the rule tells apart: a wrong line of its table shows here."""
    lines = []
    for block, drops, sites, extend in product((16, 32), (False, True), (1, 2, 3, 4), EXTENDS):
        spec = KernelSpec(
            "shrink", 4096, 4096, rank_block=block, dropout=drops, sites=sites, extend=extend
        )
        tiles = [shrink.default_tile(replace(spec, arch=arch)) for arch in (80, 90, 100)]
        cuts = (f"{t.rows}x{t.columns}x{t.depth} {t.warps} warps {t.stages} stages" for t in tiles)
        masks = "masks" if drops else "plain"
        lines.append(f"{block} {masks} {sites} {extend or '-':4}  {'  '.join(cuts)}")

    golden("kernels/shrink_tiles.txt", "\n".join(lines) + "\n")
