"""Local files to upload with a job file, and the names by which that calls them.

A job file names data relative to its own folder, wherever a command is given. A user names a file
as the job file does, or as their shell completes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tlora_fx.config.job_file import read_yaml
from tlora_fx.config.paths import is_file
from tlora_fx.errors import TloraError, UploadRefused


def uploads(job_file: Path, specs: list[str]) -> dict[str, Path]:
    """The files to upload by their names in the job file.

    specs    FILE, or NAME=FILE; FILE is looked for below the job file's folder and from here
    raises   UploadRefused where there is none, or two
    """
    named = sorted(set(_texts(job_file)))
    files = {}
    for spec in specs:
        name, equals, source = spec.partition("=")
        path = _find(job_file, Path(source if equals else spec))
        files[_normal(name) if equals else _name_of(job_file, path, spec, named)] = path
    return files


def _find(job_file: Path, written: Path) -> Path:
    """The file that a user means."""
    beside = job_file.parent / written
    there = [path for path in (beside, written) if is_file(path)]
    if not there:
        raise UploadRefused(
            "there is no such file to upload",
            file=written,
            expected=f"a file below {job_file.parent.absolute()}, or below {Path.cwd()}",
            help="name one that is there: --upload FILE, or --upload NAME=FILE",
        )
    if len(there) == 2 and not beside.samefile(written):
        raise UploadRefused(
            "two files are called so",
            file=written,
            found=f"{beside.absolute()} and {written.absolute()}",
            help=f"say which one the job file means: --upload {written}={beside.absolute()}",
        )
    return there[0]


def _name_of(job_file: Path, path: Path, written: str, named: list[str]) -> str:
    """What the job file calls a file: by its place, else by its last name alone."""
    real, folder = path.resolve(), job_file.parent.resolve()
    for name in named:
        if _is_below(name) and (folder / name).resolve() == real:
            return _normal(name)
    if real.is_relative_to(folder):
        return real.relative_to(folder).as_posix()
    alike = [name for name in named if _is_below(name) and PurePosixPath(name).name == path.name]
    if len(alike) == 1:
        return _normal(alike[0])
    return _normal(written) if _is_below(written) else path.name


def _is_below(name: str) -> bool:
    """Whether a text may name an uploaded file: a path below the job file."""
    path = PurePosixPath(name)
    return "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _normal(name: str) -> str:
    return PurePosixPath(name).as_posix()


def _texts(job_file: Path) -> Iterator[str]:
    """All texts in a job file; none where it is no YAML, which the service tells."""
    try:
        left = [read_yaml(job_file).value]
    except TloraError:
        return
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
