"""Kernels are compiled in other processes before they are started, and none starts meanwhile."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests import forked
from tests.codegen.test_launching import Function
from tlora_fx.codegen import ahead as module
from tlora_fx.codegen import launching
from tlora_fx.codegen.ahead import Ahead
from tlora_fx.codegen.loading import load
from tlora_fx.codegen.spec import KernelSpec

triton = pytest.importorskip("triton")


class Asked(Function):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def warmup(self, *arguments, grid, **meta):
        self.seen.append((arguments, meta))


class Here(module._Elsewhere):
    """As if this process had a GPU."""

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def ahead(monkeypatch):
    """One that has no processes, in place of the one of this process."""
    own = Ahead()
    monkeypatch.setattr(own, "start", lambda device, beside=1: None)
    monkeypatch.setattr(launching, "ahead", own)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    quiet = SimpleNamespace(calls=[])
    monkeypatch.setattr(launching, "_hooks", lambda: (quiet, quiet))
    return own


@pytest.fixture
def gpu(monkeypatch):
    """Triton compiles for a GPU that is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    before = driver._active
    driver.set_active(Here(GPUTarget("cuda", 90, 32)))
    yield
    driver._active = before


def test_each_form_is_asked_for_once_and_none_is_started(ahead):
    """Forms differ in what numbers are multiples of."""
    function = Asked()
    launcher = launching.Launcher(function)
    x = torch.zeros(32)
    with ahead.asking():
        for number in (16, 17, 16, 32):
            launcher[(4,)](x, number, 1, num_warps=4)

    assert [arguments for arguments, _ in function.seen] == [(x, 16, 1), (x, 17, 1)]
    assert all(meta == {"num_warps": 4} for _, meta in function.seen)
    assert not function.forms


def test_afterwards_kernels_start_as_ever(ahead):
    """What was asked for is no launch."""
    function = Asked()
    launcher = launching.Launcher(function)
    with ahead.asking():
        launcher[(4,)](torch.zeros(32), 16, 1)
    launcher[(4,)](torch.zeros(32), 16, 1)

    assert len(function.forms) == 1


def test_what_another_process_has_compiled_is_found(ahead, gpu, tmp_path, monkeypatch):
    """Of a generated kernel and of one of the library: the same form, in Triton's cache."""
    from tlora_fx.ops.kernels import adam

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    generated = load(KernelSpec("pack", 64, 32, dtype="bfloat16", arch=90))
    numbers = [
        torch.zeros(32) if kind.startswith("*") else 16 for kind in generated.SIGNATURE.values()
    ]
    table, sums = torch.zeros(3, 7, dtype=torch.int64), torch.zeros(3)
    meta = {"KIND": triton.language.bfloat16, "WIDE": triton.language.float32, "CHUNK": 4096}

    def start():
        generated.kernel.function.warmup(*numbers, grid=(1,), **generated.META)
        adam._squares.warmup(table, sums, grid=(3,), num_warps=8, **meta)

    def kept():
        return set((tmp_path / "triton").rglob("*.cubin"))

    spawn = multiprocessing.get_context("spawn")
    with forked.interpreter(), ProcessPoolExecutor(1, mp_context=spawn) as pool:
        ahead._pool = pool
        with ahead.asking():
            start()
            assert len(ahead._asked) == 2
        asked = [*ahead._asked.values()]
        [future.result(120) for future in asked]
    assert len(found := kept()) == 2

    start()

    assert kept() == found
    assert not ahead._asked


def failed(error):
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def cancelled():
    future: Future[None] = Future()
    future.cancel()
    return future


