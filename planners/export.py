"""Write a model's profile as Galvatron, Metis and Sailor read it, and read Galvatron's plan back.

Files of Galvatron are named and keyed as Hetu-Galvatron's search engine reads them: computation in
milliseconds of a sample's forward, memory in MB, bandwidths in GB/s, times of collectives in
milliseconds by MB.
Galvatron cannot say that a base is frozen: it takes the backward as twice the forward, and counts
gradients and optimizer states of all parameters. A plan of its is labelled so.

source    https://github.com/PKU-DAIR/Hetu-Galvatron, core/search_engine and docs of JSON configs
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from tlora_fx.cost.fit import SAVED
from tlora_fx.cost.hardware import LinkTier, gpu_of_device
from tlora_fx.cost.load import Load
from tlora_fx.cost.plan import MeshShape, Plan, Schedule, model_fingerprint
from tlora_fx.cost.profile import Operation
from tlora_fx.cost.step_time import CostModel
from tlora_fx.errors import ForeignPlanError, PlanNotRunnable, ProfileFileError
from tlora_fx.host.durable import replace_file
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import require_shardable
from tlora_fx.parallel.prepare import require_fits
from tlora_fx.planners.protocol import Planner, PlannerOptions

# What the file formats of other planners have in common: a layer's times by batch and tp.
#
# They know a model as a row of layers, embedding first and head last, and a load as a batch of
# equal sequences. A Shared Super-Model is to them one model whose batch is that of all jobs
# together, and whose parameters are the frozen base's; that those do not train is what none of
# them can say.

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
    return [1 << power for power in range(most.bit_length())]


PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
PIPELINES: dict[str, Schedule] = {"gpipe": "gpipe", "pipedream_flush": "1f1b"}
#: Eight at least, of which they fit lines.
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8)
MEGABYTES = tuple(1 << power for power in range(11))
#: What Galvatron assumes of a parameter, in its own bytes: weight, gradient, two moments.
STATES = 4


class Galvatron(Planner):
    """A plan that Galvatron's search has written."""

    name: ClassVar[str] = "galvatron"

    class Options(PlannerOptions):
        """`file`: the path of a `galvatron_config_*.json`."""

        file: Path | None = None

    def make(
        self, model: SuperModel, shape: MeshShape | None, options: Options, profile: Any
    ) -> Plan:
        """The plan in a file of Galvatron.

        raises    ForeignPlanError, MeshDoesNotFit, PlanNotRunnable
        """
        if options.file is None:
            raise PlanNotRunnable(
                "the planner 'galvatron' reads a file that Galvatron has written",
                help="give the option file=galvatron_config_....json",
            )
        plan = read_galvatron(options.file, shape.size if shape else options.processes)
        require_fits(model, plan.mesh)
        layers = len(model.layer_order())
        if plan.cuts and plan.cuts[-1] >= layers:
            raise ForeignPlanError(
                "the plan was made for a model with more layers",
                file=options.file,
                expected=f"{layers} layers",
                found=f"a stage that begins at layer {plan.cuts[-1]}",
                help="search again with the profile of this model",
            )
        if plan.shard_base:
            require_shardable(model, plan)
        return plan.model_copy(update={"model": model_fingerprint(model)})


def write_galvatron(
    cost: CostModel,
    folder: Path,
    *,
    length: int,
    nodes: int = 1,
    gpus_per_node: int = 8,
) -> list[Path]:
    """Write all files that the search engine reads into a folder.

    length    tokens of a sequence
    raises    ProfileFileError
    """
    model = Path(cost.facts.title).name
    precision = PRECISIONS.get(cost.facts.dtype, "fp32")
    size = f"{nodes}nodes_{gpus_per_node}gpus_per_node"
    count = nodes * gpus_per_node
    files = {
        f"computation_profiling_{precision}_{model}.json": computation(cost, length),
        f"memory_profiling_{precision}_{model}.json": memory(cost, length, gpus_per_node),
        f"allreduce_bandwidth_{size}.json": bandwidths(cost, count, gpus_per_node),
        f"p2p_bandwidth_{size}.json": point_to_point(cost, count, gpus_per_node),
        f"sp_time_{size}.json": collective_times(cost, count, gpus_per_node),
        "overlap_coefficient.json": {"overlap_coe": cost.profile.slowdown},
    }
    return [write_json(folder / name, data) for name, data in files.items()]


def computation(cost: CostModel, length: int) -> dict[str, float]:
    """Milliseconds of the forward of one layer, and of all else, for each sample of a batch."""
    times: dict[str, float] = {}
    for batch in BATCHES:
        first, *layers, last = layer_rows(cost, batch, length, 1)
        other = first.forward_ms + last.forward_ms
        key = f"bsz{batch}_seq{length}"
        times[f"layertype_0_{key}"] = _mean([row.forward_ms for row in layers]) / batch
        times[f"layertype_other_0_{key}"] = other / batch
    return times


