"""Operators of other packages that take a row of all jobs: what tlora-fx must know of them.

torch.library gives an operator its schema, its values, shapes and gradient. A `JobOperator` says
the rest in one place: which arguments hold the row, its tables, and the adapters; what it costs;
and what it computes for a job alone, against which `tlora_fx.testing.operator_tests` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from tlora_fx.config.plugins import Plugin, load_plugin, plugins_of
from tlora_fx.errors import OperatorNotRegistrable

OPERATORS = "tlora_fx.operators"
#: Tables of a row, by the names that arguments have.
ROW_TABLES = ("segments", "cu_seqlens", "max_seqlen", "keys", "token_index")
#: Arguments of an operator with adapters that must be called so: tools look for them.
SITE_ARGUMENTS = ("x", "a", "b", "ranks", "scales")
Draw = Callable[..., Tensor]


class JobOperator:
    """One operator, by the names of its schema's arguments.

    Of jobs side by side in a row it must compute for each what it computes for that job alone.

    target    `torch.ops.mine.op.default`
    rows      arguments that hold the row, at one dimension: how many dimensions from the last on
              are not the row, because the operator mixes what stands along them
    tables    arguments that are the row's own tables: segments, cu_seqlens, max_seqlen, keys,
              token_index
    banks     adapters of all jobs, each job's rows one below the other. An operator that has any
              stands for a site, and has the arguments x, a, b, ranks, scales as
              `multi_lora_linear` has them
    per_job   lists of the jobs' own tensors, an item for each job that the argument `jobs` lists
    flops     formulas of this operator and those of its backward, as `register_flop_formula` takes
              them
    on_host   whether it reads a table on the host where it runs on a GPU: then no row that it is
              in becomes a CUDA graph

    All other arguments must be the same whoever is in the row. They are refused otherwise.
    """

    target: ClassVar[Any]
    rows: ClassVar[Mapping[str, int]]
    tables: ClassVar[tuple[str, ...]] = ()
    banks: ClassVar[tuple[str, ...]] = ()
    per_job: ClassVar[tuple[str, ...]] = ()
    flops: ClassVar[Mapping[Any, Callable[..., int]]] = {}
    on_host: ClassVar[bool] = False

    @classmethod
    def reference(cls, *args: Any, **kwargs: Any) -> Any:
        """Result of the operator for one job that has a row to itself, in plain PyTorch."""
        raise NotImplementedError(f"{cls.__name__} has no `reference`, which operator_tests calls")

    @classmethod
    def example(cls, tokens: int, draw: Draw) -> dict[str, Any]:
        """One job's part of the arguments `rows`, `banks`, `per_job`, drawn by `draw(*shape)`.

        A bank is the job's own rows of it. Other arguments may stand beside them, as constants.
        """
        raise NotImplementedError(f"{cls.__name__} has no `example`, which operator_tests calls")

    @classmethod
    def mixes(cls, arguments: Mapping[str, Any]) -> str:
        """Why a call with these arguments mixes jobs, "" where it does not."""
        return ""

    @classmethod
    def result_axis(cls, axis: int) -> int | tuple[int, ...]:
        """Dimension at which the result holds the row; of several results, of each."""
        return axis


Registered = TypeVar("Registered", bound="type[JobOperator]")
_known: dict[Any, type[JobOperator]] = {}


def register_operator(cls: Registered) -> Registered:
    """Class decorator: make an operator known to passes, checks and listings.

    raises    OperatorNotRegistrable for a declaration that its schema contradicts, and for
              operators of aten, prims and tlora_fx, which have rules already
    """
    target = getattr(cls, "target", None)
    if not isinstance(target, torch._ops.OpOverload):
        raise _refused(cls, "an operator such as torch.ops.mine.op.default", target)
    _check_arguments(cls, target)
    _known[target] = cls
    for formula_of, formula in cls.flops.items():
        if formula_of not in flop_registry:
            register_flop_formula(formula_of)(formula)
    return cls


def find_operator(target: Any) -> type[JobOperator] | None:
    """Registration of an operator."""
    return _known.get(target)


def load_operator(name: str) -> None:
    """Import the package that offers an operator, such as "mine.op"; nothing where none does."""
    for entry in entry_points(group=OPERATORS):
        if entry.name == name:
            load_plugin(entry)


def plugin_operators() -> list[Plugin]:
    """The operators of other packages, broken ones too, by name."""
    return plugins_of(OPERATORS)


def arguments_of(target: Any) -> tuple[str, ...]:
    """Names of an operator's arguments, in order."""
    return tuple(argument.name for argument in target._schema.arguments)


def _check_arguments(cls: type[JobOperator], target: Any) -> None:
    names = arguments_of(target)
    rows = getattr(cls, "rows", {})
    declared = (*rows, *cls.tables, *cls.banks, *cls.per_job)
    needed = (*declared, *(("jobs",) if cls.per_job else ()))
    needed += SITE_ARGUMENTS if cls.banks else ()
    missing = sorted(set(needed) - set(names))
    if missing:
        raise _refused(cls, f"arguments among {', '.join(names)}", ", ".join(missing))
    twice = sorted({name for name in declared if declared.count(name) > 1})
    if twice or not rows:
        raise _refused(cls, "each argument once, one of them in `rows`", ", ".join(twice) or "none")
    unknown = sorted(set(cls.tables) - set(ROW_TABLES))
    if unknown:
        raise _refused(cls, f"tables among {', '.join(ROW_TABLES)}", ", ".join(unknown))
    if target.namespace in ("aten", "prims", "tlora_fx"):
        raise _refused(
            cls, "an operator outside of aten, prims and tlora_fx, which have rules", target
        )
    if target._schema.is_mutable:
        raise _refused(cls, "an operator that writes into none of its arguments", target._schema)


def _refused(cls: type, expected: str, found: object) -> OperatorNotRegistrable:
    return OperatorNotRegistrable(
        f"the operator of {cls.__module__}.{cls.__qualname__} cannot be registered",
        expected=expected,
        found=found,
        help="see tlora_fx.ops.JobOperator",
    )
