"""Tokens drawn by graphs are those that are drawn by launches, whatever grows beside them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.runtime.groups import make_job, tiny_base
from tlora_fx import GroupStep, Sampler
from tlora_fx.compiler import compile
from tlora_fx.ops.paged_attention import KeyValuePages
from tlora_fx.runtime.sampling import token_graphs
from tlora_fx.runtime.sampling.token_graphs import TokenGraph, TokenGraphs, size_for

PROMPTS = {"a": [[3, 4, 5], [7]], "b": [[9] * 20, [2, 3]], "c": [[11, 12]]}


def capture(self, pool, stream):
    """A graph on a CPU launches anew, into the tensors of its capture."""
    self._drawn = self._launch(self._given)

    def replay():
        for mine, new in zip(self._drawn, self._launch(self._given), strict=True):
            mine.copy_(new)

    self._graph = SimpleNamespace(replay=replay)


@pytest.fixture
def step(tmp_path):
    base = tiny_base(tmp_path)
    group = GroupStep(compile([make_job(base, name) for name in "abc"]), device="cpu")
    group.prepare()
    stir(group, 0)
    return group


@pytest.fixture
def emulated(monkeypatch):
    """Gives a sampler graphs on the CPU."""
    for name, value in {
        "graph_pool_handle": lambda: 0, "current_stream": lambda device: None,
        "device": lambda device: nullcontext(), "Stream": object,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(TokenGraph, "capture", capture)

    def graphs_for(sampler):
        def make(pages, width, options):
            if sampler.graphs is None or not sampler.graphs.fits(pages + 1, width, options):
                cache = KeyValuePages(pages + 1, 16)
                model, device = sampler.step.model, torch.device("cpu")
                sampler.graphs = TokenGraphs(model, device, cache, options, width)
            return sampler.graphs

        monkeypatch.setattr(sampler, "_graphs_for", make)
        return sampler

    return graphs_for


def stir(group, seed):
    torch.manual_seed(seed)
    for member in group.members.values():
        for parameter in member.parameters.values():
            parameter.data.normal_(std=0.5)


def require_same(found, expected):
    """The same tokens, by numbers that are equal but for rounding: sums of another size differ."""
    assert found.keys() == expected.keys()
    for name, drawn in expected.items():
        for mine, theirs in zip(found[name], drawn, strict=True):
            assert [each.tokens for each in mine] == [each.tokens for each in theirs]
            for one, other in zip(mine, theirs, strict=True):
                assert one.finish_reason == other.finish_reason
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)


def test_sizes_are_powers_of_two():
    """None is below two, for no dimension may be one."""
    assert [size_for(n) for n in (1, 2, 3, 4, 5, 33, 64)] == [2, 2, 4, 4, 8, 64, 64]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}])
def test_graphs_draw_what_launches_draw(step, emulated, options):
    """Of completions that end at different times, and of adapters that have trained meanwhile."""
    plain, captured = Sampler(step), emulated(Sampler(step))
    settled = {"n": 3, "max_new_tokens": 24, "stop": (5, 9), **options}
    for seed in range(3):
        stir(step, seed)
        expected = plain.sample(PROMPTS, seed=seed, **settled)
        found = captured.sample(PROMPTS, seed=seed, **settled)
        require_same(found, expected)
    assert len(captured.graphs._graphs) >= 2
    assert captured.graphs.replayed > 20


def test_another_call_has_other_graphs_where_they_do_not_serve(step, emulated):
    """Longer completions need other pages, other options draw otherwise; else they stay."""
    sampler = emulated(Sampler(step))

    def graphs(**options):
        sampler.sample({"a": [[3]]}, **{"max_new_tokens": 20, "seed": 1, "stop": (), **options})
        return sampler.graphs

    first = graphs()
    assert graphs() is first
    assert graphs(max_new_tokens=5) is first
    longer = graphs(max_new_tokens=40)
    assert longer is not first
    assert graphs(temperature=0.0) is not longer


def test_a_model_that_cannot_be_captured_is_launched(step, emulated, monkeypatch):
    """What is drawn is the same, and the reason is kept."""

    def refuse(self, pool, stream):
        raise RuntimeError("it reads a table on the host")

    monkeypatch.setattr(TokenGraph, "capture", refuse)
    monkeypatch.setattr(token_graphs, "forget_capture", lambda *_: None)
    plain, sampler = Sampler(step), emulated(Sampler(step))

    found = sampler.sample(PROMPTS, max_new_tokens=9, seed=4, stop=())

    require_same(found, plain.sample(PROMPTS, max_new_tokens=9, seed=4, stop=()))
    assert "reads a table" in sampler.graphs.refused
    assert sampler.graphs.replayed == 0


def test_a_graph_without_memory_is_tried_again(step, emulated, monkeypatch):
    """Tokens of its size are launched meanwhile."""
    tries = []

    def full(self, pool, stream):
        tries.append(self)
        if len(tries) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        capture(self, pool, stream)

    monkeypatch.setattr(TokenGraph, "capture", full)
    monkeypatch.setattr(token_graphs, "forget_capture", lambda *_: None)
    plain, sampler = Sampler(step), emulated(Sampler(step))
    settled = {"max_new_tokens": 12, "seed": 4, "stop": ()}

    require_same(sampler.sample(PROMPTS, **settled), plain.sample(PROMPTS, **settled))
    assert len(tries) == 3
    assert sampler.graphs.refused == ""
    assert sampler.graphs.replayed > 0


def test_a_row_that_needs_memory_takes_what_is_kept(step, emulated):
    """Between two calls, and between two tokens, and what is drawn stays."""
    plain, sampler = Sampler(step), emulated(Sampler(step))
    settled = {"max_new_tokens": 12, "seed": 3, "stop": ()}
    expected = plain.sample(PROMPTS, **settled)
    require_same(sampler.sample(PROMPTS, **settled), expected)
    kept = sampler.graphs

    step.free_memory()

    assert sampler.graphs is None
    assert not kept._graphs
    sampler.between = step.free_memory
    require_same(sampler.sample(PROMPTS, **settled), expected)
    assert sampler.graphs is None
