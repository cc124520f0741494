"""Write a model's profile as the planner Metis reads it.

A file for each tp and batch, `DeviceType.{gpu}_tp{t}_bs{b}.json`, a clusterfile and a hostfile, as
the project's README describes them. Metis multiplies the optimizer's time itself and sends
gradients of all parameters; what it chooses is for a model that trains whole.

source    https://github.com/SamsungLabs/Metis, "Profile Data Guide"
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlora_fx.cost.hardware import gpu_of_device
from tlora_fx.planners.cost import CostModel
from tlora_fx.planners.foreign import MIB, TRAINED, layer_rows, powers_of_two, write_json


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
    addresses = [f"0.0.0.{place + 1}" for place in range(nodes)]
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
            "batch_generator_time_ms": cost.host_ms(batch * length),
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
