"""`operator_tests`: what it finds in operators that mix jobs, or tell no truth about themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.models import error_of
from tlora_fx.errors import OperatorNotRegistrable
from tlora_fx.ops import JobOperator, register_operator
from tlora_fx.testing.operators import OperatorChecks, operator_tests


def centered(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each sequence without its mean."""
    parts = [x[start:stop] for start, stop in pairwise(cu_seqlens.tolist())]
    return torch.cat([part - part.mean(0) for part in parts])


def by_masks(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The same by a product with a mask, in which 0 · NaN is NaN."""
    lengths = cu_seqlens.diff()
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    same = (sequence[:, None] == sequence[None, :]).to(x.dtype)
    return x - same / same.sum(1, keepdim=True) @ x


def over_the_row(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The whole row without its mean."""
    return x - x.mean(0)


class Centering(JobOperator):
    """What all of them say of themselves."""

    rows: ClassVar = {"x": 1}
    tables: ClassVar = ("cu_seqlens",)

    @classmethod
    def reference(cls, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return centered(x, cu_seqlens)

    @classmethod
    def example(cls, tokens: int, draw: Any) -> dict[str, Any]:
        return {"x": draw(tokens, 3)}


def checks_of(name, run, factor=1.0):
    """The checks of an operator; its own adjoint, for its map is a projection.

    factor   by which its gradient is wrong
    """
    made = torch.library.custom_op(f"tests_operators::{name}", run, mutates_args=())
    made.register_fake(lambda x, cu_seqlens: torch.empty_like(x))

    def backward(ctx, dy):
        return factor * made(dy, *ctx.saved_tensors), None

    made.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1])
    )
    target = getattr(torch.ops.tests_operators, name).default
    operator = register_operator(type(name, (Centering,), {"target": target}))
    return OperatorChecks(operator, torch.device("cpu"), torch.float64)


NAMES = ["registration", "reference", "isolation", "invariance"]


@pytest.mark.parametrize(
    ("run", "factor", "failing"),
    [
        (centered, 1.0, set()),
        (centered, 2.0, {"reference"}),
        (by_masks, 1.0, {"isolation"}),
        (over_the_row, 1.0, {"reference", "isolation", "invariance"}),
    ],
)
def test_each_check_finds_what_it_is_for(run, factor, failing):
    """An operator that is right; a wrong gradient; a mask; a mean over jobs."""
    checks = checks_of(f"{run.__name__}_{int(factor)}", run, factor)
    found = set()
    for name in NAMES:
        try:
            getattr(checks, f"check_{name}")()
        except AssertionError:
            found.add(name)

    assert found == failing


def test_an_error_names_job_and_value():
    """Whoever reads it knows where to look."""
    checks = checks_of("told", centered, 3.0)

    with pytest.raises(AssertionError, match="job 0 against its reference: the gradient of x"):
        checks.check_reference()


def test_pytest_gets_a_test_for_each_check():
    """By the checks' names."""
    (mark,) = operator_tests(Centering).pytestmark

    assert mark.args == ("name", NAMES)


def test_a_declaration_without_rows_is_refused():
    """Nothing of it would be checked."""
    bare = type("Bare", (JobOperator,), {"target": torch.ops.tlora_fx.sequence_cumsum.default})

    text = error_of(lambda: register_operator(bare), OperatorNotRegistrable)

    assert "one of them in `rows`" in text


@pytest.mark.parametrize("missing", ["reference", "example"])
def test_tests_of_an_operator_say_what_it_lacks(missing):
    """The method, and who calls it."""
    checks = checks_of(f"without_{missing}", centered)
    lacking = type("Lacking", (checks.operator,), {missing: vars(JobOperator)[missing]})

    with pytest.raises(NotImplementedError, match=f"has no `{missing}`"):
        replace(checks, operator=lacking).check_reference()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"rows": {"y": 1}}, "found     y"),
        ({"tables": ("x",)}, "found     x"),
        ({"rows": {}}, "one of them in `rows`"),
        ({}, "outside of aten, prims and tlora_fx"),
        ({"banks": ("x",), "rows": {"cu_seqlens": 0}, "tables": ()}, "a, b, ranks, scales"),
        ({"target": centered}, "such as torch.ops.mine.op.default"),
    ],
)
def test_what_a_schema_contradicts_is_refused(said, told):
    """Arguments that are not there, tables of other names, no row, no operator."""
    target = torch.ops.tlora_fx.sequence_cumsum.default
    wrong = type("Wrong", (Centering,), {"target": target, **said})

    assert told in error_of(lambda: register_operator(wrong), OperatorNotRegistrable)
