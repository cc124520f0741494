"""Dynamo's LoRA layers as a group of one job, on which lower-adapters works as on any other.

Each LoRA layer becomes a subgraph: the frozen linear, and the branch between segment reads and a
segment write, in the vocabulary of tracing. All else of Dynamo's graph stays out of it, so what
this package does not know is never rewritten. The job owns every token: its segment is the whole.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from tlora_fx.backend.sites import GraphRegion, LoraCalls, is_number, tensor_of, value_of
from tlora_fx.errors import GraphInvalid
from tlora_fx.ir.graph import GroupGraph, JobGraph, TensorRef, behind, is_call, output_of
from tlora_fx.ir.lora_sites import ADD, LoweredSite, lowered_site
from tlora_fx.ir.shapes import fake_like
from tlora_fx.passes.lower_adapters import LowerAdapters, NoMatch, match_frozen, match_nodes
from tlora_fx.pipeline import Event, Pipeline, Runner
from tlora_fx.rewriting import Miss

ops = torch.ops.tlora_fx
aten = torch.ops.aten
THE_JOB = "the model"
# What a number that is known only at run time looks like to the pattern: a rate and a scaling.
STAND_IN = 0.5
# A function of torch as Python prints it, with its address.
_FUNCTION = re.compile(r"<(?:built-in )?(?:function|method) (\w+)[^>]*>")
PRODUCTS = (aten.linear.default, aten.addmm.default, aten.matmul.default)
#: What holds of the graph that passes of one's own run on.
PASSES_BEFORE = (
    *("drop-export-noise", "tag-roles", "fold-layers", "check-token-parallel", "token-parallel"),
    *("fuse-backbone", "lower-adapters"),
)
TABLES = {
    "segments": ((2,), torch.int32),
    "keys": ((1, 2), torch.int64),
    "token_index": ((0,), torch.int32),
}


@dataclass(frozen=True, slots=True)
class Lowered:
    """A site that becomes one operator; nodes are Dynamo's.

    x            its input, [..., in]
    weight       the frozen weight, [out, in], or [in, out] where `transposed`
    bias         the frozen bias, or None
    a, b         [r, in] and [out, r], as PEFT stores them
    scaling      a number, or the `item` that reads it where Dynamo made it an input
    dropout      rate, likewise
    compute      dtype in which the adapter is multiplied
    autocast     dtype in which autocast has the frozen linear multiply, or None
    program      what passes of one's own made of it, None where they left the operator
    """

    calls: LoraCalls
    result: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool
    a: fx.Node
    b: fx.Node
    scaling: float | fx.Node
    dropout: float | fx.Node
    compute: torch.dtype
    autocast: torch.dtype | None
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """Nodes of the group's graph that passes of one's own put in place of a site's operator.

    result   node with the site's result
    inputs   what it is made of: inputs of sites by the operator's names, such as "x", "a", "scales"
    """

    result: fx.Node
    inputs: Mapping[fx.Node, tuple[str, Lowered]]


@dataclass(frozen=True, slots=True)
class Left:
    """A site that stays as it is, and why."""

    path: str
    reason: str


class NotLowerable(Exception):
    """Reason why a LoRA layer has no frozen result or result of its own."""


def lower_sites(
    region: GraphRegion,
    sites: list[LoraCalls],
    compute: str,
    refuse: Callable[[Lowered], str] = lambda site: "",
    passes: Pipeline | None = None,
) -> list[Lowered | Left]:
    """Run lower-adapters, and passes behind it, on the LoRA layers of one region.

    refuse    why a site stays as it is that could be lowered, or ""
    returns   what became of each site, in order
    raises    what passes raise, and GraphInvalid where they drop an adapter
    """
    if not sites:
        return []
    sites_graph = _SiteGraph(region)
    results: list[Lowered | Left] = []
    writes: dict[int, fx.Node] = {}
    for index, site in enumerate(sites):
        try:
            writes[index] = sites_graph.add(site)
            results.append(Left(site.path, ""))
        except NotLowerable as reason:
            results.append(Left(site.path, str(reason)))
    if not writes:
        return results
    sites_graph.graph.output(tuple(writes.values()))
    model = JobGraph(THE_JOB, fx.Graph(), "batch")
    group = GroupGraph(model, [model], exact=True, root=sites_graph.graph)
    LowerAdapters(compute=compute, dora=False).run(group)  # type: ignore[arg-type]
    sites_graph.graph.lint()
    outputs: Any = output_of(sites_graph.graph).args[0]
    for index, output in zip(writes, outputs, strict=True):
        result = sites_graph.read_back(sites[index], output)
        refusal = refuse(result) if isinstance(result, Lowered) else ""
        results[index] = Left(sites[index].path, refusal) if refusal else result
    if passes is not None and passes.passes:
        _run_passes(group, dict(zip(writes, outputs, strict=True)), results, passes)
    return results


def _run_passes(
    group: GroupGraph,
    outputs: Mapping[int, fx.Node],
    results: list[Lowered | Left],
    passes: Pipeline,
) -> None:
    """Run passes of one's own on the sites that were lowered; `results` say what became."""
    sites = {
        index: (site, lowered)
        for index, node in outputs.items()
        if isinstance(lowered := results[index], Lowered) and (site := lowered_site(node))
    }
    graph = group.root
    graph.erase_node(output_of(graph))
    graph.output(tuple(outputs[index] for index in sites))
    graph.eliminate_dead_code()
    for site, lowered in sites.values():
        # Passes are to see what autocast has multiplied.
        site.call.update_arg(list(site.arguments).index("compute_dtype"), lowered.compute)
    runner = Runner(passes, held=PASSES_BEFORE)
    for place, item in enumerate(runner.pipeline.passes, 1):
        runner.run_one(Event(place, item, THE_JOB, group))
    made: Any = output_of(graph).args[0]
    for (index, (_, lowered)), result in zip(sites.items(), made, strict=True):
        if result is not outputs[index]:
            program = Program(result, _inputs_of(result, lowered, sites.values(), str(passes)))
            results[index] = replace(lowered, program=program)


