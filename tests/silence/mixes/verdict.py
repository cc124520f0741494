"""Train a mix, and compare each of its jobs with the same job alone."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
from torch import Tensor

from tests.parallel.processes import run_processes
from tests.silence.mixes.alone import Alone, train_alone
from tests.silence.mixes.drawn import COMING, FAMILIES, PLANS, Mix, draw, wide
from tests.silence.oracle import Verdict, refusal
from tlora_fx.compiler import compile
from tlora_fx.config.job import Job
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import TloraError
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.model.backbone import Backbone
from tlora_fx.planners.protocol import find_planner
from tlora_fx.runtime.adapters.files import (
    adapter_tensors,
    base_tensors,
    plain_base,
    start_adapters,
)
from tlora_fx.runtime.callbacks import TrainerCallback
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.runtime.trainer import Trainer

#: Largest relative difference of a loss, and of a tensor to what training changed in the adapter.
LOSS, UPDATE = 1e-9, 1e-7
#: Why jobs did not come; None where the run had ended before they asked.
Refusals = Mapping[str, TloraError | None]


class Watch(TrainerCallback):
    """Asks for what a script says, and kills its process at an event, if at all.

    kill   the number of the event: a step, or a file that takes its name
    """

    def __init__(self, mix: Mix, kill: int = 0) -> None:
        self.mix, self.script, self.kill = mix, list(mix.script), kill
        self.trainer: Any = None
        self.refused: dict[str, TloraError] = {}

    def started(self, runs: Any) -> None:
        if self.kill:
            sys.addaudithook(lambda event, _: self.count() if event == "os.rename" else None)

    def stepped(self, report: Any) -> None:
        self.count()
        while self.script and self.script[0][0] <= self.trainer.rounds:
            _, do, name = self.script.pop(0)
            arguments = (self.mix.jobs[name], self.mix.data[name]) if do == "admit" else (name,)
            try:
                getattr(self.trainer, do)(*arguments)
            except TloraError as error:
                self.refused[name] = error

    def count(self) -> None:
        """One event less until the process dies."""
        self.kill -= 1
        if self.kill == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def judge(seed: int, folder: Path) -> tuple[Mix, dict[str, Verdict]]:
    """The mix of a seed, and a verdict on each of its jobs."""
    mix, output = draw(seed, folder), folder / f"run-{seed}"
    with wide(mix.family), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = compile(list(mix.jobs.values()))
            model.materialize(base_tensors(model.backbone), "cpu")
            start_adapters(model)
            starts = {
                name: {k: t.clone() for k, t in adapter_tensors(model.job_parameters(name)).items()}
                for name in mix.jobs
            }
            refused = trained(mix, output)
        except Exception as error:  # noqa: BLE001  (whatever is no error of ours is looked for)
            return mix, dict.fromkeys(mix.jobs, refusal(error, mix.way))
        verdicts = {}
        for name in mix.jobs:
            if (output / name / "metrics.jsonl").exists():
                verdicts[name] = beside_alone(
                    mix, name, output / name, model.backbone, starts[name]
                )
            elif (error := refused[name]) is not None:
                verdicts[name] = refusal(error, mix.way)
    return mix, verdicts


def beside_alone(
    mix: Mix, name: str, folder: Path, backbone: Backbone, start: Mapping[str, Tensor]
) -> Verdict:
    """Compare what a job left in its folder with the job alone, for as many steps."""
    job, rows = mix.jobs[name], read_metrics(folder / "metrics.jsonl")
    steps = sum("loss" in row for row in rows)
    alone = train_alone(job, plain_base(backbone), mix.data[name], start, steps)
    difference = of_losses(job, rows, alone)
    status = json.loads((folder / "status.json").read_text())["status"]
    assert status == "done" or mix.way == COMING, status
    assert steps == job.max_steps or mix.way == COMING
    if status != "paused":
        difference = max(difference, of_adapters(folder, job, plain_base(backbone), alone))
        changed = any(not tensor.equal(alone.start[key]) for key, tensor in alone.end.items())
        assert changed or not any(row.get("learning_rate") for row in rows)
    return Verdict("equal" if difference <= 1 else "wrong", mix.way, difference)


def trained(mix: Mix, output: Path) -> Refusals:
    """Train a mix in its way."""
    if mix.way in PLANS:
        failed = run_processes(2, train_as_one_of_two, mix.seed, output)[0]
        if failed is not None:
            raise failed
        return {}
    if mix.way == "killed":
        in_a_fork(lambda: train(mix, output, kill=mix.kill))
        in_a_fork(lambda: train(mix, output, resume=output.exists()))
        return {}
    return train(mix, output)


def train(mix: Mix, output: Path, kill: int = 0, **options: Any) -> Refusals:
    """Train a mix in this process."""
    first = list(mix.jobs.values())[: mix.first]
    slots = OpenSlots(sites=FAMILIES[mix.family].targets, rows=64, jobs=4, rank=16)
    model = compile(first, open=slots if mix.way == COMING else None)
    if mix.way in PLANS:
        options["plan"] = find_planner(mix.way).plan(model, MeshShape.parse(PLANS[mix.way]))
    watch = Watch(mix, kill)
    watch.trainer = Trainer(
        model, output=output, device="cpu", data=mix.data, callback=watch, **options
    )
    watch.trainer.run()
    unasked = {name: None for _, do, name in watch.script if do == "admit"}
    return unasked | watch.refused


def train_as_one_of_two(seed: int, output: Path) -> TloraError | None:
    """In a process of a group; the error that refuses the mix."""
    mix = draw(seed, output.parent)
    with wide(mix.family), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            train(mix, output)
        except TloraError as error:
            return error
    return None


def in_a_fork(function: Any) -> None:
    """Call a function in a process of its own, which may be killed."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:  # noqa: BLE001  (told on stderr)
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a process ended with {code}")


