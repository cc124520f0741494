"""Options of commands: one dataclass a command, options that several share, times."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

if TYPE_CHECKING:
    from tlora_fx.pipeline import Instrument, Pipeline


#: Key of an option's names and settings, in the metadata of its field.
_OPTION = "option"


def command_group(help: str) -> typer.Typer:
    """Commands under one name, as all of `tlora-fx` behave: plain texts, errors as we word them."""
    return typer.Typer(
        help=help,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def option(default: Any, help: str, *names: str, **settings: Any) -> Any:
    """A field of a command's dataclass, or a parameter of a command, that is an option.

    It is a flag if it is False by default, and must be given if the default is `...`.

    names      of the option, where it has others than the field's
    settings   more of `typer.Option`, such as `min`
    """
    value = MISSING if default is ... else default
    described = {_OPTION: (names, {"help": help, **settings})}
    return field(default=value, metadata=described)


def _typer_option(name: str, default: object, names: tuple[str, ...], **settings: Any) -> Any:
    """Typer's option of a field; without names of its own, a flag has no --no- form."""
    if default is False and not names:
        names = (f"--{name.replace('_', '-')}",)
    return typer.Option(*names, **settings)


def _annotated(name: str, kind: Any, described: Any) -> Any:
    """A type with typer's option, if an `option` describes it."""
    if _OPTION not in getattr(described, "metadata", {}):
        return kind
    names, settings = described.metadata[_OPTION]
    return Annotated[kind, _typer_option(name, described.default, names, **settings)]


class Interrupted(BaseException):
    """Exit of an interrupted command with a message; typer shows nothing of a KeyboardInterrupt."""


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Make typer's parameters of those of a command, and of the fields of a dataclass.

    The dataclass is the command's first argument, if it has one. What is an `option` is stated
    once. Other parameters come before the fields; what must be given comes first.
    """
    others = dict(signature(command).parameters)
    hints = get_type_hints(command, include_extras=True)
    first = next(iter(others))
    options = hints.pop(first) if is_dataclass(hints[first]) else None
    taken: dict[str, Parameter] = {}
    if options is not None:
        del others[first]
        own = get_type_hints(options, include_extras=True)
        own |= {each.name: _annotated(each.name, own[each.name], each) for each in fields(options)}
        hints = own | hints
        taken = dict(signature(options).parameters)
    for name, parameter in others.items():
        hints[name] = _annotated(name, hints[name], parameter.default)
        if isinstance(parameter.default, Field):
            value = parameter.default.default
            default = Parameter.empty if value is MISSING else value
            others[name] = parameter.replace(default=default)
    # What many commands have stands behind a command's own options.
    for shared in (WatchOptions, PipelineOptions):
        if options is not None and issubclass(options, shared):
            taken |= {name: taken.pop(name) for name in signature(shared).parameters}

    def run(**values: Any) -> None:
        if options is None:
            command(**values)
            return
        try:
            command(options(**{name: values.pop(name) for name in taken}), **values)
        except KeyboardInterrupt as stop:
            raise Interrupted(str(stop)) from stop

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = hints
    parameters = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in (*others.values(), *taken.values())
    ]
    parameters.sort(key=lambda parameter: parameter.default is not Parameter.empty)
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def with_options(
    *kinds: Any,
    names: Mapping[str, tuple[str, ...]] | None = None,
    parsers: Mapping[str, Callable[[Any], object]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, which takes all as keywords, an option for each described field.

    names     of options that have others than their field's
    parsers   of options that are written otherwise than their values
    """
    parameters = [
        _parameter(name, field, (names or {}).get(name, ()), (parsers or {}).get(name))
        for kind in kinds
        for name, field in kind.__pydantic_fields__.items()
        if field.description
    ]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorated


def _parameter(
    name: str, field: Any, names: tuple[str, ...], parser: Callable[[Any], object] | None
) -> Parameter:
    default = field.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    help = f"{field.description[:1].upper()}{field.description[1:]}."
    literal = get_origin(field.annotation) is Literal
    words = get_args(field.annotation) if literal else ()
    metavar = "|".join(words) or None
    described = _typer_option(name, default, names, help=help, parser=parser, metavar=metavar)
    annotation = Annotated[_plain(field.annotation), described]  # type: ignore[valid-type]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _plain(kind: Any) -> Any:
    """What a command line can hold of a kind: text where it is a list or a choice."""
    if get_origin(kind) is UnionType:
        [kind] = [part for part in get_args(kind) if part is not type(None)]
        return _plain(kind) | None
    return kind if kind in (int, float, bool, Path) else str


