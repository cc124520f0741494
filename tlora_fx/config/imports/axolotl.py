"""Config files of Axolotl: `axolotl train FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_fx.config.imports.draft import OFF, Draft, truth
from tlora_fx.config.imports.parts import (
    carry_dtype,
    carry_model,
    carry_quantisation,
    carry_share,
    carry_targets,
    data_list,
    put_data,
)
from tlora_fx.config.imports.trainer import DEFAULTS, JUDGED_BY, carry_trainer
from tlora_fx.config.other_names import JOB_KEYS

TYPICAL = frozenset({
    "base_model", "adapter", "micro_batch_size", "num_epochs", "sequence_len", "sample_packing",
    "lora_target_linear", "val_set_size", "dataset_prepared_path", "pad_to_sequence_len",
    "train_on_inputs", "flash_attention", "special_tokens", "model_type", "tokenizer_type",
    "optimizer", "lr_scheduler", "evals_per_epoch", "saves_per_epoch", "xformers_attention",
})  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS, "per_device_train_batch_size": 1, "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine", "max_length": 512, "save_strategy": "epoch", "packing": False,
    "warmup_steps": 0.03,
}  # fmt: skip
_TRAINER_NAMES = {
    key: JOB_KEYS[key]
    for key in (
        "micro_batch_size", "eval_batch_size", "num_epochs", "sequence_len", "optimizer",
        "lr_scheduler", "sample_packing",
    )
}  # fmt: skip
#: Keys that would change numbers, and why they have no equal.
_CHANGES: Mapping[str, str] = {
    "gptq": "a base of GPTQ is not read",
    "revision_of_model": "a job takes the newest revision",
    "base_model_config": "the base has a config of its own",
    "overrides_of_model_config": "write it into the base's config.json",
    "overrides_of_model_kwargs": "write it into the base's config.json",
    "model_config": "write it into the base's config.json",
    "rope_scaling": "write it into the base's config.json",
    "resize_token_embeddings_to_32x": "the vocabulary of the base stays as it is",
    "mean_resizing_embeddings": "the vocabulary of the base stays as it is",
    "shrink_embeddings": "the vocabulary of the base stays as it is",
    "tokens": "the tokenizer stays as it is",
    "added_tokens_overrides": "the tokenizer stays as it is",
    "special_tokens": "the tokenizer stays as it is: set them in its folder",
    "eot_tokens": "the tokenizer's chat template says where turns end",
    "chat_template_jinja": "write it into the tokenizer's folder, and name that under 'base'",
    "default_system_message": "write the system message into the data",
    "fix_untrained_tokens": "the embeddings of the base stay as they are",
    "tokenizer_use_mistral_common": "the tokenizer is read by transformers",
    "peft": "the pass quantize-base stores a base in fewer bits: docs/quantised-base.md",
    "peft_layer_replication": "it changes the layers of the base, which all jobs share",
    "peft_ensure_weight_tying": "tied copies of trained modules are not supported yet",
    "peft_autocast_adapter_dtype": "write adapter_dtype into the job file",
    "relora": "ReLoRA merges adapters into the base, which is frozen",
    "relora_steps": "ReLoRA merges adapters into the base, which is frozen",
    "unfrozen_parameters": "the base is frozen",
    "lisa_n_layers": "LISA trains the base, which is frozen",
    "reward_model": "write method: reward, and task: SEQ_CLS and labels: 1 under 'base'",
    "center_rewards_coefficient": "write it beside method: reward",
    "process_reward_model": "there is no reward model",
    "dataset_shard_num": "a job reads whole data sets",
    "dataset_shard_idx": "a job reads whole data sets",
    "dataset_exact_deduplication": "a job reads each row",
    "min_sample_len": "a job reads samples of any length",
    "excess_length_strategy": "samples that are longer than max_length are cut",
    "sample_packing_sequentially": "samples are packed the best fit first",
    "curriculum_sampling": "samples are shuffled, unless shuffle is false",
    "use_pose": "there is no PoSE",
    "s2_attention": "there is no S2-attention",
    "fp8": "the pass quantize-base has products in float8: docs/quantised-base.md",
    "qat": "there is no training for a quantisation",
    "embedding_lr": "write loraplus_lr_embedding beside loraplus_lr_ratio",
    "embedding_lr_scale": "write loraplus_lr_embedding beside loraplus_lr_ratio",
    "lr_groups": "all matrices of a job learn at one rate, or by loraplus_lr_ratio",
    "lr_quadratic_warmup": "the rate rises linearly",
    "cosine_min_lr_ratio": "write lr_scheduler_type: cosine_with_min_lr and its min_lr_rate",
    "cosine_constant_lr_ratio": "the schedule has no constant end",
    "adam_epsilon2": "it is of an optimizer that is not here",
    "adam_beta3": "it is of an optimizer that is not here",
    "loss_watchdog_threshold": "a job does not stop by its loss",
    "rpo_alpha": "the loss of dpo has no part of sft",
    "simpo_gamma": "there is no SimPO",
    "cpo_alpha": "there is no CPO",
    "dpo_use_weighting": "there is no WPO",
    "dpo_label_smoothing": "there is no label smoothing",
    "plugins": "plugins of Axolotl are not run",
    "num_labels": "write task: SEQ_CLS and labels under 'base'",
    "router_aux_loss_coef": "auxiliary losses of routers are not trained",
    "shuffle_merged_datasets": "see shuffle",
}
#: Keys that change no number.
_IDLE = frozenset({
    "strict", "model_type", "tokenizer_type", "tokenizer_use_fast", "tokenizer_legacy",
    "tokenizer_save_jinja_files", "processor_type", "cls_model_config", "is_falcon_derived_model",
    "is_llama_derived_model", "is_mistral_derived_model", "is_qwen_derived_model", "use_kernels",
    "experimental_skip_move_to_device", "dataset_prepared_path", "dataset_processes",
    "dataset_keep_in_memory", "skip_prepare_dataset", "push_dataset_to_hub", "hf_use_auth_token",
    "device", "device_map", "world_size", "eval_table_size", "eval_max_new_tokens",
    "do_causal_lm_eval", "eval_causal_lm_metrics", "do_bench_eval", "bench_dataset",
    "loss_watchdog_patience", "gc_steps", "sample_packing_group_size", "sample_packing_bin_size",
    "eval_sample_packing", "pad_to_sequence_len", "multipack_real_batches", "batch_flattening",
    "xformers_attention", "sdp_attention", "flex_attention", "flex_attn_compile_kwargs",
    "flash_attention", "flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_qkv",
    "flash_attn_fuse_mlp", "flash_optimum", "eager_attention", "attn_implementation",
    "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_on_cpu", "merge_lora",
    "qlora_sharded_model_loading", "llama4_linearized_experts", "fsdp_version",
    "fsdp_final_state_dict_type", "sequence_parallel_degree", "heads_k_stride", "ring_attn_func",
    "context_parallel_size", "tensor_parallel_size", "dp_shard_size", "dp_replicate_size",
    "save_first_step", "profiler_steps", "profiler_steps_start", "include_tokens_per_second",
    "include_tkps", "max_memory", "gpu_memory_limit", "low_cpu_mem_usage", "is_preprocess",
    "preprocess_iterable", "total_num_tokens", "total_supervised_tokens",
    "sample_packing_eff_est", "axolotl_config_path", "auto_resume_from_checkpoints",
    "embeddings_skip_upcast", "float32", "torchdistx_path", "use_ray", "ray_run_name",
    "ray_num_workers", "resources_per_worker", "vllm", "trl", "max_prompt_len",
    "dpo_use_logits_to_keep", "quantization", "comet", "merge_method", "debug", "bench_split",
    "eval_causal_lm", "lora_model_dir_merge",
})  # fmt: skip
_IDLE_PREFIXES = (
    "wandb_", "mlflow_", "comet_", "gradio_", "unsloth_", "liger_", "cut_cross_entropy", "fsdp_",
    "pose_", "pretrain_multipack", "relora_", "jagged_restart", "lisa_", "swanlab_", "ddp_",
    "is_", "use_comet", "trackio_", "torchao_",
)  # fmt: skip
_METHODS = {"dpo": "dpo", "orpo": "orpo", "kto": "kto"}
_LINEAR = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
})  # fmt: skip
#: Keys of a data set that change no row.
_DATA_IDLE = frozenset({
    "ds_type", "preprocess_shards", "trust_remote_code", "field_thinking",
    "template_thinking_key", "conversation", "split_thinking",
})  # fmt: skip
_FORMATS: Mapping[str, str] = {"completion": "text", "pretrain": "text", "alpaca": "alpaca"}
_NO_FORMAT: Mapping[str, str] = {
    "input_output": "each row says by segments what is trained; write the columns input_ids and "
    "labels, format: tokens",
    "synthetic": "its rows are drawn at random",
    "stepwise_supervised": "there is no reward model of steps",
}
_ALPACA_TEXT = "Axolotl writes the words of Alpaca around a sample; a job takes the chat template"
_TEMPLATE = "the tokenizer's own chat template is used, which may write turns otherwise"


def carry(draft: Draft) -> None:
    """Carry all keys of a config file of Axolotl."""
    output = draft.rest.get("output_dir")
    folder = output.rstrip("/").rpartition("/")[2] if isinstance(output, str) else None
    draft.name(draft.rest.get("wandb_name"), folder)
    carry_model(draft, "base_model")
    if (tokenizer := draft.take("tokenizer_config")) is not None:
        draft.put("tokenizer_config", "base.tokenizer", draft.path(tokenizer))
    draft.move_flag("trust_remote_code", "base.trust_remote_code")
    carry_dtype(draft)
    keys = ("load_in_4bit", "load_in_8bit")
    carry_quantisation(draft, *keys, options=("bnb_config_kwargs",), nests=True)
    _carry_method(draft)
    _carry_lora(draft)
    _carry_data(draft)
    _carry_batch(draft)
    defaults = {**_DEFAULTS, "report_to": _trackers(draft), "eval_strategy": _moments(draft)}
    tokens = draft.rest.get("special_tokens")
    if isinstance(tokens, dict) and tokens.keys() <= {"pad_token"}:
        draft.leave_key("special_tokens", "rows are packed, nothing is padded")
    draft.leave_known(_CHANGES, _IDLE, _IDLE_PREFIXES)
    carry_trainer(draft, defaults, _TRAINER_NAMES)


def _carry_method(draft: Draft) -> None:
    method = draft.take("rl")
    if method is None:
        return
    if not isinstance(method, str) or method not in _METHODS:
        draft.refuse("rl", f"expected dpo, orpo or kto, found {method!r}")
        return
    draft.put("rl", "method", _METHODS[method])
    for name in ("desirable_weight", "undesirable_weight"):
        if method == "kto":
            draft.move(f"kto_{name}", name)
        draft.leave_key(f"kto_{name}", "it is of method kto")
    for key in ("rl_beta", "dpo_beta", "orpo_alpha"):
        if (
            draft.has(key)
            and "beta" not in draft.job
            and (key == "orpo_alpha") == (method == "orpo")
        ):
            draft.move(key, "beta")
        draft.leave_key(key, "it is of another method")


def _carry_lora(draft: Draft) -> None:
    kind = draft.take("adapter")
    if kind not in ("lora", "qlora"):
        why = "without it Axolotl trains the whole model; set adapter: lora"
        draft.refuse("adapter", why if kind is None else f"expected lora or qlora, found {kind!r}")
    else:
        draft.put("adapter", "lora", {})
    folder = draft.take("lora_model_dir")
    if folder is not None:
        draft.put("lora_model_dir", "adapter", draft.path(folder))
        draft.job.pop("lora", None)
        for key in list(draft.rest):
            if (key.startswith("lora_") and key not in _IDLE) or key.startswith("peft_"):
                draft.leave_key(key, "the adapter's folder says it")
        return
    draft.job["lora"] = {}
    for key, field in (
        ("lora_r", "r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout"),
        ("lora_modules_to_save", "modules_to_save"),
        ("peft_layers_to_transform", "layers_to_transform"),
        ("peft_layers_pattern", "layers_pattern"), ("peft_init_lora_weights", "init_lora_weights"),
        ("peft_trainable_token_indices", "trainable_token_indices"),
    ):  # fmt: skip
        draft.move(key, f"lora.{field}")
    if (parameters := draft.take("lora_target_parameters")) is not None:
        listed = [parameters] if isinstance(parameters, str) else parameters
        draft.put("lora_target_parameters", "lora.target_parameters", listed)
    for key, field in (
        ("lora_fan_in_fan_out", "fan_in_fan_out"), ("peft_use_dora", "use_dora"),
        ("peft_use_rslora", "use_rslora"),
    ):  # fmt: skip
        draft.move_flag(key, f"lora.{field}")
    _carry_targets(draft)


def _carry_targets(draft: Draft) -> None:
    linear = truth(draft.take("lora_target_linear"))
    if linear is not True:
        if linear is not None:
            draft.leave("lora_target_linear", linear, OFF)
        carry_targets(draft, "lora_target_modules")
        return
    draft.put("lora_target_linear", "lora.target_modules", "all-linear")
    named = draft.take("lora_target_modules")
    if named is not None:
        listed = named if isinstance(named, list) else [named]
        others = [name for name in listed if not isinstance(name, str) or name not in _LINEAR]
        why = "lora_target_linear covers linear modules, and a job names all or some"
        draft.leave("lora_target_modules", named, why, changes=bool(others))


def _carry_data(draft: Draft) -> None:
    template = draft.take("chat_template")
    if template is not None:
        is_own = template == "tokenizer_default"
        draft.leave("chat_template", template, OFF if is_own else _TEMPLATE, changes=not is_own)
    trains_inputs = truth(draft.take("train_on_inputs"))
    source = "datasets" if draft.has("datasets") else "pretraining_dataset"
    entries = []
    for key in ("datasets", "pretraining_dataset"):
        if draft.has(key):
            draft.note(key, "data")
            for at, entry in data_list(draft, key):
                entries += _entries(draft, at, entry)
        else:
            draft.take(key)
    if trains_inputs is True:
        for entry in entries:
            entry["loss_on"] = "all"
        draft.note("train_on_inputs", "data.loss_on")
    elif trains_inputs is not None:
        draft.leave("train_on_inputs", trains_inputs, OFF)
    put_data(draft, source if entries else "datasets", entries)
    _carry_evaluation(draft)
    if "shuffle_merged_datasets" in draft.rest:
        shuffles = truth(draft.rest.pop("shuffle_merged_datasets"))
        draft.leave("shuffle_merged_datasets", shuffles, "samples are shuffled in each epoch")


def _carry_evaluation(draft: Draft) -> None:
    if draft.has("test_datasets"):
        entries = [
            made for at, entry in data_list(draft, "test_datasets")
            for made in _entries(draft, at, entry)
        ]  # fmt: skip
        if len(entries) > 1:
            why = "'eval_data' is one data set"
            draft.leave("test_datasets.1", len(entries) - 1, why)
        put_data(draft, "test_datasets", entries[:1], "eval_data")
    draft.take("test_datasets")
    carry_share(draft, "val_set_size")


def _entries(draft: Draft, at: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The data sets of a job that one data set of Axolotl is; none where a job cannot read it."""
    entry = {name: value for name, value in entry.items() if value is not None}
    kind = entry.pop("type", None)
    name = kind.partition(".")[0].partition(":")[0] if isinstance(kind, str) else ""
    if name in _NO_FORMAT:
        draft.leave(f"{at}.type", kind, _NO_FORMAT[name], changes=True)
        for other, value in entry.items():
            draft.leave(f"{at}.{other}", value, "the data set is left out", changes=True)
        return []
    made = _format(draft, at, kind, name, entry)
    made |= {key: entry.pop(key) for key in ("name", "split") if key in entry}
    paths = _paths(draft, at, entry)
    _leave_rest(draft, at, entry)
    return [{"path": draft.path(path), **made} for path in paths]


