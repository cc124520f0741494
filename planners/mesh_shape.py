"""How many processes stand along each dimension of a mesh."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, PositiveInt

from tlora_fx.errors import PlanFileError

DIMENSIONS = ("pp", "dp", "tp")


class MeshShape(BaseModel):
    """How many processes stand along each dimension.

    pp   stages of a pipeline
    dp   replicas, each with rows of its own
    tp   parts of every matrix
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pp: PositiveInt = 1
    dp: PositiveInt = 1
    tp: PositiveInt = 1

    @property
    def size(self) -> int:
        """How many processes there are in all."""
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in DIMENSIONS)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The shape that a text names: "pp=2,dp=2"; what it leaves out is 1.

        raises    PlanFileError
        """
        entries = [entry.strip().partition("=") for entry in text.split(",") if entry.strip()]
        known = all(name in DIMENSIONS and value.isdigit() for name, _, value in entries)
        sizes = {name: int(value) for name, _, value in entries if value.isdigit()}
        if not known or len(sizes) < len(entries) or 0 in sizes.values():
            raise PlanFileError(
                "this is no mesh",
                expected="such as pp=2,dp=4,tp=1",
                found=text,
                help="name each of pp, dp and tp at most once, with a number of processes",
            )
        return cls(**sizes)
