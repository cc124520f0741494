"""Config files as users of the three tools write them, and the job files that are made of them."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import trl
import yaml

from tlora_fx.config.imports import import_config, trainer
from tlora_fx.config.job import Job
from tlora_fx.config.job_file import load_job_file, yaml_text
from tlora_fx.config.trl_arguments import INSTEAD, READ, REFUSED, SAME, SILENT
from tlora_fx.errors import ImportRefused, JobFileSyntaxError

AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3-8B
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: true
strict: false
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./outputs/qlora-out
adapter: qlora
lora_model_dir:
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
lora_target_linear: true
wandb_project: llamas
wandb_entity:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
early_stopping_patience: 3
logging_steps: 1
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""
LLAMA_FACTORY = """\
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
quantization_bit: 4
quantization_method: bnb
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
### dataset
dataset: identity, chats
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 200
plot_loss: true
report_to: swanlab
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
### eval
val_size: 0.1
eval_strategy: steps
eval_steps: 50
"""
DATASET_INFO = {
    "identity": {"file_name": "identity.json"},
    "chats": {
        "file_name": "chats.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "tools": "functions"},
    },
    "openai": {
        "hf_hub_url": "org/chats",
        "formatting": "sharegpt",
        "subset": "en",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role", "content_tag": "content", "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "question", "chosen": "chosen", "rejected": "rejected"},
    },
}  # fmt: skip
TRL = """\
model_name_or_path: Qwen/Qwen2-0.5B
dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: trl-lib/Capybara
dataset_config: en
dataset_num_proc: 8
output_dir: runs/Qwen2-0.5B-SFT
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
eos_token: <|im_end|>
eval_strategy: steps
eval_steps: 100
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_steps: 0.1
max_length: null
bf16: true
push_to_hub: true
"""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Imports a config in a fresh folder; the job, why keys were left out, and which change it."""
    monkeypatch.chdir(tmp_path)

    def run(text, tool=None, **more):
        content = yaml.safe_load(text) | more
        (tmp_path / "config.yaml").write_text(yaml_text(content))
        made = import_config("config.yaml", tmp_path / "jobs.yaml", tool)
        (tmp_path / "jobs.yaml").write_text(made.text())
        [job] = load_job_file(tmp_path / "jobs.yaml", trust_remote_code=True).jobs
        reasons = {item.key: item.why for item in made.left}
        return job, reasons, {item.key for item in made.changes}

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    return run


def test_a_qlora_file_of_axolotl(imported):
    """Names, defaults and the forms of Axolotl; what its QLoRA has beside a job is told."""
    job, reasons, changes = imported(AXOLOTL)

    assert job.name == "qlora-out"
    assert (job.base.model, job.base.dtype) == ("NousResearch/Meta-Llama-3-8B", "bfloat16")
    assert job.lora == {
        "r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": "all-linear",
    }  # fmt: skip
    assert (job.data.path, job.data.format, job.eval_split) == ("tatsu-lab/alpaca", "alpaca", 0.05)
    assert (job.max_length, job.packing, job.optim) == (4096, True, "adamw")
    assert (job.per_device_train_batch_size, job.gradient_accumulation_steps) == (2, 4)
    assert (job.num_train_epochs, job.warmup_steps, job.seed) == (4.0, 10, 42)
    assert (job.lr_scheduler_type, job.learning_rate) == ("cosine", 2e-4)
    assert (job.eval_strategy, job.early_stopping_patience) == ("epoch", 3)
    assert job.report_to == ["wandb"]
    assert reasons["wandb_project"] == "see report_to"
    assert changes == {"load_in_4bit", "datasets.0.type", "evals_per_epoch"}
    assert (job.base.quantize, "not rounded again" in reasons["load_in_4bit"]) == ("nf4", True)
    assert reasons["logging_steps"] == "every step is logged, in metrics.jsonl"
    assert reasons["fp16"] == "it has no value"


