"""Checks of an operator over all jobs, run on rows that are made from its registration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tlora_fx.ops.job_operator import JobOperator, arguments_of

#: Jobs of a row: a seed, from which all that is its own is drawn, and its tokens.
JOBS = ((1, 37), (2, 1), (3, 0), (4, 70))
UNIT = 3
Jobs = Sequence[tuple[int, int]]
FAULT = float("nan")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a call for one job: its part of each result and of each gradient, by name."""

    values: dict[str, Tensor]

    def require_near(self, other: Outcome, bound: float, where: str) -> None:
        """Refuse what differs by more than rounding."""
        for name, wanted in other.values.items():
            here, there = self.values[name].double(), wanted.double()
            largest = float(there.abs().amax()) if there.numel() else 0.0
            apart = float((here - there).abs().amax()) if there.numel() else 0.0
            if not apart <= bound * max(largest, 1.0):
                raise AssertionError(f"{where}: {name} differs by {apart:.1e}, at most {bound:.1e}")

    def require_equal(self, other: Outcome, where: str) -> None:
        """Refuse a bit that differs."""
        for name, there in other.values.items():
            if not torch.equal(self.values[name], there):
                raise AssertionError(f"{where}: {name} has other bits")


@dataclass(frozen=True, slots=True)
class OperatorChecks:
    """Checks of one operator.

    device, dtype   of rows and adapters
    drawn           dtype that all values have exactly; None: `dtype`
    """

    operator: type[JobOperator]
    device: torch.device
    dtype: torch.dtype
    drawn: torch.dtype | None = None

    @property
    def bound(self) -> float:
        """Relative bound of a difference by rounding."""
        eps: float = torch.finfo(self.dtype).eps
        return float(2 * eps**0.75)

    def check_registration(self) -> None:
        """Schema, shapes without values, and gradient hold together, with sizes as symbols too."""
        arguments = self._row(JOBS)
        ordered = [arguments[name] for name in self._names(arguments)]
        torch.library.opcheck(self.operator.target, tuple(ordered))

    def check_reference(self) -> None:
        """Each job gets what the reference gives for it alone, in float64, with all gradients."""
        exact = replace(self, dtype=torch.float64, drawn=self.dtype)
        for index, outcome in enumerate(self._run(JOBS)):
            alone = exact._alone(JOBS[index])
            outcome.require_near(alone, self.bound, f"job {index} against its reference")

    def check_units(self) -> None:
        """A unit of the segments may be several tokens: lines of a batch, or the whole row."""
        jobs = [(seed, UNIT * tokens) for seed, tokens in JOBS]
        arguments = self._row(jobs)
        wanted = self._outcomes(self.operator.target, arguments, jobs)
        by_units = arguments | {"segments": arguments["segments"] // UNIT}
        for index, outcome in enumerate(self._outcomes(self.operator.target, by_units, jobs)):
            outcome.require_equal(wanted[index], f"job {index}, segments in units of {UNIT} tokens")

    def check_isolation(self) -> None:
        """Check that a job's values that are not finite change no bit of the others."""
        clean = self._run(JOBS)
        for broken in range(len(JOBS)):
            for index, outcome in enumerate(self._run(JOBS, broken)):
                if index != broken:
                    where = f"job {index} beside job {broken}, which is not finite"
                    outcome.require_equal(clean[index], where)

    def check_invariance(self) -> None:
        """A job gets the same, up to rounding, at another place and among others."""
        clean = self._run(JOBS)
        moved = [(9, 5), *reversed(JOBS), (8, 130)]
        for index, outcome in enumerate(reversed(self._run(moved)[1:-1])):
            outcome.require_near(clean[index], self.bound, f"job {index} among other neighbours")
        for index, job in enumerate(JOBS):
            (outcome,) = self._run([job])
            outcome.require_near(clean[index], self.bound, f"job {index} alone")

    def _row(self, jobs: Jobs, broken: int | None = None) -> dict[str, Any]:
        """The operator's arguments for a row of jobs; `broken`: whose own values are NaN."""
        operator, known = self.operator, set(arguments_of(self.operator.target))
        parts = [operator.example(tokens, self._draw(seed)) for seed, tokens in jobs]
        if broken is not None:
            parts[broken] = {
                name: value * FAULT if name in self._own and value.is_floating_point() else value
                for name, value in parts[broken].items()
            }
        arguments = operator.example(1, self._draw(0))
        for name in self._own & set(arguments):
            pieces = [part[name] for part in parts]
            arguments[name] = pieces if name in operator.per_job else torch.cat(pieces)
        tables = self._tables(jobs, parts)
        return arguments | {name: tables[name] for name in known & set(tables)}

    @property
    def _own(self) -> set[str]:
        """Arguments that hold each job's own values."""
        return {*self.operator.rows, *self.operator.banks, *self.operator.per_job}

    def _tables(self, jobs: Jobs, parts: list[dict[str, Any]]) -> dict[str, Any]:
        lengths = [tokens for _, tokens in jobs]
        sequences = [half for length in lengths for half in (length // 3, length - length // 3)]
        index = torch.cat([torch.arange(length) for length in lengths])
        tables: dict[str, Any] = {
            "segments": _offsets(lengths),
            "cu_seqlens": _offsets(sequences).to(self.device),
            "max_seqlen": torch.tensor(max(sequences), dtype=torch.int32),
            "keys": torch.tensor([(seed, 0) for seed, _ in jobs]),
            "token_index": index.to(self.device, torch.int32),
        }
        if self.operator.per_job:
            tables["jobs"] = list(range(len(jobs)))
        if self.operator.banks:
            tables["ranks"] = _offsets([len(part["a"]) for part in parts])
            tables["scales"] = torch.tensor([1 + 1 / seed for seed, _ in jobs]).double()
            tables["rates"] = torch.zeros(len(jobs), dtype=torch.float64)
            tables["site"] = torch.tensor(0)
        return tables

    def _names(self, arguments: dict[str, Any]) -> Iterator[str]:
        """Names of the arguments that are given, in the order of the schema."""
        return (name for name in arguments_of(self.operator.target) if name in arguments)

    def _draw(self, seed: int) -> Callable[..., Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
            return drawn.to(self.drawn or self.dtype).to(self.device, self.dtype)

        return draw

    def _run(self, jobs: Jobs, broken: int | None = None) -> list[Outcome]:
        """What each job of a row gets."""
        arguments = self._row(jobs, broken)
        return self._outcomes(self.operator.target, arguments, jobs)

    def _alone(self, job: tuple[int, int]) -> Outcome:
        return self._outcomes(self.operator.reference, self._row([job]), [job])[0]

    def _outcomes(
        self, function: Callable[..., Any], arguments: dict[str, Any], jobs: Jobs
    ) -> list[Outcome]:
        leaves = {name: _learning(arguments[name]) for name in self._own & set(arguments)}
        results = function(**{**arguments, **leaves})
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        axes = self.operator.result_axis(0)
        places = list(axes) if isinstance(axes, tuple) else [axes] * len(results)
        found: list[dict[str, Tensor]] = [{} for _ in jobs]
        bounds = _offsets([tokens for _, tokens in jobs]).tolist()
        losses = []
        for number, (result, axis) in enumerate(zip(results, places, strict=False)):
            for index, (seed, tokens) in enumerate(jobs):
                part = result.narrow(axis, bounds[index], tokens)
                found[index][f"result {number}"] = part.detach()
                if result.requires_grad:
                    losses.append((part * self._draw(-seed - 1)(*part.shape)).sum())
        if losses:
            torch.autograd.backward(torch.stack(losses).sum())
            self._add_gradients(found, leaves, arguments.get("ranks"), bounds)
        return [Outcome(values) for values in found]

    def _add_gradients(
        self, found: list[dict[str, Tensor]], leaves: dict[str, Any], ranks: Any, bounds: list[int]
    ) -> None:
        for name, leaf in leaves.items():
            for index, values in enumerate(found):
                if name in self.operator.per_job:
                    gradient, span = leaf[index].grad, slice(None)
                else:
                    offsets = ranks.tolist() if name in self.operator.banks else bounds
                    gradient, span = leaf.grad, slice(*offsets[index : index + 2])
                if gradient is not None:
                    values[f"the gradient of {name}"] = gradient[span]


def _learning(value: Any) -> Any:
    """A tensor, or each of a list, as a leaf that takes a gradient, where its type has any."""
    if isinstance(value, list):
        return [_learning(item) for item in value]
    return value.detach().clone().requires_grad_() if value.is_floating_point() else value


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def operator_tests(
    operator: type[JobOperator],
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Callable[..., None]:
    """Make a test for pytest that runs all checks of an operator.

        test_mine = operator_tests(Mine)

    It compares with the operator's reference, values and gradients; breaks one job and compares
    the bits of the others; moves jobs about; and lets torch check what it was told. Of adapters at
    a site it gives segments in units of several tokens, too, as rows of padded lines have them.

    dtype     of rows and adapters; references run in float64
    raises    AssertionError, which names the job, and the result or gradient
    """
    import pytest

    checks = OperatorChecks(operator, torch.device(device), dtype)
    names = ["registration", "reference", "isolation", "invariance"]
    if operator.banks and "segments" in operator.tables:
        names.append("units")

    @pytest.mark.parametrize("name", names)
    def test(name: str) -> None:
        getattr(checks, f"check_{name}")()

    return test
