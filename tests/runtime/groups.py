"""Small groups of jobs to train: a tiny Llama in float64, samples from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tests.models import save
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.runtime.data.encode_data import encode_once
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.data.tables import Cut, SampleTable, TokenRow, record_batch

VOCABULARY = 53
#: Sizes of a base that reads the tokens of `make_tokenizer`, and does not say always the same.
READING: Mapping[str, Any] = {
    "vocab_size": 128, "initializer_range": 0.3, "attention_bias": True, "num_hidden_layers": 1,
}  # fmt: skip


def tiny_base(folder: Path, dtype: str = "float64", **changes: Any) -> BaseSpec:
    """A Llama of two layers that is drawn from a seed."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    save(transformers.LlamaConfig(**(sizes | changes)), folder)
    return BaseSpec(config=folder, dtype=dtype, seed=7)


def make_job(base: BaseSpec, name: str, **fields: Any) -> Job:
    """A job with short steps; LoRA fields are given as `lora`."""
    lora = {"target_modules": ["q_proj", "v_proj"]} | fields.pop("lora", {})
    lora = lora if "peft_type" in lora else {"r": 4} | lora
    settled = {"per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2} | fields
    return Job(name=name, base=base, lora=lora, data={"path": "unused.jsonl"}, **settled)


def make_data(jobs: Sequence[Job], longest: int = 9, count: int = 11) -> dict[str, JobData]:
    """Samples for each job, which depend on its name and seed alone."""
    return {job.name: _data(job, longest, count) for job in jobs}


def _data(job: Job, longest: int, count: int) -> JobData:
    samples = draw_samples(f"{job.name} {job.seed}", longest, count)
    has_more = job.eval_data is not None
    more = draw_samples(f"{job.name} {job.seed} evaluation", longest, 5) if has_more else []
    if job.named_loss is not None:
        draw = random.Random(job.name)
        samples, more = scored(samples, draw), scored(more, draw)
    return JobData(job, samples, DataReport(), more)


def table_of(samples: Sequence[Sample]) -> SampleTable:
    """A table that holds samples whose labels are ids or -100."""

    def rows():
        for sample in samples:
            trains = [label != -100 for label in sample.labels]
            runs = groupby(range(len(trains)), trains.__getitem__)
            ends = [(own[0], own[-1] + 1) for trained, at in runs if trained and (own := list(at))]
            yield TokenRow(sample.input_ids, [*chain(*ends)])

    table = encode_once((), lambda counts: [record_batch([*rows()])], lambda counts: True)
    return SampleTable(table, np.arange(len(table)), Cut(max_length=2**31 - 1))


def draw_samples(key: str, longest: int, count: int) -> list[Sample]:
    """Samples of up to `longest` tokens, each with a target at least."""
    draw = random.Random(key)
    samples = []
    for _ in range(count):
        ids = tuple(draw.randrange(1, VOCABULARY) for _ in range(draw.randint(2, longest)))
        prompt = draw.randint(0, len(ids) - 2)
        samples.append(Sample(ids, (-100,) * prompt + ids[prompt:]))
    return samples


def scored(samples, draw, spread=1.0):
    """Samples that say of each token what it cost when it was sampled, and what it was worth."""
    return [
        replace(
            sample,
            logprobs=tuple(-draw.uniform(4 - spread, 4 + spread) for _ in sample.labels),
            advantages=tuple(draw.uniform(-1, 1) for _ in sample.labels),
            weights=tuple(draw.uniform(0.2, 2) for _ in sample.labels)
            if draw.random() < 0.5
            else None,
        )
        for sample in samples
    ]


def losses_of(folder: Path, jobs: Sequence[Job]) -> Mapping[str, list[float]]:
    """Each job's losses as its metrics have them."""
    return {
        job.name: [row["loss"] for row in _metrics(folder, job) if "loss" in row] for job in jobs
    }


def evaluations_of(folder: Path, jobs: Sequence[Job]) -> Mapping[str, list[dict[str, float]]]:
    """Each job's evaluations as its metrics have them, without their times."""
    return {
        job.name: [
            {name: value for name, value in row.items() if name != "eval_runtime"}
            for row in _metrics(folder, job)
            if "loss" not in row
        ]
        for job in jobs
    }


def _metrics(folder: Path, job: Job) -> list[dict[str, float]]:
    from tlora_fx.runtime.run_folder import read_metrics

    return read_metrics(folder / job.name / "metrics.jsonl")


def shuffle_inductor_choices(monkeypatch):
    """Let Inductor find another configuration the fastest each time, and keep none.

    Bits must not depend on it.
    """
    from torch._inductor import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    drawn = random.Random(1)
    monkeypatch.setattr(config, "force_disable_caches", True)
    monkeypatch.setattr(
        CachingAutotuner, "benchmark_all_configs",
        lambda tuner, *_, **__: {each: drawn.random() for each in tuner.launchers},
    )  # fmt: skip
