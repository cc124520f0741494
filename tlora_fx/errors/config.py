"""Mistakes in job files."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class JobError(TloraError):
    """A job has fields that are unknown, wrong, or exclude each other.

    The message lists every mistake, with the nearest right name or the range that is allowed.
    """

    code = "T0101"


class JobFileError(JobError):
    """A job file has mistakes in its base, its defaults, or its jobs.

    Each mistake is listed with its line and its job; mend them all and start again.
    """

    code = "T0102"


class JobFileSyntaxError(JobFileError):
    """A job file is no YAML that tlora-fx reads.

    Only plain values are read: no tags that build objects, no key twice, no alias inside itself.
    """

    code = "T0103"


class JobFileMissingError(JobFileError):
    """A job file does not exist or cannot be opened.

    Check the path; a job file is a text file in UTF-8.
    """

    code = "T0104"


# A job's data cannot be used.


class DataError(TloraError):
    """The data of a job cannot be used; the classes below say how."""

    code = "T0300"


class DataFileError(DataError):
    """A data file does not exist, cannot be read, or has a type that is not read.

    Give a .jsonl, .json or .parquet file, or the id of a data set on the hub.
    """

    code = "T0301"


class MissingPackageError(DataError):
    """Reading this data, or storing a base in this form, needs a package that is not installed.

    Install it, convert the data to JSONL, or choose another form.
    """

    code = "T0302"


class MalformedRowError(DataError):
    """A row of a data file cannot be read as a sample.

    Mend the row, or set `skip_bad_rows: true` in the job's data: such rows are then counted.
    """

    code = "T0303"


class MissingColumnError(DataError):
    """The data has no columns that make a prompt and completion, messages, or a text.

    Map the file's names in the job's data, such as
    `columns: {prompt: question, completion: answer}`.
    """

    code = "T0304"


class AmbiguousFormatError(DataError):
    """The columns of the data fit more than one format.

    Set `format` in the job's data to prompt-completion, messages or text.
    """

    code = "T0308"


class EmptyDataError(DataError):
    """The data of a job has no rows, or no row that can be used.

    Check the path, and the report of skipped rows.
    """

    code = "T0305"


class NoTargetsError(DataError):
    """No sample of a job has a token to train on.

    The completions are empty, or `max_length` cuts them off: raise it, or set `loss_on: all`.
    """

    code = "T0306"


class ChatTemplateError(DataError):
    """A tokenizer's chat template is missing, or does not show which tokens the assistant wrote.

    Name a tokenizer whose template marks them with `{% generation %}`, or set `loss_on: all`.
    """

    code = "T0307"