JobFilePath = Annotated[Path, typer.Argument(help="Job file (YAML).")]
RunFolderPath = Annotated[Path, typer.Argument(help="Output folder of a run (its -o).")]
RunOrAdapter = Annotated[
    Path,
    typer.Argument(
        help="Output folder of a run (its -o), or the folder of one adapter, such as a checkpoint."
    ),
]
MaxRowTokens = Annotated[
    int,
    typer.Option(
        min=2,
        help="Maximum tokens in one forward pass. A larger micro-batch of a job has its own.",
    ),
]
Checks = Literal["none", "structure", "numerics"]
Load = Annotated[
    list[str] | None,
    typer.Option(
        "--load",
        help="Import this Python file or module, for your own passes, operators or rules; "
        "repeatable.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device to run on: cpu, cuda, cuda:1, ...; if not given, the first GPU, or the CPU "
        "if there is no GPU."
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Allow Python code that the job file names to run: code of the base model, and "
        "metric functions.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Options of commands that compile the jobs of a file."""

    pipeline: str | None = option(
        None,
        "Graph passes that compile the model, instead of the default ones; `tlora-fx passes` lists "
        "them.",
    )
    add_pass: list[str] | None = option(
        None,
        "Insert a compiler pass before or after another one: NAME@after:NAME or NAME@before:NAME; "
        "repeatable.",
    )
    load: Load = None
    trust_remote_code: TrustRemoteCode = False

    def require_passes(self) -> None:
        """Refuse passes and options that nobody has, while torch is not imported yet.

        Files and modules of --load bring passes of their own: then names are looked up later.

        raises    PipelineError
        """
        from tlora_fx.config.pipeline_text import require_extension, require_readable

        for extension in self.load or ():
            require_extension(extension)
        if not self.load:
            require_readable(self.pipeline, self.add_pass or ())

    def passes(self, disabled: list[str] | None = None) -> Pipeline:
        """The pipeline that the options mean; raises PipelineError, PluginBroken.

        disabled   names of passes that are left out
        """
        from tlora_fx.compiler import resolve_pipeline
        from tlora_fx.pipeline import load_extension

        for extension in self.load or ():
            load_extension(extension)
        return resolve_pipeline(self.pipeline, self.add_pass or ()).without(disabled or ())


# Without slots: a command may have both kinds of options.
@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of commands that show what each pass does."""

    disable_pass: list[str] | None = option(
        None, "Leave this compiler pass out (NAME); refused if a later one needs it; repeatable."
    )
    verify: Checks | None = option(
        None, "What to check after each compiler pass; structure if not given."
    )
    strict: bool = option(
        False, "Check numbers after each compiler pass, and fail where they cannot be compared."
    )
    time: bool = option(False, "Print how long each compiler pass takes.")
    pass_statistics: bool = option(
        False,
        "Print what each compiler pass and each of its rewrite rules did: times, nodes, shapes, "
        "matches and misses.",
        "--pass-statistics",
        "--time-passes",
    )
    print_after: list[str] | None = option(
        None,
        "Print the graphs after this pass (NAME), after each pass (all), or after each that "
        "changed them (changed); repeatable.",
    )
    print_after_change: bool = option(
        False, "Print the graphs after each pass that changed them, as --print-after changed."
    )
    dump_changed: Path | None = option(
        None, "Folder to write the graphs to after each pass that changed them."
    )

    def instruments(self) -> list[Instrument]:
        """Instruments that the options ask for; they write to stderr."""
        from tlora_fx.inspect.instruments import Watch

        wanted = (*(self.print_after or ()), *(["changed"] if self.print_after_change else []))
        watch = Watch(
            self.time, wanted, self.dump_changed,
            verify=self.verify, strict=self.strict, statistics=self.pass_statistics,
        )  # fmt: skip
        return watch.instruments()


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)")
_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str | float, option: str) -> float:
    """The seconds of a time above 0; without a unit they are seconds.

    raises    typer.BadParameter, which names the option
    """
    match = _DURATION.fullmatch(str(text).strip())
    value = float(match[1]) * _UNIT[match[2]] if match else 0.0
    if not value:
        raise typer.BadParameter(f"{option} is a time, such as 60s or 5m; not {text!r}")
    return value
