"""The nodes of a Ray cluster as policies see them, and which of them are lost.

Policies number GPUs and think in nodes and racks of one size. Ray's nodes have whatever they have:
each is seen as so many nodes of the greatest size that divides all, in order of racks, and a rack
as the greatest number of nodes that divides all racks. A node has one seat for as long as the run
lasts; when it is lost, another of its size and rack may take the seat.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

import ray

from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import RayUnreachable

POLL_SECONDS = 0.5
#: Without an answer for so long the head is gone; Ray itself would end this process after 60 s.
HEAD_SECONDS = 30.0
RACK = "rack"
CONNECT_SECONDS = 5.0
#: Of a cluster that is started here: nothing large passes through it.
STORE_BYTES = 80 << 20


@dataclass(slots=True)
class Seat:
    """One of Ray's nodes, as a policy sees it.

    node       Ray's id of it; "" while it is lost
    gpus       GPUs, or slots of a CPU
    first      number of its first GPU
    cpus       cores for each slot; 0 where GPUs are counted
    """

    node: str
    rack: str
    gpus: int
    first: int = 0
    cpus: float = 0.0

    def takes(self, other: Seat) -> bool:
        """Whether another node may stand here."""
        return (self.rack, self.gpus, self.cpus) == (other.rack, other.gpus, other.cpus)


def seats_of(nodes: Sequence[Mapping[str, Any]], kind: str, slots: int | None) -> list[Seat]:
    """The nodes that can train, as `ray.nodes()` tells them, in order of racks.

    kind    "cuda" or "cpu"
    slots   GPUs to use of each node, or parts of its cores; None: all GPUs, one part
    """
    found = []
    for node in nodes:
        there = node["Resources"]
        if not node["Alive"]:
            continue
        have = int(there.get("GPU" if kind == "cuda" else "CPU", 0))
        count = min(have, slots or (have if kind == "cuda" else 1))
        if count:
            cpus = 0.0 if kind == "cuda" else float(have // count)
            rack = node.get("Labels", {}).get(RACK, "")
            found.append(Seat(node["NodeID"], rack, count, cpus=cpus))
    found.sort(key=lambda seat: (seat.rack, seat.node))
    first = 0
    for seat in found:
        seat.first, first = first, first + seat.gpus
    return found


def cluster_of(seats: Sequence[Seat], gpu: str) -> Cluster:
    """Cluster of some seats, for policies.

    gpu   kind of their GPUs, or "cpu"
    """
    size = math.gcd(*(seat.gpus for seat in seats))
    racks = Counter[str]()
    for seat in seats:
        racks[seat.rack] += seat.gpus // size
    gpus = sum(seat.gpus for seat in seats)
    lost = frozenset(node for seat in seats if not seat.node for node in nodes_of(seat, size))
    return Cluster(gpus, size, math.gcd(*racks.values()), gpu, lost)


def nodes_of(seat: Seat, size: int) -> range:
    """The numbers of a seat's nodes, of so many GPUs each."""
    return range(seat.first // size, (seat.first + seat.gpus) // size)


@dataclass(slots=True)
class RayCluster:
    """A cluster that this process has joined as a driver.

    kind       "cuda" or "cpu"
    cluster    cluster as policies see it
    """

    kind: str
    seats: list[Seat]
    cluster: Cluster
    slots: int | None = None
    over: threading.Event = field(default_factory=threading.Event)
    _seen: tuple[float, list[dict[str, Any]]] = field(
        default_factory=lambda: (time.monotonic(), []), init=False
    )

    @classmethod
    def join(cls, address: str | None, device: str | None, slots: int | None) -> Self:
        """Join a cluster, or start one on this machine.

        address   of the head, HOST:PORT; None: RAY_ADDRESS, else the one that runs here, else one
                  that is started now
        device    "cpu" or "cuda"; None: the GPUs where a node has some
        raises    RayUnreachable
        """
        _join(address)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        some = any(node["Resources"].get("GPU") for node in nodes)
        kind = device or ("cuda" if some else "cpu")
        seats = seats_of(nodes, kind, slots)
        if not seats:
            raise RayUnreachable(
                f"no node of the cluster has {'GPUs' if kind == 'cuda' else 'CPUs'}",
                found=", ".join(str(dict(node["Resources"])) for node in nodes) or "no node",
                help="start nodes with `ray start --address=HOST:PORT`, or choose with --device",
            )
        joined = cls(kind, seats, cluster_of(seats, _gpu(nodes, kind)), slots)
        threading.Thread(target=joined._watch, daemon=True, name="ray-nodes").start()
        return joined

    def node(self, gpu: int) -> Seat:
        """Seat of a GPU."""
        return next(seat for seat in reversed(self.seats) if seat.first <= gpu)

    def changes(self) -> list[tuple[int, bool]]:
        """Nodes that were lost or are back since the last call; (number, whether it is there).

        raises   RayUnreachable where the head has not answered for too long
        """
        heard, nodes = self._seen
        silent = time.monotonic() - heard
        if silent > HEAD_SECONDS:
            raise RayUnreachable(
                "the head of the Ray cluster does not answer",
                expected=f"an answer within {HEAD_SECONDS:g} s",
                found=f"none for {silent:.0f} s",
                help="what is committed is in the run's folder: start the cluster, then run again "
                "with the same -o",
            )
        return list(self._moved(nodes)) if nodes else []

    def leave(self) -> None:
        """Part from the cluster; one that was started here ends."""
        lost = time.monotonic() - self._seen[0] > HEAD_SECONDS
        self.over.set()
        # Without a head it would wait for one.
        if not lost:
            ray.shutdown()

    def _moved(self, nodes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, bool]]:
        there = {seat.node: seat for seat in seats_of(nodes, self.kind, self.slots)}
        size = self.cluster.gpus_per_node
        changed = []
        for seat in self.seats:
            if seat.node and seat.node not in there:
                seat.node = ""
                changed += [(node, False) for node in nodes_of(seat, size)]
        strangers = there.keys() - {seat.node for seat in self.seats}
        for name in sorted(strangers):
            free = (seat for seat in self.seats if not seat.node and seat.takes(there[name]))
            for seat in islice(free, 1):
                seat.node = name
                changed += [(node, True) for node in nodes_of(seat, size)]
        if changed:
            self.cluster = replace(self.cluster, lost=cluster_of(self.seats, "").lost)
        yield from changed

    def _watch(self) -> None:
        """Ask for the nodes, in a thread: without a head the answer never comes."""
        while not self.over.wait(POLL_SECONDS):
            # Silence is what tells of a head that is gone.
            with suppress(Exception):
                self._seen = (time.monotonic(), ray.nodes())


