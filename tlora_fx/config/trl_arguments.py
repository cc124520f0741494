"""Arguments of TRL's trainers and of transformers' Trainer, as the fields of a job.

A field that says the same here is taken over. One that would change numbers and has no equal is
refused; one that changes none is told, where its user has set it. Nothing is imported: an object is
known by its fields.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.config.base_task import read_base_config
from tlora_fx.config.losses import LOOP
from tlora_fx.config.objects import base_fields, data_fields, dtype_name, lora_fields
from tlora_fx.config.other_kinds import adapter_spec
from tlora_fx.errors import JobError

#: Fields with the same name and meaning.
SAME = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "lr_scheduler_type", "optim",
    "seed", "per_device_eval_batch_size", "eval_strategy", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "packing", "completion_only_loss",
    "assistant_only_loss", "report_to", "label_smoothing_factor", "neftune_noise_alpha",
)  # fmt: skip
#: Fields that `mapped_fields` reads.
READ = (
    "max_steps", "num_train_epochs", "warmup_steps", "lr_scheduler_kwargs", "optim_args",
    "max_length", "eval_steps", "save_steps", "save_strategy", "train_sampling_strategy",
    "dataset_text_field", "model_init_kwargs", "trust_remote_code", "bf16", "fp16", "run_name",
    "output_dir",
)  # fmt: skip
#: Likewise, of trainers that learn from preferences.
SAME_OF_PREFERENCES = (
    "beta", "desirable_weight", "undesirable_weight", "center_rewards_coefficient",
)  # fmt: skip
#: Configs of TRL, and the method of a job that trains as their trainer does.
METHODS: Mapping[str, str] = {
    "SFTConfig": "sft", "DPOConfig": "dpo", "ORPOConfig": "orpo", "KTOConfig": "kto",
    "RewardConfig": "reward",
}  # fmt: skip
#: The loss that a method has, as `loss_type` names it.
_LOSSES: Mapping[str, Any] = {"sft": "nll", "dpo": ["sigmoid"], "kto": "kto"}
_ONE_DTYPE = "the base has one dtype, in which it computes"
#: Fields that change numbers and have no equal, with the reason; refused unless they are as here.
REFUSED: Mapping[str, tuple[Any, str]] = {
    "loss_type": ("nll", "a method has one loss"),
    "optim_target_modules": (None, "GaLore and its kin train the base, which is frozen"),
    "router_aux_loss_coef": (None, "auxiliary losses of routers are not trained"),
    "data_seed": (None, "a job has one 'seed'"),
    "dataloader_drop_last": (False, "every sample is trained: the last batch may be smaller"),
    "shuffle_dataset": (False, "give data=dataset.shuffle(seed)"),
    "truncation_mode": ("keep_start", "samples are cut at their ends"),
    "packing_strategy": ("bfd", "samples are packed whole, the best fit first"),
    "padding_free": (False, "rows are packed without padding anyway, by tlora-fx itself"),
    "chat_template_path": (None, "set tokenizer.chat_template, and give tokenizer=tokenizer"),
    "eos_token": (None, "set tokenizer.eos_token, and give tokenizer=tokenizer"),
    "dataset_kwargs": (None, "the data is prepared as its columns say"),
    "eval_delay": (0, "evaluations begin with the first that is due"),
    "eval_on_start": (False, "evaluations come after steps"),
    "label_names": (None, "the columns of the data say what is trained"),
    "include_for_metrics": ((), "compute_metrics gets predictions and labels"),
    "batch_eval_metrics": (False, "compute_metrics gets all samples at once"),
    "auto_find_batch_size": (False, "give a batch size"),
    "ignore_data_skip": (False, "a resumed job takes the samples that it would have taken"),
    "fsdp": (None, "tlora-fx train --plan fsdp shards a base over GPUs"),
    "deepspeed": (None, "tlora-fx train --plan fsdp shards a base over GPUs"),
    "parallelism_config": (None, "tlora-fx train --gpus spreads a run over GPUs"),
    "bf16_full_eval": (False, _ONE_DTYPE),
    "fp16_full_eval": (False, _ONE_DTYPE),
}
#: Likewise, of configs for preferences.
REFUSED_OF_PREFERENCES: Mapping[str, tuple[Any, str]] = {
    "loss_weights": (None, "a job has one loss"),
    "ld_alpha": (None, "there is no LD-DPO"),
    "f_divergence_type": ("reverse_kl", "the divergence is the reverse KL"),
    "label_smoothing": (0.0, "the loss of pairs is not smoothed"),
    "use_weighting": (False, "there is no WPO"),
    "sync_ref_model": (False, "the reference stays as it is"),
    "max_prompt_length": (None, "max_length bounds prompt and completion together"),
    "max_completion_length": (None, "max_length bounds prompt and completion together"),
    "is_encoder_decoder": (None, "the base is a decoder"),
}
#: Optimizers that transformers has under a name by which jobs have another, and what to do.
OTHER_OPTIMIZERS: Mapping[str, str] = {
    "adafactor": "transformers' Adafactor is another one than torch.optim's, which jobs have by "
    "this name: give optim=transformers.Adafactor, optim_args={'scale_parameter': False, "
    "'relative_step': False, 'weight_decay': ...}, weight_decay=0.0",
}
#: Options of what is refused, fields of memory alone, and those that `_of_preferences` reads.
SILENT_OF_PREFERENCES = frozenset({
    "f_alpha_divergence_coef", "discopop_tau", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "precompute_ref_log_probs", "precompute_ref_batch_size", "padding_value", "disable_dropout",
})  # fmt: skip
#: Fields that Trainer fills in itself, and fields of memory alone: nothing is said of them.
SILENT = frozenset({
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "activation_offloading", "disable_tqdm", "debug", "do_eval",
    "accelerator_config", "pad_to_multiple_of", "dataloader_pin_memory", "use_cache", "pad_token",
    "local_rank", "logging_dir", "fsdp_config", "hub_token", "use_cpu", "project", "do_train",
})  # fmt: skip
#: Where something else says what a field says.
INSTEAD: Mapping[str, str] = {
    "output_dir": "give it to tlora_fx.train(jobs, output=...)",
    "resume_from_checkpoint": "give resume=True to tlora_fx.train",
    "logging_steps": "every step is logged, in metrics.jsonl",
    "logging_strategy": "every step is logged, in metrics.jsonl",
    "save_strategy": "checkpoints are written every save_steps steps",
    "save_total_limit": "old checkpoints are removed",
    "torch_compile": "give compiled=True to tlora_fx.train",
    "push_to_hub": "adapters are pushed by PeftModel.push_to_hub, or tlora-fx train --push-to-hub",
    "bf16": _ONE_DTYPE,
    "fp16": _ONE_DTYPE,
    "model_init_kwargs": "the base is loaded already",
    "eval_packing": "evaluations are not packed",
    "generate_during_eval": "give sample_prompts, and the job answers them as it trains",
}


#: Fields that are taken over, read, refused, or of memory alone.
KNOWN = frozenset({
    *SAME, *READ, *REFUSED, *SILENT, *SAME_OF_PREFERENCES, *REFUSED_OF_PREFERENCES,
    *SILENT_OF_PREFERENCES,
})  # fmt: skip


def trl_fields(
    args: Any, name: str | None, arguments: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a job from those of a trainer; `arguments` count before them.

    raises   JobError, naming every field that is refused
    warns    of fields that are set and have no equal, once
    """
    method = _method(args)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    _refuse(args, given, method, arguments)
    told = _changed(args, given)
    fields = mapped_fields(given, arguments, told)
    if method != "sft":
        fields |= _of_preferences(method, given, arguments, fields.get("base"))
    if name is None:
        told.pop("output_dir", None)
        name = str(given.get("run_name") or Path(str(given["output_dir"])).name)
    told.pop("run_name", None)
    if told:
        texts = (f"{key} ({INSTEAD[key]})" if key in INSTEAD else key for key in sorted(told))
        what = "Job.from_trl: fields that have no equal in a job, and change none of its numbers: "
        warnings.warn(what + ", ".join(texts), stacklevel=3)
    return name, {**arguments, **_without_rivals(fields, arguments), **_own(arguments)}


