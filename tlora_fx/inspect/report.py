"""`report.txt`: what the jobs share, what they do not, and why."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from tlora_fx.inspect.schema import Attention, Listing
from tlora_fx.inspect.text import headline
from tlora_fx.inspect.wording import KINDS, counted, layers_label, plural, scaled

WIDTH = 120
INDENT = "  "
MANY_JOBS = 6
# How fuse-backbone tells what a job replaces: a sentence a node, here told as one a job.
_MISSING = re.compile(
    r"job '(?P<job>\S+)' does not use the base's (?P<module>\S+) \(\S+\): (?P<why>.+)"
)


def render_report(listing: Listing) -> str:
    """The report as text; every section is there, also where there is nothing to tell."""
    sections = [
        ("Shared", _shared(listing)),
        ("Rows", _rows(listing)),
        ("Layers", _layers(listing)),
        ("Adapters in shared operators", _lowered(listing)),
        ("Branches that run as they are, on their job's tokens only", _as_they_are(listing)),
        ("Parts of the base that jobs replace", _replaced(listing)),
        ("Attention", _attention(listing)),
        ("Dropout", _dropouts(listing)),
        ("Also", _other_notes(listing)),
    ]
    lines = [headline(listing)]
    for title, told in sections:
        lines += ["", title]
        for item in list(told) or ["none"]:
            lines += _wrapped(item)
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
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for block in listing.blocks:
        for row in block.rows:
            jobs = tuple(branch.job for branch in row.branches if branch.lowered)
            if jobs:
                found.setdefault((row.module, jobs), []).extend(block.layers)
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (module, jobs), layers in found.items():
        together.setdefault((_label(layers), jobs), []).append(module)
    for (label, jobs), modules in together.items():
        yield f"{' '.join(filter(None, (label, ', '.join(modules))))}: {_named(jobs, listing)}"


def _as_they_are(listing: Listing) -> Iterator[str]:
    found: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for block in listing.blocks:
        for row in block.rows:
            for branch in row.branches:
                if not branch.lowered:
                    jobs = found.setdefault((branch.kind, branch.as_it_is or ""), {})
                    jobs.setdefault((branch.job, row.module), []).extend(block.layers)
    for (kind, reason), places in found.items():
        told = KINDS.get(kind, "")
        yield f"{told}: {reason}" if told else reason
        for name in dict.fromkeys(job for job, _ in places):
            where = (
                " ".join(filter(None, (_label(layers), module)))
                for (job, module), layers in places.items()
                if job == name
            )
            yield f"{INDENT}{name}: {', '.join(where)}"


def _replaced(listing: Listing) -> Iterator[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for note in _notes(listing, "fuse-backbone"):
        known = _MISSING.fullmatch(note)
        if known is None:
            yield note
        else:
            found.setdefault((known["job"], known["why"]), []).append(known["module"])
    for (job, why), modules in found.items():
        yield f"job '{job}' does not use the base's {', '.join(dict.fromkeys(modules))}: {why}"


def _attention(listing: Listing) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for entry in listing.attention:
        found.setdefault(_attention_kind(entry), []).extend(entry.layers)
    for kind, layers in found.items():
        yield f"{_label(layers) or 'the root'}: packed_attention, {kind}"
    if listing.form == "batch":
        yield "as the base's own code computes it, on padded lines"


def _attention_kind(found: Attention) -> str:
    parts = [
        "causal" if found.causal else "both ways",
        f"{found.heads} heads of {found.head_dim} on {found.key_value_heads} of keys and values",
        f"the last {found.window} tokens" if found.window >= 0 else "all tokens before",
    ]
    parts += [f"scores capped at {found.softcap:g}"] if found.softcap else []
    parts += ["attention sinks"] if found.sinks else []
    parts += [f"dropout {found.dropout:g} with each job's masks"] if found.dropout else []
    return ", ".join(parts)


def _dropouts(listing: Listing) -> Iterator[str]:
    adapters = [job for job in listing.jobs if any(job.dropouts)]
    if adapters:
        rates = ", ".join(
            f"{job.name} {' and '.join(f'{rate:g}' for rate in job.dropouts if rate)}"
            for job in adapters
        )
        yield f"before A, keyed to job, step, site, token and column: {rates}"
    for found in listing.dropouts:
        where = f"{_label(found.layers)} " if found.layers else ""
        whom = _named(found.jobs, listing)
        yield f"{where}{found.module or 'residual'}: {found.rate:g}, masks keyed to the job, {whom}"


def _notes(listing: Listing, by: str) -> list[str]:
    return [note.text for note in listing.notes if note.by == by]


def _other_notes(listing: Listing) -> Iterator[str]:
    told = {"trace", "fold-layers", "fuse-backbone", "lower-adapters"}
    for note in listing.notes:
        if note.by not in told:
            yield f"{note.by}: {note.text}"


def _label(layers: Sequence[str]) -> str:
    """Layers in short, in the order in which they run; nothing for the root."""
    if not layers:
        return ""
    return layers_label(sorted(set(layers), key=lambda layer: int(layer.rpartition(".")[2])))


def _named(jobs: Iterable[str], listing: Listing) -> str:
    names = list(jobs)
    if len(names) == len(listing.jobs) > 1:
        return f"all {len(names)} jobs"
    if len(names) > MANY_JOBS:
        return f"{len(names)} jobs: {', '.join(names)}"
    return ", ".join(names)


def _wrapped(item: str) -> list[str]:
    """An item as lines; what was several lines stays so, and all of them are indented."""
    lines: list[str] = []
    for place, line in enumerate(item.splitlines() or [""]):
        deeper = INDENT * (1 + (place > 0)) + line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line.strip(), WIDTH, initial_indent=deeper, subsequent_indent=deeper + INDENT,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines
