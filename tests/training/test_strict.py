"""Strict mode: a model's bits depend on no neighbour and on no kill."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from tests.training.clients import Client, ServedOptions, cycle_of, datum, engine, run_all
from tests.training.test_cycle import ORDER, TENANTS, assert_same, play
from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.cost.facts import why_launched
from tlora_fx.ops.kernels.select import strict
from tlora_fx.training.engine import Engine
from tlora_fx.training.options import EngineOptions


@dataclass(frozen=True, slots=True)
class TransposedOptions(EngineOptions):
    """On a base with linears that models of clients do not adapt, so cuBLAS computes them."""

    def spec(self):
        from transformers import GPT2Config

        folder = self.folder / "transposed"
        GPT2Config(
            vocab_size=272, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=0,
            eos_token_id=1, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
            architectures=["GPT2LMHeadModel"],
        ).save_pretrained(folder)  # fmt: skip
        return BaseSpec(config=folder, dtype="bfloat16", seed=3)


@pytest.mark.parametrize("every", [1, 3, 64])
def test_strict_bits_depend_on_no_neighbour_and_on_no_kill(tmp_path, every):
    """Killed after each turn, with gathered gradients in a snapshot or behind it."""
    with strict():
        answers, adapters, _ = play(
            tmp_path / "all",
            TENANTS,
            ORDER,
            killed=lambda at: True,
            snapshot_every=every,
            snapshot_share=math.inf,
        )
        for name, client in TENANTS.items():
            alone, own, _ = play(tmp_path / name, {name: client}, [name, name])
            assert repr(answers[name]) == repr(alone[name])
            assert_same(adapters[name], own[name], 0)


def test_strict_models_share_rows_where_kernels_compute_all_linears_alone(tmp_path, monkeypatch):
    """On a CPU none do; on a GPU it is a question of sizes and dtype."""
    small = Engine(EngineOptions(tmp_path / "small", dtype="bfloat16", residents=2))
    served = Engine(ServedOptions(tmp_path / "served", residents=2))
    wide = Engine(ServedOptions(tmp_path / "wide", dtype="float32", residents=2))
    other = Engine(TransposedOptions(tmp_path / "other", residents=2))
    assert not served.is_by_kernels
    assert not why_launched(other.step.model.group)

    for own, expected in ((small, False), (served, True), (wide, False), (other, False)):
        vars(own).pop("is_by_kernels", None)
        monkeypatch.setattr(own.step, "mesh", replace(own.step.mesh, device=torch.device("cuda")))
        assert own.is_by_kernels == expected


@pytest.mark.parametrize("shared", [False, True])
def test_strict_models_are_run_one_by_one_unless_kernels_compute_all(tmp_path, monkeypatch, shared):
    own, sizes = engine(), []
    accumulate = own.step.accumulate
    monkeypatch.setitem(vars(own), "is_by_kernels", shared)
    monkeypatch.setattr(
        own.step, "accumulate", lambda given: sizes.append(len(given)) or accumulate(given)
    )
    with strict():
        cycle = cycle_of(tmp_path, own)
        clients = [Client(cycle.log, config={"rank": 4, "seed": seed}) for seed in (1, 2)]
        run_all(cycle)
        for client in clients:
            client.forward_backward([datum([5, 6, 7])])
        run_all(cycle)
    assert sizes == ([2] if shared else [1, 1])
