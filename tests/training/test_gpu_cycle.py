"""On a GPU: bits of tenants in strict mode, and rows that are captured on compiled layers."""

from __future__ import annotations

import math

import pytest

from tests.training.clients import Client, ServedOptions, cycle_of, run_all
from tests.training.test_cycle import ORDER, TENANTS, assert_same, play
from tests.training.test_layers import Beside, data_of
from tlora_fx.ops.kernels.select import strict
from tlora_fx.runtime.rounds import compilation
from tlora_fx.training.engine import Engine
from tlora_fx.training.options import EngineOptions

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [EngineOptions, ServedOptions])
def test_strict_bits_depend_on_no_neighbour_and_on_no_kill(tmp_path, monkeypatch, options, dtype):
    """Killed after each turn; rows are shared where kernels compute all linears."""
    monkeypatch.setenv("TLORA_FX_KERNELS", "on")
    with strict():
        own = Engine(options(tmp_path / "base", device=DEVICE, dtype=dtype, residents=4))
        assert own.is_by_kernels == (options is ServedOptions)
        how = {"own": own, "snapshot_share": math.inf}
        answers, adapters, _ = play(
            tmp_path / "all", TENANTS, ORDER, killed=lambda at: True, snapshot_every=3, **how
        )
        for name, client in TENANTS.items():
            alone, other, _ = play(tmp_path / name, {name: client}, [name, name], **how)
            assert repr(answers[name]) == repr(alone[name])
            assert_same(adapters[name], other[name], 0)


def test_strict_tenants_share_rows_where_kernels_compute_all_linears(tmp_path):
    with strict():
        own = Engine(ServedOptions(tmp_path / "base", device=DEVICE, residents=2))
        cycle = cycle_of(tmp_path / "log", own)
        clients = [Client(cycle.log, config={"rank": 4, "seed": seed}) for seed in (1, 2)]
        run_all(cycle)
        graphs = own.step.graphs
        before = graphs.rows_run
        for client in clients:
            client.forward_backward(data_of("a", 0))
        run_all(cycle)
        assert graphs.rows_run == before + 1


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
