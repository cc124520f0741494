"""Draw `docs/assets/site.svg` from a result of `benchmarks/site.py`.

python -m benchmarks.site_chart benchmarks/results/site-2026-11-22.json docs/assets/site.svg
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

#: Rows of the chart, by the names of `site.py`.
ROWS = {
    "layer-8": "seven linears of a layer, 8 jobs",
    "square-4": "4096→4096, 4 jobs, r 16",
    "square-32": "4096→4096, 32 jobs, r 2 to 16",
    "low-64": "4096→4096, 64 jobs, r 2 to 16",
    "small-8": "4096→4096, 8 jobs, 1,024 tokens",
    "high-4": "4096→4096, 4 jobs, r 16 to 128",
}
#: Arms of the chart and their colours.
ARMS = {
    "ours": ("tlora-fx", "#1f6feb"),
    "expand-first": ("stacked, beta = 1", "#8c959f"),
    "stacked": ("stacked, addmm", "#afb8c1"),
    "grouped-mm": ("torch._grouped_mm", "#c9a26b"),
    "loop": ("one adapter at a time", "#d1242f"),
}
LEFT, TOP, SCALE, BAR, GAP = 260, 72, 210, 13, 16
LEAST, MOST = 1.0, 3.0
WIDTH = LEFT + int(SCALE * (MOST - LEAST)) + 60


def text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    """One line of text."""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(words)}</text>"
    )


def bar(y: int, ratio: float, colour: str) -> list[str]:
    """A bar from 1 to a ratio, cut off at `MOST`, with its number."""
    width = SCALE * (min(ratio, MOST) - LEAST)
    more = " →" if ratio > MOST else ""
    return [
        f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>',
        text(LEFT + width + 5, y + BAR - 3, f"{ratio:.2f}{more}"),
    ]


def legend() -> list[str]:
    """The names of the arms, in one line."""
    parts, x = [], 16
    for name, colour in ARMS.values():
        parts.append(f'<rect x="{x}" y="40" width="11" height="11" fill="{colour}"/>')
        parts.append(text(x + 16, 50, name))
        x += 34 + 7 * len(name)
    return parts


def chart(result: dict[str, Any]) -> str:
    """The chart of a result, as SVG."""
    rows = {row["name"]: row["arms"] for row in result["rows"]}
    gpu = result["hardware"]["gpu"]
    title = f"Forward and backward over the frozen linear alone (1.00); {gpu}, bf16, CUDA graphs"
    parts, y = [text(16, 24, title, weight="bold"), *legend()], TOP
    for row, label in ROWS.items():
        parts.append(text(LEFT - 10, y + 2.9 * BAR, label, anchor="end"))
        for arm, (_, colour) in ARMS.items():
            parts += bar(y, rows[row][arm]["over"]["graph"]["median"], colour)
            y += BAR
        y += GAP
    axis = f'<line x1="{LEFT}" y1="{TOP - 6}" x2="{LEFT}" y2="{y - GAP + 6}" stroke="#57606a"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#1f2328">'
    )
    ground = f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, axis, "</svg>\n"])


def main() -> None:
    """Read a result, write the chart."""
    source, target = map(Path, sys.argv[1:])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(chart(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
