"""From a spec to the text of its kernel: headers and names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.check_kernels import forms
from tests.interpreted import ROOT
from tlora_fx.codegen.kernels import build, command, emitter, expand, intact, shrink, stem
from tlora_fx.codegen.spec import KINDS, KernelSpec, Tile

FORMS = [spec for kind in KINDS for spec in forms(kind)]


@pytest.mark.parametrize("spec", FORMS, ids=stem)
def test_a_generated_module_is_python_that_says_what_it_is(spec):
    """It holds launch and a kernel of its kind, its header is intact, its name says the spec."""
    generated = build(spec)
    tree = ast.parse(generated.text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    signature = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SIGNATURE"
    )

    assert {spec.kind, "launch"} <= set(functions)
    assert f"\nkernel = {spec.kind}\n" in generated.text
    assert [told.arg for told in functions[spec.kind].args.args] == list(signature)
    assert intact(generated.text)
    assert generated.name.startswith(f"{stem(spec)}_")
    assert f"# {spec.kind}: " in generated.text


@pytest.mark.parametrize("spec", FORMS, ids=stem)
def test_a_kernel_waits_for_the_one_before_ahead_of_all_but_tables(spec):
    """Also before a program without work ends; older architectures have no such wait."""
    text = build(spec).text
    kernel = text[text.index(f"\ndef {spec.kind}(") : text.index(f"\nkernel = {spec.kind}")]
    # Of several sites each program serves one, in a function that waits.
    waiting = [part for part in text.split("\n@triton.jit") if "    await_previous(OVER" in part]
    head, told, _ = waiting[0].partition("    await_previous(OVERLAP)\n")
    head += kernel.partition("    await_previous(OVERLAP)\n")[0]
    read = set(re.findall(r"tl\.load\((\w+)", head))
    tables = {"segments", "slots", "ranks", "bounds", "scales", "thresholds", "keys"}

    assert told
    assert len(waiting) == 1
    assert {name.rstrip("_0123456789") for name in read} <= tables
    assert "tl.store" not in head
    assert "return" not in head
    assert "OVERLAP" not in build(replace(spec, arch=80)).text


def test_generated_text_is_formatted_as_the_project_is(tmp_path):
    """`ruff format` has nothing to change in any form of any kind."""
    pytest.importorskip("ruff")
    for spec in FORMS:
        (tmp_path / f"{stem(spec)}.py").write_text(build(spec).text)
    style = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--diff", *style, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_tuning_tries_the_tile_of_the_rule(kind):
    """It is one of the candidates."""
    spec = build(KernelSpec(kind, 4096, 4096)).spec

    assert spec.tile in emitter(kind).candidates(spec)


def test_two_specs_have_two_names():
    """Also where only the tile differs."""
    spec = KernelSpec("pack", 64, 64)
    tile = Tile(rows=16, columns=256, depth=0, warps=4, stages=2)

    assert build(spec).name != build(replace(spec, tile=tile)).name
    assert build(spec).name != build(replace(spec, arch=80)).name


def test_the_command_of_the_header_names_every_field():
    """Each field that is not as by default becomes an option."""
    spec = KernelSpec("shrink", 64, 32, dtype="float16", dropout=True, sites=3, extend="tail")

    assert command(spec) == (
        "tlora-fx kernels show shrink --in 64 --out 32 --dtype float16 --dropout --sites 3 "
        "--extend tail"
    )


def test_an_altered_text_is_not_intact():
    """Neither with a changed body nor without a header."""
    text = build(KernelSpec("pack", 64, 64)).text

    assert not intact(text.replace("jobs", "work"))
    assert not intact(text.partition("import triton")[2])


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, 4096),
        ({"dropout": True}, 65536),
        ({"dropout": True, "sites": 3}, 65536),
        ({"dropout": True, "sites": 4}, 6144),
        ({"dropout": True, "arch": 120}, 6144),
        ({"dropout": True, "inner": 2048}, 6144),
        ({"dropout": True, "rank_block": 64}, 4096),
        ({"dropout": True, "dtype": "float32"}, 0),
    ],
    ids=[
        "plain", "masks", "three sites", "four sites", "Blackwell", "narrow x", "wide", "float32",
    ],
)  # fmt: skip
def test_few_tokens_leave_shares(fields, most):
    """Up to a number of tokens, or at any number; tuning tries them too."""
    spec = KernelSpec("shrink", **{"inner": 4096, "outer": 4096} | fields)
    shared = [tokens for tokens in (0, 1024, 4096, 5000, 6144, 65536) if is_shared(spec, tokens)]

    assert max(shared, default=0) == most
    assert bool(shrink.split_candidates(spec)) == bool(most)


def is_shared(spec, tokens):
    """Whether the rule's tile for so many tokens leaves shares of S."""
    return shrink.tile_for(spec, tokens, width=16).slab > 0


@given(
    outer=st.integers(1, 300).map(lambda count: 16 * count),
    tokens=st.integers(1, 70_000),
    sites=st.integers(1, 4),
    block=st.sampled_from([16, 32, 64]),
    drops=st.booleans(),
)
def test_few_tokens_are_expanded_in_narrower_slabs(outer, tokens, sites, block, drops):
    """Whole tiles, never wider than the rule's; masks keep it; never fewer programs."""
    spec = KernelSpec("expand", outer, outer, rank_block=block, sites=sites, dropout=drops)
    rule, tile = expand.default_tile(spec), expand.tile_for(spec, tokens)

    assert tile == replace(rule, slab=tile.slab)
    assert tile.columns <= tile.slab <= rule.slab
    assert tile.slab % tile.columns == 0
    assert tile.slab <= expand.tile_for(spec, tokens + 1000).slab
    if drops:
        assert tile == rule
    elif tile.slab < rule.slab:
        rows = -(-tokens // rule.rows)
        assert rows * -(-outer // rule.slab) < 1024
