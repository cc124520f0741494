"""Profiles of hardware, and choosing a plan by them."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


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