def _inputs_of(
    result: fx.Node, own: Lowered, sites: Iterable[tuple[LoweredSite, Lowered]], passes: str
) -> dict[fx.Node, tuple[str, Lowered]]:
    """What a result is made of; raises GraphInvalid where that is not its adapter, or too much."""
    banks = {s.arguments[name]: lowered for s, lowered in sites for name in ("a", "b")}
    read = [banks[node] for node in behind([result]) if node in banks]
    inputs: dict[fx.Node, tuple[str, Lowered]] = {}
    # Keys of masks are those of a site that drops.
    for site, lowered in sorted(sites, key=lambda pair: not pair[0].arguments["drops"]):
        if lowered in read:
            nodes = {n: v for n, v in site.arguments.items() if isinstance(v, fx.Node)}
            for name, node in nodes.items():
                inputs.setdefault(node, (name, lowered))
    made_of = behind([result], inputs.__contains__) - set(inputs)
    unknown = [node for node in made_of if node.op != "call_function"]
    dropped = read.count(own) < len(("a", "b"))
    if not dropped and not unknown:
        return inputs
    raise GraphInvalid(
        f"passes '{passes}' drop an adapter"
        if dropped
        else f"passes '{passes}' read what Dynamo's graph does not have",
        site=own.calls.path,
        expected="a result that is made of its site's inputs, A and B among them",
        found=", ".join(node.name for node in unknown) if not dropped else None,
        help="this is a defect of the passes in the option `passes`, or they are not for it",
    )


def _ends(site: LoraCalls) -> tuple[fx.Node, fx.Node]:
    """The results of a LoRA layer and of its frozen module."""
    results, anchors = site.results(), site.anchors()
    if len(site.adapters) > 1:
        raise NotLowerable(f"{len(site.adapters)} adapters are active on it")
    if len(results) != 1:
        raise NotLowerable(f"it hands on {len(results)} values; it may run more than once")
    if len(anchors) != 1 or not isinstance(value_of(anchors[0]), Tensor):
        raise NotLowerable(f"its frozen module hands on {len(anchors)} values")
    return results[0], anchors[0]


