"""Records of the command log, as the trainer and who answers HTTP pass them on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

JSON, PROTOBUF = "application/json", "application/x-protobuf"
Kind = Literal["weights", "sampler_weights", "external_weights"]


@dataclass(frozen=True, slots=True)
class Command:
    """One request of a client to a model or a sampler.

    number   of the whole log; its future is called by it
    queue    the model's or sampler's id
    cuts     data of each of its pieces when it ran; empty where it has not, or nobody noted it
    """

    number: int
    user: str
    queue: str
    seq: int
    kind: str
    body: bytes
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a command: a body of some media type.

    failed   whether it is an error
    """

    media: str
    body: bytes
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An immutable version of a model's weights.

    path     as clients name it: tinker://MODEL/KIND/NAME
    kind     as of `Kind`
    folder   where it lies, below the log's own
    config   of the model's adapter, as `models.config`
    said     what the user attached
    public   whether all users may load it and sample from it
    """

    path: str
    model: str
    user: str
    kind: str
    folder: str
    bytes: int
    made: float
    expires: float | None
    config: Mapping[str, Any]
    said: Mapping[str, Any] = field(default_factory=dict)
    public: bool = False


@dataclass(frozen=True, slots=True)
class Sampler:
    """Weights that a client samples from.

    path     of the checkpoint; None for the base, or for a version without a name
    folder   of the version; None for the base
    """

    id: str
    session: str
    user: str
    path: str | None
    folder: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of running a command, written as one.

    tokens       that the trainer computed for it
    checkpoint   that it made
    sampler      that it made
    config       of the adapter that it gave a model
    cuts         as of `Command`
    """

    command: Command
    answer: Answer
    tokens: int = 0
    checkpoint: Checkpoint | None = None
    sampler: Sampler | None = None
    config: Mapping[str, Any] | None = None
    cuts: tuple[int, ...] = ()


@dataclass(slots=True)
class Ran:
    """Results that a cycle computed together.

    kind      of its commands
    began     seconds since the epoch
    tokens    by command, of its piece
    seconds   of all
    """

    kind: str
    began: float
    tokens: Mapping[Command, int]
    seconds: float = 0.0

    def parts(self) -> dict[Command, float]:
        """Seconds of each command's piece: by tokens, or alike where nobody has any."""
        whole, alike = sum(self.tokens.values()), self.seconds / max(len(self.tokens), 1)
        return {
            command: self.seconds * tokens / whole if whole else alike
            for command, tokens in self.tokens.items()
        }


@dataclass(frozen=True, slots=True)
class Model:
    """A row of the models.

    ran, kept   as of `training.log`
    config      of its adapter; None until it was made
    """

    id: str
    session: str
    user: str
    made: float
    asked: float
    ran: int
    kept: int
    config: Mapping[str, Any] | None
    said: Mapping[str, Any]


def json_answer(content: Mapping[str, Any]) -> Answer:
    """An answer in JSON; a number that is not finite is a mistake of ours."""
    return Answer(JSON, json.dumps(content, allow_nan=False).encode())
