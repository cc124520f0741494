"""Numbers, paths, lines and columns as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: A piece of text and what it is: "shared", "job 3", "dim", "title" or "".
Piece = tuple[str, str]
Line = list[Piece]

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
KINDS = {
    "dora": "DoRA",
    "embedding": "LoRA on an embedding",
    "lora-bias": "LoRA whose B has a bias",
    "saved": "a copy that the job trains",
    "bias": "a bias that the job trains",
    "lora, bias trained": "LoRA, and a bias that the job trains",
    "tokens": "single tokens that the job trains",
    "router": "LoRA on a router's weight",
    "parameter": "LoRA on a linear's weight",
    "ia3": "IA³",
    "loha": "LoHa",
    "lokr": "LoKr",
    "oft": "OFT",
    "vera": "VeRA",
}
SHORT_TYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
SIGNS = {"removed": "−", "added": "+", "changed": "~"}
MANY_VALUES = 3
MANY_RUNS = 6
# Lines of so many columns have wider gaps between the columns of a table.
WIDE = 120


def scaled(value: float, unit: str = "") -> str:
    """A number with a decimal prefix: "33.8 M", "8.2 kB"."""
    for size, prefix in PREFIXES:
        if value >= size * 0.9995:
            number = value / size
            return f"{number:.{2 if number < 9.995 else 1}f} {prefix}{unit}"
    plain = f"{value:.0f}" if value >= MANY_VALUES or value == int(value) else f"{value:.1f}"
    return f"{plain} {unit}".rstrip()


def signed(number: float, unit: str = "") -> str:
    """A difference; what is no more than rounding is none."""
    if abs(number) < 1e-3:
        return "0"
    return ("+" if number > 0 else "−") + scaled(abs(number), unit)


def number_row(name: str, before: int, after: int) -> tuple[str, ...]:
    """A row of `compared` with whole numbers."""
    more = f"{after - before:+,}".replace("-", "−") if after != before else "0"
    return (name, f"{before:,}", f"{after:,}", more)


def compared(rows: Sequence[Sequence[str]]) -> list[Line]:
    """A table of what was before, is after, and the difference; each row begins with a name."""
    table = [("", "before", "after", "difference"), *rows]
    sizes = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines: list[Line] = []
    for name, *cells in table:
        columns = [f"{cell:>{size}}" for cell, size in zip(cells, sizes[1:], strict=True)]
        text = "   ".join([f"{name:<{sizes[0]}}", *columns])
        lines.append([(text, "" if lines else "title")])
    return lines


def counted(value: float) -> str:
    """A number of parameters, where a billion is B: "8.03 B"."""
    return scaled(value).replace("G", "B")


def plural(number: int, noun: str) -> str:
    """A count with its noun: "1 job", "3 jobs", "2 branches", "12,000 tokens"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 'ss')) else 's'}"


def listed(values: Sequence[float]) -> str:
    """A few numbers, or the range of many: "8, 16", "2-128"."""
    if len(values) > MANY_VALUES:
        return f"{min(values):.3g}-{max(values):.3g}"
    return ", ".join(f"{value:.3g}" for value in values) or "–"


def cut(text: str, width: int) -> str:
    """A text that is at most this wide."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of whole numbers: 0, 1, 2, 5 are (0, 2), (5, 5)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def layers_label(layers: Sequence[str]) -> str:
    """Layer paths in short: "layers.0-31 ×32", "layers.{0,2,…,30} ×16"."""
    parent = layers[0].rpartition(".")[0].rpartition(".")[2]
    numbers = [int(layer.rpartition(".")[2]) for layer in layers]
    pieces = [str(a) if a == b else f"{a}-{b}" for a, b in spans(numbers)]
    if len(pieces) > MANY_RUNS:
        pieces = [*pieces[:2], "…", pieces[-1]]
    inside = pieces[0] if len(pieces) == 1 else "{" + ",".join(pieces) + "}"
    times = f" ×{len(layers)}" if len(layers) > 1 else ""
    return f"{parent}.{inside}{times}"


def flop_text(token: float | None, length: float, row: float = 0.0) -> str:
    """A cost by how it grows: "37.5 k + 512·L + 3.00 M once", "–" for none, "?" for unknown.

    token     FLOPs a token, None where unknown
    length    FLOPs per token and token of its sequence
    row       FLOPs once a row
    """
    if token is None:
        return "?"
    parts = [scaled(token)] if token else []
    parts += [f"{scaled(length)}·L"] if length else []
    parts += [f"{scaled(row)} once"] if row else []
    return " + ".join(parts) or "–"


def without_root(path: str, layers: Sequence[str]) -> str:
    """A path without the name of the module that holds the layers: "embed_tokens"."""
    root = layers[0].rpartition(".")[0].rpartition(".")[0] if layers else ""
    return path.removeprefix(f"{root}.") if root else path


def kind_text(kind: str, reason: str) -> str:
    """Reason why a branch runs as it is, in a few words: what it is, else what a pass said."""
    return KINDS.get(kind) or reason


def wrapped(line: Line, start: int, width: int) -> list[Line]:
    """Words laid into lines, separated by blanks; lines after the first begin at a column."""
    lines: list[Line] = [[]]
    used = start
    for text, style in line:
        if lines[-1] and used + 1 + len(text) > width:
            lines.append([(" " * start, "")])
            used = start
        if lines[-1] and used > start:
            lines[-1].append((" ", ""))
            used += 1
        lines[-1].append((cut(text, width - used), style))
        used += len(text)
    return lines


def labelled(label: Piece, line: Line, start: int, width: int) -> list[Line]:
    """Words laid into lines, the first of which begins with a label that ends at a column."""
    first, *rest = wrapped(line, start, width)
    return [[label, *first], *rest]


def words(text: str, style: str = "dim") -> Line:
    """A text as pieces that `wrapped` may part."""
    return [(word, style) for word in text.split()]


def plain_text(lines: Iterable[Line]) -> str:
    """Lines as text without styles, each ended."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


@dataclass(frozen=True, slots=True)
class Columns:
    """Shown columns of a table with their widths: index to width.

    numbers    indices of columns whose cells stand to the right
    """

    sizes: dict[int, int]
    numbers: tuple[int, ...]
    gap: int

    @classmethod
    def fitting(
        cls,
        rows: Sequence[Sequence[str]],
        width: int,
        rest: int,
        numbers: tuple[int, ...] = (),
        dispensable: Sequence[int] = (),
    ) -> Columns:
        """Columns that leave `rest` free behind them: those that matter least go first.

        dispensable   indices, those that matter least first
        """
        sizes = {index: max(len(row[index]) for row in rows) for index in range(len(rows[0]))}
        columns = cls(sizes, numbers, 3 if width >= WIDE else 2)
        for index in dispensable:
            if columns.end > width - rest:
                del sizes[index]
        return columns

    @property
    def end(self) -> int:
        """Offset behind the last column."""
        return sum(size + self.gap for size in self.sizes.values())

    def text(self, cells: Sequence[str]) -> str:
        """The shown cells of a row."""
        return "".join(
            (f"{cells[index]:>{size}}" if index in self.numbers else f"{cells[index]:<{size}}")
            + " " * self.gap
            for index, size in self.sizes.items()
        )
