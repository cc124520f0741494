"""Replace plain LoRA branches, and DoRA's, by one operator a site.

Reads   the segment writes that fuse-backbone chained behind each frozen linear.
Writes  one multi_lora_linear for the linear and all its branches, with a dora_scale behind it where
        some are DoRA's, or one multi_lora_add for the plain branches behind another operator;
        get_attr nodes of the site's AdapterBank. For a mixture's experts one multi_lora_experts,
        which reads each job's own A and B.
Keeps   every number up to rounding; branches of other kinds (DoRA with dropout, embeddings, trained
        copies) stay as they are, and the report says why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tlora_fx.errors import NotFoldable
from tlora_fx.ir.graph import GroupGraph, TensorRef, is_call, placeholders, shape_of
from tlora_fx.ir.lora_sites import ADD, EXPERTS, ONE, SCALE, BranchNumbers
from tlora_fx.pipeline import GroupPass, Numerics, count, register
from tlora_fx.rewriting import (
    Maker,
    Match,
    Miss,
    Pattern,
    Rewriter,
    add,
    anything,
    call,
    constant,
    either,
    match,
    mul,
    nearest_match,
    stored,
    uncast,
    where,
)

# The patterns of a frozen linear and of a plain LoRA branch in a fused graph.
#
# A branch stands between two segment operators: it reads the job's segment of the site's input and
# of the frozen linear's result, and writes the job's segment of that result:
#
#     segment of y  <-  cast(cast(segment of y) + scale * B(A(dropout(cast(segment of x)))))
#
# The casts are PEFT's, which multiplies adapters in their own dtype.


aten = torch.ops.aten
READ = torch.ops.tlora_fx.segment_read.default
VIEWS = (aten.view.default, aten.reshape.default)
WRITE = torch.ops.tlora_fx.segment_write.default
LINEAR = aten.linear.default
EXPERT_LINEAR = torch.ops.tlora_fx.expert_linear.default
INPUT, RESULT = "frozen linear's input", "frozen linear's result"
CHOICE = "choice of experts"


def _swapped(matrix: Pattern) -> Pattern:
    """A matrix transposed, however that is written."""
    return either(
        call((aten.t.default, aten.numpy_T.default, aten.mT.default), matrix),
        call(aten.transpose.int, matrix, either(0, -2), either(1, -1)),
        call(aten.transpose.int, matrix, either(1, -1), either(0, -2)),
        call(aten.permute.default, matrix, either([1, 0], [-1, -2])),
    )


_PRODUCT = where(
    "its weight is a matrix",
    lambda found: len(shape_of(found["weight"]) or ()) == 2,
    call(aten.matmul.default, anything("x"), _swapped(stored("weight")), name="product"),
)
# How models write y = x W^T + bias: torch's linear, GPT-2's Conv1D, a product by hand.
FROZEN: Mapping[str, Pattern] = {
    "linear": call(LINEAR, anything("x"), stored("weight"), either(None, stored("bias"))),
    "Conv1D": call(
        VIEWS,
        call(
            aten.addmm.default,
            stored("bias"),
            call(VIEWS, anything("x"), ..., name="flattened input"),
            stored("weight"),
            name="product",
        ),
        ...,
    ),
    "matmul": _PRODUCT,
    "matmul with a bias": add(_PRODUCT, stored("bias")),
}


def _reads(whole: str, name: str) -> Pattern:
    """A read of the job's segment of a value."""
    return uncast(call(READ, anything(whole), anything(), anything("job"), anything(), name=name))


_INPUT = _reads(INPUT, "input")
_A = call(
    LINEAR,
    either(
        _INPUT,
        uncast(call(aten.dropout.default, _INPUT, constant("rate"), True, name="dropout")),
    ),
    stored("A's weight"),
    name="A",
)
_B = uncast(call(LINEAR, uncast(_A), stored("B's weight"), name="B"))


