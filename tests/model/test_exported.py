"""An exported program is right on every row, and needs no more than torch and the operators."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import fresh
from tests.models import (
    base_of,
    error_of,
    hand_written,
    job,
    plain,
    ready,
    row_of,
    run_fused,
    tokens,
)
from tlora_fx.compiler import compile
from tlora_fx.errors import SuperModelMisuse

ROOT = Path(__file__).parents[2]
ROWS = [([5, 4], [6], [3, 9]), ([1], [1], [30]), ([], [12], [4, 4]), ([2], [], []), ([1], [], [])]
LOAD = """
import sys
import torch
import tlora_fx.ops

program = torch.export.load("ssm.pt2").module()
torch.save([program(**row).detach() for row in torch.load("rows.pt")], "losses.pt")
print(sorted(name for name in ("transformers", "peft", "tlora_fx.ir.graph") if name in sys.modules))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of two layers."""
    return base_of(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(base):
    """A plain job, one with DoRA that runs as it is, one with dropout; adapters on the head too."""
    kinds = [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.5},
    ]
    return ready([job(f"j{n}", base, r=3, **kind) for n, kind in enumerate(kinds)])


@pytest.fixture(scope="module")
def program(model):
    """The model, exported with a loss in six chunks."""
    loss = model.net.loss
    chunk_rows, loss.chunk_rows = loss.chunk_rows, 5
    try:
        return model.export(max_targets=30)
    finally:
        loss.chunk_rows = chunk_rows


def mixes():
    return [[tokens(n, seed=s) for s, n in enumerate(row)] for row in ROWS]


def losses_of(model, parts):
    with torch.no_grad():
        return model(row_of(model, parts))


@pytest.mark.parametrize("place", range(len(ROWS)))
def test_a_program_gives_the_models_losses_on_rows_of_any_size(model, program, place):
    """Also for jobs without tokens, with a single target, and with none at all."""
    parts = mixes()[place]
    found = program.module()(**row_of(model, parts).tensors())

    torch.testing.assert_close(found, losses_of(model, parts), rtol=1e-12, atol=1e-12)


def test_a_program_gives_the_models_gradients(model, program):
    """Its parameters are the model's, by name, and train alike."""
    parts = mixes()[0]
    run_fused(model, parts)
    expected = {n: p.grad for n, p in model.net.named_parameters() if p.requires_grad}

    module = program.module()
    module(**row_of(model, parts).tensors()).sum().backward()

    found = {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_a_saved_program_runs_in_a_process_of_torch_and_the_operators(model, program, tmp_path):
    """Loading imports neither transformers nor PEFT, and the losses are the same."""
    torch.export.save(program, tmp_path / "ssm.pt2")
    rows = [row_of(model, parts).tensors() for parts in mixes()]
    torch.save(rows, tmp_path / "rows.pt")

    told = subprocess.run(
        [sys.executable, "-c", LOAD], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == "[]"
    found = torch.load(tmp_path / "losses.pt")
    for parts, losses in zip(mixes(), found, strict=True):
        torch.testing.assert_close(losses, losses_of(model, parts), rtol=1e-12, atol=1e-12)


def test_a_program_is_flat(program):
    """Layers are inlined: no node calls a module."""
    assert {node.op for node in program.graph.nodes} <= {"placeholder", "call_function", "output"}


def test_a_compiled_model_exports_as_it_did_before(base):
    """What was compiled in place is exported as the code that it was compiled from."""
    model = ready([job("one", base, r=2, target_modules=["q_proj"])])
    model.compile(backend="eager")
    parts = [tokens([5, 3])]

    found = model.export().module()(**row_of(model, parts).tensors())

    torch.testing.assert_close(found, losses_of(model, parts), rtol=1e-12, atol=1e-12)


def test_exporting_leaves_the_models_loss_as_it_was(model, program):
    """Its chunks are those of the row again."""
    assert model.net.loss.pieces is None


def test_batch_form_exports_too():
    """A base that mixes tokens takes padded lines of any number and length."""
    model = ready(hand_written(plain()))
    assert model.group.form == "batch"
    module = model.export().module()

    for parts in ([tokens([5, 4, 3])], [tokens([9])], [tokens([])]):
        found = module(**row_of(model, parts).tensors())
        torch.testing.assert_close(found, losses_of(model, parts), rtol=1e-9, atol=1e-12)


def test_a_model_without_weights_is_not_exported(base):
    """The error says what to call."""
    empty = compile([job("one", base, r=2, target_modules=["q_proj"])])

    assert "materialize()" in error_of(empty.export, SuperModelMisuse)


def test_the_pages_example_exports_and_loads(tmp_path):
    """Both blocks of the section run, each in a process of its own, and print the same losses."""
    page = (ROOT / "docs" / "torch-compile.md").read_text(encoding="utf-8")
    section = page.partition("\n## Export\n")[2].partition("\n## ")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = []
    for code in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
        told = fresh.run("-c", code, cwd=tmp_path)
        assert told.returncode == 0, told.stderr
        printed.append(json.loads(told.stdout.splitlines()[-1]))

    assert len(printed) == 2
    assert printed[0] == pytest.approx(printed[1], rel=1e-5)


@pytest.mark.slow
def test_aotinductor_compiles_an_exported_program(tmp_path):
    """For inference, in rows of other lengths too; the operators of ours are called."""
    base = base_of(tmp_path, "llama", "float32", num_hidden_layers=1)
    model = ready([job(name, base, r=2, target_modules=["q_proj"]) for name in ("one", "two")])
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(
            model.export(), package_path=str(tmp_path / "ssm.pt2")
        )
        package = torch._inductor.aoti_load_package(path)

        for lengths in ([3], [5, 4]):
            row = row_of(model, [tokens(lengths)] * 2)
            assert torch.allclose(package(**row.tensors()), model(row), rtol=1e-5)
