"""Pipelines, and their text form, which round-trips.

`drop-export-noise,fuse-backbone{max-jobs=8},lower-adapters`
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tlora_fx.config.fields import default_of
from tlora_fx.config.pipeline_text import require_option, split_pipeline
from tlora_fx.errors import PipelineError, nearest
from tlora_fx.pipeline.passes import GroupPass, JobPass, Pass, kind_of, read_value
from tlora_fx.pipeline.registry import REGISTRY, find_pass

_NO_WORD = re.compile(r"[,={}]")
_ADDED = re.compile(r"(?P<text>.+?)@(?P<side>after|before):(?P<anchor>[a-z0-9-]+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes in order; job passes come before group passes."""

    passes: tuple[Pass, ...]

    def __str__(self) -> str:
        return ",".join(str(item) for item in self.passes)

    def until(self, name: str) -> Pipeline:
        """The pipeline up to and with the last pass of this name.

        raises    PipelineError where it has none
        """
        return Pipeline(self.passes[: self.place_of(name)])

    def place_of(self, name: str) -> int:
        """The place of the last pass of this name, counted from 1.

        raises    PipelineError where there is none
        """
        names = [item.name for item in self.passes]
        if name not in names:
            raise PipelineError(
                f"the pipeline has no pass '{name}'",
                nearest=nearest(name, names),
                found=str(self),
                help="name one of its passes",
            )
        return len(names) - names[::-1].index(name)

    def without(self, names: Collection[str], held: Collection[str] = ()) -> Pipeline:
        """The pipeline without any pass of these names.

        held      as of `checked`
        raises    PipelineError where it has none, and where a later pass requires one
        """
        for name in names:
            self.place_of(name)
        try:
            return checked((item for item in self.passes if item.name not in names), held)
        except PipelineError as error:
            raise PipelineError(
                error.what,
                expected=error.facts.get("expected"),
                found=f"{self}, without {', '.join(names)}",
                help="keep what is expected, or leave out this pass, too",
            ) from error

    def adding(self, text: str) -> Pipeline:
        """The pipeline with one more pass: "my-pass{option=3}@after:fuse-backbone".

        raises    PipelineError
        """
        request = _ADDED.fullmatch(text.strip())
        if request is None:
            raise PipelineError(
                "it cannot be read where a pass is to be added",
                found=text,
                expected="name{option=value}@after:name, or @before:name",
                help="for example: my-pass@after:fuse-backbone",
            )
        added = parse_pass(request["text"])
        place = self.place_of(request["anchor"]) - (request["side"] == "before")
        return checked((*self.passes[:place], added, *self.passes[place:]))


def parse_pipeline(text: str, held: Collection[str] = ()) -> Pipeline:
    """Read the text form of a pipeline.

    held      facts that hold, and passes that ran, before it
    raises    PipelineError for unknown passes and options, and for passes in a wrong order
    """
    return checked(_parse(text), held)


def parse_pass(text: str) -> Pass:
    """Read one pass: "name{option=value}"; raises PipelineError."""
    passes = _parse(text)
    if len(passes) != 1:
        raise PipelineError("one pass is expected", found=text, help="write name{option=value}")
    return passes[0]


def _parse(text: str) -> list[Pass]:
    return [_make(name, options) for name, options in split_pipeline(text)]


def checked(passes: Iterable[Pass], held: Collection[str] = ()) -> Pipeline:
    """A pipeline whose passes find what they require; raises PipelineError.

    held      facts that hold, and passes that ran, before it
    """
    pipeline = Pipeline(tuple(passes))
    done = set(held)
    group_seen = False
    for item in pipeline.passes:
        missing = item.requires - done
        if missing:
            raise PipelineError(
                f"pass '{item.name}' stands before what it requires",
                expected=", ".join(sorted(missing)),
                found=str(pipeline),
                help=f"put {', '.join(_providers(missing))} before {item.name}",
            )
        if group_seen and isinstance(item, JobPass):
            raise PipelineError(
                f"job pass '{item.name}' stands after a group pass",
                found=str(pipeline),
                help="job passes come first",
            )
        group_seen = group_seen or isinstance(item, GroupPass)
        done |= {item.name, *item.provides}
    return pipeline


def _providers(facts: Iterable[str]) -> list[str]:
    """The passes that make these facts hold; a fact that no known pass provides stands itself."""
    providers: dict[str, None] = {}
    for fact in sorted(facts):
        makers = [name for name, cls in sorted(REGISTRY.items()) if fact in cls.provides]
        providers.update(dict.fromkeys([fact] if fact in REGISTRY or not makers else makers[:1]))
    return list(providers)


def _make(name: str, options: str) -> Pass:
    cls = find_pass(name)
    known = {f.name.replace("_", "-"): f.name for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for item in options.split():
        option, _, value = item.partition("=")
        require_option(name, option, known)
        if known[option] in values:
            raise PipelineError(f"option '{option}' of pass '{name}' is given twice", found=options)
        values[known[option]] = _typed(cls, known[option], option, _value(name, option, value))
    needed = [f.name for f in dataclasses.fields(cls) if default_of(f) is dataclasses.MISSING]
    missing = [field.replace("_", "-") for field in needed if field not in values]
    if missing:
        raise PipelineError(
            f"pass '{name}' needs option '{missing[0]}'",
            expected=f"{name}{{{missing[0]}=...}}",
            help=f"tlora-fx passes show {name}",
        )
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise PipelineError(
            f"pass '{name}' refuses its options", found=options or None, reason=error
        ) from error


def _value(name: str, option: str, text: str) -> object:
    """What stands behind an option's =: JSON, or a word."""
    value = read_value(text)
    if value is text and _NO_WORD.search(text):
        raise PipelineError(
            f"the value of option '{option}' of pass '{name}' cannot be read",
            expected="a word, or JSON without blanks",
            found=text,
            help=f"separate options by blanks, {name}{{{option}=... other=...}}, and put quotes "
            "around texts that hold one of , = { }",
        )
    return value


def _typed(cls: type[Pass], field: str, option: str, value: object) -> object:
    hint = get_type_hints(cls)[field]
    try:
        return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise PipelineError(
            f"wrong value of option '{option}' of pass '{cls.name}'",
            expected=kind_of(hint),
            found=value,
            help=error.errors()[0]["msg"],
        ) from None
