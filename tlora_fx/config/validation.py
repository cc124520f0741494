"""Turn what pydantic found wrong with a job into lines that a user can act on.

A wrong key gets the nearest right one, a wrong value the range that is allowed. The specs of
`tlora_fx.config.job` use `Spec` as their root, which raises `JobError`
where pydantic would raise its own. What Python code calls is answered in Python's words, with the
name of the argument; all else in those of a job file.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import annotated_types
from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from tlora_fx.config.other_names import PYTHON_KEYS, hint
from tlora_fx.errors import JobError, did_you_mean

#: Options of the command line, and what says the same to `tlora_fx.train`.
_OPTIONS = {
    "--accept-changes": "accept_changes=True",
    "--resume": "resume=True",
    "--whole-base": "whole_base=True",
    "--max-row-tokens": "max_row_tokens",
    "-o FOLDER": "output=...",
    "-o": "output=...",
}
_OPTION = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in _OPTIONS))
#: What may follow the value of `key: value`: no word, but one that goes on with the advice.
_END = r"(?![\w.]*\w)(?! (?!(?:under|beside|in|and|or|to|on|with) )[a-z])"
_PAIRS = r"\w+: [\w.-]+(?:, \w+: [\w.-]+)*"
_VALUE = rf"(\{{{_PAIRS}\}}|[A-Za-z_]\w*|\d+(?:\.\d+)?)"
_INNER = re.compile(r"(\w+): ([\w.-]+)")
#: Words of job files.
_WORDS = {
    r"\bunder 'base'": "in 'base'",
    r"\bnull\b": "None",
    r"\btrue or false\b": "True or False",
    r" in the job file\b": " in the job",
    r"\bjob file\b": "job",
    r"\bperhaps columns=(\{.*\})": r"perhaps data={..., 'columns': \1}",
}
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}


def in_python(text: str, keys: Iterable[str]) -> str:
    """Text of a message in Python's words.

    keys    of job files
    """
    pairs = rf"\b({'|'.join(sorted(keys, key=len, reverse=True))}): {_VALUE}{_END}"
    text = re.sub(pairs, lambda pair: f"{pair[1]}={_value(pair[2])}", text)
    text = _OPTION.sub(lambda option: _OPTIONS[option[0]], text)
    for words, instead in _WORDS.items():
        text = re.sub(words, instead, text)
    return text


def _value(text: str) -> str:
    if text.startswith("{"):
        pairs = (f"{key!r}: {_value(value)}" for key, value in _INNER.findall(text))
        return f"{{{', '.join(pairs)}}}"
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return text if text[0].isdigit() else repr(text)


_collecting: ContextVar[bool] = ContextVar("collecting", default=False)
#: Class or function that Python code calls, whose arguments are validated; "" where a file is read.
_called: ContextVar[str] = ContextVar("called", default="")

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text (quote it if YAML reads it as something else)",
    "mapping": "a mapping (key: value)",
    "dict": "a mapping (key: value)",
    "model": "a mapping (key: value)",
    "list": "a list",
    "tuple": "a list",
    "finite": "a finite number",
}
_KINDS_IN_PYTHON = {
    **_KINDS,
    "int": "an int",
    "float": "a float",
    "bool": "True or False",
    "string": "a str",
    **dict.fromkeys(("mapping", "dict", "model"), "a dict"),
}


#: What mappings of a job file look like at the least.
_EXAMPLES = {
    "base": "{model: FOLDER}",
    "data": "{path: train.jsonl}",
    "eval_data": "{path: eval.jsonl}",
    "lora": "{r: 16}",
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """Mistake in a job.

    loc       the keys that lead to it, such as ("data", "format")
    """

    loc: tuple[str | int, ...]
    what: str
    expected: str = ""
    found: str = ""
    help: str = ""

    def line(self) -> str:
        """Text of the mistake as one line."""
        parts = [self.what]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.found:
            parts.append(f"found {self.found}")
        return ", ".join(parts) + (f"; {self.help}" if self.help else "")


def refuse(what: str, *, help: str = "", expected: str = "") -> PydanticCustomError:
    """A mistake for a validator to raise, in our words instead of pydantic's."""
    # What was found may hold half a character, which pydantic cannot print.
    texts = {"what": what, "help": help, "expected": expected}
    context = {k: v.encode("utf-8", "backslashreplace").decode() for k, v in texts.items()}
    return PydanticCustomError("tlora", "{what}", context)


def check(
    *fields: str, mode: Literal["before", "after"] = "after"
) -> Callable[[Callable[[Any, Any, ValidationInfo], None]], Any]:
    """Make a validator of a method that refuses values of fields, and changes none.

    The method takes the class, the value, and what pydantic knows of the fields before it.
    """

    def decorated(method: Callable[[Any, Any, ValidationInfo], None]) -> Any:
        def checked(cls: type, value: Any, info: ValidationInfo) -> Any:
            method(cls, value, info)
            return value

        return field_validator(*fields, mode=mode)(classmethod(checked))

    return decorated


