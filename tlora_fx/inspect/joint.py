"""The joint graphs of a model's layers as text: what is kept, computed again, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator

import torch.utils._pytree as pytree
from torch import Tensor, fx

from tlora_fx.ir.graph import Block, GroupGraph, output_of
from tlora_fx.ir.joint import JointGraph, bytes_of

TOKENS = 128


def joint_text(group: GroupGraph) -> str:
    """A table of the joint graph of each block that has passes of the stage joint, or a budget.

    It is traced for a CPU, before generated kernels and Inductor change it.

    returns   "" where no block has any
    """
    staged = [block for block in group.blocks.values() if block.is_staged]
    return "\n".join(line for block in staged for line in _lines(group, block))


def _lines(group: GroupGraph, block: Block) -> Iterator[str]:
    # These take longer to import than all else here.
    from torch._functorch.partitioners import estimate_runtime

    from tlora_fx.pipeline.joint_stage import joint_graph

    joint = joint_graph(group, block, TOKENS)
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    kept, again = _cut(joint, block)
    backward = joint.backward()
    passes = ", ".join(text for text, _ in block.joint) or "none"
    sizes = [bytes_of(node) for node in nodes if node.name in kept]
    row = f"{len(group.jobs)} jobs, 2 sequences of {TOKENS} tokens each"
    yield f"joint graph of {block.name}: {row}"
    yield f"passes {passes}; budget {block.budget:g}; {sum(sizes) / 1e6:.3f} MB kept"
    yield f"{'':<9} {'node':<32} {'operator':<42} {'MFLOP':>10} {'MB':>9}  shape"
    for node in nodes:
        word = "backward" if node in backward else "forward"
        word = "again" if node.name in again else "kept" if node.name in kept else word
        flop = estimate_runtime(node) / 1e6 if hasattr(node.target, "_schema") else 0.0
        size = bytes_of(node) / 1e6
        name = f"{word:<9} {node.name:<32} {_operator(node):<42}"
        yield f"{name} {flop:>10.3f} {size:>9.3f}  {_shapes(node)}"
    yield ""


def _cut(joint: JointGraph, block: Block) -> tuple[set[str], set[str]]:
    """Names of values that are kept for the backward, and of those that are computed again."""
    from tlora_fx.pipeline.joint_stage import stage_of

    given = [node.meta["val"] for node in joint.graph.nodes if node.op == "placeholder"]
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    output_of(graph).meta.update(output_of(joint.graph).meta)
    copied = JointGraph(fx.GraphModule(joint.module, graph), block.name, joint.results)
    forward, backward = stage_of(block).cut(copied, given)
    outputs = pytree.tree_leaves(output_of(forward.graph).args[0])[joint.results :]
    kept = {node.name for node in outputs if isinstance(node, fx.Node)}
    first, second = ({node.name for node in part.graph.nodes} for part in (forward, backward))
    return kept, (first & second) - kept


def _operator(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default") if hasattr(node.target, "_schema") else "item"


def _shapes(node: fx.Node) -> str:
    values = pytree.tree_leaves(node.meta.get("val"))
    return ", ".join(str(list(value.shape)) for value in values if isinstance(value, Tensor))
