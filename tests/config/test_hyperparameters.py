"""Hyperparameters of a job as people compare them."""

from __future__ import annotations

import pytest

from tests.models import job
from tlora_fx.config.hyperparameters import hyperparameters, learning_rate_of, rank_of
from tlora_fx.config.job import BaseSpec


@pytest.fixture
def spec(tmp_path):
    """The spec of a job of rank 4 with a learning rate of 0.001, as the ledger keeps it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text("")
    made = job("a", BaseSpec(config=tmp_path), r=4, target_modules=["q_proj", "v_proj"])
    made = made.model_copy(update={"learning_rate": 1e-3, "warmup_steps": 5})
    return made.model_dump(mode="json")


def test_the_main_ones_are_always_shown_and_the_others_where_they_differ(spec):
    """By the names of the job file."""
    shown = hyperparameters(spec)

    assert next(iter(shown)) == "lora.r"
    assert (shown["lora.r"], shown["lora.target_modules"]) == ("4", "q_proj, v_proj")
    assert (shown["learning_rate"], shown["optim"], shown["seed"]) == ("0.001", "adamw", "0")
    assert shown["warmup_steps"] == "5"
    assert not {"weight_decay", "packing", "eval_strategy", "data", "base"} & set(shown)


def test_rank_and_rate_are_known_of_any_spec(spec):
    """PEFT's default rank where none is given; nothing of an adapter that is continued."""
    assert (rank_of(spec), learning_rate_of(spec)) == (4, 1e-3)
    assert rank_of({"lora": {"lora_alpha": 4}}) == 8
    assert rank_of({"lora": {"peft_type": "IA3"}}) is None
    assert rank_of({"lora": None, "adapter": "/a"}) is None
    assert (hyperparameters({}), learning_rate_of({})) == ({}, None)
