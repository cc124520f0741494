"""The folded listing of a Shared Super-Model: `ssm.txt`, and the screen of `tlora-fx inspect`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tlora_fx.inspect.columns import Columns
from tlora_fx.inspect.legend import Legend, Line, Piece, wrapped
from tlora_fx.inspect.schema import BlockEntry, Listing, Row, Totals
from tlora_fx.inspect.wording import (
    SHORT_TYPES,
    counted,
    cut,
    layers_label,
    plural,
    scaled,
    without_root,
)

WIDTH = 160
TITLES = ("", "operator", "shape", "FLOP/token", "bytes", "role", "jobs")
NUMBERS = (3, 4)
# On a narrow screen role goes first, then operator, bytes, shape.
DISPENSABLE = (5, 1, 4, 2)
GAP = "   "
WHO_WIDTH = 30
MODULE_WIDTH = 44
# Jobs are named beside their glyphs as long as no row takes more lines than this; what a row is in
# detail is told where it has room.
NAMED_LINES = 1.8
FOOT = (
    "FLOP/token: forward, two a multiply-add and one an element of other arithmetic, branches at "
    "equal shares of the tokens; L: tokens of the sequence; once: for a whole row; ?: unknown; "
    "training: forward and backward, products of matrices and attention only; "
    "bytes: weights and adapters that are read"
)


@dataclass(frozen=True, slots=True)
class _Laid:
    """A row's cells, and whom it serves."""

    cells: tuple[str, ...]
    row: Row


def render_text(listing: Listing) -> str:
    """`ssm.txt`: lines of at most WIDTH columns."""
    lines = ("".join(text for text, _ in line).rstrip() for line in listing_lines(listing))
    return "\n".join(lines) + "\n"


def listing_lines(listing: Listing, width: int = WIDTH) -> list[Line]:
    """The whole listing as pieces of text, each with what it is, for colours.

    width   of every line; where it is small, columns are left out
    """
    legend = Legend(listing)
    laid = [(head, [_Laid(_cells(row, block, listing), row) for row in block.rows])
            for head, block in _headed(listing)]  # fmt: skip
    rows = [entry.row for _, entries in laid for entry in entries]
    every = [TITLES[:-1], *(entry.cells for _, entries in laid for entry in entries)]
    marks = max(_length(legend.who(row, names=False, details=False)) for row in rows)
    columns = Columns.fitting(every, width, min(marks, WHO_WIDTH), NUMBERS, DISPENSABLE)
    room = width - columns.end
    details = room >= WHO_WIDTH
    whom = (legend.who(row, names=True, details=details) for row in rows)
    names = all(_length(line) <= NAMED_LINES * room for line in whom)
    lines: list[Line] = [*_summary(listing, width), []]
    lines += [*legend.lines(width), [], [(columns.text(TITLES[:-1]) + TITLES[-1], "title")]]
    for head, entries in laid:
        lines += [[(cut(head, width), "title")]] if head else []
        for entry in entries:
            who = legend.who(entry.row, names, details)
            first, *rest = wrapped(who, columns.end, width)
            lines += [[(columns.text(entry.cells), ""), *first], *rest]
    return [*lines, [], *wrapped([(word, "dim") for word in FOOT.split()], 0, width)]


def _summary(listing: Listing, width: int) -> list[Line]:
    """The model and its cost in a few lines."""
    words: list[Line] = [[]]
    for part in headline(listing).split(GAP):
        if words[-1] and _length(words[-1]) + len(GAP) + len(part) > width:
            words.append([])
        words[-1].append((cut(GAP * bool(words[-1]) + part, width), "title"))
    return [*words, [(cut(cost_line(listing.totals), width), "")]]


def headline(listing: Listing) -> str:
    """The model in one line."""
    base, totals = listing.base, listing.totals
    own = counted(totals.adapter_parameters)
    parts = [
        f"SuperModel  {base.title}  {SHORT_TYPES.get(base.dtype, base.dtype)}",
        plural(len(listing.jobs), "job"),
        plural(totals.sites, "site"),
        f"{counted(totals.shared_parameters)} shared + {own} in adapters",
        "packed rows" if listing.form == "packed" else "padded rows",
    ]
    return GAP.join(parts)


def cost_line(totals: Totals) -> str:
    """What a token costs, in one line."""
    forward = flop_text(totals.flop_per_token, totals.flop_per_length)
    training = flop_text(totals.training_flop_per_token, totals.training_flop_per_length or 0.0)
    return f"FLOP/token  forward {forward}   training {training}"


def flop_text(token: float | None, length: float, row: float = 0.0) -> str:
    """A cost by how it grows: "37.5 k + 512·L + 3.00 M once", "–" for none, "?" for unknown."""
    if token is None:
        return "?"
    parts = [scaled(token)] if token else []
    parts += [f"{scaled(length)}·L"] if length else []
    parts += [f"{scaled(row)} once"] if row else []
    return " + ".join(parts) or "–"


def _headed(listing: Listing) -> list[tuple[str, BlockEntry]]:
    """Each block with its headline, "" for the root; runs of layers that read alike as one."""
    found: list[tuple[str, BlockEntry]] = []
    alike: list[BlockEntry] = []
    for block in listing.blocks:
        if alike and block.layers and _plain(block) == _plain(alike[-1]):
            alike.append(block)
            found[-1] = (_alike_label(alike), found[-1][1])
            continue
        alike = [block] if block.layers else []
        label = layers_label(block.layers) if block.layers else ""
        found.append((f"{label}   {block.why}".rstrip(), block))
    return found


def _plain(block: BlockEntry) -> list[Row]:
    """A block's rows without what a listing does not show."""
    return [replace(row, source="", nodes=0) for row in block.rows]


def _alike_label(blocks: list[BlockEntry]) -> str:
    every = sorted(
        (layer for block in blocks for layer in block.layers),
        key=lambda layer: int(layer.rpartition(".")[2]),
    )
    return f"{layers_label(every)}   alike in this listing, but not folded: see report.txt"


def _cells(row: Row, block: BlockEntry, listing: Listing) -> tuple[str, ...]:
    inside = bool(block.layers)
    name = row.module if inside else without_root(row.module, listing.base.layers)
    if not name:
        only_sums = row.operator.startswith("add")
        name = "residual" if inside and only_sums else "(layer)" if inside else f"({block.name})"
    return (
        ("  " if inside else "") + cut(name, MODULE_WIDTH),
        row.operator,
        _shape(row, listing),
        flop_text(row.flop_per_token, row.flop_per_length, row.flop_per_row),
        scaled(row.weight_bytes + row.adapter_bytes, "B") if _reads(row) else "–",
        _role(row),
    )


def _role(row: Row) -> str:
    """The roles of the nodes that a row stands for."""
    return f"{row.role}+adapter" if row.branches else row.role


def _reads(row: Row) -> bool:
    return bool(row.weight_bytes or row.adapter_bytes)


def _shape(row: Row, listing: Listing) -> str:
    if row.role == "loss":
        return f"[{plural(len(listing.jobs), 'job')}] {row.dtype}"
    packed = listing.form == "packed" and row.shape[:1] == [1]
    shape = ", ".join(map(str, row.shape[1:] if packed else row.shape))
    return f"[{shape}] {row.dtype}".rstrip()


def _length(line: list[Piece]) -> int:
    return sum(len(text) + 1 for text, _ in line) - 1
