"""Small models that tests share: traced, not trained. Fixtures, known everywhere."""

from __future__ import annotations

from functools import cache

import pytest

from tests.models import base_of, job
from tlora_fx import compiler
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.model.backbone import load_backbone
from tlora_fx.pipeline import Runner, parse_pipeline
from tlora_fx.tracing.adapters import resolve_sites

KINDS = {
    "plain": {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1},
    "few": {"r": 2, "target_modules": ["q_proj"]},
    "other": {"r": 2, "target_modules": ["q_proj"], "lora_alpha": 4},
    "dora": {"r": 3, "target_modules": ["q_proj"], "use_dora": True, "lora_dropout": 0.1},
    "dropping": {"r": 3, "target_modules": ["q_proj"], "use_dora": True, "lora_dropout": 0.25},
    "head": {"r": 2, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A Llama of four layers in float32."""
    folder = tmp_path_factory.mktemp("llama")
    return base_of(folder, "llama", dtype="float32", num_hidden_layers=4)


@pytest.fixture(scope="session")
def backbone(base):
    """The Llama on meta."""
    return load_backbone(base)


@pytest.fixture(scope="session")
def group_after(base, backbone):
    """Jobs of these kinds as a group, after a pipeline: `group_after("tag-roles", "plain")`.

    Made once for all tests that only look at it; one that changes it asks for `fresh=True`.
    """
    compiler.find_passes()

    def make(passes: str, *kinds: str) -> GroupGraph:
        runner = Runner(parse_pipeline(passes))
        traced = compiler.base_graph(backbone, "packed")
        runner.run_job(traced)
        graphs = []
        for kind in kinds:
            own = job(kind, base, **KINDS[kind])
            graphs.append(
                compiler.job_graph(
                    own, backbone, resolve_sites(own, backbone), "packed", exact=True
                )
            )
            runner.run_job(graphs[-1])
        group = GroupGraph(traced, graphs, exact=True)
        runner.run_group(group)
        return group

    known = cache(make)
    return lambda *args, fresh=False: (make if fresh else known)(*args)


@pytest.fixture(scope="session")
def nodes_of():
    """All nodes of a group or job graph, root and blocks: `nodes_of(group, "linear")`."""

    def find(graphs, name: str = "", **meta):
        return [
            node
            for graph in graphs.graphs()
            for node in graph.nodes
            if name in str(node.target) and all(node.meta.get(k) == v for k, v in meta.items())
        ]

    return find
