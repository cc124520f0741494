"""What must hold between data and base."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.models import plain
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.errors import DataDoesNotFit
from tlora_fx.model.backbone import load_backbone
from tlora_fx.runtime.checks import check_fits, unusual
from tlora_fx.runtime.data.samples import Sample


@pytest.mark.parametrize(("classes", "fits"), [(9, True), (8, False), (2, False), (None, True)])
def test_a_target_without_a_logit_is_refused_before_training(classes, fits):
    """A model that classifies tokens has two logits a token; torch would say: out of bounds."""
    backbone = load_backbone(BaseSpec(module=plain(), dtype="float64"))
    samples = [Sample((1, 20, 8), (-100, 2, 8))]
    data = {"one": SimpleNamespace(samples=samples, evaluation=())}

    if fits:
        check_fits(backbone, data, classes)
    else:
        with pytest.raises(DataDoesNotFit, match="no logits"):
            check_fits(backbone, data, classes)


@pytest.mark.parametrize(
    ("fields", "warned"),
    [({"warmup_steps": 3}, True), ({"warmup_steps": 2}, False), ({"warmup_ratio": 1.0}, True)],
)
def test_a_warmup_that_no_step_comes_after_is_warned_of(fields, warned):
    """The job would train below its learning rate from the first step to the last."""
    job = Job.model_validate(
        {
            "name": "a",
            "base": {"model": "someone/base"},
            "lora": {"r": 2},
            "data": {"path": "rows.csv"},
        }
        | {"max_steps": 3, **fields}
    )
    data = {"a": SimpleNamespace(steps=3, lengths=[8])}

    texts = [text for text in unusual([job], data, 64) if "of warmup" in text]
    assert bool(texts) is warned
