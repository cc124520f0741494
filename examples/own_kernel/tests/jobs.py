"""Jobs on a small base in float64, trained with and without the operator."""

import random

import tlora_fx
from tlora_fx.compiler import resolve_pipeline
from tlora_fx.runtime.adapters.files import adapter_tensors
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample

ADDED = "own-lora@after:lower-adapters"
STEPS, BATCH = 3, 2


def job_of(base, name, rank, **fields):
    """A job of three steps."""
    lora = {"r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    return tlora_fx.Job(
        name=name, base=base, data={"path": "unused.jsonl"}, lora=lora,
        per_device_train_batch_size=BATCH, max_steps=STEPS, lr_scheduler_type="constant",
        **{"learning_rate": 1e-2, **fields},
    )  # fmt: skip


def samples_of(job):
    """Tokens for all steps of a job, drawn by its name."""
    draw = random.Random(job.name)
    lines = [
        tuple(draw.randrange(2, 60) for _ in range(draw.randint(4, 9)))
        for _ in range(STEPS * BATCH)
    ]
    return JobData(job, [Sample(ids, ids) for ids in lines], DataReport())


def train(jobs, folder, added=(ADDED,)):
    """Train jobs together; the adapter of each, by its name."""
    model = tlora_fx.compile(jobs, pipeline=resolve_pipeline(added=added))
    data = {job.name: samples_of(job) for job in jobs}
    tlora_fx.Trainer(model, output=folder, device="cpu", data=data).run()
    return {job.name: adapter_tensors(model.job_parameters(job.name)) for job in jobs}
