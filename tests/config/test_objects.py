"""Objects of Python become the fields of a job file, or are refused by the argument's name."""

from __future__ import annotations

import dataclasses
from typing import Any

import datasets
import peft
import pytest
import torch
from peft.tuners.lora.config import CordaConfig

from tlora_fx.config.fields import LoraSpec
from tlora_fx.config.job import BaseSpec, DataSpec, Job
from tlora_fx.config.objects import DATA_SET_KEYS
from tlora_fx.config.other_kinds import peft_config
from tlora_fx.config.validation import words_of_python
from tlora_fx.errors import JobError

ROWS = [{"prompt": "a", "completion": "b"}]


def job(**arguments: Any) -> Job:
    """A job that is right but for `arguments`."""
    return Job("a", **{"base": "m", "lora": 4, "data": "x.jsonl"} | arguments)


def refusal(**arguments: Any) -> str:
    """What is said of a job with `arguments`."""
    with pytest.raises(JobError) as caught:
        job(**arguments)
    return str(caught.value)


#: A value of each field that a job honours, beside PEFT's default.
CHANGED: dict[str, dict[str, Any]] = {
    "r": {"r": 3},
    "lora_alpha": {"lora_alpha": 7},
    "lora_dropout": {"lora_dropout": 0.25},
    "target_modules": {"target_modules": ["v_proj", "q_proj"]},
    "exclude_modules": {"exclude_modules": ["lm_head"]},
    "layers_to_transform": {"target_modules": ["q_proj"], "layers_to_transform": [0]},
    "layers_pattern": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 2}},
    "use_rslora": {"use_rslora": True},
    "use_dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [3]},
    "target_parameters": {"target_parameters": ["experts.down_proj"]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "eva_config": {"init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=1.0)},
    "corda_config": {
        "init_lora_weights": "corda",
        "corda_config": CordaConfig(corda_method="kpm"),
    },
}


@pytest.mark.parametrize("field", LoraSpec.model_fields)
def test_a_config_of_peft_loses_nothing(field: str) -> None:
    """Every honoured field of a LoraConfig comes back equal from the job."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **CHANGED.get(field, {}))

    assert dataclasses.asdict(job(lora=config).start_config()) == dataclasses.asdict(config)


def test_every_honoured_field_has_a_case() -> None:
    """The test above changes each field that PEFT's LoraConfig has, too."""
    peft_fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}

    assert set(LoraSpec.model_fields) & peft_fields - {"task_type", "peft_type"} == set(CHANGED)


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "LOKR", "OFT", "VERA"])
def test_another_kind_of_peft_loses_nothing(kind: str) -> None:
    """So do the other kinds, by their own classes."""
    config = peft_config({"peft_type": kind, "target_modules": ["q_proj"]})
    made = job(lora=config).start_config()

    assert type(made) is type(config)
    assert dataclasses.asdict(made) == dataclasses.asdict(config)


def test_a_rank_is_enough() -> None:
    """A number is the rank; all else is PEFT's default."""
    assert job(lora=16).lora == {"r": 16}


def test_a_field_that_is_not_supported_is_refused_by_its_name() -> None:
    """The argument, the field and the reason are told."""
    said = refusal(lora=peft.LoraConfig(layer_replication=[(0, 2)]))

    assert "Job(lora=...): 'layer_replication' is refused: it changes the layers" in said


def test_a_config_that_wrapped_a_model_is_the_same() -> None:
    """PEFT notes the base's name in a config that it has used."""
    config = peft.LoraConfig(r=2, base_model_name_or_path="other", inference_mode=True)

    assert job(lora=config).lora == {"r": 2}


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        datasets.Dataset.from_list(ROWS),
        {"rows": ROWS},
        DataSpec(rows=ROWS),
        [{"path": "a", "completion": "b"}],
    ],
)
def test_rows_are_data(data: Any) -> None:
    """Lists of rows and data sets stay as they are, beside a name for messages."""
    spec = job(data=data).data

    assert len(spec.rows) == 1
    assert spec.path.startswith("<")
    assert not spec.streaming


@pytest.mark.parametrize(
    "data",
    [["a.jsonl", "b.jsonl"], [{"path": "a.jsonl"}, {"rows": ROWS}], [DataSpec(rows=ROWS), "b.csv"]],
)
def test_a_list_of_data_sets_is_a_mixture(data: Any) -> None:
    """Paths and mappings with a path or rows are data sets, not rows."""
    assert len(job(data=data).data.parts) == 2


def test_data_sets_are_known_by_their_keys() -> None:
    """The keys by which a list of rows is told from one of data sets are those of a data set."""
    assert set(DataSpec.model_fields) == DATA_SET_KEYS


def test_rows_of_the_first_of_several_data_sets_stay() -> None:
    """A mixture keeps the rows of each part."""
    mixture = job(data=[DataSpec(rows=ROWS, weight=1.0), {"rows": ROWS, "weight": 2.0}]).data

    assert [part.rows for part in mixture.parts] == [ROWS, ROWS]


def test_evaluation_rows_are_read_as_the_data() -> None:
    """Columns that are mapped in the data are mapped in the evaluation too."""
    data = {"path": "x.jsonl", "columns": {"prompt": "q"}}

    assert job(data=data, eval_data=ROWS).eval_data.columns == {"prompt": "q"}


