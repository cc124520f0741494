"""The GPUs of a cluster, and how far apart they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Tier = Literal["gpu", "node", "rack", "cluster"]
TIERS: tuple[Tier, ...] = ("gpu", "node", "rack", "cluster")


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs of one kind; GPU g stands in node g // gpus_per_node.

    gpus             how many there are
    gpus_per_node    in one node
    nodes_per_rack   in one rack
    gpu              short name of their kind, such as "h200"
    lost             nodes that are not there now
    """

    gpus: int
    gpus_per_node: int = 8
    nodes_per_rack: int = 4
    gpu: str = "h200"
    lost: frozenset[int] = frozenset()

    @property
    def nodes(self) -> int:
        """How many nodes there are, lost ones included."""
        return -(-self.gpus // self.gpus_per_node)

    def node(self, gpu: int) -> int:
        """The node of a GPU."""
        return gpu // self.gpus_per_node

    def present(self) -> list[int]:
        """The GPUs that are there."""
        return list(_present(self))

    def capacity(self) -> int:
        """How many GPUs are there."""
        return len(_present(self))

    def tier(self, gpus: Iterable[int]) -> Tier:
        """The smallest unit that holds some GPUs."""
        own = set(gpus)
        nodes = {self.node(gpu) for gpu in own}
        if len(own) <= 1:
            return "gpu"
        if len(nodes) == 1:
            return "node"
        racks = {node // self.nodes_per_rack for node in nodes}
        return "rack" if len(racks) == 1 else "cluster"

    def least_tier(self, count: int) -> Tier:
        """The smallest unit that could hold so many GPUs."""
        if count <= 1:
            return "gpu"
        if count <= self.gpus_per_node:
            return "node"
        return "rack" if count <= self.gpus_per_node * self.nodes_per_rack else "cluster"


@lru_cache(maxsize=64)
def _present(cluster: Cluster) -> tuple[int, ...]:
    """Asked several times in each decision, and the same for as long as no node is lost."""
    return tuple(gpu for gpu in range(cluster.gpus) if cluster.node(gpu) not in cluster.lost)
