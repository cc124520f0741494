"""On a GPU: tenants of one base have the same bits alone and among others, in strict mode."""

from __future__ import annotations

import math

import pytest

from tests.training.test_cycle import ORDER, TENANTS, assert_same, play
from tlora_fx.ops.kernels.select import strict
from tlora_fx.training.engine import Engine
from tlora_fx.training.options import EngineOptions

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_strict_bits_depend_on_no_neighbour_and_on_no_kill(tmp_path, dtype):
    """Killed after each turn, with gathered gradients in a snapshot or behind it."""
    with strict():
        own = Engine(EngineOptions(tmp_path / "base", device=DEVICE, dtype=dtype, residents=4))
        how = {"own": own, "snapshot_share": math.inf}
        answers, adapters, _ = play(
            tmp_path / "all", TENANTS, ORDER, killed=lambda at: True, snapshot_every=3, **how
        )
        for name, client in TENANTS.items():
            alone, other, _ = play(tmp_path / name, {name: client}, [name, name], **how)
            assert repr(answers[name]) == repr(alone[name])
            assert_same(adapters[name], other[name], 0)
