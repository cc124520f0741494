"""Folders that `tlora-fx compile` writes, and looking into them."""

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


class NodeNotFound(TloraError):
    """`tlora-fx inspect --node` was given a name that no node has.

    Name a module by its path in the base (`model.layers.17.mlp.up_proj`, or its last parts), a node
    as the code names it (`--code` shows it), or a provenance key.
    """

    code = "T0603"


class StateNotFound(TloraError):
    """A view asks for what a pass left, and there is no such pass, or it was not written down.

    Compile with `--states` to keep what every pass leaves, or inspect the job file itself.
    """

    code = "T0604"


class InspectMisuse(TloraError):
    """Options of `tlora-fx inspect` that do not go together, or one that lacks what it needs.

    Ask for one view at a time.
    """

    code = "T0605"
