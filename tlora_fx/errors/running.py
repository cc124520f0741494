"""Training, running groups, scheduling, replaying traces; operators and their kernels."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class EnvironmentVariableWrong(TloraError, code="T0001"):
    """An environment variable has a value that tlora-fx does not know (`docs/environment.md`)."""


class NameNotUtf8(TloraError, code="T0002"):
    """The current folder or an argument has a name that is not UTF-8.

    Rename it. Where the name is right and the locale is another one, set `PYTHONUTF8=1`.
    """


class OptimizerError(TloraError, code="T0401"):
    """A job's optimizer or learning rate schedule does not exist or fails.

    It fails with the job's arguments when it is tried before training.
    """


class OptimizerStateError(TloraError, code="T0402"):
    """A saved optimizer state belongs to other parameters than the job's.

    Resume with the job file with which the checkpoint was made.
    """


class StepMisuse(TloraError, code="T0420"):
    """A `GroupStep` was asked for what it cannot do: an unknown job, a step without gradients."""


class NotFinite(TloraError, code="T0421"):
    """The loss of a batch is NaN or infinite.

    The job's gradients are what they were before the batch. Look for samples without targets, a
    learning rate that is too high, or a loss of your own that divides by zero.
    """


class SamplingServerError(TloraError, code="T0423"):
    """A vLLM server that samples for jobs cannot be reached, or refuses an adapter or a request.

    Start it with `--enable-lora`, `--max-lora-rank` of the largest rank, and
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. It has to read the folder of the adapters.
    """


class CheckpointError(TloraError, code="T0403"):
    """A checkpoint could not be written or read.

    Earlier checkpoints are intact.
    """


class MetricsError(TloraError, code="T0404"):
    """A job's metrics file could not be written or read.

    Free space or mend the permissions, then continue with `--resume`.
    """


class NewerFormat(TloraError, code="T0422"):
    """A newer version of tlora-fx wrote this, in a format that this version does not know.

    Upgrade tlora-fx. Nothing was changed, so the newer version can still read it.
    """


class AdapterFolderError(TloraError, code="T0405"):
    """A PEFT adapter folder cannot be used.

    It is incomplete, damaged or not writable, its weights are a pickle, or its adapter has a kind
    or fields that tlora-fx does not support.
    """


class RunFolderError(TloraError, code="T0407"):
    """The output folder is in use, or holds no run to continue.

    Continue a run with `--resume`, or choose another folder with `-o`. `tlora-fx run` and
    `tlora-fx serve` each continue their own folders only.
    """


class ResumeMismatch(TloraError, code="T0408"):
    """A checkpoint was made with other jobs, other data or another base.

    The message names each difference. `--accept-changes` resumes all the same (`docs/resuming.md`).
    """


class TokenizerNotLoadable(TloraError, code="T0409"):
    """The base's tokenizer cannot be loaded.

    Set `base.tokenizer`.
    """


class DataDoesNotFit(TloraError, code="T0410"):
    """A job's samples have token ids or lengths that the base cannot take.

    If token ids are too large, give the tokenizer that belongs to the base, or resize the base for
    added tokens (docs/in-python.md).
    """


class VerifyError(TloraError, code="T0411"):
    """A job trained fused differs from the same job trained alone by more than the bound.

    Please report it with the job file.
    """


class DeviceUnknown(TloraError, code="T0412"):
    """There is no such device.

    Use the CPU or a CUDA device of this machine.
    """


class MetricFunctionError(TloraError, code="T0413"):
    """A job's metric function cannot be imported or fails.

    It also fails if it does not return the metric for the best step. `compute_metrics` names a
    function that takes transformers' EvalPrediction and returns numbers by name.
    """


class LossFunctionError(TloraError, code="T0424"):
    """A job's function as `loss` fails, or returns what is no loss.

    It is called before training, with equal log-probabilities for all tokens: on the job's first
    micro-batch, and on the first rows to evaluate. It takes a list of log-probabilities and a list
    of what the rows say, one item a sequence, and returns the sum of the losses as a tensor of one
    number that depends on the log-probabilities, or that and a dict of numbers. The loss and its
    gradient have to be finite, with these log-probabilities or with others.
    """


class CallbackWrong(TloraError, code="T0414"):
    """The class that `--callback` names cannot be used.

    It cannot be imported, fails, or is no `tlora_fx.TrainerCallback`.
    """


class GenerationError(TloraError, code="T0415"):
    """A job cannot generate text, or tokens.

    The tokenizer has no chat template, the prompt leaves no space for an answer, the base cannot
    generate, the jobs of one call have different bases, or a `Sampler` was given a prompt or a
    number that it cannot use.
    """


class HubError(TloraError, code="T0416"):
    """A folder could not be uploaded to the Hugging Face Hub; it stays where it is.

    Log in by `hf auth login` or HF_TOKEN, and name a repository as USER/NAME.
    """


class StartNotComputed(TloraError, code="T0417"):
    """EVA or CorDA cannot compute a job's initial adapter from its data.

    Lower `r`, give more data, or choose another `init_lora_weights`.
    """


class OutOfMemory(TloraError, code="T0419"):
    """The device has too little memory for a step of any job, even of one alone.

    Give shorter samples (`max_length`), smaller batches, or a device with more memory.
    """


class OracleError(TloraError, code="T0406"):
    """A job cannot be trained alone for comparison, so that `tlora-fx verify` skips it."""


class PlaceTaken(TloraError, code="T0950"):
    """A group of jobs cannot have the GPUs that it was given: one is in use, or does not exist."""


class LedgerError(TloraError, code="T0951"):
    """The ledger of a run, its SQLite database, cannot be opened, read or written."""


class WorkerLost(TloraError, code="T0952"):
    """A process of an earlier, killed run still trains in this folder.

    It ends after its step and checkpoint. Wait for it, then start the run again.
    """


class RunRefused(TloraError, code="T0953"):
    """`tlora-fx run` or `serve` cannot start or continue with these arguments."""


class JobFolderError(TloraError, code="T0954"):
    """A folder of job files cannot be read, or two files name the same job."""


class StateFileError(TloraError, code="T0955"):
    """A saved snapshot of the scheduler cannot be read or written."""


class AdmissionError(TloraError, code="T0956"):
    """Reading a job file or preparing a job took too long or too much memory, or its process died.

    A process that dies is tried again; five deaths in a row refuse the file or the job. All others
    train. If the job is right, allow more with `--prepare-seconds` or `--prepare-memory`, or free
    memory on the machine.
    """


class WorkerStalled(TloraError, code="T0957"):
    """A group of jobs made no progress, or did not stop, for longer than it may.

    Its processes were killed, and its jobs return to the queue from their last commits. If a step
    really takes so long, allow more with `--stall`.
    """


class RayNotInstalled(TloraError, code="T0958"):
    """`--executor ray` needs Ray, which is not installed.

    Run `pip install 'tlora-fx[ray]'` on every node.
    """


class RayUnreachable(TloraError, code="T0959"):
    """A Ray cluster cannot be joined, has no node to train on, or lost its head node.

    All committed steps are in the output folder: run again with the same `-o`.
    """


class StorageFailed(TloraError, code="T0960"):
    """A file of a run cannot be read or written, for example because the disk is full.

    `run` and `serve` wait while their disk is nearly full. They end with this error if a file
    cannot be written all the same, and go on when they are started again with the same `-o`. A
    request that the service answers with it has changed nothing: send it again later.
    """


class UnknownPolicy(TloraError, code="T0900"):
    """There is no scheduling policy of this name.

    The message lists those that there are.
    """


class PolicyOptionWrong(TloraError, code="T0901"):
    """A scheduling policy has no such option, or the option cannot have this value."""


class TooManyForOracle(TloraError, code="T0902"):
    """The policy `oracle` searches all groupings, and there are too many jobs for that.

    In `tlora-fx simulate`, give `--runnable 16`, or leave the policy out.
    """


class JobNotInState(TloraError, code="T0903"):
    """The scheduler was asked about a job that it does not know or that has ended.

    The message lists the jobs that it can explain.
    """


class CreditRefused(TloraError, code="T0904"):
    """A job would be slowed down more than its `max_slowdown_opt_in` accepts."""


class TraceFileError(TloraError, code="T0930"):
    """A trace of jobs cannot be read or written, or has no known format.

    `docs/simulating.md` lists the formats.
    """


class TraceColumnMissing(TloraError, code="T0931"):
    """A trace of jobs lacks a column that its format needs.

    Add the column. If the trace is of another format, name that with `--format`.
    """


class TraceRowsWrong(TloraError, code="T0932"):
    """A trace of jobs has invalid rows, and `--bad-rows refuse` was given.

    Mend the rows, or leave them out with `--bad-rows drop`.
    """


class TraceEmpty(TloraError, code="T0933"):
    """No job of a trace is left to replay.

    The message counts what was left out, by reason.
    """


class MarginalsFileError(TloraError, code="T0934"):
    """The file of marginal distributions for a synthetic trace cannot be read, or is invalid."""


class ReplayChoiceWrong(TloraError, code="T0935"):
    """An option that makes jobs of a trace is invalid, or does not apply to this trace."""


class ReportNotWritable(TloraError, code="T0936"):
    """The file or folder of a report, or of a table of results, cannot be written.

    Choose another with `-o`, or with `--csv`.
    """


class SubmittedTwice(TloraError, code="T0970"):
    """Two jobs were submitted under one name.

    Give each job a name of its own.
    """


class DecisionWrong(TloraError, code="T0971"):
    """A scheduling policy failed, or made a decision that cannot be carried out.

    This is a defect of the policy. `tlora_fx.scheduler.state.Decision` has the rules.
    """


class ReplayStalled(TloraError, code="T0972"):
    """In a replay jobs wait, nothing runs, and the scheduling policy starts no job.

    This is a defect of the policy.
    """


class ReplayOptionWrong(TloraError, code="T0973"):
    """An option of a replay, or of the scheduler's loop, has an invalid value."""


