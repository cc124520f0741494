"""Two jobs through two tasks on a small base in float64, and samples that are drawn for them."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from tlora_fx_sd_lora.tasks import next_task

import tlora_fx
from tlora_fx.runtime.adapters.files import adapter_tensors
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample

PREFIX = "base_model.model."
STEPS, BATCH, WORDS = 4, 2, 53
RATE, DECAY, MAX_NORM = 1e-2, 0.1, 0.5
#: Ranks in each of the two tasks, and modules.
JOBS = {"left": ((4, 3), ["q_proj", "down_proj"]), "right": ((2, 2), ["q_proj", "v_proj"])}


def samples_of(job, task):
    """Samples for all steps of a task, as (ids, labels)."""
    draw = random.Random(f"{job} {task}")
    samples = []
    for _ in range(STEPS * BATCH):
        ids = tuple(draw.randrange(1, WORDS) for _ in range(draw.randint(4, 9)))
        prompt = draw.randint(0, len(ids) - 2)
        samples.append((ids, (-100,) * prompt + ids[prompt:]))
    return samples


def batches_of(job, task):
    """The samples of each step."""
    samples = samples_of(job, task)
    return [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)]


def job_of(base, name, task, adapter=None):
    """A job in one of its tasks."""
    ranks, modules = JOBS[name]
    own = {"peft_type": "SDLORA", "r": ranks[0], "target_modules": modules}
    source = {"lora": own} if adapter is None else {"adapter": adapter}
    return tlora_fx.Job(
        name=name, base=base, data={"path": "unused.jsonl"}, seed=len(name) + task,
        per_device_train_batch_size=BATCH, max_steps=STEPS, shuffle=False, save_steps=STEPS,
        learning_rate=RATE, weight_decay=DECAY, max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant", **source,
    )  # fmt: skip


@dataclass
class Trained:
    """What a group did in a task: adapters and losses by job."""

    folder: Path
    starts: dict
    ends: dict
    losses: dict


def train(jobs, task, folder):
    """Train jobs in one Shared Super-Model."""
    starts = {}

    class Noting(tlora_fx.Trainer):
        """Notes what each job starts from."""

        def prepare(self, data):
            """As every trainer does."""
            super().prepare(data)
            starts.update((run.job.name, adapter_tensors(run.parameters)) for run in self.runs)

    data = {
        job.name: JobData(job, [Sample(*each) for each in samples_of(job.name, task)], DataReport())
        for job in jobs
    }
    model = tlora_fx.compile(jobs)
    Noting(model, output=folder, device="cpu", data=data).run()
    ends = {job.name: adapter_tensors(model.job_parameters(job.name)) for job in jobs}
    return Trained(folder, starts, ends, {job.name: losses_in(folder / job.name) for job in jobs})


def losses_in(folder):
    """A job's losses as its metrics have them."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def starts_of(tensors):
    """A and B of this task by the path of their linear."""
    downs = [name for name in tensors if name.endswith(".sdlora_A")]
    return {
        name.removeprefix(PREFIX).removesuffix(".sdlora_A"): (
            tensors[name],
            tensors[name.removesuffix("A") + "B"],
        )
        for name in downs
    }


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A Llama of two layers in float64."""
    folder = tmp_path_factory.mktemp("base")
    transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2,
    ).save_pretrained(folder)  # fmt: skip
    return tlora_fx.BaseSpec(config=folder, dtype="float64", seed=7)


@pytest.fixture(scope="session")
def sequence(base, tmp_path_factory):
    """Both tasks of both jobs, fused: what each did, and the folders that the second began from."""
    folder = tmp_path_factory.mktemp("sequence")
    first = train([job_of(base, name, 0) for name in JOBS], 0, folder / "first")
    between = {
        name: next_task(folder / "first" / name, folder / "between" / name, r=ranks[1], seed=9)
        for name, (ranks, _) in JOBS.items()
    }
    jobs = [job_of(base, name, 1, between[name]) for name in JOBS]
    return first, between, train(jobs, 1, folder / "second")


@pytest.fixture(scope="session", autouse=True)
def _repeatable():
    """One thread, as sums in another order round otherwise."""
    torch.set_num_threads(1)
