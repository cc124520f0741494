"""Count the FLOPs of a graph's operators, forward and training, without running them on data.

Products of matrices and attention cost what the registry of `torch.utils.flop_counter` says, two a
multiply-add. A call runs on meta tensors, forward and backward, so that composite operators
(linear, matmul) come down to those that have a formula, as they do under `FlopCounterMode`; a
generated kernel is counted as soon as `register_flop_formula` knows it. The registry leaves out
other arithmetic: here it counts one an element of its result (of its input where it reduces), and
moving data nothing. What neither knows is unknown.

Sizes that a row brings (tokens, lines) are symbols; a cost is kept as a number for each way in
which it grows with them. Operators are counted at sizes that are primes, and the primes are divided
out again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import tlora_fx.ops  # noqa: F401  (registers the formulas of our own operators)
from tlora_fx.ir.graph import (
    HEAD,
    LOSS,
    Block,
    Form,
    GroupGraph,
    TensorRef,
    is_call,
    output_of,
    placeholders,
)
from tlora_fx.ir.lora_sites import (
    ADD,
    EXPERTS,
    ONE,
    is_adapted,
    is_lowered,
    lowered_site,
    serves_several,
)
from tlora_fx.ops.job_operator import arguments_of, find_operator

# Operations an element of the first input, for what is one operator here and several elsewhere.
PER_ELEMENT = {
    "_softmax": 4, "softmax": 4, "_log_softmax": 4, "log_softmax": 4, "rms_norm": 4,
    "layer_norm": 7, "native_layer_norm": 7, "group_norm": 7, "linalg_norm": 2,
    "linalg_vector_norm": 2, "var": 3, "var_mean": 3, "cumsum": 1, "sequence_cumsum": 1,
    "keyed_dropout": 1, "dora_columns": 1, "embedding_noise": 1, "scatter_add": 1,
    "_softmax_backward_data": 4, "native_layer_norm_backward": 11,
}  # fmt: skip
# Operations a logit: the largest, the difference, the exponential and the sum.
SOFTMAX = 4
# What moves data or makes it, without arithmetic.
_MOVES = (
    "_to_copy _unsafe_view alias arange argmax cat chunk clone contiguous copy detach dropout "
    "embedding empty empty_like expand expand_as eye fill flatten full full_like gather getitem "
    "index index_select lift_fresh_copy masked_fill movedim narrow new_empty new_ones new_zeros "
    "numpy_T numpy_t one_hot ones ones_like permute repeat repeat_interleave reshape resolve_conj "
    "roll scalar_tensor scatter segment_read segment_switch segment_write select select_backward "
    "select_scatter slice slice_backward slice_scatter split "
    "split_with_sizes squeeze stack sym_size t tensor to topk transpose tril triu type_as unbind "
    "unflatten unsqueeze view zeros zeros_like"
)
MOVES = frozenset(_MOVES.split())
ATTENTION = torch.ops.tlora_fx.packed_attention.default
# Indices of the tables that say how a row is divided, with their lengths for what is counted: one
# sequence of one job.
DIVIDING = {
    ONE: {5: 2, 6: 1, 7: 1, 8: 2}, ADD: {4: 2, 5: 1, 6: 1, 7: 2}, EXPERTS: {10: 2},
    ATTENTION: {3: 2},
}  # fmt: skip
# Indices of a lowered site's A and B, and of the largest rank, where 0 is that of A.
BANK = {ONE: (3, 4), ADD: (2, 3)}
MAX_RANK = {ONE: 13, ADD: 12}
# What sizes are counted as: a size that grows with tokens or lines, a line's length, any other.
UNIT, LENGTH, OTHER = 104_729, 99_991, 99_989
_PRIMES = {"T": UNIT, "B": UNIT, "S": LENGTH}
DETACH = torch.ops.aten.detach.default
BANK_NAMES = (".lora.a", ".lora.b")


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations.

    token      for each token
    length     for each token and token of its sequence
    row        once, whatever the row holds
    unknown    names of operators whose cost is not known
    """

    token: float = 0.0
    length: float = 0.0
    row: float = 0.0
    unknown: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.token + other.token,
            self.length + other.length,
            self.row + other.row,
            self.unknown + other.unknown,
        )

    def __sub__(self, other: Cost) -> Cost:
        return self + other.times(-1)

    def times(self, factor: float) -> Cost:
        """Cost times a factor."""
        return Cost(self.token * factor, self.length * factor, self.row * factor, self.unknown)

    def share(self, part: float) -> Cost:
        """The cost of a token of the row where only this part of its tokens has it."""
        return Cost(self.token * part, self.length * part, self.row, self.unknown)

    @property
    def flop_per_token(self) -> float | None:
        """The cost of a token, None where a part is unknown."""
        return None if self.unknown else self.token


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of costs."""
    return reduce(Cost.__add__, costs, Cost())


@dataclass(frozen=True, slots=True)
class FlopCounter:
    """Counts operators of graphs whose symbols have these names.

    sizes    size to its name: "T", "B", "S", or a job's part such as "T0" (see source.size_names)
    cache    costs by call, which counters of one form may share
    """

    form: Form
    sizes: dict[str, str]
    cache: dict[object, Cost] = field(default_factory=dict)

    def node(self, node: fx.Node) -> Cost:
        """The forward of one node; the adapters of a lowered site are not in it.

        What several sites share costs nothing itself: each site's result has the site's cost.
        """
        return self._count(node, None, 0)

    def adapter(self, node: fx.Node, rank: int) -> Cost:
        """The forward of one job's adapter of this rank at a lowered site, a token of it."""
        return self._count(node, None, rank) - self.node(node)

    def trained(self, node: fx.Node, learning: Collection[fx.Node], rank: int = 0) -> Cost:
        """Forward and backward of one node, products of matrices and attention only.

        learning    what the node reads that needs a gradient
        rank        of the adapters of a lowered site, summed over its jobs
        """
        return self._count(node, learning, rank)

    def _count(self, node: fx.Node, learning: Collection[fx.Node] | None, rank: int) -> Cost:
        """The forward with all arithmetic; with what learns, the products of a training step."""
        name, value = operator_name(node), first_tensor(node.meta.get("val"))
        if node.op != "call_function" or name in MOVES or serves_several(node) or value is None:
            return Cost()
        target: Any = _call_of(node)[0]
        made_of_others = isinstance(target, torch._ops.OpOverload) and target._can_decompose()
        if formula_of(target) is not None or (name not in PER_ELEMENT and made_of_others):
            return self._by_leaves(node, name, learning, rank)
        if learning is None:
            return self._by_elements(node, name, value)
        known = arithmetic(name, node.target, (), value, ()) is not None
        return Cost() if known else Cost(unknown=(name,))

    def _by_elements(self, node: fx.Node, name: str, value: Tensor) -> Cost:
        argument: Any = node.args[0] if node.args else None
        first = first_tensor(argument.meta.get("val")) if isinstance(argument, fx.Node) else None
        shape = () if first is None else self._sizes(first)
        count = arithmetic(name, node.target, shape, value, self._sizes(value))
        return self._by_growth(name, count)

    def _by_leaves(
        self, node: fx.Node, name: str, learning: Collection[fx.Node] | None, rank: int
    ) -> Cost:
        """A node's cost as the sum over the operators that it comes down to."""
        target, args, kwargs = self._arguments(node, learning or (), rank)
        training = learning is not None
        key = (target, training, repr((args, kwargs)))
        if key not in self.cache:
            try:
                leaves = leaves_of(target, _on_meta(args), _on_meta(kwargs), training)
            except (RuntimeError, TypeError, ValueError):
                # What refuses tensors without values cannot be counted, which is said, not hidden.
                self.cache[key] = Cost(unknown=(name,))
            else:
                self.cache[key] = total(self._leaf(name, leaf, training) for leaf in leaves)
        return self.cache[key]

    def _arguments(
        self, node: fx.Node, learning: Collection[fx.Node], rank: int
    ) -> tuple[Any, Any, Any]:
        """What a node calls, with its arguments, tensors as `_Spec`, sizes as numbers."""
        target, args, kwargs = _call_of(node)
        mapped: Any = fx.map_arg(
            (args, kwargs), lambda source: self._spec(source, source in learning)
        )
        specs, kwargs = list(mapped[0]), dict(mapped[1])
        for index, length in DIVIDING.get(target, {}).items():
            specs[index] = _Spec((length,), specs[index].dtype, False)
        for index in _banks(target):
            specs[index] = replace(specs[index], shape=(rank, *specs[index].shape[1:]))
        if target in MAX_RANK:
            specs[MAX_RANK[target]] = 0
        if target is EXPERTS:
            specs[5:9] = _one_job(specs[1].shape[0], specs[5][0], specs[6][0], rank)
        return target, tuple(specs), kwargs

    def _spec(self, node: fx.Node, learning: bool) -> Any:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return _Spec(self._sizes(value), value.dtype, learning)
        if isinstance(value, (list, tuple)):
            return [_Spec(self._sizes(item), item.dtype, learning) for item in value]
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _leaf(self, name: str, leaf: Leaf, products_only: bool) -> Cost:
        """The registry's count of an operator, else that of its arithmetic."""
        if leaf.flops is not None:
            return self._by_growth(name, leaf.flops)
        called = short_name(leaf.target)
        if products_only or called in MOVES or leaf.result is None:
            return Cost()
        shape = tuple(leaf.result.shape)
        count = arithmetic(called, leaf.target, leaf.first, leaf.result, shape)
        return self._by_growth(name, count)

    def _by_growth(self, name: str, count: int | None) -> Cost:
        """A count at prime sizes, by how it grows with the row."""
        if not count:
            return Cost(unknown=(name,)) if count is None else Cost()
        if count % OTHER == 0:
            return Cost(unknown=(name,))
        number, units = _divided(count, UNIT)
        number, lengths = _divided(number, LENGTH)
        if self.form == "packed":
            units, lengths = min(units, 1), max(units - 1, 0)
        elif units:
            lengths -= 1
        match units, lengths:
            case 0, 0:
                return Cost(row=float(number))
            case 1, 0:
                return Cost(token=float(number))
            case 1, 1:
                return Cost(length=float(number))
        return Cost(unknown=(name,))

    def _sizes(self, value: Tensor) -> tuple[int, ...]:
        return tuple(self._size(size) for size in value.shape)

    def _size(self, size: Any) -> int:
        """A size as a number, with a prime for each of the row's sizes in it."""
        name = self.sizes.get(str(size))
        if name is not None:
            return _PRIMES[name[:1]]
        if isinstance(size, int):
            return self._number(size)
        number = 1
        for base, power in size.node.expr.as_powers_dict().items():
            if base.is_number:
                number *= self._number(int(base**power))
            else:
                name = self.sizes.get(str(base))
                number *= (_PRIMES[name[:1]] if name else OTHER) ** int(power)
        return number

    def _number(self, number: int) -> int:
        """A plain size, which may be a multiple of the size that stands for a job's segment."""
        for size, name in self.sizes.items():
            if size.isdigit() and number >= int(size) and number % int(size) == 0:
                return number // int(size) * _PRIMES[name[:1]]
        return number


