"""The price of a recompute budget, by the joint graphs of layers: no budget is measured.

A budget keeps a share of what layers keep for their backward. Which values that are follows from
the cut of torch's partitioner on the graphs of each structure of layers, traced for a CPU. What is
computed again is counted as its share of the forward's products. Processes that cut matrices have
graphs of their own pieces; the partitioner keeps what was summed over them at any budget.
"""

from __future__ import annotations

from functools import cache

import torch

from tlora_fx.cost.load import Round
from tlora_fx.cost.plan import BudgetPrice, Plan
from tlora_fx.cost.step_time import CostModel
from tlora_fx.graph_file import graph_text, graphs_of_text
from tlora_fx.ir.graph import HEAD, Block, GroupGraph, is_call
from tlora_fx.ir.joint import JointGraph
from tlora_fx.ops.parallel import GROUP, traced_for
from tlora_fx.passes.tensor_parallel.shard import ShardTensor
from tlora_fx.pipeline import Event, Pipeline, Runner

#: Budgets that are offered, the cheapest first.
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
aten = torch.ops.aten
ACTIVATIONS = (aten.silu.default, aten.gelu.default)


def price_budget(cost: CostModel, group: GroupGraph, plan: Plan, work: Round) -> None:
    """Tell costs the price of a plan's budget, where it has one; raises GraphInvalid."""
    if plan.recompute_budget:
        prices = BudgetPrices(group, work, compiled=cost.profile.compiled)
        cost.prices[plan.budget_key] = prices.price(*plan.budget_key)


class BudgetPrices:
    """Prices of budgets; graphs are traced at the first one of so many processes.

    group      before a plan's passes
    work       whose sequences decide what attention costs
    compiled   layers are compiled: gated activations are computed again at any budget
    """

    def __init__(self, group: GroupGraph, work: Round, *, compiled: bool) -> None:
        load = work.load
        self.group, self.compiled = group, compiled
        self.length = max(2, round(load.total / max(1, load.sequences)))
        self.price = cache(self._price)
        self._graphs = cache(self._traced)

    def _traced(self, tp: int) -> list[tuple[Block, JointGraph]]:
        # It takes longer to import than all else here.
        from tlora_fx.pipeline.joint_stage import traced_graph

        group = self.group if tp == 1 else _cut(self.group, tp)
        blocks = [block for block in group.blocks.values() if block.name != HEAD]
        with traced_for(GROUP, tp):
            graphs = [(block, traced_graph(group, block, self.length)) for block in blocks]
        for _, joint in graphs if self.compiled else ():
            _reopen_gates(joint)
        return graphs

    def _price(self, budget: float, tp: int = 1) -> BudgetPrice:
        """What a budget keeps and computes again in one process; raises GraphInvalid.

        tp   processes that cut matrices
        """
        from tlora_fx.inspect.joint import joint_nodes
        from tlora_fx.pipeline.joint_stage import JointStage

        kept = again = forward = layers = 0.0
        for block, joint in self._graphs(tp):
            count = len(block.instances)
            for node in joint_nodes(joint, JointStage(block.name, budget, ())):
                kept += count * node.bytes * (node.fate == "kept")
                again += count * node.flop * (node.fate == "again")
                forward += count * node.flop * (node.fate != "backward")
            layers += count
        tokens = 2 * self.length * len(self.group.jobs)
        return BudgetPrice(kept / (tokens * layers), again / forward if forward else 0.0)


def _cut(group: GroupGraph, tp: int) -> GroupGraph:
    """A copy whose matrices are cut into so many pieces."""
    copy = graphs_of_text(graph_text(group))
    assert isinstance(copy, GroupGraph)
    Runner(Pipeline(())).run_one(Event(1, ShardTensor(tp), "group", copy))
    return copy


def _reopen_gates(joint: JointGraph) -> None:
    """Mark gated activations, as the stage does where their operator is our own."""
    for opened in joint.calls(*ACTIVATIONS):
        for node in (opened, *(user for user in opened.users if is_call(user, aten.mul.Tensor))):
            if node not in joint.backward():
                joint.recompute(node)
