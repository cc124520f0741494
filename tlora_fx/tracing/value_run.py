"""Run a model without its matrices: what they give is random, and the rest is computed for real.

A base on the meta device has shapes and no numbers. Here its forward runs on the meta device, and
beside it every operator that reads no matrix runs on the CPU, in float64. What an operator makes of
a matrix, such as a projection or an embedding, is drawn at random. So a loss is computed from
random logits for the price of the logits alone, whatever the model's size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

#: Numbers that a drawn result has at most; a larger one is as unknown as a matrix.
MAX_DRAWN = 1 << 27
#: Numbers that are drawn anew; more repeat them. A prime, so that no two rows of logits are alike.
PERIOD = 65537
#: Numbers of an operator's other tensors that are looked at for ids that they single out.
MAX_TABLE = 1 << 20


class NotEvaluated(Exception):
    """An operator that depends on the labels cannot run, or reads what has no numbers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operator that ran, or a tensor that was drawn.

    function    the operator; None: the result was drawn
    grad        whether autograd was on
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]
    grad: bool = True


class ValueRun(TorchDispatchMode):
    """Computes the numbers behind a forward on meta, as far as they depend on no matrix.

    Code that asks for a number gets the real one, such as `(labels != -100).any()`.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        vectors: Callable[[Tensor], Tensor | None],
        *,
        widened: bool,
        spread: float = 1.0,
    ) -> None:
        """Prepare a run.

        inputs     real tensors by name; `stand_ins` are what the model is given for them. The
                   influence of "labels" is followed
        vectors    the numbers of a parameter or buffer, None where it counts as a matrix
        widened    floats are float64, whatever the model's code asks for
        spread     standard deviation of what is drawn
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._vectors, self._widened, self._spread = vectors, widened, spread
        self._draw = torch.Generator().manual_seed(0)
        self._values: dict[int, Tensor] = {}
        self._unknown: set[int] = set()
        self._kept: list[Tensor] = []  # ids stay unique while tensors live
        self._first: dict[int, Tensor] = {}
        self._influenced: set[int] = set()
        self.steps: list[Step] = []
        self.leaves: list[Tensor] = []
        self.singled_out: set[int] = set()
        self.stand_ins = {name: value.to("meta") for name, value in inputs.items()}
        for name, value in inputs.items():
            self._know(self.stand_ins[name], self._wide(value).clone(), start=True)
        if "labels" in self.stand_ins:
            self._influenced.add(id(self.stand_ins["labels"]))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        follows = any(id(tensor) in self._influenced for tensor in tensors)
        known = [self._is_known(tensor) for tensor in tensors]
        if not all(known):
            return self._drawn(func, args, named, tensors, follows)
        try:
            real = self._computed(func, args, named, self.value)
        except Exception as error:
            if follows:
                raise NotEvaluated(f"{func}: {type(error).__name__}: {error}") from error
            return self._drawn(func, args, named, tensors, follows)
        if func is torch.ops.aten._local_scalar_dense.default:
            return real
        result = self._stand_in(func, args, named, real)
        self._note(func, args, named, result, real)
        if follows:
            self._influenced.update(id(leaf) for leaf in tree_leaves(result))
            self._look(args, named)
        return result

    def value(self, tensor: Tensor) -> Tensor:
        """The number behind a tensor.

        raises    NotEvaluated where it has none
        """
        if not self._is_known(tensor):
            raise NotEvaluated("it was computed of a matrix alone")
        return self._values[id(tensor)]

    def again(self, *, everywhere: bool = False) -> Mapping[int, Tensor]:
        """Compute all numbers once more, where autograd sees it; what was drawn are leaves.

        The numbers of the first run are freed.

        everywhere    autograd is on where it was off too
        returns       numbers by the id of the stand-in
        """
        self._values.clear()
        values = {key: value.clone() for key, value in self._first.items()}
        self.leaves = []

        def number(tensor: Tensor) -> Tensor:
            return values[id(tensor)]

        for step in self.steps:
            if step.function is None:
                drawn, stand_in = step.args
                leaf = drawn.detach()
                if leaf.is_floating_point():
                    self.leaves.append(leaf.requires_grad_())
                    leaf = leaf * 1  # may be written in place
                if id(stand_in) in values and step.kwargs.get("in_place"):
                    with torch.no_grad():
                        values[id(stand_in)].copy_(drawn)
                else:
                    values[id(stand_in)] = leaf
                continue
            with torch.set_grad_enabled(step.grad or everywhere):
                real = self._computed(step.function, step.args, step.kwargs, number)
            for stand_in, value in zip(step.results, tree_leaves(real), strict=True):
                if isinstance(stand_in, Tensor):
                    values[id(stand_in)] = value
        return values

    def _is_known(self, tensor: Tensor) -> bool:
        key = id(tensor)
        if key in self._values:
            return True
        if key in self._unknown:
            return False
        value = self._vectors(tensor) if tensor.is_meta else tensor.detach()
        self._kept.append(tensor)
        if value is None:
            self._unknown.add(key)
            return False
        self._know(tensor, self._wide(value).clone(), start=True)
        return True

    def _know(self, stand_in: Tensor, value: Tensor, *, start: bool = False) -> None:
        self._kept.append(stand_in)
        self._values[id(stand_in)] = value
        self._unknown.discard(id(stand_in))
        if start:
            self._first[id(stand_in)] = value.clone()

    def _wide(self, value: Tensor) -> Tensor:
        value = value.detach().cpu()
        return value.double() if self._widened and value.is_floating_point() else value

    def _computed(
        self, func: Any, args: Any, kwargs: Any, number: Callable[[Tensor], Tensor]
    ) -> Any:
        """What an operator makes of numbers, on the CPU."""
        real_args, real_kwargs = tree_map_only(Tensor, number, (args, kwargs))
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = torch.device("cpu")
        if self._widened:
            real_args = tree_map_only(torch.dtype, _widest, real_args)
            real_kwargs = tree_map_only(torch.dtype, _widest, real_kwargs)
            if func in _HALF_TO_FLOAT:
                real_args = (*real_args[:2], False)
        return func(*real_args, **real_kwargs)

    def _stand_in(self, func: Any, args: Any, kwargs: Any, real: Any) -> Any:
        """What the model gets of an operator: a tensor on meta in its own dtype."""
        if not tree_leaves((args, kwargs)) or func in _SHAPED_BY_VALUES or _reads_mask(args):
            return self._like(args, real)
        try:
            return func(*args, **kwargs)
        except Exception:  # noqa: BLE001  (meta knows less operators than the CPU)
            return self._like(args, real)

    def _like(self, args: Any, real: Any) -> Any:
        tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        floats = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
        dtype = next(floats, torch.get_default_dtype())

        def like(value: Tensor) -> Tensor:
            kind = dtype if value.is_floating_point() else value.dtype
            return torch.empty_strided(value.shape, value.stride(), dtype=kind, device="meta")

        return tree_map_only(Tensor, like, real)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, real: Any) -> None:
        stand_ins, values = tree_leaves(result), tree_leaves(real)
        for stand_in, value in zip(stand_ins, values, strict=True):
            if isinstance(stand_in, Tensor):
                self._know(stand_in, value)
        step = Step(func, args, kwargs, tuple(stand_ins), torch.is_grad_enabled())
        self.steps.append(step)

    def _drawn(self, func: Any, args: Any, kwargs: Any, tensors: Any, follows: bool) -> Any:
        """What an operator makes of something that has no numbers."""
        if func is torch.ops.aten._local_scalar_dense.default:
            raise NotEvaluated("it reads a number that was computed of a matrix alone")
        result = func(*args, **kwargs)
        mixes = any(self._is_known(tensor) for tensor in tensors)
        for stand_in in tree_leaves(result):
            if not isinstance(stand_in, Tensor):
                continue
            if follows:
                self._influenced.add(id(stand_in))
            if id(stand_in) in self._values and func._schema.is_mutable:
                kept = self._values[id(stand_in)]
                kept.copy_(self._random(kept))
                self._kept.append(stand_in)
                self.steps.append(
                    Step(None, (kept.clone(), stand_in), {"in_place": True}, (stand_in,))
                )
            elif mixes and stand_in.is_floating_point() and stand_in.numel() <= MAX_DRAWN:
                drawn = self._random(stand_in)
                self._know(stand_in, drawn)
                self.steps.append(Step(None, (drawn.clone(), stand_in), {}, (stand_in,)))
            else:
                self._kept.append(stand_in)
                self._unknown.add(id(stand_in))
        return result

    def _random(self, like: Tensor) -> Tensor:
        kind = torch.float64 if self._widened and like.is_floating_point() else like.dtype
        count = like.numel()
        drawn = (
            torch.randn(min(count, PERIOD), generator=self._draw, dtype=torch.float64)
            * self._spread
        )
        if count > PERIOD:
            drawn = drawn.repeat(-(-count // PERIOD))[:count]
        return drawn.view(like.shape).to(kind)

    def _look(self, args: Any, kwargs: Any) -> None:
        """Note the ids that an operator on labels may treat unlike others."""
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) in (int, float):
                self.singled_out.add(int(leaf))
            elif isinstance(leaf, Tensor) and id(leaf) not in self._influenced:
                self._look_at(self._values[id(leaf)])

    def _look_at(self, table: Tensor) -> None:
        if table.dim() > 1 or table.numel() > MAX_TABLE:
            return
        if table.is_floating_point() or table.dtype == torch.bool:
            other = (table != table.double().median().to(table.dtype)).nonzero().flatten()
            self.singled_out.update(other[:16].tolist() if table.dim() else ())
        elif table.numel() <= 64:
            self.singled_out.update(table.flatten().tolist())


@contextmanager
def quietly() -> Iterator[None]:
    """Within this, no warning of a model's code is shown, and no generator moves on."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def _widest(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _reads_mask(args: Any) -> bool:
    """Whether an index is a mask, whose count of ones shapes the result."""
    rest = tree_leaves(args)[1:]
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in rest)


_HALF_TO_FLOAT = (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default)
_SHAPED_BY_VALUES = (
    torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default, torch.ops.aten.repeat_interleave.Tensor,
)  # fmt: skip