@dataclass(frozen=True, slots=True)
class _Spec:
    """A tensor without values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learning: bool

    def on_meta(self) -> Tensor:
        learning = self.learning and self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=learning)


def _banks(target: Any) -> tuple[int, ...]:
    """Indices of the adapters of all jobs among an operator's arguments."""
    registered = find_operator(target)
    if registered is None:
        return BANK.get(target, ())
    return tuple(map(arguments_of(target).index, registered.banks))


def _one_job(experts: int, a: _Spec, b: _Spec, rank: int) -> list[Any]:
    """What one job's adapter of a rank on all experts is: A, B, its index and its scale."""
    upper = replace(a, shape=(experts * rank, a.shape[1]))
    lower = replace(b, shape=(b.shape[0], experts * rank))
    return [[upper], [lower], [0], [1.0]]


def _call_of(node: fx.Node) -> tuple[Any, Any, Any]:
    """Operator and arguments of a node; of a site that shares an operator, as if it had its own."""
    site = lowered_site(node)
    if site is None:
        return node.target, node.args, node.kwargs
    return site.operator, tuple(site.arguments.values()), {}


def _on_meta(value: Any) -> Any:
    """Arguments with a meta tensor for every `_Spec`."""
    return pytree.tree_map_only(_Spec, _Spec.on_meta, value)


