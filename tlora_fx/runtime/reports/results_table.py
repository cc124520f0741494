"""The results of a run as one table, a row for each job, from the folders of the run.

`tlora_fx.train` returns this table, and `tlora-fx results` prints it.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora_fx.config.adapter_folder import CONFIG
from tlora_fx.config.hyperparameters import differing, shown_value
from tlora_fx.host.formats import read_object
from tlora_fx.runtime.reports.run_view import JobView
from tlora_fx.runtime.run_folder import JOB, without_endless

#: Columns before those of the hyperparameters, and behind them.
FIRST = ("job", "status", "steps")
LAST = ("loss", "metric", "best", "best_step", "tokens", "seconds", "adapter")
#: Stands last, where one of the jobs has a reason.
REASON = "reason"


def result_row(view: JobView) -> dict[str, Any]:
    """The row of a job, by column, without hyperparameters.

    status     such as running, done or failed
    steps      optimizer steps done
    loss       training loss of the last step; NaN where it is not finite, None before the first
    metric     that decides which step is best, such as eval_loss; None without an evaluation
    best       its best value, at `best_step`
    tokens     that were trained on
    seconds    wall time of the job's rounds, which it shared with other jobs
    adapter    folder of its PEFT adapter; None where there is none yet
    reason     why the job has failed, or ended before its last step; "" for none
    """
    evaluation = view.status.get("evaluation") or {}
    last: dict[str, Any] = view.steps[-1] if view.steps else {"loss": None}
    loss = math.nan if view.steps and last["loss"] is None else last["loss"]
    evaluated = bool(view.evaluations)
    return {
        "job": view.name,
        "status": view.state,
        "steps": view.step,
        "loss": loss,
        "metric": evaluation.get("metric_for_best_model") if evaluated else None,
        "best": evaluation.get("best_value"),
        "best_step": evaluation.get("best_step"),
        "tokens": last.get("tokens", view.status.get("tokens", 0)),
        "seconds": sum(float(row["seconds"] or 0) for row in view.steps),
        "adapter": str(view.folder) if (view.folder / CONFIG).is_file() else None,
        REASON: str(view.status.get("reason", "")),
    }


def spec_of(folder: Path) -> Mapping[str, Any] | None:
    """A job as its folder describes it; None where it does not.

    folder   of the job
    """
    return read_object(folder / JOB)


def results_table(
    rows: Sequence[Mapping[str, Any]], specs: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rows with the hyperparameters that differ between jobs; each has the same columns.

    rows    as `result_row` gives them
    specs   of jobs by name, as `Job.model_dump(mode="json")` gives them; a job may be missing
    """
    differ = differing([specs.get(row["job"]) for row in rows])
    has_reason = any(row[REASON] for row in rows)
    last = (*LAST, REASON) if has_reason else LAST
    return [
        {name: row[name] for name in FIRST} | fields | {name: row[name] for name in last}
        for row, fields in zip(rows, differ, strict=True)
    ]


def cells(table: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table as people read it, its titles first."""
    titles = list(table[0]) if table else [*FIRST, *LAST]
    return [titles, *([_cell(name, row[name]) for name in titles] for row in table)]


def as_text(table: Sequence[Mapping[str, Any]]) -> str:
    """The table as lines of aligned columns."""
    lines = cells(table)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in aligned)


def as_csv(table: Sequence[Mapping[str, Any]]) -> str:
    """The table as CSV with whole numbers: empty for None and NaN; lists and mappings as JSON."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else [*FIRST, *LAST], lineterminator="\n")
    writer.writeheader()
    for row in as_json(table):
        plain = {name: _plain(value) for name, value in row.items()}
        writer.writerow(plain)
    return text.getvalue()


def as_json(table: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows for JSON, which has no NaN: null instead."""
    return [without_endless(row) for row in table]


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if name in (*FIRST, *LAST, REASON):
        # A reason may go on in more lines, with what to do.
        return f"{value:.4f}" if isinstance(value, float) else str(value).partition("\n")[0]
    return shown_value(value)


def _plain(value: object) -> object:
    if isinstance(value, bool | list | Mapping):
        return json.dumps(value, ensure_ascii=False)
    # The csv module of Python 3.11 quotes no carriage return.
    return value.replace("\r", "\n") if isinstance(value, str) else value