@pytest.mark.parametrize(
    ("dataset", "data", "changes"),
    [
        ({"path": "a.jsonl", "type": "chat_template"}, {"format": "messages"}, set()),
        (
            {"path": "a.jsonl", "type": "chat_template", "field_messages": "turns"},
            {"format": "messages", "columns": {"messages": "turns"}},
            set(),
        ),
        (
            {
                "path": "a.jsonl", "type": "chat_template", "field_messages": "conversations",
                "message_property_mappings": {"role": "from", "content": "value"},
                "roles_to_train": ["assistant"], "train_on_eos": "turn",
            },
            {"format": "sharegpt"},
            set(),
        ),
        ({"path": "a.jsonl", "type": "sharegpt"}, {"format": "sharegpt"}, set()),
        (
            {"path": "a.jsonl", "type": "sharegpt", "chat_template": "chatml"},
            {"format": "sharegpt"},
            {"datasets.0.chat_template"},
        ),
        ({"path": "a.jsonl", "type": "completion", "field": "body"},
         {"format": "text", "columns": {"text": "body"}}, set()),
        ({"path": "a.jsonl", "ds_type": "json"}, {"format": "tokens"}, set()),
        (
            {"path": "json", "data_files": "a.jsonl", "split": "train[:9]", "type": "completion"},
            {"format": "text", "split": "train"},
            {"datasets.0.split"},
        ),
        (
            {
                "path": "a.jsonl",
                "type": {"field_instruction": "q", "field_output": "a", "format": "Q: {q}"},
            },
            {"format": "alpaca", "columns": {"instruction": "q", "output": "a"}},
            {"datasets.0.type.format"},
        ),
        ({"path": "a.jsonl", "type": "oasst"}, {"format": "auto"}, {"datasets.0.type"}),
        (
            {"path": "a.jsonl", "type": "completion", "shards": 4},
            {"format": "text"},
            {"datasets.0.shards"},
        ),
    ],
)  # fmt: skip
def test_forms_of_data_of_axolotl(imported, dataset, data, changes):
    """Formats and columns; what a job cannot say of a data set is told by its key."""
    config = {"datasets": [dataset], "load_in_4bit": False, "evals_per_epoch": 1}
    job, _, found = imported(AXOLOTL, **config)

    assert {key: getattr(job.data, key) for key in data} == data
    assert job.data.path.endswith("/a.jsonl")
    assert found == changes


def test_input_output_of_axolotl_is_left_out_by_name(imported):
    """With the other data set the job trains; without one there is no job."""
    parts = {"path": "parts.jsonl", "type": "input_output"}
    chats = {"path": "chats.jsonl", "type": "chat_template"}
    job, reasons, changes = imported(AXOLOTL, datasets=[parts, chats])

    assert job.data.path.endswith("/chats.jsonl")
    assert "format: tokens" in reasons["datasets.0.type"]
    assert {"datasets.0.type", "datasets.0.path"} <= changes
    with pytest.raises(ImportRefused, match="no data set is left"):
        imported(AXOLOTL, datasets=[parts])


