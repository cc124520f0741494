"""A client's own loss: a graph of torch's functions, rebuilt here as an fx graph.

Nothing of a client's is executed: a graph names functions, and a name that is not in the lists is
refused. What it computes of a micro-batch is bounded, and what fails is the client's error. The
graph is that of one datum; its losses are summed, and so are metrics that end in
`:sum`, while those that end in `:mean` are averaged over the data of a request.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, fx, nn

from tlora_fx.errors import CommandRefused
from tlora_fx.runtime.isolation import is_out_of_memory
from tlora_fx.training.requests import Request

_TENSOR = """
abs add amax amin argmax argmin bool clamp clamp_max clamp_min clip clone cos cosh cumsum detach
div double elu eq erf exp exp2 expand_as expm1 flatten float ge gt huber_loss isfinite le
leaky_relu lerp log log1p log2 logical_and logical_not logical_or logsigmoid logsumexp long lt
masked_fill max maximum mean median min minimum mse_loss mul multiply nan_to_num ne neg negative
norm numel ones_like pow prod reciprocal relu reshape rsqrt sigmoid sign sin sinh size
smooth_l1_loss softplus sqrt square squeeze std sub subtract sum tan tanh to true_divide
unsqueeze var view where zeros_like
"""
_OPERATOR = """
abs add and_ eq floordiv ge getitem gt inv invert le lt mod mul ne neg or_ pos pow sub truediv
"""
_MATH = "ceil exp fabs floor isfinite log log10 log1p log2 pow sqrt tanh"
#: Functions and methods of tensors that read and change nothing but their arguments.
TENSOR = frozenset(_TENSOR.split())
OPERATORS, MATH = frozenset(_OPERATOR.split()), frozenset(_MATH.split())
ATTRIBUTES = ("shape", "ndim", "dtype", "device")
_HOMES = ("torch.", "torch.nn.functional.", "torch._C._nn.", "torch.special.", "torch._C._special.")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
MAX_NODES = 1000
#: Of all tensors that a loss computes of a micro-batch: 1 GiB in float32.
MAX_ELEMENTS = 1 << 28


class Input(Request):
    """Input of a loss from a datum: its log-probabilities, or one of its inputs."""

    name: str = Field(pattern=r"^[a-z_][a-z0-9_]{0,63}$")
    rank: Literal[0, 1]


class Node(Request):
    """One node of a traced graph."""

    op: Literal["placeholder", "call_function", "call_method", "output"]
    name: str
    target: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class Graph(Request):
    """A traced graph: its nodes in the order in which they run."""

    format: Literal[1] = 1
    nodes: list[Node] = Field(max_length=MAX_NODES)


class CreateCustomLoss(Request):
    """A new loss of a session."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[Input] = Field(min_length=1, max_length=16)
    graph: Graph


