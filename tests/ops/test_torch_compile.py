"""What torch.compile keeps apart, and what it is spared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
import torch
import torch.compiler.config as settings
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from tlora_fx.ops.torch_compile import HELD, mark_compile_caches, mend, widen


@pytest.fixture
def tag(monkeypatch):
    """The tag after marking, with the user's own and an environment before."""
    before = settings.cache_key_tag

    def marked(users="", **environment):
        settings.cache_key_tag = users
        for name, value in environment.items():
            monkeypatch.setenv(f"TLORA_FX_{name}", value)
        mark_compile_caches()
        return settings.cache_key_tag

    yield marked
    settings.cache_key_tag = before


def test_importing_the_operators_marks_the_caches():
    """Whoever compiles them has imported them."""
    assert "tlora_fx=" in settings.cache_key_tag


@pytest.mark.parametrize(("name", "value"), [("KERNELS", "on"), ("STRICT", "1")])
def test_another_mode_is_another_tag(tag, name, value):
    """What was compiled under one mode is not found under another."""
    assert tag() != tag(**{name: value})


def test_another_width_of_vectors_is_another_tag(tag, monkeypatch):
    """A cache that another machine filled may hold loops for vectors that this one lacks."""
    here = tag()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")

    assert tag() != here


def test_the_users_tag_stays(tag):
    """Ours stands behind it, and alone where there is none."""
    assert tag("mine") == f"mine;{tag()}"


def test_marking_again_changes_nothing(tag):
    """Nor does it where the mode has gone and come back."""
    once = tag("mine")

    assert tag(once) == once
    assert tag(tag(once, KERNELS="off"), KERNELS="auto") == once


def test_torch_asks_for_the_tag():
    """The setting is in the keys of Inductor's cache, on which AOTAutograd's are built."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails
    from torch._inductor.codecache import FxGraphHashDetails

    assert issubclass(AOTAutogradCacheDetails, FxGraphHashDetails)
    assert "cache_key_tag" in FxGraphHashDetails.__init__.__code__.co_names


class Dividing:
    """As torch 2.11 writes a launch."""

    mode = "python"

    def generate(self, meta):
        self.prefix = ["y_grid_raw_ = -(ynumel // -4)", "y_grid_div_ = -(y_grid_raw_ // -65535)"]
        self.y_grid = "-((y_grid_raw_) // -(y_grid_div_))"


def layers_and_blocks(grid, rows):
    """What a launch over so many rows comes to."""
    scope = {"ynumel": rows}
    for line in grid.prefix:
        exec(line, scope)
    return scope["y_grid_div_"], eval(grid.y_grid, scope)


@pytest.mark.parametrize("rows", [0, 1, 7, 300_000])
def test_a_launch_without_rows_has_no_blocks(rows):
    """With rows it has as many as before."""

    class Mended(Dividing):
        pass

    mend(Mended)
    mend(Mended)
    grid, before = Mended(), Dividing()
    grid.generate({})
    before.generate({})

    if rows:
        assert layers_and_blocks(grid, rows) == layers_and_blocks(before, rows)
    else:
        assert layers_and_blocks(grid, 0) == (0, 0)
        with pytest.raises(ZeroDivisionError):
            layers_and_blocks(before, 0)


def test_torchs_own_class_launches_nothing_without_rows():
    """Whatever version it is."""
    kind = type("Own", (triton_heuristics.Grid2DWithYZOverflow,), {})
    mend(kind)
    grid = kind(inductor_meta={})
    grid.generate({"XBLOCK": 4, "YBLOCK": 4})

    assert layers_and_blocks(SimpleNamespace(prefix=grid.prefix, y_grid=grid.y_grid), 0) == (0, 0)
    assert layers_and_blocks(grid, 9)[1] == 3


@pytest.mark.parametrize(
    ("numbers", "hint", "cooperative", "held"),
    [
        (512, ReductionHint.INNER, False, True),
        (4096, ReductionHint.INNER, False, True),
        (HELD, ReductionHint.INNER, False, True),
        (HELD + 1, ReductionHint.INNER, False, False),
        (4096, ReductionHint.OUTER, False, False),
        (4096, ReductionHint.INNER, True, False),
    ],
)
def test_rows_are_summed_in_one_read(numbers, hint, cooperative, held):
    """Up to a width, and only where a row's numbers lie side by side; torch's own answers stay."""

    class Choices(InductorChoices):
        pass

    features = SimpleNamespace(
        reduction_numel=sympy.Integer(numbers),
        numel=sympy.Integer(1 << 20),
        get_reduction_hint=lambda: hint,
    )
    widen(Choices)
    widen(Choices)
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        assert Choices.should_use_persistent_reduction(features, cooperative) == held
        with config.patch({"triton.persistent_reductions": False}):
            assert not Choices.should_use_persistent_reduction(features, cooperative)
