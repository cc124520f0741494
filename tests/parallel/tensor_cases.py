"""Models that are cut over the processes of a group, beside the same models whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import models
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.ir.storage import LocalShard, Shard
from tlora_fx.model.batch import JobTokens
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops import use_group
from tlora_fx.passes.tensor_parallel.shard import ShardTensor
from tlora_fx.pipeline import Pipeline, Runner
from tlora_fx.pipeline.instrument import Event
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters

SMALL = {"vocab_size": 64, "num_hidden_layers": 2}
# By family: what its config says instead, and its linears.
BASES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "attention_bias": True, "mlp_bias": True},
    "qwen2": SMALL,
    "qwen3": SMALL,
    "gemma2": {"vocab_size": 64, "num_hidden_layers": 2},
    "gpt2": {"vocab_size": 64, "n_layer": 2},
    "gpt-neox": SMALL,
    "phi3": SMALL,
}


def base_of(folder: Path, family: str, **changes: Any) -> BaseSpec:
    """A small base whose vocabulary divides."""
    return models.base_of(folder, family, **(BASES.get(family, SMALL) | changes))


def dropping_jobs(base: BaseSpec, *more: Job) -> list[Job]:
    """Jobs that drop at every linear, do not drop, adapt a few linears, or have no tokens."""
    every = {"r": 4, "target_modules": "all-linear"}
    return [
        models.job("drops", base, 1, **every, lora_dropout=0.2),
        models.job("keeps", base, 2, r=3, lora_alpha=9, target_modules="all-linear"),
        models.job("idle", base, 3, **every, lora_dropout=0.1),
        *more,
    ]


def parts_of(jobs: Sequence[Job]) -> list[JobTokens]:
    """Sequences of unequal lengths; the job "idle" has none."""
    lengths = {"drops": (5, 3), "keeps": (7,), "idle": ()}
    return [
        models.tokens(lengths.get(job.name, (4, 2)), seed=place, step=2)
        for place, job in enumerate(jobs)
    ]


def whole_model(jobs: Sequence[Job]) -> SuperModel:
    """The jobs' model on one process, with random adapters."""
    return models.ready(jobs)


def cut_model(whole: SuperModel, rank: int, size: int) -> SuperModel:
    """A process's part of the same model; it shares graphs with the whole one, which has run."""
    group = whole.group
    Runner(Pipeline(())).run_one(Event(1, ShardTensor(size), "group", group))
    model = SuperModel(group, whole.backbone, whole.jobs)
    model.materialize(base_tensors(whole.backbone), "cpu", LocalShard(None, rank))
    return model


def take_adapters(model: SuperModel, whole: SuperModel) -> None:
    """Let a cut model have the pieces of the whole one's adapters."""
    for job in model.jobs:
        values, shards = whole.job_parameters(job.name), model.shards(job.name)
        for name, parameter in model.job_parameters(job.name).items():
            shard = shards[name]
            value = values[name].detach()
            parameter.data.copy_(value if shard is None else shard.of(value))


def joined(model: SuperModel, outcomes: dict[str, models.Outcome]) -> dict[str, models.Outcome]:
    """Losses as they are, and whole gradients: pieces side by side, parts summed."""
    for job in model.jobs:
        shards, gradients = model.shards(job.name), outcomes[job.name].gradients
        for name, gradient in gradients.items():
            shard, other = shards[name], shards.get(_other_half(name))
            if shard is not None:
                gradients[name] = _side_by_side(gradient, shard)
            elif other is not None:
                dist.all_reduce(gradient)
            else:
                assert_same_everywhere(gradient, name)
    return outcomes


def assert_same_everywhere(value: Tensor, what: str) -> None:
    """All processes have the same bits."""
    first = value.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, value), what


def _other_half(name: str) -> str:
    pairs = {"lora_A": "lora_B", "lora_B": "lora_A"}
    return next((name.replace(a, b) for a, b in pairs.items() if a in name), "")


def _side_by_side(piece: Tensor, shard: Shard) -> Tensor:
    pieces = [torch.empty_like(piece.contiguous()) for _ in range(shard.count)]
    dist.all_gather(pieces, piece.contiguous())
    return shard.joined(pieces)


def equal_to_one_process(jobs: Sequence[Job], *, traced: bool = False) -> list[str]:
    """Run a row whole and cut, assert that losses and gradients agree; returns the passes' notes.

    traced   run it once more with layers as torch.compile traces them, forward and backward
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    use_group("tp", dist.group.WORLD)
    whole, parts = whole_model(jobs), parts_of(jobs)
    expected = models.run_fused(whole, parts)
    model = cut_model(whole, rank, size)
    take_adapters(model, whole)
    for compiled in (False, True)[: 1 + traced]:
        if compiled:
            model.compile(backend="aot_eager")
        found = joined(model, models.run_fused(model, parts))
        for job in jobs:
            assert_same_everywhere(found[job.name].loss, f"{job.name} loss")
            models.assert_same(found[job.name], expected[job.name], 1e-9, job.name)
    assert_starts_as_one_process(whole, model)
    return [told for name, told in model.group.notes if name == ShardTensor.name]


def assert_starts_as_one_process(whole: SuperModel, model: SuperModel) -> None:
    """Fresh adapters are the pieces of what one process draws."""
    start_adapters(whole)
    start_adapters(model)
    for job in model.jobs:
        values, shards = whole.job_parameters(job.name), model.shards(job.name)
        for name, parameter in model.job_parameters(job.name).items():
            shard = shards[name]
            assert torch.equal(parameter, values[name] if shard is None else shard.of(values[name]))
