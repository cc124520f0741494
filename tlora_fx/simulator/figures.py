"""Small figures as inline SVG, each with the numbers that it shows.

No script is needed; colours and text come from the page's style sheet (classes `s0`, `s1`, ... for
series), so that a figure reads in light and in dark. Error bars span the seeds.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

#: What is less stands at the start of a logarithmic axis.
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Axis:
    """Numbers onto a line of pixels.

    log      powers of ten; what is not above 0 stands at its start
    whole    only whole numbers are marked
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def at(self, value: float) -> float:
        """Coordinate of a number."""
        low, high, given = self.low, self.high, value
        if self.log:
            low, high, given = math.log10(low), math.log10(high), math.log10(max(value, low))
        part = (given - low) / (high - low) if high > low else 0.0
        return self.start + (self.end - self.start) * min(1.0, max(0.0, part))

    def ticks(self) -> list[float]:
        """Round numbers along the axis."""
        if self.log:
            least, most = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            every = max(1, (most - least) // 6)
            return [10.0**power for power in range(least, most + 1, every)]
        step = _step(self.high - self.low, whole=self.whole)
        first = math.ceil(self.low / step - 1e-9)
        return [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def labels(self) -> list[tuple[float, str]]:
        """Ticks and their texts: as short as `shown`, longer where two would read the same."""
        ticks = self.ticks()
        texts = [shown(tick) for tick in ticks]
        if len(set(texts)) < len(texts):
            step = ticks[1] - ticks[0]
            digits = max(0, -math.floor(math.log10(step) + 1e-9))
            texts = [f"{tick:,.{digits}f}" for tick in ticks]
        return list(zip(ticks, texts, strict=True))


def round_step(given: float) -> float:
    """The nearest of 1, 2, 5 times a power of ten that is not less."""
    if not given > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(given))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= given * 0.999)


def _step(span: float, *, whole: bool) -> float:
    """Distance of the ticks of an axis over a span."""
    step = round_step(span / 5)
    return max(1.0, step) if whole else step


def axis_of(
    values: Sequence[float],
    start: float,
    end: float,
    *,
    log: bool = False,
    zero: bool = True,
    whole: bool = False,
) -> Axis:
    """An axis that holds all values.

    zero    a linear axis begins there, else near the least value
    whole   values are whole numbers; a single one stands in the middle
    """
    there = [value for value in values if math.isfinite(value) and (value > TINY or not log)]
    if not there:
        return Axis(1.0 if log else 0.0, 10.0 if log else 1.0, start, end, log)
    if log:
        low = 10.0 ** math.floor(math.log10(min(there)))
        high = 10.0 ** math.ceil(math.log10(max(there)))
        return Axis(low, max(high, low * 10), start, end, log=True)
    least = 0.0 if zero else min(there)
    if whole and least == max(there):
        return Axis(least - 1.0, least + 1.0, start, end, whole=True)
    step = _step((max(there) - least) or 1.0, whole=whole)
    low = math.floor(least / step + 1e-9) * step
    high = max(math.ceil(max(there) / step - 1e-9) * step, low + step)
    return Axis(low, high, start, end, whole=whole)


