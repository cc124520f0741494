"""What the scheduler asks of an estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tlora_fx.cost.cluster import Tier
from tlora_fx.cost.demand import Array, Demand
from tlora_fx.planners.mesh_shape import MeshShape


@dataclass(frozen=True, slots=True)
class Layout:
    """How a group runs on its GPUs: a plan without cuts.

    mesh         processes along each dimension
    shard_base   the base is sharded over dp
    """

    mesh: MeshShape = field(default_factory=MeshShape)
    shard_base: bool = False

    def __str__(self) -> str:
        return f"{self.mesh}{', sharded base' if self.shard_base else ''}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step of a group, term by term.

    seconds        of one step; infinite where nothing fits
    layout         the fastest that fits; None where none does
    memory_bytes   of the fullest GPU
    terms          seconds by name; with the overlap they add up to `seconds`
    memory         bytes by name; they add up to `memory_bytes`
    busy           part of the GPUs' time that computes at the roofline
    estimated      whether anything was not measured
    launched       jobs that keep rows from running as CUDA graphs, where otherwise small rows would
    why_not        what stood against every layout, where none fits
    """

    seconds: float
    layout: Layout | None
    memory_bytes: float
    terms: Mapping[str, float]
    memory: Mapping[str, float]
    busy: float = 0.0
    estimated: bool = False
    launched: int = 0
    why_not: str = ""


class Estimator(Protocol):
    """Time and memory of groups.

    evaluations   how many (group, GPUs) pairs were asked for in all
    """

    evaluations: int

    def seconds(self, base: str, demands: Array, gpus: Array, tiers: list[Tier]) -> Array:
        """Seconds of one step of each of n groups under its best layout; inf where none fits.

        demands   [n, 12] rows of `Demand`
        gpus      [n] GPUs of each; a layout may use fewer
        tiers     [n] how far apart they stand
        """

    def busy(self, base: str, demands: Array, gpus: Array, seconds: Array) -> Array:
        """The part of the GPUs' time that each of n groups uses, 0 to 1; 1 minus it is residual."""

    def explain(self, base: str, demand: Demand, gpus: int, tier: Tier) -> Prediction:
        """One group, term by term."""

    def solo(self, base: str, demand: Demand, gpus: int) -> float:
        """Seconds of one step of a job alone on the GPUs it asked for; cached."""
