"""Rules of a model's masks, read from the function that transformers makes each mask of.

transformers describes a mask by a function of two positions before it makes a tensor of it. That
function is evaluated on a probe of positions and compared with what `packed_attention` can do:
causal or not, and a window. The model is handed a stand-in for the mask, which carries what was
read to attention, and which nothing but attention may compute with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily, resolve_name
from torch.utils._python_dispatch import _disable_current_modes

from tlora_fx.errors import AttentionNotPackable, BaseNotTraceable, PaddingSeen

MaskFunction = Callable[..., Any]
_SKIPS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")

# Positions that are probed: all of the first ones, then those around powers of two, as far as the
# base's own limit lies between these bounds.
DENSE, MIN_LENGTH, MAX_LENGTH = 512, 1 << 12, 1 << 17
BATCH_HELP = "set base.attention: batch, which runs the base's own attention on padded rows"


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Rule of which tokens see which, in the terms of `packed_attention`; window -1 is none."""

    causal: bool
    window: int = -1

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Mask of the keys that each query sees, by their positions."""
        distance = queries - keys
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return seen if self.window < 0 else seen & (distance.abs() < self.window)

    def __str__(self) -> str:
        words = "causal" if self.causal else "bidirectional"
        return words if self.window < 0 else f"{words} within a window of {self.window}"


class UnreadableMask(Exception):
    """A mask depends on more than two positions, or cannot be evaluated."""


@dataclass(frozen=True, slots=True)
class MaskProbe:
    """A mask function, evaluated on positions.

    use_vmap   whether it is to be called for single positions, as transformers says
    furthest   the last position that is looked at
    """

    function: MaskFunction
    use_vmap: bool
    furthest: int

    def rule(self, local_size: int | None = None) -> MaskRule | None:
        """The rule that equals the mask at every probed pair of positions; None: there is none.

        local_size   what transformers takes for the mask's window or chunk
        raises       UnreadableMask
        """
        with _real_tensors():
            everything = torch.arange(self.furthest + 1)
            first, last = self._seen(everything[[0, -1]], everything)
            # The last token has none behind it, so what it sees is the window.
            window = int(last.sum())
            if window < 1:
                return None
            rule = MaskRule(not bool(first[1:].any()), window if window <= self.furthest else -1)
            landmarks = (window,) if local_size is None else (window, local_size)
            same = all(
                torch.equal(self._seen(queries, keys), rule.sees(queries[:, None], keys))
                for queries, keys in self._pairs(landmarks)
            )
            return rule if same else None

    def looks_ahead(self) -> bool:
        """Whether any token sees a later one.

        raises    UnreadableMask
        """
        with _real_tensors():
            return any(
                bool((self._seen(queries, keys) & (queries[:, None] < keys)).any())
                for queries, keys in self._pairs()
            )

    def is_by_element(self) -> bool:
        """Whether the function gives the same for tensors of positions as for single ones.

        raises    UnreadableMask
        """
        single, whole = (replace(self, use_vmap=use_vmap) for use_vmap in (True, False))
        with _real_tensors():
            return all(
                torch.equal(single._seen(queries, keys), whole._seen(queries, keys))
                for queries, keys in self._pairs()
            )

    def _pairs(self, landmarks: Sequence[int] = ()) -> Iterator[tuple[Tensor, Tensor]]:
        """Queries and keys to look at: the first and last query with all keys, and a grid."""
        everything = torch.arange(self.furthest + 1)
        positions = _positions(self.furthest, landmarks)
        yield everything[[0, -1]], everything
        yield positions, positions

    def _seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys each query sees, [queries, keys], the same in every line of a batch."""
        # A function that reads the model's tensors fails in its own way: they have no values here.
        try:
            seen = self._call(torch.arange(2), torch.arange(1), queries, keys)
        except Exception as error:
            raise UnreadableMask(f"{type(error).__name__}: {error}"[:200]) from error
        if type(seen) is not Tensor or seen.device.type != "cpu" or seen.dtype != torch.bool:
            raise UnreadableMask("it reads tensors of the model")
        seen = seen.expand(2, 1, len(queries), len(keys))
        if not torch.equal(seen[0], seen[1]):
            raise UnreadableMask("it differs from line to line of a batch")
        return seen[0, 0]

    def _call(self, batch: Tensor, head: Tensor, queries: Tensor, keys: Tensor) -> Any:
        if not self.use_vmap:
            return self.function(
                batch[:, None, None, None],
                head[None, :, None, None],
                queries[None, None, :, None],
                keys[None, None, None, :],
            )
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        function = self.function
        for dim in (3, 2, 1, 0):
            function = torch.vmap(function, tuple(0 if n == dim else None for n in range(4)))
        with TransformGetItemToIndex():
            return function(batch, head, queries, keys)


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Within this, tensors have values though a model is being traced."""
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        yield


def _positions(furthest: int, landmarks: Sequence[int]) -> Tensor:
    """The probed positions, in order."""
    powers = [1 << bits for bits in range(furthest.bit_length())]
    several = [times * size for size in landmarks for times in (1, 2, 3)]
    near = {at + by for at in (*powers, *several, furthest) for by in (-2, -1, 0, 1, 2)}
    kept = {*range(min(DENSE, furthest + 1)), *(at for at in near if 0 <= at <= furthest)}
    return torch.tensor(sorted(kept))


def probe_of(arguments: Mapping[str, Any]) -> MaskProbe:
    """The probe of a mask by what transformers calls its maker with."""
    config = arguments.get("config")
    known = getattr(config, "max_position_embeddings", None)
    length = max(MIN_LENGTH, min(known, MAX_LENGTH)) if isinstance(known, int) else MAX_LENGTH
    return MaskProbe(arguments["mask_function"], bool(arguments.get("use_vmap")), length - 1)


def read_rule(arguments: Mapping[str, Any]) -> MaskRule:
    """Rule of a mask, by the arguments that transformers calls its maker with.

    raises    UnreadableMask where `packed_attention` cannot do the same
    """
    if arguments.get("attention_mask") is not None:
        raise UnreadableMask("it hides tokens of the row by a padding mask that the base makes")
    sizes = arguments["q_length"], arguments["q_offset"]
    if sizes != (arguments["kv_length"], arguments["kv_offset"]):
        raise UnreadableMask("it is of other keys than the row's own")
    rule = probe_of(arguments).rule(arguments.get("local_size"))
    if rule is None:
        raise UnreadableMask("it is neither causal nor bidirectional, with or without a window")
    return rule


class DeclaredMask(Tensor):
    """Stands for a mask in a model that is traced: it has a shape and a rule, and no values.

    rule        what it lets a token see; None: `trouble` says why that is not known
    skippable   whether transformers may leave the mask out and go by `is_causal`
    """

    rule: MaskRule | None
    trouble: str
    skippable: bool

    @staticmethod
    def make(arguments: Mapping[str, Any]) -> DeclaredMask:
        """A mask by what transformers calls its maker with."""
        shape = arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"]
        mask: DeclaredMask = Tensor._make_wrapper_subclass(
            DeclaredMask, shape, dtype=torch.bool, device=arguments["device"]
        )
        mask.skippable = any(arguments.get(name) for name in _SKIPS)
        mask.rule, mask.trouble = None, ""
        try:
            mask.rule = read_rule(arguments)
        except UnreadableMask as error:
            mask.trouble = str(error)
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_ITS_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _KEEPS_IT or _is_whole(func, args):
            return args[0]
        raise _computed_with(resolve_name(func) or func)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise _computed_with(func)


def _computed_with(operator: Any) -> AttentionNotPackable:
    return AttentionNotPackable(
        "a base's own code computes with its attention mask", operator=operator, help=BATCH_HELP
    )


_FORM = ("shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cuda", "is_nested")
_OF_ITS_FORM = frozenset(
    {Tensor.dim, Tensor.size, Tensor.is_floating_point, Tensor.__len__}
    | {getattr(Tensor, name).__get__ for name in (*_FORM, "requires_grad", "is_sparse")}
)
_KEEPS_IT = frozenset({Tensor.to, Tensor.contiguous, Tensor.detach, Tensor.clone})


def _is_whole(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a mask is cut to all that it has; tracing turns an index into slices."""
    if function is torch.ops.aten.slice and len(args) == 5:
        mask, dim, *bounds = args
        return _is_full(slice(*bounds), mask.shape[dim])
    if function is not Tensor.__getitem__:
        return False
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    return len(parts) <= 4 and all(
        isinstance(part, slice) and _is_full(part, size)
        for part, size in zip(parts, args[0].shape, strict=False)
    )


