"""Files of other planners, in the layout that their projects document."""

from __future__ import annotations

import json
import re

import pytest

from tests.cost.facts import small_cost, small_model
from tlora_fx.planners.export import write_metis, write_sailor

LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def cost(model):
    return small_cost(model)


def written(paths):
    return {path.name: json.loads(path.read_text()) for path in paths if path.suffix == ".json"}


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