def of_losses(job: Job, rows: list[Any], alone: Alone) -> float:
    """The largest difference of a loss, of steps or of evaluations, in units of LOSS."""
    found = [row["loss"] for row in rows if "loss" in row]
    pairs = [*zip(found, alone.losses, strict=True)]
    evaluated = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    if job.eval_steps is not None:
        expected = set(range(job.eval_steps, len(found) + 1, job.eval_steps))
        assert expected <= evaluated.keys()
        pairs += [(loss, alone.evaluations[step - 1]) for step, loss in evaluated.items()]
    return largest(abs(a - b) / abs(b) / LOSS for a, b in pairs)


def of_adapters(folder: Path, job: Job, base: Any, alone: Alone) -> float:
    """The largest difference of what is in the folder, in units of UPDATE.

    Of tensors, relative to what training changed in them or to a thousandth of the largest change;
    of logits by what PEFT loads, relative to what the adapter changes in them, or a millionth.
    """
    found = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    if job.changes_base:
        found = {name: first_half(name, tensor) for name, tensor in found.items()}
    assert found.keys() == alone.end.keys()
    changes = {name: float((alone.end[name] - alone.start[name]).norm()) for name in found}
    floor = max(changes.values()) * 1e-3
    tensors = [
        float((tensor - alone.end[name]).norm()) / (max(changes[name], floor) or 1.0)
        for name, tensor in found.items()
    ]
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        plain = base.eval()(ids).logits
        loaded = peft.PeftModel.from_pretrained(base, folder).double().eval()(ids).logits
        expected = alone.model.eval()(ids).logits
    # An AdaLoRA may end with every rank taken away: then it changes a rounding.
    changed = max(float((plain - expected).norm()), 1e-6 * float(plain.norm()))
    logits = float((loaded - expected).norm()) / changed
    return largest([value / UPDATE for value in (*tensors, logits)])


def first_half(name: str, tensor: Tensor) -> Tensor:
    """What a job trains of an adapter of twice its rank, whose other half takes the start away."""
    if ".lora_A." in name:
        return tensor[: len(tensor) // 2]
    return tensor[:, : tensor.shape[1] // 2] if ".lora_B." in name else tensor


def largest(differences: Any) -> float:
    """The largest, infinite where one is no number."""
    return max((each if each == each else float("inf") for each in differences), default=0.0)
