"""The model card of an adapter: the README.md that the Hub shows, and people read in the folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tlora_fx.config.base_task import read_base_config, sees_images
from tlora_fx.config.job import BaseSpec, DataSpec, Job
from tlora_fx.host.version import __version__
from tlora_fx.runtime.data.samples import JobData

LIBRARIES = ("peft", "transformers", "torch")


def model_card(
    job: Job,
    data: JobData,
    base: str | None,
    *,
    step: int,
    tokens: int,
    loss: float,
    evaluation: Mapping[str, Any],
) -> str:
    """The card, in Markdown with the Hub's metadata.

    base         hub id or folder of the base; None for one that has neither
    step         optimizer steps done
    tokens       tokens that were trained on
    loss         of the last step, or NaN
    evaluation   as of `JobEvaluation.summary`
    """
    # The Hub takes ids alone.
    hub_id = base if base is not None and not Path(base).exists() else None
    metadata = {
        "library_name": "peft",
        "pipeline_tag": "text-classification" if job.base.is_classifier else "text-generation",
        "tags": ["lora", "tlora-fx"],
    } | ({"base_model": hub_id} if hub_id else {})
    header = yaml.safe_dump(metadata, sort_keys=False).strip()
    progress = {"steps": f"{step} of {data.steps}", "tokens seen": f"{tokens}"}
    if math.isfinite(loss):
        progress["last training loss"] = f"{loss:.4f}"
    what = f"A LoRA adapter of `{base or 'an nn.Module'}`, trained by tlora-fx."
    sections = [
        f"---\n{header}\n---\n\n# {job.name}\n\n{what}",
        _section("Data", _data_rows(job, data)),
        _section("Hyperparameters", _hyperparameters(job)),
        _section("Training", progress),
        _evaluation(evaluation),
        _section("Versions", _versions()),
        "" if base is None else _usage(base, job.base),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


@cache
def _versions() -> dict[str, str]:
    return {"tlora-fx": __version__} | {name: version(name) for name in LIBRARIES}


def _section(title: str, rows: Mapping[str, object]) -> str:
    cells = {
        name: str(value).replace("|", "\\|").replace("\n", " ") for name, value in rows.items()
    }
    lines = [f"| {name} | {cell} |" for name, cell in cells.items()]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines])


def _data_rows(job: Job, data: JobData) -> dict[str, object]:
    rows: dict[str, object] = {
        "trained on": ", ".join(map(_named, job.data.parts)),
        "samples": len(data.samples),
    }
    if data.report.target_tokens:
        rows["trained tokens of an epoch"] = data.report.target_tokens
    if data.evaluation:
        held_out = f"a part of it, {job.eval_split}" if job.eval_split else "other samples"
        rows["evaluated on"] = _named(job.eval_data) if job.eval_data else held_out
        rows["samples evaluated"] = len(data.evaluation)
    return rows


def _named(data: DataSpec) -> str:
    """A file by its name alone: folders of the machine are nobody's business."""
    if data.rows is not None:
        return "rows that were handed over in Python"
    path = Path(data.path)
    return path.name if path.suffix or path.is_absolute() else f"{data.path} ({data.split})"


def _hyperparameters(job: Job) -> dict[str, object]:
    fields = (
        "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "optim",
        "learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps", "warmup_ratio",
        "max_grad_norm", "seed",
    )  # fmt: skip
    return {**job.lora_fields, **{name: getattr(job, name) for name in fields}}


def _evaluation(summary: Mapping[str, Any]) -> str:
    told = summary.get("evaluation")
    if not told:
        return ""
    rows = {name: f"{value:.4g}" for name, value in told["last"].items() if name != "eval_runtime"}
    if told["best_step"] is not None:
        best = f"{told['metric_for_best_model']} {told['best_value']:.4g}"
        rows["best step"] = f"{told['best_step']}: {best}"
    return _section("Evaluation", rows)


def _usage(base: str, spec: BaseSpec) -> str:
    if spec.model is None:
        return f"""## Use

No checkpoint has this base: tlora-fx drew its weights, from config and seed {spec.seed}. What it
trains answers by `tlora-fx generate`, and becomes a model of its own by `tlora-fx merge`."""
    kind, extra = "AutoModelForCausalLM", ""
    if spec.is_classifier:
        kind = "AutoModelForSequenceClassification"
        extra = f", id2label={dict(enumerate(spec.label_names))}"
    elif sees_images(read_base_config(spec) or {}):
        kind = "AutoModelForImageTextToText"
    return f"""## Use

```python
from peft import PeftModel
from transformers import {kind}, AutoTokenizer

base = {kind}.from_pretrained("{base}"{extra})
model = PeftModel.from_pretrained(base, "path/of/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/of/this/folder")
```"""
