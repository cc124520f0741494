"""Tuning measures every plan and tile that runs, and the selector reads what it wrote."""

import json

import pytest
import torch

from tlora_fx.codegen.kernels import emitter
from tlora_fx.codegen.spec import Tile
from tlora_fx.ops.kernels import select, tune
from tlora_fx.ops.kernels.support import Site

CPU = torch.device("cpu")


@pytest.fixture
def few_tiles(monkeypatch):
    """Two tiles a kernel: the rule's, and one that cannot run."""
    broken = Tile(rows=0, columns=0, depth=0, warps=4, stages=2, chunk=1, slab=1)
    for kind in (*tune.SHARED, *tune.DIRECTIONS):
        monkeypatch.setattr(emitter(kind), "candidates", lambda spec: (broken,))


def test_a_table_is_written_and_read(few_tiles, tmp_path, monkeypatch, capsys):
    """The fastest plan of the table is chosen; a broken tile is noted, not fatal."""
    path = tmp_path / "own.json"
    tune.tune([(16, 32)], [9], [2, 3], "float32", path, device=CPU, groups=[(16, 32, 16)])
    document = json.loads(path.read_text())
    site = Site(16, 32, "float32", "float32", 16, 16, 5, "out_in", False, 64, 90)
    monkeypatch.setattr(select, "own_table", lambda gpu: path)
    select.forget()

    assert "16→32, 9 tokens, 2 jobs of rank 2 to 3" in capsys.readouterr().out
    assert document["left_out"]
    for direction in tune.DIRECTIONS:
        times = select.plan_times("some GPU", direction, site, 128)
        chosen = select.choose(direction, site, 20, True, "some GPU", behind=True)
        costs = {plan: each.microseconds for plan, each in times.items()}
        # Beside concat-K ours takes longer in whole rounds than a table says.
        costs["fused"] *= select._IN_ROUNDS if "concat" in costs else 1
        assert chosen.plan == min(costs, key=lambda plan: costs[plan])
        assert chosen.source == str(path)
    for sites in (1, 2):
        assert isinstance(select.tile_for("shrink", site, 20, "some GPU", sites), Tile)
    assert select.tile_for("shrink", site, 20, "some GPU", 3) is None


@pytest.fixture
def plans_at_once(monkeypatch):
    """Nothing is timed."""
    times = {"sidecar": {"us": 1.0, "tile": None}}
    monkeypatch.setattr(tune, "_plans", lambda *args: times)


def test_another_run_adds_to_a_table(plans_at_once, tmp_path):
    """Plans alone at another number of tokens, beside what was known; each point stands once."""
    path = tmp_path / "own.json"
    known = {"family": "forward 8x8 float32", "at": [128, 16, 64], "plans": {}}
    select.write_table(path, "cpu", tune.versions(), [known])
    for _ in range(2):
        tune.tune([(16, 32)], [150], [2], "float32", path, device=CPU, plans_only=True)
    first, *added = json.loads(path.read_text())["entries"]

    assert first == known
    assert [(entry["family"].split()[0], entry["at"][0]) for entry in added] == [
        ("forward", 160), ("input_gradient", 160),
        ("forward", 160), ("input_gradient", 160),
    ]  # fmt: skip
    assert [entry["family"].split()[-1] for entry in added] == ["keep", "keep", "drop", "drop"]


def test_what_other_versions_measured_is_not_added_to(plans_at_once, tmp_path):
    """Times of another compiler tell nothing beside these."""
    path = tmp_path / "own.json"
    known = {"family": "forward 8x8 float32", "at": [128, 16, 64], "plans": {}}
    select.write_table(path, "cpu", {"torch": "1.0", "triton": "1.0"}, [known])
    tune.tune([(16, 32)], [9], [2], "float32", path, device=CPU, plans_only=True)

    assert known not in json.loads(path.read_text())["entries"]


def test_no_site_is_begun_when_the_time_is_up(tmp_path):
    """What was measured until then is kept."""
    path = tmp_path / "own.json"
    tune.tune([(16, 32)], [9], [2, 3], "float32", path, budget_seconds=-1, device=CPU)

    assert not path.exists()
