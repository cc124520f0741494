"""Arguments that benchmarks share, and the base that some of them describe."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.results_file import RESULTS
from benchmarks.step_mixes import Shape


def parser_of(
    text: str | None, *, device: bool = True, layers: int | None = None
) -> argparse.ArgumentParser:
    """A parser that has `--out`, whose help is a module's docstring as it is written.

    device   whether it has `--device`: the GPU by default, where there is one
    layers   by default, of `--layers`, which comes with `--hidden`; None: it has neither
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if layers is not None:
        parser.add_argument("--layers", type=int, default=layers)
        parser.add_argument("--hidden", type=int, default=Shape().hidden)
    if device:
        here = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", default=here)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    return parser


def shape_of(given: argparse.Namespace) -> Shape:
    """The base's shape: Llama-3-8B's, or a narrow one in float32 with its proportions."""
    if given.hidden == Shape().hidden:
        return Shape(layers=given.layers)
    return Shape(
        layers=given.layers, hidden=given.hidden, intermediate=given.hidden * 7 // 2, heads=4,
        key_value_heads=2, vocabulary=512, dtype="float32",
    )  # fmt: skip
