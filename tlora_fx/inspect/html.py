"""One HTML file that shows a compilation: every pass, every module, every node, offline.

The page holds its data, style and scripts. Its content policy lets these scripts run and nothing
else, and allows no request; text from job files is only ever set as text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from tlora_fx.durable import replace_file
from tlora_fx.errors import DumpNotWritable
from tlora_fx.inspect.html_data import page_data
from tlora_fx.inspect.program import Stage

TITLE = "tlora-fx"
TEMPLATE = "page.html.j2"
STYLES = ("page.css", "tree.css", "side.css")
# Each script names only those before it.
SCRIPTS = (
    "dom", "words", "data", "items", "rows", "costs", "colours", "find", "tree_view", "layer_bars",
    "node_view", "code_view", "layout", "drawing", "main",
)  # fmt: skip
VENDOR = ("vendor/dagre/dagre.min.js",)


def write_html(stages: Sequence[Stage], path: Path, title: str = TITLE) -> None:
    """Write the page; the file is replaced at once.

    stages    what each pass left, in order; at least one
    raises    DumpNotWritable
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, render_html(stages, title).encode())
    except OSError as error:
        raise DumpNotWritable(
            "the page cannot be written",
            file=path,
            found=error,
            help="name another file with --html, or make room on the disk",
        ) from error


def render_html(stages: Sequence[Stage], title: str = TITLE) -> str:
    """The page as text."""
    assert stages, "a page shows at least one stage"
    assets = files("tlora_fx.inspect") / "assets"
    style = "\n".join(_text(assets / name) for name in STYLES)
    script = "\n".join(_script(assets / name) for name in (*VENDOR, *map(_own, SCRIPTS)))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(_text(assets / TEMPLATE)).render(
        title=title,
        style=style,
        script=script,
        data=page_data(stages),
        policy=_policy(style, script),
        licence=_text(assets / "vendor/dagre/LICENSE"),
    )


def _policy(style: str, script: str) -> str:
    """Allow this style and this script by their hashes, and nothing else."""
    return f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _script(file: Traversable) -> str:
    """A script without the line that would send a debugger for its source map."""
    text = _text(file)
    assert "</script" not in text, file.name
    return "\n".join(line for line in text.splitlines() if "sourceMappingURL=" not in line)


def _own(name: str) -> str:
    return f"js/{name}.js"


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")
