"""What the file formats of other planners have in common: a layer's times by batch and tp.

They know a model as a row of layers, embedding first and head last, and a load as a batch of equal
sequences. A Shared Super-Model is to them one model whose batch is that of all jobs together, and
whose parameters are the frozen base's; that those do not train is what none of them can say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora_fx.cost.load import Load
from tlora_fx.durable import replace_file
from tlora_fx.errors import ProfileFileError
from tlora_fx.planners.cost import CostModel

MIB = 2**20
#: Said wherever a plan of theirs is used.
TRAINED = "assumes trained weights: memory and gradient traffic of the frozen base are overstated"


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer of the whole row, embedding and head among them, for one batch and tp.

    input_numbers, output_numbers, kept_numbers   numbers of activations
    """

    forward_ms: float
    backward_ms: float
    parameters: float
    weight_bytes: float
    input_numbers: float
    output_numbers: float
    kept_bytes: float


def load_of(cost: CostModel, batch: int, length: int) -> Load:
    """A batch of equal sequences, shared out between the jobs."""
    jobs = len(cost.facts.jobs)
    tokens = batch * length
    shares = [tokens * (job + 1) // jobs - tokens * job // jobs for job in range(jobs)]
    squares = float(batch * length * length)
    return Load(tuple(shares), squares, batch, batch * (length - 1))


def layer_rows(cost: CostModel, batch: int, length: int, tp: int) -> list[LayerRow]:
    """Embedding, every layer, and the head with the loss."""
    facts, load = cost.facts, load_of(cost, batch, length)
    hidden = float(load.total * facts.hidden)
    size = facts.itemsize
    first = LayerRow(
        forward_ms=cost.root_ms(load),
        backward_ms=0.0,
        parameters=facts.root_bytes / size,
        weight_bytes=facts.root_bytes,
        input_numbers=float(load.total),
        output_numbers=hidden,
        kept_bytes=cost.root_bytes(load),
    )
    rows = [first]
    for place, layer in enumerate(facts.layers):
        own = cost.layer(place, load, tp)
        bytes_of = layer.weight_bytes / tp
        rows.append(
            LayerRow(
                forward_ms=own.forward,
                backward_ms=own.backward,
                parameters=bytes_of / size,
                weight_bytes=bytes_of,
                input_numbers=hidden,
                output_numbers=hidden,
                kept_bytes=own.saved,
            )
        )
    there, back = cost.loss_ms(load)
    head = facts.head_bytes or facts.hidden * facts.vocabulary * size
    logits = float(load.targets * facts.vocabulary) / tp
    last = (there / tp, back / tp, head / tp / size, head / tp, hidden, logits)
    return [*rows, LayerRow(*last, kept_bytes=cost.loss_bytes(load, tp))]


def write_json(path: Path, data: Mapping[str, Any]) -> Path:
    """Write one of their files.

    raises    ProfileFileError
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(data, indent=4) + "\n").encode())
    except OSError as error:
        raise ProfileFileError(
            "a file for another planner cannot be written",
            file=path,
            found=error,
            help="choose another folder",
        ) from error
    return path


def powers_of_two(most: int) -> Sequence[int]:
    """1, 2, 4, ... up to a number."""
    return [1 << place for place in range(most.bit_length()) if 1 << place <= most]
