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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tlora_fx.errors import NotFoldable
from tlora_fx.ir.graph import (
    AdapterSite,
    GroupGraph,
    TensorRef,
    is_call,
    placeholders,
    shape_of,
)
from tlora_fx.ir.lora_sites import ADD, EXPERTS, ONE, SCALE, BranchNumbers
from tlora_fx.ir.verifier import named_graphs
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
    """Reason why a branch is no plain LoRA branch, for the report."""


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

    rank        on a mixture's experts, of each expert
    magnitude   of DoRA, which scales the columns of the result; None: plain
    crossed     on a mixture's experts, whether B reads the tokens
    """

    job: int
    a: fx.Node
    b: fx.Node
    rank: int
    scaling: float
    dropout: float = 0.0
    magnitude: fx.Node | None = None
    crossed: bool = False

    @property
    def numbers(self) -> BranchNumbers:
        """Its numbers, as the operator notes them."""
        return BranchNumbers(self.rank, self.scaling, self.dropout)

    @property
    def kind(self) -> tuple[torch.dtype, bool]:
        """Properties that all branches on experts share: the dtype of A, and its layout."""
        return self.a.meta["tensor"].dtype, self.crossed


def match_frozen(anchor: Any) -> Frozen:
    """The frozen linear whose result a branch replaces.

    raises    NoMatch
    """
    matched = nearest_match(list(FROZEN.values()), anchor)
    if isinstance(matched, Miss):
        why = matched.why if matched.held else f"its module is no linear ({anchor.target})"
        raise NoMatch(why)
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


def match_branch(
    write: fx.Node, anchor: fx.Node, frozen: Frozen | Other, *, dora: bool
) -> LoraBranch:
    """The LoRA branch behind a segment write.

    write     the node that writes the job's segment
    anchor    the frozen operator's result
    dora      it may be DoRA's
    raises    NoMatch naming the first condition of a plain branch that fails
    """
    # Without an input nothing matches.
    matched = match_nodes(write, anchor, frozen.x)
    if isinstance(matched, Miss) and dora and isinstance(frozen, Frozen):
        matched = _match_dora(write, anchor, frozen) or matched
    if isinstance(matched, Miss):
        raise NoMatch(matched.why)
    return _branch(
        matched,
        dropout=float(matched.captures.get("rate", 0.0)),
        magnitude=matched.captures.get("magnitude"),
    )


def _branch(matched: Match, experts: int = 1, **more: Any) -> LoraBranch:
    a, b = matched["A's weight"], matched["B's weight"]
    rank = int(a.meta["tensor"].shape[0]) // experts
    return LoraBranch(int(matched["job"]), a, b, rank, float(matched["scaling"]), **more)


def match_nodes(write: fx.Node, anchor: fx.Node, x: fx.Node | None) -> Match | Miss:
    """The pattern's match behind a segment write, or how near it came."""
    return match(BRANCH, write, {RESULT: anchor, INPUT: x})