def _written(summand: Pattern) -> Pattern:
    """A write of the job's segment of the result with something added."""
    total = add(_reads(RESULT, "first summand"), uncast(summand), name="sum")
    return call(WRITE, anything(), uncast(total), anything(), anything("job"), anything())


BRANCH: Pattern = _written(mul(_B, constant("scaling"), name="scaled branch"))


def expert_branch(experts: int, crossed: bool) -> Pattern:
    """LoRA on a mixture's experts as tracing/experts.py writes it.

    crossed   B reads the tokens
    """
    upper = call(aten.unflatten.int, uncast(stored("A's weight")), 0, [experts, -1])
    split = call(aten.unflatten.int, uncast(stored("B's weight")), 1, [-1, experts])
    lower = call(aten.permute.default, split, [2, 0, 1])
    first, second = (lower, upper) if crossed else (upper, lower)
    index = _reads(CHOICE, "chosen experts")
    small = call(EXPERT_LINEAR, _INPUT, first, None, index, crossed, name="low-rank rows")
    product = call(EXPERT_LINEAR, small, second, None, index, crossed, name="branch")
    return _written(mul(uncast(product), constant("scaling"), name="scaled branch"))


# DoRA's, as PEFT writes it, with the frozen weight W and bias:
#
#     ratio = magnitude / norm of each row of (W + scale * B A), which has no gradient
#     segment of y  <-  segment of y + (ratio - 1) * (segment of y - bias) + ratio * B(A x) * scale
#
# With dropout, W multiplies the dropped x in place of (segment of y - bias).
WEIGHT, BIAS = "frozen linear's weight", "frozen linear's bias"


@cache
def _dora(biased: bool, transposed: bool, dropped: bool = False) -> Pattern:
    """A DoRA branch of a linear with a bias or without, whose weight is stored [in, out] or not."""
    weight = where(
        "its normed weight is the frozen linear's",
        lambda found: found["normed weight"].target == found[WEIGHT].target,
        stored("normed weight"),
    )
    identity = call(LINEAR, uncast(call(aten.eye.default, ...)), stored("A's weight"))
    change = call(LINEAR, uncast(identity), stored("B's weight"))
    adapted = add(
        _still(_swapped(weight)) if transposed else uncast(weight),
        uncast(mul(_still(_swapped(change)), constant("scaling"))),
        name="adapted weight",
    )
    norm = call(aten.linalg_norm.default, uncast(adapted), None, [1], name="norm")
    ratio = call(
        VIEWS,
        uncast(call(aten.div.Tensor, uncast(stored("magnitude", "job")), _still(norm))),
        [1, constant()],
        name="ratio",
    )
    first = _reads(RESULT, "first summand")
    rest = call(aten.sub.Tensor, first, stored("subtracted bias"), name="result without its bias")
    if dropped:
        base = call(LINEAR, ..., name="product of the dropped input")
    elif biased:
        base = where(
            "its subtracted bias is the frozen linear's",
            lambda found: found["subtracted bias"].target == found[BIAS].target,
            rest,
        )
    else:
        base = first
    return _written(
        add(
            uncast(mul(uncast(call(aten.sub.Tensor, uncast(ratio), 1)), uncast(base))),
            uncast(mul(uncast(mul(uncast(ratio), _B)), constant("scaling"))),
            name="DoRA's change",
        )
    )


def _still(inner: Pattern) -> Pattern:
    """A value, with a gradient or cut off from it."""
    return uncast(either(inner, call(aten.detach.default, uncast(inner))))


