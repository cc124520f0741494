"""A listing as text: `ssm.txt`, the screen of `tlora-fx inspect`, and `report.txt`.

The listing has a row a module, layers folded, and a legend that says which job has which mark. The
report says what the jobs share, what they do not, and why.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tlora_fx.inspect.marks import GLYPHS, SHARED, JobMark, job_marks
from tlora_fx.inspect.schema import (
    AttentionEntry,
    BlockEntry,
    BranchEntry,
    JobEntry,
    Listing,
    RowEntry,
    Totals,
)
from tlora_fx.inspect.wording import (
    KINDS,
    SHORT_TYPES,
    Columns,
    Line,
    Piece,
    counted,
    cut,
    flop_text,
    kind_text,
    labelled,
    layers_label,
    listed,
    plain_text,
    plural,
    scaled,
    without_root,
    words,
    wrapped,
)

WIDTH = 160
TITLES = ("", "operator", "shape", "FLOP/token", "bytes", "role", "jobs")
LEGEND_TITLES = ("", "", "rank", "scaling", "dropout", "sites", "parameters", "modules")
NUMBERS = (3, 4)
# On a narrow screen role goes first, then operator, bytes, shape.
DISPENSABLE = (5, 1, 4, 2)
GAP = "   "
JOBS_WIDTH = 30
MODULE_WIDTH = 44
NAME_WIDTH = 40
# Jobs are named beside their glyphs as long as no row takes more lines than this.
NAMED_LINES = 1.8
FOOT = (
    "FLOP/token: forward, two a multiply-add and one an element of other arithmetic, branches at "
    "equal shares of the tokens; L: tokens of the sequence; once: for a whole row; ?: unknown; "
    "training: forward and backward, products of matrices and attention only; "
    "bytes: weights and adapters that are read"
)
REPORT_WIDTH = 120
INDENT = "  "
MANY_JOBS = 6
# How fuse-backbone reports what a job replaces: a sentence a node, here joined to one a job.
_MISSING = re.compile(
    r"job '(?P<job>\S+)' does not use the base's (?P<module>\S+) \(\S+\): (?P<why>.+)"
)
# Notes that have a section of their own.
_SECTIONS = {"trace", "fold-layers", "fuse-backbone", "lower-adapters"}


def render_text(listing: Listing) -> str:
    """`ssm.txt`: lines of at most WIDTH columns."""
    return plain_text(listing_lines(listing))


def listing_lines(listing: Listing, width: int = WIDTH) -> list[Line]:
    """The whole listing as styled pieces; where the width is small, columns are left out."""
    legend = Legend(listing)
    blocks = [
        (head, [(_cells(row, block, listing), row) for row in block.rows])
        for head, block in _headed(listing)
    ]
    laid = [entry for _, entries in blocks for entry in entries]
    marks = max(_length(legend.who(row, names=False, details=False)) for _, row in laid)
    cells = [TITLES[:-1], *(cells for cells, _ in laid)]
    columns = Columns.fitting(cells, width, min(marks, JOBS_WIDTH), NUMBERS, DISPENSABLE)
    details = width - columns.end >= JOBS_WIDTH
    most = NAMED_LINES * (width - columns.end)
    names = all(_length(legend.who(row, names=True, details=details)) <= most for _, row in laid)
    lines: list[Line] = [*_summary(listing, width), []]
    lines += [*legend.lines(width), [], [(columns.text(TITLES[:-1]) + TITLES[-1], "title")]]
    for head, entries in blocks:
        lines += [[(cut(head, width), "title")]] if head else []
        for row_cells, row in entries:
            who = legend.who(row, names, details)
            lines += labelled((columns.text(row_cells), ""), who, columns.end, width)
    return [*lines, [], *wrapped(words(FOOT), 0, width)]


def _summary(listing: Listing, width: int) -> list[Line]:
    lines: list[Line] = [[]]
    for part in headline(listing).split(GAP):
        if lines[-1] and _length(lines[-1]) + len(GAP) + len(part) > width:
            lines.append([])
        lines[-1].append((cut(GAP * bool(lines[-1]) + part, width), "title"))
    return [*lines, [(cut(cost_line(listing.totals), width), "")]]


def headline(listing: Listing) -> str:
    """The model in one line."""
    base, totals = listing.base, listing.totals
    adapters = counted(totals.adapter_parameters)
    parts = [
        f"SuperModel  {base.title}  {SHORT_TYPES.get(base.dtype, base.dtype)}",
        plural(len(listing.jobs), "job"),
        plural(totals.sites, "site"),
        f"{counted(totals.shared_parameters)} shared + {adapters} in adapters",
        "packed rows" if listing.form == "packed" else "padded rows",
    ]
    return GAP.join(parts)


def cost_line(totals: Totals) -> str:
    """Cost of a token, in one line."""
    forward = flop_text(totals.flop_per_token, totals.flop_per_length)
    training = flop_text(totals.training_flop_per_token, totals.training_flop_per_length or 0.0)
    return f"FLOP/token  forward {forward}   training {training}"


def _headed(listing: Listing) -> list[tuple[str, BlockEntry]]:
    """Each block with its headline, "" for the root; runs of layers that read alike as one."""
    headed: list[tuple[str, BlockEntry]] = []
    alike: list[BlockEntry] = []
    for block in listing.blocks:
        if alike and block.layers and _shown_rows(block) == _shown_rows(alike[-1]):
            alike.append(block)
            layers = _label(layer for entry in alike for layer in entry.layers)
            label = f"{layers}   alike in this listing, but not folded: see report.txt"
            headed[-1] = (label, headed[-1][1])
            continue
        alike = [block] if block.layers else []
        label = layers_label(block.layers) if block.layers else ""
        headed.append((f"{label}   {block.why}".rstrip(), block))
    return headed


def _shown_rows(block: BlockEntry) -> list[RowEntry]:
    return [replace(row, source="", nodes=0) for row in block.rows]


def _cells(row: RowEntry, block: BlockEntry, listing: Listing) -> tuple[str, ...]:
    inside = bool(block.layers)
    name = row.module if inside else without_root(row.module, listing.base.layers)
    if not name:
        only_sums = row.operator.startswith("add")
        name = "residual" if inside and only_sums else "(layer)" if inside else f"({block.name})"
    read_bytes = row.weight_bytes + row.adapter_bytes
    return (
        ("  " if inside else "") + cut(name, MODULE_WIDTH),
        row.operator,
        _shape(row, listing),
        flop_text(row.flop_per_token, row.flop_per_length, row.flop_per_row),
        scaled(read_bytes, "B") if read_bytes else "–",
        f"{row.role}+adapter" if row.branches else row.role,
    )


def _shape(row: RowEntry, listing: Listing) -> str:
    if row.role == "loss":
        return f"[{plural(len(listing.jobs), 'job')}] {row.dtype}"
    packed = listing.form == "packed" and row.shape[:1] == [1]
    shape = ", ".join(map(str, row.shape[1:] if packed else row.shape))
    return f"[{shape}] {row.dtype}".rstrip()


def _length(line: list[Piece]) -> int:
    return sum(len(text) + 1 for text, _ in line) - 1


def _why(branch: BranchEntry) -> str | None:
    return None if branch.lowered else kind_text(branch.kind, branch.as_it_is or "")


class Legend:
    """Marks of a listing's jobs; those of one letter have the same branches at the same modules."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.lettered = len(listing.jobs) > len(GLYPHS)
        self.jobs = {job.name: job for job in listing.jobs}
        sites: dict[str, list[object]] = {name: [] for name in self.jobs}
        for number, block in enumerate(listing.blocks):
            for row in block.rows:
                for branch in row.branches:
                    sites[branch.job].append((number, row.module, _why(branch)))
        self.marks = job_marks(list(self.jobs), lambda name: tuple(sites[name]))
        self.mark_of = {name: mark for mark in self.marks for name in mark.jobs}

    def who(self, row: RowEntry, names: bool, details: bool = True) -> Line:
        """Whom a row serves, in words.

        names      jobs are named beside their glyphs
        details    with what the row is, how many jobs, and why branches run as they are
        """
        line: Line = [(SHARED, "shared")]
        reasons: dict[str | None, dict[str, JobMark]] = {}
        for branch in row.branches:
            mark = self.mark_of[branch.job]
            reasons.setdefault(_why(branch), {})[mark.mark] = mark
        for why in sorted(reasons, key=lambda reason: reason is not None):
            line += self._marked(reasons[why].values(), names, details)
            if why is not None:
                line += words(f"(as it is: {why})" if details else "(as it is)")
        return line + (words(row.detail) if details else [])

    def _marked(self, marks: Iterable[JobMark], names: bool, details: bool) -> Line:
        shown = list(marks)
        named = names and not self.lettered
        line = [(mark.mark + (mark.jobs[0] if named else ""), mark.style) for mark in shown]
        if not (self.lettered and details):
            return line
        jobs = [self.jobs[name] for mark in shown for name in mark.jobs]
        ranks = sorted({rank for job in jobs for rank in job.ranks})
        return line + words(f"({plural(len(jobs), 'job')}, rank {listed(ranks)})")

    def lines(self, width: int) -> list[Line]:
        """The legend as a table."""
        base = counted(self.listing.totals.shared_parameters)
        shared = (SHARED, "all jobs", "", "", "", "", base, "the frozen base")
        cells = [self._cells(mark) for mark in self.marks]
        sizes = [
            max(len(row[column]) for row in (LEGEND_TITLES, *([shared] if column else []), *cells))
            for column in range(len(LEGEND_TITLES) - 1)
        ]
        lines = [_table_line(LEGEND_TITLES, sizes, "title", width)]
        lines.append(_table_line(shared, sizes, "shared", width))
        for mark, row in zip(self.marks, cells, strict=True):
            lines.append(_table_line(row, sizes, mark.style, width))
            if self.lettered:
                names = ", ".join(cut(name, NAME_WIDTH) for name in mark.jobs)
                lines += labelled(("    ", ""), words(names), 4, width)
        return lines

    def _cells(self, mark: JobMark) -> tuple[str, ...]:
        jobs: list[JobEntry] = [self.jobs[name] for name in mark.jobs]
        return (
            mark.mark,
            plural(len(jobs), "job") if self.lettered else cut(jobs[0].name, NAME_WIDTH),
            listed(sorted({rank for job in jobs for rank in job.ranks})),
            listed(sorted({scaling for job in jobs for scaling in job.scalings})),
            listed(sorted({rate for job in jobs for rate in job.dropouts})),
            listed(sorted({job.sites for job in jobs})),
            counted(sum(job.parameters for job in jobs)),
            ", ".join(dict.fromkeys(target for job in jobs for target in job.targets)),
        )


