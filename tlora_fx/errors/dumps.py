"""Folders that `tlora-fx compile` writes."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class DumpNotReadable(TloraError):
    """A folder holds no compiled model, or one that another version wrote.

    Write it with `tlora-fx compile jobs.yaml -o FOLDER`.
    """

    code = "T0601"


class DumpNotWritable(TloraError):
    """The folder for a compiled model cannot be written.

    Choose another folder with `-o`, or make room on the disk.
    """

    code = "T0602"
