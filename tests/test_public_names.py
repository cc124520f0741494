"""docs/public-names.md lists what packages may import; docs and examples import nothing else."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tlora_fx.config.other_kinds import ADAPTERS
from tlora_fx.config.pipeline_text import PASSES
from tlora_fx.ops.job_operator import OPERATORS
from tlora_fx.ops.kernels.templates import KERNELS
from tlora_fx.planners.protocol import PLANNERS
from tlora_fx.scheduler.policies import ENTRY_POINTS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "public-names.md").read_text(encoding="utf-8")
TEXTS = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
    ROOT / "README.md",
]
FROM = re.compile(r"^ *from (tlora_fx(?:\.\w+)*) import (\([^)]*\)|.*)$", flags=re.MULTILINE)
IMPORT = re.compile(r"^ *import (tlora_fx(?:\.\w+)*)\b", flags=re.MULTILINE)
ATTRIBUTE = re.compile(r"(?<![\w.])tlora_fx\.(\w+)")
#: All of their public names are on the page.
WHOLE = ("tlora_fx", "tlora_fx.rewriting", "tlora_fx.testing")


def listed() -> dict[str, set[str]]:
    """Modules and names of the page's tables."""
    found = defaultdict(set)
    for line in re.findall(r"^\| `tlora_fx.*", PAGE.partition("## Entry points")[0], re.MULTILINE):
        module, names = re.match(r"\| `([\w.]+)` \| (.*?) \|", line).groups()
        found[module] |= set(re.findall(r"`(\w+)`", names))
    errors = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    found["tlora_fx.errors"] |= set(re.findall(r"^## T\d+ (\w+)", errors, re.MULTILINE))
    return dict(found)


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Modules and names that code imports; a module by itself has the name ""."""
    for module, names in FROM.findall(text):
        for name in re.sub(r"#.*|[()]", "", names).split(","):
            if name.strip():
                yield module, name.split()[0]
    for module in IMPORT.findall(text):
        yield module, ""
    if re.search(r"^ *import tlora_fx$", text, flags=re.MULTILINE):
        for line in text.splitlines():
            if not re.match(r" *(from|import) ", line):
                yield from (("tlora_fx", name) for name in ATTRIBUTE.findall(line))


def code_of(path: Path) -> str:
    """The code of a file, or of a page's blocks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    return "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))


LISTED = listed()
IMPORTERS = [path for path in TEXTS if any(imported(code_of(path)))]


@pytest.mark.parametrize("module", LISTED)
def test_every_public_name_can_be_imported(module):
    """The page names nothing that has gone."""
    home = import_module(module)

    assert [name for name in LISTED[module] if not hasattr(home, name)] == []


#: What the page listed when this version was released.
FIRST = "0.2.0"
RELEASED = ROOT / "tests" / "golden" / f"public-names-{FIRST}.txt"


def names_of(listing):
    """Pairs of a module and a name."""
    return {(module, name) for module, names in listing.items() for name in names}


def test_the_page_says_since_when_a_name_is_there():
    """Those that were not in the first release with such a page, with a later version."""
    released = {tuple(line.split()) for line in RELEASED.read_text("utf-8").splitlines()}
    later = set()
    for since, module, names in re.findall(
        r"^\| (\d[\d.]+) \| `([\w.]+)` \| (.*?) \|", PAGE, re.MULTILINE
    ):
        assert since > FIRST
        later |= {(module, name) for name in re.findall(r"`(\w+)`", names)}
    errors = {pair for pair in names_of(LISTED) if pair[0] == "tlora_fx.errors"}

    assert names_of(LISTED) - released - errors == later


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_name_of_the_last_release_is_still_found():
    """Where it was, with a warning or without."""
    lines = RELEASED.read_text("utf-8").splitlines()
    pairs = [line.split() for line in lines]

    assert [pair for pair in pairs if not hasattr(import_module(pair[0]), pair[1])] == []


@pytest.mark.parametrize("path", IMPORTERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_and_examples_import_public_names_alone(path):
    """What a reader copies from a page or an example is promised."""
    public = {(module, name) for module, names in LISTED.items() for name in names}
    public |= {(module, "") for module in LISTED}
    public |= {tuple(module.rsplit(".", 1)) for module in LISTED if "." in module}

    assert sorted(set(imported(code_of(path))) - public) == []


@pytest.mark.parametrize("module", WHOLE)
def test_the_page_lists_all_of_a_public_package(module):
    """What a package exports is on the page."""
    assert LISTED[module] == set(import_module(module).__all__)


def test_the_page_lists_the_groups_of_entry_points():
    """Those that the code asks for, and no other."""
    groups = re.findall(r"^\| `([\w.]+)`", PAGE.partition("## Entry points")[2], re.MULTILINE)

    assert set(groups) == {PASSES, PLANNERS, ENTRY_POINTS, ADAPTERS, OPERATORS, KERNELS}


def test_an_import_that_is_not_public_is_found():
    """The readers of this test see imports in every form."""
    several = "from tlora_fx.a import (\n    b,  # why\n    c as d,\n)\n"
    code = f"import tlora_fx\n{several}  tlora_fx.e(1)\n"

    assert set(imported(code)) == {
        ("tlora_fx", ""),
        ("tlora_fx", "e"),
        ("tlora_fx.a", "b"),
        ("tlora_fx.a", "c"),
    }
