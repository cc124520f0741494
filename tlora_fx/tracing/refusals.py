"""Reasons why a model cannot be traced, in our words, with torch's own as a detail."""

from __future__ import annotations

import keyword
import traceback
from typing import NamedTuple

import torch
from torch import fx, nn
from torch._dynamo.exc import UserError, UserErrorType

from tlora_fx.errors import BaseNotTraceable
from tlora_fx.ir.graph import PEFT_PREFIX, Form, is_call
from tlora_fx.tracing.guards import is_model_code

#: The last fact of a refusal: the text of the error that was met.
DETAIL = "in torch's words"
_NUMBERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_ROWS = "code that serves rows of every number of tokens"


class _Cause(NamedTuple):
    """Why a model cannot be traced.

    signs      of which torch's error has at least one, in its type or its text
    found      the first line's end
    expected   what the code may do instead
    help       what to do
    """

    signs: tuple[str, ...]
    found: str
    expected: str
    help: str


_READS = _Cause(
    ("DataDependent", "data-dependent", "Cannot cast", ".item()", "_local_scalar_dense"),
    "its code goes on by a number that it reads out of a tensor",
    "code whose way depends on no value",
    "rows of other jobs must not choose what runs: write the line without that number",
)
_CERTAIN = (
    _READS,
    _Cause(
        ("fake tensor in the exported program constant",),
        "its code reads or writes a weight's .data while it runs",
        "weights that are read as they are",
        "jobs share weights that never change: hand the nn.Module over without that line",
    ),
    _Cause(
        ("UnsupportedOperator", "DynamicOutputShape", "NotImplementedError", "'Meta' backend"),
        "it runs an operator that needs the values of its inputs, and weights are not there yet",
        "operators whose results have a shape that the shapes of their inputs tell",
        "write the line with such operators",
    ),
)
# What is read out of an error's text alone.
_LIKELY = (
    _Cause(
        ("is not on the expected device", "found two different devices"),
        "its code makes a tensor on the CPU, and not where its inputs are",
        "tensors on the device of an input: torch.arange(n, device=x.device)",
        "name the device in the line, or make the tensor in the constructor, as a buffer",
    ),
    _Cause(
        ("unexpected keyword argument", "required positional argument"),
        "its code is called with other arguments than it takes",
        "a forward that takes input_ids and use_cache, and position_ids for packed rows",
        "give the forward these arguments",
    ),
    _Cause(
        ("'NoneType' object", "NoneType"),
        "its code needs an input that it is not given",
        "a forward that needs input_ids alone, and position_ids for packed rows",
        "let the forward make what else it needs by itself",
    ),
    _Cause(
        (
            "must match",
            "must have same",
            "invalid for input of size",
            "cannot be multiplied",
            "to expand a dimension",
        ),
        "its code joins tensors whose sizes do not fit",
        _ROWS,
        "run the model on one sequence alone; where that works, report the base with this text",
    ),
)
_SIZE = _Cause(
    (),
    "its code fixes a size of the row, as the loops of recurrent mixers over tokens do",
    _ROWS,
    "write the line without a number of tokens",
)
_UNKNOWN = _Cause(
    (),
    "its code fails while a row is traced",
    "code that runs on tensors without values",
    "run the model on one sequence alone; where that works, report the base with this text",
)


def not_traceable(error: Exception, model: nn.Module, form: Form, subject: str) -> BaseNotTraceable:
    """Error for a model that torch, or model code, failed to trace.

    subject   whose model it is
    """
    cause = _cause_of(error)
    packed = form == "packed" and cause not in _CERTAIN
    return BaseNotTraceable(
        f"the model of {subject} cannot be traced: {cause.found}",
        module=_module_of(error, model),
        source=model_line(error),
        expected=cause.expected,
        help=f"set base.attention: batch, or {cause.help}" if packed else cause.help,
        **{DETAIL: None if cause in (*_CERTAIN, _SIZE) else words_of(error)},
    )


def not_writable(error: SyntaxError, model: nn.Module, subject: str) -> BaseNotTraceable:
    """Error for a model whose names torch.export cannot write as Python."""
    paths = [path for path, _ in model.named_modules()] + [k for k, _ in model.named_parameters()]
    odd = [path for path in paths if any(map(_is_odd, path.split(".")))]
    return BaseNotTraceable(
        f"the model of {subject} has a name that torch.export cannot write as Python",
        module=odd[0].removeprefix(PEFT_PREFIX) if odd else None,
        expected="names that are no keywords of Python, and without quotes",
        help="rename it, such as 'in' to 'in_'",
        **{DETAIL: words_of(error)},
    )


def _is_odd(name: str) -> bool:
    return keyword.iskeyword(name) or not name.isprintable() or bool({*'"\\'} & {*name})


def require_no_reads(graph: fx.Graph, subject: str) -> None:
    """Refuse a graph that reads a number out of a tensor, such as a size that code made one of.

    subject   whose graph it is
    raises    BaseNotTraceable
    """
    for node in graph.nodes:
        if is_call(node, *_NUMBERS):
            raise BaseNotTraceable(
                f"the model of {subject} cannot be traced: {_READS.found}",
                module=node.meta.get("path") or None,
                source=node.meta.get("source") or None,
                expected=_READS.expected,
                help=_READS.help,
            )


def _cause_of(error: BaseException) -> _Cause:
    if isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION:
        return _SIZE
    text = f"{type(error).__name__}: {error}"
    return next(
        (c for c in (*_CERTAIN, *_LIKELY) if any(sign in text for sign in c.signs)), _UNKNOWN
    )


def words_of(error: BaseException) -> str:
    """An error's type and the first line of its text."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _module_of(error: BaseException, model: nn.Module) -> str | None:
    """Path of the innermost module whose code an error came through."""
    paths = {id(module): path for path, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    running = [paths.get(id(frame.f_locals.get("self"))) for frame in frames]
    return next((path.removeprefix(PEFT_PREFIX) for path in reversed(running) if path), None)


def model_line(error: BaseException) -> str | None:
    """The last line of model code in a traceback: neither torch's nor ours."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if is_model_code(frame.filename)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}  {frames[-1].line}" if frames else None
