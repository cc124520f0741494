"""Job files and their data; plans, meshes, estimates, nano-batches, profiles and stages."""

from __future__ import annotations

from tlora_fx.errors.compiling import CompileError
from tlora_fx.errors.root import TloraError


class JobError(TloraError, code="T0101"):
    """Fields of a job are unknown, have wrong values, or exclude each other."""


class JobFileError(JobError, code="T0102"):
    """A job file has mistakes.

    All are listed, each with its line and its job.
    """


class JobFileSyntaxError(JobFileError, code="T0103"):
    """A job file is not plain YAML.

    Tags, duplicate keys and self-references are refused too.
    """


class JobFileMissingError(JobFileError, code="T0104"):
    """A job file does not exist or cannot be opened."""


class UnknownJob(JobError, code="T0106"):
    """`tlora-fx data --job` names a job that the job file does not have.

    The message gives the nearest name, and lists all.
    """


class RemoteCodeRefused(JobError, code="T0105"):
    """A job file names Python code to run, and the command line does not allow that.

    `trust_remote_code: true` and `compute_metrics` in the file need `--trust-remote-code` on the
    command line too, or `load_job_file(path, trust_remote_code=True)`. Give it only for code that
    you have read.
    """


class ImportRefused(JobError, code="T0107"):
    """`tlora-fx import` can make no job file of another tool's config file.

    The file does not say which tool it is for, trains something that tlora-fx does not train, or
    has values that no job may have. All are listed, each with its key.
    """


class DataError(TloraError, code="T0300"):
    """The data of a job cannot be used."""


class DataFileError(DataError, code="T0301"):
    """A data file does not exist or cannot be read.

    Give a .jsonl, .json, .csv, .tsv, .parquet or .txt file, a pattern of such files, a folder that
    `save_to_disk` of `datasets` wrote, or a hub id.
    """


class MissingPackageError(DataError, code="T0302"):
    """A package that a job needs is not installed.

    Some data files need one, and so do some forms in which passes store weights. The message names
    it.
    """


class MalformedRowError(DataError, code="T0303"):
    """A row of a data file is not a valid sample.

    Fix the row, or set `skip_bad_rows: true` to skip and count such rows.
    """


class MissingColumnError(DataError, code="T0304"):
    """The data lacks the columns of a known format: prompt and completion, messages, or a text.

    If they have other names, map them: `columns: {prompt: question, completion: answer}`. Pairs
    need `method: dpo`.
    """


class AmbiguousFormatError(DataError, code="T0308"):
    """The columns of the data fit more than one format.

    Set `format` in the job's data.
    """


class UnreadColumnError(DataError, code="T0309"):
    """The data has a column that looks as if it said what is trained, and no format reads it.

    Such are `weight`, `mask`, `train`, and in a job of method sft `label`. Leave out the rows that
    shall not be trained, then say that the column is not read: `columns: {weight: null}`.
    """


class MixtureWeightError(DataError, code="T0310"):
    """A data set of a mixture has so small a weight that an epoch would hardly end.

    With `mixing: all_exhausted` an epoch goes on until each data set is used up. The error names
    the data set and the samples that such an epoch would have.
    """


class EmptyDataError(DataError, code="T0305"):
    """The data of a job has no usable row."""


class NoTargetsError(DataError, code="T0306"):
    """No sample of a job has a token to train on, for example because all were truncated.

    Raise `max_length`, or set `loss_on: all`.
    """


class ChatTemplateError(DataError, code="T0307"):
    """The tokenizer has no chat template, or a turn of the assistant is not found in its rendering.

    A turn is looked for in the rendering of the whole conversation. The error names the row and the
    turn. Use a template with `{% generation %}`, or set `loss_on: all`.
    """


class PlanFileError(TloraError, code="T0801"):
    """A plan file cannot be read or written, or is invalid."""


class PlanNotForModel(TloraError, code="T0802"):
    """A plan file was made for another base, or for jobs that adapt other modules.

    Make a plan for these jobs.
    """


class MeshDoesNotFit(TloraError, code="T0803"):
    """The model cannot be split over this mesh of processes.

    The message lists meshes that fit.
    """


class UnknownPlanner(TloraError, code="T0804"):
    """There is no planner of this name.

    The message lists those that there are.
    """


class LaunchError(TloraError, code="T0805"):
    """The number of processes does not fit the mesh, the plan or the machine.

    Or torchrun's variables are incomplete.

    The message says how to start the run.
    """


class RanksDiffer(TloraError, code="T0806", shared=True):
    """The processes of one run have different versions of a package, or different jobs.

    Start all processes from the same installation and with the same job file.
    """


