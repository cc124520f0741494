"""Base class of passes of the stage `joint`, which `joint_stage` runs."""

from __future__ import annotations

from abc import abstractmethod

from tlora_fx.ir.graph import HEAD, GroupGraph
from tlora_fx.ir.joint import JointGraph
from tlora_fx.pipeline.passes import GroupPass
from tlora_fx.pipeline.rewrites import rewrite_allowed


class JointPass(GroupPass):
    """A pass over the joint graph of forward and backward, once for each block of layers.

    In a pipeline it notes itself in the blocks, and runs once to find mistakes early. It runs again
    whenever a block's layers are compiled, after all other passes.
    """

    __slots__ = ()

    def run(self, group: GroupGraph) -> None:
        """Add the pass to every block but the head, whose backward runs in the forward."""
        # It takes longer to import than all else here.
        from tlora_fx.pipeline.joint_stage import joint_graph

        for block in group.blocks.values():
            if block.name != HEAD and rewrite_allowed(f"{self.name} {block.name}"):
                block.joint += ((str(self), type(self).__module__),)
                joint_graph(group, block)
                group.notes.append((self.name, f"rewrites the joint graph of {block.name}"))

    @abstractmethod
    def rewrite(self, joint: JointGraph) -> None:
        """Rewrite one joint graph in place."""
