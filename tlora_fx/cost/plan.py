"""Plans, the results of planners: how a Shared Super-Model is cut over processes.

A plan is data. It names no machine and no process, so one file serves every run of the same jobs
on as many processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from tlora_fx.errors import PlanFileError, PlanNotForModel, TloraError, errors_as
from tlora_fx.host.durable import write_output

if TYPE_CHECKING:
    from tlora_fx.model.supermodel import SuperModel

DIMENSIONS = ("pp", "dp", "tp")


class MeshShape(BaseModel):
    """Number of processes along each dimension.

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
        """Number of processes in all."""
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


Schedule = Literal["gpipe", "1f1b", "interleaved"]
#: What plans could ask for before, and why it was taken out.
TAKEN_OUT = {
    "sequence_parallel": "sequence parallelism was taken out, as it was slower than whole rows at "
    "every size measured on two H200",
    "zero-bubble": "zero-bubble schedules were taken out, as they were never measured on GPUs and "
    "ran layers uncompiled",
}


class Estimate(BaseModel):
    """Time and memory of a plan, as a planner estimates them.

    step_seconds   one round of the jobs' own sizes
    memory_bytes   peak of the fullest process
    profile        name of the profile that it was computed from
    estimated      the profile was scaled from another GPU's, or is a roofline
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_seconds: float
    memory_bytes: int
    profile: str
    estimated: bool = False


def require_free(path: Path) -> None:
    """Refuse to write a plan over a file that is none; raises PlanFileError."""
    require_replaceable(path, Plan.load, "plan")


def require_replaceable(path: Path, load: Callable[[Path], object], what: str) -> None:
    """Refuse to write over a file that is something else.

    load      reads what may be replaced
    raises    an error of the class that `load` raises
    """
    if not path.exists():
        return
    try:
        load(path)
    except TloraError as error:
        raise type(error)(
            f"a file that is no {what} would be overwritten",
            file=path,
            help="choose another path with -o, or move the file away",
        ) from error


class BudgetPrice(NamedTuple):
    """Memory that a recompute budget keeps, and time that it costs.

    kept_bytes   of a token, in a layer, mean over the layers; not their inputs
    again        share of the forward of layers that is computed again
    """

    kept_bytes: float
    again: float


class Plan(BaseModel):
    """Plan of a model on a mesh.

    planner             name of the planner that made it
    mesh                how many processes stand along each dimension
    model               fingerprint of the base and of every job's sites (see model_fingerprint)
    cuts                where a new stage begins, as places in `SuperModel.layer_order()`; n stages
                        have n - 1 cuts, and stage s runs on pipeline rank s % pp
    schedule            the pipeline schedule that the planner chose
    micro_batches       forwards of one replica in a round, at least
    shard_base          the frozen base is sharded over dp and gathered layer by layer
    keep_gathered       gathered weights are kept from a layer's forward to its backward, in a
                        pipeline to the end of a round
    recompute           layers keep their inputs only, and are computed again in the backward
    recompute_budget    with recompute, share of the bytes within layers that is kept all the same
    nano_batches        parts of a micro-batch whose communication and compute overlap
    estimate            what the planner expects of it
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    planner: str
    mesh: MeshShape = MeshShape()
    model: str = ""
    cuts: tuple[int, ...] = ()
    schedule: Schedule = "1f1b"
    micro_batches: PositiveInt = 1
    shard_base: bool = False
    keep_gathered: bool = False
    recompute: bool = False
    recompute_budget: float = Field(default=0.0, ge=0, lt=1)
    nano_batches: PositiveInt = 1
    estimate: Estimate | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_was_taken_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        schedule = given.get("schedule")
        if isinstance(schedule, str) and schedule in TAKEN_OUT:
            raise ValueError(TAKEN_OUT[schedule])
        # Plans written before say `false`.
        if given.get("sequence_parallel"):
            raise ValueError(TAKEN_OUT["sequence_parallel"])
        return {name: value for name, value in given.items() if name != "sequence_parallel"}

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if list(self.cuts) != sorted(set(self.cuts)) or (self.cuts and self.cuts[0] < 1):
            raise ValueError("cuts must grow, and begin behind the first layer")
        if self.stages % self.mesh.pp:
            raise ValueError(f"{self.stages} stages do not divide over pp={self.mesh.pp}")
        if self.mesh.pp == 1 and self.stages > 1:
            raise ValueError(f"{self.stages} stages need pp > 1")
        if self.schedule != "interleaved" and self.stages != self.mesh.pp:
            raise ValueError("only the interleaved schedule has several stages a process")
        if self.recompute_budget and not self.recompute:
            raise ValueError("recompute_budget needs recompute")
        if self.recompute_budget and self.nano_batches > 1:
            raise ValueError("nano-batches cut layers, which recompute_budget needs whole")
        return self

    @property
    def stages(self) -> int:
        """Number of stages that the layers are cut into."""
        return len(self.cuts) + 1

    @property
    def budget_key(self) -> tuple[float, int]:
        """Key of its budget's price: the budget, and processes that cut matrices."""
        return self.recompute_budget, self.mesh.tp

    @property
    def recomputed(self) -> float:
        """Share of the bytes within layers that is computed again in the backward."""
        return 1 - self.recompute_budget if self.recompute else 0.0

    @property
    def parts(self) -> int:
        """Least number of rows that each micro-batch of the jobs is cut into."""
        return self.mesh.dp * self.micro_batches

    @property
    def captures(self) -> bool:
        """Whether rows of up to CAPTURED_TOKENS times tp may run as CUDA graphs (`cuda_graphs`).

        Cuts into nano-batches are decided by Python in every round. A sharded base runs so where
        its weights are copied from peers, but for stages of a pipeline.
        """
        if self.mesh.pp > 1 and self.shard_base and self.mesh.dp > 1:
            return False
        return self.nano_batches == 1

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON, over another plan if one is there; raises PlanFileError."""
        require_free(Path(path))
        help = "choose another path"
        with errors_as(PlanFileError, "a plan cannot be written", file=path, help=help):
            write_output(Path(path), (self.model_dump_json(indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote; raises PlanFileError."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except (OSError, ValidationError) as error:
            raise PlanFileError(
                "this file is no plan",
                file=path,
                found="\n".join(mistakes(error, "plan")),
                help="write one with `tlora-fx plan`, or from Python with Plan.save",
            ) from error

    def require_model(self, model: SuperModel) -> None:
        """Refuse a model that the plan was not made for; raises PlanNotForModel."""
        found = model_fingerprint(model)
        if self.model and self.model != found:
            raise PlanNotForModel(
                "the plan was made for another model",
                plan=f"{self.planner} on {self.mesh}",
                expected=self.model,
                found=found,
                help="the base, or a job's sites and ranks, have changed: make the plan again",
            )


def model_fingerprint(model: SuperModel) -> str:
    """A hash of the base and of every job's sites: what a plan's cuts and costs rest on."""
    group = model.group
    sites = [
        [[s.path, s.rank, s.scaling, s.dropout, s.kind] for _, s in sorted(job.sites.items())]
        for job in group.jobs
    ]
    text = json.dumps([model.backbone.fingerprint(), group.form, group.compute, sites])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def mistakes(error: OSError | ValidationError, whole: str) -> list[str]:
    """Mistakes in a file, a line each; `whole` names what has no place in it."""
    if isinstance(error, OSError):
        return [str(error)]
    pairs = ((".".join(map(str, row["loc"])), row["msg"]) for row in error.errors())
    return [f"{place or whole}: {message}" for place, message in pairs]
