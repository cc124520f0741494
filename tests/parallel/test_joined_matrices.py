"""Matrices that hold q, k and v, or gate and up, one after the other, are cut part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import models
from tests.parallel import tensor_cases as cases
from tests.parallel.processes import run_processes
from tests.parallel.training import parting, train_all
from tests.runtime.groups import VOCABULARY, make_job
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.ir.graph import is_call
from tlora_fx.ir.lora_sites import SEVERAL

# Eight query heads read four key heads: q is twice as wide as k and v.
WIDE = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 64, "num_hidden_layers": 1,
}  # fmt: skip
SHORT = {"max_steps": 2, "save_steps": 1}


def folder_of(path: str) -> Path:
    """Where this process writes configs."""
    return Path(path) / str(dist.get_rank())


def on_two(path: str) -> list[list[str]]:
    """Slices of unequal size, halves by chunk, a matrix that is stored [in, out]."""
    where = folder_of(path)
    phi3 = cases.dropping_jobs(cases.base_of(where, "phi3", num_hidden_layers=1))
    gpt2 = cases.dropping_jobs(cases.base_of(where, "gpt2", n_layer=1))
    return [cases.equal_to_one_process(jobs) for jobs in (phi3, gpt2)]


def on_four(path: str) -> list[list[str]]:
    """One key head, and two query heads, a process; GPT-2 has one head a process."""
    where = folder_of(path)
    phi3 = cases.dropping_jobs(cases.base_of(where, "phi3", **WIDE))
    gpt2 = cases.dropping_jobs(cases.base_of(where, "gpt2", n_layer=1, n_inner=64))
    return [cases.equal_to_one_process(jobs) for jobs in (phi3, gpt2)]


def layers(path: str) -> None:
    """Two layers, also as torch.compile traces them."""
    for family in ("phi3", "gpt2"):
        base = cases.base_of(folder_of(path), family)
        cases.equal_to_one_process(cases.dropping_jobs(base), traced=True)


class Gated(nn.Module):
    """Ids to logits by one layer; two matrices read the same value, and one of them holds three."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.joined = nn.Linear(32, 96)
        self.single = nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Two parts are taken apart, and together; these are parted again."""
        hidden = self.embed(ids)
        x = self.norm(hidden)
        joined, single = torch.tanh(self.joined(x)), self.single(x)
        gate, low = joined[..., :32], joined[..., 32:64]
        one, two = torch.sigmoid(joined[..., 32:]).chunk(2, -1)
        return self.head(hidden + self.out(gate * single + low * one * two))


def beside_others(_: str) -> tuple[list[str], int]:
    """The notes, and how many operators multiply with several matrices at once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        base = BaseSpec(module=Gated().double(), dtype="float64")
    targets = {"target_modules": ["joined", "single", "out"]}
    jobs = [
        models.job("drops", base, 1, r=4, lora_dropout=0.2, **targets),
        models.job("keeps", base, 2, r=3, **targets),
    ]
    told = cases.equal_to_one_process(jobs)
    graph = compile(jobs).group.root
    return told, sum(is_call(node, SEVERAL) for node in graph.nodes)


def fused_jobs(family: str, folder: Path, **fields: Any) -> list[Job]:
    """A job that drops at every linear, and one on the joined matrices alone."""
    base = BaseSpec(config=folder / family, dtype="float64", seed=7)
    common = {"max_steps": 3, "lr_scheduler_type": "constant", "max_grad_norm": 0.05} | fields
    joined = ["qkv_proj", "gate_up_proj"] if family == "phi3" else ["c_attn"]
    every = {"r": 4, "lora_dropout": 0.2, "target_modules": "all-linear"}
    return [
        make_job(base, "wide", seed=1, lora=every, **common),
        make_job(base, "joined", lora={"r": 2, "target_modules": joined}, **common),
    ]


def phi3_jobs(folder: Path, dtype: Any = "float64", **fields: Any) -> list[Job]:
    """Of Phi-3, whose q is twice as wide as k and v."""
    return fused_jobs("phi3", folder, **fields)


def gpt2_jobs(folder: Path, dtype: Any = "float64", **fields: Any) -> list[Job]:
    """Of GPT-2, which stores its matrices [in, out]."""
    return fused_jobs("gpt2", folder, **fields)


ALONE: dict[str, Any] = {"planner": "single"}
CUT: dict[str, Any] = {"planner": "tensor", "mesh": "tp=2"}
JOBS = {"phi3": phi3_jobs, "gpt2": gpt2_jobs}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained alone; begun alone and ended cut; begun cut and ended alone."""
    made = tmp_path_factory.mktemp("joined")
    alone: dict[str, Any] = {}
    cut: dict[str, Any] = {}
    ended: dict[str, Any] = {}
    for family, jobs in JOBS.items():
        models.save_config(made, family, vocab_size=VOCABULARY)
        begun = {"jobs": jobs, "fields": SHORT}
        rest = {"jobs": jobs, "resume": True}
        alone[f"{family}-alone"] = ALONE | {"jobs": jobs}
        alone[f"{family}-begun-alone"] = ALONE | begun
        cut[f"{family}-cut"] = CUT | {"jobs": jobs}
        cut[f"{family}-ended-cut"] = CUT | rest | {"folder": f"{family}-begun-alone"}
        cut[f"{family}-begun-cut"] = CUT | begun
        ended[f"{family}-ended-alone"] = ALONE | rest | {"folder": f"{family}-begun-cut"}
    told = [train_all(made, alone), *run_processes(2, train_all, made, cut)]
    told.append(train_all(made, ended))
    wrong = [text for each in told for text in each.values() if isinstance(text, str)]
    assert not wrong, wrong
    return made


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    """Losses and gradients to 1e-9 with dropout at every linear, nothing whole."""
    assert run_processes(2, on_two, str(tmp_path)) == [[[], []]] * 2


@pytest.mark.slow
def test_four_processes_compute_what_one_does(tmp_path: Path) -> None:
    """The same bound, with half as many key heads as query heads."""
    assert run_processes(4, on_four, str(tmp_path)) == [[[], []]] * 4


def test_a_matrix_of_several_is_cut_beside_one_that_reads_the_same(tmp_path: Path) -> None:
    """Each result of an operator with several matrices has runs of its own."""
    assert run_processes(2, beside_others, str(tmp_path)) == [([], 1)] * 2


@pytest.mark.slow
def test_layers_may_be_traced_and_rows_be_cut_along_tokens(tmp_path: Path) -> None:
    """The same bound."""
    run_processes(2, layers, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", list(JOBS))
@pytest.mark.parametrize("way", ["cut", "begun-alone", "begun-cut"])
def test_training_and_checkpoints_are_those_of_one_process(
    folder: Path, family: str, way: str
) -> None:
    """Cut from the first step to the last, or from a checkpoint of another plan."""
    jobs = JOBS[family](folder)
    losses, adapters = parting(folder, f"{family}-alone", f"{family}-{way}", jobs)

    assert losses <= 1e-9
    assert adapters <= 1e-7
