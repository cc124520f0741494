"""How the rows of the next rounds run: their sizes, their CUDA graphs and their nano-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlora_fx.config.job import Job
from tlora_fx.model.batch import PackedBatch
from tlora_fx.runtime.checks import longest_row
from tlora_fx.runtime.controllers import NanoBatches
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.job_run import JobRun
from tlora_fx.runtime.run_folder import RunFolder

#: Rows are captured so many rounds after their sizes were chosen.
CAPTURE_AFTER = 8
#: For each size so many rounds must follow where a process has SHORT_ROW tokens of a row, and more
#: where it has more: a GPU computes LONG_ROW tokens for as long as launching takes. Of an 8B shape
#: launching took .26 to .33 s, by host, a replay on an H100 .246 s with 4,416 tokens and on an H200
#: .127 s with 2,200, and a capture .55 s.
SHORT_ROW, PAYS_SHORT, LONG_ROW, PAYS_LONG = 2048, 3, 5600, 40


def rounds_to_pay(tokens: float) -> float:
    """Rounds after which capturing a size of rows has paid.

    tokens   of such a row that one process computes
    """
    saved = min(1.0, (LONG_ROW - tokens) / (LONG_ROW - SHORT_ROW))
    return min(PAYS_LONG, PAYS_SHORT / saved) if saved > 0 else PAYS_LONG


class RowSchedule:
    """Chooses how a group's rows run, round after round.

    group    steps the jobs
    nano     chooses the count of nano-batches, on the leader; None: the plan's count stays
    folder   keeps the decisions of `nano`
    count    of nano-batches that this process wants for the next round
    """

    def __init__(self, group: GroupStep, nano: NanoBatches | None, folder: RunFolder) -> None:
        self.group, self.nano, self.folder = group, nano, folder
        self.count = group.plan.nano_batches if nano is None else nano.count
        self._tokens = 0
        # The round in which the sizes of rows were chosen.
        self._chosen = 0
        self._counted = 0, 0

    def choose_sizes(self, active: Sequence[JobRun], rounds: int) -> None:
        """Choose the sizes that rows are padded to, for the jobs that train from now on.

        rounds    done so far
        """
        self.group.expect({run.index: run.data for run in active})
        self._chosen = rounds

    def capture(self, active: Sequence[JobRun], rounds: int, *, code_changes: bool) -> None:
        """Capture rows once most sizes have come, where so many rounds follow that it pays.

        rounds         done so far
        code_changes   compiled layers are still to take over: what is captured would hold old code
        """
        if code_changes:
            self._chosen = rounds
            return
        steps = self.group.bucketer.ladder.steps
        if not steps or rounds - self._chosen != CAPTURE_AFTER:
            return
        left = max((run.data.steps - run.step for run in active), default=0)
        tokens = steps[len(steps) // 2].tokens / self.group.plan.mesh.tp
        if left >= len(steps) * rounds_to_pay(tokens):
            self.group.capture()

    def longest_row(self, jobs: Sequence[Job], data: Mapping[str, JobData]) -> int:
        """Tokens of the longest row that jobs can have; data by job name."""
        return longest_row(jobs, data, self.group.cutting, self.group.plan.parts)

    def resize(self, jobs: Sequence[Job], data: Mapping[str, JobData]) -> None:
        """Keep memory free for the longest row of these jobs from now on; data by job name."""
        if self.group.graphs is not None:
            longest = self.longest_row(jobs, data) if self.group.captures else 0
            self.group.graphs.largest_row = longest

    def count_rows(self) -> tuple[int, int]:
        """How many rows ran since the last call, and how many of them as CUDA graphs."""
        graphs = self.group.graphs
        if graphs is None:
            return 0, 0
        (ran, replayed), now = self._counted, (graphs.rows_run, graphs.rows_replayed)
        self._counted = now
        return now[0] - ran, now[1] - replayed

    def cut(self, count: int, micros: int, rows: Sequence[PackedBatch]) -> None:
        """Cut this round's rows into nano-batches; the leader decides on the next round's.

        count     that the leader wanted for this round
        micros    that the round before took on the slowest process; 0: none was timed
        """
        if self.nano is None or self.group.runner is None:
            return
        self.group.runner.nano_batches = count
        if micros and self.group.mesh.leader:
            self.count = self.nano.decide(micros / 1e6, self._tokens)
            self.folder.write_decisions(self.nano.records())
        self._tokens = sum(row.input_ids.numel() for row in rows)
