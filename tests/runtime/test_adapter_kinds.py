"""The table of adapter kinds in docs/adapters.md against what jobs of each kind do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.groups import make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.errors import JobError
from tlora_fx.runtime.verification.verify import verify

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
STEPS = 3
#: What a loss in float32 may do on another processor.
FLOOR = 1e-6
#: Fields of a job of each kind; those of `lora` stand there.
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"lora": {"use_rslora": True}},
    "rank and alpha by module": {
        "lora": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}}
    },
    "LoRA+": {"loraplus_lr_ratio": 16.0},
    "LoRA-FA": {"optim": "lorafa", "adam_epsilon": 1e-6},
    "gaussian start": {"lora": {"init_lora_weights": "gaussian"}},
    "orthogonal start": {"lora": {"init_lora_weights": "orthogonal"}},
    "PiSSA": {"lora": {"init_lora_weights": "pissa"}},
    "OLoRA": {"lora": {"init_lora_weights": "olora"}},
    "EVA": {"lora": {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}}},
    "CorDA": {"lora": {"init_lora_weights": "corda"}},
    "DoRA": {"lora": {"use_dora": True}},
    "LoRA with a bias": {"lora": {"lora_bias": True}},
    "LoRA on the embedding": {"lora": {"target_modules": ["embed_tokens", "q_proj"]}},
    "a trained copy of the head": {"lora": {"modules_to_save": ["lm_head"]}},
    "single tokens": {"lora": {"trainable_token_indices": [3, 1]}},
    "IA³": {"lora": {"peft_type": "IA3", "feedforward_modules": ["v_proj"]}},
    "LoHa": {"lora": {"peft_type": "LOHA", "r": 4}},
    "LoKr": {"lora": {"peft_type": "LOKR", "r": 4}},
    "OFT": {"lora": {"peft_type": "OFT", "oft_block_size": 8}},
    "AdaLoRA": {
        "lora": {"peft_type": "ADALORA", "init_r": 4, "target_r": 2, "total_step": 3, "tfinal": 1}
    },
    "VeRA": {"lora": {"peft_type": "VERA", "r": 4}},
}
#: What PEFT has and no job may name: the fields that ask for it.
REFUSED: dict[str, dict[str, Any]] = {
    "LoftQ": {"init_lora_weights": "loftq"},
    "LoRA-GA": {"init_lora_weights": "lora_ga"},
    "MiCA": {"init_lora_weights": "mica"},
    "aLoRA": {"alora_invocation_tokens": [1]},
    "QALoRA": {"use_qalora": True},
    "BD-LoRA": {"use_bdlora": True},
    "BOFT": {"peft_type": "BOFT"},
}


def rows(title: str) -> dict[str, list[str]]:
    """The cells of a table of the page by the first one."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (?!-)(.*) \|$", section, flags=re.MULTILINE)[1:]
    return {name: cells for name, *cells in (line.split(" | ") for line in lines)}


def named(kind: str) -> str:
    """A job's name."""
    return re.sub(r"\W+", "-", kind, flags=re.ASCII)


def jobs_of(base: Any) -> list[Any]:
    """A job of each kind."""
    return [
        make_job(base, named(kind), seed=seed, max_steps=STEPS, **fields)
        for seed, (kind, fields) in enumerate(KINDS.items())
    ]


def test_the_page_has_every_kind():
    """No row is left behind, and none is missing."""
    assert list(rows("Trained")) == list(KINDS)
    assert list(rows("Refused")) == list(REFUSED)


@pytest.mark.parametrize("kind", REFUSED)
def test_the_page_has_what_a_refusal_says(kind):
    """Before anything loads, in the words of the page."""
    with pytest.raises(JobError) as told:
        make_job({"model": "m"}, "a", lora=REFUSED[kind])

    assert rows("Refused")[kind] == [told.value.what.removeprefix("Job(lora=...): ")]


@pytest.mark.slow
def test_the_page_has_the_form_and_the_difference_of_each_kind(tmp_path):
    """Forms are those of a compiled group; no difference is far above that of the page."""
    jobs = jobs_of(tiny_base(tmp_path / "base", tie_word_embeddings=False))
    notes = [text for _, text in compile(jobs).group.notes if "runs as it is" in text]
    forms = {
        job.name: "as it is"
        if any(f"'{job.name}'" in text for text in notes)
        else "shared operator"
        for job in jobs
    }
    table = rows("Trained")
    differences = {
        each.job: each for each in verify(jobs, STEPS, device="cpu", data=make_data(jobs))
    }
    for kind in KINDS:
        form, gradient, adapter = table[kind]
        difference = differences[named(kind)]
        assert form == forms[named(kind)]
        assert difference.gradient <= max(10 * float(gradient), FLOOR)
        assert difference.adapter <= max(10 * float(adapter), FLOOR)
