"""A base trained by tlora-fx, and by plain PEFT and torch.optim; a verdict on the two.

What trains alone shares no code with tlora_fx from the samples to the loss: each sequence runs by
itself, unpadded, and its cross entropy is written out here.
"""

from __future__ import annotations

import copy
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.errors import TloraError
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.trainer import Trainer

VOCABULARY = 17
IDS = range(VOCABULARY)
RATE = 0.3
#: Lengths of each job's sequences, step by step: short ones first, the longest last.
STEPS: tuple[dict[str, tuple[int, ...]], ...] = (
    {"one": (2, 5), "two": (17,)},
    {"one": (9, 40), "two": (9,)},
    {"one": (5, 70), "two": (33,)},
)
RANKS = {"one": 2, "two": 4}
#: Largest relative difference of a loss, and of what a step changes in an adapter.
LOSS, UPDATE = 1e-9, 1e-7

#: Errors that tell of a mistake of tlora-fx, not of the base: as bad as a traceback.
DEFECTS = {"T0208", "T0212", "T0216", "T0217", "T0218"}

Form = Literal["auto", "packed", "batch"]
Outcome = Literal["equal", "refused", "wrong", "crashed"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a base in one form.

    difference   the largest relative one of any loss or update
    words        the error's code and first line
    """

    outcome: Outcome
    form: str
    difference: float = 0.0
    words: str = ""

    @property
    def silent(self) -> bool:
        """Whether a user would have got wrong adapters, or a traceback that is none of ours."""
        return self.outcome in {"wrong", "crashed"}

    def __str__(self) -> str:
        told = f"{self.difference:.1e}" if self.outcome in {"equal", "wrong"} else self.words
        return f"{self.form:<6} {self.outcome:<7} {told}"


@dataclass
class Course:
    """One job's losses, and its adapter before the first step and after each."""

    losses: list[float] = field(default_factory=list)
    adapters: list[dict[str, Tensor]] = field(default_factory=list)

    def keep(self, parameters: dict[str, nn.Parameter]) -> None:
        """Note the adapter as it is now."""
        self.adapters.append({name: p.detach().clone() for name, p in parameters.items()})


def judge(make: Callable[[], nn.Module], form: Form = "auto", wide: bool = True) -> Verdict:
    """Train two jobs on a base, together by tlora-fx and alone by PEFT, and compare.

    make   builds the same base each time, in float64
    wide   whether the base computes in float64 throughout; False: transformers' float32 insides
    """
    module = make()
    targets = targets_of(module)
    try:
        jobs = jobs_on(BaseSpec(module=module, dtype="float64", attention=form), targets)
        fused, packed, _ = train_fused(jobs)
    except Exception as error:  # noqa: BLE001  (whatever is no error of ours is what is looked for)
        return refusal(error, form)
    alone = {name: train_alone(make(), name, targets) for name in RANKS}
    return compared(fused, alone, packed, wide)


def refusal(error: Exception, form: str) -> Verdict:
    """What becomes of a base by an error."""
    if not isinstance(error, TloraError):
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        return Verdict("crashed", form, words=words)
    told = [error.what, *(f"{name}: {fact}" for name, fact in error.facts.items())]
    words = f"{error.code} {'; '.join(told)}".replace("\n", " ")[:200]
    return Verdict("crashed" if error.code in DEFECTS else "refused", form, words=words)


def compared(
    fused: dict[str, Course], alone: dict[str, Course], form: str, wide: bool = True
) -> Verdict:
    """Whether each job's courses are equal."""
    for name in RANKS:
        # What no loss reads is not in the fused model: it must not change alone.
        assert alone[name].adapters[0].keys() >= fused[name].adapters[0].keys()
    loss = max(loss_difference(fused[name], alone[name]) for name in RANKS)
    update = max(update_difference(fused[name], alone[name]) for name in RANKS)
    room = 1.0 if wide else 1e3
    right = loss <= LOSS * room and update <= UPDATE * room
    return Verdict("equal" if right else "wrong", form, max(loss, update))


def loss_difference(found: Course, expected: Course) -> float:
    """The largest relative difference of a step's loss; infinite where steps are missing."""
    if len(found.losses) != len(expected.losses):
        return float("inf")
    pairs = zip(found.losses, expected.losses, strict=True)
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return max(d if d == d else float("inf") for d in differences)


def update_difference(found: Course, expected: Course) -> float:
    """The largest difference of what a step changed in a tensor.

    Relative to what alone changed in it, or to a thousandth of the largest change of that step.
    """
    if len(found.adapters) != len(expected.adapters):
        return float("inf")
    largest = 0.0
    for step in range(1, len(expected.adapters)):
        mine, theirs = _update(found, step), _update(expected, step)
        floor = max(float(change.norm()) for change in theirs.values()) * 1e-3
        for name, change in theirs.items():
            scale = max(float(change.norm()), floor, 1e-300)
            difference = float((mine.get(name, 0) - change).norm()) / scale
            largest = max(largest, difference if difference == difference else float("inf"))
    return largest


def _update(course: Course, step: int) -> dict[str, Tensor]:
    before, after = course.adapters[step - 1], course.adapters[step]
    return {name: after[name] - before[name] for name in after}


def targets_of(module: nn.Module) -> list[str]:
    """What jobs adapt: every linear but the head, by its path."""
    linears = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    return [name for name in linears if name not in {"head", "lm_head"}]


def sequences(name: str, step: int, ids: range) -> list[list[int]]:
    """The ids of a job's sequences of a step; no two alike."""
    draw = random.Random(f"{name} {step}")
    return [[draw.choice(ids) for _ in range(count)] for count in STEPS[step][name]]


def start(name: str, parameter: Tensor, job: str) -> Tensor:
    """Random values of an adapter's tensor, B too, by the job and the tensor's name."""
    draw = torch.Generator().manual_seed(random.Random(f"{job} {name}").getrandbits(40))
    return torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.3


class _Recorder(TrainerCallback):
    """Gives adapters random values when training begins, and notes each step."""

    def __init__(self) -> None:
        self.courses = {name: Course() for name in RANKS}
        self.runs: dict[str, Any] = {}

    def started(self, runs: Sequence[Any]) -> None:
        self.runs = {run.job.name: run for run in runs}
        for name, run in self.runs.items():
            for key, parameter in run.parameters.items():
                parameter.data.copy_(start(key, parameter, name))
            self.courses[name].keep(run.parameters)

    def stepped(self, report: Any) -> None:
        self.courses[report.job].losses.append(report.loss)
        self.courses[report.job].keep(self.runs[report.job].parameters)


def jobs_on(base: BaseSpec, targets: Any, **fields: Any) -> list[Job]:
    """Two jobs of unlike ranks, scalings, lengths and batches on a base; both have the fields."""
    common: dict[str, Any] = {
        "data": {"path": "unused.jsonl"}, "max_steps": len(STEPS), "shuffle": False,
        "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant",
        "max_grad_norm": None, "save_steps": 1000, **fields,
    }  # fmt: skip
    return [
        Job(
            name=name, base=base, per_device_train_batch_size=len(STEPS[0][name]),
            lora={"r": rank, "lora_alpha": 3, "target_modules": targets}, **common,
        )
        for name, rank in RANKS.items()
    ]  # fmt: skip


def train_fused(jobs: Sequence[Job], ids: range = IDS) -> tuple[dict[str, Course], str, float]:
    """Train the jobs together as a user would.

    returns   their courses, the form of the rows, and the process's CPU seconds when compiled
    """
    data = {
        job.name: JobData(
            job,
            [
                Sample(tuple(sequence), tuple(sequence))
                for step in range(len(STEPS))
                for sequence in sequences(job.name, step, ids)
            ],
            DataReport(),
        )
        for job in jobs
    }
    recorder = _Recorder()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        model = compile(list(jobs))
        compiled = time.process_time()
        output = Path(folder) / "run"
        Trainer(model, output=output, device="cpu", data=data, callback=recorder).run()
    return recorder.courses, model.group.form, compiled


def train_alone(module: nn.Module, name: str, targets: Any, ids: range = IDS) -> Course:
    """Train one job by PEFT and torch.optim, each sequence alone."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANKS[name], lora_alpha=3, target_modules=targets)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        model: Any = get_peft_model(copy.deepcopy(module), config)
    model.train()
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    for key, parameter in trained.items():
        parameter.data.copy_(start(key, parameter, name))
    optimizer = torch.optim.SGD(trained.values(), lr=RATE)
    course = Course()
    course.keep(trained)
    for step in range(len(STEPS)):
        batch = sequences(name, step, ids)
        count = sum(len(sequence) - 1 for sequence in batch)
        total = 0.0
        for sequence in batch:
            loss: Any = cross_entropy(model, sequence) / count
            loss.backward()
            total += float(loss.detach())
        course.losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
        course.keep(trained)
    return course


def cross_entropy(model: Any, sequence: Sequence[int]) -> Tensor:
    """The sum of what each token's logits cost for the next token."""
    ids = torch.tensor([sequence])
    out = model(ids)
    logits = out["logits"] if type(out) is dict else getattr(out, "logits", out)
    logits = logits[0, :-1]
    right = logits.gather(1, ids[0, 1:, None])[:, 0]
    total: Tensor = (logits.logsumexp(1) - right).sum()
    return total