def test_preferences_and_an_adapter_of_axolotl(imported, tmp_path):
    """DPO with beta, an adapter that is continued, a test set, a whole batch size."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3}')
    (tmp_path / "old" / "adapter_model.safetensors").touch()
    pairs = {"path": "pairs.jsonl", "type": "chat_template.default", "field_messages": "talk"}
    job, reasons, _ = imported(
        AXOLOTL, rl="dpo", rl_beta=0.2, datasets=[pairs], test_datasets=[pairs], val_set_size=0,
        lora_model_dir="old", batch_size=16, gradient_accumulation_steps=None, sample_packing=False,
    )  # fmt: skip

    assert (job.method, job.beta, job.lora) == ("dpo", 0.2, None)
    assert job.adapter.name == "old"
    assert (job.data.format, job.data.columns) == ("preference", {"prompt": "talk"})
    assert job.eval_data.path == job.data.path
    assert job.gradient_accumulation_steps == 8
    assert reasons["lora_r"] == "the adapter's folder says it"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"adapter": None}, "adapter: without it Axolotl trains the whole model"),
        ({"rl": "grpo"}, "rl: expected dpo, orpo or kto, found 'grpo'"),
        ({"base_model": None}, "base_model: the base model is not named"),
        ({"learning_rate": -1}, "learning_rate: wrong value of 'learning_rate', expected a number"),
        ({"learning_rate": "fast"}, "learning_rate: expected a number, found 'fast'"),
        ({"micro_batch_size": 0}, "micro_batch_size: wrong value of 'per_device_train_batch_size'"),
        ({"lora_r": -1}, "lora_r: wrong value of 'lora.r'"),
    ],
)  # fmt: skip
def test_what_no_job_can_be_is_refused_by_its_key(imported, more, told):
    """In the words of the config file."""
    with pytest.raises(ImportRefused) as caught:
        imported(AXOLOTL, **more)

    assert told in str(caught.value)


def test_a_qlora_file_of_llama_factory(imported, tmp_path):
    """Data sets by dataset_info.json, LLaMA-Factory's defaults, its names."""
    job, reasons, changes = imported(LLAMA_FACTORY)

    first, second = job.data.parts
    assert (first.path, second.path) == (
        str(tmp_path / "data" / "identity.json"), str(tmp_path / "data" / "chats.jsonl"),
    )  # fmt: skip
    assert (first.format, second.format) == ("alpaca", "sharegpt")
    assert second.columns == {"conversations": "turns", "tools": "functions"}
    assert job.lora == {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    assert (job.num_train_epochs, job.warmup_ratio, job.max_length) == (3.0, 0.1, 2048)
    assert (job.eval_split, job.eval_strategy, job.eval_steps) == (0.1, "steps", 50)
    assert (job.save_steps, job.seed, job.base.trust_remote_code) == (200, 42, True)
    assert changes == {"quantization_bit", "template", "max_samples"}
    assert reasons["report_to"] == "trackers are tensorboard, wandb, trackio, mlflow"


@pytest.mark.parametrize(
    ("config", "given", "weights", "shuffles"),
    [
        (AXOLOTL, {"rl": "kto", "rl_beta": 0.2, "kto_desirable_weight": 1.5, "sample_packing": None,
                   "datasets": [{"path": "a.jsonl"}]}, (1.5, 1.0), True),
        (TRL, {"loss_type": "kto", "beta": 0.2, "undesirable_weight": 0.5, "packing": None,
               "completion_only_loss": None, "assistant_only_loss": None}, (1.0, 0.5), False),
    ],
)  # fmt: skip
def test_kto_is_carried(imported, config, given, weights, shuffles):
    """Its beta, weights, and the order of its samples, which TRL does not shuffle."""
    job, _, _ = imported(config, **given)

    assert (job.method, job.beta, job.shuffle) == ("kto", 0.2, shuffles)
    assert (job.desirable_weight, job.undesirable_weight) == weights


@pytest.mark.parametrize("given", [{}, {"center_rewards_coefficient": 0.01}])
def test_rewards_are_carried(imported, given):
    """The head of one number, whose learning rate is that of TRL's trainer of rewards."""
    sft = {"packing": None, "completion_only_loss": None, "assistant_only_loss": None}
    more = {"lora_task_type": "SEQ_CLS", "disable_dropout": True, "learning_rate": None}
    job, _, changes = imported(TRL, **sft, **more, **given)

    assert (job.method, job.base.task, job.base.label_names) == ("reward", "SEQ_CLS", ("LABEL_0",))
    assert job.center_rewards_coefficient == given.get("center_rewards_coefficient")
    assert job.learning_rate == 1e-4
    assert "lora_dropout" not in job.lora
    assert changes == {"eos_token"}


@pytest.mark.parametrize(
    ("config", "given", "form", "expected"),
    [
        (LLAMA_FACTORY, {"double_quantization": False}, "nf4", set()),
        (LLAMA_FACTORY, {"quantization_bit": 8}, "int8", {"quantization_bit"}),
        (LLAMA_FACTORY, {"quantization_bit": 2}, None, {"quantization_bit"}),
        (LLAMA_FACTORY, {"quantization_method": "hqq"}, "nf4",
         {"quantization_bit", "quantization_method"}),
        (AXOLOTL, {"load_in_4bit": False}, None, set()),
        (TRL, {"load_in_4bit": True}, "nf4", set()),
        (TRL, {"load_in_4bit": True, "use_bnb_nested_quant": True}, "nf4",
         {"use_bnb_nested_quant"}),
        (TRL, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "nf4",
         {"bnb_4bit_quant_type"}),
        (TRL, {"load_in_8bit": True}, "int8", {"load_in_8bit"}),
    ],
)  # fmt: skip
def test_a_base_in_fewer_bits_is_carried(imported, config, given, form, expected):
    """What bitsandbytes would round otherwise is told."""
    job, _, changes = imported(config, **given)

    assert job.base.quantize == form
    assert {key for key in changes if "quant" in key or "load_in" in key} == expected


def test_preferences_and_mixtures_of_llama_factory(imported):
    """ORPO, data sets that are interleaved, PiSSA, prompts that are trained."""
    job, _, changes = imported(
        LLAMA_FACTORY, stage="dpo", pref_loss="orpo", pref_beta=0.3, dataset="pairs",
        max_samples=None, quantization_bit=None,
    )  # fmt: skip
    assert (job.method, job.beta, job.data.format) == ("orpo", 0.3, "preference")
    assert job.data.columns == {"prompt": "question"}
    assert changes == {"template"}

    job, _, changes = imported(
        LLAMA_FACTORY, dataset="identity,openai", mix_strategy="interleave_over",
        interleave_probs="0.7,0.3", pissa_init=True, pissa_iter=4, lora_target="all",
        train_on_prompt=True, neat_packing=True, template=None,
    )  # fmt: skip
    first, second = job.data.parts
    assert (first.weight, second.weight, job.mixing) == (0.7, 0.3, "all_exhausted")
    assert (second.path, second.name, second.format) == ("org/chats", "en", "messages")
    assert job.lora["init_lora_weights"] == "pissa_niter_4"
    assert job.lora["target_modules"] == "all-linear"
    assert (job.completion_only_loss, job.assistant_only_loss, job.packing) == (False, False, True)
    assert changes == {"quantization_bit", "max_samples"}


def test_a_data_set_that_llama_factory_does_not_know_is_refused(imported, tmp_path):
    """By its name, with the file in which it should stand."""
    with pytest.raises(ImportRefused, match=r"'nobody' is not known: .*dataset_info.json"):
        imported(LLAMA_FACTORY, dataset="nobody")
    with pytest.raises(ImportRefused, match="stage: expected sft or dpo, found 'ppo'"):
        imported(LLAMA_FACTORY, stage="ppo")
    (tmp_path / "data" / "dataset_info.json").unlink()
    with pytest.raises(ImportRefused, match="run the command where LLaMA-Factory runs"):
        imported(LLAMA_FACTORY)


def test_a_file_of_trl(imported):
    """The defaults of SFTConfig and ModelConfig, a share as warmup, samples of any length."""
    job, reasons, changes = imported(TRL)

    assert job.name == "Qwen2-0.5B-SFT"
    assert (job.data.path, job.data.name, job.eval_split) == ("trl-lib/Capybara", "en", "test")
    assert job.lora == {
        "r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    assert (job.warmup(100), job.num_train_epochs, job.eval_steps) == (10, 1.0, 100)
    assert job.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert (job.max_length, job.packing, job.base.dtype) == (1 << 20, True, "bfloat16")
    assert job.assistant_only_loss is False
    assert changes == {"eos_token"}
    assert "tokenizer's folder" in reasons["eos_token"]


def test_mixtures_and_dpo_of_trl(imported):
    """`datasets` counts before dataset_name; beta makes a file one of DPO."""
    sets = [
        {"path": "org/a", "name": "en", "split": "train[:10]"},
        {"path": "json", "data_files": "b.jsonl", "fraction": 0.5},
    ]
    job, _, changes = imported(TRL, datasets=sets, test_split_size=0.1, eos_token=None)
    first, second = job.data.parts
    assert (first.path, first.split, job.eval_split) == ("org/a", "train[:10]", 0.1)
    assert second.path.endswith("/b.jsonl")
    assert changes == {"datasets.1.fraction"}

    job, _, _ = imported(TRL, beta=0.2, packing=False, learning_rate=None, assistant_only_loss=None)
    assert (job.method, job.beta, job.learning_rate) == ("dpo", 0.2, 1e-6)
    with pytest.raises(ImportRefused, match="use_peft: without it TRL trains the whole model"):
        imported(TRL, use_peft=False)


def test_dropout_is_off_for_preferences_of_trl(imported):
    """By TRL's default; disable_dropout: false keeps it."""
    pairs = {"beta": 0.2, "packing": False, "assistant_only_loss": None}
    assert "lora_dropout" not in imported(TRL, **pairs)[0].lora
    kept, _, _ = imported(TRL, disable_dropout=False, **pairs)
    assert kept.lora["lora_dropout"] == 0.05


def test_passwords_are_not_copied(imported, tmp_path):
    """Tokens of services are left out without their values, in nested mappings too."""
    secrets = {
        "hub_token": "hf_one", "env": {"HF_TOKEN": "hf_two"},
        "swanlab_api_key": "hf_three", "accelerator_config": {"api_key": "hf_four"},
    }  # fmt: skip
    _, reasons, _ = imported(TRL, **secrets)

    assert set(secrets) <= reasons.keys()
    assert "hf_" not in (tmp_path / "jobs.yaml").read_text()


def test_a_file_of_trl_has_no_splits(imported):
    """A file as data is read whole, and nothing of it is evaluated."""
    job, _, changes = imported(TRL, dataset_name="rows.jsonl", dataset_test_split="dev")

    assert (job.data.split, job.data.name, job.eval_split) == ("train", None, None)
    assert changes == {"dataset_config", "dataset_test_split", "eos_token"}


def test_values_that_change_numbers_are_told_apart_from_others(imported):
    """A last batch that is dropped changes the training; NEFTune and smoothing are taken over."""
    job, reasons, changes = imported(
        TRL, neftune_noise_alpha=5.0, label_smoothing_factor=0.1, logging_dir="logs", made_up=3,
        dataloader_drop_last=True,
    )  # fmt: skip

    assert (job.neftune_noise_alpha, job.label_smoothing_factor) == (5.0, 0.1)
    assert {"dataloader_drop_last", "made_up"} <= changes
    assert not {"label_smoothing_factor", "neftune_noise_alpha", "logging_dir"} & changes
    assert reasons["made_up"].startswith("this version of tlora-fx does not know the key")


@pytest.mark.parametrize(
    ("more", "fields", "left"),
    [
        ({"optim": "galore_adamw"}, {"optim": "adamw"}, {"optim"}),
        # transformers' own, which jobs do not have.
        ({"optim": "adafactor"}, {"optim": "adamw"}, {"optim"}),
        ({"lr_scheduler_type": "greedy"}, {"lr_scheduler_type": "linear"}, {"lr_scheduler_type"}),
        ({"max_steps": 7}, {"max_steps": 7, "num_train_epochs": None}, set()),
        ({"max_steps": -1}, {"max_steps": None, "num_train_epochs": 1.0}, set()),
        ({"eval_steps": 0.2}, {"eval_strategy": "epoch", "eval_steps": None}, set()),
        ({"eval_steps": None}, {"eval_strategy": "steps", "eval_steps": 10}, set()),
        ({"eval_strategy": "no"}, {"eval_strategy": "no", "eval_split": None}, set()),
        ({"report_to": ["wandb", "comet_ml"]}, {"report_to": ["wandb"]}, set()),
        ({"learning_rate": "1e-3"}, {"learning_rate": 1e-3}, set()),
        ({"bf16": True, "dtype": "float32"}, {}, {"bf16"}),
        ({"warmup_steps": 0, "warmup_ratio": 0.2}, {"warmup_ratio": 0.2}, set()),
    ],
)
def test_arguments_of_the_trainer(imported, more, fields, left):
    """As transformers reads them; what a job has not is left out, and told."""
    schedule = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": None}
    job, _, changes = imported(TRL, **{"eos_token": None} | schedule | more)

    assert {key: getattr(job, key) for key in fields} == fields
    assert changes == left


def test_paths_are_seen_from_the_job_file(tmp_path, monkeypatch):
    """The other tools look from the folder in which they are started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "config.yaml").write_text(
        "model_name_or_path: base\ndataset_name: rows.jsonl\nuse_peft: true\n"
    )
    (tmp_path / "jobs").mkdir()
    made = import_config("config.yaml", tmp_path / "jobs" / "one.yaml")

    assert made.document["base"]["model"] == "../base"
    assert made.document["jobs"][0]["data"]["path"] == "../rows.jsonl"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\n", "no config file of Axolotl or LLaMA-Factory or TRL"),
        ("base: {}\njobs: []\n", "it is a job file already"),
        ("stage: sft\nuse_peft: true\n", "those of LLaMA-Factory and"),
        ("[1]\n", "it is no mapping"),
        ("a: [\n", "the config file is no YAML"),
    ],
)
def test_a_file_of_no_tool_is_refused(tmp_path, text, told):
    """With the option that names the tool, or what is wrong."""
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises((ImportRefused, JobFileSyntaxError), match=told):
        import_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_train_epochs": 2, "warmup_steps": 0.25, "weight_decay": 0.1, "seed": 3},
        {"max_steps": 9, "warmup_steps": 4, "optim": "adamw_torch", "max_grad_norm": 0.5},
        {
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "load_best_model_at_end": True,
            "greater_is_better": False,
            "metric_for_best_model": "loss",
        },
        {"packing": True, "max_length": 77, "assistant_only_loss": True, "adam_beta2": 0.95},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true", "report_to": "wandb"},
    ],
)
def test_a_file_becomes_the_job_that_its_config_becomes(imported, fields):
    """As `Job.from_trl` makes it of an SFTConfig with the same fields."""
    has_more = "eval_strategy" in fields
    head = {"model_name_or_path": "org/base", "dataset_name": "org/data", "use_peft": True}
    job, _, _ = imported("{}", "trl", **head, output_dir="runs/one", bf16=True, **fields)
    args = trl.SFTConfig(output_dir="runs/one", bf16=False, use_cpu=True, **fields)
    args.bf16 = True  # A CPU refuses it above.
    lora = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
    data = {"data": {"path": "org/data"}} | ({"eval_split": "test"} if has_more else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = Job.from_trl(args, base={"model": "org/base"}, lora=lora, **data)

    assert job.model_dump() == wanted.model_dump()


def test_defaults_are_those_of_trl():
    """And each field of SFTConfig stands in a table."""
    fields = {field.name: field.default for field in dataclasses.fields(trl.SFTConfig)}
    ours = {name: fields[name] for name in trainer.SFT_DEFAULTS if fields.get(name)}
    tables = (SAME, READ, REFUSED, SILENT, INSTEAD, trainer.IDLE)
    known = {"logging_steps"}.union(*tables)

    assert {n: v.value if hasattr(v, "value") else v for n, v in ours.items()} == {
        name: value for name, value in trainer.SFT_DEFAULTS.items() if value
    } | {"report_to": "none"}
    assert set(fields) <= known