def _table_line(cells: tuple[str, ...], sizes: list[int], style: str, width: int) -> Line:
    mark, name, *numbers, last = cells
    text = "".join(f"{cell:>{size + 3}}" for cell, size in zip(numbers, sizes[2:], strict=True))
    head = f"{mark:<{sizes[0]}} {name:<{sizes[1]}}"
    rest = cut(f"{text}   {last}", width - len(head))
    return [(head, style), (rest, "title" if style == "title" else "")]


def render_report(listing: Listing, kernels: Sequence[str] | None = None) -> str:
    """The report as text; every section is there, also where there is nothing to tell.

    kernels   which sites run which files, where there are files
    """
    sections = [
        ("Shared", _shared(listing)),
        ("Rows", _rows(listing)),
        ("Layers", _layers(listing)),
        ("Adapters in shared operators", _lowered(listing)),
        ("Branches that run as they are, on their job's tokens only", _as_they_are(listing)),
        ("Parts of the base that jobs replace", _replaced(listing)),
        ("Attention", _attention(listing)),
        ("Dropout", _dropouts(listing)),
        *([] if kernels is None else [("Kernels on a GPU, in kernels/", iter(kernels))]),
        ("Also", (f"{n.by}: {n.text}" for n in listing.notes if n.by not in _SECTIONS)),
    ]
    lines = [headline(listing)]
    for title, items in sections:
        lines += ["", title]
        for item in list(items) or ["none"]:
            lines += _item_lines(item)
    return "\n".join(lines) + "\n"


