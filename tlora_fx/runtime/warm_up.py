"""Fill the caches that a start reads, without training.

Compiling jobs and reading their data keeps traced graphs, results of checks and tokens. The rest is
kept by what runs: Triton keeps kernels, Inductor keeps compiled layers. So one round runs, on the
rows with which training begins, and what it makes of the adapters is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tlora_fx.codegen.importing import TRITON_CACHE
from tlora_fx.codegen.loading import kernel_folder
from tlora_fx.config.paths import with_home
from tlora_fx.cost.plan import Plan
from tlora_fx.host import environment
from tlora_fx.host.phases import phase
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.numerics.probe_cache import is_kept, probes_folder
from tlora_fx.parallel.apply import require_nano
from tlora_fx.runtime.checkpoints.digests import DIGESTS
from tlora_fx.runtime.checks import longest_row
from tlora_fx.runtime.data.encode_data import tables_folder
from tlora_fx.runtime.data.samples import JobData
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.group_step import GroupStep, StepOptions
from tlora_fx.runtime.identity import describe_jobs, describe_run
from tlora_fx.runtime.trainer import require_runnable, try_base, warn_before_training
from tlora_fx.tracing.trace_cache import base_key, traces_folder


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder in which results of starts are kept.

    holds     what it keeps
    folder    where it lies
    pattern   of its entries' paths
    variable  of the environment that limits its size, "" where none does
    """

    holds: str
    folder: Path
    pattern: str
    variable: str = ""

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return not self.variable or environment.max_bytes(self.variable) > 0

    def entries(self) -> int:
        """How many results it holds."""
        return sum(not path.name.startswith(".") for path in self.folder.glob(self.pattern))


def caches(*, gpu: bool, compiled: bool) -> list[Cache]:
    """The caches of a start.

    gpu        on a GPU: with kernels
    compiled   with layers that torch.compile compiles
    """
    found = [
        Cache("traced graphs", traces_folder(), "*.json", environment.TRACE_CACHE),
        Cache("results of checks", probes_folder(), "*.json"),
        Cache("tokens of data", tables_folder(), "*/", environment.DATA_CACHE),
        Cache("digests of large files", DIGESTS.folder, "*.json"),
    ]
    if gpu:
        triton = os.environ.get(TRITON_CACHE) or with_home("~/.triton/cache")
        found.append(Cache("generated kernels", kernel_folder(), "*.py"))
        found.append(Cache("compiled kernels", Path(triton), "*/"))
    if compiled:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        found.append(Cache("compiled layers", Path(cache_dir()), "fxgraph/*/*/"))
    return found


def warm_up(
    model: SuperModel,
    data: Mapping[str, JobData],
    plan: Plan,
    device: torch.device,
    options: StepOptions,
    warn: Callable[[str], None],
) -> None:
    """Load the base as training does, check it, and run one round, which changes no file of jobs.

    warn      called with a line where the base could not be checked
    raises    TloraError, as a trainer does before and in its first round
    """
    require_nano(plan, plan.nano_batches > 1)
    steps = {name: samples.steps for name, samples in data.items()}
    group = GroupStep(model, plan, device, options, steps)
    jobs = [model.jobs[index] for index in model.members.values()]
    ranks = Ranks(group.mesh)
    ranks.together(lambda: require_runnable(group, jobs, data))
    if group.mesh.leader:
        warn_before_training(model, data, warn)
    group.prepare(
        probe=lambda base: try_base(group, ranks, data, base, warn),
        # An adapter's own start does not matter here; some take minutes.
        starts=lambda: {name: {} for name in data},
        largest_row=longest_row(jobs, data, group.cutting, plan.parts),
    )
    group.expect({model.members[name]: samples for name, samples in data.items()})
    with phase("checkpoint"):
        describe_run(model, jobs, data)
    with phase("first step"):
        _run_round(group, data)
        ranks.tell_all(None)  # the last one is done


def digest_data(model: SuperModel, data: Mapping[str, JobData]) -> None:
    """Keep the digests by which a run is known again, without those of the base."""
    with phase("data"):
        describe_jobs([model.jobs[index] for index in model.members.values()], data)


def _run_round(group: GroupStep, data: Mapping[str, JobData]) -> None:
    """Each job's first step; and a forward without a backward where a job evaluates."""
    batches = {name: samples.step(0) for name, samples in data.items()}
    outputs = group.accumulate(batches)
    if error := next((output.error for output in outputs.values() if output.error), None):
        raise error
    assert group.runner is not None
    members = group.model.members
    if any(group.model.jobs[members[name]].eval_strategy != "no" for name in data):
        rows = group.rows_of({members[name]: batch for name, batch in batches.items()})
        group.runner.evaluate(rows)
    group.apply({name: {} for name in batches})


def not_kept(model: SuperModel, *, warmed: bool, compiled: bool) -> Iterator[str]:
    """Work that the next start has to do again, and why; a line each.

    warmed     `warm_up` was called
    compiled   layers are to be compiled
    """
    if base_key(model.backbone) is None:
        yield "traced graphs: the base runs code that no installed library has"
    if warmed and not is_kept(model.backbone):
        yield "the check of the base's weights: their files do not lie in a folder"
    if not warmed:
        yield "the check of the base's weights, and kernels: this machine has no GPU"
    if not warmed and compiled:
        yield "compiled layers: this machine has no GPU"


def counted(before: Sequence[int], known: Sequence[Cache]) -> Iterator[tuple[Cache, int, int]]:
    """Each cache, with the number of its entries, and how many of them are new.

    before    `Cache.entries` of each, as it was
    """
    for cache, then in zip(known, before, strict=True):
        now = cache.entries()
        yield cache, now, max(0, now - then)