@contextmanager
def called(name: str) -> Iterator[None]:
    """Inside, mistakes are told as those of the arguments of this class or function of Python."""
    token = _called.set(name)
    try:
        yield
    finally:
        _called.reset(token)


class Spec(BaseModel):
    """A frozen part of a job that refuses unknown keys.

    raises  JobError, with all mistakes at once, wherever it is built on its own
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    #: What other trainers call this spec's keys.
    other_names: ClassVar[Mapping[str, str]] = {}
    #: Specs that validate a field which is typed as a plain mapping.
    inner: ClassVar[Mapping[str, type[Spec]]] = {}

    def __init__(self, **fields: Any) -> None:
        with called(type(self).__name__):
            super().__init__(**fields)

    # pydantic calls an __init__ of ours only where Python code does, not for what it validates.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="wrap")
    @classmethod
    def _raise_job_error(cls, data: Any, handler: ModelWrapValidatorHandler[Spec]) -> Spec:
        if _collecting.get():
            return handler(data)
        name = data.get("name") if isinstance(data, Mapping) else None
        with collecting():
            try:
                return handler(data)
            except ValidationError as error:
                raise job_error(mistakes_in(error, cls), job=name) from None

    @classmethod
    def written_at(cls, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
        """The keys by which a user wrote what this spec keeps at `loc`."""
        return loc

    @classmethod
    def unknown_key(cls, key: str, value: object) -> Mistake:
        """Message for a key that is no field."""
        known = ", ".join(cls.model_fields)
        help = did_you_mean(key, cls.model_fields, f"known keys: {known}")
        help = hint(key, cls.other_names) or help
        if _called.get() == "Job" and cls.__name__ == "Job":
            help = PYTHON_KEYS.get(key, help)
        return Mistake((key,), f"unknown key '{key}'", help=help)


@contextmanager
def collecting() -> Iterator[None]:
    """Inside, specs raise pydantic's ValidationError, for a caller who reports it itself."""
    token = _collecting.set(True)
    try:
        yield
    finally:
        _collecting.reset(token)


SpecT = TypeVar("SpecT", bound=Spec)


def validated(spec: type[SpecT], value: object) -> tuple[SpecT | None, list[Mistake]]:
    """A spec of what a file holds, or what is wrong with it."""
    with collecting():
        try:
            return spec.model_validate(value), []
        except ValidationError as error:
            return None, mistakes_in(error, spec)


def mistakes_in(error: ValidationError, spec: type[Spec]) -> list[Mistake]:
    """All that pydantic found wrong with a `spec`, in the order of its fields."""
    return [
        _mistake(details, spec)
        for details in error.errors(include_url=False)
        # A default that depends on other fields waits until these are right.
        if details["type"] != "default_factory_not_called"
    ]


def job_error(mistakes: list[Mistake], *, job: object) -> JobError:
    """The error for the mistakes of a job that no job file holds."""
    if callee := _called.get():
        mistakes = [_of_argument(callee, mistake) for mistake in mistakes]
    if len(mistakes) == 1:
        [mistake] = mistakes
        found, expected = mistake.found or None, mistake.expected or None
        return JobError(mistake.what, help=mistake.help, job=job, expected=expected, found=found)
    rows = {str(index): mistake.line() for index, mistake in enumerate(mistakes, 1)}
    return JobError(f"{len(mistakes)} mistakes in a job", help="", job=job, **rows)


def words_of_python(text: str) -> str:
    """A message about a job in Python's words, where it has those of a job file."""
    return in_python(text, set(_keys_below(Spec)))


def _keys_below(spec: type[Spec]) -> Iterator[str]:
    yield from spec.model_fields
    for kind in spec.__subclasses__():
        yield from _keys_below(kind)


#: What an argument takes beside the mapping or text of a job file.
_OBJECTS = {
    "base": "a path or a hub id, a model, or a dict",
    "lora": "a LoraConfig, a rank, or a dict",
    **dict.fromkeys(("data", "eval_data"), "a path, a list of rows, a Dataset, or a dict"),
    "compute_metrics": "a function, or a str",
}
#: Arguments that name one of several things, or take what makes one.
_MADE = {
    "optim": "a class of torch.optim, or a function of parameters that makes one",
    "loss": "a function of (logprobs, inputs)",
}


