"""Values of a traced graph's nodes: what torch computed while it traced."""

from __future__ import annotations

import pytest

from tests.models import FAMILIES, MIXTURES, base_of, job
from tlora_fx.ir import shapes
from tlora_fx.model.backbone import load_backbone
from tlora_fx.tracing import export
from tlora_fx.tracing.adapters import resolve_sites


@pytest.mark.parametrize(("family", "target"), [("llama", "down_proj"), ("llama4", "o_proj")])
def test_what_torch_ran_is_not_run_again_and_would_give_the_same(
    tmp_path, monkeypatch, family, target
):
    """Strides too, of which torch leaves some open in lines of several sequences."""
    ran, run = [], shapes._run
    monkeypatch.setattr(shapes, "_run", lambda node, *given: ran.append(node) or run(node, *given))
    backbone = load_backbone(base_of(tmp_path, family, num_hidden_layers=2))
    own = job("one", backbone.spec, r=2, target_modules=[target], lora_dropout=0.1)
    form = (FAMILIES | MIXTURES)[family].form
    traced = export.trace_job(own, backbone, resolve_sites(own, backbone), form)
    nodes = [
        node
        for node in traced.root.nodes
        if node.op == "call_function" and node.target is not export.ASSERTION
    ]

    assert len(ran) < len(nodes) / 3
    mode = shapes.fake_mode_of(traced.root)
    values = [node.meta["val"] for node in nodes]
    for node in nodes:
        node.meta.pop(shapes.RUN)
        shapes.give_value(node, mode)
    assert all(node.meta["val"] is value for node, value in zip(nodes, values, strict=True))
