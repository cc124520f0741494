"""Linears whose matrices may be cut into pieces.

By columns each process computes a piece of the result: of an adapter A stays whole and B is cut. By
rows each process reads a piece of the input and computes a part of a sum: A is cut, B stays whole.
A matrix that holds several, such as q, k and v, is cut by columns run by run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tlora_fx.ir.graph import is_call
from tlora_fx.ir.lora_sites import LISTED, ONE, SEVERAL, lowered_arguments
from tlora_fx.passes.tensor_parallel.rules import Cut, Runs
from tlora_fx.rewriting import arguments_of

aten = torch.ops.aten
PLAIN = (aten.linear.default, aten.addmm.default, aten.mm.default)
TURNED = aten.t.default
# Columns that one draw of a dropout mask decides.
OCTET = 8


@dataclass(frozen=True, slots=True)
class Matrix:
    """A frozen matrix, its bias and its adapters.

    stored    the node that reads it, None where it is computed
    outer     the dimension of the stored tensor along which results lie
    bias      the node that the bias comes from, None without one
    a, b      the nodes of the bank, None without adapters
    runs      sizes of what lies one after the other along results, each cut by itself; () for one
    """

    stored: fx.Node | None
    outer: int
    bias: Any
    a: fx.Node | None = None
    b: fx.Node | None = None
    runs: tuple[int, ...] = ()

    def size(self, dim: int) -> int:
        """How many columns results have (dim 0), or inputs (1)."""
        assert self.stored is not None
        return int(self.stored.meta["val"].shape[dim if self.outer == 0 else 1 - dim])

    def cut(self, place: int) -> Cut:
        """The cut of a value that has results along a dimension."""
        return Runs(place, self.runs) if self.runs else place

    def cuts(self, dim: int) -> Iterator[tuple[fx.Node, Cut]]:
        """Which stored tensors are cut, and how, by columns (0) or rows (1)."""
        assert self.stored is not None
        if dim == 1:
            yield self.stored, 1 - self.outer
            if self.a is not None:
                yield self.a, 1
            return
        yield self.stored, self.cut(self.outer)
        if self.bias is not None:
            yield self.bias, self.cut(0)
        if self.b is not None:
            yield self.b, self.cut(1)


@dataclass(frozen=True, slots=True)
class Linears:
    """One operator that multiplies with frozen matrices, all reading one input.

    drops   whether jobs may drop columns of the input
    """

    node: fx.Node
    x: fx.Node
    matrices: tuple[Matrix, ...]
    drops: bool = False

    @property
    def told(self) -> str:
        """The modules that it stands for."""
        users = [user.meta.get("site") for user in self.node.users]
        named = users if is_call(self.node, SEVERAL) else [self.node.meta.get("site")]
        own = [str(name) for name in named if name]
        return ", ".join(own) or str(self.node.meta.get("path")) or self.node.name

    def in_runs(self, runs: Mapping[int, tuple[int, ...]]) -> Linears:
        """The same, with the runs of matrices by their place."""
        own = (replace(one, runs=runs.get(place, ())) for place, one in enumerate(self.matrices))
        return replace(self, matrices=tuple(own))

    def misfit(self, dim: int, pieces: int) -> str:
        """Why it cannot be cut by columns (0) or rows (1); "" where it can."""
        if dim == 1 and is_call(self.node, SEVERAL):
            return "several matrices multiply one piece of a value"
        for matrix in self.matrices:
            reason = self._fixed(matrix) or _divides(matrix, dim, pieces)
            if reason:
                return reason
        if dim == 1 and self.drops and self.matrices[0].size(1) // pieces % OCTET:
            wide = self.matrices[0].size(1)
            return f"dropout draws {OCTET} columns at once, and {wide} / {pieces} is no multiple"
        return ""

    def _fixed(self, matrix: Matrix) -> str:
        """Why a matrix stays whole whatever the number of pieces."""
        read = [matrix.stored] if matrix.bias is None else [matrix.stored, matrix.bias]
        for node in read:
            ref = node.meta.get("tensor") if node is not None else None
            if node is None or ref is None or ref.owner != "base":
                return "its matrix or its bias is none of the frozen base's"
            if ref.original is not None:
                return f"its matrix is stored as {ref.form}"
            others = sorted(_readers(node) - {self.node}, key=str)
            if others:
                return f"{_told(others[0])} reads its matrix or its bias too"
        return ""


def linears(node: fx.Node) -> Linears | None:
    """The frozen linears of a node.

    returns   None where it is none, multiplies with what is computed, or is a part of one job's
              branch that runs as it is
    """
    if is_call(node, ONE):
        given = lowered_arguments(node)
        return Linears(node, given["x"], (_matrix(given),), bool(given["drops"]))
    if is_call(node, SEVERAL):
        given = lowered_arguments(node)
        count = len(given["weight"])
        own = [{name: given[name][place] for name in LISTED} for place in range(count)]
        return Linears(node, given["x"], tuple(map(_matrix, own)), bool(given["drops"]))
    if not is_call(node, *PLAIN) or node.meta.get("role") == "adapter":
        return None
    given = arguments_of(node)
    if is_call(node, aten.linear.default):
        found = Linears(node, given["input"], (_stored(given["weight"], 0, given["bias"]),))
    elif is_call(node, aten.addmm.default):
        plain = (given["beta"], given["alpha"]) == (1, 1)
        matrix = _stored(given["mat2"], 1, given["self"]) if plain else Matrix(None, 0, None)
        found = Linears(node, given["mat1"], (matrix,))
    else:
        found = Linears(node, given["self"], (_stored(given["mat2"], 1, None),))
    return found if found.matrices[0].stored is not None else None


def _matrix(given: dict[str, Any]) -> Matrix:
    plain = _stored(given["weight"], 0, given["bias"])
    return Matrix(plain.stored, plain.outer, plain.bias, given["a"], given["b"])


def _stored(weight: fx.Node, outer: int, bias: Any) -> Matrix:
    """A matrix by what it is read from; `outer` is where results lie in what is multiplied."""
    if is_call(weight, TURNED):
        weight, outer = weight.args[0], 1 - outer  # type: ignore[assignment]
    return Matrix(weight if weight.op == "get_attr" else None, outer, bias)


def _readers(stored: fx.Node) -> set[fx.Node]:
    """Who reads a stored tensor, turned or not, by this node or another one."""
    same = [n for n in stored.graph.nodes if n.op == "get_attr" and n.target == stored.target]
    users = [user for node in same for user in node.users]
    turned = [reader for user in users if is_call(user, TURNED) for reader in user.users]
    return {user for user in users if not is_call(user, TURNED)} | set(turned)


def _told(node: fx.Node) -> str:
    """What reads a tensor, in words."""
    if node.meta.get("role") == "adapter":
        return f"a branch of job '{node.meta['jobs'][0]}' that runs as it is"
    return node.name


def _divides(matrix: Matrix, dim: int, pieces: int) -> str:
    sizes = (dim == 0 and matrix.runs) or (matrix.size(dim),)
    told = f"{', '.join(map(str, sizes))} {('outputs', 'inputs')[dim]}"
    return f"its {told} do not divide by {pieces}" * any(size % pieces for size in sizes)
