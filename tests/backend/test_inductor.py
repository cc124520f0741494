"""The backend with Inductor behind it: numbers, and what a second process finds in the caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.backend.models import assert_equal_steps, ids, language_model, net, train

ROOT = Path(__file__).parents[2]
CHILD = """
import json, sys, torch
from torch._dynamo.utils import counters
from tests.backend.models import net, train

for alpha in map(float, sys.argv[1:]):
    torch._dynamo.reset()
    counters.clear()
    model, x = net(lora_alpha=alpha), torch.ones(3, 12)
    expected = train(model, model, x)
    compiled = torch.compile(model, backend="tlora-fx", options={"strict": True})
    found = train(model, compiled, x)
    cache = counters["aot_autograd"]
    print(json.dumps({
        "hits": cache["autograd_cache_hit"], "misses": cache["autograd_cache_miss"],
        "error": float((found.output - expected.output).abs().max()),
        "gradients": max(float((found.gradients[n] - g).abs().max())
                         for n, g in expected.gradients.items()),
    }))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A new cache folder; C++ headers are compiled once in it, which takes as long as a model."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="module")
def models(folder):
    """Two processes on one cache folder; the second one's second model has another scaling."""
    found = []
    for seed, *alphas in ((1, "6"), (2, "6", "24")):
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": str(ROOT),
        }
        told = subprocess.run(
            [sys.executable, "-c", CHILD, *alphas],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        found += map(json.loads, told.stdout.splitlines()[-len(alphas) :])
    return found


@pytest.mark.slow
def test_a_second_process_hits_the_cache(models):
    """AOTAutograd's cache serves the lowered graph to a process with another hash seed."""
    assert [(one["hits"], one["misses"]) for one in models[:2]] == [(0, 1), (1, 0)]


@pytest.mark.slow
def test_a_cached_graph_serves_another_scaling(models):
    """The scaling is a table of the graph, not part of its code: a hit, and right numbers."""
    assert models[2]["hits"] == 1
    assert max(models[2]["error"], models[2]["gradients"]) < 1e-4


def test_inductors_code_of_two_linears_equals_eager(monkeypatch, folder):
    """In float32: output and gradients within the bound of rounding."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    require_equal(net(), torch.ones(3, 12), 5e-6)


def require_equal(model, x, bound):
    """One training step of a model compiled by the backend is one of the model as it is."""
    torch._dynamo.reset()
    expected = train(model, model, x)
    compiled = torch.compile(model, backend="tlora-fx", fullgraph=True, options={"strict": True})

    assert_equal_steps(train(model, compiled, x), expected, bound)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bound"), [("llama", 5e-6), ("qwen3", 3e-2)])
def test_inductors_code_equals_eager(family, bound, monkeypatch, folder):
    """Llama in float32 and Qwen3 in bfloat16: output and gradients within the bound of rounding."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    dtype = torch.float32 if family == "llama" else torch.bfloat16
    require_equal(language_model(family, dtype), ids(2, 7), bound)
