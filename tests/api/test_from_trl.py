"""What TRL's SFTConfig says, a job says too; what it cannot is refused or told by its name."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import datasets
import pytest
import safetensors.torch
import torch
import transformers
import trl
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.api.bases import LORA, ROWS, adapter, assert_same, loaded, save_base
from tlora_fx import Job, train
from tlora_fx.config import trl_arguments
from tlora_fx.errors import JobError

FIELDS = {field.name: field for field in dataclasses.fields(trl.SFTConfig)}
FOUND_AT = {"base": "m", "lora": 4, "data": "x.jsonl"}
CPU = {"output_dir": "o", "bf16": False, "use_cpu": True}
OF_PREFERENCES = {
    "dpo": trl.DPOConfig, "orpo": ORPOConfig, "kto": trl.KTOConfig, "reward": trl.RewardConfig,
}  # fmt: skip


def config(**fields):
    """An SFTConfig for a CPU."""
    return trl.SFTConfig(**{"output_dir": "out/mine", "bf16": False, "use_cpu": True} | fields)


def job_of(*, name=None, given=None, **fields):
    """The job of a config with fields, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args = config(**fields)
        caught.clear()
        made = Job.from_trl(args, name, **FOUND_AT | (given or {}))
    return made, " ".join(str(each.message) for each in caught)


MAPPED = {
    "per_device_train_batch_size": (3, {}),
    "num_train_epochs": (2.5, {}),
    "learning_rate": (3e-4, {}),
    "lr_scheduler_type": ("cosine", {}),
    "weight_decay": (0.1, {}),
    "adam_beta1": (0.8, {}),
    "adam_beta2": (0.98, {}),
    "adam_epsilon": (1e-7, {}),
    "gradient_accumulation_steps": (4, {}),
    "max_grad_norm": (0.5, {}),
    "seed": (7, {}),
    "max_length": (512, {}),
    "packing": (True, {}),
    "completion_only_loss": (True, {}),
    "assistant_only_loss": (True, {}),
    "per_device_eval_batch_size": (2, {}),
    "max_steps": (9, {"num_train_epochs": None}),
    "warmup_steps": (5, {}),
    "save_steps": (50, {}),
}


@pytest.mark.parametrize("name", MAPPED)
def test_a_field_that_says_the_same_is_taken_over(name):
    """Each field of the job has the value of the config's."""
    value, others = MAPPED[name]
    made, told = job_of(**{name: value})

    assert {key: getattr(made, key) for key in {name, *others}} == {name: value, **others}
    assert not told


def test_what_is_written_otherwise_is_translated():
    """A part of the steps as warmup, optimizer arguments as text, evaluations, sampling, texts."""
    made, told = job_of(
        warmup_steps=0.1, optim="adamw_torch", lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, eval_strategy="steps", eval_steps=4,
        load_best_model_at_end=True, metric_for_best_model="eval_mean_token_accuracy",
        greater_is_better=True, save_steps=4, train_sampling_strategy="sequential",
        dataset_text_field="body", max_length=None,
        given={"data": ROWS, "eval_data": ROWS},
    )  # fmt: skip

    assert (made.warmup_ratio, made.warmup_steps, made.optim) == (0.1, 0, "adamw")
    assert (made.eval_strategy, made.eval_steps, made.best_metric) == (
        "steps", 4, "eval_mean_token_accuracy",
    )  # fmt: skip
    assert made.load_best_model_at_end
    assert not made.shuffle
    assert made.data.columns == made.eval_data.columns == {"text": "body"}
    assert made.max_length > 1_000_000
    assert not told


def test_the_name_is_the_folders():
    """Unless there is a run_name, or a name is given."""
    assert job_of()[0].name == "mine"
    assert job_of(run_name="third")[0].name == "third"
    made, told = job_of(name="own")
    assert made.name == "own"
    assert "output_dir (give it to tlora_fx.train(jobs, output=...))" in told


def test_arguments_count_before_the_config():
    """Steps in place of epochs, an optimizer's class, a schedule's function."""
    made, _ = job_of(
        given={"max_steps": 3, "optim": torch.optim.SGD, "lr_scheduler": "constant", "seed": 1}
    )

    assert (made.max_steps, made.num_train_epochs, made.seed) == (3, None, 1)
    assert (made.optim, made.lr_scheduler_type) == ("sgd", "constant")


def test_a_base_by_name_has_the_dtype_of_its_config_where_it_is_to(tmp_path):
    """Where dtype is auto."""
    transformers.LlamaConfig(dtype="float16").save_pretrained(tmp_path)
    at = {"base": str(tmp_path)}
    assert job_of(model_init_kwargs={"dtype": "auto"}, given=at)[0].base.dtype == "float16"


