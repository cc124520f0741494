"""Write a Shared Super-Model into a folder: code, listing, data, report and kernels.

Of the generated kernels, which run is chosen by token count when the operators are called; a dump
holds those of the plan that fuses the rank block into the GEMM, and of the one that leaves the GEMM
to the library. Triton is not needed, and nothing is compiled.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from tlora_fx.codegen.kernels import build, emitter
from tlora_fx.codegen.spec import DTYPES, MAX_SITES, KernelSpec, Kind
from tlora_fx.config.paths import is_there
from tlora_fx.errors import DumpNotWritable, GraphNotStorable, KernelSpecError, errors_as
from tlora_fx.graph_file import SUFFIX, graph_text
from tlora_fx.host.durable import replace_file
from tlora_fx.inspect.joint import render_joint
from tlora_fx.inspect.listing import make_listing
from tlora_fx.inspect.program import make_program
from tlora_fx.inspect.program_text import render_program
from tlora_fx.inspect.schema import STAGES_FOLDER, Listing, PassStage, Program
from tlora_fx.inspect.statistics import FILE, PassStatistics
from tlora_fx.inspect.text import render_report, render_text
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.ir.lora_sites import LoweredSite, lowered_sites
from tlora_fx.model.saved import SavedModel, dumped, saved_model
from tlora_fx.model.source import gate_of
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops.job_operator import find_operator
from tlora_fx.ops.kernels.support import job_capacity, rank_block

logger = logging.getLogger(__name__)

COMPILED = "compiled"
KERNELS = "kernels"
JOINT = "joint.txt"
GRAPHS = f"graph{SUFFIX}"
_STAGE = re.compile(r"\d{2,}-[a-z0-9-]+\.(json|txt)|statistics\.json")
_KERNEL = re.compile(r"[a-z_]+_\d+x\d+_\w+_sm\d+_[0-9a-f]{8}\.py")
GRANULE = 16
ARCHITECTURE = 90


def dump(
    model: SuperModel,
    folder: Path | str,
    stages: Sequence[PassStage] = (),
    statistics: PassStatistics | None = None,
) -> Listing:
    """Write `ssm.py`, `ssm.txt`, `ssm.json`, `program.json`, `graph.tfx`, `report.txt`, `kernels/`.

    Where layers have passes of the stage joint, or a budget, `joint.txt` has their joint graphs.
    With `model.json`, `tlora_fx.load` makes a model of the folder. There is none for a base that is
    given as a module, nor for a model that is open for other jobs.
    `kernels/` holds the generated kernels of the model's sites, to be read: what runs is made again
    where it runs. Each file is replaced at once, what else lies in the folder stays. The model
    needs no weights.

    stages      what every pass left (see `Recorder`): `passes/NN-NAME.json`, and `.txt` to read;
                those of an earlier dump go, with or without new ones
    statistics  what passes did: `passes/statistics.json`
    returns     what `ssm.txt` and `report.txt` were made of
    raises      DumpNotWritable
    """
    folder = Path(folder)
    listing = make_listing(model)
    state = stages[-1].program.state if stages else COMPILED
    program = make_program(model.group, state, listing.base.title)
    kernels = site_kernels(model.group)
    files = {
        "ssm.py": model.source,
        "ssm.txt": render_text(listing),
        "report.txt": render_report(listing, _report_of_kernels(kernels.of_sites)),
        Listing.FILE: listing.to_json(),
        Program.FILE: program.to_json(),
        **_graph_file(model),
        **({JOINT: render_joint(program.joint)} if program.joint else {}),
        **_stage_files(stages, listing.base.title),
        **({} if statistics is None else {f"{STAGES_FOLDER}/{FILE}": statistics.to_json()}),
        **{f"{KERNELS}/{name}": text for name, text in kernels.files.items()},
    }
    _write(folder, files)
    return listing


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of a dump, by name, in place of those of an earlier one."""
    there = [name for name in files if is_there(folder / name)]
    # A file called report.txt alone is somebody else's.
    if there and not any(name.startswith("ssm.") for name in there):
        raise DumpNotWritable(
            "a file that is no part of a compiled model would be overwritten",
            file=folder / there[0],
            help="choose another folder with -o, or move the file away",
        )
    with errors_as(
        DumpNotWritable, "the folder for the compiled model cannot be written",
        folder=folder, help="choose another folder with -o, or free disk space",
    ):  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder / STAGES_FOLDER, _STAGE)
        for inner in {str(Path(name).parent) for name in files}:
            (folder / inner).mkdir(exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text.encode())
        _clear(folder / KERNELS, _KERNEL, {Path(name).name for name in files})


