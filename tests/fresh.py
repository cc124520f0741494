"""Python programs as a user runs them, in processes that need not import torch and transformers.

They are forked from the server of tests/parallel/processes.py, so what a program finds imported is
no subject of such a test, nor is its hash seed; where they are, a test starts an interpreter.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import traced_once
from tests.parallel.processes import forkserver_context


class Program:
    """A program that runs: `Program("-m", "tlora_fx", "train", ...)`, as the words after `python`.

    words   "-m", a module and its arguments, or "-c" and code
    cwd     the folder it runs in, by default this process's
    env     its variables, by default this process's
    """

    def __init__(
        self, *words: Any, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.words = tuple(map(str, words))
        self.files = [Path(tempfile.mkstemp()[1]) for _ in ("stdout", "stderr")]
        given = (self.words, str(cwd or Path.cwd()), dict(env or os.environ), self.files)
        self.process = forkserver_context().Process(target=_become, args=given)
        self.process.start()

    @property
    def pid(self) -> int:
        """The number of its process."""
        return int(self.process.pid)

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        code: int | None = self.process.exitcode
        return code

    def wait(self, timeout: float = 1200) -> subprocess.CompletedProcess[str]:
        """Wait for its end; its exit code and all that it printed.

        raises   subprocess.TimeoutExpired; it is killed then
        """
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            raise subprocess.TimeoutExpired(self.words, timeout)
        out, err = (file.read_text() for file in self.files)
        for file in self.files:
            file.unlink()
        return subprocess.CompletedProcess(self.words, self.process.exitcode, out, err)


def run(
    *words: Any, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` does with `capture_output` and `text`."""
    return Program(*words, cwd=cwd, env=env).wait()


def _become(words: tuple[str, ...], folder: str, env: dict[str, str], files: list[Path]) -> None:
    """Be that program, in a process that has just been forked."""
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    traced_once.install()
    kind, what, *more = words
    sys.path[0] = folder
    sys.argv = [what if kind == "-m" else "-c", *more]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(what, "<string>", "exec"), vars(main))
