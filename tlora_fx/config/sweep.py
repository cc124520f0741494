"""Expand a sweep over the fields of a job into jobs with names: a grid, or random draws.

A field is named by its dotted path, such as `learning_rate` or `lora.r`. Its values are a list of
choices or a range. Which jobs come out depends on what is written alone.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, StrictInt, ValidationInfo

from tlora_fx.config.base_spec import SEED_LIMIT
from tlora_fx.config.halving import HalvingSpec
from tlora_fx.config.validation import Mistake, Spec, check, refuse, validated

KeyPath: TypeAlias = tuple[str | int, ...]

#: Jobs of all sweeps of a file at most.
MAX_JOBS = 1000
MAX_NAME = 100
#: Draws until so many different ones must be there: by MAX_JOBS even rare numbers have come up.
DRAWS_PER_JOB = 1000
_SHARED = "all jobs on one base share it"
#: Fields that no sweep can change, with the reason.
NOT_SWEPT = {
    "name": "each job of a sweep gets a name of its own",
    **dict.fromkeys(("base", "adapter_dtype", "adapter_compute"), _SHARED),
    "sweep": "list all its fields in one sweep",
    "halving": "all jobs of a sweep are compared alike: write it under 'sweep'",
}

_NAME_PART = re.compile(r"[A-Za-z0-9_.-]*[A-Za-z0-9]")


def _number(value: Any) -> Any:
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(float(value)):
            return value
    except OverflowError:
        pass
    raise refuse("a bound of the range is wrong", expected="a finite number")


class ParameterRange(Spec):
    """Range from which a random sweep draws the numbers of a field.

    min           smallest number
    max           largest number; if `min` and `max` are both whole, so are the drawn numbers
    distribution  uniform, or log_uniform: the logarithm is uniform, as for learning rates
    """

    min: Annotated[Any, AfterValidator(_number)]
    max: Annotated[Any, AfterValidator(_number)]
    distribution: Literal["uniform", "log_uniform"] = "uniform"

    @check("max")
    def _is_above_min(cls, high: Any, info: ValidationInfo) -> None:
        low = info.data.get("min")
        if low is not None and not low < high:
            raise refuse("'max' is not above 'min'", expected=f"a number above {low}")
        if low is not None and not math.isfinite(float(high) - float(low)):
            raise refuse("the range is too wide", expected="a finite difference of max and min")

    @check("distribution")
    def _has_a_logarithm(cls, distribution: str, info: ValidationInfo) -> None:
        low = info.data.get("min")
        if distribution == "log_uniform" and low is not None and low <= 0:
            raise refuse("'log_uniform' needs a 'min' above 0", help="give a larger 'min'")

    @property
    def is_whole(self) -> bool:
        """Whether whole numbers are drawn."""
        return isinstance(self.min, int) and isinstance(self.max, int)

    def at(self, part: float) -> int | float:
        """The number below which this part of the draws lies.

        part   from 0 to below 1
        """
        low: float = self.min
        high: float = self.max + 1 if self.is_whole else self.max
        if self.distribution == "log_uniform":
            number = math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
        else:
            number = low + part * (high - low)
        drawn: int | float = math.floor(number) if self.is_whole else number
        return int(min(max(drawn, low), self.max)) if self.is_whole else min(max(drawn, low), high)


class SweepSpec(Spec):
    """Sweep over fields of a job: the job becomes one job for each combination of values.

    method      grid: every combination of the values; random: `count` drawn combinations
    parameters  values of each field, by its dotted path such as lora.r: a list, or for random also
                a range
    count       number of jobs of a random sweep
    seed        seed of a random sweep: the same seed draws the same values
    halving     end the weak jobs of the sweep early; None: all go to their ends
    """

    method: Literal["grid", "random"] = "grid"
    parameters: dict[str, Any]
    count: StrictInt | None = Field(default=None, ge=1, le=MAX_JOBS, validate_default=True)
    seed: StrictInt = Field(default=0, ge=0, lt=SEED_LIMIT)

    halving: HalvingSpec | None = None

    @classmethod
    def unknown_key(cls, key: str, value: object) -> Mistake:
        """Fields of a job stand one level deeper."""
        unknown = super().unknown_key(key, value)
        if unknown.help.startswith("did you mean"):
            return unknown
        return replace(unknown, help="fields to sweep over stand under 'parameters'")

    @check("parameters")
    def _are_some(cls, parameters: dict[str, Any], info: ValidationInfo) -> None:
        if not parameters:
            raise refuse("the sweep names no field", help="write a field with its values")

    @check("count")
    def _is_of_random(cls, count: int | None, info: ValidationInfo) -> None:
        method = info.data.get("method")
        if method == "random" and count is None:
            raise refuse("a random sweep needs 'count'", help="give the number of jobs")
        if method == "grid" and count is not None:
            raise refuse("'count' is of random sweeps", help="leave it out, or set method: random")


@dataclass(frozen=True, slots=True)
class SweptJob:
    """One job of a sweep.

    name     of the job
    values   of the fields that are swept, by dotted path
    written  by dotted path, where below the sweep the value stands
    others   fields that each job of the sweep has
    """

    name: str
    values: Mapping[str, Any]
    written: Mapping[str, KeyPath]
    others: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Choice:
    """A value of a parameter.

    label   part of the name of a job that has it
    """

    value: Any
    label: str
    written: KeyPath


def expand(name: str, sweep: object) -> tuple[list[SweptJob], list[Mistake]]:
    """Jobs of a sweep in the order of its values, or what is wrong with it.

    name     of the job that is swept
    sweep    as it is written
    returns  a grid's jobs, whose last parameter changes fastest, or the drawn ones; mistakes, each
             at its place below `sweep`
    """
    spec, mistakes = validated(SweepSpec, sweep)
    if spec is None:
        return [], mistakes
    for field, values in spec.parameters.items():
        mistakes += _mistakes(spec, field, values)
    if mistakes:
        return [], mistakes
    jobs, mistakes = _grid(name, spec) if spec.method == "grid" else _random(name, spec)
    if spec.halving is None:
        return jobs, mistakes
    halving = {"group": name} | spec.halving.model_dump(exclude_unset=True)
    written = {"halving": ("halving",)}
    others = {"halving": halving}
    return [replace(j, others=others, written={**j.written, **written}) for j in jobs], mistakes


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted path, none of which holds another, as nested mappings."""
    entry: dict[str, Any] = {}
    for path, value in values.items():
        *outer, last = path.split(".")
        inner = entry
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return entry