def _paths(draft: Draft, at: str, entry: dict[str, Any]) -> list[Any]:
    path, files = entry.pop("path", None), entry.pop("data_files", None)
    if path is None and files is None:
        draft.refuse(f"{at}.path", "a data set needs a path")
        return []
    if files is None:
        return [path]
    listed = files if isinstance(files, list) else [files]
    if path is None or path in ("json", "csv", "parquet", "text"):
        return listed
    if isinstance(path, str) and path.startswith((".", "/")):
        return [f"{path.rstrip('/')}/{file}" for file in listed]
    draft.leave(f"{at}.data_files", files, "a data set of the hub is read whole", changes=True)
    return [path]


def _format(draft: Draft, at: str, kind: Any, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Format and columns of a data set; takes keys of `entry`."""
    if isinstance(kind, dict):
        return _own_format(draft, at, kind)
    if (method := draft.job.get("method")) in _METHODS:
        draft.leave(f"{at}.type", kind, "columns of preferences are recognised by their names",
                    changes=kind is not None)  # fmt: skip
        columns = {ours: entry.pop(key) for key, ours in _PREFERENCE.items() if key in entry}
        format = "unpaired-preference" if method == "kto" else "preference"
        return {"format": format} | ({"columns": columns} if columns else {})
    if name in {"chat_template", "sharegpt"}:
        return _chat_format(draft, at, name, entry)
    if kind is None:
        return {"format": "tokens"}
    if name in _FORMATS:
        if name == "alpaca":
            draft.leave(f"{at}.type", kind, _ALPACA_TEXT, changes=True)
        column = entry.pop("field", None) or entry.pop("text_column", None)
        columns = {"columns": {"text": column}} if column and _FORMATS[name] == "text" else {}
        return {"format": _FORMATS[name], **columns}
    why = "a job has no such type, and recognises the columns by their names"
    draft.leave(f"{at}.type", kind, why, changes=True)
    return {}


_PREFERENCE = {
    "field_messages": "prompt", "field_prompt": "prompt", "field_chosen": "chosen",
    "field_rejected": "rejected",
}  # fmt: skip


def _chat_format(draft: Draft, at: str, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    keys = entry.pop("message_property_mappings", None)
    keys = dict(keys) if isinstance(keys, dict) else {}
    for theirs, ours in (("message_field_role", "role"), ("message_field_content", "content")):
        if theirs in entry:
            keys[ours] = entry.pop(theirs)
    pair = (keys.get("role", "role"), keys.get("content", "content"))
    is_old = name == "sharegpt" or pair == ("from", "value")
    if not is_old and pair != ("role", "content"):
        why = "messages have the keys role and content, or from and value"
        draft.leave(f"{at}.message_property_mappings", keys, why, changes=True)
    column = entry.pop("field_messages", None)
    ours = "conversations" if is_old else "messages"
    columns = {} if column in (None, ours) else {ours: column}
    if is_old and column is None and name != "sharegpt":
        columns = {ours: "messages"}
    if (tools := entry.pop("field_tools", None)) not in (None, "tools"):
        columns["tools"] = tools
    roles = entry.pop("roles_to_train", None)
    if roles is not None and roles not in (["assistant"], ["gpt"], ["assistant", "gpt"]):
        why = "the turns of the assistant are trained"
        draft.leave(f"{at}.roles_to_train", roles, why, changes=True)
    if (ends := entry.pop("train_on_eos", None)) not in (None, "turn"):
        draft.leave(f"{at}.train_on_eos", ends, "the end of each turn is trained", changes=True)
    return {"format": "sharegpt" if is_old else "messages"} | (
        {"columns": columns} if columns else {}
    )


def _own_format(draft: Draft, at: str, kind: dict[str, Any]) -> dict[str, Any]:
    """Columns of a type that its user wrote."""
    columns, ranked = {}, draft.job.get("method") in ("dpo", "orpo")
    known = (
        {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected",
         "field_system": "system"}
        if ranked else
        {"field_instruction": "instruction", "field_input": "input", "field_output": "output",
         "field_system": "system"}
    )  # fmt: skip
    for name, value in kind.items():
        if value is None or value == "":
            continue
        if name in known:
            if value != known[name]:
                columns[known[name]] = value
        else:
            why = "a job writes no text around a sample but the chat template's"
            draft.leave(f"{at}.type.{name}", value, why, changes=True)
    return {"format": "preference" if ranked else "alpaca"} | (
        {"columns": columns} if columns else {}
    )


def _leave_rest(draft: Draft, at: str, entry: Mapping[str, Any]) -> None:
    for name, value in entry.items():
        where = f"{at}.{name}"
        if name == "chat_template":
            is_own = value == "tokenizer_default"
            draft.leave(where, value, OFF if is_own else _TEMPLATE, changes=not is_own)
        elif name in _DATA_IDLE or value is False:
            draft.leave(where, value, "it changes no row")
        else:
            draft.leave(where, value, "a data set of a job has no such key", changes=True)


def _trackers(draft: Draft) -> list[str]:
    """Trackers, each of which Axolotl has keys of its own for."""
    trackers = []
    for name, keys in (
        ("wandb", ("use_wandb", "wandb_project")),
        ("mlflow", ("use_mlflow", "mlflow_tracking_uri")),
        ("tensorboard", ("use_tensorboard",)), ("trackio", ("use_trackio",)),
    ):  # fmt: skip
        if any(truth(draft.rest.get(key)) not in (None, False, "") for key in keys):
            trackers.append(name)
            for key in keys:
                if (value := draft.take(key)) is not None:
                    draft.leave(key, value, "see report_to")
        for key in keys:
            draft.leave_key(key, OFF)
    return trackers


def _carry_batch(draft: Draft) -> None:
    """Make accumulation steps of the size of a whole batch."""
    whole, part = draft.take("batch_size"), draft.rest.get("micro_batch_size", 1)
    if whole is None:
        return
    if draft.has("gradient_accumulation_steps"):
        draft.leave("batch_size", whole, "gradient_accumulation_steps counts")
    elif type(whole) is int and type(part) is int and part > 0 and whole >= part:
        draft.put("batch_size", "gradient_accumulation_steps", whole // part)
    else:
        draft.refuse("batch_size", f"expected a multiple of micro_batch_size, found {whole!r}")


def _moments(draft: Draft) -> str:
    """When evaluations come, unless `eval_strategy` says it."""
    saves, times = draft.take("saves_per_epoch"), draft.take("evals_per_epoch")
    if saves is not None:
        draft.leave("saves_per_epoch", saves, "checkpoints are written every save_steps steps")
    if times is not None:
        evaluates = "eval_data" in draft.job or "eval_split" in draft.job
        why = "evaluations come once an epoch" if evaluates else "there is nothing to evaluate"
        judges = evaluates and times != 1 and any(draft.has(name) for name in JUDGED_BY)
        draft.leave("evals_per_epoch", times, why, changes=judges)
    return "steps" if draft.has("eval_steps") and times is None else "epoch"
