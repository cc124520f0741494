"""The executor of a Ray cluster: each group is an actor for each GPU of its layout, or one on CPU.

A group's place is a placement group with a bundle for each GPU, on the nodes that the policy named.
What a group is asked and what it tells goes through the run's folder, as on one machine; all nodes
see it. Ray starts the processes, gives them their GPUs, and says when they have died.

    FOLDER/groups/000012/lease           the only way by which its workers write
                        /rank-0.asked    signals for a process, a number each line

A group's workers stay with its placement group for the next one of their base and layout there.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tlora_fx.cost.estimator import Layout
from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import PlaceTaken, RayUnreachable
from tlora_fx.host.version import __version__
from tlora_fx.runtime.workers.protocol import LOST, NEEDS_NEW_PROCESS, WorkerConfig
from tlora_fx.scheduler.executor import ExecutorEvent, GroupLaunch, NodeBack, NodeLost
from tlora_fx.scheduler.lease import grant, revoke
from tlora_fx.scheduler.local.executor import LocalExecutor, rank_variables
from tlora_fx.scheduler.local.group import RunningGroup
from tlora_fx.scheduler.local.processes import STOP_SECONDS, ForkServer, IdleNews, WorkerStart
from tlora_fx.scheduler.local.recovery import CheckpointSource
from tlora_fx.scheduler.ray.cluster import RayCluster
from tlora_fx.scheduler.ray.worker import Worker
from tlora_fx.scheduler.service import RunOptions
from tlora_fx.scheduler.state import Group

#: That Ray may take to reserve what is free; another user of the cluster has it then.
RESERVE_SECONDS = 5.0
#: Between questions to actors that wait for a group: whether they are there.
PROBE_SECONDS = 0.2


@dataclass(slots=True)
class Place:
    """GPUs of a group, and who works there.

    actors    one for each GPU that is worked on, by rank
    kind      kind of model that they keep between orders; "": nothing
    workers   numbers of the orders of the group that has the place now
    address   address of its first process, as Ray will know it
    probes    what idle actors were asked, and when; see `Actors.is_there`
    """

    gpus: tuple[int, ...]
    bundles: PlacementGroup
    actors: dict[int, Any] = field(default_factory=dict)
    kind: str = ""
    workers: list[int] = field(default_factory=list)
    address: Any = None
    probes: list[Any] = field(default_factory=list)
    probed: float = 0.0


@dataclass(slots=True)
class _Order:
    """What one actor is at; code None: it has not ended."""

    start: WorkerStart
    place: Place
    actor: Any = None
    reply: Any = None
    code: int | None = None
    kept: bool = False
    again: bool = False

    @property
    def group(self) -> Path:
        """The folder of its group."""
        return Path(self.start.order).parent

    def lose(self) -> None:
        """It has ended: what it has committed is all that it will ever have."""
        revoke(self.group)
        self.code = LOST

    @property
    def asked(self) -> Path:
        """File of the signals that the worker shall have."""
        return Path(self.start.log).with_suffix(".asked")


class Actors:
    """Starts orders on the actors of places, and hears how they end; as `ForkServer` does.

    module    module that carries them out
    needs     resources of each GPU, as Ray names it: {"GPU": 1}
    """

    def __init__(self, module: str, needs: Mapping[str, float]) -> None:
        self._module, self._needs = module, dict(needs)
        self._orders: dict[int, _Order] = {}
        self._next = 1
        self.places: dict[tuple[int, ...], Place] = {}

    ready = True

    def begin(self) -> None:
        """There is nothing to begin."""

    def start(self, start: WorkerStart) -> int:
        """Start an order on the actor of its rank, which has its GPU for itself; its number."""
        here = self.places[start.place]
        if here.kind != start.stays:
            self.end(here)
        here.kind = start.stays
        number, self._next = self._next, self._next + 1
        self._orders[number] = _Order(start, here)
        self._hand(self._orders[number])
        here.workers.append(number)
        return number

    def _hand(self, order: _Order) -> None:
        """Hand an order to the actor of its rank."""
        here, start = order.place, order.start
        order.again = start.rank in here.actors
        order.actor = actor = here.actors.get(start.rank) or self._actor(here, start.rank)
        address = None
        if "RANK" in start.environment:
            # Ray hands it on when it is known: nobody waits for it here.
            here.address = actor.address.remote() if start.rank == 0 else here.address
            address = here.address
        order.reply = actor.work.remote(start.order, start.log, start.environment, address)

    def signal(self, worker: int, number: int) -> None:
        """Send a worker a signal; nothing happens where it has ended."""
        order = self._orders[worker]
        if order.code is not None:
            return
        if number == signal.SIGKILL:
            # What it has committed is all that it will ever have, whether it can be reached or not.
            order.lose()
            ray.kill(order.actor)
            kept = [each for each in order.place.actors.items() if each[1] is not order.actor]
            order.place.actors = dict(kept)
        else:
            with order.asked.open("ab") as file:
                file.write(b"%d\n" % number)

    def free_memory(self, worker: int, needs: float | None) -> None:
        """Do nothing: no idle worker stands beside another."""

    def news(self) -> list[IdleNews]:
        """Actors that wait tell nothing."""
        return []

    def code(self, worker: int) -> int | None:
        """The exit code of a worker, that of SIGKILL where it was lost; None while it works."""
        order = self._orders[worker]
        if order.code is None:
            done, _ = ray.wait([order.reply], timeout=0)
            if done:
                self._end(order)
        return order.code

    def settle(self, place: Place) -> bool:
        """A group gives its place back; whether each of its workers keeps something there."""
        orders = [self._orders.pop(number) for number in place.workers]
        place.workers.clear()
        kept = bool(place.kind and orders) and all(o.code == 0 and o.kept for o in orders)
        return kept and all(o.actor in place.actors.values() for o in orders)

    def is_there(self, place: Place) -> bool:
        """Whether the actors of a place that wait for a group live, as far as is known."""
        asked = place.probes
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=0) if asked else ([], [])
        try:
            ray.get(done)
        except RayError:
            return False
        if len(done) == len(asked) and time.monotonic() - place.probed > PROBE_SECONDS:
            place.probes = [actor.__ray_ready__.remote() for actor in place.actors.values()]
            place.probed = time.monotonic()
        return True

    def lose(self, place: Place) -> None:
        """A node of a place is gone; so are its workers, whatever else is known of them."""
        for number in place.workers:
            if self._orders[number].code is None:
                self._orders[number].lose()

    def end(self, place: Place) -> None:
        """End the actors of a place."""
        for actor in place.actors.values():
            ray.kill(actor)
        place.actors.clear()

    def close(self) -> None:
        """Ask all workers to stop, and wait until they have ended; what hangs is killed."""
        for number in self._orders:
            self.signal(number, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        while any(self.code(number) is None for number in self._orders):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        for number in self._orders:
            self.signal(number, signal.SIGKILL)

    def forget(self) -> None:
        """The cluster is gone: nobody writes any more, and nobody is asked."""
        for order in self._orders.values():
            revoke(order.group)
            order.code = LOST if order.code is None else order.code

    def _actor(self, place: Place, rank: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            place.bundles, placement_group_bundle_index=rank
        )
        kind = ray.remote(Worker).options(
            num_cpus=self._needs.get("CPU", 0), num_gpus=self._needs.get("GPU", 0),
            scheduling_strategy=strategy, max_restarts=0, max_task_retries=0,
        )  # fmt: skip
        place.actors[rank] = actor = kind.remote(self._module, __version__, str(Path.cwd()))
        return actor

    def _end(self, order: _Order) -> None:
        try:
            code, order.kept = ray.get(order.reply)
        except RayError as error:
            code, order.kept = LOST, False
            with order.asked.with_suffix(".log").open("a", encoding="utf-8") as log:
                log.write(f"\n{error}\n")
        if code == NEEDS_NEW_PROCESS and order.again:
            # So will the others of its group say, who have done nothing either.
            self.end(order.place)
            for number in order.place.workers:
                if self._orders[number].code is None:
                    self._hand(self._orders[number])
            return
        # Before anybody reads what is committed; others end well while the first still writes.
        if code or order.start.rank == 0:
            revoke(order.group)
        order.code = code


class RayExecutor(LocalExecutor):
    """Runs groups on the nodes of a Ray cluster; what it leaves in the folder is as of one machine.

    nodes     the cluster
    module    module that its workers run
    server    not needed: the driver's own processes are no workers
    others    options, started and commits, as of `LocalExecutor`
    raises    RayUnreachable, from `events`, where the cluster is gone
    """

    def __init__(
        self,
        nodes: RayCluster,
        module: str,
        folder: Path,
        cluster: Cluster,
        specs: Mapping[str, Mapping[str, Any]],
        server: ForkServer,
        *,
        sources: Mapping[str, CheckpointSource] | None = None,
        **others: Any,
    ) -> None:
        self.nodes = nodes
        cpus = min(seat.cpus for seat in nodes.seats)
        self._needs = {"GPU": 1.0} if nodes.kind == "cuda" else {"CPU": cpus}
        self._actors = Actors(module, self._needs)
        self._places: dict[int, Place] = {}
        self._kept: dict[tuple[int, ...], Place] = {}
        self._gone = False
        absolute = {
            name: replace(source, path=source.path.absolute())
            for name, source in (sources or {}).items()
        }
        super().__init__(
            folder.absolute(), cluster, specs, self._actors, sources=absolute, **others
        )
        self._forks = server
        server.begin()

    def reserve(self, group: Group, epoch: int) -> None:
        """Hold the group's GPUs by a placement group on their nodes.

        raises   PlaceTaken, also where another user of the cluster has them
        """
        super().reserve(group, epoch)
        if epoch in self._places:
            return
        try:
            self._places[epoch] = self._place(group)
        except PlaceTaken:
            self._held.pop(epoch)
            raise

    def _place(self, group: Group) -> Place:
        gpus = group.place
        if gpus in self._kept:
            return self._kept.pop(gpus)
        self._dismiss_kept(lambda place: not set(place.gpus).isdisjoint(gpus))
        nodes = [self.nodes.node(gpu).node for gpu in gpus]
        bundles = placement_group(
            [self._needs] * len(gpus),
            bundle_label_selector=[{"ray.io/node-id": node} for node in nodes],
        )
        if not bundles.wait(RESERVE_SECONDS):
            remove_placement_group(bundles)
            raise PlaceTaken(
                f"the cluster does not give the group of {', '.join(group.jobs)} its place",
                expected=f"{self._needs} on each of {', '.join(nodes)}",
                found="somebody else's, or no node any more",
            )
        self._actors.places[gpus] = place = Place(gpus, bundles)
        return place

    def _config(
        self, folder: Path, epoch: int, group: Group, gpus: tuple[int, ...], layout: Layout | None
    ) -> WorkerConfig:
        lease = grant(folder, self.folder)
        return replace(
            super()._config(folder, epoch, group, gpus, layout),
            output=str(lease / "train"),
            job_folders=str(lease / "jobs"),
            # Each process sees its own GPU and no other.
            gpus=(0,) * len(gpus),
        )

    def _environment(self, rank: int, gpus: tuple[int, ...]) -> dict[str, str]:
        """Threads of a process, and the variables of torchrun where it is one of several."""
        threads = {"OMP_NUM_THREADS": f"{cpus:g}"} if (cpus := self._needs.get("CPU")) else {}
        nodes = [self.nodes.node(gpu).node for gpu in gpus]
        return threads if len(nodes) == 1 else threads | rank_variables(rank, nodes)

    def _place_of(self, running: RunningGroup, rank: int, gpus: tuple[int, ...]) -> tuple[int, ...]:
        """The GPUs of the whole group: `Actors` knows who has which."""
        return self._places[running.epoch].gpus

    def change(self, group: Group, epoch: int, successor: GroupLaunch) -> None:
        """Have the worker of a group train another one; its place and its lease stay."""
        if epoch in self._places:
            self._places.setdefault(successor.epoch, self._places[epoch])
        super().change(group, epoch, successor)

    def events(self) -> list[ExecutorEvent]:
        try:
            changes = self.nodes.changes()
        except RayUnreachable:
            self._gone = True
            self._actors.forget()
            raise
        moved: list[ExecutorEvent] = [
            (NodeBack if there else NodeLost)(self.now(), node) for node, there in changes
        ]
        if moved:
            self._look_around()
        self._dismiss_kept(lambda place: not self._actors.is_there(place))
        return sorted(moved + super().events(), key=lambda event: event.time)

    def _look_around(self) -> None:
        """Nodes were lost or are back: what stood on lost ones is over."""
        self.cluster = self.nodes.cluster
        there = set(self.cluster.present())
        for place in self._places.values():
            if not there.issuperset(place.gpus):
                self._actors.lose(place)
        self._dismiss_kept(lambda place: not there.issuperset(place.gpus))

    def release(self, group: Group, epoch: int) -> None:
        """Give the place back; it stays reserved while its worker keeps a base there."""
        super().release(group, epoch)
        place = self._places.pop(epoch, None)
        if place is None or any(place is other for other in self._places.values()):
            # A group that took over has it.
            return
        if self._actors.settle(place) and set(self.cluster.present()).issuperset(place.gpus):
            self._kept[place.gpus] = place
        else:
            self._dismiss(place)

    def _dismiss_kept(self, unfit: Callable[[Place], bool]) -> None:
        for place in [place for place in self._kept.values() if unfit(place)]:
            self._dismiss(self._kept.pop(place.gpus))

    def _dismiss(self, place: Place) -> None:
        self._actors.end(place)
        self._actors.places.pop(place.gpus, None)
        remove_placement_group(place.bundles)

    def close(self) -> None:
        """End what still runs, each group drained, and part from the cluster."""
        super().close()
        self._forks.close()
        if not self._gone:
            for place in [*self._places.values(), *self._kept.values()]:
                self._dismiss(place)
        self.nodes.leave()


def on_ray(nodes: RayCluster, options: RunOptions) -> RunOptions:
    """The same run, with its groups on a cluster."""
    return replace(options, executor=partial(RayExecutor, nodes, options.worker))
