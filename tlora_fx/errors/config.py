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
