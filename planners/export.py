"""Write a model's profile as the planners Metis and Sailor read it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora_fx.cost.fit import SAVED
from tlora_fx.cost.hardware import gpu_of_device
from tlora_fx.cost.load import Load
from tlora_fx.cost.step_time import CostModel
from tlora_fx.errors import ProfileFileError, errors_as
from tlora_fx.host.durable import write_output

# What the file formats of other planners have in common: a layer's times by batch and tp.
#
# They know a model as a row of layers, embedding first and head last, and a load as a batch of
# equal sequences. A Shared Super-Model is to them one model whose batch is that of all jobs
# together, and whose parameters are the frozen base's; that those do not train is what none of
# them can say.

MIB = 2**20
#: Said in the files of Metis.
TRAINED = "assumes trained weights: memory and gradient traffic of the frozen base are overstated"


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer of the whole row, embedding and head among them, for one batch and tp.

    input_numbers, output_numbers, kept_numbers   numbers of activations
    """

    forward_ms: float
    backward_ms: float
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
    clock, rows = cost.clock((tp,)), cost.rows([load], tp)
    times, saved = clock.compute(rows)[..., 0], clock.tables.values(rows, slice(SAVED, SAVED + 1))
    there, back = cost.ends.loss_ms(rows.targets, rows.launched)
    hidden = float(load.total * facts.hidden)
    first = LayerRow(
        forward_ms=float(cost.ends.root_ms(rows.tokens, rows.launched)[0]),
        backward_ms=0.0,
        weight_bytes=facts.root_bytes,
        input_numbers=float(load.total),
        output_numbers=hidden,
        kept_bytes=float(cost.ends.root_bytes(rows.tokens)[0]),
    )
    layers = [first]
    for kind, layer in zip(cost.kind_of, facts.layers, strict=True):
        layers.append(
            LayerRow(
                forward_ms=float(times[0, kind]),
                backward_ms=float(times[1, kind]),
                weight_bytes=layer.weight_bytes / tp,
                input_numbers=hidden,
                output_numbers=hidden,
                kept_bytes=float(saved[0, kind, 0]),
            )
        )
    head = facts.head_bytes or facts.hidden * facts.vocabulary * facts.itemsize
    logits = float(load.targets * facts.vocabulary) / tp
    loss = float(there[0]) / tp, float(back[0]) / tp
    last = (*loss, head / tp, hidden, logits)
    return [*layers, LayerRow(*last, kept_bytes=float(cost.ends.loss_bytes(rows.targets, tp)[0]))]


def write_json(path: Path, data: Mapping[str, Any]) -> Path:
    """Write one of their files; raises ProfileFileError."""
    what = "a file for another planner cannot be written"
    with errors_as(ProfileFileError, what, file=path, help="choose another folder"):
        write_output(path, (json.dumps(data, indent=4) + "\n").encode())
    return path


def powers_of_two(most: int) -> Sequence[int]:
    """1, 2, 4, ... up to a number."""
    return [1 << power for power in range(most.bit_length())]


# Write a model's profile as the planner Metis reads it.
#
# A file for each tp and batch, `DeviceType.{gpu}_tp{t}_bs{b}.json`, a clusterfile and a hostfile,
# as the project's README describes them. Metis multiplies the optimizer's time itself and sends
# gradients of all parameters; what it chooses is for a model that trains whole.
#
# source    https://github.com/SamsungLabs/Metis, "Profile Data Guide"


def write_metis(
    cost: CostModel,
    folder: Path,
    *,
    length: int,
    nodes: int = 1,
    gpus_per_node: int = 8,
    batches: Sequence[int] = (1, 2, 4, 8),
    max_tp: int = 8,
) -> list[Path]:
    """Write profile files, clusterfile.json and hostfile into a folder.

    length    tokens of a sequence
    raises    ProfileFileError
    """
    device = _device(cost)
    written = [
        write_json(
            folder / "profile" / f"DeviceType.{device}_tp{tp}_bs{batch}.json",
            profile_data(cost, batch, length, tp),
        )
        for tp in powers_of_two(max_tp)
        for batch in batches
    ]
    addresses = [f"0.0.0.{node + 1}" for node in range(nodes)]
    entry = cluster_entry(cost, device)
    written.append(write_json(folder / "clusterfile.json", dict.fromkeys(addresses, entry)))
    hosts = folder / "hostfile"
    hosts.write_text("".join(f"{address} slots={gpus_per_node}\n" for address in addresses))
    return [*written, hosts]


