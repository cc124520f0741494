"""A small model's facts and costs, without hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tests.models import base_of, job
from tlora_fx.compiler import compile
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.fit import Term
from tlora_fx.cost.hardware import GPUS
from tlora_fx.cost.load import Load, Round, Work
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.profile import LayerPoint
from tlora_fx.cost.profile_sources import roofline_profile
from tlora_fx.cost.step_time import CostModel, row_ms
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
    return CostModel(facts, roofline_profile(GPUS[gpu], facts), per_node)


def small_round(sequences: int = 16, length: int = 64) -> Round:
    """Both jobs bring so many sequences each."""
    return Round((((length,) * sequences, (length,) * sequences),))


def load(tokens: int, length: int = 64, jobs: int = 2) -> Load:
    """Tokens shared out between jobs, in sequences of one length."""
    shares = tuple(tokens // jobs + (job < tokens % jobs) for job in range(jobs))
    count = -(-tokens // length)
    return Load(shares, float(tokens * length), count, max(0, tokens - count))


class LayerCost(NamedTuple):
    """One layer on one row, in milliseconds and bytes."""

    forward: float
    backward: float
    saved: float
    forward_peak: float
    backward_peak: float


def layer_cost(
    cost: CostModel, place: int, load: Load, tp: int = 1, *, launched: bool = True
) -> LayerCost:
    """A layer on a row that the host launches, or on one that is a CUDA graph."""
    clock, rows = cost.clock((tp,)), cost.rows([load], tp)
    rows.launched = rows.launched & launched
    values = [*clock.compute(rows), *clock.tables.values(rows, slice(2, None))]
    return LayerCost(*(float(of[cost.kind_of[place], 0]) for of in values))


def row(cost: CostModel, plan: Plan, load: Load) -> float:
    """Milliseconds of one row by a process that runs all layers."""
    return float(row_ms(cost, plan, [load])[0])


def term_at(term: Term, point: LayerPoint) -> float:
    """A quantity of a layer that does what a measured one did."""
    beside = [getattr(point, name) for name in Work._fields]
    return float(term.curve(point.tokens) + term.slopes @ beside)
