"""Files of other planners, in the layout that their projects document."""

from __future__ import annotations

import json
import re

import pytest

from tests.cost.facts import small_cost, small_model
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import ForeignPlanError, PlanNotRunnable
from tlora_fx.planners.export import (
    TRAINED,
    Galvatron,
    read_galvatron,
    write_galvatron,
    write_metis,
    write_sailor,
)

LAYERS = 4
#: A plan as its search engine writes it.
PLAN = {
    "pp_deg": 2,
    "tp_sizes_enc": "2,2,2,2",
    "tp_consecutive_flags": "1,1,1,1",
    "dp_types_enc": "0,0,0,0",
    "use_sp": "0,0,0,0",
    "checkpoint": "1,1,1,1",
    "global_bsz": 64,
    "chunks": 8,
    "pp_division": "1,3",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
    "vtp": 2,
    "vsp": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def cost(model):
    return small_cost(model)


def written(paths):
    return {path.name: json.loads(path.read_text()) for path in paths if path.suffix == ".json"}


def plan_file(folder, **changes):
    path = folder / "galvatron_config_test.json"
    path.write_text(json.dumps({**PLAN, **changes}))
    return path


def test_galvatron_finds_its_files(cost, tmp_path):
    """By name and key, at least eight batches and sizes, as its readers demand."""
    found = written(write_galvatron(cost, tmp_path, length=64))
    times = found["computation_profiling_bf16_llama.json"]
    talk = found["sp_time_1nodes_8gpus_per_node.json"]

    assert {f"layertype_0_bsz{batch}_seq64" for batch in range(1, 9)} <= times.keys()
    assert {f"layertype_other_0_bsz{batch}_seq64" for batch in range(1, 9)} <= times.keys()
    assert set(found["allreduce_bandwidth_1nodes_8gpus_per_node.json"]) == {
        "allreduce_size_8_consec_1", "allreduce_size_4_consec_1", "allreduce_size_4_consec_0",
        "allreduce_size_2_consec_1", "allreduce_size_2_consec_0",
    }  # fmt: skip
    assert set(found["p2p_bandwidth_1nodes_8gpus_per_node.json"]) == {
        "pp_size_2", "pp_size_4", "pp_size_8",
    }  # fmt: skip
    assert found["overlap_coefficient.json"] == {"overlap_coe": 1.0}
    assert len([key for key in talk if re.fullmatch(r"allreduce_size_8_\d+MB_time", key)]) >= 8


def test_galvatron_reads_memory_by_length_and_tp(cost, tmp_path):
    """MB, with a checkpoint's size beside those of each tp."""
    memory = written(write_galvatron(cost, tmp_path, length=64))["memory_profiling_bf16_llama.json"]
    layer = memory["layertype_0"]["64"]

    assert layer["parameter_size"] == cost.facts.layers[0].weight_bytes / 2**20
    assert set(layer["tp_activation_per_bsz_dict"]) == {"1", "2", "4", "8", "checkpoint"}
    for name in ("other_memory_pp_off", "other_memory_pp_on_first", "other_memory_pp_on_last"):
        assert set(memory[name]["64"]) == {"model_states", "activation"}
        assert set(memory[name]["64"]["model_states"]) == {"1", "2", "4", "8"}


def test_a_plan_of_galvatrons_becomes_ours(model, tmp_path):
    """Its cuts, sizes and schedule; and what it assumes is said."""
    plan = Galvatron().plan(model, options={"file": plan_file(tmp_path), "processes": 8})

    assert plan.mesh == MeshShape(pp=2, dp=2, tp=2)
    assert plan.cuts == (1,)
    assert (plan.schedule, plan.micro_batches, plan.recompute) == ("1f1b", 8, True)
    assert not plan.shard_base
    assert TRAINED in plan.planner
    plan.require_model(model)


def test_sharded_replicas_of_galvatrons_shard_the_base(tmp_path):
    """Without stages."""
    one = {"pp_deg": 1, "pp_division": "4", "dp_types_enc": "1,1,1,1", "tp_sizes_enc": "1,1,1,1"}
    plan = read_galvatron(plan_file(tmp_path, **one), 4)

    assert plan.shard_base
    assert plan.mesh == MeshShape(dp=4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp_sizes_enc": "2,1,2,2"}, "differs between layers"),
        ({"checkpoint": "1,1,0,0"}, "differs between layers"),
        ({"use_sp": "1,1,1,1"}, "Ulysses"),
        ({"pp_deg": 3, "pp_division": "1,1,2"}, "do not divide 8 GPUs"),
        ({"pp_division": "4"}, "pp_division"),
        ({"pipeline_type": "zb"}, "pipeline_type zb"),
        ({"chunks": "many"}, "invalid literal"),
    ],
)
def test_what_is_not_run_is_refused(tmp_path, changes, said):
    """With the field that says it."""
    with pytest.raises(ForeignPlanError, match=said):
        read_galvatron(plan_file(tmp_path, **changes), 8)


