"""Say what became of one module of the base, and why, for each job: `tlora-fx explain`."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from tlora_fx.compiler import Jobs, Prepared, fuse, prepare, resolve_pipeline
from tlora_fx.config.job import Job
from tlora_fx.errors import UnknownNode, first_of, nearest
from tlora_fx.inspect.wording import KINDS, layers_label, plural
from tlora_fx.ir.graph import (
    PEFT_PREFIX,
    AdapterSite,
    Block,
    GroupGraph,
    JobGraph,
    is_call,
    origin_of,
    under,
)
from tlora_fx.ir.lora_sites import is_adapted
from tlora_fx.ir.verifier import named_graphs
from tlora_fx.model.backbone import Backbone
from tlora_fx.passes.key_dropouts import ATTENTION_RATE
from tlora_fx.passes.lower_adapters import FROZEN, LowerAdapters, chains, match_nodes
from tlora_fx.pipeline import Event, Instrument, Pipeline, Runner
from tlora_fx.rewriting import Match, Miss, nearest_match
from tlora_fx.tracing.adapters import config_with_targets
from tlora_fx.tracing.surroundings import undisturbed

State = Literal["lowered", "as it is", "not targeted", "inside", "around"]

aten, ops = torch.ops.aten, torch.ops.tlora_fx
# Modules that are named where nothing comes near, and adapters inside a module.
SOME = 8
MANY = 12
STATES = {
    "lowered": "lowered",
    "as it is": "runs as it is",
    "not targeted": "not targeted",
    "inside": "no site of its own",
    "around": "adapters inside",
}
INDENT = "  "
_TAIL = re.compile(r"\.(?:base_layer|lora_\w+|weight|bias)(?:\..*)?$")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A pattern that was tried on a branch.

    what      what it looks for: "a frozen linear", "a plain LoRA branch"
    pattern   the pattern as text; of several the one that came nearest
    wanted    the condition that does not hold: what would make it match
    node      where, as "block.node = operator"
    source    the line of model code that the node comes from
    """

    what: str
    fits: bool
    pattern: str
    held: tuple[str, ...]
    wanted: str = ""
    why: str = ""
    node: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """Answer for one job at a module.

    state      "lowered"; "as it is": its own nodes run; "not targeted"; "inside": the module lies
               in one of which the job trains a copy; "around": its adapters sit on modules inside
    reason     why, and the numbers of the adapter, as one phrase
    """

    job: str
    state: State
    reason: str
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of what became of one module of the base.

    node       the node that was asked for, as "block.node = operator", "" where a module was
    others     how many other modules the name fits as well
    layers     which layers share its code, and why others do not
    """

    module: str
    kind: str
    node: str
    others: int
    jobs: tuple[JobAnswer, ...]
    dropouts: tuple[str, ...]
    sharing: tuple[str, ...]
    layers: tuple[str, ...]


@undisturbed()
def why_not(
    jobs: Jobs, node: str, job: str | None = None, pipeline: str | Pipeline | None = None
) -> Explanation:
    """Explain what became of a module of the base, for each job. Compiles without weights.

    jobs       a job file, its path, or jobs
    node       a module (`layers.3.mlp.down_proj`, the layer spelled in any way), or a node by name
    raises     UnknownNode with the nearest name; TloraError as `compile` does
    """
    prepared, recorder = prepare(jobs), PatternRecorder()
    _wanted(prepared, job)
    group = fuse(prepared, Runner(resolve_pipeline(pipeline), [recorder]))
    return explain_group(prepared, group, recorder, node, job)


def explain_group(
    prepared: Prepared,
    group: GroupGraph,
    recorder: PatternRecorder,
    node: str,
    job: str | None = None,
) -> Explanation:
    """Explain what became of a module of jobs that are compiled.

    prepared, group   the jobs, and what the passes made of them
    raises            UnknownNode with the nearest name
    """
    wanted = _wanted(prepared, job)
    modules = dict(prepared.backbone.model.named_modules())
    named = find_name(node, modules, group)
    explainer = _Explainer(prepared, group, recorder, named.module)
    return Explanation(
        named.module,
        _kind(modules.get(named.module)),
        node_text(named.node, named.block) if named.node is not None else "",
        named.others,
        tuple(explainer.answer(index) for index in wanted),
        tuple(dict.fromkeys(explainer.dropouts(wanted))),
        tuple(dict.fromkeys(explainer.sharing(wanted))),
        about_layers(group, named.module),
    )


def _wanted(prepared: Prepared, job: str | None) -> list[int]:
    names = [spec.name for spec in prepared.jobs]
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
class _Explainer:
    prepared: Prepared
    group: GroupGraph
    recorder: PatternRecorder
    module: str

    @property
    def place(self) -> tuple[str, str]:
        """The block that the module's layer runs ("" for the root), and the path inside it."""
        for block in self.group.blocks.values():
            for layer in block.instances:
                if under(self.module, layer):
                    return block.name, self.module[len(layer) + 1 :]
        return "", self.module

    def answer(self, index: int) -> JobAnswer:
        job, sites = self.prepared.jobs[index], self.prepared.sites[index]
        site = sites.get(self.module)
        if site is not None:
            return self._at_site(job, site)
        around = copied_around(sites, self.module)
        if around:
            return JobAnswer(job.name, "inside", f"{around} is a copy that the job trains")
        inside = [own for path, own in sites.items() if under(path, self.module)]
        if inside:
            return JobAnswer(job.name, "around", self._inside(job, inside))
        why = why_not_targeted(job, self.prepared.backbone, self.module)
        return JobAnswer(job.name, "not targeted", why)

    def _at_site(self, job: Job, site: AdapterSite) -> JobAnswer:
        block, path = self.place
        attempts = self.recorder.attempts.get(TracedBranch(block, path, job.name), ())
        if self._is_lowered(site.path, job.name):
            numbers = f"rank {site.rank}, scaling {site.scaling:g}, dropout {site.dropout:g}"
            return JobAnswer(job.name, "lowered", numbers, attempts)
        reasons = [attempt.why for attempt in attempts if not attempt.fits]
        reason = KINDS.get(site.kind, "") or (
            reasons[0] if reasons else "no branch of it was found"
        )
        if attempts and not reasons:
            reason = "its pattern fits, and no pass lowered it"
        return JobAnswer(job.name, "as it is", reason, attempts)

    def _inside(self, job: Job, inside: list[AdapterSite]) -> str:
        by_state: dict[str, list[str]] = {}
        for site in inside:
            lowered = self._is_lowered(site.path, job.name)
            kind = KINDS.get(site.kind, site.kind)
            state = "lowered" if lowered else f"as it is ({kind})"
            by_state.setdefault(state, []).append(site.path[len(self.module) + 1 :].lstrip("."))
        return "; ".join(f"{state} {first_of(names, MANY)}" for state, names in by_state.items())

    def _is_lowered(self, path: str, job: str) -> bool:
        return any(
            is_adapted(node) and job in node.meta["jobs"]
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
        for index in wanted:
            job, site = self.prepared.jobs[index].name, self.prepared.sites[index].get(self.module)
            if site is not None and site.dropout and self._is_lowered(self.module, job):
                rate = f"rate {site.dropout:g} inside multi_lora_linear"
                yield f"{job}: {rate}, masks keyed to the job"
        names = {self.prepared.jobs[index].name for index in wanted}
        for node in self._here():
            jobs = set(node.meta.get("jobs") or names)
            whose = node.meta["jobs"][0] if node.meta.get("role") == "adapter" else "all jobs"
            text = _dropout(node) if jobs & names else ""
            if text:
                yield f"{whose}: {text}"

    def sharing(self, wanted: list[int]) -> Iterator[str]:
        """Sentences on what of the base runs once for all jobs, and which job replaces it."""
        shared = [
            node
            for node in self._here()
            if node.op == "call_function"
            and (node.meta.get("role") == "shared" or is_adapted(node))
        ]
        if shared:
            yield f"{plural(len(shared), 'operator')} of the base, once for all jobs"
        else:
            yield "no operator of the base stands here by itself"
        block, path = self.place
        near = (
            self.module,
            *(f"{b.instances[0]}.{path}" for n, b in self.group.blocks.items() if n == block),
        )
        for by, note in self.group.notes:
            names = [f"job '{self.prepared.jobs[index].name}'" for index in wanted]
            if by == "fuse-backbone" and any(note.startswith(name) for name in names):
                where = note.partition("base's ")[2].split(" ")[0]
                if any(under(where, path) for path in near):
                    yield note


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


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module, and the node in it that was asked for.

    node     None where a module was asked for
    block    whose graph the node stands in, "" for the root
    """

    module: str
    others: int = 0
    node: fx.Node | None = None
    block: str = ""


def find_name(asked: str, modules: Mapping[str, object], group: GroupGraph) -> NamedModule:
    """The module that a name means: a path or the end of one, a node's name, or its origin's key.

    `layers.3.mlp.up_proj`, `model.layers[3].mlp.up_proj.weight`, `layers_0_31.mlp.up_proj` and
    `layers_0_31.q_proj` all are names.

    raises    UnknownNode, with the nearest name
    """
    path = _plain(asked, group)
    if path in modules and path:
        return NamedModule(path)
    ends = [name for name in modules if name.endswith(f".{path}")]
    if ends:
        return NamedModule(ends[0], len(ends) - 1)
    for block, node in _nodes(group):
        origin = origin_of(node)
        names = (node.name, f"{block}.{node.name}", f"{block or 'root'}:{node.name}")
        if asked in (*names, origin and origin.key):
            return NamedModule(_module_of(block, node, group), 0, node, block)
    raise _unknown(asked, path, modules, group)


def _plain(asked: str, group: GroupGraph) -> str:
    """A name as the base writes it: without PEFT's, with one layer where several are named."""
    path = re.sub(r"\[(\d+)\]", r".\1", asked.strip()).removeprefix(PEFT_PREFIX)
    path = re.sub(r"\.(\d+)-\d+(?=\.|$)", r".\1", _TAIL.sub("", path))
    for name, block in group.blocks.items():
        if under(path, name) and path != name:
            return f"{block.instances[0]}{path[len(name) :]}"
    return path


def _nodes(group: GroupGraph) -> Iterator[tuple[str, fx.Node]]:
    for block, graph in named_graphs(group):
        for node in graph.nodes:
            yield block, node


def _module_of(block: str, node: fx.Node, group: GroupGraph) -> str:
    """The module that a node belongs to, in the first layer that runs it."""
    path = str(node.meta.get("site") or node.meta.get("path") or "").removesuffix(".base_layer")
    layer = group.blocks[block].instances[0] if block in group.blocks else ""
    if block in group.blocks and group.base.plan and layer in group.base.plan.layers:
        return f"{layer}.{path}".removesuffix(".")
    return path


def _unknown(
    asked: str, path: str, modules: Mapping[str, object], group: GroupGraph
) -> UnknownNode:
    parts = {name.rpartition(".")[2] for name in modules}
    close = nearest(path, [name for name in modules if name])
    if close is None and path.rpartition(".")[2] not in parts:
        close = nearest(path.rpartition(".")[2], parts - {""})
    close = close or nearest(asked, [node.name for _, node in _nodes(group)])
    return UnknownNode(
        "the base has no such module, and the fused graph no such node",
        found=asked,
        nearest=close,
        modules=None if close else _some_names(modules),
        help="name a module, such as layers.0.self_attn.q_proj, or a node of ssm.py",
    )


def _some_names(modules: Mapping[str, object]) -> str:
    """The first modules that end differently: what a layer is made of."""
    ends: dict[str, str] = {}
    for name in modules:
        end = name.rpartition(".")[2]
        if end and not end.isdecimal():
            ends.setdefault(end, name)
    return first_of(list(ends.values()), SOME)


@dataclass(frozen=True, slots=True)
class TracedBranch:
    """Location of a branch: the block ("" for the root), the site inside it, its job."""

    block: str
    site: str
    job: str


class PatternRecorder(Instrument):
    """Tries the patterns itself, just before lower-adapters does."""

    def __init__(self) -> None:
        self.attempts: dict[TracedBranch, tuple[Attempt, ...]] = {}

    def started(self, pipeline: Pipeline) -> None:
        self.attempts = {}

    def before(self, event: Event) -> None:
        if not isinstance(event.item, LowerAdapters) or not isinstance(event.graphs, GroupGraph):
            return
        for block, graph in named_graphs(event.graphs):
            for anchor, writes in chains(graph).items():
                frozen = nearest_match(list(FROZEN.values()), anchor)
                first = _attempt("a frozen linear", frozen, block)
                for write in writes:
                    branch = TracedBranch(block, str(write.meta["site"]), write.meta["jobs"][0])
                    known = self.attempts.get(branch, ())
                    self.attempts[branch] = (*known, first)
                    # The branch is looked at only where the module is a frozen linear.
                    if isinstance(frozen, Match):
                        matched = match_nodes(write, anchor, frozen["x"])
                        self.attempts[branch] += (_attempt("a plain LoRA branch", matched, block),)


def _attempt(what: str, result: Match | Miss, block: str) -> Attempt:
    held = tuple(dict.fromkeys(result.held))
    if isinstance(result, Match):
        return Attempt(what, True, str(result.pattern), held)
    return Attempt(
        what,
        False,
        str(result.pattern),
        held,
        result.failed,
        result.why,
        "" if result.node is None else node_text(result.node, block),
        "" if result.node is None else _source_of(result.node),
    )


def node_text(node: Any, block: str) -> str:
    """A node as people find it in a dump: "layers_0_3.k_proj = aten.linear.default"."""
    return f"{f'{block}.' if block else ''}{node.name} = {node.target}"


def _source_of(node: fx.Node) -> str:
    """The line of model code; a node of ours has that of the nearest node that it reads."""
    stack, seen = [node], {node}
    while stack:
        here = stack.pop(0)
        if here.meta.get("source"):
            return str(here.meta["source"])
        stack.extend(n for n in here.all_input_nodes if n not in seen)
        seen.update(here.all_input_nodes)
    return ""


def copied_around(sites: dict[str, AdapterSite], module: str) -> str:
    """The module around this one of which the job trains a copy, "" for none."""
    saved = (path for path, site in sites.items() if site.kind == "saved")
    return next((path for path in saved if under(module, path) and path != module), "")


def why_not_targeted(job: Job, backbone: Backbone, module: str) -> str:
    """LoRA field of the job that leaves a module out: PEFT is asked again without each."""
    from peft.tuners.tuners_utils import check_target_module_exists

    config: Any = config_with_targets(job, backbone)
    for field in ("exclude_modules", "layers_to_transform", "modules_to_save"):
        value = getattr(config, field, None)
        if value is None:
            continue
        without = copy.deepcopy(config)
        setattr(without, field, None)
        if check_target_module_exists(without, module) is True:
            return f"{field} leaves it out: {_joined(value)}"
    asked = job.lora_config().target_modules
    if asked is not None:
        return f"target_modules: {_joined(asked)}"
    return f"target_modules: {_joined(config.target_modules)} (PEFT's for this base)"


def _joined(names: Any) -> str:
    if isinstance(names, str) or not isinstance(names, Iterable):
        return str(names)
    return ", ".join(sorted(map(str, names)))


def about_layers(group: GroupGraph, module: str) -> tuple[str, ...]:
    """Sentences on which layers share a module's code, and why others do not."""
    layers = group.base.plan.layers if group.base.plan else ()
    layer = next((path for path in layers if under(module, path)), "")
    noted = [
        f"not folded further: {text}" if by == "fold-layers" else text
        for by, text in group.notes
        if by == "fold-layers" or "folded" in text
    ]
    if not layer:
        outside = "it lies outside the layers, in the root" if layers else "layers are not folded"
        return (outside, *noted)
    block = next((block for block in group.blocks.values() if layer in block.instances), None)
    if block is None:
        return ("layers are not folded: each is code of its own", *noted)
    lines = [f"{layers_label(block.instances)}: code of block {block.name}"]
    for other in group.blocks.values():
        if other is not block and set(other.instances) <= set(layers):
            why = "; ".join(_differences(group, block, other))
            lines.append(f"{layers_label(other.instances)}: code of block {other.name}, {why}")
    return (*lines, *noted)


def _differences(group: GroupGraph, mine: Block, other: Block) -> Iterator[str]:
    here, there = mine.instances[0], other.instances[0]
    differs = False
    if not _same_code(group.base, here, there):
        differs = True
        yield "the base computes other things there"
    for job in group.jobs:
        if not _same_code(job, here, there):
            for difference in _other_sites(job, here, there):
                differs = True
                yield f"job '{job.name}' {difference}"
    if not differs:
        yield "its code differs"


def _same_code(graph: JobGraph, here: str, there: str) -> bool:
    return any({here, there} <= set(block.instances) for block in graph.blocks.values())


def _other_sites(job: JobGraph, here: str, there: str) -> Iterator[str]:
    mine, theirs = _sites(job, here), _sites(job, there)
    if only_here := sorted(set(mine) - set(theirs)):
        yield f"does not adapt {', '.join(only_here)} there"
    if only_there := sorted(set(theirs) - set(mine)):
        yield f"adapts {', '.join(only_there)} there, not here"
    for path in sorted(set(mine) & set(theirs)):
        numbers = [f"rank {at[path].rank}, scaling {at[path].scaling:g}" for at in (mine, theirs)]
        if numbers[0] != numbers[1]:
            yield f"adapts {path} with {numbers[1]} there, with {numbers[0]} here"


def _sites(job: JobGraph, layer: str) -> dict[str, AdapterSite]:
    return {path[len(layer) + 1 :]: site for path, site in job.sites.items() if under(path, layer)}


def render(explanation: Explanation) -> str:
    """The whole text, with a line feed at its end."""
    lines = [f"{explanation.module}   {explanation.kind}".rstrip()]
    if explanation.node:
        lines.append(f"node      {explanation.node}")
    if explanation.others:
        lines.append(f"also      {explanation.others} other modules have this name")
    lines += ["", "Adapters"]
    for answer in explanation.jobs:
        lines += _answer(answer)
    sections = (
        ("Dropout", explanation.dropouts),
        ("Sharing", explanation.sharing),
        ("Layers", explanation.layers),
    )
    for title, texts in sections:
        lines += ["", title]
        for item in texts or ("none",):
            lines += [INDENT + line for line in item.splitlines()]
    return "\n".join(lines) + "\n"


def _answer(answer: JobAnswer) -> Iterator[str]:
    yield f"{INDENT}{answer.job}: {STATES[answer.state]}: {answer.reason}"
    if answer.state == "lowered":
        return
    for attempt in answer.attempts:
        yield from (2 * INDENT + line for line in _attempt_text(attempt))


def _attempt_text(attempt: Attempt) -> Iterator[str]:
    if attempt.fits:
        yield f"{attempt.what}: fits"
        return
    held = len(attempt.held)
    yield f"{attempt.what}: does not fit; {held or 'no'} condition{'s' * (held != 1)} held before"
    for condition in attempt.held:
        yield f"{INDENT}held      {condition}"
    yield f"{INDENT}failed    {attempt.why}"
    if attempt.node:
        yield f"{INDENT}at        {attempt.node}"
    if attempt.source:
        yield f"{INDENT}from      {attempt.source}"
    yield f"{INDENT}to match  {attempt.wanted}"
    for index, line in enumerate(attempt.pattern.splitlines()):
        yield f"{INDENT}{'nearest   ' if not index else 10 * ' '}{line}"
