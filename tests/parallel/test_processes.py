"""What the processes of a group return."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import SimpleQueue

import torch

from tests.parallel.processes import run_processes


def a_tensor():
    return torch.arange(3)


def test_a_tensor_is_there_though_its_process_has_ended(monkeypatch):
    """A busy machine may not ask for it before."""
    plain = SimpleQueue.get

    def get_late(self):
        for process in multiprocessing.active_children():
            process.join()
        return plain(self)

    monkeypatch.setattr(SimpleQueue, "get", get_late)

    assert run_processes(1, a_tensor)[0].tolist() == [0, 1, 2]