def test_a_base_by_name_has_the_dtype_of_model_init_kwargs():
    """A torch.dtype or its name; code of the base's own has to be trusted as in TRL."""
    kwargs = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    base = job_of(model_init_kwargs=kwargs, trust_remote_code=True)[0].base

    assert (base.model, base.dtype, base.trust_remote_code) == ("m", "float32", True)
    with pytest.raises(JobError, match="'model_init_kwargs': device_map: load the model"):
        job_of(model_init_kwargs={"device_map": "auto"})


#: A value of each field that is refused, where `REFUSED` says the neutral one.
WRONG = {
    "loss_type": "dft",
    "optim_target_modules": ["attn"], "router_aux_loss_coef": 0.1, "data_seed": 1,
    "dataloader_drop_last": True, "shuffle_dataset": True, "truncation_mode": "keep_end",
    "packing_strategy": "wrapped", "padding_free": True, "chat_template_path": "t",
    "eos_token": "<e>", "dataset_kwargs": {"skip_prepare_dataset": True}, "eval_delay": 2,
    "eval_on_start": True, "label_names": ["x"], "include_for_metrics": ["inputs"],
    "batch_eval_metrics": True, "auto_find_batch_size": True, "ignore_data_skip": True,
    "fsdp": ["full_shard"], "deepspeed": {"a": 1}, "parallelism_config": 1,
    "bf16_full_eval": True, "fp16_full_eval": True,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(trl_arguments.REFUSED))
def test_a_field_that_would_change_numbers_is_refused_by_its_name(name):
    """The name and a reason are told."""
    args = config()
    if name not in FIELDS:
        pytest.skip("this TRL has no such field")
    setattr(args, name, WRONG[name])
    with pytest.raises(JobError) as caught:
        Job.from_trl(args, **FOUND_AT)

    assert f"Job.from_trl(args): '{name}': " in str(caught.value)


def test_adafactor_of_transformers_is_not_that_of_torch():
    """Jobs have torch's by this name; the message says how to train with transformers'."""
    with pytest.raises(JobError, match="'optim': 'adafactor' is refused"):
        job_of(optim="adafactor")
    own = {"optim": transformers.Adafactor, "optim_args": {"relative_step": False}}
    assert job_of(optim="adafactor", given=own)[0].optim_args == own["optim_args"]


def test_smoothed_labels_and_noise_are_taken_over():
    """By transformers' names."""
    job = job_of(label_smoothing_factor=0.1, neftune_noise_alpha=5)[0]
    assert (job.label_smoothing_factor, job.neftune_noise_alpha) == (0.1, 5.0)


def test_all_refusals_are_told_at_once():
    """Two fields, two lines."""
    with pytest.raises(JobError) as caught:
        job_of(eval_on_start=True, dataloader_drop_last=True)

    assert "2 fields have no equal here" in str(caught.value)


def test_a_field_that_changes_no_number_is_told():
    """By its name, with what to do in its place."""
    _, told = job_of(logging_steps=1, save_strategy="no", torch_compile_mode=None)

    assert "logging_steps (every step is logged, in metrics.jsonl)" in told
    assert "save_strategy (checkpoints are written every save_steps steps)" in told


@pytest.mark.parametrize("kind", [trl.SFTConfig, *OF_PREFERENCES.values()])
def test_every_field_of_trl_is_known(kind):
    """Each is taken over, read, refused, told, or of memory alone."""
    transformers_own = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    known = {*trl_arguments.KNOWN, *trl_arguments.INSTEAD, *transformers_own, "dataset_num_proc"}

    assert {field.name for field in dataclasses.fields(kind)} - known == set()


@pytest.mark.parametrize("method", OF_PREFERENCES)
def test_a_config_for_preferences_says_the_method(method):
    """With its beta, its defaults and its order; a base by its name becomes a reward model."""
    options = {} if method == "reward" else {"beta": 0.3}
    made = Job.from_trl(OF_PREFERENCES[method](**CPU, max_steps=2, **options), **FOUND_AT)

    assert (made.method, made.beta, made.shuffle) == (method, options.get("beta"), method != "kto")
    assert made.learning_rate == (1e-4 if method == "reward" else 1e-6)
    assert (made.base.task, made.base.labels) == (
        ("SEQ_CLS", 1) if method == "reward" else ("CAUSAL_LM", None)
    )


