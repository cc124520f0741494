"""`tlora-fx report`: a run as one HTML page, which needs no script and no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import typer

from tlora_fx.cli.arguments.options import RunFolderPath, option, takes_options
from tlora_fx.cli.terminal import write_file
from tlora_fx.config.hyperparameters import hyperparameters, learning_rate_of, rank_of
from tlora_fx.errors import TloraError
from tlora_fx.host.phases import TITLES
from tlora_fx.host.version import __version__
from tlora_fx.runtime.reports.run_view import JobView, read_run, read_start, thinned
from tlora_fx.scheduler.history import History, specs_of_run
from tlora_fx.scheduler.snapshot_file import load_snapshot
from tlora_fx.simulator.figures import Block, Series, bars, gantt, lines, shown

#: Points of a curve, answers of a job, and jobs whose lengths are drawn as bars, at most.
POINTS, SAMPLES, MAX_BARS = 400, 6, 8
#: The bound of the shortest bucket of lengths, in tokens.
SHORTEST = 8
NUMBERS = (
    "rank", "learning rate", "steps", "tokens", "samples", "last loss", "last eval loss",
    "best step", "tokens/s", "mean tokens/s", "rows replayed",
)  # fmt: skip


class Row(NamedTuple):
    """A job in the page's table.

    numbers   pairs of a title of `NUMBERS` and its text
    """

    name: str
    status: str
    reason: str
    numbers: tuple[tuple[str, str], ...]


class Drawn(NamedTuple):
    """A figure of the page."""

    name: str
    title: str
    shows: str
    svg: str


@takes_options
def run(
    folder: RunFolderPath,
    output: Path | None = option(
        None, "HTML file to write; FOLDER/report.html if not given.", "-o", "--output"
    ),
) -> None:
    """Write an HTML page of a run of `train` or `run`.

    It shows losses, evaluations, learning rates, tokens a second, sample lengths, which job ran
    when, and what the start took. The page is one file that needs no network. It can be written
    while the run goes on.
    """
    path = output or folder / "report.html"
    content = page(folder, read_run(folder), specs_of_run(folder))
    write_file(path, content, "the page", "choose another with -o")
    typer.echo(str(path))


def page(folder: Path, jobs: Sequence[JobView], specs: Mapping[str, Mapping[str, Any]]) -> str:
    """The page as text.

    specs   of jobs, by name
    """
    from jinja2 import Environment, StrictUndefined

    template = (files("tlora_fx.cli") / "assets" / "run.html.j2").read_text("utf-8")
    style = (files("tlora_fx.simulator") / "assets" / "report.css").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    rows = [_row(job, specs.get(job.name, {})) for job in jobs]
    known = [title for title in NUMBERS if any(dict(row.numbers)[title] for row in rows)]
    return environment.from_string(template).render(
        name=folder.resolve().name,
        style=style,
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        numbers=known,
        rows=[
            row._replace(numbers=tuple(each for each in row.numbers if each[0] in known))
            for row in rows
        ],
        hyperparameters=[
            (job.name, told) for job in jobs if (told := hyperparameters(specs.get(job.name, {})))
        ],
        figures=[figure for figure in figures(folder, jobs) if figure is not None],
        samples=list(_samples(jobs)),
        start=_start(folder),
    )


def _start(folder: Path) -> list[tuple[str, str]]:
    """What the newest start took, each with its seconds; nothing where the folder does not tell."""
    start = read_start(folder)
    if start is None:
        return []
    parts = {**start["phases"], "other": start.get("other", 0.0)}
    parts = {TITLES.get(name, name): seconds for name, seconds in parts.items()}
    parts["until the first step was done"] = start.get("seconds", 0.0)
    return [(name, f"{took:.1f}") for name, took in parts.items() if isinstance(took, (int, float))]


def _row(job: JobView, spec: Mapping[str, Any]) -> Row:
    losses, evaluated = [y for _, y in job.losses()], [y for _, y in job.evaluated()]
    best = job.status.get("evaluation", {}).get("best_step")
    pace, mean, replayed, lengths = job.pace(), job.mean_rate(), job.replayed(), job.lengths()
    rank, rate = rank_of(spec), learning_rate_of(spec)
    numbers = (
        "" if rank is None else str(rank),
        "" if rate is None else f"{rate:g}",
        f"{job.step} of {job.last_step or '?'}",
        f"{job.steps[-1]['tokens']:,}" if job.steps else "",
        f"{sum(lengths.values()):,}" if lengths else "",
        f"{losses[-1]:.4f}" if losses else "",
        f"{evaluated[-1]:.4f}" if evaluated else "",
        "" if best is None else str(best),
        shown(pace[1]) if pace else "",
        "" if mean is None else shown(mean),
        "" if replayed is None else f"{replayed:.0%}",
    )
    titled = tuple(zip(NUMBERS, numbers, strict=True))
    return Row(job.name, job.state, str(job.status.get("reason", "")), titled)


def _samples(jobs: Sequence[JobView]) -> Iterator[tuple[str, list[tuple[int, str, str]]]]:
    """Each job's newest answers: step, prompt and answer."""
    for job in jobs:
        answers = [
            (row["step"], each["prompt"], each["completion"])
            for row in job.samples
            for each in row["samples"]
        ]
        if answers:
            yield job.name, answers[-SAMPLES:]