def _match_dora(write: fx.Node, anchor: fx.Node, frozen: Frozen) -> Match | None:
    """The match of a DoRA branch behind a segment write; raises NoMatch for one with dropout."""
    given = {RESULT: anchor, INPUT: frozen.x, WEIGHT: frozen.weight, BIAS: frozen.bias}
    biased = frozen.bias is not None
    matched = match(_dora(biased, frozen.transposed), write, given)
    if isinstance(matched, Match):
        return matched
    if match(_dora(biased, frozen.transposed, dropped=True), write, given):
        raise NoMatch(DROPPED)
    return None


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
        every = [
            _Chain(group, block, graph, anchor, own)
            for block, graph in named_graphs(group)
            for anchor, writes in chains(graph).items()
            for own in _by_site(writes)
        ]
        mixed = self._partly_lowerable(group, every)
        for _, behind in groupby(every, key=attrgetter("anchor")):
            # Lowering one site rewrites the linear behind which the others stand.
            matched = [(chain, *self._matched(chain, mixed)) for chain in behind]
            for chain, frozen, branches in matched:
                if is_call(chain.anchor, EXPERT_LINEAR):
                    chain.lower_experts()
                elif branches:
                    asked = chain.group.compute if self.compute == "job" else self.compute
                    chain.lower(frozen, branches, in_base_dtype=asked == "base")
        for graph in group.graphs():
            Rewriter(graph).erase_dead()

    def _partly_lowerable(
        self, group: GroupGraph, every: Sequence[_Chain]
    ) -> frozenset[tuple[str, str]]:
        """Jobs and paths of modules that run more than once, where not all calls can be lowered.

        Lowered calls read the site's bank, others the job's own A and B. Calls of both kinds would
        train two adapters, so the job keeps all of them as they are.
        """
        readers: dict[tuple[str, str], set[fx.Node]] = {}
        lowered: set[fx.Node] = set()
        for block, graph in named_graphs(group) if group.base.repeated else ():
            for node in graph.nodes:
                site, ref = node.meta.get("site"), node.meta.get("tensor")
                paths = _paths(group, block, str(site)) if site else []
                if ref is None or ref.owner != "job" or group.base.repeated.isdisjoint(paths):
                    continue
                for path in paths:
                    readers.setdefault((node.meta["jobs"][0], path), set()).update(node.users)
        for chain in every if readers else ():
            frozen = match_operator(chain.anchor, chain.writes)
            for write in chain.writes:
                if isinstance(self._lowerable(chain, write, frozen), LoraBranch):
                    lowered.update(_inside(chain.anchor, [write], through=False))
        return frozenset(key for key, nodes in readers.items() if nodes - lowered)

    def _lowerable(self, chain: _Chain, write: fx.Node, frozen: Frozen | Other) -> LoraBranch | str:
        """The branch behind a segment write, or why it runs as it is."""
        try:
            branch = match_branch(write, chain.anchor, frozen, dora=self.dora)
        except NoMatch as reason:
            return frozen.why if isinstance(frozen, Other) else str(reason)
        if branch.dropout > 0 and not chain.group.base.repeated.isdisjoint(chain.paths):
            return "it draws other masks each time it runs"
        return branch

    def _matched(
        self, chain: _Chain, mixed: Collection[tuple[str, str]]
    ) -> tuple[Frozen | Other, dict[fx.Node, LoraBranch]]:
        """The linear of a chain, and the branches that can be lowered; why others are not is noted.

        What adapts experts is lowered otherwise.
        """
        frozen = match_operator(chain.anchor, chain.writes)
        branches: dict[fx.Node, LoraBranch] = {}
        for write in () if is_call(chain.anchor, EXPERT_LINEAR) else chain.writes:
            branch = self._lowerable(chain, write, frozen)
            (job,) = write.meta["jobs"]
            if isinstance(branch, str):
                chain.keep(write, branch)
            elif any((job, path) in mixed for path in chain.paths):
                chain.keep(write, "another call of its module runs as it is")
            else:
                branches[write] = branch
        return frozen, branches


class _Chain:
    """The segment writes that jobs chained behind one operator.

    block    its name, "" for the root
    paths    of the site, in all layers that share its code
    """

    def __init__(
        self, group: GroupGraph, block: str, graph: fx.Graph, anchor: fx.Node, writes: list[fx.Node]
    ) -> None:
        self.group, self.graph, self.anchor, self.writes = group, graph, anchor, writes
        self.site = str(writes[0].meta["site"])
        self.path, self.paths = f"{block}.{self.site}".strip("."), _paths(group, block, self.site)

    def keep(self, write: fx.Node, reason: str) -> None:
        """Keep a branch as it is; raises NotFoldable where its code has another's numbers."""
        (job,) = write.meta["jobs"]
        own = next(graph for graph in self.group.jobs if graph.name == job)
        if not self.group.exact and own.sites[self.paths[0]].kind == "lora":
            raise NotFoldable(
                "a plain LoRA branch cannot be lowered", site=self.path, job=job, found=reason
            )
        write.meta["as_it_is"] = reason
        count("kept")
        text = f"{self.path} of job '{job}' runs as it is: {reason}"
        self.group.notes.append((LowerAdapters.name, text))

    def lower(
        self, frozen: Frozen | Other, branches: dict[fx.Node, LoraBranch], *, in_base_dtype: bool
    ) -> None:
        """Put one operator in place of the linear and branches.

        Where the branches stand behind another operator, that one stays.
        """
        tables, first = placeholders(self.graph), next(iter(branches))
        dtype = branches[first].a.meta["tensor"].dtype
        compute = self.anchor.meta["val"].dtype if in_base_dtype else dtype
        capacity = self._capacity(list(branches.values()))
        operator = ADD if isinstance(frozen, Other) else ONE
        magnitudes = {write: branch.magnitude for write, branch in branches.items()
                      if branch.magnitude is not None}  # fmt: skip

        def build(make: Maker) -> fx.Node:
            tensors = _bank_tensors(len(self.group.jobs), list(branches.values()), dtype)
            *adapters, site = (
                make.tensor(TensorRef("buffer", f"{self.site}.{BANK}.{name}", shape, kind))
                for name, shape, kind in tensors
            )
            served, row = _served(make, frozen, first), [tables["segments"], tables["keys"]]
            lowered = make(
                operator, *served, *adapters, *row, tables["token_index"], site, compute, *capacity
            )
            lowered.meta["branches"] = _numbers(branches)
            if not magnitudes:
                return lowered
            # Nodes of their own: those of the branches stand behind the linear.
            read = [
                make.tagged(jobs=(write.meta["jobs"][0],)).tensor(
                    node.meta["tensor"], str(node.target)
                )
                for write, node in magnitudes.items()
            ]
            scaled = [branches[write] for write in magnitudes]
            indices, largest = [one.job for one in scaled], max(one.rank for one in scaled)
            return make(SCALE, lowered, *served[1:], read, *adapters, site, *row, indices, largest)

        self._put(first if operator is ADD else self.anchor, operator, list(branches), build)

    def lower_experts(self) -> None:
        """Put one operator in place of the experts' product and all jobs' branches on it."""
        branches: dict[fx.Node, LoraBranch] = {}
        for write in self.writes:
            branch = match_expert_branch(write, self.anchor)
            kinds = {known.kind for known in branches.values()}
            if isinstance(branch, Miss):
                self.keep(write, branch.why)
            elif not kinds <= {branch.kind}:
                self.keep(write, "it is not of the first job's type and form")
            else:
                branches[write] = branch
        found = list(branches.values())

        def build(make: Maker) -> fx.Node:
            for branch in found:
                self.anchor.prepend(branch.a)
                self.anchor.prepend(branch.b)
            lowered = make(
                EXPERTS, *self.anchor.args, [branch.a for branch in found],
                [branch.b for branch in found], [branch.job for branch in found],
                [branch.scaling for branch in found], found[0].crossed,
                placeholders(self.graph)["segments"],
            )  # fmt: skip
            lowered.meta["branches"] = _numbers(branches)
            return lowered

        if branches:
            self._put(self.anchor, EXPERTS, list(branches), build)

    def _put(
        self, at: fx.Node, operator: Any, writes: list[fx.Node], build: Callable[[Maker], fx.Node]
    ) -> None:
        """Put what `build` makes in place of a node and of branches, which stay where held back."""
        jobs = tuple(write.meta["jobs"][0] for write in writes)
        lowered = Rewriter(self.graph).replace(
            at,
            build,
            f"{operator.__name__.partition('.')[0]} at {self.path}",
            {"role": "adapter", "jobs": jobs, "site": self.site, "path": self.site},
            _inside(self.anchor, writes),
        )
        if lowered is None:
            for write in writes:
                self.keep(write, "the rewrite is held back by a bisection")
            return
        count("lowered", len(writes))
        for write in writes:
            if not write._erased:
                write.replace_all_uses_with(write.args[0])  # type: ignore[arg-type]
                self.graph.erase_node(write)

    def _capacity(self, branches: list[LoraBranch]) -> tuple[int, bool]:
        """The largest rank of a job in any layer that shares the site's code; whether any drops."""
        lowered = [self.group.jobs[branch.job].sites for branch in branches]
        adapters = [own[path] for own in lowered for path in self.paths if path in own]
        # Of a graph that Dynamo recorded what its branches say is all there is.
        known: Sequence[AdapterSite | LoraBranch] = adapters or branches
        return max(one.rank for one in known), any(one.dropout > 0 for one in known)


