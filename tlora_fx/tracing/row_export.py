"""One row of dynamic size through a model: torch.export on the meta device, and what it needs.

A model is called with the inputs that every graph of ours takes. What its code does that a graph
does not keep is refused.

A graph is the same for every row, so a forward may not change what the next one reads: counters,
buffers, generators. A value that is kept and not read again, or computed again from nothing but
sizes and weights, changes nothing and may stay.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from tlora_fx.errors import (
    BaseRefused,
    CompileError,
    GradientLost,
    StateChanged,
    TloraError,
    TracedOtherwise,
)
from tlora_fx.ir.graph import TABLES, Form
from tlora_fx.model.backbone import longest_sequence, named_logits
from tlora_fx.model.batch import PADDING
from tlora_fx.tracing.attention import row_of
from tlora_fx.tracing.guards import SizeGuards, line_text, model_frame
from tlora_fx.tracing.layer_calls import LayerCalls, StandIn
from tlora_fx.tracing.masks import unpacked_lines
from tlora_fx.tracing.positions import CountsBySequence
from tlora_fx.tracing.refusals import not_traceable, not_writable

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, range)
MODULE_STATE = frozenset(vars(nn.Module())) - {"training"}
LIBRARIES = ("torch", "transformers", "peft", "tlora_fx", "torchao", "bitsandbytes")
DEEP = 4
# What holds data; all else that a class or a Python module has is code.
DATA = (*PLAIN, list, dict, set, Tensor, random.Random, torch.Generator)


@dataclass(frozen=True, slots=True)
class Slot:
    """One attribute.

    owner   the module, class or Python module that has it
    name    its name there
    form    a key that changes when its value does
    value   its value
    """

    owner: Any
    name: str
    form: Hashable
    value: Any

    @property
    def is_registered(self) -> bool:
        """Whether it is a buffer or a parameter."""
        stores = (getattr(self.owner, name, {}) for name in ("_buffers", "_parameters"))
        return any(self.name in store for store in stores)

    def put(self, value: Any) -> None:
        """Give the attribute a value."""
        setattr(self.owner, self.name, value)


State = Mapping[str, Slot]


def state_of(model: nn.Module) -> State:
    """Attributes of a model's modules, and of the classes and Python modules of its own code."""
    forms = _Forms()
    return {
        where: Slot(owner, name, forms.of(value), value)
        for where, owner, name, value in _attributes(model)
    }


def changed(before: State, after: State) -> State:
    """The attributes that are new or have another value."""
    return {
        where: slot
        for where, slot in after.items()
        if where not in before or before[where].form != slot.form
    }


def generators() -> dict[str, Hashable]:
    """The states of the generators that every process has."""
    with _disable_current_modes():  # else the state would be a constant of the graph
        of_torch = bytes(torch.get_rng_state().tolist())
    states: dict[str, Hashable] = {"Python's random": random.getstate(), "torch": of_torch}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        inner = numpy.random.get_state(legacy=False)["state"]
        states["NumPy"] = (inner["key"].tobytes(), inner["pos"])
    return states


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any, str, Any]]:
    """Path, owner, name and value of each."""
    owners: dict[str, Any] = {}
    for path, module in model.named_modules():
        kind = type(module)
        if isinstance(module, StandIn):
            continue
        for name, value in _own_attributes(module):
            if name not in MODULE_STATE:
                yield f"{path}.{name}".lstrip("."), module, name, value
        if is_own(kind):
            owners[kind.__qualname__] = kind
            owners[kind.__module__] = sys.modules[kind.__module__]
    for where, owner in owners.items():
        for name, value in list(vars(owner).items()):
            if isinstance(value, DATA) and not name.startswith("__"):
                yield f"{where}.{name}", owner, name, value


def _own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    stores = (vars(module), module._buffers, module._parameters)
    return [(name, value) for store in stores for name, value in store.items()]


def is_own(kind: type) -> bool:
    """Whether a class is a base's own code: no library's."""
    return kind.__module__.partition(".")[0] not in LIBRARIES