def test_what_no_method_does_with_preferences_is_refused():
    """Other losses, several of them, divergences, a reference that moves."""
    fields = {
        "loss_type": ["ipo"], "loss_weights": [1.0], "ld_alpha": 0.5, "label_smoothing": 0.1,
        "f_divergence_type": "js_divergence", "use_weighting": True, "sync_ref_model": True,
    }  # fmt: skip
    args = trl.DPOConfig(**CPU, max_steps=2)
    for name, value in fields.items():
        setattr(args, name, value)
    with pytest.raises(JobError) as caught:
        Job.from_trl(args, **FOUND_AT)
    assert [name for name in fields if f"'{name}': {fields[name]!r}" not in str(caught.value)] == []

    args = trl.KTOConfig(**CPU, max_steps=2, loss_type="apo_zero_unpaired")
    with pytest.raises(JobError, match="'loss_type': 'apo_zero_unpaired' is refused"):
        Job.from_trl(args, **FOUND_AT)


def test_dropout_is_off_where_trl_turns_it_off():
    """By its default for preferences; of the base it is refused, as no field turns it off."""
    given = FOUND_AT | {"lora": LoraConfig(r=4, lora_dropout=0.1)}
    assert "lora_dropout" not in Job.from_trl(trl.DPOConfig(**CPU, max_steps=2), **given).lora
    kept = trl.DPOConfig(**CPU, max_steps=2, disable_dropout=False)
    assert Job.from_trl(kept, **given).lora["lora_dropout"] == 0.1
    assert Job.from_trl(config(), **given).lora["lora_dropout"] == 0.1

    small = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=32, n_positions=8)
    given |= {"base": transformers.GPT2LMHeadModel(small)}
    with pytest.raises(JobError, match=r"the base has a dropout of 0\.1, which stays"):
        Job.from_trl(trl.DPOConfig(**CPU, max_steps=2), **given)


def test_a_base_by_its_name_has_the_dtype_that_trl_loads_it_in():
    """float32, and in autocast's dtype where the config has one; Trainer loads none."""
    assert job_of()[0].base.dtype == "float32"
    args = config()
    args.bf16 = True
    assert Job.from_trl(args, **FOUND_AT).base.dtype == "bfloat16"
    args.model_init_kwargs = {"dtype": "float32"}
    with pytest.warns(UserWarning, match="bf16"):
        assert Job.from_trl(args, **FOUND_AT).base.dtype == "float32"


def test_a_field_of_another_version_is_refused():
    """Nobody knows here what it means."""

    @dataclasses.dataclass
    class Newer(trl.SFTConfig):
        zeal: float = 0.0

    args = Newer(output_dir="o", bf16=False, use_cpu=True, zeal=1.0)
    with pytest.raises(JobError, match="'zeal': this version of tlora-fx does not know"):
        Job.from_trl(args, **FOUND_AT)


def test_other_objects_are_refused():
    """A dict, and the arguments of a trainer that no method trains as."""
    with pytest.raises(JobError, match="no config of TRL and no TrainingArguments but dict"):
        Job.from_trl({}, **FOUND_AT)
    with pytest.raises(JobError, match="trainer of GRPOConfig") as caught:
        Job.from_trl(trl.GRPOConfig(**CPU), **FOUND_AT)
    assert "GroupStep and Sampler" in str(caught.value)


def test_half_precision_of_a_float32_model_is_told():
    """TRL would compute in bfloat16 by autocast."""
    args = config()
    args.bf16 = True
    with pytest.warns(UserWarning, match="bf16"):
        Job.from_trl(args, lora=4, data="x.jsonl", base=torch.nn.Linear(2, 2))


def test_arguments_of_transformers_are_enough():
    """TrainingArguments have no fields of SFT; the job's defaults stand for these."""
    args = transformers.TrainingArguments(output_dir="o", max_steps=3, use_cpu=True)

    assert Job.from_trl(args, **FOUND_AT).max_length == 1024


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


def test_a_job_of_trl_trains_as_the_job_that_says_the_same(base, tmp_path):
    """Fields of TRL, and the same fields written by hand."""
    model = loaded(base)
    shared = {"base": model, "lora": LoraConfig(**LORA), "data": ROWS}
    args = config(
        per_device_train_batch_size=4, max_steps=3, learning_rate=1e-2, seed=3,
        lr_scheduler_type="cosine", warmup_steps=1, weight_decay=0.1,
    )  # fmt: skip
    by_hand = Job(
        "a", **shared, per_device_train_batch_size=4, max_steps=3, learning_rate=1e-2, seed=3,
        lr_scheduler_type="cosine", warmup_steps=1, weight_decay=0.1,
    )  # fmt: skip
    options = {"device": "cpu", "verbose": False}

    one = train(Job.from_trl(args, "a", **shared), output=tmp_path / "one", **options)
    assert_same(one, train(by_hand, output=tmp_path / "two", **options))


