"""A state of the scheduler as a file, with its policy, its profiles and the past of its run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from tlora_fx.cost.estimator import Estimator, ProfileEstimator
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.profile import Profile
from tlora_fx.errors import StateFileError
from tlora_fx.host.durable import replace_file
from tlora_fx.host.formats import require_known
from tlora_fx.scheduler.history import History, Rows
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.state import ActiveJob, ChangeCosts, Group, Policy, SchedulerState

FORMAT_SNAPSHOT: Literal["tlora-fx moment 1"] = "tlora-fx moment 1"
NO_STATE = "this is no saved state of the scheduler"
HOW_TO_SAVE = "`tlora-fx schedule state RUN -o STATE.json` writes one; or name a run's folder"
#: Of a file that is none, so many names of fields are told.
FIELDS = 8


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state, and the policy that decides upon it.

    The profiles lie in it too, so that a decision can be asked about on another machine, and later.
    """

    state: SchedulerState
    policy: Policy


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class _PolicySection(_Section):
    name: str
    options: dict[str, Any]


class _EstimatorSection(_Section):
    # Profiles and facts may say more than they did.
    model_config = ConfigDict(extra="ignore")

    profiles: dict[str, Profile] = {}
    shapes: dict[str, ModelFacts] = {}
    options: dict[str, Any]

    @classmethod
    def of(cls, estimator: Estimator) -> Self:
        """Section that makes the same estimator again; raises StateFileError for another kind."""
        if not isinstance(estimator, ProfileEstimator):
            raise StateFileError(
                "this estimator cannot be written into a file",
                found=type(estimator).__name__,
                expected="ProfileEstimator",
            )
        values = {
            field.name: getattr(estimator, field.name) for field in fields(estimator) if field.init
        }
        profiles, shapes = values.pop("profiles"), values.pop("shapes")
        names = sorted(values.keys() - {"cluster", "evaluations"})
        return cls(profiles=profiles, shapes=shapes, options={name: values[name] for name in names})

    def estimator(self, cluster: Cluster) -> Estimator:
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.options.items()
        }
        return ProfileEstimator(self.profiles, cluster, self.shapes, **options)


class _StateSection(_Section):
    format: Literal["tlora-fx state 1"] = "tlora-fx state 1"
    estimator: Literal["profile"] = "profile"
    now: float
    horizon: float
    switch_seconds: float
    changes: ChangeCosts | None = None
    cluster: Cluster
    jobs: tuple[ActiveJob, ...]
    groups: tuple[Group, ...]


class _SnapshotFile(_Section):
    format: Literal["tlora-fx moment 1"] = FORMAT_SNAPSHOT
    policy: _PolicySection
    estimator: _EstimatorSection
    state: _StateSection
    history: Rows | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            content = json.loads(path.read_bytes())
            _require_format(path, content)
            return cls.model_validate(content)
        except (OSError, ValueError, RecursionError) as error:
            raise _no_state(path, error) from error

    def write(self, path: Path) -> None:
        text = json.dumps(self.model_dump(mode="json"), indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode() + b"\n")


def save_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot; raises StateFileError for an estimator that has no file form."""
    state, policy = snapshot.state, snapshot.policy
    _SnapshotFile(
        policy=_PolicySection(name=policy.name, options=policy_options(policy)),
        estimator=_EstimatorSection.of(state.estimator),
        state=_StateSection(
            now=state.now,
            horizon=state.horizon,
            switch_seconds=state.switch_seconds,
            changes=state.changes,
            cluster=state.cluster,
            jobs=tuple(state.jobs.values()),
            groups=state.groups,
        ),
    ).write(path)


def load_snapshot(path: Path) -> Snapshot:
    """Read a snapshot back.

    raises   StateFileError; NewerFormat; UnknownPolicy where another package's policy is missing
    """
    file = _SnapshotFile.read(path)
    state = file.state
    try:
        estimator = file.estimator.estimator(state.cluster)
    except TypeError as error:
        raise _no_state(path, error) from error
    jobs = {job.name: job for job in state.jobs}
    restored = SchedulerState(
        state.now,
        state.cluster,
        estimator,
        jobs,
        state.groups,
        state.horizon,
        state.switch_seconds,
        state.changes,
    )
    return Snapshot(restored, find_policy(file.policy.name, **file.policy.options))


def add_history(path: Path, rows: Rows) -> None:
    """Put the past of a run into a snapshot's file; raises StateFileError."""
    _SnapshotFile.read(path).model_copy(update={"history": rows}).write(path)


def load_history(path: Path) -> History | None:
    """The past that was put into a snapshot's file; None: none was. Raises StateFileError."""
    rows = _SnapshotFile.read(path).history
    try:
        return None if rows is None else History.of_rows(rows)
    except (KeyError, ValueError) as error:
        raise _no_state(path, error) from error


def _require_format(path: Path, written: object) -> None:
    """Refuse what is no state at all, and a state of another version.

    raises    StateFileError, NewerFormat
    """
    fields = list(written) if isinstance(written, dict) else []
    if not isinstance(written, dict) or "format" not in written:
        raise StateFileError(
            NO_STATE,
            file=path,
            expected=f"a JSON object whose format is '{FORMAT_SNAPSHOT}'",
            found=f"an object with {', '.join(fields[:FIELDS])}" if fields else "nothing of it",
            help=HOW_TO_SAVE,
        )
    if match := re.fullmatch(r"tlora-fx moment (\d{1,9})", str(written["format"])):
        known = int(FORMAT_SNAPSHOT.rpartition(" ")[2])
        require_known("the scheduler's state", path, int(match[1]), known=known, version="")
    if written["format"] != FORMAT_SNAPSHOT:
        raise StateFileError(
            "the file has another format",
            file=path,
            expected=FORMAT_SNAPSHOT,
            found=written["format"],
            help="read it with the version of tlora-fx that wrote it",
        )


def _no_state(path: Path, error: Exception) -> StateFileError:
    if isinstance(error, FileNotFoundError):
        return StateFileError("there is no such file", file=path, help=HOW_TO_SAVE)
    reason: object = error
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return StateFileError(NO_STATE, file=path, reason=reason, help=HOW_TO_SAVE)


def policy_options(policy: Policy) -> dict[str, Any]:
    """The options of a policy that a file can hold: numbers, words, flags."""
    if not is_dataclass(policy):
        return {}
    values = {field.name: getattr(policy, field.name) for field in fields(policy) if field.init}
    plain = bool | int | float | str
    return {name: value for name, value in values.items() if isinstance(value, plain)}
