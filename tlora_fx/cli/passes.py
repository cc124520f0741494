"""`tlora-fx passes`: what passes there are, with their options."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tlora_fx.cli.arguments.options import option, takes_options

if TYPE_CHECKING:
    from tlora_fx.pipeline import Pass, Plugin

WIDTH = 100


@takes_options
def run(
    action: Annotated[
        str,
        typer.Argument(help="What to do: list (all passes), or show (one pass; give its NAME)."),
    ] = "list",
    name: Annotated[str | None, typer.Argument(help="Name of the pass to show.")] = None,
    pipeline: bool = option(
        False, "Print only the default pipeline, as --pipeline of other commands takes it."
    ),
) -> None:
    """List all compiler passes, in the order in which the default pipeline runs them, or show one.

    A pass from another package is listed with the name of the package. If it cannot be imported, it
    is listed as broken, with the reason.
    """
    if action not in ("list", "show") or (action == "show") != (name is not None):
        raise typer.BadParameter("write `tlora-fx passes`, or `tlora-fx passes show NAME`")
    from tlora_fx.compiler import resolve_pipeline
    from tlora_fx.pipeline import find_pass

    default = resolve_pipeline()
    if pipeline:
        typer.echo(str(default))
        return
    if name is not None:
        for line in page(find_pass(name)):
            typer.echo(line)
        return
    for line in overview([item.name for item in default.passes]):
        typer.echo(line)


def overview(default: list[str]) -> Iterator[str]:
    """All passes: ours in the order of the default pipeline, other packages' after them."""
    from tlora_fx.config.other_kinds import plugin_kinds
    from tlora_fx.ops.job_operator import plugin_operators
    from tlora_fx.pipeline import REGISTRY, plugin_passes
    from tlora_fx.planners.protocol import plugin_planners
    from tlora_fx.scheduler.policies import plugin_policies

    yield "default pipeline"
    for name in default:
        yield from _entry(REGISTRY[name])
    plugins = plugin_passes()
    theirs = {plugin.found for plugin in plugins}
    others = sorted(n for n, cls in REGISTRY.items() if n not in default and cls not in theirs)
    if others:
        yield "\nnot in the default pipeline"
    for name in others:
        yield from _entry(REGISTRY[name])
    if plugins:
        yield "\nfrom other packages"
    for plugin in plugins:
        if plugin.found is None:
            yield f"  {plugin.name:<22} BROKEN ({plugin.package or plugin.target})"
            yield f"  {'':<22} {plugin.broken}"
        else:
            yield from _entry(plugin.found, plugin.package)
    yield from _others("planners", plugin_planners())
    yield from _others("policies", plugin_policies())
    yield from _others("adapters", plugin_kinds())
    yield from _others("operators", plugin_operators())
    yield "\nThe default as text: tlora-fx passes --pipeline. One pass: tlora-fx passes show NAME."


def _others(title: str, plugins: list[Plugin]) -> Iterator[str]:
    """What other packages offer beside passes."""
    if plugins:
        yield f"\n{title} from other packages"
    for plugin in plugins:
        told = _first_line(plugin.found) if plugin.found else f"BROKEN: {plugin.broken}"
        yield from _filled(f"  {plugin.name:<22} ", f"{told}  ({plugin.package or plugin.target})")


def _entry(cls: type[Pass], package: str = "") -> Iterator[str]:
    from tlora_fx.pipeline import options_of

    origin = f"  ({package})" if package else ""
    yield from _filled(f"  {cls.name:<22} ", f"{_first_line(cls)}{origin}")
    for each in options_of(cls):
        given = f"={each.default}" if each.default else " (must be given)"
        yield from _filled(f"  {'':<22} {each.name}{given}  ", each.help)


def page(cls: type[Pass]) -> Iterator[str]:
    """Everything about one pass."""
    from tlora_fx.pipeline import GroupPass, options_of

    yield f"{cls.name}: {_first_line(cls)}"
    yield ""
    module = inspect.getmodule(cls)
    lines = (inspect.getdoc(module) or "").splitlines() if module else []
    yield from lines[1:] if lines and not lines[0].strip() else lines
    yield ""
    facts = {
        "works on": "the group" if issubclass(cls, GroupPass) else "each job's graph",
        "requires": ", ".join(sorted(cls.requires)) or "nothing",
        "provides": ", ".join(sorted({cls.name, *cls.provides})),
        "preserves": ", ".join(sorted(cls.preserves)) or "what its changes do not touch",
        "counts": ", ".join(cls.statistics.values()) or "rewrites",
        "numerics": NUMERICS[cls.preserves_numerics],
        "class": f"{cls.__module__}.{cls.__qualname__}",
    }
    yield from (f"{title:<10}{text}" for title, text in facts.items())
    options = options_of(cls)
    if not options:
        yield f"{'options':<10}none"
        return
    yield "options"
    for each in options:
        default = f"default {each.default}" if each.default else "must be given"
        yield f"  {each.name:<14}{each.kind}, {default}"
        if each.help:
            yield from _filled(f"  {'':<14}", each.help)


NUMERICS = {
    "exact": "exact: losses and gradients keep their bits",
    "bound": "bound: losses and gradients change by rounding only",
    "no": "no: it computes other numbers",
}


def _filled(head: str, text: str) -> list[str]:
    """A line, gone on with below its own beginning where it is too long."""
    later = " " * len(head)
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=later) or [head]


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
