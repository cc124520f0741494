"""Task of a base in its own code: the loss that its forward computes of labels.

Jobs train by the loss of the next token. A base whose own loss is another one, such as the decoder
of an encoder-decoder whose labels are shifted before it sees them, would silently learn something
else. Its forward runs once on the meta device. The operators between its logits and its loss then
run again on a few real numbers, and the result is compared with ours.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tlora_fx.errors import BaseRefused
from tlora_fx.model.backbone import Backbone
from tlora_fx.tracing.layers import plan_layers, pruned_copy
from tlora_fx.tracing.masks import unpacked_lines

TOKENS = 8
# Losses of random logits differ in the first digit where anything differs.
EQUAL = 0.02
# What keeps a value but for its dtype: a loss may take the logits before it, or after.
CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default)


def refuse_other_loss(backbone: Backbone) -> str | None:
    """Refuse a base whose own loss is not the cross entropy of each next token.

    returns   what to report where the losses could not be compared, else None
    raises    BaseRefused
    """
    if backbone.spec.is_classifier or backbone.config is None:
        return None
    if "labels" not in inspect.signature(backbone.model.forward).parameters:
        return None
    example = _example(backbone)
    if example is None:
        return "the base's own loss was not compared with that of the next token"
    ours = F.cross_entropy(example.logits[0, :-1], example.labels[0, 1:])
    if not _is_equal(example.loss, ours):
        raise BaseRefused(
            "the base's own loss is not that of the next token, by which jobs train",
            base=backbone.title,
            expected=f"{ours:.3f}, the mean cross entropy of each token's logits with the next id",
            found=_described(example),
            help="give a causal language model; the decoder of an encoder-decoder is none",
        )
    return None


class _Example(NamedTuple):
    """Random logits [1, TOKENS, V], labels [1, TOKENS], and what a base's own loss is of them."""

    logits: Tensor
    labels: Tensor
    loss: Tensor


def _described(example: _Example) -> str:
    same = F.cross_entropy(example.logits[0], example.labels[0])
    if _is_equal(example.loss, same):
        return f"{same:.3f}, that with the token's own id: nothing is shifted"
    return f"{example.loss:.3f}"


def _is_equal(left: Tensor, right: Tensor) -> bool:
    return torch.isclose(left.double(), right.double(), rtol=EQUAL).item() is True


class _Operator(NamedTuple):
    """One operator that ran on meta."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _OperatorLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every operator that runs, with its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[_Operator] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators.append(_Operator(func, args, kwargs or {}, result))
        return result


def _example(backbone: Backbone) -> _Example | None:
    """An example of a base's own loss; None where nobody can tell."""
    model = pruned_copy(backbone, plan_layers(backbone))[0]
    try:
        return _loss_of(model)
    except Exception:  # noqa: BLE001  (a base's code may fail on meta in any way)
        return None


def _loss_of(model: nn.Module) -> _Example | None:
    ids, wanted = (torch.zeros(1, TOKENS, dtype=torch.int64, device="meta") for _ in range(2))
    log = _OperatorLog()
    with torch.no_grad(), warnings.catch_warnings(), unpacked_lines(padded=False), log:
        warnings.simplefilter("ignore")
        out = model(input_ids=ids, labels=wanted, use_cache=False)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(out.logits.shape, generator=generator)
    vocabulary = logits.shape[-1]
    # Small numbers are special tokens, which some losses leave out.
    labels = (vocabulary // 2 + torch.arange(TOKENS)[None]) % vocabulary
    known = {id(wanted): labels}
    known |= dict.fromkeys(_aliases(out.logits, log.operators), logits)
    loss = _replayed(out.loss, known, log.operators)
    return None if loss is None else _Example(logits, labels, loss)


def _aliases(logits: Tensor, operators: list[_Operator]) -> set[int]:
    """Ids of the logits, and of what they were cast from."""
    names = {id(logits)}
    for operator in reversed(operators):
        if operator.function in CASTS and id(operator.result) in names:
            names.add(id(operator.args[0]))
    return names


def _replayed(loss: Tensor, known: dict[int, Tensor], operators: list[_Operator]) -> Tensor | None:
    """Run what depends on known tensors alone, on the CPU.

    known   real values by the id of the tensor on meta; values of operators are added
    """
    for function, args, kwargs, result in operators:
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        if any(id(tensor) not in known for tensor in given):
            if function._schema.is_mutable:
                known.pop(id(result), None)
            continue
        real_args, real_kwargs = tree_map_only(Tensor, lambda t: known[id(t)], (args, kwargs))
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = torch.device("cpu")
        real = function(*real_args, **real_kwargs)
        for stand_in, value in zip(tree_leaves(result), tree_leaves(real), strict=True):
            if isinstance(stand_in, Tensor):
                known[id(stand_in)] = value
    return known.get(id(loss))
