"""Torch's caches on disk are kept apart by what decides our operators' shapes."""

from __future__ import annotations

import pytest
import torch.compiler.config as settings

from tlora_fx.ops.compile_caches import mark_compile_caches


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


@pytest.mark.parametrize("name", ["KERNELS", "STRICT"])
def test_another_mode_is_another_tag(tag, name):
    """What was compiled under one mode is not found under another."""
    assert tag() != tag(**{name: "on"})


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