def _graph_file(model: SuperModel) -> dict[str, str]:
    """What `tlora-fx opt` and `tlora_fx.load` read, and the reason where a file cannot keep it."""
    try:
        files = {GRAPHS: graph_text(model.group)}
    except GraphNotStorable as error:
        logger.warning("%s is not written: %s", GRAPHS, error)
        return {}
    if model.backbone.spec.module is None and model.group.open is None:
        files[SavedModel.FILE] = dumped(saved_model(model.group, model.jobs))
    return files


def _stage_files(stages: Sequence[PassStage], base: str) -> dict[str, str]:
    files = {}
    for stage in (stage.of_base(base) for stage in stages):
        name = f"{STAGES_FOLDER}/{stage.place:02d}-{stage.program.state}"
        files[f"{name}.json"] = stage.to_json()
        files[f"{name}.txt"] = render_program(stage.program)
    return files


def _clear(folder: Path, ours: re.Pattern[str], kept: Set[str] = frozenset()) -> None:
    """Remove what an earlier dump wrote under such names; what else lies there stays."""
    for file in folder.glob("*"):
        if ours.fullmatch(file.name) and file.name not in kept:
            file.unlink()


#: Kinds of which one launch serves all sites on an x.
TOGETHER: tuple[Kind, ...] = ("pack", "sum_s", "lora_b_backward", "sum_ds", "sum_gradients")


@dataclass(frozen=True, slots=True)
class _SiteSpec:
    """A site as kernels see it: what all of its specs have in common, and the rest."""

    plain: KernelSpec
    adapter_dtype: Any
    dropout: bool
    bias: bool
    layout: Any
    frozen: bool


@dataclass(frozen=True, slots=True)
class SiteKernels:
    """The generated kernels of a model.

    files      text by file name
    of_sites   the files of each site, by graph and path: "layers_0_3 self_attn.q_proj"
    """

    files: dict[str, str]
    of_sites: dict[str, tuple[str, ...]]


def site_kernels(group: GroupGraph, arch: int = ARCHITECTURE) -> SiteKernels:
    """The kernels of a model's sites, for a compute capability."""
    files: dict[str, str] = {}
    names: dict[KernelSpec, str] = {}
    of_sites: dict[str, dict[str, None]] = {}
    for where, graph in (("", group.root), *((b.name, b.graph) for b in group.blocks.values())):
        for _, sites in groupby(lowered_sites(graph), key=lambda site: site.call):
            for spec, served in _specs(list(sites), len(group.jobs), arch):
                if spec not in names:
                    names[spec] = _build(spec, files)
                for site in served:
                    own = of_sites.setdefault(f"{where} {site.path}".strip(), {})
                    own.update({names[spec]: None} if names[spec] else {})
    return SiteKernels(
        dict(sorted(files.items())), {site: tuple(own) for site, own in of_sites.items()}
    )


def _build(spec: KernelSpec, files: dict[str, str]) -> str:
    """Add a kernel to files; its name, "" where the operators take another plan."""
    try:
        kernel = build(spec)
    except KernelSpecError:
        return ""
    files[f"{kernel.name}.py"] = kernel.text
    return f"{kernel.name}.py"


