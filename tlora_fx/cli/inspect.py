"""`tlora-fx inspect`: look into a compiled model. Needs torch for job files only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora_fx.cli.pipeline_options import AddPass, PipelineText

if TYPE_CHECKING:
    from tlora_fx.inspect.schema import Program
    from tlora_fx.inspect.wording import Line
    from tlora_fx.tools.subject import Subject


def run(
    what: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", help="A folder that `compile` wrote, or a job file."),
    ] = None,
    code: Annotated[bool, typer.Option("--code", help="The program, shapes inline.")] = False,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="NAME", help="A module, or a node as the code names it."),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--diff", metavar="A B", help="Two passes; without a model, two folders or job files."
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="PASS", help="As this pass left it; `trace` for none."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The view's data.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write one page of it all.")] = None,
    graphml: Annotated[Path | None, typer.Option("--graphml", help="Write as GraphML.")] = None,
    dot: Annotated[Path | None, typer.Option("--dot", help="Write for Graphviz.")] = None,
    pipeline: PipelineText = None,
    add_pass: AddPass = None,
) -> None:
    """Show a compiled model: what is shared, by whom, what it costs, and where nodes come from.

    Without a view: a summary and the module tree, with repeated layers folded.
    """
    views = {"--code": code, "--node": node, "--diff": diff}
    files = {"--html": html, "--graphml": graphml, "--dot": dot}
    asked = [name for name, value in (views | files).items() if value]
    _check(what, asked, after=after, as_json=as_json, changed=bool(pipeline or add_pass))
    if diff is not None:
        _diff(what, diff, as_json, pipeline, add_pass)
        return
    assert what is not None
    subject = _subject(what, pipeline, add_pass)
    if any(files.values()):
        _write(subject, after, html, graphml, dot)
    elif node is not None:
        _node(_program(subject, after), node, as_json)
    elif code or after is not None:
        _code(subject, after, as_json)
    else:
        _listing(subject, as_json)


def _check(
    what: Path | None, asked: list[str], *, after: str | None, as_json: bool, changed: bool
) -> None:
    from tlora_fx.errors import InspectMisuse

    files = [name for name in asked if name in ("--html", "--graphml", "--dot")]
    mistake = ""
    if what is None and "--diff" not in asked:
        mistake = "there is nothing to inspect"
    elif len(asked) > 1 and len(files) < len(asked):
        mistake = f"{' and '.join(asked)} are two views"
    elif as_json and files:
        mistake = f"--json prints data, {files[0]} writes a file of its own"
    elif after is not None and {"--diff", "--html"} & set(asked):
        mistake = "--after shows one state, and this view shows several"
    elif changed and what is not None and what.suffix not in (".yaml", ".yml"):
        mistake = "passes run on a job file, and this is a compiled model"
    if mistake:
        raise InspectMisuse(
            mistake,
            found=" ".join(filter(None, (str(what or ""), *asked))) or None,
            help="name a folder that `tlora-fx compile` wrote or a job file, and one view",
        )


def _subject(what: Path, pipeline: str | None, add_pass: list[str] | None) -> Subject:
    from tlora_fx.cli.pipeline_options import asked
    from tlora_fx.tools.subject import subject_of

    if pipeline is None and not add_pass:
        return subject_of(what)
    return subject_of(what, lambda: asked(pipeline, add_pass))


def _program(subject: Subject, after: str | None) -> Program:
    return subject.program if after is None else subject.state(after)


def _listing(subject: Subject, as_json: bool) -> None:
    if as_json:
        typer.echo(subject.listing.to_json(), nl=False)
        return
    from tlora_fx.inspect.text import WIDTH, listing_lines

    _print(listing_lines(subject.listing, _width(WIDTH)))


def _code(subject: Subject, after: str | None, as_json: bool) -> None:
    from tlora_fx.inspect.program_text import program_lines, source_lines

    program = _program(subject, after)
    if as_json:
        typer.echo(program.to_json(), nl=False)
    elif after is None:
        _print(source_lines(subject.source, program))
    else:
        _print(program_lines(program))


def _node(program: Program, name: str, as_json: bool) -> None:
    from tlora_fx.inspect.program_text import WIDTH, find, match_lines
    from tlora_fx.inspect.schema import to_json

    matches = find(program, name)
    if as_json:
        typer.echo(to_json(matches), nl=False)
        return
    width = _width(WIDTH)
    for number, match in enumerate(matches):
        _print([[]] * bool(number) + match_lines(program, match, width))


def _diff(
    what: Path | None,
    names: tuple[str, str],
    as_json: bool,
    pipeline: str | None,
    add_pass: list[str] | None,
) -> None:
    from tlora_fx.inspect.diff import WIDTH, difference, difference_lines

    if what is None:
        first, second = (_subject(Path(name), pipeline, add_pass).program for name in names)
    else:
        subject = _subject(what, pipeline, add_pass)
        first, second = (subject.state(name) for name in names)
    diff = difference(first, second, names)
    if as_json:
        typer.echo(diff.to_json(), nl=False)
    else:
        _print(difference_lines(diff, _width(WIDTH)))


def _write(
    subject: Subject, after: str | None, html: Path | None, graphml: Path | None, dot: Path | None
) -> None:
    """Write the files that were asked for."""
    from tlora_fx.inspect.schema import write_file

    if html is not None:
        from tlora_fx.inspect.html import write_html

        write_html(subject.all_stages(), html, subject.name)
    if graphml is not None:
        from tlora_fx.inspect.networks import render_graphml

        write_file(graphml, render_graphml(_program(subject, after)), "the graph")
    if dot is not None:
        from tlora_fx.inspect.networks import render_dot

        write_file(dot, render_dot(_program(subject, after)), "the graph")
    for path in filter(None, (html, graphml, dot)):
        typer.echo(f"written   {path}")


def _print(lines: list[Line]) -> None:
    from rich.console import Console

    from tlora_fx.inspect.marks import show_lines

    show_lines(lines, Console())


def _width(widest: int) -> int:
    from rich.console import Console

    from tlora_fx.inspect.marks import width_of

    return width_of(Console(), widest)