def _method(args: Any) -> str:
    """The method of a job that trains as the trainer of a config does."""
    kinds = [kind.__name__ for kind in type(args).__mro__]
    if not dataclasses.is_dataclass(args) or "TrainingArguments" not in kinds:
        what = f"it is no config of TRL and no TrainingArguments but {type(args).__name__}"
        raise _error({"args": what})
    if known := next((METHODS[kind] for kind in kinds if kind in METHODS), ""):
        return known
    if other := next((k for k in kinds if k.endswith("Config") and not k.startswith("_")), ""):
        help = LOOP if other in _SAMPLES else ""
        raise _error({"args": f"no method of a job trains as the trainer of {other}"}, help)
    return "sft"


def require_dropout_off(args: Any, job: Any) -> None:
    """Refuse dropouts that TRL turns off before it trains, and that a job has no field for.

    job      made from args
    raises   JobError
    """
    if _method(args) == "sft" or not getattr(args, "disable_dropout", False):
        return
    rates = {}
    if job.adapter is not None and job.dropout_field is not None:
        rates["adapter"] = job.lora_fields.get(job.dropout_field)
    module = job.base.module
    if module is not None:
        drops = (m.p for m in module.modules() if type(m).__name__ == "Dropout")
        rates["base"] = max(drops, default=0.0)
    elif (config := read_base_config(job.base)) is not None:
        drops = (v for k, v in config.items() if k.endswith(("drop", "_pdrop")) or k == "dropout")
        rates["base"] = max((v for v in drops if isinstance(v, float)), default=0.0)
    if left := [f"the {name} has a dropout of {rate}" for name, rate in rates.items() if rate]:
        help = "set it to 0 in its config before it is loaded, or set disable_dropout=False"
        raise _error({"disable_dropout": f"{' and '.join(left)}, which stays"}, help)