def figures(folder: Path, jobs: Sequence[JobView]) -> list[Drawn | None]:
    """Figures of the page; None for each that has nothing to draw."""
    return [
        _curves("losses", "Training loss", "Loss of each step.", jobs, "loss"),
        _curves("evaluations", "Evaluation loss", "Mean over target tokens.", jobs, "eval_loss"),
        _curves("rates", "Learning rate", "The rate that each step used.", jobs, "learning_rate"),
        _curves("norms", "Gradient norm", "Before clipping.", jobs, "grad_norm"),
        _curves("seconds", "Seconds a round", "Jobs of a group step together.", jobs, "seconds"),
        _curves("speed", "Tokens a second", "Of each job.", jobs, "tokens_per_second"),
        _lengths(jobs),
        _groups(folder, jobs),
    ]


def _curves(name: str, title: str, shows: str, jobs: Sequence[JobView], field: str) -> Drawn | None:
    series: list[Series] = []
    most = 1
    for colour, job in enumerate(jobs):
        rows = job.evaluations if field.startswith("eval") else job.steps
        points = [(row["step"], row[field]) for row in rows if row.get(field) is not None]
        if points:
            at, values = zip(*thinned(points, POINTS), strict=True)
            series.append(Series(job.name, values, x=at, colour=colour))
            most = max(most, -(-len(points) // len(at)))
    if not series:
        return None
    few = all(len(line.x) <= 40 for line in series)
    # A loss says little by its distance from 0; the others do.
    zero = not field.endswith("loss")
    svg = lines(title, "step", "", series, marks=few, zero=zero, whole_x=True)
    if most > 1:
        shows += f" A point is the mean of up to {most:,} of them."
    return Drawn(name, title, shows, svg)


def _lengths(jobs: Sequence[JobView]) -> Drawn | None:
    counted = {job.name: job.lengths() for job in jobs}
    most = sorted({length for counts in counted.values() for length in counts})
    if not most:
        return None
    parts = [
        (name, [100 * counts.get(n, 0) / sum(counts.values()) for n in most], colour)
        for colour, (name, counts) in enumerate(counted.items())
        if counts
    ]
    title = "Tokens of a sample"
    if len(parts) <= MAX_BARS:
        shows = "How many percent of a job's samples have so many tokens."
        # A bucket has the lengths above half of its largest one.
        names = [f"{n // 2 + 1}–{n}" if n > SHORTEST else f"≤{n}" for n in most]
        series = [Series(name, values, colour=colour) for name, values, colour in parts]
        return Drawn("lengths", title, shows, bars(title, "percent", names, series, top=100))
    shows = "How many percent of a job's samples have at most so many tokens."
    x = [most[0] // 2, *most]
    series = [
        Series(name, [0.0, *accumulate(values)], x=x, colour=colour)
        for name, values, colour in parts
    ]
    return Drawn("lengths", title, shows, lines(title, "tokens", "percent", series, top=100))


def _groups(folder: Path, jobs: Sequence[JobView]) -> Drawn | None:
    """Who trained when: the groups of `run` on their GPUs, or the jobs of `train`."""
    colours = {job.name: colour for colour, job in enumerate(jobs)}
    history = History.of_run(folder)
    if history is not None:
        blocks, names = list(_formations(history)), list[str]()
        y_label = _unit(folder)
        title, shows = "Groups", f"Each rectangle is a group on its {y_label}s."
        rows = 1 + max((block.last for block in blocks), default=0)
    else:
        blocks = list(_trained(jobs))
        title, y_label, rows = "Training time", "", len(jobs)
        shows = "Sum of the rounds in which each job trained. Jobs of a round share it."
        names = list(colours)
    if not blocks:
        return None
    drawn = gantt(title, "seconds", y_label, rows, blocks, (), names=names)
    return Drawn("groups", title, shows, drawn)


def _unit(folder: Path) -> str:
    """What the groups of a run hold, by the last state of its scheduler: "GPU" or "CPU"."""
    try:
        return load_snapshot(folder / "state.json").state.cluster.unit
    except TloraError:
        return "GPU"


def _formations(history: History) -> Iterator[Block]:
    started = [record for record in history.epochs if record.started is not None]
    times = [record.ended or record.started or 0.0 for record in started]
    now = max([*times, *(record.time for record in history.decisions)], default=0.0)
    for record in started:
        text = f"group {record.epoch}: {', '.join(record.jobs)}"
        for gpu in record.place:
            end = now if record.ended is None else record.ended
            yield Block(gpu, gpu, record.started or 0.0, end, record.epoch, text)


def _trained(jobs: Sequence[JobView]) -> Iterator[Block]:
    for row, job in enumerate(jobs):
        took = sum(step["seconds"] for step in job.steps)
        if took:
            yield Block(row, row, 0.0, took, row, f"{job.name}: {job.step} steps")
