"""Facts about pipelines and graph files that need no torch; no pass is imported for them.

The text form of a pipeline is split into passes and options:
`drop-export-noise,fuse-backbone{max-jobs=8},lower-adapters`
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from tlora_fx.config.plugins import plugin_names
from tlora_fx.errors import GraphFileNotReadable, PipelineError, PluginBroken, nearest

_PASS_TEXT = re.compile(r"\s*([a-z0-9-]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")
PASSES = "tlora_fx.passes"


def require_extension(given: str | Path) -> None:
    """Refuse a Python file of --load that is not there; raises PluginBroken."""
    if Path(given).suffix == ".py" and not Path(given).is_file():
        raise PluginBroken(
            f"'{given}' cannot be loaded",
            found="no file of that name",
            help="name a Python file, or a module that Python finds",
        )


def split_pipeline(text: str) -> list[tuple[str, str]]:
    """The passes of a pipeline in order: name, and options as they are written.

    raises    PipelineError for what is no pipeline
    """
    passes: list[tuple[str, str]] = []
    position = 0
    while position < len(text.rstrip()):
        match = _PASS_TEXT.match(text, position)
        if match is None:
            raise PipelineError(
                "the pipeline cannot be read",
                at=text[position:],
                expected="name{option=value option=value},name,...",
                help="separate passes by commas, options by spaces",
            )
        passes.append((match[1], match[2] or ""))
        position = match.end()
    return passes


def require_known(names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a name that no pass has; raises PipelineError with the nearest one."""
    every = sorted(known)
    for name in names:
        if name not in every:
            raise PipelineError(
                f"there is no pass '{name}'",
                nearest=nearest(name, every),
                help="known passes: " + ", ".join(every),
            )


def require_option(name: str, option: str, known: Collection[str]) -> None:
    """Refuse an option that a pass has not; raises PipelineError with the nearest one."""
    if option not in known:
        raise PipelineError(
            f"pass '{name}' has no option '{option}'",
            nearest=nearest(option, known),
            help="its options: " + (", ".join(known) or "none"),
        )


def require_readable(pipeline: str | None, added: Sequence[str] = ()) -> None:
    """Refuse what is no pipeline, and passes and options that are not ours, before torch is there.

    added     passes as `--add-pass` names them; what cannot be read there is left to their reader
    raises    PipelineError
    """
    texts = [pipeline or "", *(text.rpartition("@")[0] for text in added)]
    wanted = [item for text in texts for item in split_pipeline(text)]
    if not wanted:
        return
    spec = find_spec(PASSES)
    folders = spec.submodule_search_locations if spec is not None else None
    ours = {name: options for folder in folders or () for name, options in passes_in(Path(folder))}
    require_known([name for name, _ in wanted], plugin_names(PASSES, ours))
    for name, options in wanted:
        for item in options.split() if name in ours else ():
            require_option(name, item.partition("=")[0], ours[name])


def passes_in(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Names and options of the passes in a folder's files, read without running them."""
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "name: ClassVar[str] =" not in text:
            continue
        for item in ast.parse(text).body:
            if isinstance(item, ast.ClassDef):
                yield from _pass_of(item)


def _pass_of(given: ast.ClassDef) -> Iterator[tuple[str, list[str]]]:
    """A class that names itself, and its fields as pipelines spell them."""
    fields = {
        line.target.id: line
        for line in given.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    named = fields.get("name")
    if named is not None and isinstance(named.value, ast.Constant):
        kept = [
            name for name, line in fields.items() if "ClassVar" not in ast.dump(line.annotation)
        ]
        yield str(named.value.value), [name.replace("_", "-") for name in kept]


def require_graph_file(path: Path) -> None:
    """Refuse a graph file that is not there, before torch is imported.

    raises    GraphFileNotReadable
    """
    # As `load_document` finds it.
    file = path if path.suffix == ".tfx" else path / "graph.tfx"
    if not file.is_file():
        raise GraphFileNotReadable(
            "there is no graph file",
            expected=file,
            found="a file whose name does not end in .tfx" if path.is_file() else None,
            help="name a file or folder that save_graphs, compile, a replay or a bisection wrote",
        )
