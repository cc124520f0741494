"""`benchmarks.tinker` measures what it says: requests, a step over HTTP, models that move."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.tinker import MODELS, _apart, _arguments, measured
from tests.runtime.test_compilation import Pretended
from tlora_fx.model import supermodel
from tlora_fx.runtime.rounds import compilation

SMALL = (
    "--device cpu --layers 2 --hidden 64 --lengths 16 --tenants 2 --repeats 1 --warm-up 1 --compile"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All figures; layers are compiled by a process that is quick, to code that is as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "CompileProcess", partial(Pretended, looks=3))
        patch.setattr(supermodel, "compile_method", lambda *given: None)
        return dict(measured(_arguments(SMALL.split()), tmp_path_factory.mktemp("tinker")))


def test_arms_are_compared_and_timed(found):
    figures = found["16 tokens a request"]

    assert "wrong" not in figures
    assert figures["gain_over_alone"] == pytest.approx(
        figures["alone"]["median"] / figures["cycle"]["median"], rel=1e-2
    )


def test_several_requests_before_a_step_are_timed(found):
    figures = found["4 requests of 16 tokens a step"]

    assert figures["gain"] == pytest.approx(
        figures["calls"]["median"] / figures["cycle"]["median"], rel=1e-2
    )


def test_a_step_over_http_and_models_that_move_are_timed(found):
    wire, models = found["http"], found["models"]

    assert wire["adds_ms"] == pytest.approx(
        wire["http"]["median"] - wire["direct"]["median"], abs=0.1
    )
    assert all(models[name]["least"] > 0 for name in ("created", "from_memory", "from_disk"))
    assert models["mib_a_model"] > 0
    assert MODELS > 1


def test_compiled_layers_are_measured_behind_the_others(found):
    """Once they have taken over, with cycles that ran meanwhile, and compared by their gain."""
    eager, figures = (found[f"16 tokens a request{which}"] for which in ("", ", compiled"))

    assert found["compiling"]["state"] == "compiled"
    assert found["compiling"]["cycle"]["median"] > 0
    assert "wrong" not in figures
    assert figures["gain_over_eager"] == pytest.approx(
        eager["cycle"]["median"] / figures["cycle"]["median"], rel=1e-2
    )


def test_numbers_that_differ_are_not_timed():
    assert _apart((1.0, 2.0), (1.0, 2.1), 1e-2)
    assert not _apart((1.0, 2.0), (1.0, 2.001), 1e-2)
    assert _apart((float("nan"), 2.0), (1.0, 2.0), 1e-2)
