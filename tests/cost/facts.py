"""A small model's facts and costs, without hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models import base_of, job
from tlora_fx.compiler import compile
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import GPUS
from tlora_fx.cost.load import Load, Round
from tlora_fx.cost.profile_sources import roofline_profile
from tlora_fx.cost.step_time import Cluster, CostModel
from tlora_fx.model.supermodel import SuperModel

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def small_model(folder: Path, layers: int = 4, **lora: Any) -> SuperModel:
    """Two jobs of ranks 4 and 8 on a Llama of a few layers."""
    base = base_of(folder, "llama", dtype="bfloat16", num_hidden_layers=layers)
    given = {"target_modules": LINEARS} | lora
    return compile([job("one", base, r=4, **given), job("two", base, r=8, **given)])


def small_cost(model: SuperModel, gpu: str = "h100", per_node: int = 8) -> CostModel:
    """Costs by the roofline of a GPU."""
    facts = facts_of(model)
    return CostModel(facts, roofline_profile(GPUS[gpu], facts), Cluster(per_node))


def small_round(sequences: int = 16, length: int = 64) -> Round:
    """Both jobs bring so many sequences each."""
    return Round((((length,) * sequences, (length,) * sequences),))


def load(tokens: int, length: int = 64, jobs: int = 2) -> Load:
    """Tokens shared out between jobs, in sequences of one length."""
    shares = tuple(tokens // jobs + (job < tokens % jobs) for job in range(jobs))
    count = -(-tokens // length)
    return Load(shares, float(tokens * length), count, max(0, tokens - count))