def _shared(listing: Listing) -> Iterator[str]:
    totals, jobs = listing.totals, len(listing.jobs)
    yield (
        f"the frozen base once instead of {plural(jobs, 'time')}: "
        f"{counted(totals.shared_parameters)} parameters, {scaled(totals.shared_bytes, 'B')}"
    )
    yield (
        f"{totals.shared_nodes} operators run once for all jobs, {totals.branch_nodes} for one "
        "job each, all layers counted"
    )
    yield (
        f"each job's own: {counted(totals.adapter_parameters)} parameters in "
        f"{plural(totals.adapters, 'adapter')} at {plural(totals.sites, 'site')}, "
        f"{scaled(totals.adapter_bytes, 'B')} as {listing.adapter_dtype}"
    )
    if totals.flop_per_token is None:
        yield "forward: unknown, an operator has no known cost (? in the listing)"
    else:
        more = f" + {scaled(totals.flop_per_length)}·L" if totals.flop_per_length else ""
        yield f"forward: {scaled(totals.flop_per_token)}{more} FLOP a token"


def _rows(listing: Listing) -> Iterator[str]:
    if listing.form == "packed":
        yield "packed: the tokens of all jobs lie in one line, without padding"
    else:
        yield "padded: each sequence has a line, filled up to the longest of the row"
    yield from _notes(listing, "trace")


def _layers(listing: Listing) -> Iterator[str]:
    inside = [block for block in listing.blocks if block.layers]
    for block in inside:
        code = f"class {block.name}" if block.folded else "written out in class Root"
        why = f"; {block.why}" if block.why else ""
        yield f"{_label(block.layers)}: {code}{why}"
    for note in _notes(listing, "fold-layers"):
        yield f"not folded further: {note}"


