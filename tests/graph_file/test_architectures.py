"""The text of every state of every tested architecture is read back as it was."""

from __future__ import annotations

import pytest

from tests.graph_file.test_document import assert_same_nodes
from tests.models import FAMILIES, MIXTURES, base_of, mixed_jobs
from tlora_fx.compiler import prepare, resolve_pipeline
from tlora_fx.graph_file import graph_text, graphs_of_text
from tlora_fx.ir.verifier import fingerprint
from tlora_fx.tools.bisect import trace_states

#: Mixtures of unlike form: routed by softmax or sigmoid, latent attention, sinks.
ROUTED = ("qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss")
FORMS = [*((family, "auto") for family in (*FAMILIES, *ROUTED)), ("llama", "batch")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention"), FORMS)
def test_every_state_is_read_back(family, attention, tmp_path):
    """Nodes with their names, values, tags and origins; and it is written alike again."""
    base = base_of(tmp_path, family, "float32", attention=attention)
    jobs = mixed_jobs(base, (FAMILIES | MIXTURES)[family].targets)
    states = trace_states(prepare(jobs), resolve_pipeline())

    for place in range(len(states.pipeline.passes) + 1):
        group = states.after(place).group
        text = graph_text(group)
        read = graphs_of_text(text)
        assert graph_text(read) == text
        assert fingerprint(read) == fingerprint(group)
        assert_same_nodes(group, read)
        assert (read.notes, read.facts, read.exact, read.open) == (
            group.notes, group.facts, group.exact, group.open,
        )  # fmt: skip
        for one, two in zip([group.base, *group.jobs], [read.base, *read.jobs], strict=True):
            assert (one.name, one.sites, one.plan, one.facts, one.notes, one.repeated) == (
                two.name, two.sites, two.plan, two.facts, two.notes, two.repeated,
            )  # fmt: skip
