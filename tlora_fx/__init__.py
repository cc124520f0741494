"""Many LoRA jobs as one torch.fx graph: each trains as it would alone.

The names below are the public face. They are imported when they are first used (PEP 562), so that
`import tlora_fx` costs nothing and a mistake in a job file is shown before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tlora_fx.host.environment import settle_products
from tlora_fx.host.moved import find_moved_modules
from tlora_fx.host.version import __version__

if TYPE_CHECKING:
    from tlora_fx.api.results import JobResult, Results
    from tlora_fx.api.sweep import sweep
    from tlora_fx.api.train import train
    from tlora_fx.compiler import compile, run_passes, trace
    from tlora_fx.config.job import BaseSpec, DataSpec, Job
    from tlora_fx.config.job_file import JobFile, load_job_file
    from tlora_fx.errors import TloraError
    from tlora_fx.ir.graph import OpenSlots
    from tlora_fx.model.supermodel import SuperModel
    from tlora_fx.runtime.callbacks import TrainerCallback
    from tlora_fx.runtime.compiled_folder import load
    from tlora_fx.runtime.data.samples import Sample
    from tlora_fx.runtime.group_step import GroupStep, StepOptions
    from tlora_fx.runtime.rounds.compiled_layers import CompiledLayers
    from tlora_fx.runtime.sampling.sampler import Completion, Sampler
    from tlora_fx.runtime.sampling.vllm import VllmSampler
    from tlora_fx.runtime.step_batches import Batch
    from tlora_fx.runtime.trainer import Trainer, TrainerOptions
    from tlora_fx.tools.explain import why_not

__all__ = [
    "BaseSpec",
    "Batch",
    "CompiledLayers",
    "Completion",
    "DataSpec",
    "GroupStep",
    "Job",
    "JobFile",
    "JobResult",
    "OpenSlots",
    "Results",
    "Sample",
    "Sampler",
    "StepOptions",
    "SuperModel",
    "TloraError",
    "Trainer",
    "TrainerCallback",
    "TrainerOptions",
    "VllmSampler",
    "__version__",
    "compile",
    "load",
    "load_job_file",
    "run_passes",
    "sweep",
    "trace",
    "train",
    "why_not",
]

# No name here may also be the name of a submodule: importing the submodule would replace it.
_HOMES = {
    "BaseSpec": "tlora_fx.config.job",
    "Batch": "tlora_fx.runtime.step_batches",
    "CompiledLayers": "tlora_fx.runtime.rounds.compiled_layers",
    "Completion": "tlora_fx.runtime.sampling.sampler",
    "DataSpec": "tlora_fx.config.job",
    "GroupStep": "tlora_fx.runtime.group_step",
    "Job": "tlora_fx.config.job",
    "JobFile": "tlora_fx.config.job_file",
    "JobResult": "tlora_fx.api.results",
    "OpenSlots": "tlora_fx.ir.graph",
    "Results": "tlora_fx.api.results",
    "Sample": "tlora_fx.runtime.data.samples",
    "Sampler": "tlora_fx.runtime.sampling.sampler",
    "StepOptions": "tlora_fx.runtime.group_step",
    "SuperModel": "tlora_fx.model.supermodel",
    "TloraError": "tlora_fx.errors",
    "Trainer": "tlora_fx.runtime.trainer",
    "TrainerCallback": "tlora_fx.runtime.callbacks",
    "TrainerOptions": "tlora_fx.runtime.trainer",
    "VllmSampler": "tlora_fx.runtime.sampling.vllm",
    "compile": "tlora_fx.compiler",
    "load": "tlora_fx.runtime.compiled_folder",
    "load_job_file": "tlora_fx.config.job_file",
    "run_passes": "tlora_fx.compiler",
    "sweep": "tlora_fx.api.sweep",
    "trace": "tlora_fx.compiler",
    "train": "tlora_fx.api.train",
    "why_not": "tlora_fx.tools.explain",
}


find_moved_modules()
settle_products()


def __getattr__(name: str) -> Any:
    """Import a public name where it lives, and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
