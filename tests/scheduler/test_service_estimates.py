"""What a run says where a base was not measured on its machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.cost.hardware import GIB, Cluster
from tlora_fx.cost.load import demand_of
from tlora_fx.cost.model_facts import find_base
from tlora_fx.cost.profile_sources import profiles_for
from tlora_fx.errors import ProfileMismatch
from tlora_fx.scheduler.estimates import Estimates, require_measured
from tlora_fx.scheduler.state import Group, JobRequest


@pytest.mark.parametrize(
    ("gpu", "found", "shorter"),
    [("h100", "scaled, from llama-3-8b-nvidia-h200", False), ("cpu", "no profile", True)],
)
def test_a_run_asks_for_what_was_measured(tmp_path, monkeypatch, gpu, found, shorter):
    """Whether or not something could be scaled; there is no option to allow that."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path))
    estimates = Estimates(Cluster(1, 1, 1, gpu=gpu))
    with pytest.raises(ProfileMismatch) as caught:
        estimates._profile("llama-3-8b", find_base("llama-3-8b").facts())

    assert caught.value.facts["found"] == found
    assert "--profile FILE" in caught.value.help
    assert "estimated" not in caught.value.help
    assert ("--tokens 64,256,1024 --lengths 32" in caught.value.help) is shorter


def test_a_group_needs_its_base_its_activations_and_what_their_graphs_take():
    """Of an 8B model in bfloat16 the base is 15 GiB; longer batches need more."""
    base, gpu = "llama-3-8b", "NVIDIA H200"
    estimates = Estimates(Cluster(1, 1, 1, gpu=gpu))
    estimates.estimator.add(base, profiles_for([base], gpu)[base], find_base(base).facts())
    short, long = (
        estimates.memory_of(
            Group(("a",), 1, (0,)), [JobRequest("a", base, demand_of(base, 16, batch, 512), 1, 1)]
        )
        for batch in (1, 8)
    )

    assert 17 * GIB < short < long < 60 * GIB


QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "base"
PROFILE = Path(__file__).parent / "quickstart-cpu.json"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A folder with a config.json of fields that are to be given; nothing else was measured."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path / "none"))

    def make(**fields):
        content = json.loads((QUICKSTART / "config.json").read_text()) | fields
        content = {name: value for name, value in content.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return tmp_path / "config.json"

    return make


@pytest.mark.parametrize(
    ("fields", "base", "gpu"),
    [
        ({}, {}, "h200"),
        ({}, {"dtype": "bfloat16"}, "cpu"),
        ({"hidden_size": 64}, {}, "cpu"),
        ({"vocab_size": 1024}, {}, "cpu"),
    ],
)
def test_a_base_that_its_config_shows_not_to_be_measured_is_refused(config, fields, base, gpu):
    """Of other widths or another dtype than all that was measured there."""
    spec = BaseSpec(config=config(**fields), **({"dtype": "float32"} | base))
    with pytest.raises(ProfileMismatch, match="was not measured on this machine's") as caught:
        require_measured(spec, gpu, [PROFILE])

    assert "--profile FILE" in caught.value.help


@pytest.mark.parametrize(
    ("fields", "base"),
    [
        ({}, {}),
        # Its layers may have been measured or not: that is seen once they are traced.
        ({"intermediate_size": 8}, {}),
        ({"hidden_size": None, "vocab_size": None,
          "text_config": {"vocab_size": 512, "n_embd": 128}}, {}),
        ({"hidden_size": None}, {}),
        ({"vocab_size": 7}, {"task": "SEQ_CLS", "labels": 2}),
        ({}, {"quantize": "nf4", "dtype": "bfloat16"}),
    ],
)  # fmt: skip
def test_a_base_that_may_have_been_measured_passes(config, fields, base):
    spec = BaseSpec(config=config(**fields), **({"dtype": "float32"} | base))
    require_measured(spec, "cpu", [PROFILE])


def test_a_base_that_is_not_here_passes(monkeypatch, tmp_path):
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path))
    require_measured(BaseSpec(model="nobody/no-such-base"), "cpu")
