"""Docstrings of what others read name the thing itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "tlora_fx"
#: They begin a clause about the thing: a reader has the noun at its end, or never.
CLAUSES = re.compile(r"(What|Of|Let|So many)\b")
HOLDERS = (ast.stmt, ast.ExceptHandler, ast.match_case)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Place and docstring of a module, and of all public classes and functions in it."""
    below: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in below:
        # Expressions hold none, and are most of a tree.
        below += [each for each in ast.iter_child_nodes(node) if isinstance(each, HOLDERS)]
        name = getattr(node, "name", "")
        public = isinstance(node, DOCUMENTED) and not name.startswith("_")
        if public and (text := ast.get_docstring(node)) is not None:
            yield f"{path.relative_to(ROOT)}: {name or 'the module'}: {text}", text


def test_docstrings_begin_with_the_thing():
    """With a noun or a verb."""
    # rglob follows no links to folders; the rooms that stand beside are links here.
    rooms = [ROOT, *(folder for folder in ROOT.iterdir() if folder.is_symlink())]
    found = [each for room in rooms for path in room.rglob("*.py") for each in docstrings(path)]

    assert len(found) > 3000
    assert [place for place, text in found if CLAUSES.match(text)] == []
