"""What a run says where a base was not measured on its machine."""

from __future__ import annotations

import pytest

from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.model_facts import find_base
from tlora_fx.errors import ProfileMismatch
from tlora_fx.scheduler.service import Estimates


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
