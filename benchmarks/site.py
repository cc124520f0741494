"""What LoRA costs on frozen linears, ours beside others': `python -m benchmarks.site`.

Each row is a load: linears, jobs with tokens and ranks, a dropout rate. Each arm does forward and
backward (dX, dA, dB); the frozen linears do forward and dX. Before an arm is timed, its numbers are
compared with float64. Then all arms take turns in rounds, on sets of inputs that together are
larger than the caches; a figure is the median over the rounds of the arm's time over that of the
frozen linears in the same round. Eager and CUDA graph stand apart.

On a CPU nothing but the code is tried: `--device cpu --shrink 64 --dtype float32`.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import parser_of
from benchmarks.interleaved import Spread
from benchmarks.results_file import bare_table, console, described, write
from benchmarks.site_arms import PEERS, Arm
from benchmarks.site_check import least_saved_bytes
from benchmarks.site_loads import Row, bound_rows, further_rows
from benchmarks.site_ours import OURS, VARIANTS
from benchmarks.site_room import ARMS as ROOMS
from benchmarks.site_run import OURS as OUR_NAME
from benchmarks.site_run import Found, Measured, Settings, measure, quiet

MIB = 2**20
TOP_KERNELS = 14


def rows_of(given: argparse.Namespace) -> list[Row]:
    """The rows that were asked for, in small where that was asked for too."""
    rows = [*bound_rows(), *further_rows()]
    if given.rows:
        wanted = given.rows.split(",")
        rows = [row for row in rows if any(fnmatch.fnmatch(row.name, glob) for glob in wanted)]
    elif given.quick or given.profile:
        rows = [row for row in rows if row.quick]
    if not rows:
        raise SystemExit(f"no row is called {given.rows}; see --list")
    return [row.shrunk(given.shrink) for row in rows]


def arms_of(given: argparse.Namespace) -> dict[str, Arm]:
    """Ours, and the others that were asked for."""
    known = VARIANTS | PEERS | ROOMS
    if given.arms is None:
        names = [] if given.profile else list(PEERS)
    else:
        names = [name for name in given.arms.split(",") if name]
    names += list(VARIANTS) if given.plans else []
    unknown = [name for name in names if name not in known | OURS]
    if unknown:
        raise SystemExit(f"no arm is called {unknown[0]}; there are {', '.join(known)}")
    return OURS | {name: known[name] for name in names if name in known}


def row_json(measured: Measured, settings: Settings) -> dict[str, Any]:
    """A row as a result file has it."""
    row, modes = measured.row, settings.modes(measured.row)
    ours = {mode: measured.over(OUR_NAME, mode) for mode in modes}
    return {
        "name": row.name,
        "title": row.title,
        "load": asdict(row.load) | {"tokens": row.load.tokens},
        "base": None if row.base is None else asdict(row.base),
        "over": measured.under,
        "bound": row.bound,
        "aim": row.aim,
        "ours": {mode: None if found is None else asdict(found) for mode, found in ours.items()},
        "holds": {mode: _holds(found, row.bound) for mode, found in ours.items()},
        "ahead_of_us": {mode: measured.ahead_of_us(mode) for mode in modes},
        "least_saved_bytes": least_saved_bytes(row.load, settings.dtype),
        "arms": {name: _arm_json(measured, name) for name in measured.found},
    }


def _holds(found: Spread | None, bound: float | None) -> bool | None:
    return None if found is None or bound is None else found.median <= bound


def _arm_json(measured: Measured, name: str) -> dict[str, Any]:
    found = measured.found[name]
    over = {mode: measured.over(name, mode) for mode in found.times}
    made: dict[str, Any] = {
        "milliseconds": {mode: asdict(Spread.of(times)) for mode, times in found.times.items()},
        "over": {mode: asdict(spread) for mode, spread in over.items() if spread is not None},
        "error": found.error,
        "saved_bytes": found.saved,
    }
    made |= {"why_not": found.why_not} if found.why_not else {}
    made |= {"plans": found.plans} if found.plans else {}
    return made | ({"kernels": found.kernels} if found.kernels else {})


def summary(rows: Sequence[Measured], settings: Settings) -> Table:
    """A line for each row and mode: ours beside the bound, and beside the best of the others."""
    made = bare_table(
        "row", "mode", "base ms", "ours", "least..most", "bound", "aim", "verdict", "best other",
        "saved MiB", "at least", texts=2,
        title="forward and backward over the frozen linears (or over the row's base)",
    )  # fmt: skip
    for measured in rows:
        for mode in settings.modes(measured.row):
            made.add_row(measured.row.name, mode, *_cells(measured, mode, settings))
    return made


def _cells(measured: Measured, mode: str, settings: Settings) -> Iterator[str]:
    row, found = measured.row, measured.over(OUR_NAME, mode)
    under = measured.found[measured.under].times.get(mode)
    yield f"{Spread.of(under).median:.3f}" if under else "–"
    yield f"{found.median:.3f}" if found else "cannot"
    yield f"{found.least:.3f}..{found.most:.3f}" if found else ""
    yield "" if row.bound is None else f"{row.bound:g}"
    yield "" if row.aim is None else f"{row.aim:g}"
    yield _verdict(found, row)
    yield _best_other(measured, mode)
    saved = measured.found[OUR_NAME].saved
    yield "" if saved is None else f"{saved / MIB:.1f}"
    yield f"{least_saved_bytes(row.load, settings.dtype) / MIB:.1f}"


def _verdict(found: Spread | None, row: Row) -> str:
    if found is None or row.bound is None or row.aim is None:
        return ""
    if found.median > row.bound:
        return f"MISSED by {found.median - row.bound:.3f}"
    return "aim met" if found.median <= row.aim else f"held, {found.median - row.aim:.3f} to aim"


def _best_other(measured: Measured, mode: str) -> str:
    others = {
        name: spread.median
        for name in measured.found
        if name in PEERS
        for spread in [measured.over(name, mode)]
        if spread is not None
    }
    if not others:
        return ""
    best = min(others, key=lambda name: others[name])
    ahead = " AHEAD" if best in measured.ahead_of_us(mode) else ""
    return f"{best} {others[best]:.3f}{ahead}"


def show_row(measured: Measured, settings: Settings, out: Console) -> None:
    """Every arm of a row, as soon as it is measured."""
    row = measured.row
    made = bare_table(
        "arm", "mode", "ms", f"over {measured.under}", "least..most", "error", "saved MiB",
        title=f"{row.name}: {row.title}", texts=2,
    )  # fmt: skip
    for name, found in measured.found.items():
        for mode in [mode for mode in settings.modes(row) if mode in found.times]:
            made.add_row(name, mode, *_arm_cells(measured, name, mode))
    out.print(made)
    for name, found in measured.found.items():
        for where, reason in found.why_not.items():
            out.print(f"{name} {where}".strip() + f": {reason}", highlight=False)
    plans = measured.found[OUR_NAME].plans
    out.print("plans: " + ", ".join(f"{where} {plan}" for where, plan in plans.items()))
    for name, found in measured.found.items():
        if found.kernels:
            out.print(_kernels(name, found))


def _arm_cells(measured: Measured, name: str, mode: str) -> Iterator[str]:
    found, over = measured.found[name], measured.over(name, mode)
    yield f"{Spread.of(found.times[mode]).median:.3f}"
    yield f"{over.median:.3f}" if over else ""
    yield f"{over.least:.3f}..{over.most:.3f}" if over else ""
    yield f"{max(found.error.values()):.1e}" if found.error else ""
    yield "" if found.saved is None else f"{found.saved / MIB:.1f}"


def _kernels(name: str, found: Found) -> Table:
    total = sum(float(row["microseconds"]) for row in found.kernels)
    title = f"{name}: {total:.1f} µs of kernels a call"
    made = bare_table("operator", "kernel", "µs", "launches", title=title, texts=2)
    for row in found.kernels[:TOP_KERNELS]:
        numbers = f"{row['microseconds']:.1f}", f"{row['launches']:g}"
        made.add_row(row["op"], row["kernel"][:80], *numbers)
    return made


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="only the rows that have bounds")
    parser.add_argument("--rows", help="names or patterns, with commas between")
    parser.add_argument("--arms", help="others' arms, with commas between (default: all)")
    parser.add_argument(
        "--plans", action="store_true", help="ours with each plan forced, and strict"
    )
    parser.add_argument("--graph", action="store_true", help="every row as a CUDA graph too")
    parser.add_argument("--profile", action="store_true", help="kernel times of ours and frozen")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16", help="of x and the linears")
    parser.add_argument("--shrink", type=int, default=1, help="divide tokens and features by this")
    parser.add_argument("--list", action="store_true", help="say the rows' names, and end")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit status 1 when a bound is missed or an arm of ours cannot run."""
    given = parsed(arguments)
    rows, out = rows_of(given), console()
    if given.list:
        out.print("\n".join(f"{row.name:18} {row.title}" for row in rows), highlight=False)
        return 0
    quiet()
    dtype: torch.dtype = getattr(torch, given.dtype)
    settings = Settings(
        given.device, dtype, given.rounds, arms_of(given), given.graph, given.profile
    )
    found = described("site", given.device) | {"dtype": given.dtype, "rounds": given.rounds}
    path = given.out / f"site-{found['date']}.json"
    done: list[Measured] = []
    started = time.perf_counter()
    for row in rows:
        done.append(measure(row, settings))
        show_row(done[-1], settings, out)
        found["seconds"] = round(time.perf_counter() - started, 1)
        # After every row, so that a run that is cut short leaves what it had.
        write(path, found | {"rows": [row_json(one, settings) for one in done]})
    out.print(summary(done, settings))
    out.print(f"written to {path} after {found['seconds']} s")
    return 0 if all(_is_good(measured, settings) for measured in done) else 1


def _is_good(measured: Measured, settings: Settings) -> bool:
    found = [measured.over(OUR_NAME, mode) for mode in settings.modes(measured.row)]
    return all(one is not None and _holds(one, measured.row.bound) is not False for one in found)


if __name__ == "__main__":
    raise SystemExit(main())
