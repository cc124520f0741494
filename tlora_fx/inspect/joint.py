"""The joint graphs of a model's layers as data and text: what is kept, computed again, its cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch.utils._pytree as pytree
from torch import Tensor, fx

from tlora_fx.inspect.schema import JointEntry, JointNode
from tlora_fx.ir.graph import Block, GroupGraph, output_of
from tlora_fx.ir.joint import JointGraph, bytes_of

if TYPE_CHECKING:
    from tlora_fx.pipeline.joint_stage import JointStage

TOKENS = 128


def joint_entries(group: GroupGraph) -> list[JointEntry]:
    """The joint graph of each block that has passes of the stage joint, or a budget.

    It is traced for a CPU, before generated kernels and Inductor change it.

    raises    GraphInvalid, PipelineError for a pass that nobody knows
    """
    return [_entry(group, block) for block in group.blocks.values() if block.is_staged]


def joint_text(group: GroupGraph) -> str:
    """A table of each of the `joint_entries`, "" where there is none."""
    return render_joint(joint_entries(group))


def render_joint(entries: Iterable[JointEntry]) -> str:
    """A table of each joint graph."""
    return "\n".join(line for entry in entries for line in _lines(entry))


def _lines(entry: JointEntry) -> Iterator[str]:
    kept = sum(node.bytes for node in entry.nodes if node.fate == "kept")
    yield f"joint graph of {entry.block}: {entry.row}"
    passes = ", ".join(entry.passes) or "none"
    yield f"passes {passes}; budget {entry.budget:g}; {kept / 1e6:.3f} MB kept"
    yield f"{'':<9} {'node':<32} {'operator':<42} {'MFLOP':>10} {'MB':>9}  shape"
    for node in entry.nodes:
        name = f"{node.fate:<9} {node.id:<32} {node.target:<42}"
        yield f"{name} {node.flop / 1e6:>10.3f} {node.bytes / 1e6:>9.3f}  {node.shape}"
    yield ""


def _entry(group: GroupGraph, block: Block) -> JointEntry:
    # It takes longer to import than all else here.
    from tlora_fx.pipeline.joint_stage import JointStage, stage_of, traced_graph

    joint, stage = traced_graph(group, block, TOKENS), stage_of(block)
    traced = list(joint_nodes(joint, JointStage(block.name, 1.0, ())))
    stage.rewrite(joint.module, joint.results)
    return JointEntry(
        block=block.name,
        layers=list(block.instances),
        row=f"{len(group.jobs)} jobs, 2 sequences of {TOKENS} tokens each",
        passes=[text for text, _ in block.joint],
        budget=block.budget,
        nodes=list(joint_nodes(joint, stage)),
        traced=traced,
    )


def joint_nodes(joint: JointGraph, stage: JointStage) -> Iterator[JointNode]:
    """The values of a joint graph with what a stage makes of them; the graph stays as it is."""
    from torch._functorch.partitioners import estimate_runtime

    kept, again = _cut(joint, stage)
    backward = joint.backward()
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        fate = "backward" if node in backward else "forward"
        is_operator = hasattr(node.target, "_schema")
        yield JointNode(
            id=node.name,
            target=str(node.target).removesuffix(".default") if is_operator else "item",
            inputs=[source.name for source in node.all_input_nodes],
            arguments=str(fx.map_arg((*node.args, node.kwargs), lambda _: "%")).replace("'%'", "%"),
            shape=_shapes(node),
            # torch counts 1 for what has no products.
            flop=flop if is_operator and (flop := float(estimate_runtime(node))) > 1 else 0.0,
            bytes=bytes_of(node),
            fate="again" if node.name in again else "kept" if node.name in kept else fate,
        )


def _cut(joint: JointGraph, stage: JointStage) -> tuple[set[str], set[str]]:
    """Names of values that are kept for the backward, and of those that are computed again."""
    given = [node.meta["val"] for node in joint.graph.nodes if node.op == "placeholder"]
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    output_of(graph).meta.update(output_of(joint.graph).meta)
    copied = JointGraph(fx.GraphModule(joint.module, graph), joint.block, joint.results)
    forward, backward = stage.cut(copied, given)
    outputs = pytree.tree_leaves(output_of(forward.graph).args[0])[joint.results :]
    kept = {node.name for node in outputs if isinstance(node, fx.Node)}
    first, second = ({node.name for node in part.graph.nodes} for part in (forward, backward))
    return kept, (first & second) - kept


def _shapes(node: fx.Node) -> str:
    values = pytree.tree_leaves(node.meta.get("val"))
    return ", ".join(str(list(value.shape)) for value in values if isinstance(value, Tensor))
