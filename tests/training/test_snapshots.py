"""A trainer that is killed while it writes a snapshot loses nothing, and changes no bit."""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.training.clients import Client, cycle_of, datum, run_all
from tests.training.test_cycle import assert_same
from tlora_fx.errors import CheckpointError
from tlora_fx.host import durable
from tlora_fx.ops.kernels.select import strict
from tlora_fx.runtime.checkpoints.store import JobState
from tlora_fx.training.log import CommandLog
from tlora_fx.training.tenants import Tenants
from tlora_fx.training.versions import Version, read_snapshot, snapshot_bytes

#: How far a snapshot is: copied, half a file, a file, or in the log; the one before it is there.
STAGES = ("copied", "torn", "written", "noted")
SECONDS = 120


class Killed(BaseException):
    """The trainer has ended."""


@dataclass(eq=False)
class Kill:
    """The end of a trainer as its n-th snapshot comes to a stage.

    more       cycles that run beside what writes the snapshot and has come so far
    replaced   whether another trainer runs by now
    """

    stage: str
    nth: int
    more: int
    seen: int = 0
    replaced: bool = False
    reached: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def at(self, stage):
        """What writes a snapshot has come to a stage."""
        self.seen += stage == self.stage
        if stage != self.stage or self.seen != self.nth:
            return
        self.reached.set()
        if threading.current_thread() is not threading.main_thread():
            # Whoever is at work now has its last cycles.
            assert self.over.wait(SECONDS)
        raise Killed

    def patch(self, patch):
        """Have all snapshots pass here."""
        replace, keep = durable._replace, CommandLog.keep
        settle, copy = Tenants.settle, Tenants.keep

        def replaced(path, fresh, data):
            if path.name.startswith("snapshot-"):
                self.at("copied")
                fresh.write_bytes(data[: len(data) // 2])
                self.at("torn")
            replace(path, fresh, data)
            if path.name.startswith("snapshot-"):
                self.at("written")

        def kept(log, model, seq):
            keep(log, model, seq)
            self.at("noted")

        def settled(tenants, model=None):
            if tenants._writing is not None and model in (None, tenants._writing[0]):
                self.wait_for(tenants._writing[1])
            settle(tenants, model)

        def copied(tenants, model):
            future = copy(tenants, model)
            return SimpleNamespace(result=lambda: self.wait_for(future))

        patch.setattr(durable, "_replace", replaced)
        patch.setattr(CommandLog, "keep", kept)
        patch.setattr(Tenants, "settle", settled)
        patch.setattr(Tenants, "keep", copied)

    def wait_for(self, future):
        """What a thread came to; who waits for one that is gone is gone too."""
        while not future.done():
            if self.reached.is_set() and not self.replaced:
                raise Killed
            time.sleep(0.001)
        return future.result()


def asked_of(folder, seed, models):
    """A log that has all that some clients ask for: steps, a checkpoint, and going on from it."""
    draw, log, clients, futures = random.Random(seed), CommandLog(folder), [], []
    for number in range(models):
        session = log.open_session("ada", {}, f"{number}")
        config = {"rank": draw.choice((4, 8)), "seed": number}
        client = Client(log, config=config, session=session)
        own = [client.created]
        for turn in range(3):
            if turn == 2 and number % 2:
                path = f"tinker://{client.model}/weights/half"
                own.append(client.send("load_weights", path=path, optimizer=True))
            for _ in range(draw.randint(1, 2)):
                tokens = [draw.randrange(3, 259) for _ in range(draw.randint(3, 9))]
                own.append(client.forward_backward([datum(tokens)]))
            if turn == 1:
                own.append(client.send("save_weights", path="half"))
            if turn < 2 or number % 3:
                own.append(client.optim_step(learning_rate=1e-2))
        clients.append(client)
        futures.append(own)
    log.close()
    return clients, futures


def run(folder, seed, models, kill=None, **how):
    """Answers and adapters of some clients, whose trainer was killed once."""
    clients, futures = asked_of(folder, seed, models)
    cycle = cycle_of(folder, snapshot_share=math.inf, **how)
    left = kill.more if kill else 0
    try:
        while kill:
            ran = cycle.run()
            left -= kill.reached.is_set()
            if left < 0 or not ran:
                raise Killed
    except Killed:
        kill.replaced = True
        cycle = cycle_of(folder, snapshot_share=math.inf, **how)
    run_all(cycle)
    adapters = []
    for client in clients:
        client.log = cycle.log
        cycle.bring(client.model)
        tensors = cycle.tenants.member(client.model).final_adapter()
        adapters.append({name: each.detach().clone() for name, each in tensors.items()})
    answers = [
        [client.result(each) for each in own] for client, own in zip(clients, futures, strict=True)
    ]
    return cycle, answers, adapters


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6), models=st.sampled_from((2, 5)), every=st.integers(1, 3),
    parked=st.sampled_from((0, 1 << 30)), stage=st.sampled_from(STAGES), nth=st.integers(1, 9),
    more=st.integers(0, 4),
)  # fmt: skip
def test_a_trainer_killed_while_it_writes_a_snapshot_loses_nothing(
    tmp_path_factory, seed, models, every, parked, stage, nth, more
):
    """Of a few models, or of more than have a place; what is at work beside may be further."""
    folder, kill = tmp_path_factory.mktemp("run"), Kill(stage, nth, more)
    how = {"snapshot_every": every, "parked_bytes": parked}
    with strict(), pytest.MonkeyPatch.context() as patch:
        _, wanted, expected = run(folder / "whole", seed, models, snapshot_every=10**6)
        kill.patch(patch)
        try:
            cycle, answers, adapters = run(folder / "killed", seed, models, kill, **how)
        finally:
            kill.over.set()

        assert repr(answers) == repr(wanted)
        for own, other in zip(adapters, expected, strict=True):
            assert_same(own, other, 0)
        assert not any(each.get("error") for own in answers for each in own if type(each) is dict)
        cycle.log.close()


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_snapshot_that_is_cut_short_is_told(tmp_path, left):
    """With its file."""
    weights = {"weight": torch.arange(64.0)}
    file, state = tmp_path / "snapshot", JobState(weights, {}, {}, 3, 0, 12)
    content = bytes(snapshot_bytes(Version({"rank": 8}, weights, state)))
    file.write_bytes(content)
    found = read_snapshot(file)
    assert (found.config, found.state.step) == ({"rank": 8}, 3)
    assert torch.equal(found.adapter["weight"], weights["weight"])

    file.write_bytes(content[:left])
    with pytest.raises(CheckpointError, match="snapshot"):
        read_snapshot(file)
