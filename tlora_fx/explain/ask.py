"""Compile jobs and say what became of one module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tlora_fx.compiler import Jobs, prepare, resolve_pipeline
from tlora_fx.config.job import Job
from tlora_fx.errors import UnknownNode, nearest
from tlora_fx.explain.layers import about_layers
from tlora_fx.explain.names import find_name
from tlora_fx.explain.record import Branch, Record, node_text
from tlora_fx.explain.targeting import copied_around, why_not_targeted
from tlora_fx.fingerprint import named_graphs
from tlora_fx.inspect.wording import KINDS, plural
from tlora_fx.ir.graph import AdapterSite, GroupGraph, is_call, under
from tlora_fx.ir.lora_sites import lowered_site
from tlora_fx.ladder import Prepared, fuse
from tlora_fx.passes.key_dropouts import ATTENTION_RATE
from tlora_fx.pipeline import Pipeline, Runner
from tlora_fx.tools.explain import Explanation, JobAnswer

aten, ops = torch.ops.aten, torch.ops.tlora_fx
MANY = 12


def why_not(
    jobs: Jobs, node: str, job: str | None = None, pipeline: str | Pipeline | None = None
) -> Explanation:
    """What became of a module of the base, and why, for each job. Compiles without weights.

    jobs       a job file, its path, or jobs
    node       a module (`layers.3.mlp.down_proj`, the layer spelled in any way), or a node by name
    job        one job only
    pipeline   passes to run instead of the default
    raises     UnknownNode with the nearest name; TloraError as `compile` does
    """
    given, record = prepare(jobs), Record()
    _wanted(given, job)
    group = fuse(given, Runner(resolve_pipeline(pipeline), [record]))
    return explain_group(given, group, record, node, job)


def explain_group(
    given: Prepared, group: GroupGraph, record: Record, node: str, job: str | None = None
) -> Explanation:
    """What became of a module of jobs that are compiled.

    given, group   the jobs, and what the passes made of them
    record         what watched them
    raises         UnknownNode with the nearest name
    """
    wanted = _wanted(given, job)
    modules = dict(given.backbone.model.named_modules())
    found = find_name(node, modules, group)
    asker = _Asker(given, group, record, found.module)
    return Explanation(
        found.module,
        _kind(modules.get(found.module)),
        node_text(found.node, found.block) if found.node is not None else "",
        found.others,
        tuple(asker.answer(place) for place in wanted),
        tuple(dict.fromkeys(asker.dropouts(wanted))),
        tuple(dict.fromkeys(asker.sharing(wanted))),
        about_layers(group, found.module),
    )


def _wanted(given: Prepared, job: str | None) -> list[int]:
    names = [own.name for own in given.jobs]
    if job is None:
        return list(range(len(names)))
    if job not in names:
        raise UnknownNode(
            "the job file has no such job",
            found=job,
            nearest=nearest(job, names),
            help="its jobs are " + ", ".join(names),
        )
    return [names.index(job)]


def _kind(module: Any) -> str:
    """A module's class and sizes; of one that holds others the class alone."""
    if module is None:
        return ""
    text = repr(module)
    return type(module).__name__ if "\n" in text else text


