"""Placeholders of SQL texts: `?` for sequences, `:name` for mappings, as sqlite3 documents them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("tlora_fx", "passes", "codegen", "planners", "benchmarks", "examples", "scripts")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
NUMBERED = re.compile(r"\?\d")
SQL = re.compile(r"\b(SELECT|INSERT|REPLACE|UPDATE|DELETE|WHERE|VALUES|SET|LIMIT)\b")


def numbered(source: str) -> list[int]:
    """Lines of texts in SQL that have numbered placeholders."""
    if not NUMBERED.search(source):
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if NUMBERED.search(node.value) and SQL.search(node.value)
    ]


def test_no_placeholder_has_a_number():
    """Python 3.12.0 to 3.12.3 take `?1` for a name, and names with a sequence for a mistake."""
    found = {str(path.relative_to(ROOT)): numbered(path.read_text("utf-8")) for path in SOURCES}

    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        'base.execute("SELECT * FROM jobs WHERE name = ?1", (name,))',
        'rows("SELECT * FROM jobs "\n    "WHERE (?1 IS NULL OR name = ?1)", name)',
        'rows(f"SELECT * FROM {table} WHERE name = ?1", name)',
    ],
)
def test_a_number_is_found_wherever_the_text_stands(source):
    """In one piece, in several, and between what is filled in."""
    assert numbered(source) == [1]


def test_what_is_no_sql_may_have_a_number():
    """Regular expressions do."""
    assert numbered(r'TAIL = re.compile(r"(.*\.)?1\.q_proj")') == []