def shown(value: float | None) -> str:
    """A number for people, in three digits."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) < 1e-9:
        return "0"
    if 0.01 <= abs(value) < 10_000:
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if 10_000 <= abs(value) < 1e12:
        for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if abs(value) >= size:
                return f"{value / size:.3g}{unit}"
    return re.sub(r"e([+-])0*", lambda part: f"e{part[1].strip('+')}", f"{value:.2g}")


def shortened(name: str, length: int) -> str:
    """A name in at most so many characters: its middle is left out, for names differ at the end."""
    if len(name) <= length:
        return name
    behind = (length - 1) // 2
    return f"{name[: length - 1 - behind]}…{name[len(name) - behind :]}"


WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 14, 58
#: Of the label of a row: pixels that it takes, and characters at most.
LABEL_HEIGHT, LABEL_LENGTH = 13, 24
#: Pixels that a character of a label takes, and of a legend.
LABEL_CHARACTER, LEGEND_CHARACTER = 7, 8
#: Rows at most for whose names a chart grows.
MAX_NAMED_ROWS = 80
#: So many has the style sheet; they are used in turn.
COLOURS = 9
Number = float | int | str | None


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one thing, such as a policy.

    values   y of each x, or of each group of bars; None where there is none
    colour   which of the style sheet's
    """

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    x: Sequence[float] = ()
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and its numbers.

    name      of its CSV file
    paper     caption of the figure that it redraws
    """

    name: str
    title: str
    shows: str
    svg: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Number, ...], ...]
    paper: str = ""

    def csv(self) -> str:
        """The table as CSV."""
        return csv_of(self.columns, self.rows)


def csv_of(columns: Sequence[str], rows: Iterable[Sequence[Number]]) -> str:
    """A table as CSV."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    log_x: bool = False,
    log_y: bool = False,
    top: float | None = None,
    zero: bool = True,
    marks: bool = True,
    whole_x: bool = False,
) -> str:
    """Lines over numbers, with error bars where the seeds differ.

    top     where the vertical axis ends; None: at the highest value
    zero    whether the vertical axis begins at 0; False: near the least value
    marks   whether each value is a dot
    whole_x whether x is a whole number, such as a step
    """
    all_x = [x for line in series for x in line.x]
    across = axis_of(all_x, LEFT, WIDTH - RIGHT, log=log_x, zero=False, whole=whole_x)
    up = _upright(series, top, log=log_y, zero=zero)
    body = [_frame(across, up, x_label, y_label)]
    for line in series:
        points = [
            (across.at(x), up.at(y))
            for x, y in zip(line.x, line.values, strict=True)
            if y is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline class="line s{line.colour % COLOURS}" points="{path}"/>')
        if marks:
            body += [
                f'<circle class="dot s{line.colour % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
                for x, y in points
            ]
        spread = zip(line.x, line.low, line.high, strict=True) if line.low and line.high else ()
        body += [_whisker(across.at(x), up, low, high) for x, low, high in spread]
    return _svg(title, series, body)


def bars(
    title: str,
    y_label: str,
    groups: Sequence[str],
    series: Sequence[Series],
    *,
    colours: Sequence[int] = (),
    top: float | None = None,
    log: bool = False,
) -> str:
    """Bars in groups, one of each series in each, with error bars over the seeds.

    On a logarithmic axis, where lengths mean nothing, they are marks.

    colours    of each group, where they rather than the series are told apart
    top        where the vertical axis ends; None: above the highest value
    log        powers of ten on the vertical axis, which then does not begin at 0
    """
    highest = max((v for row in series for v in (*row.values, *row.high) if v), default=1.0)
    up = _upright(series, top or highest * (1.5 if log else 1.06), log=log)
    group_width = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    wide = group_width * 0.8 / max(1, len(series))
    body = [_frame(None, up, "", f"{y_label}, log" if log else y_label)]
    for index, group in enumerate(groups):
        start = LEFT + group_width * (index + 0.1)
        middle = LEFT + group_width * (index + 0.5)
        body.append(_group_label(middle, group, group_width))
        for position, row in enumerate(series):
            value = row.values[index]
            if value is None:
                continue
            x, y = start + wide * position, up.at(value)
            shade = (colours[index] if colours else row.colour) % COLOURS
            middle = x + wide / 2 - 0.75
            told = f"<title>{escape(row.name)}, {escape(group)}: {shown(value)}</title>"
            if log:
                place = f'cx="{middle:.1f}" cy="{y:.1f}" r="5"'
                body.append(f'<circle class="dot s{shade}" {place}>{told}</circle>')
            else:
                place = f'x="{x:.1f}" y="{y:.1f}" width="{max(1.0, wide - 1.5):.1f}"'
                high = f'height="{up.start - y:.1f}"'
                body.append(f'<rect class="bar s{shade}" {place} {high}>{told}</rect>')
            end = value
            if row.low and row.high:
                body.append(_whisker(middle, up, row.low[index], row.high[index]))
                end = row.high[index] or value
            if len(series) * len(groups) <= 12:
                body.append(_text(middle, up.at(end) - (9 if log else 5), shown(value), "value"))
    return _svg(title, series if len(series) > 1 else (), body)


class Block(NamedTuple):
    """A rectangle of a Gantt chart: rows `first` to `last` from `begin` to `end`.

    text    what it stands for, shown where it is pointed at
    """

    first: int
    last: int
    begin: float
    end: float
    colour: int
    text: str


#: Rectangles of a Gantt chart at most, the widest first, and the narrowest one, in pixels.
MAX_BLOCKS, NARROWEST = 6000, 0.15


def gantt(
    title: str,
    x_label: str,
    y_label: str,
    rows: int,
    blocks: Sequence[Block],
    legend: Sequence[tuple[str, int]],
    *,
    names: Sequence[str] = (),
) -> str:
    """Chart of who holds which rows, over time.

    rows      how many there are, from 0 at the bottom; with names, from 0 at the top
    legend    names of colours
    names     of the rows; else their numbers from 0
    """
    left, base = _named_margins(names) if names else (LEFT, HEIGHT - BOTTOM)
    across = axis_of([t for block in blocks for t in block[2:4]], left, WIDTH - RIGHT, zero=False)
    ends = (TOP, base) if names else (base, TOP)
    up = Axis(0.0, float(max(rows, 1)), *ends)
    frame = _frame(across, None, x_label, y_label, left=left, base=base)
    body = [frame, *_row_labels(up, rows, names, left)]
    widest = sorted(blocks, key=lambda block: block.begin - block.end)[:MAX_BLOCKS]
    for block in widest:
        x, edges = across.at(block.begin), (up.at(block.first), up.at(block.last + 1))
        wide, y, high = across.at(block.end) - x, min(edges), abs(edges[0] - edges[1])
        if wide >= NARROWEST:
            body.append(
                f'<rect class="bar block s{block.colour % COLOURS}" x="{x:.2f}" y="{y:.2f}" '
                f'width="{wide:.2f}" height="{high:.2f}"><title>{escape(block.text)}</title></rect>'
            )
    colours = [Series(name, (), colour=colour) for name, colour in legend]
    return _svg(title, colours, body, height=base + BOTTOM)


def _named_margins(names: Sequence[str]) -> tuple[int, int]:
    """Where the chart of rows with names begins on the left, and where it ends below."""
    length = min(max(len(name) for name in names), LABEL_LENGTH)
    height = LABEL_HEIGHT * min(len(names), MAX_NAMED_ROWS)
    return max(LEFT, 14 + LABEL_CHARACTER * length), max(HEIGHT - BOTTOM, TOP + height)


def rows_labelled(rows: int, height: float) -> range:
    """Rows of a chart of a height in pixels that have a label: no two labels overlap."""
    return range(0, rows, max(1, round(round_step(rows * LABEL_HEIGHT / height))))


def _row_labels(up: Axis, rows: int, names: Sequence[str], left: int) -> Iterator[str]:
    for row in rows_labelled(rows, abs(up.start - up.end)):
        name = names[row] if names else str(row)
        yield _named(left - 6, up.at(row + 0.5) + 4, name, "end", LABEL_LENGTH)


def _upright(
    series: Sequence[Series], top: float | None, *, log: bool = False, zero: bool = True
) -> Axis:
    values = [
        value
        for line in series
        for row in (line.values, line.high)
        for value in row
        if value is not None
    ]
    values += [top] if top else []
    return axis_of(values, HEIGHT - BOTTOM, TOP, log=log, zero=zero)


def _whisker(x: float, up: Axis, low: float | None, high: float | None) -> str:
    if low is None or high is None or high <= low:
        return ""
    a, b = up.at(low), up.at(high)
    ends = f"M{x - 3:.1f} {a:.1f}h6M{x - 3:.1f} {b:.1f}h6"
    return f'<path class="whisker" d="M{x:.1f} {a:.1f}V{b:.1f}{ends}"/>'


def _frame(
    across: Axis | None,
    up: Axis | None,
    x_label: str,
    y_label: str,
    *,
    left: int = LEFT,
    base: int = HEIGHT - BOTTOM,
) -> str:
    parts = []
    for tick, text in up.labels() if up else ():
        assert up is not None
        y = up.at(tick)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(left - 6, y + 4, text, "end"))
    if across is not None:
        for tick, text in across.labels():
            x = across.at(tick)
            parts.append(f'<path class="tick" d="M{x:.1f} {base}v4"/>')
            parts.append(_text(x, base + 17, text, "middle"))
        parts.append(_text((left + WIDTH - RIGHT) / 2, base + 36, x_label, "middle"))
    parts.append(f'<path class="axis" d="M{left} {TOP}V{base}H{WIDTH - RIGHT}"/>')
    middle = (TOP + base) / 2
    parts.append(
        f'<text class="middle" transform="translate(14 {middle:.0f}) rotate(-90)">'
        f"{escape(y_label)}</text>"
    )
    return "".join(parts)