def _divided(number: int, prime: int) -> tuple[int, int]:
    """A number without a prime, and how often it held it."""
    times = 0
    while number % prime == 0:
        number, times = number // prime, times + 1
    return number, times


@dataclass(frozen=True, slots=True)
class Leaf:
    """An operator that a call comes down to."""

    target: Any
    first: tuple[int, ...]
    result: Tensor | None
    flops: int | None


class _Leaves(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no type there
    """Notes every operator that runs below it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.leaves: list[Leaf] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = formula_of(func)
        if formula is None:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        flops = None if formula is None else int(formula(*args, **kwargs, out_val=out))
        first = first_tensor((args, kwargs))
        shape = () if first is None else tuple(first.shape)
        self.leaves.append(Leaf(func, shape, first_tensor(out), flops))
        return out


def formula_of(target: Any) -> Callable[..., Any] | None:
    """The registry's formula for an operator, None where there is none."""
    formula: Callable[..., Any] | None = flop_registry.get(
        getattr(target, "_overloadpacket", target)
    )
    return formula


def leaves_of(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], training: bool
) -> list[Leaf]:
    """The operators that a call on meta tensors comes down to, in training with its backward."""
    leaves = _Leaves()
    with torch.set_grad_enabled(training), leaves:
        results = pytree.tree_leaves(target(*args, **kwargs))
        out = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
        if out:
            torch.autograd.backward(out[:1], [torch.empty_like(out[0])])
    return leaves.leaves


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in nested arguments, None where there is none."""
    return next((leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)), None)


def arithmetic(
    name: str, target: Any, first: tuple[int, ...], value: Tensor, shape: tuple[int, ...]
) -> int | None:
    """Operations of an operator that is no product of matrices, None where it is not known.

    first    shape of its first argument
    shape    of its value, where sizes are numbers
    """
    if not value.dtype.is_floating_point:
        return 0
    if name in PER_ELEMENT:
        return PER_ELEMENT[name] * prod(first)
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags:
        return prod(shape)
    return prod(first) if torch.Tag.reduction in tags else None


def operator_name(node: fx.Node) -> str:
    """Name of a node's operator: "mul"; "multi_lora_linear" for a part of a shared one, too."""
    site = lowered_site(node)
    return short_name(node.target if site is None else site.operator)


