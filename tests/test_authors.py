"""Three passes written from the documentation alone, as authors would write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_compile import jobs, run  # noqa: F401  (`jobs` is a fixture)
from tlora_fx.compiler import run_passes
from tlora_fx.graph_file import load_graphs, save_graphs

FOLDER = Path(__file__).parent / "authors"
MADE = {"fuse-qkv": "aten.slice.Tensor", "norm-op": "authors.rms_norm", "count-flops": "*T"}


@pytest.fixture(scope="module")
def fused(jobs):  # noqa: F811
    """The jobs as fuse-backbone leaves them."""
    save_graphs(run_passes(jobs, stop_after="fuse-backbone"), jobs.parent / "fused.tfx")
    return jobs.parent / "fused.tfx"


@pytest.mark.parametrize("name", MADE)
def test_a_pass_of_an_author_does_its_work(name, fused, tmp_path):
    """At most 60 lines each; what it makes stands in the graphs, and numbers stay."""
    file = FOLDER / f"{name.replace('-', '_')}.py"
    out = tmp_path / "out.tfx"

    words = ["--pipeline", name, "--verify", "numerics", "--print", "nothing", "-o", out]
    assert run("opt", fused, "--load", file, *words) == 0

    assert len(file.read_text().splitlines()) <= 60
    assert MADE[name] in out.read_text()
    assert list(load_graphs(out).graphs())