def match_expert_branch(write: fx.Node, anchor: fx.Node) -> LoraBranch | Miss:
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
            return _branch(found, experts, crossed=crossed)
        nearest.append(found)
    return max(nearest, key=lambda miss: miss.held)


def _numbers(branches: Mapping[fx.Node, LoraBranch]) -> dict[str, BranchNumbers]:
    return {write.meta["jobs"][0]: branch.numbers for write, branch in branches.items()}


def _served(make: Maker, frozen: Frozen | Other, write: fx.Node) -> tuple[Any, ...]:
    """What the operator applies, or adds to."""
    if isinstance(frozen, Other):
        return write.args[0], frozen.x
    weight = frozen.weight
    if frozen.transposed:
        tags = {tag: weight.meta[tag] for tag in ("role", "jobs")}
        weight = make.tagged(**tags)(aten.t.default, weight)
    return frozen.x, weight, frozen.bias


def _paths(group: GroupGraph, block: str, site: str) -> list[str]:
    """The paths of a site in all layers that share its code."""
    layers = group.blocks[block].instances if block else ("",)
    return [f"{layer}.{site}".strip(".") for layer in layers]


def chains(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Segment writes behind each replaced value, in order."""
    chains: dict[fx.Node, list[fx.Node]] = {}
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if is_call(node, WRITE):
            before: Any = node.args[0]
            anchor = first.get(before, before)
            first[node] = anchor
            chains.setdefault(anchor, []).append(node)
    return chains


def _by_site(writes: Iterable[fx.Node]) -> Iterable[list[fx.Node]]:
    """The writes of one chain, those of each site together.

    Behind the last linear of a module a job's trained copy of the module writes too.
    """
    own: dict[str, list[fx.Node]] = {}
    for write in writes:
        own.setdefault(str(write.meta["site"]), []).append(write)
    return own.values()


def _bank_tensors(
    jobs: int, branches: list[LoraBranch], dtype: torch.dtype
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of what a site's AdapterBank holds, in the operator's order."""
    rank = sum(branch.rank for branch in branches)
    a, b = branches[0].a.meta["tensor"], branches[0].b.meta["tensor"]
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
