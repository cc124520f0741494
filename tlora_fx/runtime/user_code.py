"""Objects of the user's own code, by the name that a job file or the command line gives them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tlora_fx.config.functions import UserFunction
from tlora_fx.errors import MetricFunctionError, errors_as


def user_object(name: str) -> Any:
    """Object that MODULE:NAME or FILE.py:NAME names; the code is run.

    raises   whatever the code raises; ImportError, OSError, AttributeError
    """
    source, _, attribute = name.rpartition(":")
    module = _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    return getattr(module, attribute)


def find_function(name: str | UserFunction, job: str) -> Callable[..., Any]:
    """The function of `compute_metrics`, or the one that MODULE:FUNCTION or FILE.py:FUNCTION names.

    raises   MetricFunctionError
    """
    if isinstance(name, UserFunction):
        if name.call is not None:
            return name.call
        raise MetricFunctionError(
            "a metric function of Python is not at hand where a job is read from a file",
            job=job,
            function=name,
            help="make the job in Python: Job(compute_metrics=...)",
        )
    with errors_as(
        MetricFunctionError, "a metric function cannot be imported", Exception, named=True,
        job=job, function=name,
        help="write FILE.py:FUNCTION, or MODULE:FUNCTION of what is installed",
    ):  # fmt: skip
        function = user_object(name)
    if not callable(function):
        raise MetricFunctionError("a metric function is no function", job=job, function=name)
    return function  # type: ignore[no-any-return]


def told_with_line(error: BaseException, function: Callable[..., Any] | None) -> str:
    """An error's type and text, and the last line of the function's file that it came through.

    function   None: there is none
    """
    text = f"{type(error).__name__}: {error}"
    code = getattr(function and inspect.unwrap(function), "__code__", None)
    if code is None:
        return text
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{text} ({Path(code.co_filename).name}:{lines[-1]})" if lines else text


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
