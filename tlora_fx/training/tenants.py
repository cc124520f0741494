"""Which models and versions lie in the banks, and which wait in main memory or on disk.

What was used longest ago makes room for another one: a model waits in main memory, with what it has
gathered, and where that is full, on disk. One with gradients that a step is about to use goes only
where no other can. A model on disk is a snapshot of all that, and the commands that have run since;
so is one whose trainer was killed.

A thread writes snapshots, one at a time, from copies that were made between cycles. Until one is in
the log, the one before it counts.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlora_fx.errors import NotAdmitted
from tlora_fx.host.durable import replace_file
from tlora_fx.host.memory import free_bytes
from tlora_fx.runtime.adapters.files import load_adapter
from tlora_fx.runtime.member import Member
from tlora_fx.training.engine import PARTS, Engine
from tlora_fx.training.folders import MODELS, folder_name
from tlora_fx.training.log import CommandLog
from tlora_fx.training.records import Model
from tlora_fx.training.versions import (
    Version,
    read_snapshot,
    read_version,
    snapshot_bytes,
    write_unsynced,
    write_version,
)

logger = logging.getLogger(__name__)
#: Of the main memory that is free when a trainer starts, the share for models that wait there.
PARKED_SHARE = 0.25
#: After its last request, for which a model with gradients is taken to be about to step.
STEP_SECONDS = 60.0
#: The base alone: an adapter of zeros.
_NOTHING: Mapping[str, Any] = {**dict.fromkeys(PARTS, True), "rank": 8, "seed": 0}


class NoRoom(Exception):
    """All that lies in the banks is needed now."""


@dataclass(eq=False, slots=True)
class Resident:
    """A model or version in the banks.

    name     of its job
    config   of its adapter
    model    its id; None for a version
    ran      the last command that its weights have
    kept     the last one that its snapshot has
    since    seconds of cycles since then, its part of them by tokens
    used     when it was needed last, by the monotonic clock
    """

    name: str
    config: Mapping[str, Any]
    model: str | None = None
    ran: int = -1
    kept: int = -1
    since: float = 0.0
    used: float = field(default_factory=time.monotonic)


class Tenants:
    """Models and versions of one engine, by key: a model's id, or a version's folder.

    parked_bytes   of main memory that models may wait in
    keep_seconds   that the last snapshot took to be copied and written
    """

    def __init__(self, engine: Engine, log: CommandLog) -> None:
        self.engine, self.log = engine, log
        self.parked_bytes = int(PARKED_SHARE * free_bytes())
        self.keep_seconds = 0.0
        self.resident: OrderedDict[str, Resident] = OrderedDict()
        self.parked: OrderedDict[str, tuple[Resident, Version]] = OrderedDict()
        self._writer = ThreadPoolExecutor(1, "snapshots")
        self._writing: tuple[str, Future[None]] | None = None

    def member(self, key: str) -> Member:
        """The member of a resident."""
        return self.engine.step.member(self.resident[key].name)

    def is_dirty(self, key: str) -> bool:
        """Whether a resident has gathered gradients."""
        return self.engine.step.has_gathered(self.resident[key].name)

    def use(self, key: str) -> None:
        """Note that a resident is needed now."""
        self.resident.move_to_end(key)
        self.resident[key].used = time.monotonic()

    def make(
        self, model: str, config: Mapping[str, Any], version: Version | None,
        *, seq: int, busy: Collection[str],
    ) -> None:  # fmt: skip
        """Admit a model anew; what it was before, and has gathered, is dropped.

        version   what it starts from; its moments too, where it has a state
        seq       of the command that asks for it
        raises    NoRoom; NotAdmitted, CommandRefused, AdapterFolderError where it never fits
        """
        self.leave(model)
        self.settle(model)
        kept = self.log.model(model).kept
        self._let_in(
            model, Resident(folder_name(model), config, model, seq - 1, kept), version, busy
        )

    def enter(self, model: Model, *, busy: Collection[str]) -> None:
        """Admit a model that waits in main memory, or else as its snapshot has it.

        busy     residents that are needed now
        raises   NoRoom, CheckpointError
        """
        if model.id in self.parked:
            resident, version = self.parked[model.id]
        elif model.kept >= 0:
            version = read_snapshot(self._snapshot(model.id, model.kept))
            kept = model.kept
            resident = Resident(folder_name(model.id), version.config, model.id, kept, kept)
        else:
            return
        self._let_in(model.id, resident, version, busy)
        self.parked.pop(model.id, None)

    def enter_version(self, folder: str | None, *, busy: Collection[str]) -> str:
        """See that a version lies in the banks; returns its key.

        folder   below the log's; None: the base alone
        raises   NoRoom, CheckpointError
        """
        key = folder or "base"
        if key not in self.resident:
            version = Version(_NOTHING, {}) if folder is None else self.read(folder)
            resident = Resident(folder_name(key), version.config)
            version = Version(version.config, version.adapter)
            self._let_in(key, resident, version if folder else None, busy)
        self.use(key)
        return key

    def read(self, folder: str) -> Version:
        """A version; raises CheckpointError."""
        return read_version(self.log.folder / folder)

    def write(self, model: str, folder: str, *, whole: bool) -> int:
        """Write a resident model as a version; returns its bytes."""
        place = self.log.folder / folder
        place.parent.mkdir(parents=True, exist_ok=True)
        version = self._version(model)
        if not whole:
            version = Version(version.config, version.adapter)
        base, backbone = self.engine.options.base_name, self.engine.step.model.backbone
        return write_version(place, version, self.member(model).job, backbone, base)

    def write_unnamed(self, model: str, folder: str) -> None:
        """Write a resident model as a version that its session's samplers alone read."""
        version = self._version(model)
        write_unsynced(self.log.folder / folder, Version(version.config, version.adapter))

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot is being written."""
        return self._writing is not None and not self._writing[1].done()

    def settle(self, model: str | None = None) -> None:
        """Wait until no snapshot is being written, or none of a model."""
        if self._writing is not None and model in (None, self._writing[0]):
            wait([self._writing[1]])

    def keep(self, model: str) -> Future[None]:
        """Copy a resident model for a snapshot, which is written while others run.

        returns   what has an OSError or sqlite3.Error where it could not be written
        """
        return self._keep(self.resident[model], self._version(model))

    def close(self) -> None:
        """Wait for the last snapshot; there will be no others."""
        self._writer.shutdown()

    def _version(self, model: str) -> Version:
        """A resident as it is; steps reach it."""
        resident, state = self.resident[model], self.member(model).state()
        gathered = self.engine.step.gathered(resident.name)
        return Version(resident.config, state.adapter, state, gathered)

    def _keep(self, resident: Resident, version: Version) -> Future[None]:
        assert resident.model is not None
        # Two would take as much memory again.
        self.settle()
        if resident.ran == resident.kept:
            done = Future[None]()
            done.set_result(None)
            return done
        start = time.perf_counter()
        content, resident.since = snapshot_bytes(version), 0.0
        future = self._writer.submit(self._write, resident, resident.ran, content, start)
        self._writing = resident.model, future
        return future

    def _write(self, resident: Resident, ran: int, content: memoryview, start: float) -> None:
        """Write a snapshot, and then let the one before it go."""
        assert resident.model is not None
        file = self._snapshot(resident.model, ran)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, content)
            self.log.keep(resident.model, ran)
        except Exception:
            logger.exception("a snapshot was not written", extra={"event": "error"})
            raise
        finally:
            self.keep_seconds = time.perf_counter() - start
        resident.kept = ran
        # Those of a trainer that was killed too, which nothing names.
        for pattern in ("snapshot-*.safetensors", ".snapshot-*.tmp"):
            for old in file.parent.glob(pattern):
                if old != file:
                    old.unlink(missing_ok=True)

    def _snapshot(self, model: str, seq: int) -> Path:
        return self.log.folder / MODELS / folder_name(model) / f"snapshot-{seq}.safetensors"

    def _let_in(
        self, key: str, resident: Resident, version: Version | None, busy: Collection[str]
    ) -> None:
        step = self.engine.step
        job = self.engine.job(resident.name, resident.config)
        step.model.require_fits(job)
        state = None if version is None else version.state
        while True:
            try:
                step.admit(job, state, may_grow=False)
                break
            except NotAdmitted:
                if not self._make_room(busy):
                    raise NoRoom from None
        self.resident[key] = resident
        self.use(key)
        try:
            if version is not None and state is None:
                load_adapter(self.member(key).parameters, version.adapter, f"a version for {key}")
            if version is not None and version.gathered.batches:
                step.put_back(resident.name, version.gathered)
        except BaseException:
            self.leave(key)
            raise

    def _make_room(self, busy: Collection[str]) -> bool:
        """Let the one go that was used longest ago; False where none may."""
        idle = sorted((key for key in self.resident if key not in busy), key=self._is_amid_step)
        for key in idle[:1]:
            if self.resident[key].model is not None:
                self._park(key)
            self.leave(key)
        return bool(idle)

    def _is_amid_step(self, key: str) -> bool:
        """Whether a resident has gradients that a step is about to use."""
        late = time.monotonic() - self.resident[key].used > STEP_SECONDS
        return not late and self.is_dirty(key)

    def _park(self, model: str) -> None:
        """Copy a resident to main memory; those who wait there longest go on to the disk."""
        self.parked[model] = (self.resident[model], self._version(model).in_main_memory())
        while sum(version.nbytes for _, version in self.parked.values()) > self.parked_bytes:
            key = next(iter(self.parked))
            self._keep(*self.parked[key])
            del self.parked[key]

    def leave(self, key: str) -> None:
        """Remove a resident as it is; one that is none stays none."""
        if key in self.resident:
            self.engine.step.release(self.resident.pop(key).name)

    def forget(self) -> None:
        """Drop all that lies in memory: the log and the disk have the truth."""
        self.settle()
        self.parked.clear()
        for key in list(self.resident):
            self.leave(key)
