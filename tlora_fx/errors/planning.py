"""Job files and their data; plans, meshes, estimates, nano-batches, profiles and stages."""

from __future__ import annotations

from tlora_fx.errors.compiling import CompileError
from tlora_fx.errors.root import TloraError


class JobError(TloraError, code="T0101"):
    """Fields of a job are unknown, wrong, or exclude each other."""


class JobFileError(JobError, code="T0102"):
    """A job file has mistakes; each is listed with line and job."""


class JobFileSyntaxError(JobFileError, code="T0103"):
    """A job file is no plain YAML; tags, duplicate keys and self-references are refused."""


class JobFileMissingError(JobFileError, code="T0104"):
    """A job file does not exist or cannot be opened."""


class RemoteCodeRefused(JobError, code="T0105"):
    """A job file asks to run code that it names; the command line does not allow that.

    `trust_remote_code: true` and `compute_metrics` in the file need `--trust-remote-code` on the
    command line too, or `load_job_file(path, trust_remote_code=True)`. Give it only for code that
    you have read.
    """


class DataError(TloraError, code="T0300"):
    """The data of a job cannot be used."""


class DataFileError(DataError, code="T0301"):
    """A data file does not exist or cannot be read.

    Give a .jsonl, .json, .csv, .tsv, .parquet or .txt file, or a hub id.
    """


class MissingPackageError(DataError, code="T0302"):
    """A package for this data or stored form is not installed."""


class MalformedRowError(DataError, code="T0303"):
    """A row of a data file is no sample.

    Fix it, or set `skip_bad_rows: true` to skip and count such rows.
    """


class MissingColumnError(DataError, code="T0304"):
    """The data has no columns for a prompt and completion, messages, or a text.

    Map its names: `columns: {prompt: question, completion: answer}`. Pairs need `method: dpo`.
    """


class AmbiguousFormatError(DataError, code="T0308"):
    """The columns fit more than one format.

    Set `format` in the job's data.
    """


class EmptyDataError(DataError, code="T0305"):
    """The data of a job has no usable row."""


class NoTargetsError(DataError, code="T0306"):
    """No sample of a job has a token to train on.

    Raise `max_length`, or set `loss_on: all`.
    """


class ChatTemplateError(DataError, code="T0307"):
    """The chat template is missing, or does not mark the assistant's tokens.

    Use one with `{% generation %}`, or set `loss_on: all`.
    """


class PlanFileError(TloraError, code="T0801"):
    """A plan file cannot be read or written, or is invalid."""


class PlanNotForModel(TloraError, code="T0802"):
    """A plan was made for another base, or for jobs with other sites."""


class MeshDoesNotFit(TloraError, code="T0803"):
    """A mesh cannot run this model; the message lists those that would do."""


class UnknownPlanner(TloraError, code="T0804"):
    """A planner that does not exist."""


class LaunchError(TloraError, code="T0805"):
    """Processes or mesh do not fit the plan; the message prints the right command."""


class RanksDiffer(TloraError, code="T0806", shared=True):
    """Processes have different versions or jobs."""


class RanksParted(TloraError, code="T0807", shared=True):
    """Processes would compute different rows; check that all see the same files."""


class NotElementwise(TloraError, code="T0808"):
    """An optimizer needs whole matrices, which the plan splits."""


class NoGradient(TloraError, code="T0809", shared=True):
    """An adapter had tokens in the first step and no gradient: a defect of a planner or pass."""


class PlanNotRunnable(TloraError, code="T0810"):
    """A plan asks for what cannot be run together, or not on this model."""


class RankFailed(TloraError, code="T0811"):
    """Another process met an error, which is given as the reason."""


class ProcessLost(TloraError, code="T0812"):
    """Another process was killed, ran out of memory, or lost the network.

    `--resume` or `--max-restarts` continues from the last checkpoint.
    """


class BaseUnknown(TloraError, code="T0920"):
    """The scheduler knows neither sizes nor a profile of a base."""


class TargetUnknown(TloraError, code="T0921"):
    """A job adapts linears that its base does not have."""


class ProfileMismatch(TloraError, code="T0922"):
    """A profile is of other hardware, or was not measured.

    Run `tlora-fx profile` on the cluster's GPUs, or allow estimates.
    """


class StepsUnknown(TloraError, code="T0923"):
    """A job counts epochs, and the number of samples is unknown.

    Give `max_steps`.
    """


class EstimatorOption(TloraError, code="T0924"):
    """An option of an estimator has an invalid value."""


class NotNanoBatchable(CompileError, code="T0880"):
    """nano-batch cannot cut this model's layers."""


class NanoBatchesWrong(TloraError, code="T0881"):
    """Nano-batch tables do not fit the row, or the count cannot run."""


class ControllerWrong(TloraError, code="T0882"):
    """The controller does not exist, or its options are invalid.

    Choose `keep-best`, `aimd` or `fixed`.
    """


class UnknownGpu(TloraError, code="T0850"):
    """A GPU without a profile or data sheet.

    Measure it with `tlora-fx profile`.
    """


class ProfileFileError(TloraError, code="T0851"):
    """A profile cannot be read or written, or is invalid."""


class ProfileMissing(TloraError, code="T0852"):
    """There is no measured profile of this model on this GPU.

    Run `tlora-fx profile`, or plan with `--allow-estimated`.
    """


class NoPlanFits(TloraError, code="T0853"):
    """No plan fits on these GPUs; the message gives each reason."""


class JobTooLong(TloraError, code="T0854"):
    """A job's samples are too long for a GPU's memory.

    Set `max_length` to the length that the message gives.
    """


class NotProfilable(TloraError, code="T0856"):
    """The layers of a model cannot be timed one by one."""


class TensorGroupMissing(TloraError, code="T0830"):
    """A tensor-parallel graph runs without a group; call `tlora_fx.ops.use_group("tp", group)`."""


class NoStage(TloraError, code="T0840"):
    """A model cannot be cut into stages here; the message names possible cuts."""


class TokensMismatch(TloraError, code="T0841"):
    """A stage got hidden values of other tokens than its micro-batch."""


class ScheduleRefused(TloraError, code="T0842"):
    """A schedule does not run with this number of micro-batches or stages."""


class PipelineBroken(TloraError, code="T0843"):
    """A stage computed something else than its graph says: a defect."""
