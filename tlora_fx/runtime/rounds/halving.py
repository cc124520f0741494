"""End the weak jobs of a group early: synchronous successive halving.

At each rung all jobs of the group have done equally many steps. They are compared by the evaluation
loss there, and one of `factor` goes on. A job that ends is done: it is the same job alone, stopped
at that step. Decisions are kept in halving.jsonl, and a resumed run repeats them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora_fx.config.halving import HalvingSpec, reason_of, result_of
from tlora_fx.host.durable import replace_file
from tlora_fx.runtime.job_run import JobRun

FILE = "halving.jsonl"


class Halving:
    """Compares the jobs of a run; every process decides the same.

    folder   of the run
    writes   whether this process writes the decisions down
    warn     is told where they cannot be written or read: a resumed run then decides anew, by the
             same numbers
    """

    def __init__(self, folder: Path, *, writes: bool, warn: Callable[[str], None]) -> None:
        self._path, self._writes, self._warn = folder / FILE, writes, warn
        self._records: list[dict[str, Any]] = []
        self._decided: set[tuple[str, int]] = set()

    def read(self) -> list[dict[str, Any]]:
        """The decisions of a run that goes on; none, with a warning, where they cannot be read."""
        try:
            records = [json.loads(line) for line in self._path.read_bytes().splitlines()]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self._warn(f"{FILE} cannot be read, so the jobs are compared anew: {error}")
            return []
        return [record for record in records if isinstance(record, dict)]

    def begin(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Repeat these decisions where the same jobs come to the same rung again."""
        self._records = [dict(record) for record in records]

    def judge(self, runs: Sequence[JobRun]) -> list[str]:
        """End jobs whose group has come to a rung; between two rounds.

        returns   what to tell of each rung
        """
        groups: dict[str, list[JobRun]] = {}
        for run in runs:
            if run.job.halving is not None:
                groups.setdefault(str(run.job.halving.group), []).append(run)
        told = []
        for group, members in groups.items():
            for step in sorted({rung for run in members for rung in run.evaluation.rungs}):
                if (group, step) in self._decided or not _is_complete(step, members):
                    continue
                self._decided.add((group, step))
                there = [run for run in members if step in run.evaluation.rung_losses]
                if text := self._end_weak(group, step, there):
                    told.append(text)
        return told

    def _end_weak(self, group: str, step: int, there: Sequence[JobRun]) -> str:
        if not any(run.status == "running" for run in there):
            return ""
        record = self._record(group, step, there)
        ended = [run for run in there if run.job.name in record["ended"]]
        for run in ended:
            if run.status == "running":
                loss = run.evaluation.rung_losses[step]
                run.halve(reason_of(loss, step, len(record["kept"]), len(there)))
        return result_of(group, step, record["kept"], len(there)) if ended else ""

    def _record(self, group: str, step: int, there: Sequence[JobRun]) -> dict[str, Any]:
        """The decision about a rung: the one that was made before, or a new one."""
        ordered = sorted(there, key=lambda run: run.index)
        losses = {run.job.name: run.evaluation.rung_losses[step] for run in ordered}
        for record in self._records:
            same_rung = record.get("group") == group and record.get("step") == step
            if same_rung and {*record.get("kept", ()), *record.get("ended", ())} == {*losses}:
                return record
        halving = there[0].job.halving
        assert isinstance(halving, HalvingSpec)
        kept, ended = halving.compare(losses)
        shown = {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}
        record = {"group": group, "step": step, "kept": kept, "ended": ended, "eval_loss": shown}
        self._records.append(record)
        if self._writes:
            self._write()
        return record

    def _write(self) -> None:
        lines = "".join(json.dumps(each) + "\n" for each in self._records)
        try:
            replace_file(self._path, lines.encode())
        except OSError as error:
            self._warn(f"{FILE} could not be written: {error}")


def _is_complete(step: int, members: Sequence[JobRun]) -> bool:
    """Whether every job that comes to a rung is there."""
    coming = (run for run in members if run.status == "running" and step in run.evaluation.rungs)
    return all(step in run.evaluation.rung_losses for run in coming)
