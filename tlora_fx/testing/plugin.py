"""A pytest plugin: accepted texts, and check files (see `checks`), which it collects.

Name it in a conftest.py at the root of the tests: `pytest_plugins = ["tlora_fx.testing.plugin"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = "golden"
SUFFIX = ".tfx"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--accept`, which makes what was produced the expected text."""
    parser.addoption("--accept", action="store_true", help="rewrite golden files that differ")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with an accepted file: `golden("fused.txt", text)`.

    name    a path below the folder "golden" of the tests: of the nearest folder, from the test's
            file upwards, that has one; else beside the test's file
    text    what the code made; with `--accept` it becomes the file
    """
    folder = golden_folder(request.path.parent, request.config.rootpath)

    def check(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--accept"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.is_file():
            pytest.fail(f"{path} does not exist; look at the text, then --accept it")
        assert text == path.read_text(encoding="utf-8"), f"{path}: see pytest --accept"

    return check


def golden_folder(beside: Path, root: Path) -> Path:
    """The folder of accepted texts for a test in a folder."""
    above = [folder for folder in (beside, *beside.parents) if folder.is_relative_to(root)]
    folders = (folder / FOLDER for folder in above if (folder / FOLDER).is_dir())
    return next(folders, beside / FOLDER)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Take graph files that name a pipeline to run."""
    if file_path.suffix != SUFFIX or "# RUN:" not in file_path.read_text("utf-8", "replace"):
        return None
    file: pytest.Collector = CheckFile.from_parent(parent, path=file_path)
    return file


class CheckFile(pytest.File):
    """A check file: one test, or one for each of the parts that lines `// -----` part."""

    def collect(self) -> Iterator[pytest.Item]:
        """The tests, which are called as the file; further ones have a number."""
        from tlora_fx.graph_file import load_document, split_document

        for part in range(len(split_document(load_document(self.path)))):
            name = f"{self.path.stem}-{part + 1}" if part else self.path.stem
            yield CheckItem.from_parent(self, name=name, part=part)


class CheckItem(pytest.Item):
    """Runs one part of a check file."""

    def __init__(self, part: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.part = part

    def runtest(self) -> None:
        """Compare what the pipeline makes of the graphs with the checks."""
        from tlora_fx.testing.checks import run_check_file

        run_check_file(self.path, self.part)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:  # type: ignore[override]
        """Failure text, without the frames that found it."""
        return str(excinfo.value)
