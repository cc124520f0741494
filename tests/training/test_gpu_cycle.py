"""On a GPU: bits of tenants in strict mode, and rows that are captured on compiled layers."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.training.clients import Client, ServedOptions, cycle_of, datum, run_all
from tests.training.test_cycle import CONFIGS, ORDER, TENANTS, assert_same, play
from tests.training.test_layers import Beside, data_of
from tlora_fx.ops.kernels.select import strict
from tlora_fx.runtime.rounds import compilation
from tlora_fx.training.engine import Engine
from tlora_fx.training.options import EngineOptions

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [EngineOptions, ServedOptions])
def test_strict_bits_depend_on_no_neighbour_and_on_no_kill(tmp_path, options, dtype):
    """Killed after each turn; rows are shared where kernels compute all linears."""
    with strict():
        own = Engine(options(tmp_path / "base", device=DEVICE, dtype=dtype, residents=4))
        assert own.is_by_kernels == (options is ServedOptions and dtype == "bfloat16")
        how = {"own": own, "snapshot_share": math.inf}
        answers, adapters, _ = play(
            tmp_path / "all", TENANTS, ORDER, killed=lambda at: True, snapshot_every=3, **how
        )
        for name, client in TENANTS.items():
            alone, other, _ = play(tmp_path / name, {name: client}, [name, name], **how)
            assert repr(answers[name]) == repr(alone[name])
            assert_same(adapters[name], other[name], 0)


@pytest.mark.parametrize("seed", range(4))
def test_strict_gradients_in_shared_rows_are_those_alone(tmp_path, seed):
    """Bit for bit, of adapters that have learned, beside neighbours of all lengths."""
    with strict():
        own = Engine(ServedOptions(tmp_path / "base", device=DEVICE, residents=4))
        assert own.is_by_kernels
        alone = {name: gradients(tmp_path / name, own, name, seed)[name] for name in "abc"}
        for names in ("ab", "bc", "abc"):
            for name, found in gradients(tmp_path / f"{names} together", own, names, seed).items():
                assert found.keys() == alone[name].keys()
                assert all(torch.equal(found[each], alone[name][each]) for each in found)


def gradients(folder, own, names, seed):
    """What these of three models have gathered after one request each, by model."""
    cycle = cycle_of(folder, own, snapshot_share=math.inf)
    clients = {}
    for at, name in enumerate("abc"):
        clients[name] = Client(cycle.log, config=CONFIGS[at])
        clients[name].forward_backward(lines_of(name, 60))
        clients[name].optim_step(learning_rate=0.05)
        run_all(cycle)
    for name in names:
        clients[name].forward_backward(lines_of(f"{name}{seed}", 700))
    run_all(cycle)
    residents = cycle.tenants.resident
    found = {name: own.step.gathered(residents[clients[name].model].name) for name in names}
    cycle.tenants.close()
    cycle.log.close()
    return {name: each.gradients for name, each in found.items()}


def lines_of(key, longest):
    draw = random.Random(key)
    sizes = [draw.choice([3, 7, 15, 30, 60, 100, 333, 700]) for _ in range(draw.randint(1, 4))]
    return [datum([draw.randrange(3, 250) for _ in range(min(size, longest))]) for size in sizes]


def test_rows_are_captured_again_on_compiled_layers(tmp_path, monkeypatch):
    """What held other code is let go at the take-over; losses are the same to rounding."""
    monkeypatch.setattr(compilation, "CompileProcess", Beside)
    own = Engine(ServedOptions(tmp_path / "base", device=DEVICE, residents=2, compiled=True))
    cycle = cycle_of(tmp_path / "log", own)
    client, graphs = Client(cycle.log), own.step.graphs

    def losses():
        numbers = []
        for _ in range(4):
            numbers.append(client.forward_backward(data_of("a", 0)))
            client.optim_step(learning_rate=0.0, weight_decay=0.0)
            run_all(cycle)
        return [client.result(number)[0]["loss:sum"] for number in numbers]

    before, captured = losses(), graphs.captured
    assert graphs.keys
    Beside.code = 0
    cycle.run()
    assert cycle.layers.state == "compiled"
    assert not graphs.keys

    assert losses() == pytest.approx(before, rel=2e-2)
    assert graphs.captured > captured
    assert not graphs.refused