class ClockBackwards(TloraError, code="T0974"):
    """A simulated clock was set to an earlier time."""


class SegmentError(TloraError, code="T0501"):
    """The segments, which say whose job each token is, do not cover the tokens of a tensor.

    Build them with `PackedBatch`.
    """


class AdapterTableError(TloraError, code="T0502"):
    """The adapters that an operator got do not fit each other, or the layer.

    For example, they are of another number of jobs than the row.
    """


class MaskKeyError(TloraError, code="T0503"):
    """A dropout rate, a key of a dropout mask, or a token index is out of range.

    Rates lie in [0, 1), and keys have 32 bits.
    """


class AttentionShapeError(TloraError, code="T0504"):
    """Packed attention got tensors, or bounds of samples, that do not fit each other.

    Give q, k and v as [T, heads, dim].
    """


class FrozenGradientError(TloraError, code="T0505"):
    """An operator was asked for a gradient that it does not compute, such as of a frozen weight.

    Freeze that input, or leave the layer unfused.
    """


class QuantizedLinearError(TloraError, code="T0506"):
    """A linear layer with quantised weights cannot be computed.

    It got tensors that do not fit its form, or this GPU lacks the operation.
    """


class TableNotOnDevice(TloraError, code="T0507"):
    """A table of adapters is still on the host while a CUDA graph is captured.

    Run the step once before the capture, or run without CUDA graphs.
    """


class ExpertLinearError(TloraError, code="T0508"):
    """A mixture of experts got tokens, weights and expert indices that do not fit each other."""


class UnknownKernel(TloraError, code="T0701"):
    """There is no kind of kernel of this name.

    `tlora-fx kernels list` lists them.
    """


class KernelSpecError(TloraError, code="T0702"):
    """No kernel can be generated for this combination of shapes, dtypes and options.

    The message says what is allowed.
    """


class KernelCacheError(TloraError, code="T0703"):
    """Generated kernels can be written neither to the cache folder nor to a temporary one.

    Set TLORA_FX_CACHE to a writable folder.
    """


class TooManyJobs(TloraError, code="T0704"):
    """A row holds more jobs than the kernels support."""


class KernelToolMissing(TloraError, code="T0705"):
    """Triton, or a tool in its package, is not installed.

    Run `pip install triton`.
    """
