"""Devices by the names that users give."""

from __future__ import annotations

import pytest
import torch

from tlora_fx.errors import DeviceUnknown
from tlora_fx.runtime.distributed import device_named
from tlora_fx.runtime.launching.launch import Launch


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs; those that were made current."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("name", "found"),
    [(None, "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_a_device_has_its_number(gpus, name, found):
    """torch makes no device current that has none."""
    assert device_named(name) == torch.device(found)
    assert Launch().device(name) == torch.device(found)
    assert gpus == ([] if found == "cpu" else [torch.device(found)])


def test_each_process_of_a_machine_has_its_own(gpus):
    """Whatever is named."""
    launch = Launch(rank=1, size=2, local_rank=1, per_machine=2)

    assert launch.device("cuda") == torch.device("cuda:1")
    assert gpus == [torch.device("cuda:1")]


def test_each_process_that_torchrun_starts_has_its_own(gpus):
    """Whether or not a device is named."""
    launch = Launch.found({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"})

    assert launch.device(None) == launch.device("cuda") == torch.device("cuda:1")
    assert launch.device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu", "cuda:2", "cuda:x", "cuda:-1", "CPU"])
def test_others_are_refused(gpus, name):
    """With those that there are."""
    with pytest.raises(DeviceUnknown) as caught:
        device_named(name)

    assert "cpu, cuda:0, cuda:1" in str(caught.value)
