"""Strict mode: a model's bits depend on no neighbour and on no kill."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from tests.training.clients import Client, cycle_of, datum, engine, run_all
from tests.training.test_cycle import ORDER, TENANTS, assert_same, play
from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.cost.facts import why_launched
from tlora_fx.ops.kernels.select import strict
from tlora_fx.training.engine import Engine
from tlora_fx.training.options import EngineOptions


@dataclass(frozen=True, slots=True)
class OneLayer(EngineOptions):
    """On a base of one layer: a Llama, or a GPT-2, whose linears no model of a client adapts."""

    kind: str = "Llama"
    vocabulary: int = 272

    def spec(self):
        kind, sizes = SIZES[self.kind]
        kind(
            vocab_size=self.vocabulary, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
            bos_token_id=0, eos_token_id=1, **sizes,
        ).save_pretrained(self.folder)  # fmt: skip
        return BaseSpec(config=self.folder, dtype=self.dtype, seed=3)


SIZES = {
    "Llama": (LlamaConfig, {"intermediate_size": 128, "architectures": ["LlamaForCausalLM"]}),
    "GPT2": (
        GPT2Config,
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
         "architectures": ["GPT2LMHeadModel"]},
    ),
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("kind", "vocabulary", "dtype", "captured", "expected"),
    [
        ("Llama", 272, "bfloat16", True, True),
        ("Llama", 272, "float32", False, False),
        ("Llama", 259, "bfloat16", False, False),
        ("GPT2", 272, "bfloat16", True, False),
    ],
)
def test_strict_models_share_rows_where_kernels_compute_all_linears_alone(
    tmp_path, monkeypatch, kind, vocabulary, dtype, captured, expected
):
    """On a CPU none do; on a GPU by sizes and dtype, and not where cuBLAS computes some."""
    options = OneLayer(tmp_path, dtype=dtype, residents=2, kind=kind, vocabulary=vocabulary)
    own = Engine(options)
    assert not own.is_by_kernels
    assert captured == (not why_launched(own.step.model.group))

    vars(own).pop("is_by_kernels")
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
