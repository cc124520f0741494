"""Data sheets of GPUs, from public sources: the ceilings under which a roofline is drawn.

And whether GPUs of one node may read each other's memory, which is the user's to say.

Peaks are of dense products without sparsity. A link's bandwidth is what one GPU can send while
it receives as much; the network's is the usual one adapter a GPU. Sources: NVIDIA's data sheets of
A100 (2021), L40S (2023), H100 (2023), H200 (2024), HGX B200 (2024), and of DGX A100, H100 and B200
for the networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tlora_fx.errors import UnknownGpu, nearest

LinkTier = Literal["node", "network"]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    name            as the driver gives it, or the beginning of that
    tflops          dense peak by dtype, 10^12 operations a second
    memory_gbps     bandwidth of its memory, 10^9 bytes a second
    memory_gib      its size
    processors      streaming multiprocessors
    node_gbps       to another GPU of the node, one direction
    network_gbps    to a GPU of another node, one direction
    """

    name: str
    tflops: Mapping[str, float]
    memory_gbps: float
    memory_gib: float
    processors: int
    node_gbps: float
    network_gbps: float

    def peak_tflops(self, dtype: str) -> float:
        """The peak of products in a dtype; float64 where the sheet names none is float32's half."""
        return self.tflops.get(dtype, self.tflops["float32"] / 2)

    def link_gbps(self, tier: LinkTier) -> float:
        """The bandwidth of one direction, within a node or between nodes."""
        return self.node_gbps if tier == "node" else self.network_gbps


def _half(tflops: float, single: float, double: float) -> Mapping[str, float]:
    return {"bfloat16": tflops, "float16": tflops, "float32": single, "float64": double}


#: By the short name that the command line takes.
GPUS: Mapping[str, Gpu] = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", _half(312, 19.5, 19.5), 2039, 80, 108, 300, 25),
    "l40s": Gpu("NVIDIA L40S", _half(362, 91.6, 1.4), 864, 48, 142, 32, 25),
    "h100": Gpu("NVIDIA H100 80GB HBM3", _half(989, 67, 67), 3350, 80, 132, 450, 50),
    "h200": Gpu("NVIDIA H200", _half(989, 67, 67), 4800, 141, 132, 450, 50),
    "b200": Gpu("NVIDIA B200", _half(2250, 75, 37), 7700, 180, 148, 900, 50),
}


def find_gpu(name: str) -> Gpu:
    """The GPU of a short name, or of the name that the driver gives; raises UnknownGpu."""
    known = gpu_of_device(name)
    if known is not None:
        return known
    raise UnknownGpu(
        f"there is no data sheet of GPU '{name}'",
        nearest=nearest(name.lower(), GPUS),
        help=f"known: {', '.join(GPUS)}; or measure one with `tlora-fx profile`",
    )


def gpu_of_device(name: str) -> Gpu | None:
    """The GPU that a short name or a driver's name means, None where it is not known."""
    lowered = name.lower()
    if lowered in GPUS:
        return GPUS[lowered]
    words = set(lowered.replace("-", " ").split())
    return next((gpu for short, gpu in GPUS.items() if short in words), None)


#: The smallest unit that holds some GPUs.
Tier = Literal["gpu", "node", "rack", "cluster"]


def unit_of(kind: str) -> str:
    """Device that a cluster of a kind is made of: "CPU" for "cpu", else "GPU"."""
    return "CPU" if kind == "cpu" else "GPU"


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
    def unit(self) -> str:
        """Device that a group holds, in words: "GPU", or "CPU" where its kind is "cpu"."""
        return unit_of(self.gpu)

    def counted(self, count: int) -> str:
        """A number of them in words, such as "2 GPUs"."""
        return f"{count} {self.unit}{'s' * (count != 1)}"

    @property
    def nodes(self) -> int:
        """Number of nodes, lost ones included."""
        return -(-self.gpus // self.gpus_per_node)

    def node(self, gpu: int) -> int:
        """The node of a GPU."""
        return gpu // self.gpus_per_node

    def present(self) -> list[int]:
        """The GPUs that are there."""
        return list(_present(self))

    def capacity(self) -> int:
        """Number of GPUs that are there."""
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

    def min_tier(self, count: int) -> Tier:
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