def _of_preferences(
    method: str, given: Mapping[str, Any], arguments: Mapping[str, Any], base: Any
) -> dict[str, Any]:
    """Fields that a job has beside those of every trainer, where it learns from preferences.

    base    as it is mapped already
    """
    fields = {key: given[key] for key in SAME_OF_PREFERENCES if given.get(key) is not None}
    if given.get("disable_dropout") and "lora" in arguments:
        fields["lora"] = _without_dropout(arguments["lora"])
    if method == "reward" and isinstance(base, Mapping) and "model" in base:
        fields["base"] = {"task": "SEQ_CLS", "labels": 1, **base}
    return {"method": method, **fields}


def _without_dropout(lora: Any) -> Any:
    """The fields of an adapter, without its dropout, which TRL turns off."""
    fields = lora_fields(lora)
    if not isinstance(fields, Mapping):
        return fields
    dropout = adapter_spec(fields).dropout_field
    return {key: value for key, value in fields.items() if key != dropout}


def _own(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are given beside those of the trainer, and count before them."""
    return {key: value for key, value in arguments.items() if key not in _COMPLETED}


def _without_rivals(fields: dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fields less those in whose place an argument stands."""
    rivals = {rival for key, rival in _RIVALS if key in arguments and rival not in arguments}
    return {key: value for key, value in fields.items() if key not in rivals}


#: An argument, and the field that it excludes.
_RIVALS = (
    ("max_steps", "num_train_epochs"), ("num_train_epochs", "max_steps"),
    ("warmup_steps", "warmup_ratio"), ("warmup_ratio", "warmup_steps"),
    ("lr_scheduler", "lr_scheduler_type"), ("eval_steps", "eval_strategy"),
)  # fmt: skip


#: Arguments that the trainer's complete.
_COMPLETED = ("base", "data", "eval_data", "lora")
#: Configs of trainers that learn from what they sample.
_SAMPLES = ("GRPOConfig", "RLOOConfig", "PPOConfig", "OnlineDPOConfig")


def _error(mistakes: Mapping[str, str], help: str = "") -> JobError:
    """The error for fields, by name, and what is wrong with each."""
    rows = {str(n): f"'{key}': {why}" for n, (key, why) in enumerate(mistakes.items(), 1)}
    if len(rows) == 1:
        return JobError(f"Job.from_trl(args): {rows['1']}", help=help)
    what = f"Job.from_trl(args): {len(rows)} fields have no equal here"
    return JobError(what, help=help, **rows)


def _refuse(args: Any, given: Mapping[str, Any], method: str, arguments: Mapping[str, Any]) -> None:
    """Refuse fields that change numbers and have no equal, and fields that nobody knows here.

    arguments   that count before args
    """
    loss = _LOSSES.get(method)
    if _plain(given.get("loss_type")) in (loss, *(loss if isinstance(loss, list) else ())):
        given = {key: value for key, value in given.items() if key != "loss_type"}
    mistakes = {
        key: f"{given[key]!r} is refused: {why}"
        for key, (neutral, why) in {**REFUSED, **REFUSED_OF_PREFERENCES}.items()
        if key in given and not is_like(given[key], neutral)
    }
    if given.get("data_seed") == given["seed"]:
        mistakes.pop("data_seed", None)
    for key in ("eval_steps", "save_steps"):
        if isinstance(given.get(key), float) and given[key] % 1:
            mistakes[key] = f"{given[key]} is refused: give a number of steps, not a part of them"
    if "optim" not in arguments and (other := OTHER_OPTIMIZERS.get(_plain(given["optim"]))):
        mistakes["optim"] = f"'{_plain(given['optim'])}' is refused: {other}"
    known = _transformers_fields(args)
    for field in dataclasses.fields(args):
        is_known = field.name in {*KNOWN, "generate_during_eval"} or field.name in known
        if not is_known and not _is_default(field, given[field.name]):
            mistakes[field.name] = "this version of tlora-fx does not know the field"
    if mistakes:
        raise _error(mistakes, "leave it out" if len(mistakes) == 1 else "leave them out")


def _transformers_fields(args: Any) -> set[str]:
    """Fields of transformers' TrainingArguments: those that are left here change no number."""
    home: Any = next(kind for kind in type(args).__mro__ if kind.__name__ == "TrainingArguments")
    return {*(field.name for field in dataclasses.fields(home)), "dataset_num_proc", "eval_packing"}


def _changed(args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are set otherwise than by default, and that no job has."""
    passed = KNOWN - {"output_dir"}
    return {
        field.name: given[field.name]
        for field in dataclasses.fields(args)
        if field.name not in passed and not _is_default(field, given[field.name])
    }


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return is_like(value, None if field.default is dataclasses.MISSING else field.default)


def is_like(value: Any, other: Any) -> bool:
    """Whether a value is another, or both are empty."""
    return bool(getattr(value, "value", value) == other) or (not value and not other)


def mapped_fields(
    given: Mapping[str, Any], arguments: Mapping[str, Any], told: dict[str, Any]
) -> dict[str, Any]:
    """The fields of a job that say what a trainer's arguments say.

    given      of the trainer, by name, with its defaults
    arguments  that count before them: base, data
    told       gets what has no equal and changes no number
    """
    fields = {key: _plain(given[key]) for key in SAME if given.get(key) is not None}
    fields["report_to"] = given.get("report_to") or "none"
    if given["max_steps"] > 0:
        fields["max_steps"] = given["max_steps"]
    else:
        fields["num_train_epochs"] = float(given["num_train_epochs"])
    is_part = 0 < given["warmup_steps"] < 1
    fields["warmup_ratio" if is_part else "warmup_steps"] = (
        given["warmup_steps"] if is_part else int(given["warmup_steps"])
    )
    fields["shuffle"] = _plain(given.get("train_sampling_strategy", "random")) != "sequential"
    fields["lr_scheduler_kwargs"] = given.get("lr_scheduler_kwargs") or {}
    fields["optim_args"] = _options(given.get("optim_args"))
    if "max_length" in given:
        fields["max_length"] = given["max_length"] or _ENDLESS
    if fields["eval_strategy"] == "steps":
        fields["eval_steps"] = int(given["eval_steps"])
    if _plain(given["save_strategy"]) == "steps":
        fields["save_steps"] = int(given["save_steps"])
    else:
        told["save_strategy"] = given["save_strategy"]
    if "base" in arguments:
        fields["base"] = _base(arguments["base"], given, told)
    for key in ("data", "eval_data"):
        if key in arguments:
            fields[key] = _data(arguments[key], given.get("dataset_text_field", "text"))
    return fields


#: Longest sample where samples are not cut, in tokens.
_ENDLESS = 1 << 20


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _options(text: Any) -> dict[str, Any]:
    """`optim_args` of transformers, such as "momentum=0.9,nesterov=true"."""
    if not isinstance(text, str):
        return dict(text or {})
    pairs = (part.partition("=") for part in text.replace(" ", "").split(",") if part)
    return {key: _literal(value) for key, _, value in pairs}


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _base(value: Any, given: Mapping[str, Any], told: dict[str, Any]) -> Any:
    """The base, one by its name in the dtype that the arguments say."""
    base = base_fields(value)
    options = dict(given.get("model_init_kwargs") or {})
    half = next((key for key in ("bf16", "fp16") if given.get(key)), None)
    wanted = {"bf16": "bfloat16", "fp16": "float16"}.get(half or "")
    if not isinstance(base, Mapping) or "model" not in base:
        module = base.get("module") if isinstance(base, Mapping) else None
        if half and module is not None and dtype_name(module) != wanted:
            told[half] = True
        told |= {"model_init_kwargs": options} if options else {}
        return value
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    options.pop("attn_implementation", None)
    trusts = options.pop("trust_remote_code", given.get("trust_remote_code", False))
    if options.get("num_labels") == 1:
        del options["num_labels"]  # Reward models alone have labels, and that many.
    if options:
        names = ", ".join(options)
        raise _error({"model_init_kwargs": f"{names}: load the model, and give base=model"})
    if dtype is None:
        # TRL loads a model by its name in float32; Trainer takes none.
        dtype = wanted or ("float32" if "model_init_kwargs" in given else None)
    elif dtype == "auto":
        config = read_base_config(BaseSpec.model_construct(model=str(base["model"]))) or {}
        dtype = config.get("dtype", config.get("torch_dtype"))
    named: dict[str, Any] = {"trust_remote_code": True} if trusts else {}
    if dtype is not None:
        named["dtype"] = str(dtype).removeprefix("torch.")
    named |= base
    if half and named.get("dtype", wanted) != wanted:
        told[half] = True
    return named


def _data(value: Any, text: str) -> Any:
    """The data, whose texts stand in the column of `dataset_text_field`."""
    data = data_fields(value)
    has_columns = not isinstance(data, Mapping) or "columns" in data
    return data if text == "text" or has_columns else {**data, "columns": {"text": text}}
