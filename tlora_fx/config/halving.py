"""Successive halving as its user writes it: when jobs are compared, and how many go on."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, StrictInt, StrictStr

from tlora_fx.config.validation import Spec

#: How the reason of a job begins that its group's halving has ended.
HALVED = "ended by halving"


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

    def compare(self, losses: Mapping[str, float]) -> tuple[list[str], list[str]]:
        """Jobs that go on, the best first, and those that end; equal ones in their order.

        losses   at a rung, by job
        """
        order = sorted(losses, key=losses.__getitem__)
        kept = -(-len(order) // self.factor)
        return order[:kept], order[kept:]


def reason_of(loss: float, step: int, kept: int, jobs: int) -> str:
    """Reason of a job that ends at a rung, where `kept` of so many jobs go on."""
    best = f"the best {kept} of {jobs} jobs"
    return f"{HALVED}: eval_loss {loss:.6g} at step {step} is not among {best}"


def result_of(group: str, step: int, kept: list[str], jobs: int) -> str:
    """Text about a rung at which jobs end."""
    go_on = f"{len(kept)} of {jobs} jobs go on"
    return f"'{group}' at step {step}: {go_on}, the best is '{kept[0]}'"