def blocked_path(entry: Mapping[str, Any], paths: Iterable[str]) -> tuple[str, str] | None:
    """The first dotted path that leads through what is no mapping, and that part of it.

    A path may lead through what is absent or null.
    """
    for path in paths:
        below: Any = entry
        keys = path.split(".")
        for depth, key in enumerate(keys[:-1], 1):
            below = below.get(key)
            if below is None:
                break
            if not isinstance(below, Mapping):
                return path, ".".join(keys[:depth])
    return None


def entries_of_values(section: object) -> Iterator[dict[str, Any]]:
    """Each value in the lists of a section's sweep as an entry that holds it alone.

    What is wrong with the sweep is passed over.

    section   a job as it is written, or the defaults
    """
    sweep = section.get("sweep") if isinstance(section, Mapping) else None
    parameters = sweep.get("parameters") if isinstance(sweep, Mapping) else None
    for field, values in parameters.items() if isinstance(parameters, Mapping) else ():
        for value in values if isinstance(values, list) else ():
            yield nested({field: value})


def _mistakes(spec: SweepSpec, field: str, values: Any) -> list[Mistake]:
    """What is wrong with one parameter."""
    at = ("parameters", field)
    keys = field.split(".")
    if not all(keys):
        return [Mistake(at, f"'{field}' names no field", help="write a path such as lora.r")]
    if keys[0] in NOT_SWEPT:
        return [Mistake(at, f"'{keys[0]}' cannot be swept", help=NOT_SWEPT[keys[0]])]
    over = next((other for other in spec.parameters if other.startswith(f"{field}.")), None)
    if over is not None:
        return [Mistake(at, f"'{field}' holds '{over}', which is swept too", help="keep one")]
    if isinstance(values, Mapping):
        bounds, mistakes = validated(ParameterRange, values)
        if bounds is not None and spec.method == "grid":
            help = "list the values, or set method: random"
            return [Mistake(at, f"a grid needs a list of values for '{field}'", help=help)]
        return [replace(mistake, loc=(*at, *mistake.loc)) for mistake in mistakes]
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        wanted = "a list of values" + (", or min and max" if spec.method == "random" else "")
        return [Mistake(at, f"'{field}' has no values", expected=wanted, found=repr(values)[:60])]
    for index, value in enumerate(values):
        if any(_is_same(value, other) for other in values[:index]):
            what = f"a value of '{field}' stands twice"
            return [Mistake((*at, index), what, found=repr(value)[:60])]
    return []


