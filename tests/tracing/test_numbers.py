"""A traced graph serves jobs of every rank, scaling and dropout rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.models import base_of, job, ready, restart, run_fused, tokens
from tlora_fx import compiler
from tlora_fx.config.job import Job
from tlora_fx.graph_file import graph_text
from tlora_fx.host import environment
from tlora_fx.model.backbone import load_backbone
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.pipeline import Runner
from tlora_fx.runtime.adapters.files import base_tensors
from tlora_fx.tracing import export, trace_cache
from tlora_fx.tracing.adapters import resolve_sites

OF_SECOND_LAYER = st.dictionaries(st.just(r"(.*\.)?1\.self_attn\.q_proj"), st.integers(1, 9))
# To shrink what fails, each try would trace.
DRAWN: dict[str, Any] = {
    "phases": (Phase.explicit, Phase.generate), "suppress_health_check": list(HealthCheck)
}  # fmt: skip
NUMBERS = st.fixed_dictionaries({
    "r": st.integers(1, 17),
    "lora_alpha": st.integers(1, 40),
    "use_rslora": st.booleans(),
    "rank_pattern": OF_SECOND_LAYER,
    "alpha_pattern": OF_SECOND_LAYER,
    "lora_dropout": st.sampled_from((0.0, 0.25)),
})  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of two layers; a cache of its own has the graph of a job on it."""
    folder = tmp_path_factory.mktemp("numbers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLORA_FX_CACHE", str(folder / "cache"))
        patch.setenv(environment.TRACE_CACHE, "64")
        spec = base_of(folder, "llama", "float32", num_hidden_layers=2)
        compiler.compile([adapted(spec, r=5)])
        yield spec


def adapted(base, **numbers) -> Job:
    return job("one", base, target_modules=["q_proj", "down_proj"], **numbers)


def refuse(*given, **named):
    raise AssertionError("it is traced again")


def read_from_cache(own: Job) -> SuperModel:
    """The job's model; nothing is traced for it."""
    with pytest.MonkeyPatch.context() as patch:
        # Keys say what stands in the modules that trace, so those stay as they are.
        patch.setattr(torch.export, "export", refuse)
        return ready([own])


def traced_for(own: Job) -> SuperModel:
    """The job's model of a graph that was traced with the job's own numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environment.TRACE_CACHE, "0")
        prepared = replace(compiler.prepare([own]), exact=True)
        group = compiler.fuse(prepared, Runner(compiler.resolve_pipeline()))
    model = SuperModel(group, prepared.backbone, prepared.jobs)
    model.materialize(base_tensors(model.backbone), "cpu")
    restart(model)
    return model


def require_same_bits(own: Job) -> None:
    """Loss and gradients by a graph from the cache are those by a graph for this job alone."""
    part = [tokens([9, 6], seed=3)]
    found, expected = (run_fused(make(own), part)["one"] for make in (read_from_cache, traced_for))

    assert torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


@settings(max_examples=1, **DRAWN)
@given(NUMBERS)
def test_a_job_of_other_numbers_trains_by_the_same_graph(base, numbers):
    """PEFT's patterns give one module a rank and a scaling of its own."""
    require_same_bits(adapted(base, **numbers))


@pytest.mark.slow
@settings(max_examples=30, **DRAWN)
@given(NUMBERS)
def test_jobs_of_many_numbers_train_by_the_same_graph(base, numbers):
    """Its quicker sister draws one."""
    require_same_bits(adapted(base, **numbers))


def test_a_graph_from_the_cache_is_the_one_that_is_traced(base):
    """Numbers in it are placeholders, wherever it comes from; its sites have the job's own."""
    own, backbone = adapted(base, r=3, lora_alpha=7), load_backbone(base)
    sites = resolve_sites(own, backbone)
    read = trace_cache.job_graph(own, backbone, sites, "packed")
    traced = export.trace_job(own, backbone, sites, "packed")

    assert graph_text(read) == graph_text(traced)
    assert read.sites == traced.sites == sites
