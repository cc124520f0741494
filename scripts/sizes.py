"""Print the lines of each room: code of the product, code of the tests, and text of the docs.

    python scripts/sizes.py

A line of code is a line of Python that is no docstring, no comment and not blank; imports count. A
line of text is a line of Markdown that is not blank. Below the table stand the modules of the
product that one module alone imports, which lies in the same folder: each may be a section of that
one. A module that only its package hands on is not among them, nor is a package.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
#: These rooms lie beside `tlora_fx`, which holds symlinks to them.
BESIDE = ("passes", "codegen", "planners")
PRODUCT = ("tlora_fx", *BESIDE)
PYTHON = (*PRODUCT, "tests", "benchmarks", "examples", "scripts")
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Lines of Python that carry code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                    lines -= {*range(docstring.lineno, (docstring.end_lineno or 0) + 1)}
    return sum(bool(line.strip()) for at, line in enumerate(text.split("\n"), 1) if at in lines)


def files(folder: str, pattern: str) -> Iterator[Path]:
    """Files below a folder, relative to the root; what is reached by a symlink is left out."""
    for path in sorted((ROOT / folder).rglob(pattern)):
        found = path.relative_to(ROOT)
        if not any((ROOT / parent).is_symlink() for parent in found.parents):
            yield found


def place_of(path: Path) -> tuple[str, str]:
    """The room of a Python file, and whether it is product, tests or something else."""
    top, *inside = path.parts[:-1]
    if top in BESIDE:
        return top, "product"
    if top in {"tlora_fx", "tests"}:
        return inside[0] if inside else "(no room)", "product" if top == "tlora_fx" else "tests"
    return top, "else"


def with_one_importer() -> Iterator[tuple[str, str]]:
    """Modules that one module alone imports, which lies beside them; each with that one."""
    graph = grimp.build_graph("tlora_fx", cache_dir=None)
    for module in sorted(graph.modules):
        importers = graph.find_modules_that_directly_import(module)
        packages = {name.rpartition(".")[0] for name in (module, *importers)}
        if len(importers) == 1 and len(packages) == 1 and not graph.find_children(module):
            (importer,) = importers
            yield module, importer


def main() -> None:
    """Print all counts as one table, and the modules with one importer."""
    counts: Counter[tuple[str, str]] = Counter()
    for folder in PYTHON:
        for path in files(folder, "*.py"):
            counts[place_of(path)] += code_lines((ROOT / path).read_text(encoding="utf-8"))
    for path in files("", "*.md"):
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        if path.parts[0] in {"docs", "examples", "benchmarks"} or len(path.parts) == 1:
            room = path.parts[0] if len(path.parts) > 1 else "(no room)"
            counts[room, "docs"] += sum(bool(line.strip()) for line in lines)
    kinds = ("product", "tests", "else", "docs")
    table = Table("room", box=None, pad_edge=False)
    for kind in kinds:
        table.add_column(kind, justify="right")
    rooms = {room for room, _ in counts}
    for room in sorted(rooms, key=lambda name: [-counts[name, kind] for kind in kinds]):
        table.add_row(room, *(f"{counts[room, kind]:,}" for kind in kinds))
    sums = [sum(counts[room, kind] for room in rooms) for kind in kinds]
    table.add_row("all", *(f"{total:,}" for total in sums), style="bold")
    console = Console()
    console.print(table)
    pairs = list(with_one_importer())
    console.print(f"\n{len(pairs)} modules with one importer, which lies beside them")
    for module, importer in pairs:
        console.print(f"  {module} <- {importer.rpartition('.')[2]}", highlight=False)


if __name__ == "__main__":
    main()