class _SiteGraph:
    """The sites_graph of one region while they are made.

    graph    inputs are the tables and what sites read, the output is all sites' results
    stands   node of `graph` to Dynamo's
    outer    what sites read from the rest: Dynamo's node, and the dtype in which autocast hands it
             to products, to node of `graph`
    numbers  scaling and rate of a site, by its path, where they are inputs of Dynamo's graph
    weights  A and B of a site's branch, by its path; nodes of `graph`
    """

    def __init__(self, region: GraphRegion) -> None:
        self.region = region
        self.graph = fx.Graph()
        self.stands: dict[fx.Node, fx.Node] = {}
        self.outer: dict[tuple[fx.Node, torch.dtype | None], fx.Node] = {}
        self.numbers: dict[str, dict[str, fx.Node]] = {}
        self.weights: dict[str, tuple[fx.Node, fx.Node]] = {}
        self.tables = {name: self.graph.placeholder(name) for name in TABLES}
        mode = next(
            value.fake_mode
            for value in map(value_of, region.module.graph.nodes)
            if isinstance(value, FakeTensor)
        )
        for name, (shape, dtype) in TABLES.items():
            value = fake_like(mode, shape, dtype)
            self.tables[name].meta.update(val=value, role="table", jobs=(), path="")

    def add(self, site: LoraCalls) -> fx.Node:
        """Copy one site; returns the node that writes its result."""
        result, anchor = _ends(site)
        _refuse(site, self.region)
        autocast = _autocast(site)
        outside: dict[fx.Node, fx.Node] = {}
        for node in site.nodes:
            for source in node.all_input_nodes:
                if source not in site.nodes and not is_number(source):
                    outside[source] = self._outside(source, autocast)
        copies: dict[fx.Node, Any] = {}
        for node in site.nodes:
            if not is_number(node):
                self._copy(site, node, copies, outside, anchor)
        args = (copies[anchor], copies[result], self.tables["segments"], 0, 0)
        write = self.graph.call_function(ops.segment_write.default, args)
        self._tag(write, site, result)
        self.numbers[site.path] = self._numbers(site.path, write, copies[anchor])
        return write

    def _numbers(self, site: str, write: fx.Node, anchor: fx.Node) -> dict[str, fx.Node]:
        """Scaling and rate of a site's branch that only the run knows; Dynamo's nodes."""
        try:
            matched = match_nodes(write, anchor, match_frozen(anchor).x)
        except NoMatch:
            return {}
        if isinstance(matched, Miss):
            return {}
        self.weights[site] = matched["A's weight"], matched["B's weight"]
        calls = {"scaling": matched["scaled branch"], "dropout": matched.captures.get("dropout")}
        return {
            name: source
            for name, call in calls.items()
            if call is not None
            for source in self.stands[call].all_input_nodes
            if is_number(source)
        }

    def _outside(self, source: fx.Node, autocast: torch.dtype | None) -> fx.Node:
        """What a site reads from the rest: a stored tensor, or a value.

        autocast   the dtype that what is no adapter's has in products, None: its own
        """
        value = value_of(source)
        stored = source in self.region.stored and isinstance(value, Tensor)
        owner: Any = "job" if stored and value.requires_grad else "base"
        casts = isinstance(value, Tensor) and value.is_floating_point() and owner == "base"
        key = (source, autocast if casts else None)
        if key in self.outer:
            return self.outer[key]
        value = value if key[1] is None else value.to(key[1])
        if stored:
            outer = self.graph.create_node("get_attr", source.name)
            ref = TensorRef(owner, source.name, tuple(value.shape), value.dtype)
            outer.meta["tensor"] = ref
        else:
            outer = self.graph.placeholder(source.name)
        outer.meta.update(val=value, path="", role="shared", jobs=(THE_JOB,))
        self.stands[outer] = source
        self.outer[key] = outer
        return outer

    def _copy(
        self,
        site: LoraCalls,
        node: fx.Node,
        copies: dict[fx.Node, Any],
        outside: dict[fx.Node, fx.Node],
        anchor: fx.Node,
    ) -> None:
        branch = node not in site.frozen

        def take(source: fx.Node) -> Any:
            if is_number(source):
                return STAND_IN
            value: fx.Node = copies[source] if source in copies else outside[source]
            stored = source in self.region.stored
            shared = source is anchor or source not in copies
            if branch and shared and not stored and isinstance(value_of(source), Tensor):
                return self._read(site, value, source)
            return value

        call = translate(node)
        if call is None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), take)
            copy = self.graph.create_node(node.op, node.target, args, kwargs)
        elif call.target is None:
            copies[node] = fx.map_arg(call.args, take)[0]
            return
        else:
            copy = self.graph.call_function(call.target, fx.map_arg(call.args, take))
        self._tag(copy, site, node, "adapter" if branch else "shared")
        copies[node] = copy

    def _read(self, site: LoraCalls, value: fx.Node, source: fx.Node) -> fx.Node:
        args = (value, self.tables["segments"], 0, 0)
        read = self.graph.call_function(ops.segment_read.default, args)
        self._tag(read, site, source)
        return read

    def _tag(self, copy: fx.Node, site: LoraCalls, node: fx.Node, role: str = "adapter") -> None:
        self.stands[copy] = node
        copy.meta.update(
            val=value_of(node), path=site.path, site=site.path, jobs=(THE_JOB,), role=role
        )

    def read_back(self, site: LoraCalls, result: fx.Node) -> Lowered | Left:
        lowered = lowered_site(result)
        if lowered is None:
            reason = str(result.meta.get("as_it_is", "no pattern fits it"))
            return Left(site.path, _FUNCTION.sub(r"\1", reason))
        if lowered.operator is ADD:
            reason = f"its module is no linear ({lowered.arguments['y'].target})"
            return Left(site.path, _FUNCTION.sub(r"\1", reason))
        weight, bias = (lowered.arguments[name] for name in ("weight", "bias"))
        (branch,) = lowered.branches.values()
        transposed = is_call(weight, aten.t.default)
        stored: Any = weight.args[0] if transposed else weight
        numbers, (a, b) = self.numbers[site.path], self.weights[site.path]
        autocast = _autocast(site)
        return Lowered(
            site,
            site.results()[0],
            self.stands[lowered.arguments["x"]],
            self.stands[stored],
            None if bias is None else self.stands[bias],
            transposed,
            self.stands[a],
            self.stands[b],
            numbers.get("scaling", branch.scaling),
            numbers.get("dropout", branch.dropout),
            autocast or lowered.arguments["compute_dtype"],
            autocast,
        )


