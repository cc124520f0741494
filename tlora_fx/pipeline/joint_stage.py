"""The stage `joint`: forward and backward of a layer as one graph, rewritten, then cut in two.

AOTAutograd traces a layer's lowered code and its backward into one graph each time that the layer
is compiled. Here passes rewrite that graph, then torch's partitioner decides which values of the
forward the backward gets, and which it computes again: the cheapest by FLOP counts, ours for our
own operators (`ops/flops.py`), so that what is kept fits a budget. Layers of a model that nobody
compiles are traced, rewritten and cut all the same, and run without generated code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from operator import getitem
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._functorch import config as settings
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate

from tlora_fx.errors import GraphInvalid, TloraError
from tlora_fx.host.version import __version__
from tlora_fx.ir.graph import Block, GroupGraph, TensorRef, is_call, output_of, placeholders
from tlora_fx.ir.joint import JointGraph, bytes_of, carried_inputs
from tlora_fx.ops.gated import CUBE, GELU
from tlora_fx.pipeline.text import parse_pass

Forward = TypeVar("Forward", bound=Callable[..., Any])
Parts = tuple[fx.GraphModule, fx.GraphModule]
_GATED = torch.ops.tlora_fx.multi_lora_gated_forward.default
_APPEND = torch.ops.tlora_fx.append_tail_columns.default
#: Which of its results is the gated activation.
_ACTIVATED = 3
#: What is so many times smaller than all results of its operator stands beside them.
_BESIDE = 8
aten = torch.ops.aten


class Rewrite(Protocol):
    """Interface of a pass of the stage: see `JointPass`."""

    name: ClassVar[str]

    def rewrite(self, joint: JointGraph) -> None:
        """Rewrite one joint graph in place."""


class JointStage(CustomPartitionerFn):
    """Rewrites joint graphs of a block's layers and cuts them in two.

    block    its name
    budget   bytes that may be kept for the backward, over those that Inductor keeps
    passes   what rewrites the graphs, in order
    """

    def __init__(self, block: str, budget: float, passes: Sequence[Rewrite]) -> None:
        self.block, self.budget, self.passes = block, budget, tuple(passes)

    def rewrite(self, module: fx.GraphModule, results: int) -> JointGraph:
        """Run the passes; raises GraphInvalid for what one of them leaves."""
        joint = JointGraph(module, self.block, results)
        for item in self.passes:
            _run(item, joint)
        return joint

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        **more: Any,
    ) -> Parts:
        """Forward and backward of a joint graph, as torch asks for them."""
        return self.cut(self.rewrite(gm, more.pop("num_fwd_outputs")), joint_inputs, **more)

    def cut(self, joint: JointGraph, inputs: Sequence[object], **more: Any) -> Parts:
        """Forward and backward of a joint graph that is rewritten."""
        if self.budget < 1:
            _reopen_gates(joint)
            _read_unwidened(joint)
            _keep_beside(joint)
        kept = settings.patch(activation_memory_budget=self.budget, is_non_builtin_to_include=True)
        with kept:
            return min_cut_rematerialization_partition(
                joint.module, inputs, num_fwd_outputs=joint.results, **more
            )

    def uuid(self) -> str | None:
        """Key of torch's caches; None, so that they are not asked, for a pass without a file."""
        found = sha256(f"{__version__} {self.budget} {list(map(str, self.passes))}".encode())
        for item in (self, *self.passes):
            file = getattr(importlib.import_module(type(item).__module__), "__file__", None)
            if file is None or not Path(file).is_file():
                return None
            found.update(Path(file).read_bytes())
        return found.hexdigest()

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `torch.compile` with which the stage is part of a compilation."""
        options = dict(given)
        if options.get("backend", "inductor") != "inductor":
            return options | {"backend": self.backend}
        mode = options.pop("mode", None)
        inner = torch._inductor.list_mode_options(mode) if mode else {}
        inner |= options.get("options") or {}
        return options | {"options": inner | {"custom_partitioner_fn": self}}

    def backend(self, module: fx.GraphModule, inputs: Sequence[Any], **more: Any) -> Any:
        """A backend of `torch.compile` that generates no code."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop

        whole = aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=boxed_nop,
            partition_fn=self,
            keep_inference_input_mutations=True,
        )
        return whole(module, inputs, **more)


def stage_of(block: Block) -> JointStage:
    """The stage of a block's layers; raises PipelineError for a pass that nobody knows."""
    return JointStage(block.name, block.budget, _passes(block.joint))


