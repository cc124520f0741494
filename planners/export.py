"""Write a model's profile as Galvatron reads it, and read its plan back.

Files are named and keyed as Hetu-Galvatron's search engine reads them: computation in milliseconds
of a sample's forward, memory in MB, bandwidths in GB/s, times of collectives in milliseconds by MB.
Galvatron cannot say that a base is frozen: it takes the backward as twice the forward, and counts
gradients and optimizer states of all parameters. A plan of its is labelled so.

source    https://github.com/PKU-DAIR/Hetu-Galvatron, core/search_engine and docs of JSON configs
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from tlora_fx.cost.plan import MeshShape, Plan, Schedule, model_fingerprint
from tlora_fx.cost.profile import Operation
from tlora_fx.errors import ForeignPlanError, PlanNotRunnable
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import demand_shardable
from tlora_fx.planners.cost import CostModel
from tlora_fx.planners.feasible import demand_fits
from tlora_fx.planners.foreign import MIB, TRAINED, layer_rows, load_of, powers_of_two, write_json
from tlora_fx.planners.protocol import Planner

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
PIPELINES: dict[str, Schedule] = {"gpipe": "gpipe", "pipedream_flush": "1f1b"}
#: Eight at least, of which they fit lines.
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8)
MEGABYTES = tuple(1 << place for place in range(11))
#: What Galvatron assumes of a parameter, in its own bytes: weight, gradient, two moments.
STATES = 4


class Galvatron(Planner):
    """A plan that Galvatron's search has written."""

    name: ClassVar[str] = "galvatron"

    def plan(
        self,
        model: SuperModel,
        shape: MeshShape | None = None,
        profile: Any | None = None,
        **options: Any,
    ) -> Plan:
        """The plan in a file `galvatron_config_*.json`.

        options   `file`: its path; `processes`: GPUs, where no mesh is given
        raises    ForeignPlanError, MeshDoesNotFit, PlanNotRunnable
        """
        if "file" not in options:
            raise PlanNotRunnable(
                "the planner 'galvatron' reads a file that Galvatron has written",
                help="give the option file=galvatron_config_....json",
            )
        processes = shape.size if shape else int(options.get("processes", 1))
        plan = read_galvatron(Path(options["file"]), processes)
        demand_fits(model, plan.mesh)
        layers = len(model.layer_order())
        if plan.cuts and plan.cuts[-1] >= layers:
            raise ForeignPlanError(
                "the plan was made for a model with more layers",
                file=options["file"],
                expected=f"{layers} layers",
                found=f"a stage that begins at layer {plan.cuts[-1]}",
                help="search again with the profile of this model",
            )
        if plan.shard_base:
            demand_shardable(model, plan)
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
    found: dict[str, float] = {}
    for batch in BATCHES:
        first, *layers, last = layer_rows(cost, batch, length, 1)
        each = sum(row.forward_ms for row in layers) / max(len(layers), 1)
        other = first.forward_ms + last.forward_ms
        found[f"layertype_0_bsz{batch}_seq{length}"] = each / batch
        found[f"layertype_other_0_bsz{batch}_seq{length}"] = other / batch
    return found


def memory(cost: CostModel, length: int, gpus_per_node: int) -> dict[str, Any]:
    """MB of a layer's parameters and of a sample's activations by tp, and of embedding and head."""
    sizes = powers_of_two(gpus_per_node)
    rows = {tp: layer_rows(cost, 1, length, tp) for tp in sizes}
    layers = rows[1][1:-1]
    load = load_of(cost, 1, length)
    kept = {str(tp): _mean([row.kept_bytes for row in rows[tp][1:-1]]) / MIB for tp in sizes}
    kept["checkpoint"] = load.total * cost.facts.hidden * cost.facts.itemsize / MIB

    def other(places: Sequence[int]) -> dict[str, dict[str, float]]:
        def total(tp: int, name: str) -> float:
            return sum(float(getattr(rows[tp][place], name)) for place in places) / MIB

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
    found: dict[str, float] = {}
    for size in reversed(powers_of_two(gpus)):
        for near in (1, 0):
            if size >= 2 and (near or size < gpus):
                spread = size if near else gpus
                found[f"allreduce_size_{size}_consec_{near}"] = _bandwidth(
                    cost, "all-reduce", size, spread, per_node
                )
    return found


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
    _demand_runs(path, processes, pp, tp, cut, pipeline, division)
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


def _demand_runs(
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
    tier = "node" if spread <= per_node else "network"
    ms = cost.collectives.ms(operation, "node" if tier == "node" else "network", size, payload)
    return payload / ms / 1e6 if ms else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
