"""From a spec to text: templates, pieces, headers, names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.interpreted import ROOT
from tlora_fx.codegen import catalog
from tlora_fx.codegen.emit import emitter
from tlora_fx.codegen.header import command, intact
from tlora_fx.codegen.source import build, fill, module, piece, stem
from tlora_fx.codegen.spec import KINDS, KernelSpec, Tile

FORMS = [spec for kind in KINDS for spec in catalog.forms(kind)]


def test_marked_lines_stay_where_their_flag_is_true():
    """`#?` takes a flag, its negation, and several of them."""
    text = "a  #? yes\nb  #? no\nc  #? not no\nd  #? yes and not no\ne  #? yes and no\nf"

    assert fill(text, {"yes": True, "no": False}) == "a\nc\nd\nf\n"


def test_blocks_are_kept_or_dropped_whole():
    """`#? flag [` to `#]`, one inside another."""
    text = "#? outer [\na\n#? inner [\nb\n#]\nc\n#]\nd"

    assert fill(text, {"outer": True, "inner": False}) == "a\nc\nd\n"
    assert fill(text, {"outer": False, "inner": True}) == "d\n"


def test_lines_and_blocks_are_repeated_with_their_number():
    """`#* name` counts $k from 0 to below the value."""
    text = "x$k,  #* sites\n#* sites [\na${k}_\n    b  #? deep\n#]"

    assert fill(text, {"sites": 2, "deep": True}) == "x0,\nx1,\na0_\n    b\na1_\n    b\n"


def test_names_are_put_in():
    """$name and ${name}; an unknown one is our own mistake."""
    assert fill("tl.$dtype, ${dtype}s", {"dtype": "float16"}) == "tl.float16, float16s\n"
    with pytest.raises(KeyError):
        fill("$nothing", {})


def test_a_block_without_an_end_is_our_own_mistake():
    """It would swallow the rest of the kernel."""
    with pytest.raises(AssertionError, match="no #]"):
        fill("#? a [\nb", {"a": True})


def test_a_piece_brings_the_pieces_that_it_calls():
    """Callees come first, each once."""
    spec = KernelSpec("pack", 8, 8, arch=80, tile=Tile(1, 1, 1, 1, 1))
    text = module(
        spec, constants={}, signature={}, pieces=["draw_bits", "philox_words"], body="pass"
    )
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]

    assert names == ["philox_multiply", "philox_words", "draw_bits"]


def test_a_piece_is_copied_with_its_decorator():
    """From @triton.jit to the last line of its function."""
    lines = piece("job_of").splitlines()

    assert lines[0] == "@triton.jit"
    assert lines[1].startswith("def job_of(")
    assert lines[-1].startswith("    return ")


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
    body = text[text.index(f"\ndef {spec.kind}(") : text.index(f"\nkernel = {spec.kind}")]
    head, told, _ = body.partition("    await_previous(OVERLAP)\n")
    read = set(re.findall(r"tl\.load\((\w+)", head))
    tables = {"segments", "slots", "ranks", "scales", "thresholds", "keys"}

    assert told
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
def test_an_emitter_says_what_its_kernel_costs(kind):
    """Formulas, and numbers that grow with the tokens or do not depend on them."""
    rules, spec = emitter(kind), build(KernelSpec(kind, 4096, 4096)).spec
    small, large = rules.cost(spec, 1024, 1024 * 16), rules.cost(spec, 8192, 8192 * 16)

    assert rules.flops(spec)
    assert rules.bytes_moved(spec)
    assert all(one <= other for one, other in zip(small, large, strict=True))
    assert large[1] > 0
    assert spec.tile in rules.candidates(spec)


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
