"""Stages of a pipeline, and what runs them."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class NoStage(TloraError):
    """A model cannot be cut into stages, or not where a plan cuts it.

    Between two stages one hidden value travels. A base whose layers hand more than that to later
    layers has cuts only where a single value crosses; a base without folded layers has none. The
    error names the values that cross, and where a cut is possible.
    """

    code = "T0840"


class TokensMismatch(TloraError):
    """A stage was given hidden values of other tokens than its micro-batch has.

    All processes must hold the same table of micro-batches in every round.
    """

    code = "T0841"


class ScheduleRefused(TloraError):
    """A pipeline schedule does not run with this number of micro-batches or stages.

    1F1B and GPipe take one stage a process; 1F1B needs at least as many micro-batches as stages;
    an interleaved schedule needs a multiple of the processes.
    """

    code = "T0842"


class PipelineBroken(TloraError):
    """A stage computed something else than its graph says.

    Whether a value needs a gradient, and its shape, are known from the graph before a stage runs.
    This is a mistake of tlora-fx, or of a pass.
    """

    code = "T0843"
