"""Write a model's profile as the planner Sailor reads it.

`profile.json` of a model on a GPU: micro-batch, tp, layer, then [forward, backward, update] in
seconds; and `llm_info.json`: tp, layer, then sizes of parameters and activations. Sailor reduces
gradients of all weights and overlaps nothing; what it chooses is for a model that trains whole.

source    https://github.com/eth-easl/sailor, docs/PROFILING.md and the profiles beside it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlora_fx.planners.cost import CostModel
from tlora_fx.planners.foreign import LayerRow, layer_rows, powers_of_two, write_json

DIGITS = 6


def write_sailor(
    cost: CostModel,
    folder: Path,
    *,
    length: int,
    batches: Sequence[int] = (1, 2, 4, 8, 16),
    max_tp: int = 8,
) -> list[Path]:
    """Write {model}/{gpu}/profile.json and llm_info.json into a folder.

    length    tokens of a sequence
    raises    ProfileFileError
    """
    model = Path(cost.facts.title).name
    gpu = cost.profile.hardware.gpu.replace(" ", "-")
    profile = profile_data(cost, length, batches, max_tp)
    return [
        write_json(folder / "profiles" / model / gpu / "profile.json", profile),
        write_json(folder / "llm_info.json", {model: memory_data(cost, length, max_tp)}),
    ]


def profile_data(
    cost: CostModel, length: int, batches: Sequence[int], max_tp: int
) -> dict[str, Any]:
    """Seconds by micro-batch, tp and layer; every layer carries the whole update, as theirs do."""
    facts = cost.facts
    update = round(cost.optimizer_ms(facts.tensors, facts.trained) * 1e-3, DIGITS)

    def seconds(row: LayerRow) -> list[float]:
        return [round(row.forward_ms * 1e-3, DIGITS), round(row.backward_ms * 1e-3, DIGITS), update]

    return {
        str(batch): {
            str(tp): {
                str(place): seconds(row)
                for place, row in enumerate(layer_rows(cost, batch, length, tp))
            }
            for tp in powers_of_two(max_tp)
        }
        for batch in batches
    }


def memory_data(cost: CostModel, length: int, max_tp: int) -> dict[str, Any]:
    """Sizes by tp and layer, of a micro-batch of one sequence."""
    return {
        str(tp): {
            str(place): _sizes(row, cost.facts.itemsize)
            for place, row in enumerate(layer_rows(cost, 1, length, tp))
        }
        for tp in powers_of_two(max_tp)
    }


def _sizes(row: LayerRow, itemsize: int) -> dict[str, int]:
    return {
        "params_floats": round(row.parameters),
        "act_output_floats": round(row.output_numbers),
        "act_input_floats": round(row.input_numbers),
        "act_mem_floats": round(row.kept_bytes / itemsize),
        "params_bytes": round(row.weight_bytes),
        "act_output_bytes": round(row.output_numbers * itemsize),
        "act_input_bytes": round(row.input_numbers * itemsize),
        "act_mem_bytes": round(row.kept_bytes),
    }
