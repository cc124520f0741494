"""Graph files, replay folders and bisections."""

from __future__ import annotations

from tlora_fx.errors.compiling import CompileError


class GraphNotStorable(CompileError):
    """A graph holds something that a graph file cannot keep: a Python function, or an object.

    Call operators of torch.ops, and hold numbers, text, tuples and nodes in arguments and tags.
    """

    code = "T0227"


class GraphFileNotReadable(CompileError):
    """A folder holds no graphs, or the file is damaged, or another version wrote it.

    Operators that another package registers are known once that package is imported.
    """

    code = "T0228"


class ReplayNotReadable(CompileError):
    """A folder is no replay folder, or its files are damaged.

    tlora-fx writes one when a pass fails; the error's last lines name it.
    """

    code = "T0229"


class BisectFails(CompileError):
    """A bisection cannot go on: its check cannot be run, or gives another verdict when run again.

    The command exits with 0 where the graphs are good, 1 to 124 where they are bad, 125 where it
    cannot tell; 126 and above stop the bisection.
    """

    code = "T0230"
