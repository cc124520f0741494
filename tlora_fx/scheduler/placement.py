"""Which GPUs a group gets.

A group that fits into a node stands in one node, one that fits into a rack in one rack. Places are
chosen so that what is free stays whole: the fullest node that has room, then the fullest rack.
The same questions in the same order get the same places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from tlora_fx.cost.cluster import Cluster, Tier


class Placer:
    """The free GPUs of a cluster, by node; lost nodes have none."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._free: dict[int, set[int]] = {}
        self._barred: frozenset[int] = frozenset()
        size = cluster.gpus_per_node
        for node in range(cluster.nodes):
            if node not in cluster.lost:
                last = min(cluster.gpus, (node + 1) * size)
                self._free[node] = set(range(node * size, last))
        self._widest = widest_rack(cluster)
        self._present = {node: len(gpus) for node, gpus in self._free.items()}
        self._count = sum(self._present.values())

    @property
    def free(self) -> int:
        """How many GPUs are free."""
        return self._count

    def free_in(self, node: int) -> int:
        """How many GPUs of a node are free."""
        return len(self._free.get(node, ()))

    @property
    def nodes(self) -> Sequence[int]:
        """The nodes that are there."""
        return list(self._present)

    def has(self, place: Iterable[int]) -> bool:
        """Whether all of these GPUs are free."""
        own = self.cluster.gpus_per_node
        return all(gpu in self._free.get(gpu // own, ()) for gpu in place)

    def take(self, place: Sequence[int]) -> None:
        """Take free GPUs."""
        own = self.cluster.gpus_per_node
        for gpu in place:
            self._free[gpu // own].remove(gpu)
        self._count -= len(place)

    def give(self, place: Sequence[int]) -> None:
        """Give GPUs back; those of lost nodes are gone."""
        own = self.cluster.gpus_per_node
        for gpu in place:
            if gpu // own in self._free:
                self._free[gpu // own].add(gpu)
                self._count += 1

    @contextmanager
    def without(self, nodes: Iterable[int]) -> Iterator[None]:
        """Inside, `find` leaves some nodes alone."""
        before, self._barred = self._barred, self._barred | frozenset(nodes)
        try:
            yield
        finally:
            self._barred = before

    def find(self, count: int, keep: Sequence[int] = ()) -> tuple[int, ...] | None:
        """Free GPUs for a group; None where there is no such place now.

        count   how many GPUs
        keep    free GPUs that it would rather have, as where it runs already
        """
        if count > self._count:
            return None
        if len(keep) == count and not self._barred and self.has(keep):
            return tuple(keep)
        nodes = self._nodes_for(count, keep)
        if nodes is None:
            return None
        wanted = set(keep)
        found: list[int] = []
        for node in nodes:
            own = sorted(self._free[node], key=lambda gpu: (gpu not in wanted, gpu))
            found += own[: count - len(found)]
            if len(found) == count:
                return tuple(sorted(found))
        return None

    def _nodes_for(self, count: int, keep: Sequence[int]) -> list[int] | None:
        """The nodes to take GPUs from, in order."""
        rooms = {node: len(gpus) for node, gpus in self._free.items() if gpus}
        for node in self._barred:
            rooms.pop(node, None)
        size = self.cluster.gpus_per_node
        held = dict.fromkeys(rooms, 0)
        for gpu in keep:
            if gpu // size in held:
                held[gpu // size] += 1
        if count <= size:
            return _tightest(rooms, held, count)
        racks: dict[int, list[int]] = {}
        for node in rooms:
            racks.setdefault(node // self.cluster.nodes_per_rack, []).append(node)
        if count <= self._widest:
            sums = {rack: sum(rooms[node] for node in nodes) for rack, nodes in racks.items()}
            own = {rack: sum(held[node] for node in nodes) for rack, nodes in racks.items()}
            best = _tightest(sums, own, count)
            return None if best is None else _fullest(racks[best[0]], rooms, held)
        return _fullest(list(rooms), rooms, held)


def tier_for(cluster: Cluster, count: int) -> Tier:
    """How far apart so many GPUs stand, wherever they are placed.

    A group spans racks only where it is wider than every rack is now, lost nodes not counted.
    """
    tier = cluster.least_tier(count)
    if tier == "rack" and cluster.lost and count > widest_rack(cluster):
        return "cluster"
    return tier


def widest_rack(cluster: Cluster) -> int:
    """GPUs of the rack that has most, lost nodes not counted."""
    if not cluster.lost:
        return min(cluster.gpus, cluster.gpus_per_node * cluster.nodes_per_rack)
    racks = Counter(cluster.node(gpu) // cluster.nodes_per_rack for gpu in cluster.present())
    return max(racks.values(), default=0)


def _tightest(rooms: dict[int, int], held: dict[int, int], count: int) -> list[int] | None:
    """Of the units with room, the one that holds most of the group, then the least free one."""
    fits = [unit for unit, room in rooms.items() if room >= count]
    if not fits:
        return None
    return [min(fits, key=lambda unit: (-held[unit], rooms[unit], unit))]


def _fullest(nodes: list[int], rooms: dict[int, int], held: dict[int, int]) -> list[int]:
    """Nodes with most of the group first, then those with most room: the group spans few."""
    return sorted(nodes, key=lambda node: (-held[node], -rooms[node], node))