def _of_argument(callee: str, mistake: Mistake) -> Mistake:
    """A mistake in Python's words, with the argument that it is about."""
    at = f"{callee}({mistake.loc[0]}=...)" if mistake.loc else f"{callee}(...)"
    texts = (mistake.what, mistake.expected, mistake.found, mistake.help)
    what, expected, found, help = map(words_of_python, texts)
    if len(mistake.loc) == 1 and expected in ("a dict", "a str"):
        expected = _OBJECTS.get(str(mistake.loc[0]), expected)
    if len(mistake.loc) == 1 and expected.startswith("one of") and mistake.loc[0] in _MADE:
        expected += f"; or {_MADE[str(mistake.loc[0])]}"
    if mistake.loc and mistake.what == f"unknown key '{mistake.loc[0]}'":
        what = f"unknown argument '{mistake.loc[0]}'"
        help = help.replace("known keys:", "known arguments:")
    return Mistake(mistake.loc, f"{at}: {what}", expected, found, help)


def _mistake(details: ErrorDetails, spec: type[Spec]) -> Mistake:
    loc, kind, found = details["loc"], details["type"], _short(details.get("input"))
    context = details.get("ctx", {})
    owner, field = _owner(spec, loc)
    loc = spec.written_at(loc)
    if kind == "tlora":
        expected = context["expected"]
        return Mistake(loc, context["what"], expected, found if expected else "", context["help"])
    key = str(loc[-1]) if loc else "the job"
    example = "" if _called.get() else _EXAMPLES.get(key, "")
    if kind == "extra_forbidden":
        unknown = owner.unknown_key(key, details.get("input"))
        return Mistake(loc, unknown.what, unknown.expected, unknown.found, unknown.help)
    if kind == "missing":
        help = f"such as {key}: {example}" if example else ""
        return Mistake(loc, f"'{key}' is missing", help=help)
    if key == "[key]":
        loc = loc[:-1]
    path = ".".join(str(part) for part in loc) or "the job"
    kinds = _KINDS_IN_PYTHON if _called.get() else _KINDS
    expected = _allowed(field) or kinds.get(kind.split("_")[0], "")
    expected = expected or details["msg"].removeprefix("Input should be ")
    if example and expected == _KINDS["mapping"]:
        expected += f", such as {example}"
    help = did_you_mean(str(details.get("input")), _choices(field))
    return Mistake(loc, f"wrong value of '{path}'", expected, found, help)


def _owner(spec: type[Spec], loc: tuple[str | int, ...]) -> tuple[type[Spec], FieldInfo | None]:
    """The spec that holds the last key of `loc`, and that key's field."""
    for part in loc[:-1]:
        field = spec.model_fields.get(str(part))
        if isinstance(part, int):
            continue  # of a list of specs
        inside = spec.inner.get(str(part)) or (field and _spec_in(field.annotation))
        if inside is None:
            return spec, field
        spec = inside
    return spec, spec.model_fields.get(str(loc[-1])) if loc else None


def _spec_in(annotation: Any) -> type[Spec] | None:
    """The spec that a field holds, alone, in a tuple or beside null."""
    for held in (annotation, *get_args(annotation)):
        if isinstance(held, type) and issubclass(held, Spec):
            return held
    return None


def _choices(field: FieldInfo | None) -> list[str]:
    if field is None:
        return []
    hints = [field.annotation, *get_args(field.annotation)]
    return [
        str(choice) for hint in hints if get_origin(hint) is Literal for choice in get_args(hint)
    ]


def _allowed(field: FieldInfo | None) -> str:
    """The values that a field allows, as a user would write the range."""
    if field is None:
        return ""
    if choices := _choices(field):
        return "one of " + ", ".join(choices)
    low, high = "", ""
    for bound in field.metadata:
        match bound:
            case annotated_types.Ge(ge=number):
                low = f"{number} <= "
            case annotated_types.Gt(gt=number):
                low = f"{number} < "
            case annotated_types.Le(le=number):
                high = f" <= {number}"
            case annotated_types.Lt(lt=number):
                high = f" < {number}"
            case _:
                pass
    if not low and not high:
        return ""
    kinds = _plain_types(field.annotation)
    unit = "a whole number" if int in kinds else "a number"
    null = " or null" if type(None) in kinds else ""
    return f"{unit} n with {low}n{high}{null}"


def _plain_types(hint: Any) -> set[Any]:
    """The types that a hint joins, without what Annotated adds to them."""
    if get_origin(hint) is Annotated:
        return _plain_types(get_args(hint)[0])
    return {hint}.union(*(_plain_types(arg) for arg in get_args(hint)))


# Rows of data may be many, and long.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


#: How a job file writes what Python writes otherwise.
_IN_YAML = {None: "null", True: "true", False: "false"}


def _short(value: object) -> str:
    if not _called.get() and (value is None or isinstance(value, bool)):
        return _IN_YAML[value]
    text = _REPR.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
