r"""Check files: what a pass must make of a graph, in the lines of LLVM's FileCheck.

A check file is a graph file, written by hand, with a pipeline and checks in comments:

    # RUN: cse
    graphs(3)
    job("", 0)
    group(0, facts=["fuse-backbone"])
    mode(0)
    with graph(0, mode=0):
     with root():
      x: f32[2, 3] = input() @ shared("")
      one = aten.sin.default(x) @ shared("")
      two = aten.sin.default(x) @ shared("")
      sum = aten.add.Tensor(one, two) @ shared("")
      output = returns(sum)
    # CHECK: [[ONE:\b\w+]]: f32[2, 3] = aten.sin.default(x)
    # CHECK-NOT: aten.sin

pytest collects such files, `*.tfx` with a line `# RUN:`, where the plugin is named. The package
`filecheck` judges: `[[NAME:regex]]` captures, CHECK-DAG stands for any order, CHECK-NOT for none.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

from filecheck.matcher import Matcher
from filecheck.options import Options

RUN = "# RUN:"


def check_text(text: str, checks: str | Path) -> None:
    """Assert that a text holds what checks say.

    text     such as `graph_text(group)`, `model.source`
    checks   lines with CHECK, or the file that they stand in
    raises   AssertionError, with the check that fails and where in the text it stood
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text"
        file.write_text(text, encoding="utf-8")
        if isinstance(checks, str):
            named = Path(folder) / "checks"
            named.write_text(checks, encoding="utf-8")
        else:
            named = checks
        with contextlib.redirect_stderr(io.StringIO()) as told:
            failed = Matcher.from_opts(Options(str(named), str(file))).run()
    if failed:
        raise AssertionError(f"{told.getvalue().strip()}\n\n{text}")


def run_check_file(path: Path, part: int = 0) -> None:
    """Run a check file's pipeline on its graphs, and compare what comes out with its checks.

    part     of a file that holds several, parted by lines `// -----`: which one
    raises   AssertionError as `check_text`; TloraError for graphs or passes that are wrong
    """
    from tlora_fx.graph_file import from_document, graph_text, load_document, split_document
    from tlora_fx.passes import find_passes
    from tlora_fx.pipeline import Runner, parse_pipeline
    from tlora_fx.pipeline.facts import held_facts
    from tlora_fx.tools.opt import run_on

    find_passes()
    parts = split_document(load_document(path))
    graphs = from_document(parts[part])
    held = held_facts(graphs)
    passes = parse_pipeline(pipeline_of(parts[part].text), held)
    run_on(graphs, Runner(passes, held=held))
    check_text(graph_text(graphs, tables=False), path if len(parts) == 1 else parts[part].text)


def pipeline_of(text: str) -> str:
    """The pipeline of a check file, "" for a file that is none."""
    lines = (line.removeprefix(RUN) for line in text.splitlines() if line.startswith(RUN))
    return next(lines, "").strip()
