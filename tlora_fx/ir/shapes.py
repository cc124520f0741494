"""Shape propagation: run a graph's operators on fake tensors and note what comes out.

An operator runs again only when something that it was given differs from last time, in shape,
strides or type, or in plain content. What it was given is kept beside what came out and compared
with what reaches it now, so nothing rests on a pass saying what it changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sympy.core.function import Application
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tlora_fx.errors import GraphInvalid
from tlora_fx.ir.graph import LOSS, Block, is_call, output_of

# Segments have plain sizes, which fake tensors handle far faster than symbols. They are odd and
# larger than any dimension of a model, so that none is taken for another or for a model's own.
FIRST_SEGMENT_SIZE = 1_000_003
MAX_JOBS = 4096
RUN = "run"


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of an operator: everything that it was given, and what came out."""

    mode: FakeTensorMode
    target: Any
    args: Any
    kwargs: Any
    value: Any

    def gave(self, node: fx.Node, mode: FakeTensorMode, args: Any, kwargs: Any) -> bool:
        """Whether the node's value is this run's, and a new run would be given the same."""
        return (
            self.mode is mode
            and self.target is node.target
            and self.value is node.meta.get("val")
            and _same(self.args, args)
            and _same(self.kwargs, kwargs)
        )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """All of a fake tensor that decides what operators make of it."""
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    plain = tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)
    return tensor.dtype, tensor.device, plain


def segment_size(job: int) -> int:
    """The size that stands for a job's segment in propagated shapes, another for each job."""
    return FIRST_SEGMENT_SIZE + 2 * job


def shape_text(shape: Iterable[Any]) -> str:
    """A shape as people read it: "[1, T0, 64]", where T0 is the size of the first job's segment."""
    return f"[{', '.join(map(size_text, shape))}]"


def type_text(value: Any) -> str:
    """The shape and dtype of a tensor, or of several; or the name of another value's type."""
    if isinstance(value, Tensor):
        return f"{shape_text(value.shape)} {value.dtype}"
    if isinstance(value, tuple | list) and any(isinstance(item, Tensor) for item in value):
        return f"({', '.join(map(type_text, value))})"
    return type(value).__name__


def size_text(size: Any) -> str:
    """A size as people read it: T0 is that of the first job's segment, "4*T0" four times it."""
    if isinstance(size, int) and size >= FIRST_SEGMENT_SIZE:
        return _segments_text(size)
    return str(size)


@lru_cache(maxsize=4096)
def _segments_text(size: int) -> str:
    for job in range(MAX_JOBS):
        if size % segment_size(job) == 0:
            times = size // segment_size(job)
            return f"T{job}" if times == 1 else f"{times}*T{job}"
    return str(size)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the graph's own values belong to; raises GraphInvalid where it has none."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise GraphInvalid(
        "no node of a graph has a value",
        expected="fake tensors as meta['val'] of its inputs",
        help="keep node.meta of inputs: values of operators are made of theirs",
    )


def fake_tensor(
    mode: FakeTensorMode,
    shape: Sequence[int | torch.SymInt],
    strides: Sequence[int | torch.SymInt],
    dtype: torch.dtype,
    device: str | torch.device = "meta",
) -> Tensor:
    """A fake tensor of a mode, made at once: dispatching within the mode takes seven times as long.

    shape, strides    in elements
    """
    meta = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
    return FakeTensor(mode, meta, torch.device(device))


def fake_like(
    mode: FakeTensorMode,
    shape: Sequence[int | torch.SymInt],
    dtype: torch.dtype,
    device: str | torch.device = "meta",
) -> Tensor:
    """A contiguous fake tensor of a shape in a mode."""
    meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return FakeTensor(mode, meta, torch.device(device))


def propagate(
    graph: fx.Graph,
    blocks: dict[str, Block] | None = None,
    before: Callable[[fx.Node], object] = lambda node: None,
) -> int:
    """Give every operator's node its value anew.

    Placeholders and get_attr nodes keep theirs. What a job's segment holds gets a size of its
    own, one for each job.

    before    is called with each node
    returns   the number of operators that ran: those that are given other values than last time
    raises    GraphInvalid, naming the node at which the operators disagree
    """
    mode = fake_mode_of(graph)
    ran = 0
    by_layer = {layer: block for block in (blocks or {}).values() for layer in block.instances}
    for node in graph.nodes:
        before(node)
        if node.op == "call_module" and node.target in by_layer:
            block = by_layer[str(node.target)]
            _check_layer_inputs(node, block)
            # The value of a layer call is what the block's output node carries.
            node.meta["val"] = _values_of(output_of(block.graph))[0][0]
        elif node.op == "call_module" and blocks is not None and node.target != LOSS:
            raise GraphInvalid(
                "a graph calls a layer that no block runs",
                node=node.format_node(),
                expected=", ".join(list(by_layer)[:6]) or "no layer",
                found=node.target,
                help="the pass that changed the call, or the blocks, is at fault",
            )
        if node.op == "call_function":
            ran += give_value(node, mode)
    return ran


