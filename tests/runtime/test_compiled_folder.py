"""`tlora_fx.load`: a compiled folder runs and trains in a process of its own."""

from __future__ import annotations

import importlib
import json
import shutil
import sys

import pytest
import safetensors.torch
import torch

import tlora_fx
from tests import fresh
from tests.models import base_of, error_of, job, restart, row_of, tokens
from tlora_fx.compiler import compile, resolve_pipeline
from tlora_fx.errors import FolderNotLoadable
from tlora_fx.inspect.dump import dump
from tlora_fx.model.saved import load_program, save_program
from tlora_fx.passes import find_passes
from tlora_fx.pipeline import load_extension, registry
from tlora_fx.runtime.adapters.files import base_tensors

# An author's file: an operator with a backward, its token rule, and a pass that puts it in.
MINE = '''
"""Norms, scaled by an operator of somebody's own."""
from dataclasses import dataclass
from typing import ClassVar
import torch
from tlora_fx.passes.token_parallel.rules import rule
from tlora_fx.pipeline import GroupPass, register
from tlora_fx.rewriting import Rewriter


@torch.library.custom_op("mine_of_load::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@scaled.register_fake
def _(x, by):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.by = inputs[1]


scaled.register_autograd(lambda ctx, dy: (dy * ctx.by, None), setup_context=_setup)


@rule(torch.ops.mine_of_load.scaled)
def _axis(node, axis_of):
    return axis_of(node.args[0])


@register
@dataclass(frozen=True, slots=True)
class ScaleNorm(GroupPass):
    """Scale what the last norm gives."""

    name: ClassVar[str] = "scale-norm-of-load"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})

    by: float = 1.0

    def run(self, group):
        norm = [n for n in group.root.nodes if n.meta.get("path") == "model.norm"][-1]
        Rewriter(group.root).insert_after(
            norm, lambda make: make(torch.ops.mine_of_load.scaled.default, norm, self.by)
        )
'''
TRAIN = """
import json, sys, safetensors.torch, torch, tlora_fx
from tlora_fx.model.batch import JobTokens, pack

tensors = safetensors.torch.load_file({weights!r}) if {weights!r} else None
model = tlora_fx.load({folder!r}, tensors)
for parameters in map(model.job_parameters, model.group.job_names):
    for name, parameter in sorted(parameters.items()):
        torch.nn.init.constant_(parameter, 0.01)
row = pack([JobTokens(*[[part] for part in (ids, ids)], seed=0, step=0) for ids in {ids!r}])
losses = []
for step in range(3):
    sums = model(row)
    losses.append(sums.tolist())
    for own in model.group.job_names:
        for parameter in model.job_parameters(own).values():
            parameter.grad.zero_()
    sums.sum().backward()
    with torch.no_grad():
        for own in model.group.job_names:
            for parameter in model.job_parameters(own).values():
                parameter -= 0.1 * parameter.grad
print(json.dumps(losses))
"""
IDS = [[3, 4, 5, 9], [7, 2]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The folder of a model with the operator, beside the author's file and the base's weights."""
    folder = tmp_path_factory.mktemp("load")
    (folder / "mine_of_load.py").write_text(MINE)
    find_passes()  # else those that are found within are forgotten behind it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))
        load_extension(folder / "mine_of_load.py")
        base = base_of(folder, "llama", num_hidden_layers=2)
        jobs = [job("a", base, r=2, target_modules=["q_proj"]),
                job("b", base, r=3, target_modules=["up_proj"], lora_dropout=0.2)]  # fmt: skip
        added = ["scale-norm-of-load@after:fuse-backbone"]
        model = compile(jobs, resolve_pipeline(None, added))
        dump(model, folder / "model")
        tensors = dict(base_tensors(model.backbone).items())
        safetensors.torch.save_file(tensors, folder / "weights.safetensors")
        tensors["lm_head.weight"] = 2 * tensors["lm_head.weight"]
        safetensors.torch.save_file(tensors, folder / "doubled.safetensors")
    return folder


def losses_of(folder, weights=""):
    """What a process of its own finds in three steps."""
    code = TRAIN.format(folder=str(folder), weights=str(weights), ids=IDS)
    told = fresh.run("-c", code, cwd=folder)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


def here(folder):
    """The same in this process."""
    return tlora_fx.load(folder)


def test_the_code_imports_what_it_uses(compiled):
    """And says what a load needs."""
    text = (compiled / "model" / "ssm.py").read_text()

    assert "import mine_of_load  # mine_of_load::scaled" in text
    assert "To load it takes torch, tlora_fx, mine_of_load" in text


def test_a_folder_trains_in_another_process_also_after_an_edit(compiled, tmp_path):
    """The edited code is what runs: a norm scaled by 2 trains as a head of twice the weights."""
    edited = shutil.copytree(compiled / "model", tmp_path / "edited")
    text = (edited / "ssm.py").read_text()
    assert text.count("mine_of_load.scaled.default(norm_mul_2, 1.0)") == 1
    (edited / "ssm.py").write_text(text.replace("(norm_mul_2, 1.0)", "(norm_mul_2, 2.0)"))

    plain, changed = losses_of(compiled / "model"), losses_of(edited)
    doubled = losses_of(compiled / "model", compiled / "doubled.safetensors")

    assert changed == doubled != plain
    assert all(after < before for before, after in zip(plain[0], plain[2], strict=True))


def test_weights_are_found_by_their_paths(compiled):
    """Given as tensors they are those that the jobs name, and so is all else."""
    tensors = safetensors.torch.load_file(compiled / "weights.safetensors")
    given, named = tlora_fx.load(compiled / "model", tensors), tlora_fx.load(compiled / "model")
    parts = [tokens([4, 3]), tokens([5], seed=1)]
    restart(given)
    restart(named)

    assert torch.equal(given(row_of(given, parts)), named(row_of(named, parts)))


def test_an_exported_program_imports_what_it_calls(compiled, monkeypatch):
    """Its file says which module registers the operator."""
    model = tlora_fx.load(compiled / "model")
    row = row_of(model, [tokens([4, 3]), tokens([5], seed=1)])
    save_program(model.export(max_targets=30), compiled / "ssm.pt2")
    torch.save(row.tensors(), compiled / "row.pt")
    code = (
        "import torch\nfrom tlora_fx.model.saved import load_program\n"
        "row = torch.load('row.pt')\n"
        "print(load_program('ssm.pt2').module()(**row).tolist())"
    )

    told = fresh.run("-c", code, cwd=compiled)

    assert told.returncode == 0, told.stderr
    losses = torch.tensor(json.loads(told.stdout.splitlines()[-1]), dtype=torch.float64)
    torch.testing.assert_close(losses, model(row).detach(), rtol=1e-12, atol=1e-12)


def test_a_file_that_is_no_program_is_refused(tmp_path):
    """As what it is."""
    (tmp_path / "ssm.pt2").write_bytes(b"PK")

    assert "no exported model" in error_of(
        lambda: load_program(tmp_path / "ssm.pt2"), FolderNotLoadable
    )


def refused(folder, **given):
    """Why a folder is not loaded."""
    return error_of(lambda: tlora_fx.load(folder, **given), FolderNotLoadable)


def test_a_module_that_is_missing_is_named(compiled, tmp_path, monkeypatch):
    """With what the model calls of it; its file may be named."""
    folder = shutil.copytree(compiled / "model", tmp_path / "away")
    text = (folder / "model.json").read_text()
    (folder / "model.json").write_text(text.replace("mine_of_load", "mine_elsewhere"))

    told = refused(folder)

    assert "mine_elsewhere" in told
    assert "mine_elsewhere::scaled" in told
    assert "extensions" in told


def test_a_module_is_found_by_its_file(compiled, monkeypatch):
    """Also where no path of Python leads to it."""
    file = compiled / "mine_of_load.py"
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(compiled)])
    assert importlib.import_module("mine_of_load").__file__ == str(file)

    assert tlora_fx.load(compiled / "model").ready


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text.replace("class Root", "class Tree"), "KeyError"),
        (lambda text: text.replace("return losses", "return losses("), "SyntaxError"),
        (lambda text: "import nothing_of_this_name\n" + text, "line   1"),
    ],
    ids=["class", "syntax", "import"],
)
def test_code_that_does_not_run_is_told(compiled, tmp_path, damage, told):
    """With the line."""
    folder = shutil.copytree(compiled / "model", tmp_path / "damaged")
    (folder / "ssm.py").write_text(damage((folder / "ssm.py").read_text()))

    assert told in refused(folder)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 7}'])
def test_a_folder_of_something_else_is_refused(tmp_path, text):
    """By the file that is wrong."""
    (tmp_path / "model.json").write_text(text)

    assert "model.json" in refused(tmp_path)