def joint(*passes: tuple[str, str], budget: float = 1.0) -> Callable[[Forward], Forward]:
    """Decorate a layer's forward with the stage that its compiled code goes through.

    passes   each as pipelines write it, and the module that it stands in
    """

    def decorate(forward: Forward) -> Forward:
        block = forward.__qualname__.partition(".")[0].lower()
        forward.stage = JointStage(block, budget, _passes(passes))  # type: ignore[attr-defined]
        return forward

    return decorate


def run_staged(block: Block, forward: Callable[..., Any], *values: Tensor) -> Any:
    """Result of a layer's forward for tensors, with the backward of the block's stage."""
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.aot_autograd import aot_function

    plain: Any = boxed_nop
    return aot_function(forward, plain, plain, stage_of(block))(*values)


def _passes(named: Sequence[tuple[str, str]]) -> list[Rewrite]:
    found: list[Rewrite] = []
    for text, module in named:
        if module != "__main__":
            importlib.import_module(module)
        found.append(cast(Rewrite, parse_pass(text)))
    return found


def joint_graph(group: GroupGraph, block: Block, tokens: int = 128) -> JointGraph:
    """`traced_graph`, rewritten by the block's passes.

    raises   GraphInvalid where a pass of the block leaves a wrong graph
    """
    traced = traced_graph(group, block, tokens)
    return stage_of(block).rewrite(traced.module, traced.results)


def traced_graph(group: GroupGraph, block: Block, tokens: int = 128) -> JointGraph:
    """The joint graph of a block before any pass, on fake tensors of a CPU.

    tokens   of each of two sequences of every job in the row that it is traced for
    raises   GraphInvalid where it cannot be traced
    """
    from torch._functorch.aot_autograd import aot_export_joint_simple

    inputs = placeholders(block.graph)
    stored = [node for node in block.graph.nodes if node.op == "get_attr"]
    nodes = [*inputs.values(), *stored]
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        given = [_input(group, *item, tokens) for item in inputs.items()]
        for place in carried_inputs(group, block):
            given[place].requires_grad_()
        given += [_stored(node) for node in stored]

        def forward(*values: Tensor) -> tuple[Any, ...]:
            found = _run_graph(block.graph, dict(zip(nodes, values, strict=True)))
            # torch exports no graph that gives views.
            pairs = zip(found, _results(block.graph), strict=True)
            return tuple(value.clone() if _is_view(node) else value for value, node in pairs)

        try:
            module: Any = aot_export_joint_simple(forward, tuple(given), trace_joint=True)
        except TloraError:
            raise
        except Exception as error:
            raise GraphInvalid(
                "the joint graph of a block cannot be traced",
                block=block.name,
                found=f"{type(error).__name__}: {error}".splitlines()[0][:300],
                help="leave out passes of the stage joint",
            ) from error
        return JointGraph(module, block.name, len(_results(block.graph)))


def _results(graph: fx.Graph) -> list[Any]:
    return pytree.tree_leaves(output_of(graph).args[0])


def _is_view(node: fx.Node) -> bool:
    """Whether a node's value shares memory with what it reads, or is an input."""
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(item.alias_info is not None for item in schema.returns)
    return aliases or node.op != "call_function"


def _input(group: GroupGraph, name: str, node: fx.Node, tokens: int) -> Tensor:
    """An input of a layer, for a row with two sequences of every job; nobody reads its values."""
    value, jobs = node.meta["val"], len(group.jobs)
    tables = {"segments": [jobs + 1], "keys": [jobs, 2], "cu_seqlens": [2 * jobs + 1]}
    row = [2 * jobs * tokens] * 2 if group.form == "packed" else [2 * jobs, tokens]
    places = enumerate(value.shape)
    sizes = [size if isinstance(size, int) else row[min(place, 1)] for place, size in places]
    return torch.empty(tables.get(name, sizes), dtype=value.dtype)


def _stored(node: fx.Node) -> Tensor:
    """What a layer's graph reads, with a gradient where jobs train it."""
    ref: TensorRef = node.meta["tensor"]
    value = torch.empty(ref.shape, dtype=ref.dtype)
    bank = ref.owner == "buffer" and ref.name.rpartition(".")[2] in ("a", "b")
    return value.requires_grad_(bank or ref.owner == "job")


def _run_graph(graph: fx.Graph, values: dict[fx.Node, Any]) -> list[Any]:
    """Results of a graph whose inputs and tensors have these values."""

    def fill(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return values[value] if isinstance(value, fx.Node) else value

    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_aggregate((node.args, node.kwargs), fill)
            values[node] = node.target(*args, **kwargs)
    return [fill(item) for item in _results(graph)]


def _run(item: Rewrite, joint: JointGraph) -> None:
    """Run one pass, give its new nodes values, and check what it leaves."""
    graph, before = joint.graph, [_kind(node) for node in joint.outputs]
    given = [node.name for node in graph.nodes if node.op == "placeholder"]
    where = {"block": joint.block, "help": "this is a defect of the pass"}
    try:
        item.rewrite(joint)
        graph.lint()
        _set_values(joint)
    except TloraError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise GraphInvalid(
            f"pass '{item.name}' failed on the joint graph", found=found, **where
        ) from error
    after = [_kind(node) for node in joint.outputs]
    kept = [node.name for node in graph.nodes if node.op == "placeholder"]
    if after != before or kept != given:
        pairs = zip(before, after, strict=False)
        place = next((n for n, (was, now) in enumerate(pairs) if was != now), len(before))
        raise GraphInvalid(
            f"pass '{item.name}' changed what the joint graph takes or gives",
            expected=(before[place] if place < len(before) else ", ".join(given)),
            found=(after[place] if place < len(after) else ", ".join(kept)),
            output=place,
            **where,
        )
    backward = joint.backward()
    for node in joint.outputs[: joint.results]:
        if node in backward:
            raise GraphInvalid(
                f"pass '{item.name}' lets a result of the forward depend on the backward",
                node=node.format_node(),
                **where,
            )
    joint.module.recompile()


def _kind(node: Any) -> str:
    """Shape and dtype of an output, "" for none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else ""


def _set_values(joint: JointGraph) -> None:
    """Give nodes without a value that of their operator."""
    values = [node.meta.get("val") for node in joint.graph.nodes]
    mode = detect_fake_mode(values)
    for node in joint.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            args, kwargs = map_aggregate(
                (node.args, node.kwargs),
                lambda value: value.meta["val"] if isinstance(value, fx.Node) else value,
            )
            with mode or nullcontext():
                node.meta["val"] = node.target(*args, **kwargs)


def _reopen_gates(joint: JointGraph) -> None:
    """Compute gated activations again in the backward from what they are made of.

    The operator that makes one multiplies it by a weight as well, which would be done again.
    """
    graph = joint.graph
    for node in list(joint.calls(_GATED)):
        wide = [one for one in node.users if is_call(one, getitem) and one.args[1] == _ACTIVATED]
        for user in [
            user for one in wide for user in one.users if is_call(user, aten.slice.Tensor)
        ]:
            known = set(graph.nodes)
            with graph.inserting_before(user):
                arguments: Any = node.args[:3]
                product = _gated(graph, *arguments)
            user.replace_all_uses_with(product)
            graph.erase_node(user)
            for new in set(graph.nodes) - known:
                joint.recompute(new)
    _set_values(joint)


def _read_unwidened(joint: JointGraph) -> None:
    """Let the backward read an input itself, not its copy with columns appended."""
    for node in list(joint.calls(aten.slice.Tensor)):
        whole, dimension, start, stop = (*node.args, 0, 0, None)[:4]
        if isinstance(whole, fx.Node) and is_call(whole, _APPEND) and not start:
            parts: Any = whole.args[0]
            columns, last = parts[0].meta["val"].shape[-1], whole.meta["val"].dim() - 1
            if len(parts) == 1 and dimension in (-1, last) and stop == columns:
                node.replace_all_uses_with(parts[0])
                joint.graph.erase_node(node)


def _gated(graph: fx.Graph, gate: fx.Node, up: fx.Node, activation: str) -> fx.Node:
    """activation(gate) * up, rounded once, in operators that Inductor knows after decomposing."""

    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    cast, dtype = torch.ops.prims.convert_element_type.default, gate.meta["val"].dtype
    g, u = (call(cast, one, torch.promote_types(torch.float32, dtype)) for one in (gate, up))
    exponent = g
    if activation != "silu":
        cube = call(aten.add.Tensor, call(aten.mul.Tensor, call(aten.mul.Tensor, g, g), CUBE), 1)
        exponent = call(aten.mul.Tensor, call(aten.mul.Tensor, g, GELU), cube)
    opened = call(aten.mul.Tensor, g, call(aten.sigmoid.default, exponent))
    return call(cast, call(aten.mul.Tensor, opened, u), dtype)


def _keep_beside(joint: JointGraph) -> None:
    """Keep what stands beside a large result where the backward needs no large one.

    The knapsack counts an operator's results as one: it would run a product again for the low-rank
    rows beside it, and believe that it saves the product.
    """
    backward = joint.backward()
    read: set[fx.Node] = set()
    for node in reversed(joint.graph.nodes):
        if node not in backward and any(u in backward or u in read for u in node.users):
            read.add(node)
    for node in read:
        parts = [user for user in node.users if is_call(user, getitem)]
        if parts and node.op == "call_function":
            needed = sum(bytes_of(part) for part in parts if part in read)
            if needed * _BESIDE < bytes_of(node):
                joint.keep(node)