def _join(address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is not None and "://" in address:
        raise RayUnreachable(
            "a run has to be a node of its cluster",
            expected="HOST:PORT of the head",
            found=address,
            help="submit it with `ray job submit`, or run it where `ray start` has run",
        )
    _require_there(address or os.environ.get("RAY_ADDRESS"))
    try:
        ray.init(address=address or os.environ.get("RAY_ADDRESS") or "auto", **quiet)
    except Exception as error:
        if (
            address is None
            and "RAY_ADDRESS" not in os.environ
            and isinstance(error, ConnectionError)
        ):
            ray.init(
                address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **quiet
            )
            return
        raise RayUnreachable(
            "the Ray cluster cannot be joined",
            address=address or os.environ.get("RAY_ADDRESS"),
            reason=str(error).partition("\n")[0],
            help="see with `ray status` whether it runs, of the same versions of Ray and Python",
        ) from error


def _require_there(address: str | None) -> None:
    """Refuse a head that nobody answers for: Ray would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise RayUnreachable(
            "nobody answers at the address of the head",
            address=address,
            reason=error,
            help="start it with `ray start --head`, and name what that says",
        ) from error


def _gpu(nodes: Sequence[Mapping[str, Any]], kind: str) -> str:
    """The kind of GPU that all nodes have."""
    if kind == "cpu":
        return "cpu"
    prefix = "accelerator_type:"
    names: set[str] = {
        name.removeprefix(prefix)
        for node in nodes
        for name in node["Resources"]
        if name.startswith(prefix) and node["Resources"].get("GPU")
    }
    if len(names) != 1:
        raise RayUnreachable(
            "a run is for nodes with GPUs of one kind",
            found=", ".join(sorted(names)) or "GPUs of unknown kind",
            help="start a cluster of one kind, with --resources='{\"accelerator_type:H200\": 1}' "
            "where Ray does not know it",
        )
    return names.pop()
