"""A model and jobs small enough for a test, and whether two states of their graphs agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tlora_fx.compiler import Jobs, resolve_pipeline, run_passes
from tlora_fx.config.base_spec import DtypeName
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.errors import PipelineError
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.numerics.evaluate import bound_of, evaluate, identical, worst
from tlora_fx.numerics.rows import ProbeRows
from tlora_fx.numerics.state import layers_to_run
from tlora_fx.numerics.tensors import Seeded
from tlora_fx.pipeline import Pipeline

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def small_base(
    folder: Path, model_type: str = "llama", dtype: DtypeName = "float32", **config: Any
) -> BaseSpec:
    """A base of three layers; its weights are drawn from a seed.

    model_type   one of transformers', such as "qwen3" or "gpt2"
    """
    from transformers import AutoConfig

    written = AutoConfig.for_model(model_type, **{**SIZES, **config})
    written.save_pretrained(folder)
    return BaseSpec(config=folder, dtype=dtype)


def small_job(name: str, base: BaseSpec, **lora: Any) -> Job:
    """A job that is compiled and not trained.

    lora   fields of its LoraConfig; rank 4 on q_proj and down_proj where nothing is said
    """
    fields = {"r": 4, "target_modules": ["q_proj", "down_proj"], **lora}
    return Job(name=name, base=base, lora=fields, data={"path": "unused.jsonl"})


def around(
    jobs: Jobs, added: str, pipeline: str | Pipeline | None = None
) -> tuple[GroupGraph, GroupGraph]:
    """The graphs of jobs before and after a pass that is added to a pipeline.

    added      "my-pass{option=3}@after:fuse-backbone", or @before:
    returns    two groups that share nothing; where the pass is a job pass, they are not fused
    raises     TloraError as compiling does
    """
    passes = resolve_pipeline(pipeline)
    longer = passes.adding(added)
    pairs = zip(longer.passes, (*passes.passes, None), strict=True)
    index = next(index for index, (new, old) in enumerate(pairs) if new != old)
    earlier = Pipeline(longer.passes[:index])
    if not earlier.passes:
        raise PipelineError(
            "there are no graphs before the first pass to compare with",
            found=added,
            help="add it after a pass: @after:drop-export-noise",
        )
    return run_passes(jobs, earlier), run_passes(jobs, Pipeline(longer.passes[: index + 1]))


def assert_equivalent(
    before: GroupGraph, after: GroupGraph, *, exact: bool = False, seed: int = 0
) -> None:
    """Assert that two states of the same jobs give each job the same loss and gradients.

    Both run forward and backward on a small seeded row with seeded weights: one layer of each
    structure, each job alone where the jobs are not fused, dropout with each job's own masks.

    exact    the same bits; else up to the rounding of the graphs' dtypes (`docs/numerics.md`)
    raises   AssertionError, which names the job and the loss or gradient that differs most
    """
    layers = layers_to_run(before) | layers_to_run(after)
    rows = ProbeRows(before.job_names, before.form, seed, None, before.vocabulary)
    tensors = Seeded(seed, {})
    outcomes = [evaluate(state, layers, rows, tensors) for state in (before, after)]
    if identical(*outcomes):
        return
    largest, bound = worst(*outcomes), bound_of(before)
    if exact or not largest.relative <= bound:
        limit = "the same bits" if exact else f"at most {bound:.0e}"
        raise AssertionError(
            f"{largest.what} of job '{largest.job}' differs by {largest.relative:.1e}, "
            f"expected {limit}"
        )