def loss_cost(blocks: Mapping[str, Block]) -> Cost:
    """The operator that turns logits into each job's loss sum."""
    result: Any = output_of(blocks[HEAD].graph).args[0]
    logits = first_tensor(result.meta["val"])
    assert logits is not None
    return Cost(token=float(SOFTMAX * logits.shape[-1]))


def is_branch(node: fx.Node) -> bool:
    """Whether a node runs for one job alone."""
    return node.meta.get("role") == "adapter" and not is_lowered(node)


def short_name(target: Any) -> str:
    """The short name of an operator."""
    return str(getattr(target, "__name__", target)).partition(".")[0]


@dataclass(frozen=True, slots=True)
class _Walked:
    """One graph, for inputs of which some need gradients."""

    cost: Cost
    slopes: list[tuple[str, tuple[str, ...], Cost]]
    out: bool


def training_cost(group: GroupGraph, counter: FlopCounter) -> Cost:
    """Forward and backward over a row, at equal shares of tokens for all jobs.

    Products of matrices and attention only. A product's backward has one product of the same size
    for each factor that needs a gradient: the frozen base costs 4·P·T (forward 2·P·T, the gradient
    of its input 2·P·T), a job's own tensors 6·P·T. Which values need one is carried through the
    graph, layer by layer: below the first adapter nothing does. Logits are counted once, though
    the loss computes them again where a job trains something in the head.
    """
    walker = _Walker(group, counter)
    walker.call("", group.root, [False] * len(placeholders(group.root)))
    return walker.cost