def _lowered(listing: Listing) -> Iterator[str]:
    layers_of: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for block in listing.blocks:
        for row in block.rows:
            jobs = tuple(branch.job for branch in row.branches if branch.lowered)
            if jobs:
                layers_of.setdefault((row.module, jobs), []).extend(block.layers)
    modules_of: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (module, jobs), layers in layers_of.items():
        modules_of.setdefault((_label(layers), jobs), []).append(module)
    for (label, jobs), modules in modules_of.items():
        yield f"{' '.join(filter(None, (label, ', '.join(modules))))}: {_named(jobs, listing)}"


def _as_they_are(listing: Listing) -> Iterator[str]:
    reasons: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for block in listing.blocks:
        for row in block.rows:
            for branch in row.branches:
                if not branch.lowered:
                    sites = reasons.setdefault((branch.kind, branch.as_it_is or ""), {})
                    sites.setdefault((branch.job, row.module), []).extend(block.layers)
    for (kind, reason), sites in reasons.items():
        yield f"{KINDS[kind]}: {reason}" if kind in KINDS else reason
        for name in dict.fromkeys(job for job, _ in sites):
            modules = (
                " ".join(filter(None, (_label(layers), module)))
                for (job, module), layers in sites.items()
                if job == name
            )
            yield f"{INDENT}{name}: {', '.join(modules)}"


def _replaced(listing: Listing) -> Iterator[str]:
    replaced: dict[tuple[str, str], list[str]] = {}
    for note in _notes(listing, "fuse-backbone"):
        match = _MISSING.fullmatch(note)
        if match is None:
            yield note
        else:
            replaced.setdefault((match["job"], match["why"]), []).append(match["module"])
    for (job, why), modules in replaced.items():
        yield f"job '{job}' does not use the base's {', '.join(dict.fromkeys(modules))}: {why}"


def _attention(listing: Listing) -> Iterator[str]:
    kinds: dict[str, list[str]] = {}
    for entry in listing.attention:
        kinds.setdefault(_attention_kind(entry), []).extend(entry.layers)
    for kind, layers in kinds.items():
        yield f"{_label(layers) or 'the root'}: packed_attention, {kind}"
    if listing.form == "batch":
        yield "as the base's own code computes it, on padded lines"


def _attention_kind(entry: AttentionEntry) -> str:
    parts = [
        "causal" if entry.causal else "both ways",
        f"{entry.heads} heads of {entry.head_dim} on {entry.key_value_heads} of keys and values",
        f"the last {entry.window} tokens" if entry.window >= 0 else "all tokens before",
    ]
    parts += [f"scores capped at {entry.softcap:g}"] if entry.softcap else []
    parts += ["attention sinks"] if entry.sinks else []
    parts += [f"dropout {entry.dropout:g} with each job's masks"] if entry.dropout else []
    return ", ".join(parts)


def _dropouts(listing: Listing) -> Iterator[str]:
    adapters = [job for job in listing.jobs if any(job.dropouts)]
    if adapters:
        rates = ", ".join(
            f"{job.name} {' and '.join(f'{rate:g}' for rate in job.dropouts if rate)}"
            for job in adapters
        )
        yield f"before A, keyed to job, step, site, token and column: {rates}"
    for entry in listing.dropouts:
        module = " ".join(filter(None, (_label(entry.layers), entry.module or "residual")))
        jobs = _named(entry.jobs, listing)
        yield f"{module}: {entry.rate:g}, masks keyed to the job, {jobs}"


def _notes(listing: Listing, by: str) -> list[str]:
    return [note.text for note in listing.notes if note.by == by]


def _label(layers: Iterable[str]) -> str:
    """Layers in short, in the order in which they run; nothing for the root."""
    ordered = sorted(set(layers), key=lambda layer: int(layer.rpartition(".")[2]))
    return layers_label(ordered) if ordered else ""


def _named(jobs: Iterable[str], listing: Listing) -> str:
    names = list(jobs)
    if len(names) == len(listing.jobs) > 1:
        return f"all {len(names)} jobs"
    return f"{len(names)} jobs: {', '.join(names)}" if len(names) > MANY_JOBS else ", ".join(names)


def _item_lines(item: str) -> list[str]:
    """An item as lines; what was several lines stays so, and all of them are indented."""
    lines: list[str] = []
    for index, line in enumerate(item.splitlines() or [""]):
        deeper = INDENT * (1 + (index > 0)) + line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line.strip(), REPORT_WIDTH, initial_indent=deeper, subsequent_indent=deeper + INDENT,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines
