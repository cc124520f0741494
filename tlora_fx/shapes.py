"""Shape propagation: run a graph's operators on fake tensors and note what comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from tlora_fx.errors import GraphInvalid
from tlora_fx.graph import Block

FIRST_SEGMENT_SIZE = 1009


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the graph's own values belong to."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise AssertionError("a graph without values")


def fake_like(mode: FakeTensorMode, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A fake tensor of fixed shape in a mode."""
    with mode:
        return torch.empty(shape, dtype=dtype, device="meta")


def propagate(graph: fx.Graph, blocks: dict[str, Block] | None = None) -> None:
    """Give every operator's node its value anew.

    Placeholders and get_attr nodes keep theirs. What a job's segment holds gets a size of its
    own, one for each job.

    raises    GraphInvalid, naming the node at which the operators disagree
    """
    mode = fake_mode_of(graph)
    by_layer = {layer: block for block in (blocks or {}).values() for layer in block.instances}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        try:
            if node.op == "call_module" and node.target not in by_layer:
                continue
            if node.op == "call_module":
                node.meta["val"] = _layer_output(by_layer[str(node.target)], mode)
            elif node.target is torch.ops.tlora_fx.segment_read.default:
                node.meta["val"] = _segment_value(mode, *args)
            else:
                with mode:
                    node.meta["val"] = node.target(*args, **kwargs)
        except Exception as error:
            raise GraphInvalid(
                "an operator does not take the values that reach it",
                node=f"{node.format_node()}",
                source=node.meta.get("source"),
                found=f"{type(error).__name__}: {error}",
                help="the pass that made this node is at fault",
            ) from error


def _layer_output(block: Block, mode: FakeTensorMode) -> Any:
    """The value of a layer call: what the block's output node carries."""
    output = next(node for node in reversed(block.graph.nodes) if node.op == "output")
    return fx.map_arg(output.args[0], lambda n: n.meta["val"])


def _segment_value(
    mode: FakeTensorMode, whole: Tensor, segments: Tensor, job: int, dim: int
) -> Tensor:
    """One job's part of a tensor: the same shape with the job's own size at `dim`."""
    hint = FIRST_SEGMENT_SIZE + 2 * job
    shape = list(whole.shape)
    sizes = [int(size) if isinstance(size, int) else 17 + place for place, size in enumerate(shape)]
    sizes[dim] = hint
    kinds = [DimDynamic.STATIC] * len(shape)
    kinds[dim] = DimDynamic.DYNAMIC
    for place, size in enumerate(shape):
        if not isinstance(size, int) and place != dim:
            kinds[place] = DimDynamic.DYNAMIC
            sizes[place] = int(size.node.hint)
    real = torch.empty(sizes, dtype=whole.dtype, device="meta")
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(real, symbolic_context=context)