class _Walker:
    """Walks the root and the layers that it calls; a layer is walked once for each kind of call."""

    def __init__(self, group: GroupGraph, counter: FlopCounter) -> None:
        self.group, self.counter = group, counter
        self.share = 1 / len(group.jobs)
        self.sites = {job.name: job.sites for job in group.jobs}
        self.cost = Cost()
        self.walked: dict[tuple[int, tuple[bool, ...]], _Walked] = {}

    def call(self, layer: str, graph: fx.Graph, needs: Sequence[bool]) -> bool:
        """Count a graph as this layer runs it; returns whether its value needs a gradient."""
        key = (id(graph), tuple(needs))
        if key not in self.walked:
            self.walked[key] = self._walk(graph, needs)
        walked = self.walked[key]
        self.cost += walked.cost
        for site, jobs, slope in walked.slopes:
            path = f"{layer}.{site}" if layer else site
            rank = sum(self.sites[job][path].rank for job in jobs)
            self.cost += slope.times(rank).share(self.share)
        return walked.out

    def _walk(self, graph: fx.Graph, inputs: Sequence[bool]) -> _Walked:
        learning = {
            node for node, needs in zip(placeholders(graph).values(), inputs, strict=True) if needs
        }
        cost = Cost()
        slopes: list[tuple[str, tuple[str, ...], Cost]] = []
        reached = _reached(graph)
        for node in graph.nodes:
            if node.op == "call_module":
                needs = self._layer(node, learning)
            else:
                needs = _trains(node) or any(n in learning for n in node.all_input_nodes)
                cost += self._node(node, learning if node in reached else set())
            if is_adapted(node):
                rank_one = self.counter.trained(node, learning, rank=1)
                slope = rank_one - self.counter.trained(node, learning)
                slopes.append((str(node.meta["site"]), tuple(node.meta["jobs"]), slope))
            value = first_tensor(node.meta.get("val"))
            floats = value is not None and value.dtype.is_floating_point
            if needs and floats and not is_call(node, DETACH):
                learning.add(node)
        result: Any = output_of(graph).args[0]
        return _Walked(cost, slopes, result in learning)

    def _layer(self, node: fx.Node, learning: set[fx.Node]) -> bool:
        """A layer that the root calls, or the head, whose first input is the last hidden state."""
        needs = [source in learning for source in node.args]
        if node.target != LOSS:
            block = self.group.block_of(str(node.target))
            return self.call(str(node.target), block.graph, needs)
        head = self.group.blocks[HEAD].graph
        tables = [False] * (len(placeholders(head)) - 1)
        self.call("", head, [needs[0], *tables])
        return True

    def _node(self, node: fx.Node, learning: set[fx.Node]) -> Cost:
        cost = self.counter.trained(node, learning)
        return cost.share(self.share) if is_branch(node) else cost


def _reached(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the backward comes to from the graph's value; it ends at what is detached."""
    reached = set(output_of(graph).all_input_nodes)
    for node in reversed(graph.nodes):
        if node in reached and not is_call(node, DETACH):
            reached.update(node.all_input_nodes)
    return reached


def _trains(node: fx.Node) -> bool:
    """Whether a node reads a tensor that a job trains."""
    ref = node.meta.get("tensor")
    if node.op != "get_attr" or not isinstance(ref, TensorRef):
        return False
    return ref.owner == "job" or str(node.target).endswith(BANK_NAMES)