def give_value(node: fx.Node, mode: FakeTensorMode) -> bool:
    """Give an operator's node its value, where it is given other values than when it last ran.

    returns   whether it ran
    raises    GraphInvalid, where the operator does not take them
    """
    args, kwargs = _values_of(node)
    known = node.meta.get(RUN)
    if known is not None and known.gave(node, mode, args, kwargs):
        return False
    try:
        value = _run(node, mode, args, kwargs)
    except Exception as error:
        raise GraphInvalid(
            "an operator does not take the values that reach it",
            node=f"{node.format_node()}",
            source=node.meta.get("source"),
            found=f"{type(error).__name__}: {error}",
            help="the pass that made this node is at fault",
        ) from error
    if "val" not in node.meta or not _same(node.meta["val"], value):
        node.meta["val"] = value
    node.meta[RUN] = _Run(mode, node.target, args, kwargs, node.meta["val"])
    return True


def _values_of(node: fx.Node) -> Any:
    """The arguments of a node with values in place of nodes; raises GraphInvalid."""
    try:
        return fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    except KeyError:
        lacks = next(source for source in node.all_input_nodes if "val" not in source.meta)
        raise GraphInvalid(
            "a node reads one that has no value",
            node=node.format_node(),
            found=lacks.format_node() or lacks.name,
            help="helpers of tlora_fx.rewriting give values; whoever makes an input or a stored "
            "tensor sets its node.meta['val']"
            if lacks.op != "call_method"
            else "graphs call operators, such as torch.ops.aten.clone.default, and no methods",
        ) from None


def _run(node: fx.Node, mode: FakeTensorMode, args: Any, kwargs: Any) -> Any:
    if is_call(node, torch.ops.tlora_fx.segment_read.default):
        whole, _, job, dim = args
        return fake_like(mode, _segment_shape(whole, job, dim), whole.dtype)
    if is_call(node, torch.ops.tlora_fx.segment_write.default):
        whole, value, _, job, dim = args
        expected = _segment_shape(whole, job, dim)
        if tuple(value.shape) != expected:
            wanted, found = shape_text(expected), shape_text(value.shape)
            raise ValueError(f"a segment of {wanted} is written from {found}")
        return fake_like(mode, whole.shape, whole.dtype, whole.device)
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return _run_once(node.target, mode, args, kwargs)
    return _dispatch(node.target, mode, args, kwargs)


def _dispatch(target: Any, mode: FakeTensorMode, args: Any, kwargs: Any) -> Any:
    # Composite operators (linear) take symbolic sizes only under Python's dispatcher.
    with mode, enable_python_dispatcher():
        return target(*args, **kwargs)


