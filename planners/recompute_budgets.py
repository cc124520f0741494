"""The price of a recompute budget, by the joint graphs of layers: no budget is measured.

A budget keeps a share of what layers keep for their backward. Which values that are follows from
the cut of torch's partitioner on the graphs of each structure of layers, traced for a CPU. What is
computed again is counted as its share of the forward's products.
"""

from __future__ import annotations

from functools import cache

import torch

from tlora_fx.cost.load import Round
from tlora_fx.cost.plan import BudgetPrice, Plan
from tlora_fx.cost.step_time import CostModel
from tlora_fx.ir.graph import HEAD, Block, GroupGraph, is_call
from tlora_fx.ir.joint import JointGraph

#: Budgets that are offered, the cheapest first.
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
aten = torch.ops.aten
ACTIVATIONS = (aten.silu.default, aten.gelu.default)


def price_budget(cost: CostModel, group: GroupGraph, plan: Plan, work: Round) -> None:
    """Let costs know the price of a plan's budget, where it has one; raises GraphInvalid."""
    if plan.recompute_budget:
        prices = BudgetPrices(group, work, compiled=cost.profile.compiled)
        cost.prices[plan.recompute_budget] = prices.price(plan.recompute_budget)


class BudgetPrices:
    """Prices of budgets; graphs are traced at the first one.

    work       whose sequences decide what attention costs
    compiled   layers are compiled: gated activations are computed again at any budget
    """

    def __init__(self, group: GroupGraph, work: Round, *, compiled: bool) -> None:
        load = work.load
        self.group, self.compiled = group, compiled
        self.length = max(2, round(load.total / max(1, load.sequences)))
        self.price = cache(self._price)
        self._graphs = cache(self._traced)

    def _traced(self) -> list[tuple[Block, JointGraph]]:
        # It takes longer to import than all else here.
        from tlora_fx.pipeline.joint_stage import traced_graph

        blocks = [block for block in self.group.blocks.values() if block.name != HEAD]
        graphs = [(block, traced_graph(self.group, block, self.length)) for block in blocks]
        for _, joint in graphs if self.compiled else ():
            _reopen_gates(joint)
        return graphs

    def _price(self, budget: float) -> BudgetPrice:
        """What a budget keeps and computes again; raises GraphInvalid, where no graph is traced."""
        from tlora_fx.inspect.joint import joint_nodes
        from tlora_fx.pipeline.joint_stage import JointStage

        kept = again = forward = layers = 0.0
        for block, joint in self._graphs():
            count = len(block.instances)
            for node in joint_nodes(joint, JointStage(block.name, budget, ())):
                kept += count * node.bytes * (node.fate == "kept")
                again += count * node.flop * (node.fate == "again")
                forward += count * node.flop * (node.fate != "backward")
            layers += count
        tokens = 2 * self.length * len(self.group.jobs)
        return BudgetPrice(kept / (tokens * layers), again / forward if forward else 0.0)


def _reopen_gates(joint: JointGraph) -> None:
    """Mark gated activations, as the stage does where their operator is our own."""
    for opened in joint.calls(*ACTIVATIONS):
        for node in (opened, *(user for user in opened.users if is_call(user, aten.mul.Tensor))):
            if node not in joint.backward():
                joint.recompute(node)
