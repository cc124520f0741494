"""What a run says where a base was not measured on its machine."""

from __future__ import annotations

import pytest

from tlora_fx.cost.hardware import GIB, Cluster
from tlora_fx.cost.load import demand_of
from tlora_fx.cost.model_facts import find_base
from tlora_fx.cost.profile_sources import profiles_for
from tlora_fx.errors import ProfileMismatch
from tlora_fx.scheduler.estimates import Estimates
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