def _report_of_kernels(of_sites: Mapping[str, tuple[str, ...]]) -> list[str]:
    """A line for sites that run the same files."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for site, own in of_sites.items():
        alike.setdefault(own, []).append(site)
    return [f"{', '.join(sites)}: {', '.join(own)}" for own, sites in alike.items() if own]


_Served = tuple[KernelSpec, list[LoweredSite]]


def _specs(sites: list[LoweredSite], jobs: int, arch: int) -> Iterator[_Served]:
    """The kernels of sites of one call, each with those that it serves."""
    every = [(spec, site) for site in sites if (spec := _site_spec(site, jobs, arch)) is not None]
    if len(every) < len(sites):
        return  # PyTorch serves the whole group
    for _, equal in groupby(every, key=lambda pair: pair[0].plain.rank_block):
        alike = list(equal)
        for start in range(0, len(alike), MAX_SITES):
            part, (first, _) = alike[start : start + MAX_SITES], alike[start]
            read = replace(first.plain, sites=len(part), dropout=first.dropout)
            served = [site for _, site in part]
            yield replace(read, kind="shrink"), served
            gate = gate_of(served[0].call) if len(served) == 1 else None
            if gate is not None:
                # Of compiled layers (`SuperModel.compiled_source`).
                activation: Any = gate[0]
                yield replace(read, kind="shrink", gated=activation), served
            yield replace(read, kind="lora_a_backward"), served
            # An expand has one width, that of what it writes.
            wide = replace(read, kind="expand", outer=read.inner, accumulate=start > 0)
            yield wide, served
    for kind in TOGETHER:
        yield from _joined(kind, every)
    for index, (spec, site) in enumerate(every):
        for own in _site_kernels(spec, index > 0):
            yield own, [site]


def _joined(kind: Kind, every: list[tuple[_SiteSpec, LoweredSite]]) -> Iterator[_Served]:
    """The kernels that serve all sites whose work is cut alike."""
    alike: dict[object, list[tuple[KernelSpec, LoweredSite]]] = {}
    for site, served in every:
        spec = replace(site.plain, kind=kind)
        if kind in ("pack", "sum_gradients"):
            spec = replace(spec, adapter_dtype=site.adapter_dtype)
        key = spec.rank_block, site.adapter_dtype, emitter(kind).default_tile(spec)
        alike.setdefault(key, []).append((spec, served))
    for equal in alike.values():
        first, *rest = (spec for spec, _ in equal)
        beside = tuple(spec.outer for spec in rest)
        yield replace(first, sites=len(equal), beside=beside), [served for _, served in equal]


def _site_kernels(site: _SiteSpec, later: bool) -> Iterator[KernelSpec]:
    """The kernels of one site alone; a later site adds its part of dx to the first one's."""
    plain, outer = site.plain, site.plain.outer
    biased = replace(plain, bias=site.bias, weight_layout=site.layout)
    back = replace(plain, dropout=site.dropout, accumulate=later)
    if site.frozen:
        yield replace(biased, kind="forward")
        yield replace(back, kind="input_gradient", weight_layout=site.layout)
    yield replace(plain, kind="expand", inner=outer, bias=site.bias, accumulate=not site.frozen)


def _site_spec(site: LoweredSite, jobs: int, arch: int) -> _SiteSpec | None:
    """The site's specs, or None where its types, sizes or operator have no kernels of ours."""
    arguments = site.arguments
    if find_operator(site.operator) is not None:
        return None
    x, a, b = (arguments[name].meta["val"] for name in ("x", "a", "b"))
    dtype, stored = (str(value.dtype).removeprefix("torch.") for value in (x, a))
    inner, outer = int(a.shape[1]), int(b.shape[1])
    fits = dtype in DTYPES and stored in DTYPES and x.dtype != torch.float64
    if not fits or arguments["compute_dtype"] != x.dtype or inner % GRANULE or outer % GRANULE:
        return None
    weight = arguments.get("weight")
    turned = weight is not None and weight.meta["val"].stride(1) != 1
    plain = KernelSpec(
        "pack",
        inner,
        outer,
        dtype=dtype,  # type: ignore[arg-type]  # it is one of DTYPES
        rank_block=rank_block(arguments["max_rank"] or int(a.shape[0])),
        job_capacity=job_capacity(jobs),
        arch=arch,
    )
    return _SiteSpec(
        plain=plain,
        adapter_dtype=stored,
        dropout=bool(arguments["drops"]),
        bias=arguments.get("bias") is not None,
        layout="in_out" if turned else "out_in",
        frozen=weight is not None,
    )