def _is_full(part: slice, size: Any) -> bool:
    return part.start in (None, 0) and part.step in (None, 1) and part.stop in (None, size)


def unpadded_chunks(chunk_size: int, left_padding: Tensor) -> MaskFunction:
    """transformers' mask of chunks where no line has padding before it."""

    def same_chunk(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key // chunk_size == query // chunk_size

    return same_chunk


def declared_mask(**arguments: Any) -> DeclaredMask:
    """Mask that transformers gets in place of its own while a packed row is traced."""
    return DeclaredMask.make(arguments)


def padded_mask(maker: Callable[..., Any], hidden: bool, **arguments: Any) -> Any:
    """Mask that transformers gets in place of its own while padded lines are traced.

    Padding stands behind a line: a token that sees later ones sees it where no mask hides it.

    maker     makes the mask
    hidden    whether the model was given a mask that hides padding
    raises    PaddingSeen, BaseNotTraceable
    """
    probe = probe_of(arguments)
    try:
        ahead = probe.looks_ahead()
        traceable = not probe.use_vmap or probe.is_by_element()
    except UnreadableMask:
        ahead, traceable = False, not probe.use_vmap  # The probe on the base's weights tells.
    padding = arguments.get("attention_mask")
    if ahead and not (hidden and padding is not None):
        raise PaddingSeen(
            "the base's mask lets tokens see later ones, and so the padding of a batch",
            expected="a causal mask",
            help="train this base alone; a mask that is bidirectional in the whole sequence, or in "
            "a window, can run on packed rows",
        )
    if not traceable:
        raise BaseNotTraceable(
            "the base's mask function reads its own tensors, which torch.export cannot trace",
            found="or_mask_function or and_mask_function, which transformers calls by torch.vmap",
            help="train this base alone, or make the mask of positions only",
        )
    arguments.update(mask_function=_by_line(**arguments))
    if padding is not None:  # that of padding, or one that the base makes: BioGPT's are ones
        arguments.update(attention_mask=None, mask_function=_hiding(padding, **arguments))
        arguments.update(dict.fromkeys(_SKIPS, False))
    return maker(**{**arguments, "use_vmap": False})


def _by_line(mask_function: MaskFunction, **_: Any) -> MaskFunction:
    """A mask function that looks a table [B, S] up by lines, not by the numbers of lines."""

    def looked_up(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        with _Lookups(batch, query, key):
            seen: Tensor = mask_function(batch, head, query, key)
        return seen

    return looked_up


class _Lookups(TorchFunctionMode):
    """Gives all of a table where it is asked for every line's token at every place."""

    def __init__(self, batch: Tensor, query: Tensor, key: Tensor) -> None:
        super().__init__()
        self.batch, self.query, self.key = batch, query, key

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and type(args[1]) is tuple and len(args[1]) == 2:
            table, (line, place) = args
            if line is self.batch and table.dim() == 2 and place is self.key:
                return table[:, None, None, :]
            if line is self.batch and table.dim() == 2 and place is self.query:
                return table[:, None, :, None]
        return func(*args, **(kwargs or {}))


def _hiding(padding: Tensor, mask_function: MaskFunction, **_: Any) -> MaskFunction:
    """A mask that hides padding too; transformers' own looks its lines up by their numbers.

    padding    [B, S], False where a line is padded
    """

    def hiding(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen: Tensor = mask_function(batch, head, query, key)
        return seen & padding[:, None, None, :].to(torch.bool)

    return hiding


@contextmanager
def unpacked_lines(*, padded: bool, hidden: bool = False) -> Iterator[None]:
    """Make transformers take each line of a batch for one sequence, within this context.

    It looks for packed sequences in position_ids. Attention knows a row's sequences by itself, so
    masks are read as of one sequence; and in batch form there are no packed ones, which
    transformers' own check finds when it runs, but cannot find while it is traced. No line has
    padding before it.

    padded    whether lines have padding behind them, so that no mask may look ahead
    hidden    but for one that the model is given to hide the padding
    """
    from transformers import masking_utils

    makers: dict[str, Any] = masking_utils.AttentionMaskInterface._global_mapping
    instead = {name: partial(padded_mask, maker, hidden) for name, maker in makers.items()}
    with (
        patch.dict(makers, instead if padded else {}),
        patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        patch.object(masking_utils, "chunked_overlay", unpadded_chunks),
    ):
        yield
