"""Running groups: executors, the ledger, and `tlora-fx run`."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class PlaceTaken(TloraError):
    """A group cannot have its GPUs: another group holds one of them, or it is not there.

    This is a mistake of whoever asks; a loop keeps account of what is free.
    """

    code = "T0950"


class LedgerError(TloraError):
    """The ledger of a run cannot be opened, read or written.

    All that it confirmed before is safe. Free space or mend the disk, then start `tlora-fx run`
    again with the same `-o`.
    """

    code = "T0951"


class WorkerLost(TloraError):
    """A process that trains a group is still there after the run that began it was killed.

    It ends by itself once its step and its checkpoint are done; wait, or end it by its number.
    """

    code = "T0952"


class RunRefused(TloraError):
    """`tlora-fx run` cannot begin, or cannot go on, with what it was given."""

    code = "T0953"


class JobFolderError(TloraError):
    """A folder of job files cannot be read, or two of its files name the same job."""

    code = "T0954"


class StateFileError(TloraError):
    """A saved state of the scheduler cannot be read.

    `tlora-fx schedule state RUN -o STATE.json` writes them.
    """

    code = "T0955"
