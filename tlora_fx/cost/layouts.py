"""The layouts that a group may run in, and what its processes say to each other in each.

Sizes stand on a ladder that does not depend on a group, so that what may be chosen on few GPUs may
be chosen on more. A layout never spans more than it must: tensor parallelism stays in a node, and
only what is larger than a node talks over the network.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tlora_fx.cost.cluster import Cluster, Tier
from tlora_fx.cost.demand import COLUMN, Array
from tlora_fx.cost.fit import BaseFit, CollectiveTimes
from tlora_fx.cost.hardware import Tier as Link
from tlora_fx.cost.hardware import gpu_of_device
from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.cost.plan import MeshShape
from tlora_fx.cost.profile import Operation

#: Replicas: all numbers to 8, then in steps that leave at most a fifth of a group's GPUs idle.
LADDER = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
PIPELINES = (2, 4)
#: What a group's GPUs are spread over: as little as they can be (a node, a rack, the cluster), or
#: more than that: few GPUs over a rack, few over the cluster, a rack's number over the cluster.
#: Where they stand together, a layout that uses fewer stands in a smaller unit.
NODE, RACK, CLUSTER, FEW_OVER_RACK, FEW_OVER_CLUSTER, SOME_OVER_CLUSTER = range(6)
REACHES = 6
#: Beyond a rack the network is this many times slower: an assumption, as of a spine with two hosts
#: to each uplink. No profile has measured it.
SPINE = 2.0
#: As cost.py: the part of a memory's bandwidth at which gathered weights are unpacked.
COPY = 0.8


@dataclass(frozen=True, slots=True)
class Line:
    """Milliseconds of a collective: a start, and so much a byte."""

    start: float = 0.0
    per_byte: float = 0.0

    def __add__(self, other: Line) -> Line:
        return Line(self.start + other.start, self.per_byte + other.per_byte)

    def times(self, start: float, per_byte: float | None = None) -> Line:
        """So many of it."""
        return Line(self.start * start, self.per_byte * (start if per_byte is None else per_byte))


@dataclass
class Layouts:
    """All layouts of a base on a cluster, those with fewest GPUs first, as columns.

    used, tp, dp, pp   [l] processes
    captured           small rows run as CUDA graphs where they can (see Plan.captures)
    size               [l] the place of tp in tables: of those of graphs, where rows run so
    before             [l] the replicas of the next smaller layout that is otherwise the same; 0
    """

    fit: BaseFit
    cluster: Cluster
    spine: float = SPINE
    captured: bool = True
    meshes: list[MeshShape] = field(init=False)
    estimated: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.meshes = sorted(_meshes(self.fit, self.cluster), key=lambda m: (m.size, m.pp, m.tp))
        self._times = CollectiveTimes(self.fit.profile)
        sizes = {tp: place for place, tp in enumerate(self.fit.tp)}
        self.used = np.array([mesh.size for mesh in self.meshes])
        self.tp, self.dp, self.pp = (
            np.array([float(getattr(mesh, name)) for mesh in self.meshes])
            for name in ("tp", "dp", "pp")
        )
        graphs = [self.captured and mesh.pp == 1 for mesh in self.meshes]
        self.size = np.array([sizes[mesh.tp] for mesh in self.meshes])
        self.size = np.where(graphs, self.size, self.size + len(self.fit.tp))
        self.before = np.array([float(_before(mesh)) for mesh in self.meshes])

    def count(self, gpus: Array) -> NDArray[np.intp]:
        """How many layouts use at most so many GPUs: they are the first ones."""
        return np.searchsorted(self.used, gpus, side="right")

    def reach(self, gpus: Array, tiers: list[Tier]) -> NDArray[np.intp]:
        """How far the GPUs of each group are spread, as the tables of links count it."""
        kinds = {"gpu": NODE, "node": NODE, "rack": RACK, "cluster": CLUSTER}
        found = np.fromiter((kinds[tier] for tier in tiers), dtype=np.intp, count=len(tiers))
        few = (found > NODE) & (gpus <= self.cluster.gpus_per_node)
        some = (found == CLUSTER) & ~few & (gpus <= self._rack)
        return np.asarray(found + 2 * few + 3 * some)

    @cached_property
    def talk(self) -> tuple[Array, Array]:
        """All-reduces of tp [l, reach]: milliseconds a row, and a byte of it."""
        return self._table(lambda mesh, reach: self._line("all-reduce", mesh, "tp", reach))

    @cached_property
    def reduce(self) -> tuple[Array, Array]:
        """Sums of gradients [l, reach], a start and so much a byte of the gradients."""

        def line(mesh: MeshShape, reach: int) -> Line:
            halves = self._line("all-reduce", mesh, "tp", reach).times(1.0, 0.5)
            return self._line("all-reduce", mesh, "dp", reach) + halves

        return self._table(line)

    @cached_property
    def gather(self) -> tuple[Array, Array]:
        """All-gathers over replicas [l, reach]."""
        return self._table(lambda mesh, reach: self._line("all-gather", mesh, "dp", reach))

    @cached_property
    def near(self) -> NDArray[np.bool_]:
        """Whether all replicas stand in one node [l, reach]."""
        reaches = range(REACHES)
        rows = [
            [self.link(mesh, "dp", reach) == "node" for reach in reaches] for mesh in self.meshes
        ]
        return np.array(rows)

    @cached_property
    def send(self) -> tuple[Array, Array]:
        """From one stage to the next [l, reach]."""
        return self._table(lambda mesh, reach: self._line("send", mesh, "pp", reach))

    @cached_property
    def copy_per_byte(self) -> float:
        """Milliseconds of unpacking a gathered byte."""
        gpu = gpu_of_device(self.fit.profile.hardware.gpu)
        return 2 / (gpu.memory_gbps * 1e6 * COPY) if gpu else 0.0

    def link(self, mesh: MeshShape, dimension: str, reach: int) -> Link:
        """What neighbours along a dimension talk over."""
        span = {"tp": mesh.tp, "dp": mesh.tp * mesh.dp, "pp": mesh.size}[dimension]
        few = reach in {FEW_OVER_RACK, FEW_OVER_CLUSTER}
        return "network" if few or span > self.cluster.gpus_per_node else "node"

    def beyond(self, mesh: MeshShape, reach: int) -> bool:
        """Whether a layout's network is that between racks."""
        large = reach == CLUSTER and mesh.size > self._rack
        return large or reach in {FEW_OVER_CLUSTER, SOME_OVER_CLUSTER}

    @property
    def _rack(self) -> int:
        return self.cluster.gpus_per_node * self.cluster.nodes_per_rack

    def measured(self, mesh: MeshShape, reach: int, *, sharded: bool) -> bool:
        """Whether the profile has measured all links that a layout uses."""
        wanted: list[tuple[Operation, str, int]] = [
            ("all-reduce", "tp", mesh.tp), ("all-reduce", "dp", mesh.dp), ("send", "pp", mesh.pp)
        ]  # fmt: skip
        if sharded:
            wanted.append(("all-gather", "dp", mesh.dp))
        links = [
            (name, self.link(mesh, dimension, reach)) for name, dimension, n in wanted if n > 1
        ]
        far = self.beyond(mesh, reach) and any(link == "network" for _, link in links)
        return not far and all(self._times.measured(name, link) for name, link in links)

    def _line(self, operation: Operation, mesh: MeshShape, dimension: str, reach: int) -> Line:
        count = getattr(mesh, dimension)
        if count < 2:
            return Line()
        link = self.link(mesh, dimension, reach)
        pair = 2 if operation == "send" else count
        start = self._times.ms(operation, link, pair, 1.0)
        per_byte = (self._times.ms(operation, link, pair, 1.0 + 1e9) - start) / 1e9
        slower = self.spine if link == "network" and self.beyond(mesh, reach) else 1.0
        return Line(start * slower, per_byte * slower)

    def _table(self, line: object) -> tuple[Array, Array]:
        assert callable(line)
        rows = [[line(mesh, reach) for reach in range(REACHES)] for mesh in self.meshes]
        starts = np.array([[one.start for one in row] for row in rows])
        return starts, np.array([[one.per_byte for one in row] for row in rows])


