"""The passes that are known by name: our own, and those of other packages.

Other packages name theirs in the entry-point group `tlora_fx.passes`. They are imported when they
are asked for; one that cannot be imported is listed as broken with its reason, and breaks nothing
else.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar, get_args

from tlora_fx.config.pipeline_text import require_extension, require_known
from tlora_fx.config.plugins import Plugin, load_plugin, plugin_names, plugins_of
from tlora_fx.errors import PipelineError, PluginBroken
from tlora_fx.pipeline.passes import NAME, GroupPass, JobPass, Numerics, Pass, options_of

PASSES = "tlora_fx.passes"

# Our own, and what Python code registered.
REGISTRY: dict[str, type[Pass]] = {}
P = TypeVar("P", bound="type[Pass]")


def register(cls: P) -> P:
    """Class decorator: make a pass known by its name.

    raises    PipelineError for a name that pipelines cannot spell, or that another pass has
    """
    if not NAME.fullmatch(cls.name):
        raise PipelineError(
            f"a pass cannot be called '{cls.name}'",
            found=f"{cls.__module__}.{cls.__qualname__}",
            help="names have small letters, digits and '-'",
        )
    if _has_undeclared_fields(cls):
        raise PipelineError(
            f"pass '{cls.name}' is no dataclass, so its options are not known",
            found=_full_name(cls),
            help="write @dataclass(frozen=True, slots=True) between @register and the class",
        )
    known = REGISTRY.get(cls.name, cls)
    if _full_name(known) != _full_name(cls):
        raise PipelineError(
            f"two passes are called '{cls.name}'",
            expected=_full_name(known),
            found=_full_name(cls),
            help="give one of them another name",
        )
    REGISTRY[cls.name] = cls
    return cls


def _has_undeclared_fields(cls: type) -> bool:
    """Whether a class has fields, or a constructor, that no `@dataclass` above it has seen."""
    for part in cls.__mro__:
        own = vars(part)
        if "__dataclass_fields__" in own:
            return False
        kinds = map(str, inspect.get_annotations(part).values())
        if "__init__" in own or any("ClassVar" not in kind for kind in kinds):
            return True
    return False


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def find_pass(name: str) -> type[Pass]:
    """The pass of this name.

    raises    PipelineError where there is none, PluginBroken where it cannot be imported
    """
    if name in REGISTRY:
        return REGISTRY[name]
    require_known([name], pass_names())
    offered = next(entry for entry in entry_points(group=PASSES) if entry.name == name)
    plugin = load_pass(offered)
    if plugin.found is None:
        raise plugin.error(f"pass '{name}'")
    return plugin.found


def pass_names() -> list[str]:
    """All names of passes, without importing anything."""
    return plugin_names(PASSES, REGISTRY)


def load_extension(given: str | Path) -> None:
    """Import a module that registers passes, operators or rules: a file, or a dotted name.

    A file is imported by its own name, with its folder on the path, so that graph files and other
    processes find what it defines.

    raises    PluginBroken where it cannot be imported, with the line that failed
    """
    path = Path(given)
    name, wanted = str(given), None
    if path.suffix == ".py" or path.exists():
        require_extension(given)
        wanted = path.resolve()
        name, folder = path.stem, str(wanted.parent)
        if wanted.is_file() and folder not in sys.path:
            sys.path.append(folder)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"'{given}' cannot be loaded",
            at=_line_in(wanted, error),
            found=f"{type(error).__name__}: {error}",
            help="name a Python file, or a module that Python finds",
        ) from error
    loaded = getattr(module, "__file__", None)
    if wanted is not None and (loaded is None or Path(loaded).resolve() != wanted):
        raise PluginBroken(
            f"'{given}' cannot be loaded: another module is called '{name}'",
            expected=wanted,
            found=loaded,
            help="rename the file",
        )


def _line_in(file: Path | None, error: BaseException) -> str | None:
    """The last line of a file at which an error came, None where there is none."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{file.name}:{f.lineno}" for f in frames if file and f.filename == str(file)]
    return lines[-1] if lines else None


def plugin_passes() -> list[Plugin]:
    """The passes of other packages, broken ones too, by name."""
    return plugins_of(PASSES, load_pass)


def load_pass(entry: EntryPoint) -> Plugin:
    """Import what an entry point names; never raises."""
    plugin = load_plugin(entry)
    cls = plugin.found
    if cls is None:
        return plugin
    why = _why_no_pass(cls, entry)
    return Plugin(plugin.name, plugin.package, plugin.target, None if why else cls, why)


def _why_no_pass(cls: type, entry: EntryPoint) -> str:
    """What keeps a class from being the pass that an entry point promises, "" for nothing."""
    if not issubclass(cls, (JobPass, GroupPass)):
        return f"{entry.value} is no JobPass or GroupPass"
    if getattr(cls, "name", None) != entry.name:
        return f"the class calls itself '{getattr(cls, 'name', None)}'"
    if REGISTRY.get(entry.name, cls) is not cls:
        return "the name is another pass's already"
    if inspect.isabstract(cls) or not is_dataclass(cls) or _has_undeclared_fields(cls):
        return "it is no dataclass with a method run(graphs)"
    if cls.preserves_numerics not in get_args(Numerics):
        return f"preserves_numerics is {cls.preserves_numerics!r}, not exact, bound or no"
    if not all(isinstance(facts, frozenset) for facts in (cls.requires, cls.provides)):
        return "requires and provides must be frozensets of names"
    try:
        options_of(cls)
    except (NameError, TypeError, PipelineError) as error:
        return f"its options cannot be told: {type(error).__name__}: {error}"
    return ""