@dataclass(frozen=True, slots=True)
class _Asker:
    """Answers for one module."""

    given: Prepared
    group: GroupGraph
    record: Record
    module: str

    @property
    def place(self) -> tuple[str, str]:
        """The block that the module's layer runs ("" for the root), and the path inside it."""
        for block in self.group.blocks.values():
            for layer in block.instances:
                if under(self.module, layer):
                    return block.name, self.module[len(layer) + 1 :]
        return "", self.module

    def answer(self, place: int) -> JobAnswer:
        """What one job has at the module."""
        job, sites = self.given.jobs[place], self.given.sites[place]
        site = sites.get(self.module)
        if site is not None:
            return self._at_site(job, site)
        around = copied_around(sites, self.module)
        if around:
            return JobAnswer(job.name, "inside", f"{around} is a copy that the job trains")
        inside = [own for path, own in sites.items() if under(path, self.module)]
        if inside:
            return JobAnswer(job.name, "around", self._inside(job, inside))
        why = why_not_targeted(job, self.given.backbone, self.module)
        return JobAnswer(job.name, "not targeted", why)

    def _at_site(self, job: Job, site: AdapterSite) -> JobAnswer:
        block, path = self.place
        attempts = self.record.attempts.get(Branch(block, path, job.name), ())
        if self._is_lowered(site.path, job.name):
            return JobAnswer(job.name, "lowered", _numbers(site), attempts)
        reasons = [attempt.why for attempt in attempts if not attempt.fits]
        told = KINDS.get(site.kind, "") or (reasons[0] if reasons else "no branch of it was found")
        if attempts and not reasons:
            told = "its pattern fits, and no pass lowered it"
        return JobAnswer(job.name, "as it is", told, attempts)

    def _inside(self, job: Job, inside: list[AdapterSite]) -> str:
        """The adapters on modules inside, lowered ones and others."""
        found: dict[str, list[str]] = {}
        for site in inside:
            lowered = self._is_lowered(site.path, job.name)
            kind = KINDS.get(site.kind, site.kind)
            state = "lowered" if lowered else f"as it is ({kind})"
            found.setdefault(state, []).append(site.path[len(self.module) + 1 :].lstrip("."))
        return "; ".join(f"{state} {_some(names)}" for state, names in found.items())

    def _is_lowered(self, path: str, job: str) -> bool:
        return any(
            lowered_site(node) is not None and job in node.meta["jobs"]
            for node, at in self._nodes()
            if at == path
        )

    def _nodes(self) -> Iterator[tuple[fx.Node, str]]:
        """All nodes with their module's whole path, in the layer that the module lies in."""
        for name, graph in named_graphs(self.group):
            layer = ""
            if name:
                instances = self.group.blocks[name].instances
                own = next((item for item in instances if under(self.module, item)), None)
                near = own or next((i for i in instances if under(i, self.module)), None)
                in_plan = self.group.base.plan and instances[0] in self.group.base.plan.layers
                layer = near or instances[0] if in_plan else ""
            for node in graph.nodes:
                path = str(node.meta.get("site") or node.meta.get("path") or "")
                yield node, ".".join(part for part in (layer, path) if part)

    def _here(self) -> Iterator[fx.Node]:
        return (node for node, path in self._nodes() if under(path, self.module))

    def dropouts(self, wanted: list[int]) -> Iterator[str]:
        """What became of every dropout at the module."""
        for place in wanted:
            job, site = self.given.jobs[place].name, self.given.sites[place].get(self.module)
            if site is not None and site.dropout and self._is_lowered(self.module, job):
                rate = f"rate {site.dropout:g} inside multi_lora_linear"
                yield f"{job}: {rate}, masks keyed to the job"
        names = {self.given.jobs[place].name for place in wanted}
        for node in self._here():
            jobs = set(node.meta.get("jobs") or names)
            whose = node.meta["jobs"][0] if node.meta.get("role") == "adapter" else "all jobs"
            told = _dropout(node) if jobs & names else ""
            if told:
                yield f"{whose}: {told}"

    def sharing(self, wanted: list[int]) -> Iterator[str]:
        """What of the base runs once for all jobs, and which job replaces it."""
        shared = [
            node
            for node in self._here()
            if node.op == "call_function"
            and (node.meta.get("role") == "shared" or lowered_site(node) is not None)
        ]
        if shared:
            yield f"{plural(len(shared), 'operator')} of the base, once for all jobs"
        else:
            yield "no operator of the base stands here by itself"
        block, path = self.place
        near = (self.module, *(f"{b.instances[0]}.{path}" for n, b in self._blocks() if n == block))
        for by, note in self.group.notes:
            names = [f"job '{self.given.jobs[place].name}'" for place in wanted]
            if by == "fuse-backbone" and any(note.startswith(name) for name in names):
                where = note.partition("base's ")[2].split(" ")[0]
                if any(under(where, path) for path in near):
                    yield note

    def _blocks(self) -> Iterator[tuple[str, Any]]:
        yield from self.group.blocks.items()


def _some(names: list[str]) -> str:
    return ", ".join(names[:MANY]) + (f" and {len(names) - MANY} more" if len(names) > MANY else "")


def _numbers(site: AdapterSite) -> str:
    return f"rank {site.rank}, scaling {site.scaling:g}, dropout {site.dropout:g}"


def _dropout(node: fx.Node) -> str:
    """What became of a dropout; "" where a node is none."""
    if is_call(node, ops.keyed_dropout.default):
        rate: Any = node.args[1]
        return f"rate {rate.meta['rate']:g}, masks keyed to the job"
    if is_call(node, ops.packed_attention.default) and node.args[ATTENTION_RATE]:
        return f"rate {node.args[ATTENTION_RATE]:g} on attention weights, masks keyed to the job"
    if is_call(node, aten.dropout.default):
        if not node.args[1] or not node.args[2]:
            return "rate 0: it drops nothing, and needs no masks"
        return f"rate {node.args[1]:g}, not keyed: no key-dropouts ran on it"
    return ""
