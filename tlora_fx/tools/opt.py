"""Run a pipeline on graphs that come from a file: nothing is traced, and no base is needed."""

from __future__ import annotations

from tlora_fx.errors import PipelineError
from tlora_fx.ir.graph import GroupGraph, JobGraph
from tlora_fx.pipeline import Event, GroupPass, JobPass, Pass, Runner
from tlora_fx.tools.bisect import run_everywhere


def run_on(graphs: JobGraph | GroupGraph, runner: Runner) -> None:
    """Run all passes of a runner's pipeline on graphs, which they rewrite in place.

    raises    TloraError of a pass or its checks; PipelineError for a pass that is not for such
              graphs
    """
    runner.start()
    with runner.phase("opt"):
        for place, item in enumerate(runner.pipeline.passes, 1):
            _require_fitting(item, graphs)
            if isinstance(graphs, GroupGraph):
                run_everywhere(runner, place, graphs)
            else:
                runner.run_one(Event(place, item, graphs.subject, graphs))
        for instrument in runner.instruments:
            instrument.finished(graphs)


def _require_fitting(item: Pass, graphs: JobGraph | GroupGraph) -> None:
    if isinstance(item, GroupPass) and isinstance(graphs, JobGraph):
        found, needed = "one job's graph", "a group's graphs"
    elif isinstance(item, JobPass) and isinstance(graphs, GroupGraph) and graphs.fused:
        found, needed = "a group that is fused", "graphs of jobs, before they are fused"
    else:
        return
    raise PipelineError(
        f"pass '{item.name}' does not run on these graphs",
        expected=needed,
        found=found,
        help="name a graph file of an earlier stage, or leave the pass out",
    )
