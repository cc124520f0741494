"""Plans, meshes and what runs them.

`shared` errors are raised by every process of a run at the same place: it is enough that one tells.
"""

from __future__ import annotations

from typing import ClassVar

from tlora_fx.errors.compiling import CompileError
from tlora_fx.errors.root import TloraError


class PlanFileError(TloraError):
    """A plan file cannot be read or written, or is invalid."""

    code = "T0801"


class PlanNotForModel(TloraError):
    """A plan was made for another base, or for jobs with other sites."""

    code = "T0802"


class MeshDoesNotFit(TloraError):
    """A mesh cannot run this model; the message lists those that would do."""

    code = "T0803"


class UnknownPlanner(TloraError):
    """A planner that does not exist."""

    code = "T0804"


class LaunchError(TloraError):
    """Processes or mesh do not fit the plan; the message prints the right command."""

    code = "T0805"


class RanksDiffer(TloraError):
    """Processes have different versions or jobs."""

    code = "T0806"
    shared: ClassVar[bool] = True


class RanksParted(TloraError):
    """Processes would compute different rows; check that all see the same files."""

    code = "T0807"
    shared: ClassVar[bool] = True


class NotElementwise(TloraError):
    """An optimizer needs whole matrices, which the plan splits."""

    code = "T0808"


class NoGradient(TloraError):
    """An adapter had tokens in the first step and no gradient: a defect of a planner or pass."""

    code = "T0809"
    shared: ClassVar[bool] = True


class PlanNotRunnable(TloraError):
    """A plan asks for what cannot be run together, or not on this model."""

    code = "T0810"


class RankFailed(TloraError):
    """Another process met an error, which is given as the reason."""

    code = "T0811"


class ProcessLost(TloraError):
    """Another process was killed, ran out of memory, or lost the network.

    `--resume` or `--max-restarts` continues from the last checkpoint.
    """

    code = "T0812"


# What the scheduler's estimator cannot tell the time of.


class BaseUnknown(TloraError):
    """The scheduler knows neither sizes nor a profile of a base."""

    code = "T0920"


class TargetUnknown(TloraError):
    """A job adapts linears that its base does not have."""

    code = "T0921"


class ProfileMismatch(TloraError):
    """A profile is of other hardware, or was not measured.

    Run `tlora-fx profile` on the cluster's GPUs, or allow estimates.
    """

    code = "T0922"


class StepsUnknown(TloraError):
    """A job counts epochs, and the number of samples is unknown.

    Give `max_steps`.
    """

    code = "T0923"


class EstimatorOption(TloraError):
    """An option of an estimator has an invalid value."""

    code = "T0924"


# Nano-batches and the controllers of their number.


class NotNanoBatchable(CompileError):
    """nano-batch cannot cut this model's layers."""

    code = "T0880"


class NanoBatchesWrong(TloraError):
    """Nano-batch tables do not fit the row, or the count cannot run."""

    code = "T0881"


class ControllerWrong(TloraError):
    """The controller does not exist, or its options are invalid.

    Choose `keep-best`, `aimd` or `fixed`.
    """

    code = "T0882"


# Profiles of hardware, and choosing a plan by them.


class UnknownGpu(TloraError):
    """A GPU without a profile or data sheet.

    Measure it with `tlora-fx profile`.
    """

    code = "T0850"


class ProfileFileError(TloraError):
    """A profile cannot be read or written, or is invalid."""

    code = "T0851"


class ProfileMissing(TloraError):
    """There is no measured profile of this model on this GPU.

    Run `tlora-fx profile`, or plan with `--allow-estimated`.
    """

    code = "T0852"


class NoPlanFits(TloraError):
    """No plan fits on these GPUs; the message gives each reason."""

    code = "T0853"


class JobTooLong(TloraError):
    """A job's samples are too long for a GPU's memory.

    Set `max_length` to the length that the message gives.
    """

    code = "T0854"


class ForeignPlanError(TloraError):
    """A plan of another system cannot be read or run."""

    code = "T0855"


class NotProfilable(TloraError):
    """The layers of a model cannot be timed one by one."""

    code = "T0856"


# Matrices that are cut over processes.


class TensorGroupMissing(TloraError):
    """A tensor-parallel graph runs without a group; call `tlora_fx.ops.use_group("tp", group)`."""

    code = "T0830"


# Stages of a pipeline, and what runs them.


class NoStage(TloraError):
    """A model cannot be cut into stages here; the message names possible cuts."""

    code = "T0840"


class TokensMismatch(TloraError):
    """A stage got hidden values of other tokens than its micro-batch."""

    code = "T0841"


class ScheduleRefused(TloraError):
    """A schedule does not run with this number of micro-batches or stages."""

    code = "T0842"


class PipelineBroken(TloraError):
    """A stage computed something else than its graph says: a defect."""

    code = "T0843"
