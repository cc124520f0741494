"""A moment of a run as a file: a state, the policy that decides, and what it expects of times.

The profiles lie in it too, so that a decision can be asked about on another machine, and later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tlora_fx.cost.cluster import Cluster
from tlora_fx.cost.estimator import ProfileEstimator
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.profile import Profile
from tlora_fx.durable import replace_file
from tlora_fx.errors import StateFileError
from tlora_fx.scheduler.estimating import Estimator
from tlora_fx.scheduler.history import History
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.state import Policy, State
from tlora_fx.scheduler.state_file import state_from_json, state_to_json
from tlora_fx.scheduler.synthetic import SyntheticEstimator

FORMAT = "tlora-fx moment 1"
NO_STATE = "this is no saved state of the scheduler"
HOW_TO_SAVE = "`tlora-fx schedule state RUN -o STATE.json` writes one; or name a run's folder"
#: Of a file that is none, so many names of fields are told.
FIELDS = 8
_FACTS = TypeAdapter(ModelFacts)


@dataclass(frozen=True, slots=True)
class Moment:
    """A state, and the policy that decides upon it."""

    state: State
    policy: Policy


def save_moment(path: Path, moment: Moment) -> None:
    """Write a moment.

    raises   StateFileError for an estimator that has no file form
    """
    kind, estimator = _estimator_fields(moment.state.estimator)
    written = {
        "format": FORMAT,
        "policy": {"name": moment.policy.name, "options": policy_options(moment.policy)},
        "estimator": estimator,
        "state": json.loads(state_to_json(moment.state, kind)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(written, indent=1).encode() + b"\n")


def add_history(path: Path, rows: Mapping[str, Any]) -> None:
    """Put the past of a run into a moment's file.

    rows     of `rows_of_run`
    raises   StateFileError
    """
    load_moment(path)
    written = json.loads(path.read_bytes()) | {"history": rows}
    replace_file(path, json.dumps(written, indent=1).encode() + b"\n")


def load_history(path: Path) -> History | None:
    """The past that was put into a moment's file; None: none was.

    raises   StateFileError
    """
    try:
        rows = json.loads(path.read_bytes()).get("history")
        return None if rows is None else History.of_rows(rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_state(path, error) from error


def load_moment(path: Path) -> Moment:
    """Read a moment back.

    raises   StateFileError; UnknownPolicy where another package's policy is missing
    """
    try:
        written = json.loads(path.read_bytes())
        _demand_format(path, written)
        cluster = written["state"]["cluster"]
        cluster = Cluster(**(cluster | {"lost": frozenset(cluster["lost"])}))
        state = state_from_json(
            json.dumps(written["state"]),
            lambda kind: _estimator(kind, written["estimator"], cluster),
        )
        policy = find_policy(written["policy"]["name"], **written["policy"]["options"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise _no_state(path, error) from error
    return Moment(state, policy)


def _demand_format(path: Path, written: object) -> None:
    """Refuse what is no state at all, and a state of another version.

    raises   StateFileError
    """
    fields = list(written) if isinstance(written, dict) else []
    if not isinstance(written, dict) or "format" not in written:
        raise StateFileError(
            NO_STATE,
            file=path,
            expected=f"a JSON object whose format is '{FORMAT}'",
            found=f"an object with {', '.join(fields[:FIELDS])}" if fields else "nothing of it",
            help=HOW_TO_SAVE,
        )
    if written["format"] != FORMAT:
        raise StateFileError(
            "the file has another format",
            file=path,
            expected=FORMAT,
            found=written["format"],
            help="read it with the version of tlora-fx that wrote it",
        )


def _no_state(path: Path, error: Exception) -> StateFileError:
    if isinstance(error, FileNotFoundError):
        return StateFileError("there is no such file", file=path, help=HOW_TO_SAVE)
    lacks = f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else error
    return StateFileError(NO_STATE, file=path, reason=lacks, help=HOW_TO_SAVE)


def policy_options(policy: Policy) -> dict[str, Any]:
    """The options of a policy that a file can hold: numbers, words, flags."""
    if not is_dataclass(policy):
        return {}
    values = {one.name: getattr(policy, one.name) for one in fields(policy) if one.init}
    plain = bool | int | float | str
    return {name: value for name, value in values.items() if isinstance(value, plain)}


def _estimator_fields(estimator: Estimator) -> tuple[str, dict[str, Any]]:
    if isinstance(estimator, ProfileEstimator):
        return "profile", {
            "profiles": {name: p.model_dump(mode="json") for name, p in estimator.profiles.items()},
            "shapes": {
                name: _FACTS.dump_python(facts, mode="json")
                for name, facts in estimator.shapes.items()
            },
            "options": _options(estimator, {"profiles", "cluster", "shapes", "evaluations"}),
        }
    if isinstance(estimator, SyntheticEstimator):
        return "synthetic", {"options": _options(estimator, {"cluster", "evaluations"})}
    raise StateFileError(
        "this estimator cannot be written into a file",
        found=type(estimator).__name__,
        expected="ProfileEstimator or SyntheticEstimator",
    )


def _options(estimator: ProfileEstimator | SyntheticEstimator, but: set[str]) -> dict[str, Any]:
    names = {one.name for one in fields(estimator) if one.init} - but
    return {name: getattr(estimator, name) for name in sorted(names)}


def _estimator(kind: str, written: Mapping[str, Any], cluster: Cluster) -> Estimator:
    given = written["options"].items()
    options: dict[str, Any] = {
        name: tuple(one) if isinstance(one, list) else one for name, one in given
    }
    if kind == "synthetic":
        return SyntheticEstimator(cluster=cluster, **options)
    return ProfileEstimator(
        {name: Profile.model_validate(one) for name, one in written["profiles"].items()},
        cluster,
        {name: _FACTS.validate_python(one) for name, one in written["shapes"].items()},
        **options,
    )