def _group_label(x: float, text: str, width: float) -> str:
    base = HEIGHT - BOTTOM + 17
    # A name that is too long goes on below, behind a mark or a space.
    lines = [""]
    for part in re.split(r"(?<=[-:= ])", text):
        if lines[-1] and len(lines[-1] + part.rstrip()) * 6.5 > width:
            lines.append("")
        lines[-1] += part
    return "".join(
        _text(x, base + 14 * row, line.strip(), "middle") for row, line in enumerate(lines)
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _named(x: float, y: float, name: str, kind: str, length: int) -> str:
    """A name, shortened where it is too long; the whole is shown where it is pointed at."""
    short = shortened(name, length)
    whole = "" if short == name else f"<title>{escape(name)}</title>"
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(short)}{whole}</text>'


def _svg(title: str, series: Sequence[Series], body: Sequence[str], height: int = HEIGHT) -> str:
    legend, more = _legend(series, height)
    names = "; ".join(line.name for line in series)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height + more}" role="img" '
        f'aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title><desc>{escape(names)}</desc>{''.join(body)}{legend}</svg>"
    )


def _legend(series: Sequence[Series], top: int) -> tuple[str, int]:
    """The names of the series below the figure, and the height that they take."""
    longest = (WIDTH - RIGHT - LEFT - 26) // LEGEND_CHARACTER
    parts, x, y = [], float(LEFT), top - 2
    for line in series:
        wide = 26 + LEGEND_CHARACTER * min(len(line.name), longest)
        if x + wide > WIDTH - RIGHT and x > LEFT:
            x, y = float(LEFT), y + 18
        size = f'x="{x:.1f}" y="{y - 9}" width="12" height="10"'
        parts.append(f'<rect class="bar s{line.colour % COLOURS}" {size}/>')
        parts.append(_named(x + 17, y, line.name, "start", longest))
        x += wide
    return "".join(parts), (y - top + 10 if series else 0)