class CustomLoss:
    """A loss that a client has sent.

    raises   CommandRefused for what is not listed here, and a graph that is none
    """

    def __init__(self, request: CreateCustomLoss) -> None:
        self.name, (_, *self.inputs) = request.name, request.inputs
        self._nodes: dict[str, fx.Node] = {}
        self._elements = 0
        graph, returned = fx.Graph(), None
        for node in request.graph.nodes:
            args = tuple(self._argument(each) for each in node.args)
            kwargs = {name: self._argument(each) for name, each in node.kwargs.items()}
            if node.op == "output":
                returned = args[0] if len(args) == 1 else None
                break
            if node.op == "placeholder":
                made = graph.placeholder(f"input_{len(self._nodes)}")
            elif node.op == "call_method":
                require(node.target in TENSOR, f"the method {node.target}")
                made = graph.call_function(self._bounded(_method(node.target)), args, kwargs)
            else:
                function = self._bounded(_function(node.target, args))
                made = graph.call_function(function, args, kwargs)
            self._nodes[node.name] = made
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        require(len(placeholders) == len(request.inputs), "another number of inputs than it takes")
        require(
            isinstance(returned, (tuple, list)) and len(returned) == 2
            and isinstance(returned[0], fx.Node) and isinstance(returned[1], dict)
            and all(_METRIC.fullmatch(name) for name in returned[1]),
            "a result that is not (loss, metrics)",
        )  # fmt: skip
        graph.output(returned)
        self._module = fx.GraphModule(nn.Module(), graph)

    def _argument(self, given: Any) -> Any:
        """An argument as Python has it."""
        try:
            return self._read_argument(given)
        except (TypeError, ValueError, AttributeError) as error:
            raise CommandRefused(
                "a custom loss has an argument that cannot be read", found=str(given)[:80],
                reason=error,
            ) from error  # fmt: skip

    def _read_argument(self, given: Any) -> Any:
        if isinstance(given, list):
            return [self._argument(each) for each in given]
        if not isinstance(given, dict):
            return given
        require(len(given) == 1, "an argument of an unknown kind")
        [(kind, value)] = given.items()
        match kind:
            case "ref":
                require(value in self._nodes, f"an argument before it is computed: {value}")
                return self._nodes[value]
            case "tuple":
                return tuple(self._argument(each) for each in value)
            case "dict":
                return {str(key): self._argument(each) for key, each in value.items()}
            case "slice":
                return slice(*map(self._argument, value))
            case "ellipsis":
                return ...
            case "float":
                return float(value)
            case "dtype" if value in ("float32", "float64", "int64", "bool"):
                return getattr(torch, value)
        raise CommandRefused(f"a custom loss has an argument of an unknown kind: {kind}")

    def read(self, at: int, given: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Its inputs from a datum, in the order in which it takes them; raises CommandRefused."""
        for each in self.inputs:
            value = given.get(each.name)
            if value is None or (each.rank == 0 and value.size != 1):
                raise CommandRefused(
                    f"datum {at} has no {each.name} that the loss '{self.name}' can read",
                    expected="a number" if each.rank == 0 else "a tensor of one dimension",
                )
        return [given[each.name].reshape((-1,) * each.rank) for each in self.inputs]

    def __call__(
        self, data: Sequence[Sequence[np.ndarray]], logprobs: list[Tensor], _given: object
    ) -> tuple[Tensor, dict[str, float]]:
        """The sum of the losses of some data, and the sums of their metrics.

        data       of each datum, as `read` gives it
        logprobs   of each datum's targets, [n]
        """
        total, sums = torch.zeros_like(logprobs[0][:0].sum()), dict[str, float]()
        self._elements = 0
        for own, inputs in zip(logprobs, data, strict=True):
            tensors = [torch.as_tensor(each.copy(), device=own.device) for each in inputs]
            tensors = [each.to(own.dtype) if each.is_floating_point() else each for each in tensors]
            try:
                loss, metrics = self._module(own, *tensors)
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
            except Exception as error:
                if isinstance(error, CommandRefused) or is_out_of_memory(error):
                    raise
                raise CommandRefused(f"the loss '{self.name}' fails", reason=error) from error
            if not isinstance(loss, Tensor) or loss.ndim:
                raise CommandRefused(f"the loss '{self.name}' is no single number")
            total = total + loss
        if not total.requires_grad:
            raise CommandRefused(f"the loss '{self.name}' depends on no log-probability")
        return total, sums

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that first counts the elements that it gives at most."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._elements += _elements(function, [*args, *kwargs.values()])
            if self._elements > MAX_ELEMENTS:
                raise CommandRefused(
                    f"the loss '{self.name}' computes too much of a micro-batch",
                    expected=f"{MAX_ELEMENTS} elements at most",
                )
            return function(*args, **kwargs)

        return run


def _elements(function: Callable[..., Any], args: Sequence[Any]) -> int:
    """Elements of a listed function's result at most: all but indexing broadcast, or reduce."""
    shapes = [each.shape for each in args if isinstance(each, Tensor)]
    if function is operator.getitem and shapes:
        return math.prod(shapes[0]) * _chosen(args[1]) // max(1, min(shapes[0], default=1))
    try:
        return math.prod(np.broadcast_shapes(*shapes)) if shapes else 0
    except ValueError:
        return max(map(math.prod, shapes))


def _chosen(index: Any) -> int:
    """Places that an index names at most; torch reads a list as a tensor, or as a tuple."""
    if isinstance(index, Tensor):
        return index.numel()
    if not isinstance(index, (tuple, list)):
        return 1
    several = math.prod(map(_chosen, index))
    return several if isinstance(index, tuple) else max(several, sum(map(_chosen, index)))


def _method(name: str) -> Callable[..., Any]:
    def run(own: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(own, name)(*args, **kwargs)

    return run


def _function(target: str, args: Sequence[Any]) -> Any:
    """A function by its name; raises CommandRefused."""
    if target in ("getattr", "builtins.getattr"):
        require(
            len(args) == 2 and args[1] in ATTRIBUTES, f"an attribute that is not served: {args}"
        )
        return getattr
    home, _, name = target.rpartition(".")
    if home == "operator" and name in OPERATORS:
        return operator.getitem if name == "getitem" else _of_floats(getattr(operator, name))
    if home == "math" and name in MATH:
        return getattr(math, name)
    require(f"{home}." in _HOMES and name in TENSOR, f"the function {target}")
    found = getattr(torch, name, None) or getattr(nn.functional, name, None)
    require(found is not None, f"the function {target}")
    return found


def _of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that makes floats of plain numbers: whole ones could grow without end."""

    def run(*args: Any) -> Any:
        if any(isinstance(each, Tensor) for each in args):
            return function(*args)
        return function(*map(float, args))

    return run


def require(holds: bool, what: str) -> None:
    """Refuse a graph that has something; raises CommandRefused."""
    if not holds:
        raise CommandRefused(
            f"a custom loss has {what}, which the service does not run",
            help="forward_backward_custom with the function itself computes it in the client",
        )
