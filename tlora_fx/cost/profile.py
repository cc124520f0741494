"""Measured times and memory of a model's layers: the data, and its file.

A profile holds what was measured, point by point; `fit.py` makes a function of it. Times are
milliseconds, medians over rounds; noise is the median absolute deviation over the median.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt, ValidationError

from tlora_fx.cost.hardware import LinkTier
from tlora_fx.cost.plan import mistakes, require_replaceable
from tlora_fx.errors import ProfileFileError, errors_as
from tlora_fx.host.durable import write_output

SCHEMA = 1
Operation = Literal["all-reduce", "all-gather", "send"]
Source = Literal["measured", "calibrated", "scaled", "roofline"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Hardware(_Part):
    """Hardware that was measured on.

    gpu          as the driver names it, or "cpu"
    memory_gib   of one GPU
    processors   streaming multiprocessors, or cores that were used
    """

    gpu: str
    memory_gib: NonNegativeFloat = 0.0
    processors: int = 0


class ModelShape(_Part):
    """The base's sizes; `intermediate` is 0 where a config has none."""

    title: str = ""
    hidden: PositiveInt
    intermediate: int = 0
    heads: PositiveInt
    key_value_heads: PositiveInt
    head_dim: PositiveInt
    layers: PositiveInt
    vocabulary: PositiveInt
    dtype: str = "bfloat16"


#: A time over that of its graph, from which on the host is taken to be what the device waits for.
HOST_BOUND = 1.3


class Captured(_Part):
    """Times of the same work as CUDA graphs: what the device takes where no host is in its way."""

    forward_ms: NonNegativeFloat
    backward_ms: NonNegativeFloat = 0
    first_ms: NonNegativeFloat | None = None
    frozen_ms: NonNegativeFloat | None = None


class _Timed(_Part):
    """What was measured once.

    captured   None where rows of this size do not run as graphs, or could not be captured
    """

    forward_ms: NonNegativeFloat
    backward_ms: NonNegativeFloat = 0
    noise: NonNegativeFloat = 0
    captured: Captured | None = None

    def scaled(self, forward: float, backward: float) -> Self:
        """Copy with times that are so many times as long; the host's times stay."""
        ratios = {
            "forward_ms": forward, "frozen_ms": forward,
            "backward_ms": backward, "first_ms": backward,
        }  # fmt: skip

        def longer(times: BaseModel) -> dict[str, float]:
            known = {name: getattr(times, name, None) for name in ratios}
            return {name: ms * ratios[name] for name, ms in known.items() if ms is not None}

        update: dict[str, object] = dict(longer(self))
        if self.captured is not None:
            device = longer(self.captured)
            waited = {name: max(getattr(self, name), ms) for name, ms in device.items()
                      if self.waits(name)}  # fmt: skip
            update |= waited | {"captured": self.captured.model_copy(update=device)}
        return self.model_copy(update=update)

    def waits(self, name: str) -> bool:
        """Whether the device waited for the host, by the time of one name."""
        graph = getattr(self.captured, name, None)
        return graph is not None and getattr(self, name) > HOST_BOUND * graph

    def as_captured(self) -> Self:
        """Copy with the times of a CUDA graph, where there are any."""
        if self.captured is None:
            return self
        return self.model_copy(update=self.captured.model_dump(exclude_none=True))


class LayerPoint(_Timed):
    """One layer on one row.

    tokens             of the row
    squares            sum of squared lengths of its sequences
    sites              linears with adapters; 0: a bare layer
    job_sites          adapters on them, of jobs that have tokens in the row
    site_tokens        tokens times (in + out), summed over the sites
    rank_tokens        tokens times rank times (in + out), summed over the adapters
    forward_ms         as in training
    backward_ms        of adapters and of the layer's input
    first_ms           the backward where the input needs no gradient; None for bare layers
    frozen_ms          the forward where nothing needs a gradient; None where not measured
    saved_bytes        what a forward leaves until the backward, its result included
    forward_peak_bytes, backward_peak_bytes   above what stood before, at most
    noise              the largest of the times' noises
    """

    tokens: PositiveInt
    squares: NonNegativeFloat
    sites: int = 0
    job_sites: int = 0
    site_tokens: NonNegativeFloat = 0
    rank_tokens: NonNegativeFloat = 0
    first_ms: NonNegativeFloat | None = None
    frozen_ms: NonNegativeFloat | None = None
    saved_bytes: NonNegativeFloat = 0
    forward_peak_bytes: NonNegativeFloat = 0
    backward_peak_bytes: NonNegativeFloat = 0


class LayerProfile(_Part):
    """Layers of one structure.

    structure         of the whole layer (see facts.LayerFacts)
    tp                its matrices and heads were this many times smaller, without collectives
    elements          numbers that each token was multiplied with
    attention_width   columns of q
    hidden            columns of its input
    """

    structure: str
    tp: PositiveInt = 1
    elements: PositiveInt
    attention_width: int
    hidden: PositiveInt
    points: list[LayerPoint]


