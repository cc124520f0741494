"""`tlora-fx inspect`: look into a compiled model. Needs torch for job files only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tlora_fx.cli.arguments.options import PipelineOptions, option, takes_options
from tlora_fx.cli.terminal import Console, Working
from tlora_fx.errors import InspectMisuse
from tlora_fx.inspect.diff import difference, difference_lines
from tlora_fx.inspect.marks import show_lines, width_of
from tlora_fx.inspect.program_text import WIDTH, find, match_lines, program_lines, source_lines
from tlora_fx.inspect.schema import Program, to_json, write_file
from tlora_fx.inspect.text import WIDTH as LISTING_WIDTH
from tlora_fx.inspect.text import listing_lines
from tlora_fx.inspect.wording import Line
from tlora_fx.tools.subject import Subject, subject_of


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions(PipelineOptions):
    """Options of the command line."""

    what: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL]", help="Folder that `compile` wrote, job file, or graph file."
        ),
    ] = None
    code: bool = option(False, "Show the code of the program, with the shape of each value.")
    node: str | None = option(
        None, "Show one module, or one node, by its name in the code.", metavar="NAME"
    )
    diff: tuple[str, str] | None = option(
        None,
        "Compare the graphs after two passes; without MODEL, two folders or job files.",
        metavar="A B",
    )
    after: str | None = option(
        None,
        "Show the graphs as this pass left them; `trace` for before the first pass.",
        metavar="PASS",
    )
    as_json: bool = option(False, "Print the data of the view as JSON.", "--json")
    html: Path | None = option(
        None, "Write an HTML page of the model with all its views to this file."
    )
    graphml: Path | None = option(None, "Write the graph to this file in GraphML format.")
    dot: Path | None = option(None, "Write the graph to this file in Graphviz (DOT) format.")

    @property
    def files(self) -> list[Path]:
        """Files that are to be written."""
        return [path for path in (self.html, self.graphml, self.dot) if path is not None]

    def subject(self, what: Path) -> Subject:
        """A model to look into, with the passes that were named."""
        named = self.pipeline is not None or self.add_pass
        passes = self.passes if named else None
        subject = subject_of(what, passes, trust_remote_code=self.trust_remote_code)
        if subject.compiles:
            with Working(Console(stderr=True), f"compiling {what}"):
                subject.all_stages()
        return subject


@takes_options
def run(options: InspectOptions) -> None:
    """Show a compiled model: what is shared, by which jobs, what it costs, where nodes come from.

    Without an option that names a view, prints a summary and the module tree, in which repeated
    layers appear once.
    """
    _require_one_view(options)
    if options.diff is not None:
        _diff(options, options.diff)
        return
    assert options.what is not None
    subject = options.subject(options.what)
    if options.files:
        _write(subject, options)
    elif options.node is not None:
        _node(_program(subject, options.after), options.node, options.as_json)
    elif options.code or options.after is not None or subject.bare:
        _code(subject, options.after, options.as_json)
    else:
        _listing(subject, options.as_json)


def _require_one_view(options: InspectOptions) -> None:
    names = ("code", "node", "diff", "html", "graphml", "dot")
    views = [f"--{name}" for name in names if getattr(options, name)]
    files = views[len(views) - len(options.files) :]
    what, mistake = options.what, ""
    if what is None and options.diff is None:
        mistake = "there is nothing to inspect"
    elif len(views) > 1 and len(files) < len(views):
        mistake = f"{' and '.join(views)} are two views"
    elif options.as_json and files:
        mistake = f"--json prints data, {files[0]} writes a file of its own"
    elif options.after is not None and {"--diff", "--html"} & set(views):
        mistake = "--after shows one state, and this view shows several"
    elif (
        (options.pipeline or options.add_pass)
        and what is not None
        and what.suffix not in (".yaml", ".yml")
    ):
        mistake = "passes run on a job file, and this is a compiled model"
    if mistake:
        raise InspectMisuse(
            mistake,
            found=" ".join(filter(None, (str(what or ""), *views))) or None,
            help="name a folder that `tlora-fx compile` wrote or a job file, and one view",
        )


def _program(subject: Subject, after: str | None) -> Program:
    return subject.program if after is None else subject.state(after)


def _listing(subject: Subject, as_json: bool) -> None:
    if as_json:
        typer.echo(subject.listing.to_json(), nl=False)
        return
    _print(listing_lines(subject.listing, _width(LISTING_WIDTH)))


def _code(subject: Subject, after: str | None, as_json: bool) -> None:
    program = _program(subject, after)
    if as_json:
        typer.echo(program.to_json(), nl=False)
    elif after is None and not subject.bare:
        _print(source_lines(subject.source, program))
    else:
        _print(program_lines(program))


def _node(program: Program, name: str, as_json: bool) -> None:
    matches = find(program, name)
    if as_json:
        typer.echo(to_json(matches), nl=False)
        return
    width = _width(WIDTH)
    for number, match in enumerate(matches):
        _print([[]] * bool(number) + match_lines(program, match, width))


def _diff(options: InspectOptions, names: tuple[str, str]) -> None:
    if options.what is None:
        first, second = (options.subject(Path(name)).compared for name in names)
    else:
        subject = options.subject(options.what)
        first, second = (subject.state(name) for name in names)
    diff = difference(first, second, names)
    if options.as_json:
        typer.echo(diff.to_json(), nl=False)
    else:
        _print(difference_lines(diff, _width(WIDTH)))


def _write(subject: Subject, options: InspectOptions) -> None:
    if options.html is not None:
        from tlora_fx.inspect.html import write_html

        write_html(subject.all_stages(), options.html, subject.name)
    if options.graphml is not None:
        from tlora_fx.inspect.networks import render_graphml

        write_file(options.graphml, render_graphml(_program(subject, options.after)), "the graph")
    if options.dot is not None:
        from tlora_fx.inspect.networks import render_dot

        write_file(options.dot, render_dot(_program(subject, options.after)), "the graph")
    for path in options.files:
        typer.echo(f"written   {path}")


def _print(lines: list[Line]) -> None:
    show_lines(lines, Console())


def _width(widest: int) -> int:
    return width_of(Console(), widest)