def test_a_stream_needs_steps() -> None:
    """Nobody knows how long an IterableDataset is."""
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()

    assert "Job(max_steps=...): an IterableDataset needs 'max_steps'" in refusal(data=stream)
    assert job(data=stream, max_steps=3).data.streaming
    assert not job(data=stream, max_steps=3, eval_data=ROWS).eval_data.streaming
    assert "Job(eval_data=...): an IterableDataset has no end" in refusal(eval_data=stream)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"data": 3}, "Job(data=...): the data cannot be read"),
        ({"data": datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))}, "['train']"),
        ({"data": {"path": "x", "rows": ROWS}}, "'path' and 'rows' exclude each other"),
        ({"lora": [1]}, "Job(lora=...): wrong value of 'lora'"),
        ({"data": None}, "a path, a list of rows, a Dataset, or a dict"),
        ({"compute_metrics": 3}, "a function, or a str"),
        ({"lora": "all"}, "a dict"),
        ({"shuffle": "yes"}, "True or False"),
        ({"max_steps": 0}, "or None"),
        ({"beta": 0.1}, "set method='dpo'"),
        ({"lora": {"init_lora_weights": "eva"}}, "needs eva_config={'rho': 1.0}"),
        ({"base": {"model": "m", "labels": 2}}, "set task='SEQ_CLS'"),
        ({"train_dataset": ROWS}, "it is called 'data' here"),
        ({"model": "m"}, "it is called 'base' here"),
        ({"processing_class": "m"}, "it is called 'tokenizer' here"),
        ({"args": 1}, "Job.from_trl(args, ...)"),
        ({"dtype": "float32"}, "base={'model': ..., 'dtype': ...}"),
        ({"columns": {"prompt": "q"}}, "data={'rows': ..., 'columns': {...}}"),
        ({"data": {"prompt": ["a"], "completion": ["b"]}}, "a list of rows (dicts)"),
        ({"callbacks": 3}, "expected  a list"),
        ({"optim": 3}, "; or a class of torch.optim, or a function of parameters that makes one"),
        ({"loss": "crossentropy"}, "; or a function of (logprobs, inputs)"),
        ({"method": "grpo"}, "write the loop with GroupStep and Sampler"),
        ({"method": print}, "give it as 'loss'"),
        ({"loss": "dpo"}, "method='dpo'"),
        ({"zzz": 1}, "unknown argument 'zzz'; known arguments: name, base"),
    ],
)
def test_a_mistake_is_told_in_words_of_python(arguments: dict[str, Any], said: str) -> None:
    """No word of YAML, and the argument's name."""
    text = refusal(**arguments)

    assert said in text.replace("\n  job   a\n  help  ", "; ")
    assert not any(word in text for word in ("YAML", "null", "true", "key: value", "job file"))


def test_columns_that_fit_are_told_as_a_dict() -> None:
    """A hint of a job file with several pairs."""
    said = words_of_python("perhaps columns: {prompt: question, completion: answer}")

    assert said == "perhaps data={..., 'columns': {'prompt': 'question', 'completion': 'answer'}}"


def test_a_job_without_a_base_is_told_of_the_base_alone() -> None:
    """Its tokenizer is no mistake."""
    with pytest.raises(JobError) as caught:
        Job("a", tokenizer="t", lora=4, data=ROWS)

    assert "Job(base=...): 'base' is missing" in str(caught.value)


def test_a_job_file_keeps_its_words() -> None:
    """What is read and not called speaks of keys."""
    with pytest.raises(JobError, match="unknown key 'zzz'") as caught:
        Job.model_validate({"name": "a", "base": {"model": "m"}, "lora": {}, "zzz": 1})

    assert "Job(" not in str(caught.value)


def test_a_model_that_is_handed_over_has_its_own_dtype() -> None:
    """The dtype is not asked for twice."""
    assert job(base=torch.nn.Linear(2, 2).double()).base.dtype == "float64"


def test_a_model_with_an_adapter_is_no_base() -> None:
    """A PeftModel is refused, and what to give instead is told."""
    wrapped = peft.PeftModel(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), peft.LoraConfig(target_modules=["0"])
    )

    assert "Job(base=...): the base is a PeftModel" in refusal(base=wrapped)


class Tokenizer:
    """Has what a tokenizer of transformers has."""

    def __call__(self, text: str) -> list[int]:
        return []

    def save_pretrained(self, folder: str) -> None: ...


@pytest.mark.parametrize("base", ["m", {"model": "m"}, BaseSpec(model="m")])
def test_a_tokenizer_belongs_to_the_base(base: Any) -> None:
    """An object and a folder, beside a base of any form."""
    tokenizer = Tokenizer()

    assert job(base=base, tokenizer=tokenizer).base.tokenizer_object is tokenizer
    assert job(base=base, tokenizer="t").base.tokenizer == "t"


def test_objects_are_not_written_down() -> None:
    """A job's JSON has neither rows nor models; a model stands there by no name."""
    written = job(base=torch.nn.Linear(2, 2), tokenizer=Tokenizer(), data=ROWS).model_dump_json()

    assert not any(f'"{key}"' in written for key in ("rows", "module", "tokenizer_object"))
