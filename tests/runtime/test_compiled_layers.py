"""A loop runs on while its layers are compiled, and they take over between two rounds."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from tests.runtime.groups import make_data
from tests.runtime.test_compilation import Pretended, no_process, plain_code, the_jobs
from tlora_fx.compiler import compile
from tlora_fx.model import supermodel
from tlora_fx.ops.kernels.select import strict
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.group_step import Batch, Gathered, GroupStep, StepOptions
from tlora_fx.runtime.rounds import compilation
from tlora_fx.runtime.rounds.compiled_layers import CompiledLayers

__all__ = ["no_process", "plain_code"]


class Kept:
    """A record in memory."""

    def __init__(self, rounds=None):
        self.rounds = rounds

    def read(self):
        return self.rounds

    def write(self, rounds):
        self.rounds = rounds


class Heard(TrainerCallback):
    """Keeps what it is told."""

    def __init__(self):
        self.notes, self.warnings = [], []

    def noted(self, text):
        self.notes.append(text)

    def warned(self, text):
        self.warnings.append(text)


@pytest.fixture
def jobs(tmp_path):
    return the_jobs(tmp_path / "base")


def step_of(jobs, *, compiled=True):
    options = StepOptions(compiled=compiled, wait_for_compile=False)
    return GroupStep(compile(jobs), device="cpu", options=options)


def round_of(step, data, number):
    """Each job's gradients and step; the losses."""
    found = step.accumulate({name: Batch(own.step(number)) for name, own in data.items()})
    step.apply({name: {} for name in data})
    return [found[name].loss for name in data]


def test_they_take_over_between_two_rounds(jobs, monkeypatch):
    """Before, bits are those of layers that are not compiled; afterwards they round otherwise."""
    monkeypatch.setattr(compilation, "CompileProcess", partial(Pretended, looks=3))
    data, record = make_data(jobs), Kept()
    step, plain = step_of(jobs), step_of(jobs, compiled=False)
    layers = CompiledLayers(step, record)
    layers.begin()
    losses, expected, states = [], [], []
    for number in range(4):
        layers.look(number)
        states.append(layers.state)
        losses.append(round_of(step, data, number))
        expected.append(round_of(plain, data, number))

    assert states == ["compiling"] * 2 + ["compiled"] * 2
    assert record.rounds == layers.after == 2
    assert losses[:2] == expected[:2]
    assert losses[2:] == [pytest.approx(each, rel=1e-5) for each in expected[2:]]


def test_what_ran_before_they_took_over_runs_again_with_its_bits(jobs, monkeypatch):
    """Inside `uncompiled`, whose end lets compiled layers run again; nothing gathered is lost."""
    monkeypatch.setattr(compilation, "CompileProcess", partial(Pretended, looks=0))
    data, (first, *_) = make_data(jobs), jobs
    step = step_of(jobs)
    round_of(step, data, 0)
    batch = {first.name: Batch(data[first.name].step(1))}
    before = step.accumulate(batch)[first.name].loss
    gathered = step.gathered(first.name)
    layers = CompiledLayers(step)
    layers.begin()
    kept = step.gathered(first.name)
    step.put_back(first.name, Gathered())
    with step.uncompiled():
        assert not step.model.is_compiled
        again = step.accumulate(batch)[first.name].loss

    assert layers.state == "compiled"
    assert kept.batches == gathered.batches
    assert all(kept.gradients[name].equal(each) for name, each in gathered.gradients.items())
    assert again == before
    assert step.model.is_compiled


def test_a_loop_that_goes_on_compiles_where_it_had(jobs, no_process, plain_code):
    """At once behind the round that is on record, and not before it."""
    for rounds, states in ((2, ("compiled", "compiled")), (1, ("compiling", "compiled"))):
        step = step_of(jobs)
        layers = CompiledLayers(step, Kept(2))
        layers.begin(rounds)
        assert layers.state == states[0]
        layers.look(2)
        assert layers.state == states[1]


def test_strict_mode_waits_for_them(jobs, no_process, plain_code):
    """Before the first round, and says why."""
    with strict():
        heard = Heard()
        layers = CompiledLayers(step_of(jobs), callback=heard, unit="cycle")
        layers.begin()

    assert layers.state == "compiled"
    assert heard.notes[0] == "layers are compiled before the first cycle: strict mode"


@pytest.mark.parametrize("fails", ["beside", "here"])
def test_where_compiling_fails_layers_stay_as_they_are(jobs, monkeypatch, fails):
    """In the other process or in this one: a warning says why, and nothing is on record."""

    def broken(*given):
        raise RuntimeError("no compiler\nthat is all")

    process = partial(Pretended, looks=0, code=int(fails == "beside"))
    monkeypatch.setattr(compilation, "CompileProcess", process)
    data, heard, record = make_data(jobs), Heard(), Kept()
    step, plain = step_of(jobs), step_of(jobs, compiled=False)
    layers = CompiledLayers(step, record, callback=heard)
    with monkeypatch.context() as patch:
        patch.setattr(supermodel, "compile_method", broken)
        layers.begin()
        layers.look(0)

    assert layers.state == "failed"
    assert ["no compiler" in text for text in heard.warnings] == [True]
    assert record.rounds is None
    assert not step.model.is_compiled
    assert round_of(step, data, 0) == round_of(plain, data, 0)


@pytest.mark.parametrize("leader", [True, False])
def test_one_of_several_processes_writes_the_record(leader):
    """They may share the file that it is."""
    record, mesh = Kept(), SimpleNamespace(leader=leader)
    group = SimpleNamespace(mesh=mesh, compile=lambda: None)
    ranks = SimpleNamespace(together=lambda action, errors: action())
    compilation.Compilation(group, record, ranks, Heard(), waits=False).take_over(2)

    assert record.rounds == (2 if leader else None)


def test_a_step_that_is_not_to_be_compiled_stays_as_it_is(jobs, no_process):
    layers = CompiledLayers(step_of(jobs, compiled=False))
    layers.begin()

    assert not layers.look(0)
    assert layers.state == "off"
