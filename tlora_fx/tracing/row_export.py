"""One row of dynamic size through a model: torch.export on the meta device, and what it needs.

A model is called with the inputs that every graph of ours takes. What its code does that a graph
does not keep is refused.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from tlora_fx.errors import BaseRefused, StateChanged, TloraError
from tlora_fx.ir.graph import TABLES, Form
from tlora_fx.model.backbone import longest_sequence, named_logits
from tlora_fx.model.batch import PADDING
from tlora_fx.tracing.attention import row_of
from tlora_fx.tracing.guards import SizeGuards
from tlora_fx.tracing.layer_calls import LayerCalls
from tlora_fx.tracing.masks import unpacked_lines
from tlora_fx.tracing.positions import CountsBySequence
from tlora_fx.tracing.refusals import not_traceable
from tlora_fx.tracing.state import meta_copy
from tlora_fx.tracing.watch import Watch

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
        self.attention: list[str] = []
        self.runs: Counter[int] = Counter()
        stop = TracedRow.forward.__code__
        self.guards, self.watch = SizeGuards(form, stop), Watch(model, stop)

    def forward(self, input_ids: Tensor, position_ids: Tensor, *tables: Tensor) -> Tensor:
        """Logits [1, T, V], or [B, S, V] in batch form."""
        self.watch.clear()
        if self.calls is not None:
            self.calls.clear()
        row = row_of(dict(zip(TABLES, tables, strict=True)))
        inputs = (input_ids, position_ids, *tables)
        row_shaped = (input_ids, position_ids, tables[TABLES.index("token_index")])
        with ExitStack() as stack:
            self.attention = stack.enter_context(row)
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


def accepts_positions(model: nn.Module) -> bool:
    """Whether a model's forward takes position_ids, without which rows cannot be packed."""
    return accepts(model, "position_ids")


def accepts(model: nn.Module, name: str) -> bool:
    """Whether a model's forward takes an argument of this name."""
    return name in inspect.signature(model.forward).parameters


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
    module = program.module(check_guards=False)
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
