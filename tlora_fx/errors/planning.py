"""Plans, meshes and what runs them.

`shared` errors are raised by every process of a run at the same place: it is enough that one tells.
"""

from __future__ import annotations

from typing import ClassVar

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
