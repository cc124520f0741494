"""What the scheduler's estimator cannot tell the time of."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class BaseUnknown(TloraError):
    """The scheduler knows neither the sizes nor a profile of a base.

    Bases are known by name (`tlora_fx.scheduler.bases`), or from a job file; their profiles are
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
