"""Kernels are compiled beside one another before they run, and start nothing meanwhile."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.codegen.test_launching import Function
from tlora_fx.codegen import launching
from tlora_fx.codegen.ahead import Ahead, ahead


class Slow(Function):
    """A kernel that is compiled only once as many threads as there are forms compile it."""

    cache_key = "key"

    def __init__(self, together):
        super().__init__()
        self.barrier, self.seen = threading.Barrier(together, timeout=20), []
        self.launchers = 0

    def warmup(self, *arguments, grid, **meta):
        self.barrier.wait()
        self.seen.append((arguments, meta))
        return self

    @property
    def run(self):
        self.launchers += 1


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """There is a device, of which nobody watches the launches."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr("tlora_fx.codegen.ahead.usable_cpus", lambda: 4)
    quiet = SimpleNamespace(calls=[])
    monkeypatch.setattr(launching, "_hooks", lambda: (quiet, quiet))


def test_forms_are_compiled_beside_one_another_once_each_and_none_is_started():
    """Two forms wait for each other, so one after the other would never end."""
    function = Slow(together=2)
    launcher = launching.Launcher(function)
    x = torch.zeros(32)
    with ahead.compiling():
        for number in (16, 17, 16, 32):
            launcher[(4,)](x, number, 1, num_warps=4)

    assert len(function.seen) == 2
    assert function.launchers == 2
    assert not function.forms
    for (like, number, _), meta in function.seen:
        assert (like.dtype, like.data_ptr()) == (x.dtype, x.data_ptr())
        assert number in (16, 17)
        assert meta == {"num_warps": 4}


def test_afterwards_kernels_start_as_ever():
    """What was compiled ahead is no launch."""
    function = Slow(together=1)
    launcher = launching.Launcher(function)
    with ahead.compiling():
        launcher[(4,)](torch.zeros(32), 16, 1)
    launcher[(4,)](torch.zeros(32), 16, 1)

    assert len(function.forms) == 1


def test_what_cannot_be_compiled_is_told_by_its_start():
    """Compiling ahead itself raises nothing, and ends where the computation raises."""

    class Broken(Slow):
        def warmup(self, *arguments, grid, **meta):
            raise ValueError("no such tile")

    with ahead.compiling():
        launching.Launcher(Broken(1))[(4,)](torch.zeros(32), 16, 1)
    with pytest.raises(KeyError, match="row"), ahead.compiling():
        raise KeyError("row")

    assert not ahead.is_on


def test_a_computation_is_tried_once_for_an_object_and_never_in_the_way():
    """Whatever it raises; an object that is gone leaves no room for its address."""

    class Subject:
        pass

    own, subject, ran = Ahead(), Subject(), []

    def run():
        ran.append(own.is_on)
        raise MemoryError("of the row itself")

    for kind in ("probe", "probe", "row"):
        own.try_once(kind, subject, run)
    del subject
    own.try_once("row", Subject(), run)

    assert ran == [True, True, True]
    assert not own.is_on
    assert not own._asked
