"""Successive halving as its user writes it: when jobs are compared, and how many go on."""

from __future__ import annotations

from pydantic import Field, StrictInt, StrictStr

from tlora_fx.config.validation import Spec


class HalvingSpec(Spec):
    """Comparison of the jobs of a group by evaluation loss, which ends the weak ones early.

    A rung is a number of steps at which jobs are compared.

    group      name of the jobs that are compared with each other; of a sweep, by default the name
               of the job that is swept
    min_steps  optimizer steps until the first rung; each next one has `factor` times as many
    factor     one of so many jobs goes on at a rung, rounded up
    """

    group: StrictStr | None = Field(default=None, min_length=1)
    min_steps: StrictInt = Field(ge=1)
    factor: StrictInt = Field(default=3, ge=2)

    def rungs(self, steps: int) -> list[int]:
        """The steps at which a job of so many steps is compared; its last one is none."""
        rungs, rung = [], self.min_steps
        while rung < steps:
            rungs.append(rung)
            rung *= self.factor
        return rungs

    def kept(self, jobs: int) -> int:
        """How many of the jobs at a rung go on."""
        return -(-jobs // self.factor)