class RootPoint(_Timed):
    """All of the root but layers and loss: embedding, positions, last norm."""

    tokens: PositiveInt
    saved_bytes: NonNegativeFloat = 0


class LossPoint(_Timed):
    """Head and loss on so many rows with a target."""

    targets: PositiveInt
    saved_bytes: NonNegativeFloat = 0
    peak_bytes: NonNegativeFloat = 0


class OptimizerPoint(_Part):
    """The end of one job's step: norm, clipping, optimizer, zeroed gradients."""

    tensors: PositiveInt
    parameters: PositiveInt
    ms: NonNegativeFloat
    noise: NonNegativeFloat = 0


class HostPoint(_Part):
    """Packing a row and moving it to the device."""

    tokens: PositiveInt
    ms: NonNegativeFloat


class CollectivePoint(_Part):
    """One collective; `payload_bytes` is what each process has in the end."""

    operation: Operation
    tier: LinkTier
    processes: PositiveInt
    payload_bytes: PositiveInt
    ms: NonNegativeFloat
    noise: NonNegativeFloat = 0


class Profile(_Part):
    """Measurements of one model shape on one kind of hardware.

    name       such as "llama-3-8b-nvidia-h200"
    source     "measured"; "calibrated": a roofline that a few measurements have corrected; "scaled"
               from another profile; or "roofline" from a data sheet
    origin     the profile or data sheet that it was scaled from
    compiled   layers ran compiled, or eager
    slowdown   what compute takes while a collective runs beside it, over compute alone
    """

    format: int = Field(default=SCHEMA, alias="schema")
    name: str
    source: Source = "measured"
    origin: str = ""
    hardware: Hardware
    versions: dict[str, str] = Field(default={})
    date: str = ""
    command: str = ""
    compiled: bool = True
    shape: ModelShape
    layers: list[LayerProfile]
    root: list[RootPoint]
    loss: list[LossPoint]
    optimizer: list[OptimizerPoint]
    host: list[HostPoint] = Field(default=[])
    collectives: list[CollectivePoint] = Field(default=[])
    slowdown: float = Field(default=1.0, ge=1.0)

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @property
    def estimated(self) -> bool:
        """Whether any of it was computed and not measured."""
        return self.source != "measured"

    @property
    def noise(self) -> float:
        """The largest noise of a layer's times."""
        return max((one.noise for layer in self.layers for one in layer.points), default=0.0)

    def layer(self, structure: str, tp: int) -> LayerProfile | None:
        """Measurements of layers of a structure at one size of tensor parallelism."""
        found = (one for one in self.layers if (one.structure, one.tp) == (structure, tp))
        return next(found, None)

    @property
    def knows_graphs(self) -> bool:
        """Whether any layer was timed as a CUDA graph."""
        return any(point.captured for layer in self.layers for point in layer.points)

    def as_captured(self) -> Self:
        """The same where rows run as CUDA graphs (see `row_graphs`)."""
        layers = [
            one.model_copy(update={"points": [point.as_captured() for point in one.points]})
            for one in self.layers
        ]
        root, loss = ([one.as_captured() for one in own] for own in (self.root, self.loss))
        return self.model_copy(update={"layers": layers, "root": root, "loss": loss})

    def save(self, path: Path | str) -> None:
        """Write the profile as JSON; raises ProfileFileError."""
        text = self.model_dump_json(indent=1, by_alias=True, exclude_defaults=True)
        text = text.replace("{", f'{{\n "schema": {SCHEMA},', 1)
        help = "choose another path"
        with errors_as(ProfileFileError, "a profile cannot be written", file=path, help=help):
            write_output(Path(path), (text + "\n").encode())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote; raises ProfileFileError."""
        try:
            found = cls.model_validate_json(Path(path).read_bytes())
        except FileNotFoundError as error:
            raise ProfileFileError(
                "there is no such profile",
                file=path,
                help="name a file that is there, or write one with `tlora-fx profile`",
            ) from error
        except (OSError, ValidationError) as error:
            raise ProfileFileError(
                "this file is no profile",
                file=path,
                found="\n".join(mistakes(error, "profile")[:5]),
                help="write one with `tlora-fx profile`",
            ) from error
        if found.format != SCHEMA:
            raise ProfileFileError(
                "the profile is of another version of tlora-fx",
                file=path,
                expected=f"schema {SCHEMA}",
                found=f"schema {found.format}",
                help="measure it again with `tlora-fx profile`",
            )
        return found


def name_of(title: str, gpu: str) -> str:
    """A name for files: letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", f"{Path(title).name} {gpu}".lower()).strip("-")


def require_free(path: Path) -> None:
    """Refuse a place where no profile can be written before one is measured.

    raises    ProfileFileError
    """
    if path.is_file():
        require_replaceable(path, Profile.load, "profile")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK):
        raise ProfileFileError(
            "a profile cannot be written",
            file=path,
            found="a folder" if path.is_dir() else f"no folder to write into: {above}",
            help="choose another path",
        )
