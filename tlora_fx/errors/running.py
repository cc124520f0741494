"""Training, running groups, scheduling, replaying traces; operators and their kernels."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class EnvironmentVariableWrong(TloraError, code="T0001"):
    """An environment variable has a value that tlora-fx does not know (`docs/environment.md`)."""


class OptimizerError(TloraError, code="T0401"):
    """A job's optimizer or schedule does not exist, or fails with its arguments when tried."""


class OptimizerStateError(TloraError, code="T0402"):
    """A saved optimizer state does not fit the job's parameters."""


class CheckpointError(TloraError, code="T0403"):
    """A checkpoint could not be written or read; earlier ones are intact."""


class MetricsError(TloraError, code="T0404"):
    """A job's metrics file could not be written or read."""


class AdapterFolderError(TloraError, code="T0405"):
    """A PEFT adapter folder is incomplete, damaged, no LoRA, a pickle, or not writable."""


class RunFolderError(TloraError, code="T0407"):
    """The output folder is in use, or holds no run to go on with.

    Continue with `--resume`, or choose another with `-o`.
    """


class ResumeMismatch(TloraError, code="T0408"):
    """The checkpoint or model belongs to other jobs, data or another base.

    Each difference is named. `--accept-changes` goes on all the same (`docs/resuming.md`).
    """


class TokenizerNotLoadable(TloraError, code="T0409"):
    """The base's tokenizer cannot be loaded.

    Set `base.tokenizer`.
    """


class DataDoesNotFit(TloraError, code="T0410"):
    """A job's samples have tokens or lengths that the base cannot take."""


class VerifyError(TloraError, code="T0411"):
    """A job trained fused differs from the job trained alone by more than the bound."""


class DeviceUnknown(TloraError, code="T0412"):
    """There is no such device; use the CPU or a CUDA device of this machine."""


class MetricFunctionError(TloraError, code="T0413"):
    """A job's metric function cannot be imported, fails, or lacks the metric for the best step.

    `compute_metrics` names a function that takes transformers' EvalPrediction and returns numbers.
    """


class CallbackWrong(TloraError, code="T0414"):
    """What `--callback` names cannot be imported, fails, or is no `tlora_fx.TrainerCallback`."""


class GenerationError(TloraError, code="T0415"):
    """A job cannot generate: no chat template, no room for an answer, or the base does not."""


class HubError(TloraError, code="T0416"):
    """A folder was not pushed to the Hugging Face Hub; it stays where it is."""


class StartNotComputed(TloraError, code="T0417"):
    """EVA or CorDA cannot make a job's start from its data."""


class OutOfMemory(TloraError, code="T0419"):
    """No job has room for a step, not even alone."""


class OracleError(TloraError, code="T0406"):
    """A job cannot be trained alone for comparison; `verify` skips it."""


class PlaceTaken(TloraError, code="T0950"):
    """A group cannot have its GPUs: one is taken, or is not there."""


class LedgerError(TloraError, code="T0951"):
    """The ledger of a run cannot be opened, read or written."""


class WorkerLost(TloraError, code="T0952"):
    """A killed run's worker is still there; it ends after its step and checkpoint."""


class RunRefused(TloraError, code="T0953"):
    """`tlora-fx run` cannot start or resume with these arguments."""


class JobFolderError(TloraError, code="T0954"):
    """A folder of job files cannot be read, or two files name the same job."""


class StateFileError(TloraError, code="T0955"):
    """A saved state of the scheduler cannot be read."""


class AdmissionError(TloraError, code="T0956"):
    """Reading or preparing a job took more time or memory than a run allows, or killed its process.

    The jobs of that file are refused, all others train. Where the job is right, allow more with
    `--prepare-seconds` or `--prepare-memory`.
    """


class WorkerStalled(TloraError, code="T0957"):
    """A group of a run made no progress, or did not stop, for longer than it may.

    Its processes were killed, and its jobs return to the queue from their last commits. Where a
    step really takes so long, allow more with `--stall`.
    """


class RayNotInstalled(TloraError, code="T0958"):
    """`--executor ray` needs Ray: `pip install 'tlora-fx[ray]'`."""


