"""The LoRA fields that are honoured, and why the others are not."""

from __future__ import annotations

from typing import Any

import pytest

from tlora_fx.config.fields import IDENTITY, REFUSED, LoraSpec, peft_defaults
from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import adapter_mapping
from tlora_fx.errors import JobError


def refusal(**lora: Any) -> str:
    """What is said of a job with these LoRA fields."""
    with pytest.raises(JobError) as caught:
        Job.model_validate(
            {"name": "a", "base": {"model": "m"}, "lora": lora, "data": {"path": "x"}}
        )
    return str(caught.value)


def test_every_field_of_peft_is_honoured_or_refused() -> None:
    """No field of the installed LoraConfig is unknown, and none is in two tables."""
    tables = [*LoraSpec.model_fields, *REFUSED, *IDENTITY]

    assert sorted(tables) == sorted(peft_defaults())


def test_honoured_fields_have_the_defaults_of_peft() -> None:
    """A field that is left out means what it means in PEFT."""
    ours = {name: field.default for name, field in LoraSpec.model_fields.items()}

    assert ours == {name: peft_defaults()[name] for name in ours}


@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"runtime_config"}))
def test_a_refused_field_may_have_its_default(name: str) -> None:
    """A configuration that PEFT wrote in full is not refused for what it leaves alone."""
    assert REFUSED[name].default == peft_defaults()[name]
    assert adapter_mapping({name: REFUSED[name].default, "r": 4}) == {"r": 4}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_field_has_its_reason(name: str) -> None:
    """Each field that is set and not honoured is refused by name."""
    text = refusal(**{name: ["set"]})

    assert f"'{name}' is refused: {REFUSED[name].reason}" in text


@pytest.mark.parametrize("name", sorted(IDENTITY))
def test_a_job_does_not_set_what_peft_writes(name: str) -> None:
    """Fields that say what an adapter belongs to are refused with the right place."""
    assert IDENTITY[name] in refusal(**{name: "OTHER"})


@pytest.mark.parametrize("start", ["loftq", "lora_ga", "mica"])
def test_a_start_that_is_not_supported_is_refused_by_name(start: str) -> None:
    """Each start of PEFT that cannot be had has a reason."""
    assert f"init_lora_weights '{start}' is refused: " in refusal(init_lora_weights=start)


@pytest.mark.parametrize(
    "start", [True, False, "gaussian", "pissa", "pissa_niter_16", "olora", "orthogonal", "corda"]
)
def test_starts_are_honoured(start: bool | str) -> None:
    """Those that PEFT draws, and those that it computes from the base."""
    assert adapter_mapping({"init_lora_weights": start}) == {"init_lora_weights": start}


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"r": 0}, "1 <= n"),
        ({"r": 2.5}, "1 <= n"),
        ({"lora_alpha": 0}, "0 < n"),
        ({"lora_dropout": 1.0}, "0 <= n < 1"),
        ({"bias": "some"}, "one of none, all, lora_only"),
        ({"use_dora": "yes"}, "true or false"),
        ({"target_modules": []}, "'target_modules' is empty"),
        ({"target_modules": [1]}, "text or a list of texts"),
        ({"modules_to_save": "head"}, "a list of texts"),
        ({"rank_pattern": {"q": 0}}, "greater than or equal to 1"),
        ({"layers_to_transform": [-1]}, "a layer number from 0"),
        ({"layers_to_transform": 1, "target_modules": "x"}, "'target_modules' as a list"),
        ({"layers_pattern": "h"}, "needs 'layers_to_transform'"),
        ({"lora_bias": True, "use_dora": True}, "exclude each other"),
        ({"lora_bias": True, "init_lora_weights": "gaussian"}, "true or false"),
        ({"target_parameters": ["e.up"], "lora_dropout": 0.1}, "'lora_dropout' exclude each other"),
        ({"target_parameters": ["e.up"], "use_dora": True}, "'use_dora' exclude each other"),
        ({"target_parameters": ["e.up"], "init_lora_weights": "pissa"}, "'pissa' exclude each"),
    ],
)
def test_a_wrong_lora_value_is_told(lora: dict[str, Any], said: str) -> None:
    """Ranges and combinations are checked before PEFT is imported."""
    assert said in refusal(**lora)


def test_alpha_stays_a_whole_number() -> None:
    """What is written into adapter_config.json is what the user wrote."""
    mapping = adapter_mapping({"lora_alpha": 32, "alpha_pattern": {"q": 1.5}})

    assert repr(mapping) == "{'alpha_pattern': {'q': 1.5}, 'lora_alpha': 32}"