def memory(cost: CostModel, length: int, gpus_per_node: int) -> dict[str, Any]:
    """MB of a layer's parameters and of a sample's activations by tp, and of embedding and head."""
    sizes = powers_of_two(gpus_per_node)
    rows = {tp: layer_rows(cost, 1, length, tp) for tp in sizes}
    layers = rows[1][1:-1]
    load = load_of(cost, 1, length)
    kept = {str(tp): _mean([row.kept_bytes for row in rows[tp][1:-1]]) / MIB for tp in sizes}
    kept["checkpoint"] = load.total * cost.facts.hidden * cost.facts.itemsize / MIB

    def other(indices: Sequence[int]) -> dict[str, dict[str, float]]:
        def total(tp: int, name: str) -> float:
            return sum(float(getattr(rows[tp][index], name)) for index in indices) / MIB

        return {
            "model_states": {str(tp): STATES * total(1, "weight_bytes") / tp for tp in sizes},
            "activation": {str(tp): total(tp, "kept_bytes") for tp in sizes},
        }

    key = str(length)
    layer = {
        "parameter_size": _mean([row.weight_bytes for row in layers]) / MIB,
        "tp_activation_per_bsz_dict": kept,
    }
    return {
        "layertype_0": {key: layer},
        "other_memory_pp_off": {key: other((0, -1))},
        "other_memory_pp_on_first": {key: other((0,))},
        "other_memory_pp_on_last": {key: other((-1,))},
    }


def bandwidths(cost: CostModel, gpus: int, per_node: int) -> dict[str, float]:
    """GB/s of all-reduce over so many GPUs, neighbours (consec_1) or spread out (consec_0)."""
    return {
        f"allreduce_size_{size}_consec_{near}": _bandwidth(
            cost, "all-reduce", size, size if near else gpus, per_node
        )
        for size in reversed(powers_of_two(gpus))
        for near in (1, 0)
        if size >= 2 and (near or size < gpus)
    }


def point_to_point(cost: CostModel, gpus: int, per_node: int) -> dict[str, float]:
    """GB/s from one stage to the next."""
    return {
        f"pp_size_{size}": _bandwidth(cost, "send", 2, gpus if gpus > per_node else size, per_node)
        for size in powers_of_two(gpus)
        if size >= 2
    }


def collective_times(cost: CostModel, gpus: int, per_node: int) -> dict[str, float]:
    """Milliseconds of all-reduce and all-to-all by size in MB.

    All-to-all is never sent by our plans: each process keeps its own part and sends the others', as
    in an all-gather of as many bytes.
    """
    operations: dict[str, Operation] = {"allreduce": "all-reduce", "all2all": "all-gather"}
    return {
        f"{name}_size_{size}_{mb}MB_time": cost.collectives.ms(
            operation, "node" if size <= per_node else "network", size, mb * MIB
        )
        for name, operation in operations.items()
        for size in reversed(powers_of_two(gpus))
        if size >= 2
        for mb in MEGABYTES
    }


def read_galvatron(path: Path, processes: int) -> Plan:
    """The plan in a file of Galvatron's, for so many GPUs.

    raises    ForeignPlanError where it is none, or says what we do not run
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        pp = int(found["pp_deg"])
        tp, kinds = _uniform(found, "tp_sizes_enc", path), _uniform(found, "dp_types_enc", path)
        again, cut = _uniform(found, "checkpoint", path), _uniform(found, "use_sp", path)
        chunks, pipeline = int(found["chunks"]), str(found.get("pipeline_type", "gpipe"))
        division = [int(word) for word in str(found["pp_division"]).split(",")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ForeignPlanError(
            "this file is no plan of Galvatron's",
            file=path,
            found=f"no field {error}" if isinstance(error, KeyError) else error,
            help="its search engine writes galvatron_config_....json",
        ) from error
    _require_runs(path, processes, pp, tp, cut, pipeline, division)
    sharded = kinds == 1 or found.get("default_dp_type") == "zero3"
    return Plan(
        planner=f"{Galvatron.name} ({TRAINED})",
        mesh=MeshShape(pp=pp, dp=processes // (pp * tp), tp=tp),
        cuts=tuple(accumulate(division[:-1])),
        schedule=PIPELINES[pipeline],
        micro_batches=max(1, chunks),
        shard_base=sharded and processes > pp * tp,
        recompute=again == 1,
    )


def _require_runs(
    path: Path, processes: int, pp: int, tp: int, cut: int, pipeline: str, division: list[int]
) -> None:
    """Refuse what tlora-fx does not run."""
    wrong = ""
    if min(pp, tp) < 1 or processes % (pp * tp):
        wrong = f"pp={pp} and tp={tp} do not divide {processes} GPUs"
    elif cut:
        wrong = "Ulysses sequence parallelism (use_sp)"
    elif pipeline not in PIPELINES:
        wrong = f"pipeline_type {pipeline}"
    elif len(division) != pp or min(division) < 1:
        wrong = f"pp_division {division} for pp_deg {pp}"
    if wrong:
        raise ForeignPlanError(
            "a plan of Galvatron's says what tlora-fx does not run",
            file=path,
            found=wrong,
            help="search again with sp_space tp and as many GPUs",
        )


def _uniform(found: dict[str, Any], name: str, path: Path) -> int:
    """The one value that a field has for all layers; 0 where the field is not there."""
    values = {int(word) for word in str(found.get(name, 0)).split(",")}
    if len(values) > 1:
        raise ForeignPlanError(
            "a plan of Galvatron's differs between layers",
            file=path,
            field=name,
            expected="one value for all layers",
            found=found[name],
            help="search again with fine_grained_mode 0",
        )
    return values.pop()


def _bandwidth(
    cost: CostModel, operation: Operation, size: int, spread: int, per_node: int
) -> float:
    """GB/s as they count them: bytes of a large payload over its time."""
    payload = 256 * MIB
    tier: LinkTier = "node" if spread <= per_node else "network"
    ms = cost.collectives.ms(operation, tier, size, payload)
    return payload / ms / 1e6 if ms else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


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