def ladder(most: int) -> list[int]:
    """Numbers of replicas up to some number of GPUs."""
    rungs = list(LADDER)
    while rungs[-1] < most:
        rungs.append(rungs[-1] + max(32, rungs[-1] // 4 // 32 * 32))
    return [rung for rung in rungs if rung <= most]


def _meshes(fit: BaseFit, cluster: Cluster) -> list[MeshShape]:
    """Whatever may be chosen: pipelines over nodes, each of whose stages is a node."""
    node = cluster.gpus_per_node
    inside = [tp for tp in fit.tp if tp <= node and node % tp == 0]
    flat = [MeshShape(dp=dp, tp=tp) for tp in inside for dp in ladder(cluster.gpus // tp)]
    staged = [
        MeshShape(pp=pp, dp=node // tp, tp=tp)
        for pp in PIPELINES
        for tp in inside
        if pp * node <= cluster.gpus and pp <= len(fit.facts.layers) and node > 1
    ]
    return flat + staged


def _before(mesh: MeshShape) -> int:
    """The next smaller number of replicas; 0 where there is none to compare with."""
    if mesh.pp > 1:
        return 0
    smaller = [rung for rung in ladder(mesh.dp) if rung < mesh.dp]
    return smaller[-1] if smaller else 0


# Groups and layouts, paired: what one process has to do in each pair.
#
# A round's samples are dealt out to replicas and cut into rows of a limited length; none is cut.
# The busiest replica has as many samples of mean length as can not be avoided, and at least one of
# the longer ones.


Places = NDArray[np.intp]
#: As tlora_fx/cost/load.py: tokens of one forward, at most.
MAX_ROW_TOKENS = 16384
#: Micro-batches of a pipeline, times its stages, where there are samples enough.
MICRO_BATCHES = 4


@dataclass(slots=True)
class Groups:
    """What n groups ask for, by column, and sums that do not depend on a layout.

    reach           [n] how far their GPUs are spread
    forward_rows, backward_rows   [n, tp] milliseconds a row, whatever its length
    forward_work, backward_work   [n, tp] milliseconds of the round's work beside its tokens
    """

    demands: Array
    reach: Places
    rank_tokens: Array
    site_tokens: Array
    squares: Array
    adapters: Array

    @classmethod
    def of(cls, fit: BaseFit, demands: Array, reach: Places) -> Groups:
        """Widths narrowed by tp where they are cut."""
        return cls(
            demands,
            reach,
            rank_tokens=demands[:, COLUMN["rank_tokens"], None] * fit.narrower,
            site_tokens=demands[:, COLUMN["site_tokens"], None] * fit.narrower,
            squares=demands[:, COLUMN["squares"], None],
            adapters=demands[:, COLUMN["adapters"], None],
        )

    def column(self, name: str) -> Array:
        """One field of all demands [n]."""
        found: Array = self.demands[:, COLUMN[name]]
        return found

    def work(self, slopes: Array) -> Array:
        """[n, tp] of the whole round: attention, and what grows with tokens at adapters.

        slopes   [tp, 5]
        """
        return (
            self.squares * slopes[:, 0]
            + self.site_tokens * slopes[:, 3]
            + self.rank_tokens * slopes[:, 4]
        )

    def each_row(self, slopes: Array, sites: int) -> Array:
        """[n, tp] of each row, however long it is: linears with adapters, and adapters."""
        return np.minimum(self.adapters, sites) * slopes[:, 1] + self.adapters * slopes[:, 2]


@dataclass(slots=True)
class Pairs:
    """m pairs of a group and a layout.

    group, layout   [m] places
    size, reach     [m] of the layout's tp in tables, by those without CUDA graphs where any of the
                    group's jobs or a row of this size runs without; of the group
    share           [m] the part of the round that the busiest replica has
    rows            [m] forwards of a replica
    tokens          [m] of one row
    found           pieces of the curves that the rows lie on
    """

    group: Places
    layout: Places
    size: Places
    reach: Places
    share: Array
    rows: Array
    tokens: Array
    found: tuple[Places, Array]

    @classmethod
    def of(cls, groups: Groups, layouts: Layouts, group: Places, layout: Places) -> Pairs:
        """Deal out the samples."""
        samples = groups.column("samples")[group]
        total = groups.column("tokens")[group]
        dp, pp = layouts.dp[layout], layouts.pp[layout]
        own = np.ceil(samples / dp)
        longer = groups.column("squares")[group] / (total * total)
        share = np.maximum(own / samples, longer)
        mine = total * share
        rows = np.minimum(np.ceil(mine / MAX_ROW_TOKENS), own)
        if (pp > 1).any():
            most = np.minimum(MICRO_BATCHES * pp, own) // pp * pp
            rows = np.where(pp > 1, np.maximum(rows, np.maximum(most, 1)), rows)
        rows = np.maximum(rows, 1.0)
        tokens = mine / rows
        found = layouts.fit.row.find(tokens)
        size, sizes = layouts.size[layout], len(layouts.fit.tp)
        launched = (groups.column("launched")[group] > 0) | (
            tokens > CAPTURED_TOKENS * layouts.tp[layout]
        )
        launched &= size < sizes
        size = np.where(launched, size + sizes, size)
        return cls(group, layout, size, groups.reach[group], share, rows, tokens, found)

    def only(self, chosen: NDArray[np.bool_] | Places) -> Pairs:
        """Some of them."""
        return Pairs(
            self.group[chosen], self.layout[chosen], self.size[chosen], self.reach[chosen],
            self.share[chosen], self.rows[chosen], self.tokens[chosen],
            (self.found[0][chosen], self.found[1][chosen]),
        )  # fmt: skip

    def launched(self, sizes: int) -> Pairs:
        """The same where no row runs as a CUDA graph; `sizes` of tp there are."""
        return replace(self, size=np.where(self.size < sizes, self.size + sizes, self.size))

    def fullest(self, layouts: Layouts) -> Pairs:
        """The same with rows as long as they may be, where one process closes them job by job."""
        alone = (layouts.dp[self.layout] == 1) & (layouts.pp[self.layout] == 1) & (self.rows > 1)
        if not alone.any():
            return self
        tokens = np.where(alone, np.maximum(self.tokens, MAX_ROW_TOKENS), self.tokens)
        rows = self.rows * self.tokens / tokens
        return replace(self, rows=rows, tokens=tokens, found=layouts.fit.row.find(tokens))

    def table(self, values: Array) -> Array:
        """From a table [n, tp] one number a pair."""
        found: Array = values[self.group, self.size]
        return found

    def links(self, lines: tuple[Array, Array]) -> tuple[Array, Array]:
        """A start and so much a byte of each pair, from tables [l, reach]."""
        return lines[0][self.layout, self.reach], lines[1][self.layout, self.reach]


def paired(groups: Groups, layouts: Layouts, gpus: Array, roomy: NDArray[np.bool_]) -> Pairs:
    """All pairs that can be the fastest, group by group.

    A layout with more replicas than samples is none, and one whose busiest replica has as many
    samples as with fewer replicas is slower than that. Pipelines are for bases that are too large
    for a GPU.

    roomy   [n] the whole base has room on each GPU
    """
    counts = layouts.count(gpus)
    group = np.repeat(np.arange(len(gpus)), counts)
    first = np.cumsum(counts) - counts
    layout = np.arange(len(group)) - np.repeat(first, counts)
    samples = groups.column("samples")[group]
    dp, before, pp = layouts.dp[layout], layouts.before[layout], layouts.pp[layout]
    own = np.ceil(samples / dp)
    better = own < np.ceil(samples / np.maximum(before, 1e-9))
    kept = (dp == 1) | ((dp <= samples) & better)
    kept &= (pp == 1) | ((own >= pp) & ~roomy[group])
    return Pairs.of(groups, layouts, group[kept], layout[kept])
