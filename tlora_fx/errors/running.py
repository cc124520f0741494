"""Training, checkpoints, adapters on disk and verifying."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class OptimizerError(TloraError):
    """A job's optimizer or schedule does not exist or does not take its arguments."""

    code = "T0401"


class OptimizerStateError(TloraError):
    """A saved optimizer state does not fit the job's parameters."""

    code = "T0402"


class CheckpointError(TloraError):
    """A checkpoint could not be written or read; earlier ones are intact."""

    code = "T0403"


class MetricsError(TloraError):
    """A job's metrics file could not be written or read."""

    code = "T0404"


class AdapterFolderError(TloraError):
    """A PEFT adapter folder is incomplete, damaged, no LoRA, a pickle, or not writable."""

    code = "T0405"


class RunFolderError(TloraError):
    """The output folder is in use.

    Continue with `--resume`, or choose another with `-o`.
    """

    code = "T0407"


class ResumeMismatch(TloraError):
    """The checkpoint or model belongs to other jobs or another base."""

    code = "T0408"


class TokenizerNotLoadable(TloraError):
    """The base's tokenizer cannot be loaded.

    Set `base.tokenizer`.
    """

    code = "T0409"


class DataDoesNotFit(TloraError):
    """A job's samples have tokens or lengths that the base cannot take."""

    code = "T0410"


class VerifyError(TloraError):
    """A job trained fused differs from the job trained alone by more than the bound."""

    code = "T0411"


class DeviceUnknown(TloraError):
    """There is no such device; use the CPU or a CUDA device of this machine."""

    code = "T0412"


class OracleError(TloraError):
    """A job cannot be trained alone for comparison; `verify` skips it."""

    code = "T0406"


# Running groups: executors, the ledger, and `tlora-fx run`.


class PlaceTaken(TloraError):
    """A group cannot have its GPUs: one is taken, or is not there."""

    code = "T0950"


class LedgerError(TloraError):
    """The ledger of a run cannot be opened, read or written."""

    code = "T0951"


class WorkerLost(TloraError):
    """A killed run's worker is still there; it ends after its step and checkpoint."""

    code = "T0952"


class RunRefused(TloraError):
    """`tlora-fx run` cannot start or resume with these arguments."""

    code = "T0953"


class JobFolderError(TloraError):
    """A folder of job files cannot be read, or two files name the same job."""

    code = "T0954"


class StateFileError(TloraError):
    """A saved state of the scheduler cannot be read."""

    code = "T0955"


# Policies, their options, and the moments of a cluster that they are asked about.


class UnknownPolicy(TloraError):
    """A scheduling policy that does not exist; the message lists those that do."""

    code = "T0900"


class PolicyOptionWrong(TloraError):
    """A policy has no such option, or not this value."""

    code = "T0901"


class TooManyForOracle(TloraError):
    """The oracle policy got more jobs than it can search."""

    code = "T0902"


class JobNotInState(TloraError):
    """The job is not active in this state of the cluster."""

    code = "T0903"


class CreditRefused(TloraError):
    """A job would be slowed down past what it accepts."""

    code = "T0904"


# Traces of clusters, and the choices that make jobs of them.


class TraceFileError(TloraError):
    """A trace cannot be read or written, or has no known format (`docs/simulating.md`)."""

    code = "T0930"


class TraceColumnMissing(TloraError):
    """A trace lacks a needed column."""

    code = "T0931"


class TraceRowsWrong(TloraError):
    """A trace has wrong rows, and `--bad-rows refuse` was given."""

    code = "T0932"


class TraceEmpty(TloraError):
    """Nothing is left of a trace; the message counts what was left out, by reason."""

    code = "T0933"


class MarginalsFileError(TloraError):
    """A file of marginals cannot be read, or holds no distribution."""

    code = "T0934"


class ReplayChoiceWrong(TloraError):
    """A choice about how a trace becomes jobs is invalid, or does not go with the trace."""

    code = "T0935"


class ReportNotWritable(TloraError):
    """The folder of a report cannot be written."""

    code = "T0936"


# The loop, the simulated clock and the replay of traces.


class SubmittedTwice(TloraError):
    """A job was submitted twice under one name."""

    code = "T0970"


class DecisionWrong(TloraError):
    """A policy's decision cannot be run."""

    code = "T0971"


class ReplayStalled(TloraError):
    """Jobs wait in a replay, nothing runs, and the policy starts none: a defect of the policy."""

    code = "T0972"


class ReplayOptionWrong(TloraError):
    """An option of a replay has an invalid value."""

    code = "T0973"


class ClockBackwards(TloraError):
    """A simulated clock was asked to go back."""

    code = "T0974"
