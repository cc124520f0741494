"""Read the small CPU tables that travel with a row: segments, rates, keys.

Every operator reads its tables here first, so that a wrong table is an error before any work.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tlora_fx.errors import MaskKeyError, SegmentError, TableNotOnDevice

INTEGERS = (torch.int32, torch.int64)

_is_initialized: Callable[[], bool] = torch.cuda.is_initialized


def token_bounds(segments: Tensor, tokens: int) -> list[int]:
    """Where each job's tokens begin, and where the last job's end.

    segments  int [J + 1] on the CPU, job j owns units segments[j]:segments[j + 1]
    tokens    how many tokens the tensor has, a whole multiple of the units
    returns   J + 1 token offsets from 0 to `tokens`
    raises    SegmentError
    """
    check_table(segments, "segments")
    bounds: list[int] = segments.tolist()
    if bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise SegmentError(
            "segments must rise from 0",
            expected="0 <= segments[1] <= ... <= segments[J]",
            found=bounds,
            help="job j owns units segments[j]:segments[j + 1]",
        )
    units = bounds[-1]
    if units == tokens:
        return bounds
    if units == 0 or tokens % units:
        raise SegmentError(
            f"segments of {units} units cannot cover {tokens} tokens",
            expected="a whole number of tokens a unit",
            found=bounds,
            help="segments and tensor must come from the same row",
        )
    return [bound * (tokens // units) for bound in bounds]


def covering(segments: Tensor, rows: int) -> list[int]:
    """Where each job's rows begin; unlike tokens of a unit, every row counts for itself.

    raises    SegmentError where the last offset is not the number of rows
    """
    bounds = token_bounds(segments, rows)
    if segments[-1] != rows:
        raise SegmentError(
            f"segments do not cover the {rows} rows that they are summed over",
            expected=f"a last offset of {rows}",
            found=segments.tolist(),
        )
    return bounds


def check_table(table: Tensor, name: str) -> None:
    """Refuse what cannot be a table of offsets: wrong rank, type, or device.

    Whoever checks a table goes on to read it on the host. While a CUDA graph is captured that is
    an error: the graph would keep what the table says now.
    """
    # Without a driver, a build with CUDA raises where it is asked for its stream.
    if _is_initialized() and torch.cuda.is_current_stream_capturing():
        raise TableNotOnDevice(
            f"an operator reads {name} on the host while a CUDA graph is captured",
            help="run this model without CUDA graphs",
        )
    if table.dim() != 1 or table.numel() < 1 or table.dtype not in INTEGERS:
        raise SegmentError(
            f"{name} must be integers of shape [J + 1]",
            found=f"{table.dtype}{list(table.shape)}",
        )
    if table.device.type != "cpu":
        raise SegmentError(
            f"{name} must lie on the CPU",
            found=table.device,
            help="an operator reads it without waiting for the device",
        )


def check_rates(rates: Tensor, jobs: int) -> list[float]:
    """The dropout rate of each of `jobs` jobs, each in [0, 1); raises MaskKeyError."""
    if rates.shape != (jobs,) or rates.device.type != "cpu":
        raise MaskKeyError(
            "dropout rates must be one number a job, on the CPU",
            expected=f"[{jobs}] on cpu",
            found=f"{list(rates.shape)} on {rates.device}",
        )
    values: list[float] = rates.tolist()
    return [check_rate(value) for value in values]


def check_rate(rate: float) -> float:
    """A dropout rate in [0, 1), as it came; raises MaskKeyError."""
    if not 0.0 <= rate < 1.0:
        raise MaskKeyError("a dropout rate must lie in [0, 1)", found=rate)
    return rate


def check_keys(keys: Tensor, jobs: int) -> list[tuple[int, int]]:
    """The pair (seed, step) of each of `jobs` jobs, 32 bits each; raises MaskKeyError."""
    if keys.shape != (jobs, 2) or keys.dtype not in INTEGERS or keys.device.type != "cpu":
        raise MaskKeyError(
            "keys must be a pair (seed, step) a job, int64 on the CPU",
            expected=f"int64[{jobs}, 2] on cpu",
            found=f"{keys.dtype}{list(keys.shape)} on {keys.device}",
        )
    pairs: list[Sequence[int]] = keys.tolist()
    for job, pair in enumerate(pairs):
        if not all(0 <= word < 2**32 for word in pair):
            raise MaskKeyError("seed and step must lie in [0, 2**32)", job=job, found=tuple(pair))
    return [(pair[0], pair[1]) for pair in pairs]


def check_token_index(token_index: Tensor, tokens: int) -> Tensor:
    """The token indices as int64 [tokens]; raises MaskKeyError."""
    if token_index.numel() != tokens or token_index.dtype not in INTEGERS:
        raise MaskKeyError(
            "token_index must name each token of the tensor",
            expected=f"{tokens} integers",
            found=f"{token_index.dtype}{list(token_index.shape)}",
            help="dropout masks belong to tokens: hand on the row's token_index",
        )
    return token_index.reshape(-1).to(torch.int64)
