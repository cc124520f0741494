"""What all tests share: no network, one thread, GPU tests skipped without a GPU, golden files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Read when the libraries are imported, so set before any test module is.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--accept`, which makes what was produced the expected text."""
    parser.addoption("--accept", action="store_true", help="rewrite golden files that differ")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread: workers share the cores, and sums do not depend on their number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with an accepted file: `golden("fused.txt", text)`.

    name    a path below tests/golden
    text    what the code made; with `--accept` it becomes the file
    """

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--accept"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.is_file():
            pytest.fail(f"tests/golden/{name} does not exist; look at the text, then --accept it")
        assert text == path.read_text(encoding="utf-8"), f"tests/golden/{name}: see pytest --accept"

    return check
