"""Gather what `make docs` makes a site of: all pages, and a reference out of docstrings.

    python scripts/make_docs.py build/docs/pages && mkdocs build --strict

Pages keep their places, so that links between them hold; files that they link to come along, and a
folder that they link to gets a page with its files. mkdocs reads a folder of nothing but pages.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "examples/README.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "docs/**/*.md",
)
#: Pages of the reference: their modules, in the order of the page.
REFERENCE: Mapping[str, tuple[str, ...]] = {
    "compiling": ("tlora_fx.compiler", "tlora_fx.model.supermodel", "tlora_fx.model.batch"),
    "jobs": (
        "tlora_fx.config.job",
        "tlora_fx.config.base_spec",
        "tlora_fx.config.data_spec",
        "tlora_fx.config.job_file",
    ),
    "training": (
        "tlora_fx.api.train",
        "tlora_fx.api.results",
        "tlora_fx.runtime.trainer",
        "tlora_fx.runtime.callbacks",
        "tlora_fx.backend",
        "tlora_fx.integrations.trl",
    ),
    "graphs": (
        "tlora_fx.ir.graph",
        "tlora_fx.ir.lora_sites",
        "tlora_fx.ir.shapes",
        "tlora_fx.ir.storage",
        "tlora_fx.graph_file",
    ),
    "passes": (
        "tlora_fx.pipeline",
        "tlora_fx.pipeline.passes",
        "tlora_fx.pipeline.facts",
        "tlora_fx.pipeline.registry",
        "tlora_fx.pipeline.instrument",
    ),
    "rewriting": (
        "tlora_fx.rewriting.building",
        "tlora_fx.rewriting.patterns",
        "tlora_fx.rewriting.matching",
        "tlora_fx.rewriting.rewriter",
        "tlora_fx.rewriting.outlining",
    ),
    "testing": ("tlora_fx.testing.equivalence", "tlora_fx.testing.plugin"),
    "inspecting": (
        "tlora_fx.inspect.program",
        "tlora_fx.inspect.schema",
        "tlora_fx.inspect.cost",
        "tlora_fx.inspect.networks",
        "tlora_fx.inspect.html",
        "tlora_fx.inspect.dump",
        "tlora_fx.tools.explain",
        "tlora_fx.tools.replay",
    ),
    "operators": ("tlora_fx.ops.lora", "tlora_fx.ops.attention", "tlora_fx.ops.segments"),
    "kernels": ("tlora_fx.codegen.spec", "tlora_fx.codegen.kernels"),
    "planning": ("tlora_fx.planners.protocol", "tlora_fx.cost.plan", "tlora_fx.scheduler.policies"),
}
# Docstrings align their columns.
_STYLE = ".doc-contents > p { font-family: monospace; font-size: 75%; white-space: pre-wrap; }\n"
_LINK = re.compile(r"\]\((?P<path>[^)#:\s]+)(?P<rest>#[^)]*)?\)")
_FENCE = re.compile(r"(```.*?```)", re.DOTALL)


def gather(target: Path) -> list[Path]:
    """Fill a folder with all pages; what was in it goes.

    returns   the pages, relative to the folder
    """
    shutil.rmtree(target, ignore_errors=True)
    sources = [path.relative_to(ROOT) for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    for source in sources:
        text = (ROOT / source).read_text(encoding="utf-8")
        _write(target / source, _with_linked(target, source, text))
    for name, text in _reference():
        _write(target / "reference" / name, text)
    _write(target / "reference" / "reference.css", _STYLE)
    return sorted(path.relative_to(target) for path in target.rglob("*.md"))


def _with_linked(target: Path, source: Path, text: str) -> str:
    """A page's text; the files that it links to come along, links to folders name their page."""

    def follow(link: re.Match[str]) -> str:
        path = (ROOT / source.parent / link["path"]).resolve()
        if path.is_dir():
            _write_index(target, path.relative_to(ROOT))
            return f"]({link['path'].rstrip('/')}/index.md{link['rest'] or ''})"
        if path.is_file() and path.suffix != ".md":
            copy = target / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        return link[0]

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(follow, part) for part in parts)


def _write_index(target: Path, folder: Path) -> None:
    """A page that shows a folder: links to its pages, and the text of its other files."""
    lines = [f"# {folder}", ""]
    for path in sorted((ROOT / folder).rglob("*")):
        name = path.relative_to(ROOT / folder)
        if path.suffix == ".md":
            title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            lines.append(f"- [{title}]({name})")
        elif path.suffix in {".py", ".toml"}:
            code = path.read_text(encoding="utf-8").rstrip()
            lines += [f"## {name}", "", f"```{path.suffix[1:]}", code, "```", ""]
    _write(target / folder / "index.md", "\n".join(lines) + "\n")


def _reference() -> Iterator[tuple[str, str]]:
    """Names and texts of the reference's pages."""
    links = [f"- [{name}]({name}.md): {', '.join(REFERENCE[name])}" for name in REFERENCE]
    yield "index.md", "\n".join(["# Reference", "", "Made from docstrings.", "", *links, ""])
    for name, modules in REFERENCE.items():
        directives = [f"## {module}\n\n::: {module}\n" for module in modules]
        yield f"{name}.md", "\n".join([f"# {name.capitalize()}", "", *directives])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main() -> int:
    """Gather into the folder that the command line names."""
    (target,) = sys.argv[1:]
    print(f"{len(gather(Path(target)))} pages in {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
