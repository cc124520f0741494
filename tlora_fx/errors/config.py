"""Mistakes in job files."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class JobError(TloraError):
    """Fields of a job are unknown, wrong, or exclude each other."""

    code = "T0101"


class JobFileError(JobError):
    """A job file has mistakes; each is listed with line and job."""

    code = "T0102"


class JobFileSyntaxError(JobFileError):
    """A job file is no plain YAML; tags, duplicate keys and self-references are refused."""

    code = "T0103"


class JobFileMissingError(JobFileError):
    """A job file does not exist or cannot be opened."""

    code = "T0104"


# A job's data cannot be used.


class DataError(TloraError):
    """The data of a job cannot be used."""

    code = "T0300"


class DataFileError(DataError):
    """A data file does not exist or cannot be read.

    Give a .jsonl, .json or .parquet file, or a hub id.
    """

    code = "T0301"


class MissingPackageError(DataError):
    """A package for this data or stored form is not installed."""

    code = "T0302"


class MalformedRowError(DataError):
    """A row of a data file is no sample.

    Fix it, or set `skip_bad_rows: true` to skip and count such rows.
    """

    code = "T0303"


class MissingColumnError(DataError):
    """The data has no columns for a prompt and completion, messages, or a text.

    Map its names: `columns: {prompt: question, completion: answer}`.
    """

    code = "T0304"


class AmbiguousFormatError(DataError):
    """The columns fit more than one format.

    Set `format` in the job's data.
    """

    code = "T0308"


class EmptyDataError(DataError):
    """The data of a job has no usable row."""

    code = "T0305"


class NoTargetsError(DataError):
    """No sample of a job has a token to train on.

    Raise `max_length`, or set `loss_on: all`.
    """

    code = "T0306"


class ChatTemplateError(DataError):
    """The chat template is missing, or does not mark the assistant's tokens.

    Use one with `{% generation %}`, or set `loss_on: all`.
    """

    code = "T0307"
