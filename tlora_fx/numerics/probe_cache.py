"""Cache of probes: an equal graph on an equal base is not tried again.

A file under $TLORA_FX_CACHE/probes holds the result. Its name is a hash of all that decides it: the
fused graph, the base's config and code, the jobs' adapters, and the versions and the source of what
runs the probe; where the base's weights are tried, also its files, the GPU and the kernels' modes.
A base that is given as a Python module is tried each time, for its weights and code may be any.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from tlora_fx.config.base_files import base_folder
from tlora_fx.config.job import Job
from tlora_fx.host.environment import kernel_mode, wants_strict_kernels
from tlora_fx.host.kept_objects import KeptObjects
from tlora_fx.host.sources import own_source, source_of
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.ir.verifier import fingerprint
from tlora_fx.model.backbone import Backbone
from tlora_fx.numerics.base_alone import load_gpu_code
from tlora_fx.numerics.probe import ProbeResult, probe_compiled, probe_loaded
from tlora_fx.tracing.trace_cache import tensor_digest

#: Rooms whose code the probe, or what made its graph, may run.
ROOMS = (
    "numerics", "passes", "rewriting", "cost", "tracing", "graph_file", "model", "pipeline", "ir",
    "ops", "codegen", "config", "errors", "host",
)  # fmt: skip

KEPT = KeptObjects("probes", "the result of a probe")


def probe_once(group: GroupGraph, backbone: Backbone, jobs: Sequence[Job]) -> ProbeResult:
    """`probe_compiled`, or what it found before.

    raises    FusedDiffers
    """
    if backbone.config is None:
        return probe_compiled(group, backbone, jobs)

    def probe() -> ProbeResult:
        # On its weights this base is tried next.
        load_gpu_code(backbone)
        return probe_compiled(group, backbone, jobs)

    return _once(_key(group, backbone, jobs), probe)


def probe_loaded_once(
    group: GroupGraph,
    backbone: Backbone,
    jobs: Sequence[Job],
    value: Callable[[str], Tensor],
    longest: int,
    *,
    ids: Sequence[Sequence[int]],
    device: torch.device,
) -> ProbeResult:
    """`probe_loaded` on a device, or what it found before for the same files of weights.

    raises    FusedDiffers
    """

    def probe() -> ProbeResult:
        return probe_loaded(group, backbone, jobs, value, longest, ids=ids)

    if not is_kept(backbone):
        return probe()
    more = (_weights(backbone), longest, [list(each) for each in ids], *_machine(device))
    return _once(_key(group, backbone, jobs, *more), probe)


def _once(key: str, probe: Callable[[], ProbeResult]) -> ProbeResult:
    known = KEPT.read(key)
    if known is not None:
        with suppress(TypeError, KeyError):
            return ProbeResult(**known | {"lengths": tuple(known["lengths"])})
    result = probe()
    KEPT.write(key, asdict(result))
    return result


def is_kept(backbone: Backbone) -> bool:
    """Whether it is known what decides a base's weights, so that their probe is kept."""
    return backbone.config is not None and bool(_weights(backbone))


def _weights(backbone: Backbone) -> list[tuple[object, ...]]:
    """Name, size and time of change of each file of a base's weights; the code that draws them.

    returns   nothing where the weights are a Python module's, or lie elsewhere
    """
    spec = backbone.spec
    if spec.module is not None:
        return []
    if spec.model is None:
        return [("drawn", spec.seed, own_source("runtime/adapters"))]
    folder = base_folder(spec)
    if folder is None or not folder.is_dir():
        return []
    found = [(file, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    return [(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file, stat in found]


def _machine(device: torch.device) -> tuple[object, ...]:
    """What else decides the kernels that run."""
    gpu = device.type == "cuda"
    return (
        torch.cuda.get_device_name(device) if gpu else device.type,
        getattr(sys.modules.get("triton"), "__version__", ""),
        kernel_mode(),
        wants_strict_kernels(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def probes_folder() -> Path:
    """Folder of results, beside generated kernels."""
    return KEPT.folder


def _key(group: GroupGraph, backbone: Backbone, jobs: Sequence[Job], *more: object) -> str:
    versions = [version(library) for library in ("torch", "transformers", "peft")]
    adapters = [(sorted(job.lora_fields.items()), job.adapter_dtype, job.name) for job in jobs]
    described = (
        versions,
        own_source(*ROOMS),
        fingerprint(group).code,
        group.form,
        group.compute,
        _base(backbone),
        sorted(set(_code(backbone.model))),
        [source_of(module) for block in group.blocks.values() for _, module in block.joint],
        adapters,
        *more,
    )
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _base(backbone: Backbone) -> object:
    """What decides how a base computes, wherever its folder is: its config, shapes and buffers."""
    spec, model = backbone.spec, backbone.model
    if spec.module is not None:
        return backbone.fingerprint()
    config = {
        name: value for name, value in backbone.config.to_dict().items() if name != "_name_or_path"
    }
    return (
        json.dumps(config, default=str, sort_keys=True),
        (spec.seed, spec.is_classifier, spec.model is None),
        [(name, str(p.dtype), tuple(p.shape)) for name, p in model.named_parameters()],
        [
            (name, tensor_digest(backbone.values.get(name, buffer)))
            for name, buffer in model.named_buffers()
        ],
    )


def _code(model: nn.Module) -> Iterator[str]:
    """The code of a base: of each module's class its source file and its forward."""
    for kind in {type(module) for module in model.modules()}:
        forward = getattr(kind.forward, "__code__", None)
        body = hashlib.sha256(forward.co_code).hexdigest() if forward is not None else ""
        yield f"{kind.__module__}.{kind.__qualname__} {body} {source_of(kind.__module__)}"