class RanksParted(TloraError, code="T0807", shared=True):
    """The processes of one run would train on different rows.

    Check that all processes read the same files and run the same version.
    """


class NotElementwise(TloraError, code="T0808"):
    """A job needs whole matrices in one process, and the plan splits them.

    Some optimizers, AdaLoRA, and starts computed from data need them. The message names a plan that
    works.
    """


class NoGradient(TloraError, code="T0809", shared=True):
    """An adapter had tokens in the first step and got no gradient.

    This is a defect of a planner or a pass. Please report it with the job file and the plan.
    """


class PlanNotRunnable(TloraError, code="T0810"):
    """A plan asks for features that cannot run together, or not with this model or these jobs.

    The message says which, and which plan to use instead.
    """


class RankFailed(TloraError, code="T0811"):
    """Another process of the run failed; its error is given as the reason."""


class ProcessLost(TloraError, code="T0812"):
    """Another process of the run was killed, ran out of memory, or lost the network.

    `--resume`, or torchrun's `--max-restarts`, continues from the last checkpoint.
    """


class BaseUnknown(TloraError, code="T0920"):
    """The scheduler has no profile of a base, or does not know its sizes.

    Measure a profile with `tlora-fx profile`, or name a base that has one.
    """


class TargetUnknown(TloraError, code="T0921"):
    """A job adapts a linear layer that its base does not have."""


class ProfileMismatch(TloraError, code="T0922"):
    """A profile was measured on other hardware, or was not measured at all.

    Run `tlora-fx profile` on GPUs of the cluster, or allow estimated profiles.
    """


class StepsUnknown(TloraError, code="T0923"):
    """A job counts epochs, and the number of its samples is unknown.

    Give `max_steps`.
    """


class EstimatorOption(TloraError, code="T0924"):
    """An option of the estimator of step times has an invalid value."""


class DemandWrong(TloraError, code="T0925"):
    """A demand or a number of GPUs for which no step time exists, such as NaN or a negative one."""


class NotNanoBatchable(CompileError, code="T0880"):
    """The pass nano-batch cannot cut this model's layers into nano-batches."""


class NanoBatchesWrong(TloraError, code="T0881"):
    """A row cannot be cut into this number of nano-batches, or the cuts do not fill the row."""


class ControllerWrong(TloraError, code="T0882"):
    """There is no such controller of nano-batches, or its options are invalid.

    Choose `keep-best`, `aimd` or `fixed`.
    """


class UnknownGpu(TloraError, code="T0850"):
    """There is neither a profile nor a data sheet of this GPU.

    Measure it with `tlora-fx profile`.
    """


class ProfileFileError(TloraError, code="T0851"):
    """A profile cannot be read or written, or is invalid."""


class ProfileMissing(TloraError, code="T0852"):
    """There is no measured profile of this model on this GPU.

    Run `tlora-fx profile`, or plan with `--allow-estimated`. `train --plan auto` needs neither: it
    measures for a few seconds.
    """


class NoPlanFits(TloraError, code="T0853"):
    """No plan fits into the memory of these GPUs, or the weights of the base alone are larger.

    The message gives the reason for each plan, or the two sizes.
    """


class JobTooLong(TloraError, code="T0854"):
    """A job's samples are too long for the memory of a GPU.

    Set `max_length` to the length that the message gives.
    """


class NotProfilable(TloraError, code="T0856"):
    """The layers of a model cannot be timed one by one.

    Either it was compiled without layers (`tlora-fx explain JOBS --node MODULE` says why), or a
    layer hands on more than one value.
    """


class TensorGroupMissing(TloraError, code="T0830"):
    """A tensor-parallel graph runs without a process group.

    Run the model by a plan, or call `tlora_fx.ops.use_group("tp", group)` before the first step.
    """


class NoStage(TloraError, code="T0840"):
    """The model cannot be cut into pipeline stages at this layer.

    The message names layers where it can be cut.
    """


class TokensMismatch(TloraError, code="T0841"):
    """A pipeline stage got hidden values of another micro-batch than the one that it runs.

    All processes must hold the same table of micro-batches.
    """


class ScheduleRefused(TloraError, code="T0842"):
    """A pipeline schedule does not work with this number of micro-batches or stages.

    The message says which numbers work.
    """


class PipelineBroken(TloraError, code="T0843"):
    """A pipeline stage computed a value of another shape or dtype than its graph says.

    This is a defect. Please report it with the job file. Plans without a pipeline are not affected.
    """
