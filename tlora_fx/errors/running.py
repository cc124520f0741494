"""Training, checkpoints, adapters on disk and verifying."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class OptimizerError(TloraError):
    """A job's optimizer or schedule does not exist or does not take the job's arguments.

    Choose an optimizer of torch.optim and a schedule of transformers' `get_scheduler`, and give
    them only arguments that they have.
    """

    code = "T0401"


class OptimizerStateError(TloraError):
    """A saved optimizer state does not belong to the parameters that the job trains now.

    Resume with the job file that the checkpoint was made with, or train into a new folder.
    """

    code = "T0402"


class CheckpointError(TloraError):
    """A checkpoint could not be written or read; earlier checkpoints stay as they are.

    Free space on the disk, or mend the folder's permissions, then go on with `--resume`.
    """

    code = "T0403"


class MetricsError(TloraError):
    """A job's metrics file could not be written or read.

    Free space on the disk, or mend the file's permissions, then go on with `--resume`.
    """

    code = "T0404"


class AdapterFolderError(TloraError):
    """A PEFT adapter folder is incomplete, damaged, no LoRA, a pickle, or could not be written.

    It needs adapter_config.json and adapter_model.safetensors, as PEFT's `save_pretrained`
    writes them; adapter_model.bin is a pickle, which can run code, and is never loaded.
    """

    code = "T0405"


class RunFolderError(TloraError):
    """The output folder is in use, by an earlier run or another process.

    Go on with `--resume`, or choose another folder with `-o`.
    """

    code = "T0407"


class ResumeMismatch(TloraError):
    """A run cannot go on: its checkpoint, or its model, belongs to other jobs or another base."""

    code = "T0408"


class TokenizerNotLoadable(TloraError):
    """The base's tokenizer cannot be loaded.

    Set `base.tokenizer` to a hub id or a folder that holds one.
    """

    code = "T0409"


class DataDoesNotFit(TloraError):
    """A job's samples have tokens or lengths that the base cannot take."""

    code = "T0410"


class VerifyError(TloraError):
    """A job trained fused differs from the same job trained alone by more than the bound."""

    code = "T0411"


class DeviceUnknown(TloraError):
    """There is no device of the name that was given.

    Training and profiles run on the CPU or on CUDA devices of this machine.
    """

    code = "T0412"


class OracleError(TloraError):
    """A job cannot be trained alone for comparison.

    The message says what plain transformers and PEFT would do otherwise than the fused model;
    `tlora-fx verify` then says nothing about this job.
    """

    code = "T0406"


# Running groups: executors, the ledger, and `tlora-fx run`.


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


# Policies, their options, and the moments of a cluster that they are asked about.


class UnknownPolicy(TloraError):
    """A scheduling policy that does not exist.

    The message lists the policies that do. Other people's are found by the entry point group
    `tlora_fx.policies`.
    """

    code = "T0900"


class PolicyOptionWrong(TloraError):
    """A policy has no such option, or the option cannot have this value."""

    code = "T0901"


class TooManyForOracle(TloraError):
    """The exact policy was asked about more jobs than it can search.

    It looks at every subset of the jobs. Choose `tlora`, or fewer jobs.
    """

    code = "T0902"


class JobNotInState(TloraError):
    """The job that was asked about is not active in this state of the cluster."""

    code = "T0903"


class CreditRefused(TloraError):
    """A job would be slowed down past what it consented to lend.

    A defect, unless you call the ledger of credits yourself.
    """

    code = "T0904"


# Traces of clusters, and the choices that make jobs of them.


class TraceFileError(TloraError):
    """A trace cannot be read or written, or is in no format that tlora-fx knows.

    The formats are AcmeTrace's CSV, Pollux's workload CSV, the converted Kalos CSV, and our own
    (`tlora-fx simulate --save-trace`); `docs/simulating.md` has the columns of each.
    """

    code = "T0930"


class TraceColumnMissing(TloraError):
    """A trace lacks a column that its jobs cannot do without."""

    code = "T0931"


class TraceRowsWrong(TloraError):
    """A trace has rows that say what no job can be, and `--bad-rows refuse` was asked for.

    Wrong are numbers that are none (NaN, empty, words), negative durations, clocks that run
    backwards (a start before its submission, an end before its start) and names that stand twice.
    By default (`--bad-rows drop`) such rows are left out and counted, by reason.
    """

    code = "T0932"


class TraceEmpty(TloraError):
    """Nothing is left of a trace after what cannot be replayed was left out.

    The message counts what was left out, by reason. Where jobs are larger than the cluster, ask for
    more GPUs.
    """

    code = "T0933"


class MarginalsFileError(TloraError):
    """A file of marginals cannot be read, or its counts are not those of a distribution.

    Counts of "at most x" rise with x, and the last one is the number of jobs.
    """

    code = "T0934"


class ReplayChoiceWrong(TloraError):
    """A choice about how a trace becomes jobs makes no sense, or does not go with the trace."""

    code = "T0935"


class ReportNotWritable(TloraError):
    """The folder of a report cannot be written."""

    code = "T0936"
