"""What the operators' code calls, read from its source: more than runs, never less."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

PACKAGE = "tlora_fx.ops"
OPERATOR = re.compile(r"(?:tlora_fx::)?([a-z0-9_]+)$")
#: What only looks at shapes, or at costs.
FAKES = frozenset({"register_fake", "register_flop_formula"})


def calls(folder: Path, operators: frozenset[str]) -> nx.DiGraph:
    """Who refers to whom: "module.name" where a module defines it, "::name" of operators.

    folder      of the package `tlora_fx.ops`
    operators   names that are registered
    """
    trees = {_module(folder, path): ast.parse(path.read_text()) for path in folder.rglob("*.py")}
    found = nx.DiGraph()
    for module, tree in trees.items():
        known = dict(_imported(tree)) | {
            name: f"{module}.{name}" for one in tree.body for name in _defined(one)
        }
        for one in tree.body:
            if not isinstance(one, ast.Import | ast.ImportFrom) and not _is_fake(one):
                _add(found, module, one, known, operators)
        for name, target in _imported(tree):
            found.add_edge(f"{module}.{name}", target)
    return found


def _module(folder: Path, path: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join([PACKAGE, *(part for part in parts if part != "__init__")])


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for one in tree.body:
        if isinstance(one, ast.ImportFrom) and (one.module or "").startswith(PACKAGE):
            for alias in one.names:
                yield alias.asname or alias.name, f"{one.module}.{alias.name}"


def _defined(one: ast.stmt) -> Iterator[str]:
    if isinstance(one, ast.FunctionDef | ast.ClassDef):
        yield one.name
    for target in one.targets if isinstance(one, ast.Assign) else ():
        yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _is_fake(one: ast.stmt) -> bool:
    decorators = one.decorator_list if isinstance(one, ast.FunctionDef) else []
    words = {
        word for decorator in decorators for word in re.findall(r"\w+", ast.unparse(decorator))
    }
    return bool(words & FAKES)


def _add(
    found: nx.DiGraph, module: str, one: ast.stmt, known: dict[str, str], operators: frozenset[str]
) -> None:
    """A definition refers to what stands in it; a registration makes its operators do so."""
    referred = set(_referred(one, known, operators))
    sources = {f"{module}.{name}" for name in _defined(one)}
    sources |= {f"::{name}" for name in _registered(one) if name in operators}
    if isinstance(one, ast.Expr | ast.For):
        # `segment_read.register_autograd(backward)`: who is registered at refers to the rest.
        sources |= {other for other in referred if not other.startswith("::")}
    if isinstance(one, ast.FunctionDef):
        referred |= {f"{module}.{one.name}"}
    found.add_edges_from((source, other) for source in sources for other in referred)


def _registered(one: ast.stmt) -> Iterator[str]:
    """Operators that a statement gives something to run."""
    parts = one.decorator_list if isinstance(one, ast.FunctionDef) else [one]
    wanted = isinstance(one, ast.FunctionDef | ast.Expr | ast.For)
    for part in parts if wanted else ():
        for text in ast.walk(part):
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                name = OPERATOR.match(text.value)
                if name is not None:
                    yield name.group(1)


def _referred(one: ast.stmt, known: dict[str, str], operators: frozenset[str]) -> Iterator[str]:
    for node in ast.walk(one):
        if isinstance(node, ast.Name) and node.id in known:
            yield known[node.id]
        if isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            if base in known:
                yield f"{known[base]}.{node.attr}"
            if base in ("ops", "torch.ops.tlora_fx") and node.attr in operators:
                yield f"::{node.attr}"
