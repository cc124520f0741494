"""Plans, meshes and what runs them.

`shared` errors are raised by every process of a run at the same place: it is enough that one tells.
"""

from __future__ import annotations

from typing import ClassVar

from tlora_fx.errors.compiling import CompileError
from tlora_fx.errors.root import TloraError


class PlanFileError(TloraError):
    """A plan file cannot be read or written, or says what no plan can say.

    `tlora-fx plan` writes plan files; each is JSON with the fields of `tlora_fx.planners.Plan`.
    """

    code = "T0801"


class PlanNotForModel(TloraError):
    """A plan was made for another base, or for jobs with other sites.

    Make the plan again for this job file.
    """

    code = "T0802"


class MeshDoesNotFit(TloraError):
    """A mesh cannot run this model.

    Heads, key-value heads and widths must divide by tp, and each pipeline stage needs a layer. The
    error says which meshes of the same size would do.
    """

    code = "T0803"


class UnknownPlanner(TloraError):
    """A planner that does not exist."""

    code = "T0804"


class LaunchError(TloraError):
    """Processes or mesh do not fit the plan, or torchrun's variables are incomplete.

    The error prints the command that starts as many processes as the plan needs.
    """

    code = "T0805"


class RanksDiffer(TloraError):
    """Processes of one run have different versions of torch or tlora-fx, or different jobs.

    Start all of them from the same installation and the same job file.
    """

    code = "T0806"
    shared: ClassVar[bool] = True


class RanksParted(TloraError):
    """Processes of one run would compute different rows in the same round.

    Each rank reads the data for itself; check that all see the same files.
    """

    code = "T0807"
    shared: ClassVar[bool] = True


class NotElementwise(TloraError):
    """A job's optimizer needs whole matrices, and the plan splits matrices between processes.

    Optimizers that treat each number by itself, such as AdamW and SGD, run under every plan.
    """

    code = "T0808"


class NoGradient(TloraError):
    """An adapter had tokens in the first step and no gradient reached it.

    The run stops rather than train an adapter that does not learn. This is a mistake of the
    planner, or of a pass.
    """

    code = "T0809"
    shared: ClassVar[bool] = True


class PlanNotRunnable(TloraError):
    """A plan asks for what cannot be run together, or not on this model."""

    code = "T0810"


class RankFailed(TloraError):
    """Another process of the run has met an error; its text is given as the reason.

    Mend what it says, and start all processes again.
    """

    code = "T0811"


class ProcessLost(TloraError):
    """Another process of the run has gone: it was killed, ran out of memory, or lost the network.

    Its own output says why, where it could. `--resume` goes on from the last checkpoint, as
    torchrun's `--max-restarts` does by itself.
    """

    code = "T0812"


# What the scheduler's estimator cannot tell the time of.


class BaseUnknown(TloraError):
    """The scheduler knows neither the sizes nor a profile of a base.

    Bases are known by name (`tlora_fx.cost.model_facts`), or from a job file; their profiles are
    shipped, or written by `tlora-fx profile`.
    """

    code = "T0920"


class TargetUnknown(TloraError):
    """A job adapts linears that its base does not have."""

    code = "T0921"


class ProfileMismatch(TloraError):
    """A profile is of other hardware than the cluster, or was not measured.

    Profile the model on the cluster's GPUs with `tlora-fx profile`. A profile that was scaled from
    another GPU's, or drawn from a data sheet, is accepted where it is asked for, as `tlora-fx
    simulate --allow-estimated` does.
    """

    code = "T0922"


class StepsUnknown(TloraError):
    """A job counts epochs, and nobody has said how many samples there are.

    Give `max_steps`, or the lengths of the samples.
    """

    code = "T0923"


class EstimatorOption(TloraError):
    """An option of an estimator that has no meaning, such as no nano-batches."""

    code = "T0924"


# Nano-batches and the controllers of their number.


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


# Profiles of hardware, and choosing a plan by them.


class UnknownGpu(TloraError):
    """A GPU of which neither a profile nor a data sheet is known.

    Measure it with `tlora-fx profile`, or name one of those that the message lists.
    """

    code = "T0850"


class ProfileFileError(TloraError):
    """A profile cannot be read or written, or says what no profile can say.

    `tlora-fx profile` writes profiles; each is JSON with the fields of
    `tlora_fx.cost.profile.Profile`.
    """

    code = "T0851"


class ProfileMissing(TloraError):
    """There is no measured profile of this model's layers on this GPU.

    Measure one with `tlora-fx profile`. Planning by a scaled profile or a roofline is allowed
    with `--allow-estimated`; `train --plan auto` asks for what was measured. A plan's file that
    rests on estimates is trained by, with a warning.
    """

    code = "T0852"


class NoPlanFits(TloraError):
    """No way to cut this model over these GPUs can run: the message says why of each.

    More GPUs, shorter samples or smaller batches help where memory is short.
    """

    code = "T0853"


class JobTooLong(TloraError):
    """A job has samples that are too long for the memory of a GPU.

    The message names the job and the largest length that fits; samples are cut to `max_length`.
    """

    code = "T0854"


class ForeignPlanError(TloraError):
    """A plan of another system cannot be read, or says what tlora-fx does not run.

    tlora-fx runs one size of tensor parallelism, one kind of data parallelism and one choice of
    recomputing for all layers of a model.
    """

    code = "T0855"


class NotProfilable(TloraError):
    """The layers of a model cannot be timed one by one."""

    code = "T0856"


# Matrices that are cut over processes.


class TensorGroupMissing(TloraError):
    """A graph whose matrices are cut into pieces runs, and no group of processes is named for it.

    Planners name the groups of their mesh. Who runs such a graph by hand calls
    `tlora_fx.ops.use_group("tp", group)` in each process, before anything is compiled.
    """

    code = "T0830"