def reads(value: Any, inputs: Sequence[Tensor]) -> bool:
    """Whether a value that a traced forward made may depend on more than sizes and weights.

    inputs    tensors that the forward was given
    """
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return False
    mode = get_proxy_mode()
    if not isinstance(value, Tensor) or mode is None:
        return True
    nodes = [_node(tensor, mode.tracer) for tensor in (value, *inputs)]
    stack, seen = [nodes[0]], set()
    while stack:
        node = stack.pop()
        if node is None or node in nodes[1:]:
            return True
        if node not in seen and "sym_size" not in str(node.target):
            stack.extend(node.all_input_nodes)
        seen.add(node)
    return False


def _node(tensor: Tensor, tracer: Any) -> Any:
    slot = get_proxy_slot(tensor, tracer, None)
    return slot.proxy.node if slot is not None else None


def meta_copy(value: Any) -> Any:
    """A value that a traced forward left behind, for a forward that is traced anew."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint
    if isinstance(value, Tensor):
        shape = [meta_copy(size) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")
    return value


class _Forms:
    """Keys of values; what cannot be compared by value is compared by identity."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def of(self, value: Any, depth: int = 0) -> Hashable:
        """The key of a value."""
        if isinstance(value, PLAIN):
            return (type(value).__name__, repr(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return (type(value).__name__, str(value))
        if isinstance(value, Tensor):
            return ("tensor", id(value), 0 if value.is_inference() else value._version)
        if isinstance(value, (random.Random, torch.Generator)):
            return _generator_state(value)
        if isinstance(value, nn.Module) or callable(value) or depth == DEEP:
            return id(value)
        return self._inside(value, depth + 1)

    def _inside(self, value: Any, depth: int) -> Hashable:
        """The key of a container, or of an object's attributes, which are read once."""
        if isinstance(value, (list, tuple)):
            return tuple(self.of(item, depth) for item in value)
        if isinstance(value, dict):
            return tuple((str(key), self.of(item, depth)) for key, item in value.items())
        if isinstance(value, (set, frozenset)):
            return tuple(sorted(map(str, value)))
        if id(value) in self.seen:
            return id(value)
        self.seen.add(id(value))
        return (id(value), self._inside(getattr(value, "__dict__", {}), depth))


def _generator_state(generator: random.Random | torch.Generator) -> Hashable:
    if isinstance(generator, random.Random):
        return generator.getstate()
    with _disable_current_modes():
        return bytes(generator.get_state().tolist())


# What reads a number out of a tensor, which a trace does not have.
READS = frozenset((
    Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.item,
    Tensor.tolist, Tensor.numpy,
))  # fmt: skip
HOOKS = frozenset((Tensor.register_hook, Tensor.register_post_accumulate_grad_hook))
# The devices that may be another one in a run than in a trace.
KINDS = ("cpu", "cuda", "meta")
KIND_GETTERS = frozenset(getattr(Tensor, f"is_{kind}").__get__ for kind in KINDS)
# Where torch makes the autograd functions of operators, which a graph keeps whole.
OPERATORS = "torch._library.autograd"
QUESTIONS = ("is_compiling", "is_exporting", "is_dynamo_compiling")


@cache
def is_own_code(filename: str) -> bool:
    """Whether a file is a base's own code: no library's."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES)
    roots = tuple(file.rpartition("/")[0] + "/" for file in files if file)
    return not filename.startswith(("<", *roots))


class Watch:
    """Observations of one traced forward.

    A trace holds neither the gradient that an autograd function or a tensor hook gives, nor what a
    forward leaves behind for the next one, nor the branch that the code takes on a real device.
    Each is watched for while the model runs, and refused by name.

    refused   errors, in the order in which their causes were seen
    left      attributes that the forward gave other values, by path
    open      those of them that may change what the next forward does
    """

    def __init__(self, model: nn.Module, stop: CodeType) -> None:
        """Watch a model.

        stop    code of the function that calls the model, for source lines
        """
        self.model, self.stop = model, stop
        self.refused: list[CompileError] = []
        self.functions: list[AppliedFunction] = []
        self.left: State = {}
        self.open: State = {}

    def clear(self) -> None:
        """Begin a forward."""
        self.refused.clear()
        self.functions.clear()
        self.left = {}

    def require_kept(self) -> None:
        """Refuse what the graph of this forward would not do.

        raises    GradientLost, StateChanged, TracedOtherwise
        """
        for applied in self.functions:
            if not applied.has_plain_gradient():
                raise GradientLost(
                    "the model has an autograd function, whose backward a graph does not keep",
                    function=f"{applied.function.__module__}.{applied.function.__qualname__}",
                    source=line_text(applied.place),
                    expected="a backward that is the derivative of its forward",
                    help="write it with detach(), or as an operator of torch.library",
                )
        for error in self.refused:
            raise error

    @contextmanager
    def running(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Watch the model run on inputs, within this context."""
        with ExitStack() as stack:
            self._patch(stack)
            before, draws = state_of(self.model), generators()
            stack.enter_context(_Calls(self))
            yield
        self.left = changed(before, state_of(self.model))
        self.open = {
            where: slot
            for where, slot in self.left.items()
            if (where in before and before[where].value is not None) or reads(slot.value, inputs)
        }
        for where, slot in self.left.items():
            if slot.is_registered:
                self.refuse(
                    StateChanged,
                    "the model's forward replaces a buffer or weight, which the next one reads",
                    attribute=where,
                    help="compute the value without keeping it",
                )
        for name, state in generators().items():
            if state != draws.get(name):
                self.refuse(
                    StateChanged,
                    f"the model's forward draws from the generator of {name}",
                    found="one draw, which the graph would repeat for every row",
                    help="draw with nn.Dropout, or not at all",
                )

    def refuse(self, kind: type[CompileError], what: str, *, help: str, **facts: Any) -> None:
        """Note an error, to be raised when no model code can catch it."""
        self.refused.append(kind(what, help=help, **facts))

    def refuse_mode(self, mode: str, *, help: str) -> None:
        """Note that model code enters a mode."""
        source = self.source()
        if source is not None:
            what = f"the model runs in {mode}, which a graph does not keep"
            self.refuse(GradientLost, what, source=source, help=help)

    def source(self) -> str | None:
        """The model's line that is running."""
        return line_text(model_frame(self.stop))

    def _patch(self, stack: ExitStack) -> None:
        enter = torch.inference_mode.__enter__
        enter_autocast: Any = torch.autocast.__enter__
        read_device = FakeTensor.device.fget  # type: ignore[attr-defined]
        watch = self

        def device(tensor: FakeTensor) -> Any:
            found = read_device(tensor)
            own = is_own_code(sys._getframe(1).f_code.co_filename)
            return TracedDevice(found, watch) if own else found

        def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
            place = model_frame(watch.stop)
            if function.__module__ != OPERATORS:
                watch.functions.append(AppliedFunction(function, args, place))
            return super(_SingleLevelFunction, function).apply(*args, **kwargs)  # type: ignore[misc]

        def entered(mode: Any) -> Any:
            if mode.mode:
                watch.refuse_mode("inference mode", help="use torch.no_grad()")
            return enter(mode)

        def cast(mode: Any) -> Any:
            if mode._enabled:
                watch.refuse_mode(
                    "autocast", help="write the casts out with Tensor.to, or set enabled=False"
                )
            return enter_autocast(mode)

        stack.enter_context(patch.object(torch.autocast, "__enter__", cast))
        # Below `Function.apply`, which model code may have bound before.
        stack.enter_context(patch.object(_SingleLevelFunction, "apply", classmethod(applied)))
        stack.enter_context(patch.object(torch.inference_mode, "__enter__", entered))
        stack.enter_context(patch.object(FakeTensor, "device", property(device)))
        self._answer_as_in_a_run(stack)

    def _answer_as_in_a_run(self, stack: ExitStack) -> None:
        """A base's own code that asks whether it is compiled hears no, as when it trains alone."""
        kinds = {type(module) for module in self.model.modules()}
        own = {sys.modules[kind.__module__] for kind in kinds if is_own(kind)}
        for name in QUESTIONS if own else ():
            plain = getattr(torch.compiler, name, None)
            for module in (torch.compiler, torch._dynamo, *own):
                for alias, value in list(vars(module).items()):
                    if value is plain and plain is not None:
                        stack.enter_context(patch.object(module, alias, _for_libraries(plain)))


def _for_libraries(question: Callable[[], bool]) -> Callable[[], bool]:
    """A question that only libraries are answered; all others hear no."""

    def answer() -> bool:
        return question() and not is_own_code(sys._getframe(1).f_code.co_filename)

    return answer


class _Calls(TorchFunctionMode):
    """Sees the functions of torch that a model calls."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HOOKS:
            self.watch.refuse(
                GradientLost,
                "the model registers a tensor hook, which a graph does not keep",
                source=self.watch.source(),
                help="write it without a hook",
            )
        elif func in READS:
            return self._read(func, args, kwargs or {})
        elif func in KIND_GETTERS and is_own_code(sys._getframe(1).f_code.co_filename):
            _refuse_branch(self.watch)
        return func(*args, **(kwargs or {}))

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self.watch.refuse(
                TracedOtherwise,
                "the model reads a number out of a tensor and goes on without it where it cannot",
                source=self.watch.source(),
                found=f"{type(error).__name__} while it is traced, a number in a run",
                help="compute with the tensor",
            )
            raise


def _refuse_branch(watch: Watch) -> None:
    watch.refuse(
        TracedOtherwise,
        "the model asks on which device a tensor lies",
        source=watch.source(),
        found="no device yet: tracing takes another branch than a run",
        help="write the line alike for all devices",
    )


class _Kind(str):
    """The type of a traced tensor's device; to compare it with a real one is a branch."""

    watch: Watch

    def _compared(self, other: object) -> None:
        if isinstance(other, str) and other.partition(":")[0] in KINDS:
            _refuse_branch(self.watch)

    def __eq__(self, other: object) -> bool:
        self._compared(other)
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, part: object) -> bool:
        self._compared(part)
        return isinstance(part, str) and str.__contains__(self, part)

    def startswith(self, prefix: Any, *rest: Any) -> bool:
        self._compared(prefix)
        return str.startswith(self, prefix, *rest)

    __hash__ = str.__hash__


class TracedDevice(_Kind):
    """The device of a traced tensor as a base's own code sees it: good for all but comparing."""

    def __new__(cls, device: torch.device, watch: Watch) -> TracedDevice:
        """A device that tells the watch when it is compared."""
        made = super().__new__(cls, str(device))
        made.watch = watch
        return made

    def __str__(self) -> str:
        return self

    @property  # type: ignore[misc]
    def __class__(self) -> type[torch.device]:  # type: ignore[override]
        """Class that isinstance shall see."""
        return torch.device

    @property
    def type(self) -> str:
        """Kind of the device, which is "meta"."""
        kind = _Kind(str.partition(self, ":")[0])
        kind.watch = self.watch
        return kind

    @property
    def index(self) -> None:  # type: ignore[override]
        """No device has been chosen."""

    def _compared(self, other: object) -> None:
        if isinstance(other, (str, torch.device)) and not isinstance(other, TracedDevice):
            super()._compared(str(other).replace("meta", ""))

    def __eq__(self, other: object) -> bool:
        self._compared(other)
        return str.__eq__(self, str(other))

    __hash__ = str.__hash__


class AppliedFunction:
    """Use of a custom autograd function; its backward is lost, so it is tried."""

    def __init__(self, function: Any, args: tuple[Any, ...], place: tuple[str, int] | None) -> None:
        self.function, self.place = function, place
        self.makers = [_maker(arg) for arg in args]

    def has_plain_gradient(self) -> bool:
        """Whether its backward agrees with the derivative of its forward, on random numbers."""
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.manual_seed(0)
                args = [make() for make in self.makers]
                return _same_gradients(self.function.apply, self._plain, args)
        except Exception:  # noqa: BLE001  (the model's own function raises what it likes)
            return False

    def _plain(self, *args: Any) -> Any:
        """Its forward, differentiated by torch."""
        if self.function.setup_context is not torch.autograd.Function.setup_context:
            return self.function.forward(*args)
        return self.function.forward(_Context(), *args)


class _Context:
    """Takes what a forward saves for its backward."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _drawn(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        return torch.ones(shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def _maker(arg: Any) -> Callable[[], Any]:
    """What makes an argument again: of a tensor one of its shape and kind, drawn anew."""
    if isinstance(arg, torch.SymInt):
        return partial(int, arg.node.hint)
    if not isinstance(arg, Tensor):
        return lambda: arg
    shape = [int(n.node.hint) if isinstance(n, torch.SymInt) else n for n in arg.shape]
    return partial(_drawn, shape, arg.dtype)


def _same_gradients(left: Any, right: Any, args: list[Any]) -> bool:
    inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    gradients = []
    for function in (left, right):
        out = function(*args)
        results = [r for r in (out if isinstance(out, tuple) else (out,)) if isinstance(r, Tensor)]
        seeds = [torch.sin(torch.arange(r.numel(), dtype=r.dtype)).view(r.shape) for r in results]
        gradients.append(torch.autograd.grad(results, inputs, seeds, allow_unused=True))
    return all(
        (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-8, atol=1e-10))
        for a, b in zip(*gradients, strict=True)
    )


MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)

# Sizes of the row that is traced: all different, so that no two dimensions are taken for one.
TOKENS, LINES, WIDTH, SEQUENCES, JOBS = 29, 7, 11, 5, 3


class TracedRow(nn.Module):
    """A model called with the inputs that every graph of ours takes.

    keywords   whether it takes them by transformers' names, or the ids alone
    counts     whether it is given no positions, and counts them by the ids
    masked     whether it is given a mask of padding in batch form: its tokens see later ones
    """

    def __init__(
        self,
        model: nn.Module,
        form: Form,
        *,
        keywords: bool = True,
        calls: LayerCalls | None = None,
        counts: bool = False,
        masked: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.form = form
        self.counts, self.masked = counts, masked
        self.keywords = keywords
        self.calls = calls
        self.runs: Counter[int] = Counter()
        stop = TracedRow.forward.__code__
        self.guards, self.watch = SizeGuards(form, stop), Watch(model, stop)

    def forward(self, input_ids: Tensor, position_ids: Tensor, *tables: Tensor) -> Tensor:
        """Logits [1, T, V], or [B, S, V] in batch form."""
        self.watch.clear()
        if self.calls is not None:
            self.calls.clear()
        inputs = (input_ids, position_ids, *tables)
        row_shaped = (input_ids, position_ids, tables[TABLES.index("token_index")])
        with ExitStack() as stack:
            stack.enter_context(row_of(dict(zip(TABLES, tables, strict=True))))
            stack.enter_context(RealConstants())
            stack.enter_context(self._counted())
            stack.enter_context(self.guards.running(row_shaped))
            stack.enter_context(self.watch.running(inputs))
            if self.form == "packed":
                given = {} if self.counts else {"position_ids": position_ids}
                with unpacked_lines(padded=False), CountsBySequence(input_ids):
                    out = self.model(input_ids=input_ids, **given, use_cache=False)
            elif self.keywords:
                given = {}
                if self.masked:
                    given["attention_mask"] = (row_shaped[-1] > PADDING).long()
                with unpacked_lines(padded=True, hidden=self.masked):
                    out = self.model(input_ids=input_ids, **given, use_cache=False)
            else:
                out = self.model(input_ids)
        return _logits_of(out)

    def repeated(self) -> frozenset[str]:
        """Paths of the model's modules that the last forward ran more than once."""
        modules = self.model.named_modules()
        return frozenset(path for path, module in modules if self.runs[id(module)] > 1)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.runs.clear()
        hook = register_module_forward_pre_hook(lambda module, _: self.runs.update([id(module)]))
        try:
            yield
        finally:
            hook.remove()


def _logits_of(out: Any) -> Tensor:
    """The logits among what a model returns: alone, first, or by that name.

    raises    BaseRefused
    """
    logits = named_logits(out)
    if isinstance(logits, tuple) and logits:
        logits = logits[0]
    if isinstance(logits, Tensor) and logits.dim() == 3:
        return logits
    raise BaseRefused(
        "the base's forward returns no logits of a language model",
        expected="a tensor [batch, tokens, vocabulary], alone, first, or named logits",
        found=f"a tensor of {logits.dim()} dimensions"
        if isinstance(logits, Tensor)
        else type(logits).__name__,
        help="hand over an nn.Module whose forward returns them",
    )


class RealConstants(TorchFunctionMode):
    """Makes tensors from Python data on the CPU, then moves them; writes `view_as` as a reshape.

    `torch.tensor([2], device=x.device)` and `x[..., [2]]` make a tensor where x lies; on the meta
    device it has no values, and the graph would hold an empty constant.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in MAKERS and named.get("device") is not None:
            device = named.pop("device")
            return func(*args, **named).to(device)
        if func is Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device, **named)
        if func is Tensor.__getitem__:
            args = (args[0], _index(args[1]))
        if func in (Tensor.view_as, Tensor.reshape_as):
            return args[0].reshape((*args[1:], *named.values())[0].shape)
        return func(*args, **named)


def _index(index: Any) -> Any:
    """An index whose lists are tensors."""
    if isinstance(index, tuple):
        return tuple(_index(item) for item in index)
    return torch.tensor(index) if isinstance(index, list) else index


def accepts(model: nn.Module, name: str) -> bool:
    """Whether a model's forward takes an argument of this name."""
    return name in inspect.signature(model.forward).parameters


# Dozens of graphs are made on the way, none is called: no Python code is written for any of them.
@_use_lazy_graph_module(True)
def export_row(row: TracedRow, subject: str) -> fx.GraphModule:
    """Trace a model over one row of dynamic size, on meta.

    subject   whose model it is, for errors
    raises    BaseNotTraceable with the operator and the line of model code
    """
    shape = (1, TOKENS) if row.form == "packed" else (LINES, WIDTH)
    ids = torch.zeros(shape, dtype=torch.int64, device="meta")
    small = {"dtype": torch.int32, "device": "meta"}
    inputs = (
        ids,
        torch.zeros_like(ids),
        torch.zeros(SEQUENCES + 1, **small),  # type: ignore[call-overload]
        torch.zeros((), **small),  # type: ignore[call-overload]
        torch.zeros(JOBS + 1, **small),  # type: ignore[call-overload]
        torch.zeros(shape, **small),  # type: ignore[call-overload]
        torch.zeros((JOBS, 2), dtype=torch.int64, device="meta"),
    )
    dynamic = torch.export.Dim.DYNAMIC
    token = {1: dynamic} if row.form == "packed" else {0: dynamic, 1: dynamic}
    tables: Any = ({0: dynamic}, {}, {0: dynamic}, token, {0: dynamic})

    def export() -> torch.export.ExportedProgram:
        with torch.enable_grad():
            return torch.export.export(
                row, inputs, dynamic_shapes=(token, token, tables), strict=False
            )

    row.guards.subject, row.guards.longest = subject, longest_sequence(row.model) or 0
    try:
        program = export()
    except TloraError:
        raise
    except Exception as error:
        raise not_traceable(error, row.model, row.form, subject) from error
    row.watch.require_kept()
    if row.watch.open:
        _require_same_again(row.watch, program, export)
    try:
        module = program.module(check_guards=False)
    except SyntaxError as error:
        raise not_writable(error, row.model, subject) from error
    assert isinstance(module, fx.GraphModule)
    return module


def _require_same_again(
    watch: Watch,
    first: torch.export.ExportedProgram,
    export: Callable[[], torch.export.ExportedProgram],
) -> None:
    """Trace a second forward, from the state that the first one left behind.

    raises    StateChanged where it differs, or changes the state once more
    """
    left, doubtful = dict(watch.left), ", ".join(watch.open)
    for slot in left.values():
        slot.put(meta_copy(slot.value))
    again: list[str] = []
    cause: Exception | None = None
    try:
        same = program_text(first) == program_text(export())
        again = [k for k, slot in watch.open.items() if not isinstance(slot.value, Tensor)]
    except Exception as error:  # noqa: BLE001  (model code raises what it likes)
        same, cause = False, error
    if again or not same:
        raise StateChanged(
            "the model's forward changes what its next forward does",
            attribute=", ".join(again) or doubtful,
            expected="each forward computes the same of the same row",
            help="compute the value in each forward, or in the constructor",
        ) from cause


def program_text(program: torch.export.ExportedProgram) -> list[str]:
    """A program as lines that are equal for programs that compute the same."""
    order = {node: f"%{index}" for index, node in enumerate(program.graph.nodes)}
    lines = [
        f"{node.op} {'' if node.op == 'placeholder' else node.target} "
        f"{fx.map_arg((node.args, node.kwargs), lambda n: order[n])}"
        for node in program.graph.nodes
    ]
    constants = program.constants.items()
    lines.extend(f"{name} {value}" for name, value in constants if isinstance(value, Tensor))
    return lines
