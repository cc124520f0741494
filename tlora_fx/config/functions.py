"""Functions and classes that Python code hands to a job, known by their names and their source.

A checkpoint and job.json cannot hold a function. They hold its name and a hash of its source, so
that a run does not go on with another one unnoticed.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from pydantic import PlainSerializer, WrapValidator

from tlora_fx.errors import JobError

_TEXT = re.compile(r"python:(.+)#([0-9a-f]{12})")
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True, slots=True)
class UserFunction:
    """Function, class or other callable of a user; its text is `python:MODULE:NAME#HASH`.

    name     module and qualified name, such as __main__:accuracy
    digest   of its source, 12 hexadecimal digits
    call     the callable; None where the job was read from a file
    """

    name: str
    digest: str
    call: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"python:{self.name}#{self.digest}"


def function_of(call: Callable[..., Any]) -> UserFunction:
    """A callable with its name and the hash of its source; of a partial, with its arguments.

    What a function captures does not count.
    """
    named: Any = call if hasattr(call, "__qualname__") else type(call)
    more = ""
    if isinstance(call, functools.partial):
        inner = function_of(call.func)
        arguments = [*map(_said, call.args), *((k, _said(v)) for k, v in call.keywords.items())]
        name, more = inner.name, repr([inner.digest, *arguments])
    else:
        name = f"{named.__module__}:{named.__qualname__}"
    source = more or _source(named) or name
    return UserFunction(name, hashlib.sha256(source.encode()).hexdigest()[:12], call)


def _said(value: object) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_said, value))}]"
    return str(function_of(value)) if callable(value) else type(value).__qualname__


def _source(named: Any) -> str:
    """The source of a function or a class, or what it is compiled to; "" of what has neither."""
    try:
        return inspect.getsource(named)
    except (OSError, TypeError):
        members = vars(named).values() if isinstance(named, type) else [named]
        codes = (getattr(member, "__code__", None) for member in members)
        return "\n".join(line for code in codes if code is not None for line in _compiled(code))


def _compiled(code: CodeType) -> Iterator[str]:
    yield repr((code.co_code, code.co_names, code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _compiled(constant)
        else:
            yield repr(constant)


def callable_of(function: UserFunction, argument: str, job: str) -> Callable[..., Any]:
    """The function of an argument of a job.

    job      its name
    raises   JobError where the job was read from a file
    """
    if function.call is not None:
        return function.call
    raise JobError(
        "a function of Python is not at hand where a job is read from a file",
        job=job,
        found=f"{argument}: {function}",
        help=f"make the job in Python: Job({argument}=...)",
    )


def function_text(value: object) -> str:
    """The text of a function in what was written down; "" for all else."""
    return value if isinstance(value, str) and _TEXT.fullmatch(value) else ""


def _function_or(value: Any, handler: Callable[[Any], Any]) -> Any:
    if isinstance(value, UserFunction):
        return value
    if callable(value):
        return function_of(value)
    if written := function_text(value):
        name, _, digest = written.removeprefix("python:").rpartition("#")
        return UserFunction(name, digest)
    return handler(value)


def _written(value: Any) -> Any:
    return str(value) if isinstance(value, UserFunction) else value


#: Metadata of a field that a name or a callable may be.
OR_FUNCTION = (WrapValidator(_function_or), PlainSerializer(_written))


def offered_arguments(call: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some arguments that a callable has parameters for, by name."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in offered.items() if name in parameters}