@pytest.mark.parametrize(
    ("future", "said"),
    [
        (failed(ValueError("no such tile")), "no such tile"),
        (cancelled(), "have ended"),
        (Future(), "no answer within 0 s"),
    ],
    ids=["failed", "process ended", "no answer"],
)
def test_what_does_not_come_is_compiled_where_it_is_started(
    ahead, caplog, monkeypatch, future, said
):
    """Triton then tells the user what is wrong with it; the log says what went wrong before."""
    monkeypatch.setattr(module, "MAX_SECONDS", 0)
    function = SimpleNamespace(jit_function=object())
    ahead._asked[id(function.jit_function), 0, "form"] = future

    with caplog.at_level("INFO"):
        stops = ahead._hook(key="form", fn=function, compile={"device": 0})

    assert stops is False
    assert said in caplog.text
    assert not ahead._asked


def test_a_hook_of_somebody_else_stays(ahead, caplog, monkeypatch):
    """Nothing is compiled ahead then, and the log says why."""
    theirs = object()
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", theirs)
    ahead._pool, ran = object(), []

    with caplog.at_level("INFO"):
        ahead.try_once("row", ahead, lambda: ran.append(1))

    assert not ran
    assert triton.knobs.runtime.jit_cache_hook is theirs
    assert "somebody else" in caplog.text


@pytest.mark.parametrize(
    ("said", "beside", "bound", "count"),
    [
        (None, 1, False, 6),
        (None, 2, False, 3),
        (None, 8, False, 2),
        (None, 2, True, 6),
        ("7", 2, False, 7),
    ],
)
def test_processes_that_train_together_divide_the_cpus_of_a_container(
    monkeypatch, said, beside, bound, count
):
    """Unless the user says how many compile, or each has CPUs of its own."""
    from torch._inductor import async_compile, config

    submitted = []
    pool = SimpleNamespace(submit=submitted.append)
    monkeypatch.setattr(module, "usable_cpus", lambda: 6)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(6 if bound else 64))
    monkeypatch.setattr(async_compile.AsyncCompile, "process_pool", lambda: pool)
    monkeypatch.delenv(module._COUNT, raising=False)
    if said is not None:
        monkeypatch.setenv(module._COUNT, said)

    with config.patch(compile_threads=7):
        assert module._processes(beside) is pool

    assert len(submitted) == count


def test_asking_ends_where_the_computation_raises(ahead):
    """And nothing starts less from then on."""
    with pytest.raises(KeyError, match="row"), ahead.asking():
        raise KeyError("row")

    assert not ahead.is_on


def test_a_computation_is_tried_once_for_an_object_and_never_in_the_way(ahead):
    """Whatever it raises; an object that is gone leaves its address to others."""

    class Subject:
        pass

    subject, ran = Subject(), []
    ahead._pool = object()

    def run():
        ran.append(ahead.is_on)
        raise MemoryError("of the row itself")

    for kind in ("probe", "probe", "row"):
        ahead.try_once(kind, subject, run)
    del subject
    ahead.try_once("row", Subject(), run)

    assert ran == [True, True, True]
    assert not ahead.is_on


def test_without_processes_kernels_are_compiled_as_they_come(ahead):
    """On a single CPU a computation is not gone through twice."""
    ran = []

    ahead.try_once("row", ahead, lambda: ran.append(1))

    assert not ran


def test_a_later_process_asks_only_for_what_was_not_compiled(ahead, tmp_path, monkeypatch):
    """The note lies in Triton's cache, and says what the computation was decided by."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ran = []

    def ask(decided_by):
        ahead.try_once("row", Asked(), lambda: ran.append(decided_by), lambda: decided_by)

    failing = failed(ValueError("no such tile"))
    ahead._pool, ahead._asked["form"] = object(), failing
    ask(16)
    wait_for_notes()
    ask(16)
    assert ran == [16, 16]

    ahead._asked.clear()
    for rank in (16, 16, 32):
        ask(rank)
        wait_for_notes()

    assert ran == [16, 16, 16, 32]
    assert len([*(tmp_path / "tlora-fx").iterdir()]) == 2


def wait_for_notes():
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.startswith("note"):
            thread.join()
