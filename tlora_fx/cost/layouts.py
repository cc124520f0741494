"""The layouts that a group may run in, and groups paired with them.

Sizes stand on a ladder that does not depend on a group, so that what may be chosen on few GPUs may
be chosen on more. A layout never spans more than it must: tensor parallelism stays in a node, and
only what is larger than a node talks over the network.

A round's samples are dealt out to replicas and cut into rows of a limited length; none is cut. The
busiest replica has as many samples of mean length as can not be avoided, and at least one of the
longer ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlora_fx.cost.fit import Line, Links
from tlora_fx.cost.hardware import Cluster, LinkTier, Tier
from tlora_fx.cost.load import (
    COLUMN,
    MAX_ROW_TOKENS,
    Array,
    Indices,
    Mask,
    Rows,
    Work,
    is_small,
    narrowed,
)
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import Operation
from tlora_fx.cost.step_time import CostModel, links_of, trained_part

#: Replicas: all numbers to 8, then in steps that leave at most a fifth of a group's GPUs idle.
LADDER = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
PIPELINES = (2, 4)
#: Micro-batches of a pipeline, times its stages, where there are samples enough.
MICRO_BATCHES = 4
#: What a group's GPUs are spread over: as little as they can be (a node, a rack, the cluster), or
#: more than that: few GPUs over a rack, few over the cluster, a rack's number over the cluster.
#: Where they stand together, a layout that uses fewer stands in a smaller unit.
NODE, RACK, CLUSTER, FEW_OVER_RACK, FEW_OVER_CLUSTER, SOME_OVER_CLUSTER = range(6)
SPANS = 6
#: Beyond a rack the network is this many times slower: an assumption, as of a spine with two hosts
#: to each uplink. No profile has measured it.
SPINE = 2.0


class Layouts:
    """All layouts of a base on a cluster, those with fewest GPUs first, as columns.

    plans              [l] equal stages of layers, where there are several
    used, tp, dp, pp   [l] processes
    size               [l] the place of tp in tables
    captures           [l] whether small rows run as CUDA graphs where they can
    held               [l] the part of all layers that the fullest process has
    trained            [l] the part of adapters that it trains
    before             [l] the replicas of the next smaller layout that is otherwise the same; 0
    """

    def __init__(
        self,
        cost: CostModel,
        cluster: Cluster,
        tp: Sequence[int],
        spine: float = SPINE,
        *,
        captured: bool = True,
    ) -> None:
        self.cost, self.cluster, self.spine = cost, cluster, spine
        layers = len(cost.facts.layers)
        meshes = sorted(_meshes(cluster, tp, layers), key=lambda m: (m.size, m.pp, m.tp))
        self.plans = [_plan(mesh, layers) for mesh in meshes]
        self.used = np.array([mesh.size for mesh in meshes])
        self.tp, self.dp, self.pp = (
            np.array([float(getattr(mesh, name)) for mesh in meshes]) for name in ("tp", "dp", "pp")
        )
        sizes = {size: place for place, size in enumerate(tp)}
        self.size = np.array([sizes[mesh.tp] for mesh in meshes])
        self.captures = np.array([captured and plan.captures for plan in self.plans])
        self.held = np.array([-(-layers // mesh.pp) / layers for mesh in meshes])
        self.trained = self.held * trained_part(self.tp)
        self.before = np.array([float(_before(mesh)) for mesh in meshes])
        each = [[self._links(mesh, span) for span in range(SPANS)] for mesh in meshes]
        self.copies = np.array([[one.copies for one in own] for own in each])
        self._lines = {
            name: tuple(
                np.array([getattr(one, name)[part] for own in each for one in own])
                for part in (0, 1)
            )
            for name in ("comm", "reduce", "gather", "send")
        }

    def count(self, gpus: Array) -> Indices:
        """Number of layouts that use at most so many GPUs: they are the first ones."""
        return np.searchsorted(self.used, gpus, side="right")

    def span(self, gpus: Array, tiers: list[Tier]) -> Indices:
        """Spread of the GPUs of each group, as the tables of links count it."""
        kinds = {"gpu": NODE, "node": NODE, "rack": RACK, "cluster": CLUSTER}
        found = np.fromiter((kinds[tier] for tier in tiers), dtype=np.intp, count=len(tiers))
        few = (found > NODE) & (gpus <= self.cluster.gpus_per_node)
        some = (found == CLUSTER) & ~few & (gpus <= self._rack)
        return np.asarray(found + 2 * few + 3 * some)

    def line(self, name: str, layout: Indices, span: Indices) -> Line:
        """One of the fields of Links, of m layouts."""
        starts, per_byte = self._lines[name]
        index = layout * SPANS + span
        return Line(starts.take(index), per_byte.take(index))

    def measured(self, mesh: MeshShape, span: int, *, sharded: bool) -> bool:
        """Whether the profile has measured all links that a layout uses."""
        wanted: list[tuple[Operation, str, int]] = [
            ("all-reduce", "tp", mesh.tp), ("all-reduce", "dp", mesh.dp), ("send", "pp", mesh.pp)
        ]  # fmt: skip
        if sharded:
            wanted.append(("all-gather", "dp", mesh.dp))
        links = [(name, self._link(mesh, of, span)) for name, of, n in wanted if n > 1]
        far = self._beyond(mesh, span) and any(link == "network" for _, link in links)
        return not far and all(self.cost.collectives.measured(*link) for link in links)

    def _links(self, mesh: MeshShape, span: int) -> Links:
        slower = self.spine if self._beyond(mesh, span) else 1.0
        times = self.cost.collectives
        return links_of(times, mesh, lambda name: self._link(mesh, name, span), slower=slower)

    def _link(self, mesh: MeshShape, dimension: str, span: int) -> LinkTier:
        """What neighbours along a dimension communicate over."""
        few = span in {FEW_OVER_RACK, FEW_OVER_CLUSTER}
        return "network" if few else self.cost.tier(mesh, dimension)

    def _beyond(self, mesh: MeshShape, span: int) -> bool:
        """Whether a layout's network is that between racks."""
        large = span == CLUSTER and mesh.size > self._rack
        return large or span in {FEW_OVER_CLUSTER, SOME_OVER_CLUSTER}

    @property
    def _rack(self) -> int:
        return self.cluster.gpus_per_node * self.cluster.nodes_per_rack