def test_the_first_loss_is_trls(base, tmp_path):
    """On the same samples in the same order, before any adapter has learned."""
    args = config(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=5, max_steps=1,
        train_sampling_strategy="sequential", logging_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data, lora = datasets.Dataset.from_list(ROWS), LoraConfig(**LORA, task_type="CAUSAL_LM")
    job = Job.from_trl(
        args, "a", base=loaded(base, torch.float32), tokenizer=tokenizer, data=data, lora=lora
    )
    found = train(job, output=tmp_path / "ours", device="cpu", verbose=False)
    trainer = trl.SFTTrainer(
        model=loaded(base, torch.float32), args=args, train_dataset=data, peft_config=lora,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()

    assert found["a"].losses[0] == pytest.approx(trainer.state.log_history[0]["loss"], abs=1e-4)


def test_what_decays_decays_in_trl(base, tmp_path):
    """Of an adapter with a bias in B and trained copies of norms and of the head."""
    args = config(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=4, max_steps=3,
        learning_rate=1e-2, weight_decay=0.5, train_sampling_strategy="sequential",
        gradient_checkpointing=False, save_strategy="no", report_to="none", optim="adamw_torch",
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    saved = ["norm", "input_layernorm", "lm_head"]
    lora = LoraConfig(**LORA, lora_bias=True, modules_to_save=saved, task_type="CAUSAL_LM")
    get_peft_model(loaded(base), lora).save_pretrained(tmp_path / "start")
    data = datasets.Dataset.from_list(ROWS)
    job = Job.from_trl(
        args, "a", base=loaded(base), tokenizer=tokenizer, data=data, adapter=tmp_path / "start"
    )
    ours = train(job, output=tmp_path / "ours", device="cpu", verbose=False)
    start = PeftModel.from_pretrained(loaded(base), tmp_path / "start", is_trainable=True)
    trl.SFTTrainer(
        model=start, args=args, train_dataset=data, processing_class=tokenizer
    ).train()  # fmt: skip

    found, expected = adapter(ours), get_peft_model_state_dict(start)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": f" {index}"}
    for index, row in enumerate(ROWS[:12])
]
JUDGED = [
    {"prompt": row["prompt"], "completion": row["chosen"], "label": index % 3 > 0}
    for index, row in enumerate(PAIRS)
]
TRAINERS = {
    "dpo": trl.DPOTrainer, "orpo": ORPOTrainer, "kto": trl.KTOTrainer, "reward": trl.RewardTrainer,
}  # fmt: skip


@pytest.mark.parametrize("method", TRAINERS)
def test_preferences_are_learned_as_by_trl(base, tmp_path, method):
    """Losses of three steps, evaluations and the adapter, from one start, on models handed over."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    options = {"center_rewards_coefficient": 0.3} if method == "reward" else {}
    args = OF_PREFERENCES[method](
        **CPU | options | {"output_dir": str(tmp_path / "trl")}, per_device_train_batch_size=4,
        max_steps=3, learning_rate=1e-2, logging_steps=1, train_sampling_strategy="sequential",
        eval_strategy="steps", eval_steps=3, save_strategy="no", report_to="none",
    )  # fmt: skip
    model = loaded(base)
    if method == "reward":
        torch.manual_seed(0)
        model = transformers.LlamaForSequenceClassification(
            transformers.AutoConfig.from_pretrained(base, num_labels=1, pad_token_id=0)
        ).double()
    lora = LoraConfig(
        **LORA, task_type="CAUSAL_LM" if method != "reward" else "SEQ_CLS", lora_dropout=0.0
    )
    get_peft_model(copy.deepcopy(model), lora).save_pretrained(tmp_path / "start")
    data = datasets.Dataset.from_list(JUDGED if method == "kto" else PAIRS)
    before = copy.deepcopy(model)
    job = Job.from_trl(
        args, "a", base=model, tokenizer=tokenizer, data=data, eval_data=data,
        adapter=tmp_path / "start",
    )  # fmt: skip
    ours = train(job, output=tmp_path / "ours", device="cpu", verbose=False)
    assert type(model) is type(before)
    assert model.config.to_dict() == before.config.to_dict()

    start = PeftModel.from_pretrained(before, tmp_path / "start", is_trainable=True)
    trainer = TRAINERS[method](
        model=start, args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model(tmp_path / "trained")
    told = trainer.state.log_history
    assert ours["a"].losses == pytest.approx([x["loss"] for x in told if "loss" in x], abs=1e-5)
    assert [x["eval_loss"] for x in ours["a"].evaluations] == pytest.approx(
        [x["eval_loss"] for x in told if "eval_loss" in x], abs=1e-5
    )
    trained = safetensors.torch.load_file(tmp_path / "trained" / "adapter_model.safetensors")
    for name, tensor in adapter(ours).items():
        torch.testing.assert_close(tensor.double(), trained[name].double(), atol=1e-4, rtol=0)