class RayUnreachable(TloraError, code="T0959"):
    """A Ray cluster cannot be joined, has no node to train on, or its head is gone.

    What was committed is in the run's folder: run again with the same `-o`.
    """


class UnknownPolicy(TloraError, code="T0900"):
    """A scheduling policy that does not exist; the message lists those that do."""


class PolicyOptionWrong(TloraError, code="T0901"):
    """A policy has no such option, or not this value."""


class TooManyForOracle(TloraError, code="T0902"):
    """The oracle policy got more jobs than it can search."""


class JobNotInState(TloraError, code="T0903"):
    """The job is not active in this state of the cluster."""


class CreditRefused(TloraError, code="T0904"):
    """A job would be slowed down past what it accepts."""


class TraceFileError(TloraError, code="T0930"):
    """A trace cannot be read or written, or has no known format (`docs/simulating.md`)."""


class TraceColumnMissing(TloraError, code="T0931"):
    """A trace lacks a needed column."""


class TraceRowsWrong(TloraError, code="T0932"):
    """A trace has wrong rows, and `--bad-rows refuse` was given."""


class TraceEmpty(TloraError, code="T0933"):
    """Nothing is left of a trace; the message counts what was left out, by reason."""


class MarginalsFileError(TloraError, code="T0934"):
    """A file of marginals cannot be read, or holds no distribution."""


class ReplayChoiceWrong(TloraError, code="T0935"):
    """A choice about how a trace becomes jobs is invalid, or does not go with the trace."""


class ReportNotWritable(TloraError, code="T0936"):
    """The folder of a report cannot be written."""


class SubmittedTwice(TloraError, code="T0970"):
    """A job was submitted twice under one name."""


class DecisionWrong(TloraError, code="T0971"):
    """A policy's decision cannot be run."""


class ReplayStalled(TloraError, code="T0972"):
    """Jobs wait in a replay, nothing runs, and the policy starts none: a defect of the policy."""


class ReplayOptionWrong(TloraError, code="T0973"):
    """An option of a replay has an invalid value."""


class ClockBackwards(TloraError, code="T0974"):
    """A simulated clock was asked to go back."""


class SegmentError(TloraError, code="T0501"):
    """Job segments do not cover the tokens of a tensor; build them with `PackedBatch`."""


class AdapterTableError(TloraError, code="T0502"):
    """Adapter tables do not fit each other or the layer."""


class MaskKeyError(TloraError, code="T0503"):
    """A dropout rate, key or token index is out of range; rates lie in [0, 1), keys in 32 bits."""


class AttentionShapeError(TloraError, code="T0504"):
    """Packed attention got tensors or bounds that do not fit; give q, k, v as [T, heads, dim]."""


class FrozenGradientError(TloraError, code="T0505"):
    """An operator has no gradient for this input; freeze it, or leave the layer unfused."""


class QuantizedLinearError(TloraError, code="T0506"):
    """A linear with a quantised matrix got tensors that do not fit its form."""


class TableNotOnDevice(TloraError, code="T0507"):
    """While a CUDA graph is captured, a table is on the host.

    Run the step once first, or without CUDA graphs.
    """


class ExpertLinearError(TloraError, code="T0508"):
    """A mixture of experts got tokens, matrices and indices that do not fit each other."""


class UnknownKernel(TloraError, code="T0701"):
    """A kernel kind that does not exist; `tlora-fx kernels list` lists them."""


class KernelSpecError(TloraError, code="T0702"):
    """No kernel can be generated for this specialisation."""


class KernelCacheError(TloraError, code="T0703"):
    """Kernels cannot be written to the cache folder or a temporary one.

    Set TLORA_FX_CACHE to a writable folder.
    """


class TooManyJobs(TloraError, code="T0704"):
    """A row holds more jobs than the kernels' tables."""


class KernelToolMissing(TloraError, code="T0705"):
    """Triton, or a tool in its wheel, is not installed (`pip install triton`)."""


class KernelNotCompilable(TloraError, code="T0706"):
    """Triton does not compile a generated kernel for this architecture.

    Another tile may do: `tlora-fx kernels explain`.
    """