def ladder(most: int) -> list[int]:
    """Numbers of replicas up to some number of GPUs."""
    rungs = list(LADDER)
    while rungs[-1] < most:
        rungs.append(rungs[-1] + max(32, rungs[-1] // 4 // 32 * 32))
    return [rung for rung in rungs if rung <= most]


def _meshes(cluster: Cluster, tp: Sequence[int], layers: int) -> list[MeshShape]:
    """Whatever may be chosen: pipelines over nodes, each of whose stages is a node."""
    node = cluster.gpus_per_node
    inside = [size for size in tp if size <= node and node % size == 0]
    flat = [MeshShape(dp=dp, tp=size) for size in inside for dp in ladder(cluster.gpus // size)]
    staged = [
        MeshShape(pp=pp, dp=node // size, tp=size)
        for pp in PIPELINES
        for size in inside
        if pp * node <= cluster.gpus and pp <= layers and node > 1
    ]
    return flat + staged


def _plan(mesh: MeshShape, layers: int) -> Plan:
    cuts = tuple(layers * place // mesh.pp for place in range(1, mesh.pp))
    return Plan(planner="scheduler", mesh=mesh, cuts=cuts)


def _before(mesh: MeshShape) -> int:
    """The next smaller number of replicas; 0 where there is none to compare with."""
    if mesh.pp > 1:
        return 0
    smaller = [rung for rung in ladder(mesh.dp) if rung < mesh.dp]
    return smaller[-1] if smaller else 0


class Sites:
    """The linears of a base's layers that may have adapters.

    count      of one layer
    columns    of these linears, in and out
    narrower   [t] an adapter's columns in one process, over all of them
    windows    [k] squares that attention has at most, over tokens; None where it has no window
    """

    def __init__(self, cost: CostModel, tp: Sequence[int]) -> None:
        facts = cost.facts
        widths = [float(inner + outer) for inner, outer in _adapted(facts)]
        self.count, self.columns = len(widths), sum(widths)
        cut = [sum(narrowed(width, facts.hidden, size) for width in widths) for size in tp]
        self.narrower = np.array(cut) / self.columns if widths else np.ones(len(cut))
        windows = [kind.layer.attention[0].window if kind.layer.attention else -1
                   for kind in cost.kinds]  # fmt: skip
        squares = np.where(np.array(windows) > 0, 2.0 * np.array(windows), np.inf)
        self.windows = squares[:, None] if np.isfinite(squares).any() else None

    def work(self, demands: Array) -> Work:
        """Work of layers for groups [k, n, t] each."""
        squares, site_tokens, rank_tokens, adapters, tokens = (
            demands[:, COLUMN[name]]
            for name in ("squares", "site_tokens", "rank_tokens", "adapters", "tokens")
        )
        seen = squares if self.windows is None else np.minimum(squares, self.windows * tokens)
        return Work(
            squares=np.atleast_2d(seen)[:, :, None],
            sites=np.minimum(adapters, self.count)[None, :, None],
            job_sites=adapters[None, :, None],
            site_tokens=(site_tokens[:, None] * self.narrower)[None],
            rank_tokens=(rank_tokens[:, None] * self.narrower)[None],
        )


def _adapted(facts: ModelFacts) -> list[tuple[int, int]]:
    """(in, out) of the linears that jobs adapt in a layer; all of them where there are no jobs."""
    layer = next((one for one in facts.layers if one.sites), facts.layers[0])
    return [(site.inner, site.outer) for site in layer.sites] or list(layer.matrices)


@dataclass(slots=True)
class Groups:
    """Demands of n groups.

    demands   [n, 15]
    span     [n] how far their GPUs are spread
    work      beside the tokens
    """

    demands: Array
    span: Indices
    work: Work

    def column(self, name: str) -> Array:
        """One field of all demands [n]."""
        found: Array = self.demands[:, COLUMN[name]]
        return found


@dataclass(slots=True)
class Pairs:
    """m pairs of a group and a layout.

    groups          all of them
    layout, span   [m] places; of the group
    rows            one row of the busiest replica, of the group that is its load
    count           [m] rows of a replica
    """

    groups: Groups
    layout: Indices
    span: Indices
    rows: Rows
    count: Array

    @classmethod
    def of(cls, groups: Groups, layouts: Layouts, group: Indices, layout: Indices) -> Pairs:
        """Deal out the samples."""
        samples = groups.column("samples")[group]
        total = groups.column("tokens")[group]
        pp = layouts.pp[layout]
        own = np.ceil(samples / layouts.dp[layout])
        longer = groups.column("squares")[group] / (total * total)
        share = np.maximum(own / samples, longer)
        mine = total * share
        count = np.minimum(np.ceil(mine / MAX_ROW_TOKENS), own)
        if (pp > 1).any():
            most = np.minimum(MICRO_BATCHES * pp, own) // pp * pp
            count = np.where(pp > 1, np.maximum(count, np.maximum(most, 1)), count)
        count = np.maximum(count, 1.0)
        tokens, part = mine / count, share / count
        rows = Rows(
            tokens=tokens,
            targets=groups.column("targets")[group] * part,
            size=layouts.size[layout],
            launched=~is_small(tokens, layouts.tp[layout])
            | (groups.column("launched")[group] > 0)
            | ~layouts.captures[layout],
            load=group,
            part=part,
            work=groups.work,
        )
        return cls(groups, layout, groups.span[group], rows, count)

    @classmethod
    def possible(cls, groups: Groups, layouts: Layouts, gpus: Array, fits_whole: Mask) -> Pairs:
        """All pairs that can be the fastest, group by group.

        A layout with more replicas than samples is none, and one whose busiest replica has as many
        samples as with fewer replicas is slower than that. Pipelines are for bases that are too
        large for a GPU.

        fits_whole  [n] the whole base fits each GPU
        """
        counts = layouts.count(gpus)
        group = np.repeat(np.arange(len(gpus)), counts)
        layout = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
        samples = groups.column("samples")[group]
        dp, before, pp = layouts.dp[layout], layouts.before[layout], layouts.pp[layout]
        own = np.ceil(samples / dp)
        better = own < np.ceil(samples / np.maximum(before, 1e-9))
        kept = (dp == 1) | ((dp <= samples) & better)
        kept &= (pp == 1) | ((own >= pp) & ~fits_whole[group])
        return cls.of(groups, layouts, group[kept], layout[kept])

    def only(self, chosen: Mask | Indices) -> Pairs:
        """Pairs at some indices."""
        return Pairs(
            self.groups, self.layout[chosen], self.span[chosen], self.rows.only(chosen),
            self.count[chosen],
        )  # fmt: skip

    def of_group(self, name: str) -> Array:
        """One field of the demands [m]."""
        found: Array = self.groups.column(name)[self.rows.load]
        return found

    def fullest(self, layouts: Layouts) -> Rows:
        """Rows as long as they may be, where one process closes them job by job."""
        alone = layouts.dp[self.layout] * layouts.pp[self.layout] == 1
        longer = MAX_ROW_TOKENS / np.minimum(self.rows.tokens, MAX_ROW_TOKENS)
        times = np.where(alone & (self.count > 1), longer, 1.0)
        return self.rows if (times == 1.0).all() else self.rows.split(1 / times)