class NoMatch(Exception):
    """Reason why a branch is no plain LoRA branch, for the report; `miss` says it in full."""

    def __init__(self, why: str, miss: Miss) -> None:
        super().__init__(why)
        self.miss = miss


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen linear: y = x W^T + bias.

    transposed   the weight is stored [in, out] (GPT-2's Conv1D)
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class Other:
    """A frozen operator that is no linear; its plain branches can be added to what it gives.

    x     the value that they read, None where no branch is plain
    why   it is no linear
    """

    x: fx.Node | None
    why: str


@dataclass(frozen=True, slots=True)
class LoraBranch:
    """A LoRA branch of one job: its captures.

    magnitude   of DoRA, which scales the columns of the result; None: plain
    """

    job: int
    a: fx.Node
    b: fx.Node
    scaling: float
    dropout: float
    magnitude: fx.Node | None = None


def match_frozen(anchor: Any) -> Frozen:
    """The frozen linear whose result a branch replaces.

    raises    NoMatch
    """
    matched = nearest_match(list(FROZEN.values()), anchor)
    if isinstance(matched, Miss):
        why = matched.why if matched.held else f"its module is no linear ({anchor.target})"
        raise NoMatch(why, matched)
    transposed = matched.pattern is FROZEN["Conv1D"]
    return Frozen(matched["x"], matched["weight"], matched.captures.get("bias"), transposed)


def match_operator(anchor: Any, writes: Sequence[fx.Node]) -> Frozen | Other:
    """Operator whose result a site's branches replace.

    anchor    its result
    writes    the nodes that write jobs' segments of it
    """
    try:
        return match_frozen(anchor)
    except NoMatch as reason:
        plain = (match(BRANCH, write, {RESULT: anchor}) for write in writes)
        inputs = (matched[INPUT] for matched in plain if isinstance(matched, Match))
        return Other(next((x for x in inputs if _is_made_of(anchor, x)), None), str(reason))


def _is_made_of(anchor: fx.Node, x: fx.Node) -> bool:
    """Whether each token of x gave one of the anchor's, in x's dtype."""
    result, given = anchor.meta["val"], x.meta["val"]
    tokens, others = given.shape[:-1], result.shape[:-1]
    return (
        given.dtype == result.dtype
        and len(tokens) == len(others)
        and all(statically_known_true(n == m) for n, m in zip(tokens, others, strict=True))
    )


def match_branch(write: fx.Node, anchor: fx.Node, x: fx.Node) -> LoraBranch:
    """The plain LoRA branch behind a segment write.

    write     the node that writes the job's segment
    anchor    the frozen operator's result
    x         the frozen operator's input
    raises    NoMatch naming the first condition that fails
    """
    matched = match_nodes(write, anchor, x)
    if isinstance(matched, Miss):
        raise NoMatch(matched.why, matched)
    return LoraBranch(
        int(matched["job"]),
        matched["A's weight"],
        matched["B's weight"],
        float(matched["scaling"]),
        float(matched.captures.get("rate", 0.0)),
    )


def match_nodes(write: fx.Node, anchor: fx.Node, x: fx.Node) -> Match | Miss:
    """The pattern's match behind a segment write, or how near it came."""
    return match(BRANCH, write, {RESULT: anchor, INPUT: x})


def match_dora(write: fx.Node, anchor: fx.Node, frozen: Frozen) -> LoraBranch | None:
    """The DoRA branch behind a segment write, None where there is none.

    raises    NoMatch for one with dropout
    """
    given = {RESULT: anchor, INPUT: frozen.x, WEIGHT: frozen.weight, BIAS: frozen.bias}
    biased = frozen.bias is not None
    matched = match(_dora(biased, frozen.transposed), write, given)
    if isinstance(matched, Miss):
        if match(_dora(biased, frozen.transposed, dropped=True), write, given):
            raise NoMatch(DROPPED, matched)
        return None
    return LoraBranch(
        int(matched["job"]),
        matched["A's weight"],
        matched["B's weight"],
        float(matched["scaling"]),
        0.0,
        matched["magnitude"],
    )


BANK = "lora"
DROPPED = "DoRA with dropout multiplies what is left of its input by the frozen weight once more"


@register
@dataclass(frozen=True, slots=True)
class LowerAdapters(GroupPass):
    """Replace LoRA branches by tlora_fx::multi_lora_linear, multi_lora_add or multi_lora_experts.

    compute   dtype in which adapters multiply: "base" (that of the base), "float32", or "job" (what
              each job's file says)
    dora      also replace branches of DoRA adapters
    """

    name: ClassVar[str] = "lower-adapters"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    statistics: ClassVar[Mapping[str, str]] = {
        "lowered": "branches in shared operators",
        "kept": "branches that run as they are",
    }
    preserves_numerics: ClassVar[Numerics] = "bound"

    compute: Literal["job", "base", "float32"] = "job"
    dora: bool = True

    def run(self, group: GroupGraph) -> None:
        graphs = [("", group.root), *((b.name, b.graph) for b in group.blocks.values())]
        mixed = self._partly_lowerable(group, graphs)
        for block, graph in graphs:
            for anchor, writes in chains(graph).items():
                self._lower(group, graph, block, anchor, writes, mixed)
            Rewriter(graph).erase_dead()

    def _partly_lowerable(
        self, group: GroupGraph, graphs: Sequence[tuple[str, fx.Graph]]
    ) -> frozenset[tuple[str, str]]:
        """Jobs and paths of modules that run more than once, where not all calls can be lowered.

        Lowered calls read the site's bank, others the job's own A and B. Calls of both kinds would
        train two adapters, so the job keeps all of them as they are.
        """
        if not group.base.repeated:
            return frozenset()
        readers: dict[tuple[str, str], set[fx.Node]] = {}
        lowered: set[fx.Node] = set()
        for block, graph in graphs:
            for node in _repeated(group, block, graph):
                for path in _paths(group, block, str(node.meta["site"])):
                    readers.setdefault((node.meta["jobs"][0], path), set()).update(node.users)
            for anchor, writes in chains(graph).items() if readers else ():
                frozen = match_operator(anchor, writes)
                for write in writes:
                    branch = self._lowerable(group, block, write, anchor, frozen)
                    if isinstance(branch, LoraBranch):
                        lowered.update(_inside(anchor, [write], through=False))
        return frozenset(key for key, nodes in readers.items() if nodes - lowered)

    def _lowerable(
        self, group: GroupGraph, where: str, write: fx.Node, anchor: fx.Node, frozen: Frozen | Other
    ) -> LoraBranch | str:
        """The branch behind a segment write, or why it runs as it is."""
        try:
            branch = self._branch(write, anchor, frozen)
        except NoMatch as reason:
            return frozen.why if isinstance(frozen, Other) else str(reason)
        if branch.dropout > 0 and _runs_again(group, where, str(write.meta["site"])):
            return "it draws other masks each time it runs"
        return branch

    def _lower(
        self,
        group: GroupGraph,
        graph: fx.Graph,
        where: str,
        anchor: fx.Node,
        writes: list[fx.Node],
        mixed: Collection[tuple[str, str]],
    ) -> None:
        if is_call(anchor, EXPERT_LINEAR):
            self._lower_experts(group, graph, where, anchor, writes)
            return
        site = str(writes[0].meta["site"])
        frozen = match_operator(anchor, writes)
        branches: list[tuple[fx.Node, LoraBranch]] = []
        for write in writes:
            branch = self._lowerable(group, where, write, anchor, frozen)
            (job,) = write.meta["jobs"]
            if isinstance(branch, str):
                self._keep(group, where, site, write, branch)
            elif any((job, path) in mixed for path in _paths(group, where, site)):
                why = "another call of its module runs as it is"
                self._keep(group, where, site, write, why)
            else:
                branches.append((write, branch))
        if branches and not self._replace(group, graph, anchor, frozen, where, branches):
            for write, _ in branches:
                self._keep(group, where, site, write, "the rewrite is held back by a bisection")

    def _lower_experts(
        self, group: GroupGraph, graph: fx.Graph, where: str, anchor: fx.Node, writes: list[fx.Node]
    ) -> None:
        """Put one operator in place of the experts' product and all jobs' branches on it."""
        site, branches = str(writes[0].meta["site"]), list[tuple[fx.Node, ExpertBranch]]()
        for write in writes:
            branch = match_expert_branch(write, anchor)
            kind = branches[0][1].kind if branches else None
            if isinstance(branch, Miss):
                self._keep(group, where, site, write, branch.why)
            elif kind not in (None, branch.kind):
                self._keep(group, where, site, write, "it is not of the first job's type and form")
            else:
                branches.append((write, branch))
        if branches and not _replace_experts(graph, where, site, anchor, branches):
            for write, _ in branches:
                self._keep(group, where, site, write, "the rewrite is held back by a bisection")

    def _branch(self, write: fx.Node, anchor: fx.Node, frozen: Frozen | Other) -> LoraBranch:
        """The branch behind a segment write; raises NoMatch where it is of no kind that lowers."""
        try:
            # Without an input nothing matches.
            return match_branch(write, anchor, frozen.x)  # type: ignore[arg-type]
        except NoMatch:
            dora = self.dora and isinstance(frozen, Frozen)
            branch = match_dora(write, anchor, frozen) if dora else None  # type: ignore[arg-type]
            if branch is None:
                raise
            return branch

    def _keep(self, group: GroupGraph, where: str, site: str, write: fx.Node, reason: str) -> None:
        path = f"{where}.{site}" if where else site
        (job,) = write.meta["jobs"]
        if not group.exact and _is_plain(group, job, where, site):
            raise NotFoldable(
                "a plain LoRA branch cannot be lowered",
                site=path,
                job=job,
                found=reason,
            )
        write.meta["as_it_is"] = reason
        count("kept")
        group.notes.append((self.name, f"{path} of job '{job}' runs as it is: {reason}"))

    def _replace(
        self,
        group: GroupGraph,
        graph: fx.Graph,
        anchor: fx.Node,
        frozen: Frozen | Other,
        where: str,
        branches: list[tuple[fx.Node, LoraBranch]],
    ) -> bool:
        """Put one operator in place of the linear and its branches; False where held back.

        Where the branches stand behind another operator, that one stays.
        """
        writes = [write for write, _ in branches]
        jobs = tuple(write.meta["jobs"][0] for write in writes)
        site = str(writes[0].meta["site"])
        tables = placeholders(graph)
        dtype = branches[0][1].a.meta["tensor"].dtype
        asked = group.compute if self.compute == "job" else self.compute
        compute = anchor.meta["val"].dtype if asked == "base" else dtype
        capacity = _capacity(group, where, site, branches)
        operator = ADD if isinstance(frozen, Other) else ONE
        numbers = {
            job: BranchNumbers(_rank(branch), branch.scaling, branch.dropout)
            for job, (_, branch) in zip(jobs, branches, strict=True)
        }

        def build(make: Maker) -> fx.Node:
            bank = {
                name: make.tensor(TensorRef("buffer", f"{site}.{BANK}.{name}", shape, kind))
                for name, shape, kind in _bank_tensors(len(group.jobs), branches, dtype)
            }
            served = _served(make, frozen, writes[0])
            lowered = make(
                operator, *served, *(bank[name] for name in ("a", "b", "ranks", "scales", "rates")),
                tables["segments"], tables["keys"], tables["token_index"], bank["site"], compute,
                *capacity,
            )  # fmt: skip
            lowered.meta["branches"] = numbers
            return _scaled(make, lowered, served[1:], bank, tables, jobs, branches)

        lowered = Rewriter(graph).replace(
            writes[0] if operator is ADD else anchor,
            build,
            f"{operator.__name__.partition('.')[0]} at {f'{where}.{site}'.strip('.')}",
            {"role": "adapter", "jobs": jobs, "site": site, "path": site},
            _inside(anchor, writes),
        )
        if lowered is None:
            return False
        _drop_writes(graph, writes)
        return True


@dataclass(frozen=True, slots=True)
class ExpertBranch:
    """LoRA of one job on a mixture's experts: its captures.

    rank      of each expert
    crossed   B reads the tokens
    """

    job: int
    a: fx.Node
    b: fx.Node
    rank: int
    scaling: float
    crossed: bool

    @property
    def kind(self) -> tuple[torch.dtype, bool]:
        """Properties that all branches of one operator share: the dtype of A, and its layout."""
        return self.a.meta["tensor"].dtype, self.crossed


def match_expert_branch(write: fx.Node, anchor: fx.Node) -> ExpertBranch | Miss:
    """The branch behind a segment write, or how near a pattern came.

    anchor   the experts' frozen product
    """
    x, weight, _, index, _ = anchor.args
    experts, nearest = int(weight.meta["val"].shape[0]), list[Miss]()  # type: ignore[union-attr]
    for crossed in (False, True):
        found = match(
            expert_branch(experts, crossed), write, {RESULT: anchor, INPUT: x, CHOICE: index}
        )
        if isinstance(found, Match):
            a, b = found["A's weight"], found["B's weight"]
            rank = int(a.meta["tensor"].shape[0]) // experts
            scaling = float(found["scaling"])
            return ExpertBranch(int(found["job"]), a, b, rank, scaling, crossed)
        nearest.append(found)
    return max(nearest, key=lambda miss: miss.held)


def _replace_experts(
    graph: fx.Graph,
    where: str,
    site: str,
    anchor: fx.Node,
    branches: list[tuple[fx.Node, ExpertBranch]],
) -> bool:
    """Write multi_lora_experts; False where the rewrite is held back."""
    writes, found = [write for write, _ in branches], [branch for _, branch in branches]
    jobs = tuple(write.meta["jobs"][0] for write in writes)

    def build(make: Maker) -> fx.Node:
        for branch in found:
            anchor.prepend(branch.a)
            anchor.prepend(branch.b)
        return make(
            EXPERTS, *anchor.args, [branch.a for branch in found], [branch.b for branch in found],
            [branch.job for branch in found], [branch.scaling for branch in found],
            found[0].crossed, placeholders(graph)["segments"],
        )  # fmt: skip

    lowered = Rewriter(graph).replace(
        anchor,
        build,
        f"multi_lora_experts at {f'{where}.{site}'.strip('.')}",
        {"role": "adapter", "jobs": jobs, "site": site, "path": site},
        _inside(anchor, writes),
    )
    if lowered is None:
        return False
    lowered.meta["branches"] = {
        job: BranchNumbers(branch.rank, branch.scaling, 0.0)
        for job, branch in zip(jobs, found, strict=True)
    }
    _drop_writes(graph, writes)
    return True


def _drop_writes(graph: fx.Graph, writes: list[fx.Node]) -> None:
    """Erase the writes of branches that are in an operator now."""
    count("lowered", len(writes))
    for write in writes:
        if not write._erased:
            write.replace_all_uses_with(write.args[0])  # type: ignore[arg-type]
            graph.erase_node(write)


def _served(make: Maker, frozen: Frozen | Other, write: fx.Node) -> tuple[Any, ...]:
    """What the operator applies, or adds to."""
    if isinstance(frozen, Other):
        return write.args[0], frozen.x
    weight = frozen.weight
    if frozen.transposed:
        tags = {tag: weight.meta[tag] for tag in ("role", "jobs")}
        weight = make.tagged(**tags)(aten.t.default, weight)
    return frozen.x, weight, frozen.bias


def _scaled(
    make: Maker,
    lowered: fx.Node,
    linear: tuple[Any, ...],
    bank: Mapping[str, fx.Node],
    tables: Mapping[str, fx.Node],
    jobs: Sequence[str],
    branches: list[tuple[fx.Node, LoraBranch]],
) -> fx.Node:
    """A lowered linear's result, the columns of DoRA's jobs scaled; itself where there are none.

    linear   weight and bias
    """
    indices, magnitudes, largest = [], [], 0
    for job, (_, branch) in zip(jobs, branches, strict=True):
        source = branch.magnitude
        if source is not None:
            # A node of its own: the branch's stands behind the linear.
            read = make.tagged(jobs=(job,)).tensor(source.meta["tensor"], str(source.target))
            magnitudes.append(read)
            indices.append(branch.job)
            largest = max(largest, _rank(branch))
    if not magnitudes:
        return lowered
    return make(
        SCALE, lowered, *linear, magnitudes,
        *(bank[name] for name in ("a", "b", "ranks", "scales", "rates", "site")),
        tables["segments"], tables["keys"], indices, largest,
    )  # fmt: skip


def _capacity(
    group: GroupGraph, where: str, site: str, branches: list[tuple[fx.Node, LoraBranch]]
) -> tuple[int, bool]:
    """The largest rank of a job at a site, in any layer that shares its code; whether any drops."""
    paths = _paths(group, where, site)
    lowered = [group.jobs[branch.job].sites for _, branch in branches]
    adapters = [own[path] for own in lowered for path in paths if path in own]
    if not adapters:  # a graph that Dynamo recorded: what its branches say is all there is
        return max(_rank(branch) for _, branch in branches), any(
            branch.dropout > 0 for _, branch in branches
        )
    return max(own.rank for own in adapters), any(own.dropout > 0 for own in adapters)


def _rank(branch: LoraBranch) -> int:
    return int(branch.a.meta["tensor"].shape[0])


def _is_plain(group: GroupGraph, job: str, where: str, site: str) -> bool:
    """Whether rank, scaling and rate of a branch may be another job's or layer's."""
    graph = next(graph for graph in group.jobs if graph.name == job)
    prefix = f"{group.blocks[where].instances[0]}." if where else ""
    return graph.sites[prefix + site].kind == "lora"


def _runs_again(group: GroupGraph, where: str, site: str) -> bool:
    """Whether the base runs a site's module more than once."""
    return any(path in group.base.repeated for path in _paths(group, where, site))


def _repeated(group: GroupGraph, where: str, graph: fx.Graph) -> Iterator[fx.Node]:
    """What jobs train in modules that the base runs more than once."""
    for node in graph.nodes:
        site, ref = node.meta.get("site"), node.meta.get("tensor")
        if site and ref is not None and ref.owner == "job" and _runs_again(group, where, str(site)):
            yield node


def _paths(group: GroupGraph, where: str, site: str) -> list[str]:
    """The paths of a site in all layers that share its code."""
    layers = group.blocks[where].instances if where else ("",)
    return [f"{layer}.{site}".strip(".") for layer in layers]


def chains(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Segment writes behind each replaced value, in order."""
    chains: dict[fx.Node, list[fx.Node]] = {}
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is WRITE:
            before: Any = node.args[0]
            anchor = first.get(before, before)
            first[node] = anchor
            chains.setdefault(anchor, []).append(node)
    return chains


def _bank_tensors(
    jobs: int, branches: list[tuple[fx.Node, LoraBranch]], dtype: torch.dtype
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of what a site's AdapterBank holds."""
    rank = sum(_rank(branch) for _, branch in branches)
    a, b = branches[0][1].a.meta["tensor"], branches[0][1].b.meta["tensor"]
    return [
        ("a", (rank, a.shape[1]), dtype),
        ("b", (rank, b.shape[0]), dtype),
        ("ranks", (jobs + 1,), torch.int32),
        ("scales", (jobs,), torch.float64),
        ("rates", (jobs,), torch.float64),
        ("site", (), torch.int64),
    ]


def _inside(anchor: fx.Node, writes: list[fx.Node], *, through: bool = True) -> list[fx.Node]:
    """The nodes of branches: those between their reads and their writes.

    through   also those of branches that these read
    """
    inside: dict[fx.Node, None] = {}
    stack = [node for write in writes for node in (write, write.args[1])]
    while stack:
        node: Any = stack.pop()
        if node is not anchor and node not in inside and node.meta.get("role") == "adapter":
            inside[node] = None
            ends = node in writes or (not through and node.target is WRITE)
            stack.extend([] if ends else node.all_input_nodes)
    return list(inside)
