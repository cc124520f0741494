"""Layers that are compiled while a loop of `GroupStep` runs, and take over between two rounds.

When that is, and which process compiles, `Compilation` decides, as for a trainer's run. What the
loop counts is a round: an iteration of its own, or a cycle of the Tinker API.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

from tlora_fx.model.backbone import longest_sequence
from tlora_fx.model.batch import JobTokens, PackedBatch, pack, pad
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.launching.cpu_threads import few_threads
from tlora_fx.runtime.rounds.compilation import Compilation, TakeOverRecord

logger = logging.getLogger(__name__)
#: Of the row that is compiled with: about a cycle of several models.
EXAMPLE_TOKENS = 2048
State = Literal["off", "compiling", "compiled", "failed"]


class LoggedNotes(TrainerCallback):
    """Writes notes and warnings into a log."""

    def __init__(self, logger: logging.Logger = logger) -> None:
        self.logger = logger

    def noted(self, text: str) -> None:
        """See `TrainerCallback`."""
        self.logger.info(text)

    def warned(self, text: str) -> None:
        """See `TrainerCallback`."""
        self.logger.warning(text)


class CompiledLayers:
    """Compiles the layers of a step beside its loop, and lets them take over.

    step         made with `StepOptions(compiled=True, wait_for_compile=False)`; another one stays
                 as it is. Where several processes run it, each makes the same calls
    record       where it is kept after how many rounds they took over; None: nowhere
    row          makes a row as the loop has it, on the CPU; by default of tokens for each job
    callback     hears notes and warnings; by default the log does
    unit         what the loop counts, for messages
    fixed_slots  banks of an open model do not grow
    state        "off", "compiling", "compiled", or "failed": layers stay as they are
    after        rounds that had run when they took over; None: they have not
    """

    def __init__(
        self,
        step: GroupStep,
        record: TakeOverRecord | None = None,
        row: Callable[[], PackedBatch] | None = None,
        callback: TrainerCallback | None = None,
        *,
        unit: str = "round",
        fixed_slots: bool = False,
    ) -> None:
        self.step, self.row = step, row or (lambda: row_for(step.model))
        self.callback = callback or LoggedNotes()
        self.state: State = "off"
        self.after: int | None = None
        self._ranks = Ranks(step.mesh)
        self._compilation = Compilation(
            step, record, self._ranks, self.callback, waits=False, forwards=True,
            fixed_slots=fixed_slots, unit=unit, instead="they are compiled at the next start",
        )  # fmt: skip

    def begin(self, rounds: int = 0) -> None:
        """Start to compile; wait for it where that cannot be beside the loop, or was done before.

        rounds   done so far
        raises   what the record raises when it is read
        """
        step = self.step
        if not step.options.compiled:
            return
        if step.model.is_compiled:
            self.state, self.after = "compiled", self._compilation.recorded_takeover(rounds)
            return
        step.options = replace(step.options, wait_for_compile=False)
        self.state = "compiling"
        with self._few_threads():
            self._compilation.begin(self.row, rounds)
        if not self._compilation.is_pending:
            self._take_over(rounds)
        else:
            self.look(rounds)

    def look(self, rounds: int) -> bool:
        """Hand over to compiled layers if they are there; between two rounds.

        rounds    done so far
        returns   whether they did
        """
        if self.state != "compiling":
            return False
        agreed = min(self._ranks.tell_all(self._compilation.state))
        if self._compilation.is_due(agreed, rounds):
            return self._take_over(rounds)
        if not self._compilation.is_pending:
            self.state = "failed"
        return False

    def close(self) -> None:
        """End the process that compiles, if there is one; layers stay what they are."""
        self._compilation.close()

    def _take_over(self, rounds: int) -> bool:
        try:
            with self._few_threads():
                self._compilation.take_over(rounds, self._run_first)
        except Exception as error:
            if self.step.mesh.size > 1:
                raise  # The others have compiled layers already.
            self.step.uncompile()
            self.step.free_memory()
            self.state = "failed"
            line = (str(error).strip().splitlines() or [""])[0]
            self.callback.warned(
                f"layers stay as they are, because compiling them failed: "
                f"{type(error).__name__}: {line}"
            )
            return False
        self.state, self.after = "compiled", self._compilation.after
        return True

    def _run_first(self) -> None:
        # What was captured, and what samplers keep, holds the other code.
        self.step.free_memory()
        if self.step.mesh.size == 1:
            self.step.run_first(self.row())

    def _few_threads(self) -> AbstractContextManager[None]:
        return few_threads(self.step.model.backbone.model, self.step.mesh.device)


def row_for(model: SuperModel) -> PackedBatch:
    """A row with a sequence for each job, on the CPU, each token but the first with a target."""
    longest = longest_sequence(model.backbone.model) or EXAMPLE_TOKENS
    # torch makes constants of sizes of 0 and 1.
    length = max(3, min(longest, EXAMPLE_TOKENS // len(model.jobs)))
    sequences = [[0] * length]
    tokens = [JobTokens(sequences, sequences) for _ in model.jobs]
    return pack(tokens) if model.group.form == "packed" else pad(tokens)