def _is_same(one: object, two: object) -> bool:
    """Whether two values are equal, of those that a file can hold."""
    plain = isinstance(one, int | float | str | list | tuple | Mapping)
    return one is two or (plain and type(one) is type(two) and one == two)


def _grid(name: str, spec: SweepSpec) -> tuple[list[SweptJob], list[Mistake]]:
    size = math.prod(len(values) for values in spec.parameters.values())
    if size > MAX_JOBS:
        what = f"the grid has {size} combinations"
        help = "give fewer values, or set method: random"
        return [], [Mistake((), what, expected=f"at most {MAX_JOBS}", help=help)]
    combinations = list(product(*(_choices(spec, field) for field in spec.parameters)))
    names = [
        "-".join([
            name,
            *(f"{key}-{choice.label}" for key, choice in zip(_keys(spec), each, strict=True)),
        ])
        for each in combinations
    ]  # fmt: skip
    if len(set(names)) < size or any(len(each) > MAX_NAME or ".." in each for each in names):
        names = [_numbered(name, number) for number in range(1, size + 1)]
    return [_job(*each, spec) for each in zip(names, combinations, strict=True)], []


def _random(name: str, spec: SweepSpec) -> tuple[list[SweptJob], list[Mistake]]:
    """Different combinations. Values of a field depend on the seed and its own range alone."""
    assert spec.count is not None
    jobs: list[SweptJob] = []
    drawn: set[tuple[object, ...]] = set()
    for number in range(spec.count * DRAWS_PER_JOB):
        if len(jobs) == spec.count:
            break
        each = [_draw(spec, field, number) for field in spec.parameters]
        identity = tuple(
            choice.written if len(choice.written) > 2 else choice.value for choice in each
        )
        if identity not in drawn:
            drawn.add(identity)
            jobs.append(_job(_numbered(name, len(jobs) + 1), each, spec))
    if len(jobs) < spec.count:
        what = "the sweep has too few different combinations"
        found = f"{len(jobs)} in {spec.count * DRAWS_PER_JOB} draws"
        help = "give a smaller 'count', or more values"
        return [], [Mistake(("count",), what, f"{spec.count}", found, help)]
    return jobs, []


def _draw(spec: SweepSpec, field: str, number: int) -> _Choice:
    # A string's generator does not depend on the other fields, nor on the version of Python.
    part = random.Random(f"{spec.seed} {number} {field}").random()  # noqa: S311  (no secrets)
    values = spec.parameters[field]
    if isinstance(values, Mapping):
        return _Choice(ParameterRange(**values).at(part), "", ("parameters", field))
    return _choices(spec, field)[int(part * len(values))]


def _choices(spec: SweepSpec, field: str) -> list[_Choice]:
    """The values of a list, each with what it is called in a job's name: itself, or its number."""
    values = spec.parameters[field]
    labels = [_label(value) for value in values]
    if None in labels or len(set(labels)) < len(labels):
        labels = [str(number) for number in range(1, len(values) + 1)]
    return [
        _Choice(value, str(label), ("parameters", field, index))
        for index, (value, label) in enumerate(zip(values, labels, strict=True))
    ]


def _label(value: object) -> str | None:
    """A value as part of a job's name; None where it cannot be."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"{value}".replace("e+", "e") if isinstance(value, int | float | str) else ""
    return text if len(text) <= 40 and _NAME_PART.fullmatch(text) else None


def _keys(spec: SweepSpec) -> list[str]:
    """What each field is called in a job's name: its last key, or its path if two end alike."""
    last = [field.rpartition(".")[2] for field in spec.parameters]
    fields = list(spec.parameters) if len(set(last)) < len(last) else last
    return [re.sub(r"[^A-Za-z0-9_.-]", "_", field) for field in fields]


def _numbered(name: str, number: int) -> str:
    return f"{name}-{number:03}"


def _job(name: str, choices: Sequence[_Choice], spec: SweepSpec) -> SweptJob:
    fields = dict(zip(spec.parameters, choices, strict=True))
    return SweptJob(
        name,
        {field: choice.value for field, choice in fields.items()},
        {field: choice.written for field, choice in fields.items()},
        {},
    )
