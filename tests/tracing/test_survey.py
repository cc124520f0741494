"""What docs/models.md says of architectures: its table is survey.json, which is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.models import (
    OLD_TRANSFORMERS,
    error_of,
    job,
    peft_model,
    ready,
    run_alone,
    run_fused,
    tokens,
)
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import CompileError
from tlora_fx.testing.equivalence import SIZES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
#: By name: type and config, then form and worst difference, or words of the refusal's first line.
SURVEY: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("survey.json").read_text())
# Differences are of roundings, in float32 wherever transformers computes so in every model dtype.
SLACK, LEAST = 10, 1e-9


def base_of(folder: Path, entry: dict[str, Any]) -> BaseSpec:
    """A small base of an architecture, without dropout."""
    config = AutoConfig.for_model(entry["model_type"], **{**SIZES, **entry.get("config", {})})
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    config.save_pretrained(folder)
    return BaseSpec(config=folder, dtype="float64")


def two_jobs(base: BaseSpec, targets: str = "all-linear"):
    """Jobs of two ranks, on all linears where nothing else is said."""
    return [job(name, base, r=r, target_modules=targets) for name, r in (("a", 4), ("b", 2))]


def worst_difference(model) -> float:
    """Of losses and gradients, relative to what each job gets alone from PEFT."""
    parts = [tokens([9, 7], seed=0), tokens([6], seed=1)]
    fused, worst = run_fused(model, parts), 0.0
    for own, part in zip(model.jobs, parts, strict=True):
        alone, together = run_alone(peft_model(model, own.name), part), fused[own.name]
        largest = max(float(gradient.norm()) for gradient in alone.gradients.values())
        worst = max(worst, float((together.loss - alone.loss).abs() / alone.loss.abs()))
        for name, gradient in alone.gradients.items():
            floor = max(float(gradient.norm()), largest * 1e-6)
            worst = max(worst, float((together.gradients[name] - gradient).norm()) / floor)
    return worst


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="measured with a later transformers")
@pytest.mark.slow
@pytest.mark.parametrize("name", SURVEY)
def test_an_architecture_trains_or_is_refused_as_the_page_says(tmp_path, name):
    """In the same form, as near to PEFT; or with the same words."""
    entry = SURVEY[name]
    jobs = two_jobs(base_of(tmp_path, entry), entry.get("targets", "all-linear"))
    if "refused" in entry:
        assert entry["refused"] in error_of(lambda: compile(jobs), CompileError).splitlines()[0]
        return
    model = ready(jobs)

    assert model.group.form == entry["form"]
    assert worst_difference(model) <= max(LEAST, SLACK * entry["worst"])


def test_the_page_has_the_table_of_the_survey():
    """One line an architecture that trains, and one line a reason of refusals."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Architectures\n")[2]
    table = section[section.index("| architecture ") :].partition("\n\n")[0]
    head, dashes, *rows = table.splitlines()
    trained = [row(name, entry) for name, entry in SURVEY.items() if "form" in entry]
    reasons = dict.fromkeys(entry["refused"] for entry in SURVEY.values() if "refused" in entry)

    assert rows == [*trained, *map(refused_row, reasons)], (head, dashes)


def row(name: str, entry: dict[str, Any]) -> str:
    """The table's line of an architecture that trains."""
    cells = [name, entry["form"], f"{entry['worst']:.0e}"]
    return f"| {' | '.join([*cells, entry['why']] if 'why' in entry else cells)} |"


def refused_row(reason: str) -> str:
    """The table's line of the architectures that are refused for one reason."""
    names = [name for name, entry in SURVEY.items() if entry.get("refused") == reason]
    return f"| {', '.join(names)} | refused | | {reason} |"
