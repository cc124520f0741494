"""How a model is compiled is how its nano-batches are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from tests import models
from tlora_fx.cost.plan import Plan
from tlora_fx.parallel.apply import RowRunner
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.parallel.nano_batches import NanoModel, OverlapPass, inductor_options, region_options
from tlora_fx.parallel.prepare import prepared

LENGTHS = ([5, 3], [4, 6])

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Two jobs on a GPT-2 of two layers, which computes everything in float64."""
    base = models.base_of(tmp_path_factory.mktemp("gpt2"), "gpt2", n_layer=2)
    return [models.job(name, base, r=4, target_modules=["c_attn", "c_fc"]) for name in "ab"]


class Recorder:
    """A backend that runs graphs as they are, and counts the attentions of each."""

    def __init__(self) -> None:
        self.attentions: list[int] = []
        self.options: list[Any] = []

    def __call__(self, module: fx.GraphModule, inputs: Any, **given: Any) -> Any:
        """The graph itself."""
        calls = [node for node in module.graph.nodes if "packed_attention" in str(node.target)]
        self.attentions.append(len(calls))
        self.options.append(given.get("options"))
        return module.forward


def parts():
    """Two sequences a job."""
    return [models.tokens(lengths, seed=place) for place, lengths in enumerate(LENGTHS)]


def assert_equal(model, expected):
    """Losses and gradients of the row are those of the whole row, uncompiled."""
    found = models.run_fused(model, parts())
    for name, own in expected.items():
        models.assert_same(found[name], own, 1e-9, name)


@pytest.mark.parametrize("when", ["before", "after"])
def test_nano_batches_run_what_the_models_own_backend_made(jobs, when):
    """Compiled before a runner cuts rows, or since; with its options; in one graph."""
    model, backend = models.ready(jobs), Recorder()
    expected = models.run_fused(model, parts())
    runner = RowRunner(model, Mesh.alone("cpu"))
    options = {"asked": 7}
    if when == "before":
        model.compile(backend=backend, options=options)
    runner.nano_batches = 2
    if when == "after":
        assert_equal(model, expected)
        model.compile(backend=backend, options=options)

    assert_equal(model, expected)

    # Two nano-batches of both layers at once.
    assert max(backend.attentions) == 4
    assert backend.options == [options] * len(backend.options)


def test_another_compile_reaches_nano_batches_that_have_run(jobs):
    """What the first backend made is not kept."""
    model, first, second = models.ready(jobs), Recorder(), Recorder()
    expected = models.run_fused(model, parts())
    nano = NanoModel(model)
    nano.count = 2
    model.compile(backend=first)
    assert_equal(model, expected)
    torch._dynamo.reset()
    seen = len(first.attentions)

    model.compile(backend=second)
    assert_equal(model, expected)

    assert max(second.attentions) == 4
    assert len(first.attentions) == seen


def test_what_a_model_was_compiled_with_is_told(jobs):
    """And is not lost where a plan makes another model of it."""
    model = models.compile(jobs)
    assert model.compiled_with is None

    model.compile(backend="eager", dynamic=True)
    made = prepared(model, Plan(planner="single", recompute=True))

    assert made is not model
    assert made.is_compiled
    assert made.compiled_with == {"fullgraph": True, "dynamic": True, "backend": "eager"}


class Theirs(CustomGraphPass):
    """A user's own pass."""

    def __init__(self, known: Any = "theirs") -> None:
        self.known, self.runs = known, 0

    def __call__(self, graph: fx.Graph) -> None:
        """Count."""
        self.runs += 1

    def uuid(self) -> Any:
        """What it is known by."""
        return self.known


def config_of(**given):
    """What torch makes of these words for Inductor."""
    words = {"mode": None, "options": None, "dynamic": None} | given
    wrapper = torch._TorchCompileInductorWrapper(words["mode"], words["options"], words["dynamic"])
    return wrapper.config


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mode": "max-autotune-no-cudagraphs"},
        {"mode": "reduce-overhead", "backend": "inductor"},
        {"options": {"max-autotune": True, "epilogue_fusion": False}, "dynamic": False},
        {"options": {"reorder_for_peak_memory": True}},
    ],
    ids=str,
)
def test_inductor_has_the_schedule_beside_all_that_was_asked_for(given):
    """As torch itself reads modes and options; what was asked for stands first."""
    asked = {key: given[key] for key in ("mode", "options", "dynamic") if key in given}

    made = region_options({"fullgraph": True, **given})

    found, wanted = config_of(options=made["options"]), config_of(**asked)
    assert "mode" not in made
    assert {key: found[key] for key in wanted} == wanted
    assert set(found) == set(wanted) | set(inductor_options())
    assert isinstance(found["post_grad_custom_post_pass"], OverlapPass)
    assert {key: made[key] for key in ("fullgraph", "dynamic") if key in given} == {
        key: given[key] for key in ("fullgraph", "dynamic") if key in given
    }


def test_a_pass_of_the_users_own_runs_before_the_schedule():
    """Both are part of what compiled code is known by."""
    theirs = Theirs()
    options = {"post_grad_custom_post_pass": theirs}

    made = region_options({"options": options})["options"]["post_grad_custom_post_pass"]
    graph = fx.Graph()
    graph.output(None)
    made(graph)

    assert theirs.runs == 1
    assert len({made.uuid(), OverlapPass().uuid(), OverlapPass(Theirs("other")).uuid()}) == 3
    assert OverlapPass(Theirs(None)).uuid() is None
    assert options == {"post_grad_custom_post_pass": theirs}


def test_another_backend_gets_what_it_was_given():
    """The schedule is for Inductor alone."""
    given = {"fullgraph": True, "dynamic": None, "backend": "aot_eager", "options": {"a": 1}}

    assert region_options(given) == {
        "fullgraph": True, "backend": "aot_eager", "options": {"a": 1},
    }  # fmt: skip
