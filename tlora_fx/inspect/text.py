"""The folded listing of a Shared Super-Model: `ssm.txt`, and the screen of `tlora-fx inspect`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tlora_fx.inspect.legend import Legend, Line, Piece, wrapped
from tlora_fx.inspect.schema import BlockEntry, Listing, Row
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
TITLES = ("", "operator", "shape", "FLOP/token", "bytes", "who")
NUMBERS = (3, 4)
# On a narrow screen shape goes first, then bytes, then operator.
DISPENSABLE = (2, 4, 1)
GAP = 3
WHO_WIDTH = 30
MODULE_WIDTH = 44
# Jobs are named beside their glyphs as long as no row takes more lines than this.
NAMED_LINES = 1.8
FOOT = (
    "FLOP/token: forward, branches at equal shares of the tokens; L: tokens of the sequence; "
    "once: for a whole row; bytes: weights and adapters that are read"
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
    columns = _Columns.fitting([entry.cells for _, rows in laid for entry in rows], width)
    whom = (legend.who(entry.row, names=True) for _, rows in laid for entry in rows)
    names = all(_length(line) <= NAMED_LINES * (width - columns.end) for line in whom)
    lines: list[Line] = [[(cut(headline(listing), width), "title")], []]
    lines += [*legend.lines(width), [], [(columns.text(TITLES[:-1]) + TITLES[-1], "title")]]
    for head, rows in laid:
        lines += [[(cut(head, width), "title")]] if head else []
        for entry in rows:
            first, *rest = wrapped(legend.who(entry.row, names), columns.end, width)
            lines += [[(columns.text(entry.cells), ""), *first], *rest]
    return [*lines, [], *wrapped([(word, "dim") for word in FOOT.split()], 0, width)]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Which columns are shown, and how wide: place to width."""

    sizes: dict[int, int]

    @classmethod
    def fitting(cls, rows: list[tuple[str, ...]], width: int) -> _Columns:
        """Columns that leave room for who; those that matter least go first."""
        every = [TITLES[:-1], *rows]
        sizes = {place: max(len(row[place]) for row in every) for place in range(len(TITLES) - 1)}
        for place in DISPENSABLE:
            if cls(sizes).end > width - WHO_WIDTH:
                del sizes[place]
        return cls(sizes)

    @property
    def end(self) -> int:
        """Where the last column, who, begins."""
        return sum(size + GAP for size in self.sizes.values())

    def text(self, cells: tuple[str, ...]) -> str:
        """The shown cells of a row, numbers to the right."""
        return "".join(
            (f"{cells[place]:>{size}}" if place in NUMBERS else f"{cells[place]:<{size}}")
            + " " * GAP
            for place, size in self.sizes.items()
        )


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
    return "   ".join(parts)


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
        _flop(row),
        scaled(row.weight_bytes + row.adapter_bytes, "B") if _reads(row) else "–",
    )


def _reads(row: Row) -> bool:
    return bool(row.weight_bytes or row.adapter_bytes)


def _shape(row: Row, listing: Listing) -> str:
    if row.role == "loss":
        return f"[{plural(len(listing.jobs), 'job')}]"
    packed = listing.form == "packed" and row.shape[:1] == [1]
    return "[" + ", ".join(map(str, row.shape[1:] if packed else row.shape)) + "]"


def _flop(row: Row) -> str:
    if row.flop_per_token is None:
        return "?"
    parts = [scaled(row.flop_per_token)] if row.flop_per_token else []
    parts += [f"{scaled(row.flop_per_length)}·L"] if row.flop_per_length else []
    parts += [f"{scaled(row.flop_per_row)} once"] if row.flop_per_row else []
    return " + ".join(parts) or "–"


def _length(line: list[Piece]) -> int:
    return sum(len(text) + 1 for text, _ in line) - 1