def profile_data(cost: CostModel, batch: int, length: int, tp: int) -> dict[str, Any]:
    """One file: times in milliseconds, sizes in bytes, memory in MB."""
    facts = cost.facts
    rows = layer_rows(cost, batch, length, tp)
    times = [row.forward_ms + row.backward_ms for row in rows]
    optimizer = cost.optimizer_ms(facts.tensors, facts.trained)
    memory = [(row.weight_bytes + row.kept_bytes) / MIB for row in rows]
    weights = [round(row.weight_bytes) for row in rows]
    return {
        "model": {
            "model_name": facts.title,
            "num_layers": len(rows),
            "parameters": {
                "total_parameters_bytes": sum(weights),
                "parameters_per_layer_bytes": weights,
                "activation_parameters_bytes": [
                    round(row.output_numbers * facts.itemsize) for row in rows
                ],
            },
            "note": TRAINED,
        },
        "execution_time": {
            "total_time_ms": sum(times) + optimizer,
            "forward_backward_time_ms": sum(times),
            "batch_generator_time_ms": float(cost.ends.host_ms(batch * length)),
            "layernorm_grads_all_reduce_time_ms": 0.0,
            "embedding_grads_all_reduce_time_ms": 0.0,
            "optimizer_time_ms": optimizer,
            "layer_compute_total_ms": times,
        },
        "execution_memory": {
            "total_memory_mb": sum(memory),
            "layer_memory_total_mb": memory,
        },
    }


def cluster_entry(cost: CostModel, device: str) -> dict[str, Any]:
    """One node of clusterfile.json: bandwidths in GB/s, memory in GB."""
    gpu = gpu_of_device(cost.profile.hardware.gpu)
    return {
        "instance_type": device,
        "inter_bandwidth": gpu.network_gbps if gpu else 0,
        "intra_bandwidth": gpu.node_gbps if gpu else 0,
        "memory": round(cost.profile.hardware.memory_gib),
    }


def _device(cost: CostModel) -> str:
    """Metis takes letters, digits and underscores up to the first underscore."""
    words = re.findall(r"[A-Za-z]*\d+[A-Za-z]*", cost.profile.hardware.gpu)
    return words[0] if words else "CPU"


# Write a model's profile as the planner Sailor reads it.
#
# `profile.json` of a model on a GPU: micro-batch, tp, layer, then [forward, backward, update] in
# seconds; and `llm_info.json`: tp, layer, then sizes of parameters and activations. Sailor reduces
# gradients of all weights and overlaps nothing; what it chooses is for a model that trains whole.
#
# source    https://github.com/eth-easl/sailor, docs/PROFILING.md and the profiles beside it

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
    profile = sailor_times(cost, length, batches, max_tp)
    return [
        write_json(folder / "profiles" / model / gpu / "profile.json", profile),
        write_json(folder / "llm_info.json", {model: memory_data(cost, length, max_tp)}),
    ]


def sailor_times(
    cost: CostModel, length: int, batches: Sequence[int], max_tp: int
) -> dict[str, Any]:
    """Seconds by micro-batch, tp and layer; every layer carries the whole update, as theirs do."""
    facts = cost.facts
    update = round(cost.optimizer_ms(facts.tensors, facts.trained) * 1e-3, DIGITS)

    def seconds(row: LayerRow) -> list[float]:
        return [round(row.forward_ms * 1e-3, DIGITS), round(row.backward_ms * 1e-3, DIGITS), update]

    return {str(batch): _by_layer(cost, batch, length, max_tp, seconds) for batch in batches}


def memory_data(cost: CostModel, length: int, max_tp: int) -> dict[str, Any]:
    """Sizes by tp and layer, of a micro-batch of one sequence."""
    return _by_layer(cost, 1, length, max_tp, lambda row: _sizes(row, cost.facts.itemsize))


def _by_layer(
    cost: CostModel, batch: int, length: int, max_tp: int, told: Callable[[LayerRow], Any]
) -> dict[str, Any]:
    """What is to be told of each layer, by tp and layer."""
    return {
        str(tp): {
            str(index): told(row) for index, row in enumerate(layer_rows(cost, batch, length, tp))
        }
        for tp in powers_of_two(max_tp)
    }


def _sizes(row: LayerRow, itemsize: int) -> dict[str, int]:
    return {
        "params_floats": round(row.weight_bytes / itemsize),
        "act_output_floats": round(row.output_numbers),
        "act_input_floats": round(row.input_numbers),
        "act_mem_floats": round(row.kept_bytes / itemsize),
        "params_bytes": round(row.weight_bytes),
        "act_output_bytes": round(row.output_numbers * itemsize),
        "act_input_bytes": round(row.input_numbers * itemsize),
        "act_mem_bytes": round(row.kept_bytes),
    }
