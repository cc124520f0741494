"""Kernels of packages: generated, kept, tuned, and launched with the measured tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from tests.models import error_of
from tlora_fx.codegen.kernels import intact
from tlora_fx.errors import KernelSpecError, UnknownKernel
from tlora_fx.ops.kernels import KernelTemplate, Tile, fill, load_kernel, select, templates
from tlora_fx.ops.kernels.templates import kernel_text, own_table, template_of, tune_kernel

_SOURCE = """
ROWS = tl.constexpr($rows)


@triton.jit
def kernel(x, out, count, FACTOR: tl.constexpr):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = place < count
    tl.store(out + place, tl.load(x + place, held, 0.0) * FACTOR, held)


def launch(x, out):
    kernel[(triton.cdiv(len(x), $rows),)](x, out, len(x), $factor, **META)
"""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Times(KernelTemplate):
    """Multiply by a number.

    factor   the number
    """

    name: ClassVar[str] = "times"
    factor: int
    dtype: str = "float32"

    def tiles(self):
        return Tile(16, 0, 0, 4, 1), Tile(64, 0, 0, 4, 1), Tile(0, 0, 0, 4, 1)

    def source(self, tile):
        return fill(_SOURCE, {"rows": tile.rows, "factor": self.factor})

    def example(self, tokens, device):
        x = torch.ones(tokens, device=device)
        return lambda module: module.launch(x, torch.empty_like(x))


@pytest.fixture
def _gpu(monkeypatch, tmp_path):
    """A GPU's name for the CPU, and a cache of its own."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path))
    monkeypatch.setattr(templates, "gpu_name", lambda device: "A GPU")
    templates._tile_for.cache_clear()
    select.forget()


def rows_of(module):
    """The rows of a program."""
    return module.ROWS.value


@pytest.mark.usefixtures("_gpu")
def test_a_kernel_computes_and_its_file_is_kept():
    """Its head says what it is, and how to print it again."""
    x, out = torch.arange(21.0), torch.empty(21)
    load_kernel(Times(3), 21, CPU).launch(x, out)
    name, text = kernel_text(Times(3))

    assert torch.equal(out, 3 * x)
    assert (templates.cache_folder() / "kernels" / f"{name}.py").read_text("utf-8") == text
    assert intact(text)
    assert "# times: Multiply by a number." in text
    assert "# again      tlora-fx kernels package times factor=3 dtype=float32" in text


@pytest.mark.usefixtures("_gpu")
def test_what_was_measured_fastest_is_taken(monkeypatch):
    """By the nearest number of tokens; a tile that does not compile is left out and noted."""
    microseconds = "tlora_fx.ops.kernels.tune.microseconds"
    for tokens, times in ((128, {16: 2.0, 64: 1.0}), (1024, {16: 1.0, 64: 2.0})):
        monkeypatch.setattr(
            microseconds, lambda calls, device, t=times: [t[rows_of(calls[0].args[0])]]
        )
        path, found = tune_kernel(Times(5), tokens, CPU)
        assert {tile.rows: time for tile, time in found.items()} == times

    assert path == own_table(Times(5), "A GPU")
    assert "rows=0" in path.read_text("utf-8")
    assert rows_of(load_kernel(Times(5), 100, CPU)) == 64
    assert rows_of(load_kernel(Times(5), 2048, CPU)) == 16
    assert rows_of(load_kernel(Times(7), 100, CPU)) == 16  # the rule's


@pytest.mark.usefixtures("_gpu")
def test_a_table_of_the_package_serves_where_the_user_has_none(monkeypatch, tmp_path):
    """The user's own comes first where both are equally near."""
    tune_kernel(Times(5), 128, CPU, tmp_path / "shipped" / "a-gpu.json")
    monkeypatch.setattr(Times, "shipped", tmp_path / "shipped")
    templates._tile_for.cache_clear()

    assert templates._tile_for(Times(5), 128, "A GPU") is not None


def test_values_are_given_by_words(monkeypatch):
    """Numbers where fields are numbers; what is no field, or no kernel, is refused."""
    plugin = templates.Plugin("times", "mine 1.0", "mine:Times", Times)
    monkeypatch.setattr(templates, "plugin_templates", lambda: [plugin])

    assert template_of("times", {"factor": "3"}) == Times(3)
    for words in ({}, {"factor": "x"}, {"factor": "3", "other": "1"}):
        text = error_of(lambda words=words: template_of("times", words), KernelSpecError)
        assert "factor=int dtype=str" in text
    assert "nearest  times" in error_of(lambda: template_of("timer", {}), UnknownKernel)
