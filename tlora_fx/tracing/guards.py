"""Assumptions of tracing about the sizes of a row.

A branch on a size (`if ids.shape[1] > 64`) is traced with the sizes that the tracer happens to
take, and torch notes the condition as a guard. A graph that serves every row may rest on no guard
that fails for some of them, so all guards are read, and each that some row breaks is refused. One
that the model's code checks itself, to raise an error otherwise, changes no number and may stay. So
may one of an operator, such as where a slice ends: the operator decides anew in each run.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import sympy
import torch
from torch._guards import detect_fake_mode

from tlora_fx.errors import BranchOnSize
from tlora_fx.ir.graph import Form

# Model code is what lies in neither of these.
OWN_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
# Every size of a row is at least this (model/batch.py).
SMALLEST = 2
# Where torch runs operators on fake tensors.
OPERATOR_FILES = ("torch/_subclasses/fake_tensor.py", "torch/_ops.py")
# Sizes to try a guard with, besides those around its own numbers.
TRIED = (*range(SMALLEST, 200), *(2**n + d for n in range(8, 21) for d in (-1, 0, 1)))
FEW = (2, 3, 4, 5, 7, 8, 11, 16, 17, 29, 33, 64, 127, 1000, 4096)


def is_model_code(filename: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not filename.startswith(OWN_ROOTS) and not filename.startswith("<")


def model_frame(stop: CodeType) -> tuple[str, int] | None:
    """File and line of the innermost model code that runs below the frame of `stop`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not stop:
        if is_model_code(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def line_text(place: tuple[str, int] | None) -> str | None:
    """A place in model code as "file.py:12  code"."""
    if place is None:
        return None
    return f"{Path(place[0]).name}:{place[1]}  {linecache.getline(*place).strip()}"


def _in_operator() -> bool:
    """Whether an operator runs, which innermost model code called."""
    frame = sys._getframe(1)
    while frame is not None and not is_model_code(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith(OPERATOR_FILES):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Log(list[Any]):
    """Guards as torch appends them; each is looked at where the model's line is known.

    A long forward ends with its first guard that is refused.
    """

    def __init__(self, guards: Sequence[Any], require: Callable[[Any], None]) -> None:
        super().__init__(guards)
        self.require = require

    def append(self, guard: Any) -> None:
        super().append(guard)
        self.require(guard)


class SizeGuards:
    """The guards of one traced row; one that does not hold for every row is refused.

    names       what each of torch's symbols is: tokens, lines or width
    """

    def __init__(self, form: Form, stop: CodeType) -> None:
        """Guards of a row in a form.

        stop    code of the function that calls the model, for source lines
        """
        self.words = ("lines", "tokens" if form == "packed" else "width")
        self.names: dict[Any, sympy.Symbol] = {}
        self.stop = stop
        self.subject, self.longest = "the base", 0
        self.refused: BranchOnSize | None = None

    @contextmanager
    def running(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Watch the model run on a row, within this context.

        inputs    the ids, and whatever else has their shape
        raises    BranchOnSize, naming the condition and the line of model code
        """
        mode = detect_fake_mode(inputs)
        env: Any = mode and mode.shape_env
        assert env is not None
        self.names = {
            size.node.expr: sympy.Symbol(word, integer=True, positive=True)
            for tensor in inputs
            for word, size in zip(self.words, tensor.shape, strict=True)
            if isinstance(size, torch.SymInt)
        }
        env.guards = _Log(env.guards, self._require)
        try:
            yield
        finally:
            env.guards = list(env.guards)
        if self.refused is not None:
            raise self.refused  # model code has caught it

    def _require(self, guard: Any) -> None:
        if _in_operator() and not isinstance(guard.expr, sympy.Eq):
            return
        condition = guard.expr.xreplace(self.names)
        used = condition.free_symbols & set(self.names.values())
        place = model_frame(self.stop)
        if not used or holds(condition, self.longest) or _raises_otherwise(place):
            return
        words = " and ".join(sorted(map(str, used)))
        mixer = _mixer(condition, place)
        self.refused = BranchOnSize(
            f"a mixer in the model of {self.subject} {mixer}, so that no graph "
            "serves rows of every size"
            if mixer
            else f"the model of {self.subject} branches on the {words} of the row",
            source=line_text(place) or str(guard.sloc),
            expected="code that is the same for every row",
            found=f"one side of the branch was traced: {condition}",
            help="train this base with PEFT alone, or give one of attention layers"
            if mixer
            else "rows of other jobs must not choose the branch; write the line without it",
        )
        raise self.refused


def _mixer(condition: Any, place: tuple[str, int] | None) -> str:
    """What recurrent mixers do with a size that attention does not; nothing where none does."""
    if any(
        type(part).__name__ in ("Mod", "PythonMod") for part in sympy.preorder_traversal(condition)
    ):
        chunks = {int(number) for number in condition.atoms(sympy.Integer) if number > 2}
        if len(chunks) == 1:
            return f"cuts the row into chunks of {chunks.pop()} tokens"
    innermost = _statement(place)
    if isinstance(innermost, ast.For) and isinstance(condition, sympy.Eq):
        return "walks over the tokens of a row one after another"
    return ""


@cache
def holds(condition: Any, longest: int = 0) -> bool:
    """Whether a condition on sizes is true for every row, as far as many sizes tell.

    longest   tokens of the longest sequence, and so the largest width of a padded row; 0: no limit
    """
    symbols = sorted(condition.free_symbols, key=str)
    for sizes in _assignments(condition, symbols):
        if longest and any(str(s) == "width" and n > longest for s, n in sizes.items()):
            continue
        try:
            if condition.xreplace(sizes) != sympy.true:
                return False
        except (ZeroDivisionError, TypeError, ValueError):
            return False
    return True


def _assignments(condition: Any, symbols: list[Any]) -> Iterator[dict[Any, Any]]:
    numbers = {abs(int(n)) for n in condition.atoms(sympy.Integer)} - {0}
    near = {n + d for n in numbers for d in (-1, 0, 1)}
    near |= {a * b for a in numbers for b in numbers} | {a // b for a in numbers for b in numbers}
    pool: Sequence[int] = sorted(n for n in {*TRIED, *near} if n >= SMALLEST)
    if len(symbols) > 1:
        pool = sorted({*FEW, *sorted(n for n in near if n >= SMALLEST)[:20]})
    for values in itertools.product(pool, repeat=min(len(symbols), 2)):
        padded = (*values, *(17,) * (len(symbols) - len(values)))
        yield {s: sympy.Integer(v) for s, v in zip(symbols, padded, strict=True)}


def _raises_otherwise(place: tuple[str, int] | None) -> bool:
    """Whether a line of model code asserts its condition, or raises an error on one side of it."""
    innermost = _statement(place)
    if isinstance(innermost, ast.If):
        return len(innermost.body) == 1 and isinstance(innermost.body[0], ast.Raise)
    return isinstance(innermost, ast.Assert)


def _statement(place: tuple[str, int] | None) -> ast.stmt | None:
    """The innermost statement of model code at a line."""
    if place is None:
        return None
    around = [
        node
        for node in ast.walk(_tree(place[0]))
        if isinstance(node, ast.stmt) and node.lineno <= place[1] <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


@cache
def _tree(filename: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])
