"""Nano-batches and the controllers of their number."""

from __future__ import annotations

from tlora_fx.errors.compiling import CompileError
from tlora_fx.errors.root import TloraError


class NotNanoBatchable(CompileError):
    """The pass nano-batch cannot cut this model's layers into nano-batches.

    It needs packed rows and layers that run one after another, each taking the one before it, and
    whatever else they read must belong to single tokens or to the whole row. Leave nano-batches
    out of the plan.
    """

    code = "T0880"


class NanoBatchesWrong(TloraError):
    """The tables of a nano-batch do not belong to the row, or the count cannot run.

    Nano-batches begin where sequences begin, and together they are the row. A defect, unless you
    call the operators yourself.
    """

    code = "T0881"


class ControllerWrong(TloraError):
    """The controller of nano-batches does not exist, or its options make no sense.

    Choose `keep-best`, `aimd` or `fixed`, and options that its class has.
    """

    code = "T0882"