def _refuse(site: LoraCalls, region: GraphRegion) -> None:
    """Refuse what the pattern fits and the operator does not compute."""
    frozen = {source for node in site.frozen for source in node.all_input_nodes}
    stored = [tensor_of(source) for source in frozen & region.stored]
    if torch.is_grad_enabled() and any(value.requires_grad for value in stored):
        raise NotLowerable("its frozen linear is trained")
    products, result = _products(site), site.results()[0]
    if not any(map(_mixes, products)):
        return
    if len({tensor_of(node).dtype for node in (*products, result)}) > 1:
        raise NotLowerable("its products give several dtypes")


def _autocast(site: LoraCalls) -> torch.dtype | None:
    """The dtype that autocast gives all products of a site, None where none is on.

    Only autocast multiplies operands of other dtypes than the result's.
    """
    products = _products(site)
    return tensor_of(products[0]).dtype if any(map(_mixes, products)) else None


def _products(site: LoraCalls) -> list[fx.Node]:
    """The calls of a site that multiply matrices."""
    calls = ((node, translate(node)) for node in site.nodes)
    return [node for node, call in calls if call is not None and call.target in PRODUCTS]


def _mixes(product: fx.Node) -> bool:
    """Whether a product has operands or a result of several dtypes."""
    read = [value_of(source) for source in (product, *product.all_input_nodes)]
    return len({value.dtype for value in read if isinstance(value, Tensor)}) > 1


# From the operators that Dynamo records to those that tracing yields. Only what stands in PEFT's
# LoRA layers has an entry; every other call keeps its name, so that a pattern can say what it met.

Args = tuple[Any, ...]
Rule = Callable[..., "OpCall | None"]
CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call in the vocabulary of tracing; no target where it returns its first argument."""

    target: Any
    args: Args


def translate(node: fx.Node) -> OpCall | None:
    """Recorded call in the vocabulary of tracing, or None where it has no entry."""
    if isinstance(node.target, torch._ops.OpOverload):
        return OpCall(node.target, node.args) if not node.kwargs else None
    rule = RULES.get(node.target)
    if rule is None:
        return None
    try:
        return rule(*node.args, **node.kwargs)
    except TypeError:
        return None


def _linear(x: Any, weight: Any, bias: Any = None) -> OpCall:
    given = (x, weight) if bias is None else (x, weight, bias)
    return OpCall(aten.linear.default, given)


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> OpCall | None:
    if inplace:
        return None
    return OpCall(aten.dropout.default, (x, p, True)) if training and p else OpCall(None, (x,))


def _mul(x: Any, other: Any) -> OpCall:
    given = (x, other) if isinstance(x, fx.Node) else (other, x)
    return OpCall(aten.mul.Tensor, given)


def _view(x: Any, *shape: Any) -> OpCall:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    return OpCall(aten.view.default, (x, list(sizes)))


def _to(x: Any, first: Any = None, *, dtype: Any = None) -> OpCall | None:
    """`to` with a dtype alone: what moves a tensor to a device is no cast."""
    dtype = first if dtype is None else dtype
    return OpCall(aten.to.dtype, (x, dtype)) if isinstance(dtype, torch.dtype) else None


def _rules(names: tuple[Any, ...], rule: Rule) -> dict[Any, Rule]:
    return dict.fromkeys(names, rule)


RULES: dict[Any, Rule] = {
    F.linear: _linear,
    F.dropout: _dropout,
    torch.addmm: lambda x, mat1, mat2: OpCall(aten.addmm.default, (x, mat1, mat2)),
    **_rules(
        (torch.add, operator.add, "add"), lambda x, other: OpCall(aten.add.Tensor, (x, other))
    ),
    **_rules((torch.mul, operator.mul, "mul"), _mul),
    **_rules(
        (torch.matmul, operator.matmul, "matmul"),
        lambda x, other: OpCall(aten.matmul.default, (x, other)),
    ),
    **_rules((torch.reshape, "view", "reshape"), _view),
    **_rules((torch.t, "t"), lambda x: OpCall(aten.t.default, (x,))),
    **_rules(
        (torch.transpose, "transpose"),
        lambda x, dim0, dim1: OpCall(aten.transpose.int, (x, dim0, dim1)),
    ),
    "to": _to,
    **{name: partial(_to, dtype=dtype) for name, dtype in CASTS.items()},
}