def test_what_is_no_plan_is_refused(model, tmp_path):
    """A missing field, another model, no file at all."""
    (tmp_path / "other.json").write_text("{}")

    with pytest.raises(ForeignPlanError, match="no field 'pp_deg'"):
        read_galvatron(tmp_path / "other.json", 8)
    path = plan_file(tmp_path, pp_division="9,9")
    with pytest.raises(ForeignPlanError, match="more layers"):
        Galvatron().plan(model, options={"file": path, "processes": 8})
    with pytest.raises(PlanNotRunnable, match="reads a file"):
        Galvatron().plan(model, options={"processes": 8})


def test_metis_finds_its_files(cost, tmp_path):
    """The names that its loader takes apart, and every field that it reads."""
    paths = write_metis(cost, tmp_path, length=64, nodes=2, max_tp=2, batches=(1, 2))
    found = written(paths)
    names = {path.name for path in paths}

    for tp, batch in ((1, 1), (1, 2), (2, 1), (2, 2)):
        name = f"DeviceType.H100_tp{tp}_bs{batch}.json"
        assert re.search(r"DeviceType\.(\w+?)_", name).group(1) == "H100"
        data = found[name]
        times = data["execution_time"]["layer_compute_total_ms"]
        assert len(times) == LAYERS + 2 == data["model"]["num_layers"]
        assert len(data["model"]["parameters"]["parameters_per_layer_bytes"]) == LAYERS + 2
        assert len(data["execution_memory"]["layer_memory_total_mb"]) == LAYERS + 2
        assert data["execution_time"]["forward_backward_time_ms"] >= sum(times)
        assert {"optimizer_time_ms", "batch_generator_time_ms"} <= data["execution_time"].keys()
    assert {"clusterfile.json", "hostfile"} <= names
    assert set(found["clusterfile.json"]) == {"0.0.0.1", "0.0.0.2"}
    assert set(found["clusterfile.json"]["0.0.0.1"]) == {
        "instance_type", "inter_bandwidth", "intra_bandwidth", "memory",
    }  # fmt: skip
    assert (tmp_path / "hostfile").read_text() == "0.0.0.1 slots=8\n0.0.0.2 slots=8\n"


def test_sailor_finds_its_files(cost, tmp_path):
    """Micro-batch, tp, layer, then seconds; and sizes by tp and layer."""
    profile, memory = write_sailor(cost, tmp_path, length=64, batches=(1, 4), max_tp=2)
    times, sizes = json.loads(profile.read_text()), json.loads(memory.read_text())

    assert profile.relative_to(tmp_path).parts == (
        "profiles", "llama", "NVIDIA-H100-80GB-HBM3", "profile.json",
    )  # fmt: skip
    assert set(times) == {"1", "4"}
    assert set(times["1"]) == {"1", "2"}
    assert list(times["1"]["1"]) == [str(place) for place in range(LAYERS + 2)]
    assert all(len(entry) == 3 for entry in times["4"]["2"].values())
    assert times["4"]["1"]["2"][0] >= times["1"]["1"]["2"][0]
    entry = sizes["llama"]["1"]["1"]
    assert set(entry) == {
        "params_floats", "act_output_floats", "act_input_floats", "act_mem_floats",
        "params_bytes", "act_output_bytes", "act_input_bytes", "act_mem_bytes",
    }  # fmt: skip
    assert entry["params_bytes"] == cost.facts.layers[0].weight_bytes