# What operators of ATen made: dtype, device and sizes of one tensor; of a mode's symbolic sizes,
# as the layers of a traced graph have them, by mode.
_Results = dict[Any, tuple[torch.dtype, torch.device, int, tuple[Any, ...]]]
_RESULTS: _Results = {}
_SYMBOLIC: WeakKeyDictionary[FakeTensorMode, _Results] = WeakKeyDictionary()
MAX_RESULTS = 65_536
_NAMED = (bool, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SEGMENT_SIZES = range(FIRST_SEGMENT_SIZE, FIRST_SEGMENT_SIZE + 2 * MAX_JOBS, 2)


def _run_once(target: Any, mode: FakeTensorMode, args: Any, kwargs: Any) -> Any:
    """What an operator makes of its arguments; known where it was given equal ones before.

    Branches of jobs that are alike differ in the sizes of their segments alone. Equal are also
    arguments that become so when the size of one job's segment stands for another's.
    """
    # Scalars decide nothing but a dtype, by their type, where each element is worked on by itself.
    sizes = _Sizes(scalars=torch.Tag.pointwise not in target.tags)
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    try:
        key = (target, torch.get_default_dtype(), autocast, sizes.key((args, kwargs)))
        results = _SYMBOLIC.setdefault(mode, {}) if sizes.symbols else _RESULTS
        known = results.get(key)
        if known is not None:
            dtype, device, rank, plain = known
            found = [sizes.number(size) for size in plain]
            return fake_tensor(mode, found[:rank], found[rank:], dtype, device)
    except _NoKey:
        return _dispatch(target, mode, args, kwargs)
    value = _dispatch(target, mode, args, kwargs)
    if type(value) is FakeTensor and not value.requires_grad and value.storage_offset() == 0:
        with suppress(_NoKey):
            plain = tuple(sizes.kept(size) for size in (*value.shape, *value.stride()))
            if len(results) >= MAX_RESULTS:
                results.clear()
            results[key] = (value.dtype, value.device, value.dim(), plain)
    return value


class _NoKey(Exception):
    """Arguments of an operator that are not plain, or of two jobs."""


class _Sizes:
    """Sizes of an operator's arguments, those of the one job's segment by its multiple.

    scalars    whether keys tell one float from another
    segment    the size of the segment; None before one is met
    symbols    of the mode, of which sizes of arguments are made
    """

    def __init__(self, *, scalars: bool = True) -> None:
        self.scalars = scalars
        self.segment: int | None = None
        self.symbols: set[Any] = set()

    def key(self, value: Any) -> Any:
        """Something hashable that is equal for equal arguments; raises _NoKey."""
        if type(value) is FakeTensor:
            if value.requires_grad or value.constant is not None:
                raise _NoKey
            numbers = (*value.shape, *value.stride(), value.storage_offset())
            return value.dtype, value.device, value.dim(), tuple(map(self.plain, numbers))
        if type(value) in (int, torch.SymInt):
            return self.plain(value)
        if type(value) is float and not self.scalars:
            return float
        if value is None or type(value) in _NAMED:
            return type(value), repr(value)
        if isinstance(value, dict):
            return tuple((name, self.key(item)) for name, item in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(map(self.key, value))
        raise _NoKey

    def plain(self, size: Any) -> Any:
        """A number, how many times the segment it is, or its expression; raises _NoKey."""
        if type(size) is torch.SymInt and (symbols := size.node.expr.free_symbols):
            self.symbols |= symbols
            return ("symbol", size.node.expr)
        size = int(size) if type(size) is torch.SymInt else size
        if type(size) is not int:
            raise _NoKey
        if size < FIRST_SEGMENT_SIZE:
            return size
        if self.segment is None and size in _SEGMENT_SIZES:
            self.segment = size
        if self.segment is None or size % self.segment:
            raise _NoKey
        return ("segment", size // self.segment)

    def kept(self, size: Any) -> Any:
        """Key of which `number` makes the size again; raises _NoKey."""
        if type(size) is not torch.SymInt or not size.node.expr.free_symbols:
            return self.plain(size)
        if not size.node.expr.free_symbols <= self.symbols:
            raise _NoKey  # a size that follows from values, and is another one each time
        return size

    def number(self, kept: Any) -> Any:
        """The size again, of this job's segment."""
        if type(kept) in (int, torch.SymInt):
            return kept
        assert self.segment is not None
        return int(kept[1] * self.segment)


def _segment_shape(whole: Tensor, job: int, dim: int) -> tuple[Any, ...]:
    """The shape of one job's part of a tensor."""
    shape = list(whole.shape)
    shape[dim] = segment_size(job)
    return tuple(shape)


def remember_run(node: fx.Node, mode: FakeTensorMode, args: Any, kwargs: Any) -> None:
    """Take a node's value for what its operator made of these arguments, which torch ran.

    A node that reaches `give_value` with others runs again. So does one of whose sizes or strides
    torch left a function, such as the smaller of two numbers: a new run may settle it.
    """
    value = node.meta.get("val")
    if type(value) is FakeTensor and value.fake_mode is mode and not value.requires_grad:
        sizes = (size for size in _form(value)[2] if not isinstance(size, int))
        if not any(size.has(Application) for size in sizes):
            node.meta[RUN] = _Run(mode, node.target, args, kwargs, value)


def remember_runs(graph: fx.Graph) -> None:
    """Take the values that a graph came with for those of its operators, so that none runs again.

    Only for graphs whose values were made by running them: what the tracer hands over.
    """
    mode = fake_mode_of(graph)
    for node in graph.nodes:
        if node.op == "call_function" and all(
            "val" in n.meta for n in (node, *node.all_input_nodes)
        ):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta[RUN] = _Run(mode, node.target, args, kwargs, node.meta["val"])


def _check_layer_inputs(call: fx.Node, block: Block) -> None:
    """A layer is given what its code was written for: as many values, of the same types."""
    wanted = [node for node in block.graph.nodes if node.op == "placeholder"]
    passed = call.args
    pairs = list(zip(wanted, passed, strict=False))
    wrong = next((pair for pair in pairs if not _fits(*pair)), None)
    if len(wanted) == len(passed) and wrong is None:
        return
    expected, found = f"{len(wanted)} inputs", f"{len(passed)} inputs"
    if wrong is not None:
        expected, found = (_value_text(node) for node in wrong)
    raise GraphInvalid(
        "a layer is called with other values than its code takes",
        node=call.format_node(),
        expected=expected,
        found=found,
        help="the pass that changed the call, or the layer, is at fault",
    )


def _fits(wanted: fx.Node, given: Any) -> bool:
    """Whether a value may stand for a layer's input; symbols are taken on trust."""
    expected = wanted.meta.get("val")
    value = given.meta.get("val") if isinstance(given, fx.Node) else given
    if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
        return isinstance(expected, Tensor) == isinstance(value, Tensor)
    if expected.dtype != value.dtype or expected.dim() != value.dim():
        return False
    sizes = zip(expected.shape, value.shape, strict=True)
    return not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)


def _value_text(given: Any) -> str:
    value = given.meta.get("val") if isinstance(given, fx.Node) else given
    kind = type_text(value) if isinstance(value, Tensor) else type(value)
    return f"{kind} ({given})"


def _same(left: Any, right: Any) -> bool:
    """Whether two arguments are the same to a fake run: shape, strides and type; else content."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, FakeTensor):
        return _form(left) == _form(right)
    if isinstance(left, torch.SymInt):
        return bool(left.node.expr == right.node.expr)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(
            _same(a, b) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(_same(left[name], right[name]) for name in left)
    if isinstance(left, slice):
        return _same((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    return isinstance(left, (int, float, str)) and left == right
