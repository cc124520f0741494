"""Columns of numbers that the loss of a job reads beside the tokens of a row.

A loss with a name reads the columns that it names. A function gets all columns of numbers that
nothing else reads. A number is of each token of its row; rows of token ids may have a list of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from tlora_fx.config.job import Job
from tlora_fx.config.losses import FIELDS, MAX_LOGPROB, NEEDS
from tlora_fx.errors import MissingColumnError
from tlora_fx.runtime.chats.conversations import BadRowError


def number_columns(
    job: Job,
    format: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    where: str,
) -> dict[str, str]:
    """The columns that a job's loss reads, our names mapped to those of the data.

    format    of the rows
    rows      the first ones
    columns   that are read otherwise, likewise
    where     the first row
    raises    MissingColumnError
    """
    filled = {name for row in rows for name, value in row.items() if value is not None}
    mapped, ignored = job.data.mapped_columns, job.data.ignored_columns
    fields = {name: mapped.get(name, name) for name in FIELDS if name not in ignored}
    loss, found = job.named_loss, dict[str, str]()
    if isinstance(loss, str):
        _require_needed(job, loss, format, {**fields}, filled, where)
        found = {name: theirs for name, theirs in fields.items() if theirs in filled}
    elif loss is not None:
        taken = {*columns, *columns.values(), *fields, *fields.values(), *ignored}
        others = {name: name for name in sorted(filled - taken)}
        found = {
            name: theirs
            for name, theirs in (fields | others).items()
            if theirs in filled and _has_numbers([row.get(theirs) for row in rows], format)
        }
    for name in FIELDS:
        if name in mapped and name not in found:
            what = "loss" if loss is None else f"loss {loss}"
            raise MissingColumnError(
                f"'columns' maps '{name}', which the job's {what} does not read",
                file=where,
                job=job.name,
                found=f"columns: {{{name}: {mapped[name]}}}",
                help="set a loss that reads it, such as loss: ppo, or leave it out of columns",
            )
    return found


def _require_needed(
    job: Job, loss: str, format: str, fields: Mapping[str, str], filled: set[str], where: str
) -> None:
    """Refuse rows without what a loss with a name reads; raises MissingColumnError."""
    missing = [fields.get(name, name) for name in NEEDS[loss] if fields.get(name) not in filled]
    if not missing and format == "tokens":
        return
    absent = " and no column ".join(repr(name) for name in missing)
    raise MissingColumnError(
        f"the data has no column {absent}, which the loss '{loss}' reads"
        if missing
        else f"the loss '{loss}' reads a log-probability of each token, and the rows are texts",
        file=where,
        job=job.name,
        expected=f"columns input_ids, labels, {', '.join(NEEDS[loss])}",
        found=f"read as {format}, columns {', '.join(sorted(filled)) or 'none'}",
        help="give each row the tokens that were sampled, or map the data's names under columns",
    )


def _has_numbers(values: Iterable[Any], format: str) -> bool:
    """Whether a column is one of numbers; a row of it that has none is a bad row then.

    One number says so, and of text files, in which all values are text, most values.
    """
    given = [value for value in values if value is not None]
    numbers = [value for value in given if _is_number(value, format)]
    return 2 * len(numbers) > len(given) or not all(isinstance(each, str) for each in numbers)


def _is_number(value: Any, format: str) -> bool:
    """Whether a row has a number in a column, or a list of some; infinite ones too."""
    try:
        return _numbers(value, format) != []
    except BadRowError:
        return False


def numbers_beside(value: Any, name: str, format: str, count: int) -> list[float]:
    """Numbers that a column of a row has for each of its `count` tokens.

    name      of the column in the data
    format    of the row
    raises    BadRowError
    """
    try:
        numbers = _numbers(value, format)
    except BadRowError as error:
        raise BadRowError(f"'{name}' {error}{_shown(value)}") from None
    listed = numbers if isinstance(numbers, list) else [numbers] * count
    if len(listed) != count:
        raise BadRowError(f"'{name}' has {len(listed)} numbers, and input_ids {count}")
    wrong = next((at for at, each in enumerate(listed) if not math.isfinite(each)), None)
    if wrong is not None:
        place = f"'{name}'[{wrong}]" if isinstance(numbers, list) else f"'{name}'"
        raise BadRowError(f"{place} is {listed[wrong]}, which is no finite number")
    return listed


def _shown(value: Any) -> str:
    """A value as an error says it, behind its words."""
    try:
        return ": " + repr(value[:60] if isinstance(value, str | bytes) else value)[:80]
    except ValueError:  # of a number with more digits than Python writes
        return ""


def require_log_probabilities(
    numbers: Sequence[float], value: Any, name: str, spans: Sequence[int], start: int
) -> None:
    """Refuse a log-probability above 0 of a token that is trained.

    numbers    of each token that is kept
    value      of the column, as the row has it
    name       of the column in the data
    spans      as of `TokenRow`
    start      the row's first token that is kept
    raises     BadRowError
    """
    for first, stop in zip(spans[::2], spans[1::2], strict=True):
        for at in range(first, stop):
            if numbers[at] > MAX_LOGPROB:
                place = f"'{name}'" if isinstance(value, Real) else f"'{name}'[{start + at}]"
                raise BadRowError(f"{place} is {numbers[at]}, and a log-probability is at most 0")


def _numbers(value: Any, format: str) -> float | list[float]:
    """A number, or a list of them; raises BadRowError, which says what of a column is wrong."""
    if isinstance(value, str):
        # Text files with columns, such as CSV, have no other values.
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # the latter of very many brackets
            raise BadRowError("holds text that is no number") from None
    if hasattr(value, "tolist"):  # of NumPy or torch
        value = value.tolist()
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    if not all(isinstance(each, Real) for each in (value if is_list else [value])):
        raise BadRowError("is no number and no list of numbers")
    if is_list and format != "tokens":
        raise BadRowError("is a list, and rows without input_ids have one number each")
    try:
        return [float(each) for each in value] if is_list else float(value)
    except OverflowError:
        raise BadRowError("holds a number that is too large") from None
