"""`tlora-fx kernels`: what a user sees of generated kernels."""

from __future__ import annotations

import re

import pytest

from tlora_fx.cli import main
from tlora_fx.codegen.kernels import build, command
from tlora_fx.codegen.loading import stored
from tlora_fx.codegen.spec import KINDS, KernelSpec, Tile
from tlora_fx.ops.kernels import select

PACK = ("pack", "--in", "4096", "--out", "14336")


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A cache of this test, and a terminal of one width."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")


def said(capsys, *words):
    """What `tlora-fx kernels` prints, says on stderr, and its exit status."""
    with pytest.raises(SystemExit) as stop:
        main(["kernels", *words])
    captured = capsys.readouterr()
    return captured.out, captured.err, stop.value.code


def test_kinds_and_cached_files_are_listed(capsys):
    """Each kind with what it does; each file with its size."""
    path = stored(build(KernelSpec("pack", 64, 32)))
    out, _, status = said(capsys, "list")

    assert status == 0
    assert all(f"\n{kind} " in f"\n{out}" for kind in KINDS)
    assert "1 generated in" in out
    assert path.name in out
    assert f"{path.stat().st_size:,}" in out


def test_a_kernel_is_shown(capsys):
    """The text that would be cached, and nothing else."""
    out, _, status = said(capsys, "show", *PACK, "--extend", "tail")

    assert status == 0
    assert out == build(KernelSpec("pack", 4096, 14336, extend="tail")).text


def test_a_script_that_compares_a_kernel_with_float64_is_printed(capsys):
    """Of the kernel's code and a call; tests/codegen/interpreted runs such scripts."""
    out, _, status = said(capsys, "repro", *PACK, "--tokens", "40", "--ranks", "4,8")

    assert status == 0
    assert out.startswith(build(KernelSpec("pack", 4096, 14336)).text)
    assert "tokens=40, ranks=(4, 8)" in out
    compile(out, "repro.py", "exec")


def test_the_command_in_a_header_prints_the_same_text(capsys):
    """Also with a tile, a type and flags that are not as by default."""
    spec = KernelSpec("expand", 768, 2304, dtype="float16", dropout=True, accumulate=True, arch=80)
    generated = build(spec)
    out, _, _ = said(capsys, *command(generated.spec).split()[2:])

    assert out == generated.text


def test_a_kernel_is_explained(capsys):
    """Spec, tile and its rule."""
    out, _, status = said(capsys, "explain", *PACK, "--ranks", "8,8", "--tokens", "1000")

    assert status == 0
    assert "KernelSpec(kind='pack', inner=4096, outer=14336" in out
    assert "tile  by the rule, for nothing like it was measured on NVIDIA H200" in out


def test_the_kernel_of_the_given_ranks_and_tokens_is_explained(capsys):
    """Large ranks are padded to wider blocks, and few tokens are cut into narrower slabs."""
    words = ("explain", "expand", "--in", "3072", "--out", "3072", "--gpu", "My GPU")
    few, _, _ = said(capsys, *words, "--ranks", "8,64", "--tokens", "1280")
    many, _, _ = said(capsys, *words, "--ranks", "8,16", "--tokens", "65536")

    assert "rank_block=32" in few
    assert re.search(r"^ +slab +128", few, re.MULTILINE)
    assert "rank_block" not in many
    assert re.search(r"^ +slab +512", many, re.MULTILINE)


def test_a_given_tile_is_explained_as_given(capsys):
    """The rule has nothing to say about it."""
    out, _, _ = said(capsys, "explain", *PACK, "--tile", "16,256,0,4,2")

    assert "tile  given with --tile" in out


def test_a_measured_tile_and_plan_are_explained(capsys, monkeypatch):
    """They come from the table of the GPU that is named."""
    tile = Tile(rows=64, columns=128, depth=64, warps=4, stages=4)

    def plans(gpu, direction, site, tokens):
        assert (gpu, direction, tokens) == ("My GPU", "forward", 8192)
        return {"fused": select.Measured(7.0, tile, "a table")}

    monkeypatch.setattr(select, "plan_times", plans)
    monkeypatch.setattr(select, "measured_tile", lambda gpu, *_: tile if gpu == "My GPU" else None)
    words = ("explain", "forward", "--in", "4096", "--out", "14336", "--gpu", "My GPU")
    out, _, status = said(capsys, *words)

    assert status == 0
    assert "tile  measured on My GPU" in out
    assert re.search(r"^ +rows +64", out, re.MULTILINE)
    assert "plan  fused, by a table" in out


@pytest.mark.parametrize(
    ("words", "message", "status"),
    [
        (("show", "pak", "--in", "8", "--out", "8"), "nearest  pack", 1),
        (("show", *PACK, "--rank-block", "24"), "a power of two from 16 on", 1),
        (("show", *PACK, "--tile", "1,2"), "rows,columns,depth,warps", 1),
        (("show", *PACK, "--dtype", "int8"), "bfloat16, float16", 1),
        (("show", "pack", "--in", "8"), "--out", 2),
        (("explain", *PACK, "--ranks", "a,b"), "--ranks are numbers", 2),
        (("explain", *PACK, "--ranks", ""), "--ranks are numbers", 2),
        (("explain", *PACK, "--tokens", "-3"), "--tokens", 2),
        (("tune", "4096"), "INxOUT", 2),
    ],
)
def test_wrong_words_are_told(capsys, words, message, status):
    """With what they may be."""
    _, err, code = said(capsys, *words)

    assert code == status
    assert message in err


def test_an_architecture_that_nobody_has_is_refused(capsys):
    """With those that there are."""
    out, err, status = said(capsys, "explain", *PACK, "--arch", "999")

    assert status == 1
    assert "error[T0702] no GPU has compute capability 999" in err
    assert "90 for an H100" in err
    assert out == ""


@pytest.mark.parametrize(
    ("kind", "more", "barred"),
    [
        ("input_gradient", ("--dropout",), ", but not with dropout"),
        ("input_gradient", (), ", where weight and input are extended; not here"),
        ("forward", ("--dropout",), ", where weight and input are extended; not here"),
    ],
)
def test_a_plan_that_cannot_be_taken_says_why(capsys, kind, more, barred):
    """However cheap it would be; those that can be taken say nothing."""
    out, _, _ = said(capsys, "explain", kind, "--in", "4096", "--out", "4096", *more)
    rows = {line.split()[0]: line for line in out.splitlines() if "the frozen product" in line}

    assert rows["concat"].endswith(barred)
    assert all(
        rows[plan].endswith(("frozen product", "in a round")) for plan in ("fused", "sidecar")
    )


@pytest.mark.parametrize(("ranks", "taken"), [("8,16,32,64", True), ("2,4,8,16", False)])
def test_plans_are_shown_with_what_was_measured(capsys, ranks, taken):
    """And with what the choice takes for it: ours is slower in rounds than tables say."""
    shape = ("--in", "4096", "--out", "14336", "--tokens", "4800", "--ranks", ranks)
    out, _, _ = said(capsys, "explain", "forward", *shape)
    rows = {line.split()[0]: line for line in out.splitlines() if "the frozen product" in line}

    assert all(" measured at " in rows[plan] for plan in ("fused", "sidecar"))
    assert (", taken for " in rows["fused"]) == taken
    assert ", taken for " not in rows["sidecar"]
