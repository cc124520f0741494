"""Names of a job file's keys in other trainers, with the key that says the same here.

Names of TRL's and transformers' arguments, of Axolotl, LLaMA-Factory and torchtune.
"""

from __future__ import annotations

from collections.abc import Mapping


def _by_their_key(**theirs: str) -> Mapping[str, str]:
    """Our key by each of theirs, which are given by ours."""
    return {key: ours for ours, keys in theirs.items() for key in keys.split()}


#: By their key, our key of a job.
JOB_KEYS = _by_their_key(
    learning_rate="lr",
    per_device_train_batch_size="batch_size micro_batch_size train_batch_size",
    per_device_eval_batch_size="eval_batch_size",
    num_train_epochs="epochs num_epochs",
    max_steps="steps num_steps",
    max_length="max_seq_length max_seq_len sequence_len cutoff_len model_max_length",
    optim="optimizer",
    lr_scheduler_type="lr_scheduler scheduler",
    warmup_steps="warmup",
    max_grad_norm="gradient_clipping grad_clip max_norm",
    gradient_accumulation_steps="grad_accum accumulation_steps",
    seed="random_seed",
    save_steps="save_interval",
    eval_data="eval_dataset val_data test_data",
    eval_split="val_set_size val_size",
    eval_steps="eval_every",
    eval_strategy="evaluation_strategy",
    early_stopping_patience="early_stopping",
    data="train_dataset dataset datasets train_data",
    lora="peft_config",
    packing="sample_packing",
    method="rl trainer",
    beta="dpo_beta pref_beta",
    adam_beta1="betas",
    adam_epsilon="eps",
    weight_decay="wd",
    loraplus_lr_ratio="loraplus_ratio",
)
#: By their key, our key under `lora`.
LORA_KEYS = _by_their_key(
    r="rank lora_r lora_rank",
    lora_alpha="alpha",
    lora_dropout="dropout",
    target_modules="lora_target lora_target_modules targets modules",
    use_dora="peft_use_dora dora",
    use_rslora="rslora",
    init_lora_weights="init",
)
#: By their key, our key under `base`.
BASE_KEYS = _by_their_key(
    model="name base_model model_name model_name_or_path model_id path",
    tokenizer="tokenizer_name tokenizer_config",
    dtype="torch_dtype precision",
    quantize="quantization quantise",
    attention="attn_implementation",
    task="task_type",
)
#: By their key, our key under `data`.
DATA_KEYS = _by_their_key(
    path="file files data_files train_file dataset dataset_name source",
    name="config config_name subset",
    format="type",
    columns="dataset_text_field field_messages field mapping column_mapping",
    loss_on="train_on",
)
#: What is not written into a job at all, and why or where it stands instead.
ELSEWHERE: Mapping[str, str] = {
    "gradient_checkpointing": "leave it out: --max-row-tokens bounds the memory of a forward",
    "activation_checkpointing": "leave it out: --max-row-tokens bounds the memory of a forward",
    "bf16": "write dtype: bfloat16 under 'base'",
    "fp16": "write dtype: float16 under 'base'",
    "tf32": "leave it out: the base's dtype decides",
    "dtype": "write it under 'base'",
    "model": "write it under 'base', beside 'jobs'",
    "base_model": "write model under 'base', beside 'jobs'",
    "tokenizer": "write it under 'base', beside 'jobs'",
    "output_dir": "give it on the command line: train -o FOLDER",
    "logging_steps": "leave it out: metrics.jsonl has every step",
    "logging_dir": "leave it out: metrics.jsonl stands in each job's folder",
    "save_strategy": "leave it out: save_steps says when checkpoints are written",
    "save_total_limit": "leave it out: old checkpoints are removed",
    "resume_from_checkpoint": "give it on the command line: train --resume",
    "deepspeed": "leave it out; to shard the base: train --plan fsdp",
    "fsdp": "leave it out; to shard the base: train --plan fsdp",
    "device": "give it on the command line: train --device cuda",
    "num_gpus": "train --gpus 4, or write gpus under 'schedule'",
    "load_in_4bit": "write quantize: nf4 under 'base'",
    "load_in_8bit": "write quantize: int8 under 'base'",
    "quantize": "write it under 'base'",
    "group_by_length": "leave it out: rows are packed, nothing is padded",
    "padding_free": "leave it out: rows are packed, nothing is padded",
    "dataloader_num_workers": "leave it out: samples are read before training",
    "remove_unused_columns": "leave it out: columns that are not mapped are not read",
    "task_type": "write task under 'base': CAUSAL_LM, or SEQ_CLS",
    "max_prompt_length": "leave it out: max_length bounds prompt and completion together",
    "train_on_inputs": "write its opposite, completion_only_loss",
    "train_on_prompt": "write its opposite, completion_only_loss",
    "loss_type": "leave it out: method says which loss",
    "chat_template": "write it into the tokenizer's folder, and name that under 'base'",
}

#: Arguments of TRL's and transformers' trainers, and where they go in `Job(...)` of Python.
PYTHON_KEYS: Mapping[str, str] = {
    "model": "it is called 'base' here",
    "processing_class": "it is called 'tokenizer' here",
    "args": "write Job.from_trl(args, ...) in place of Job(...)",
    "sweep": "it is a key of job files; call tlora_fx.sweep(job, {...}) here",
    "output_dir": "give it to tlora_fx.train(jobs, output=...)",
    "resume_from_checkpoint": "give it to tlora_fx.train(jobs, resume=True)",
    "optimizers": "give a class or a factory each: optim and lr_scheduler",
    "optimizer_cls_and_kwargs": "they are called 'optim' and 'optim_args' here",
    "formatting_func": "map the data before: data=dataset.map(function)",
    "columns": "give it with the data, as data={'rows': ..., 'columns': {...}}",
    "data_collator": "leave it out: rows are packed, nothing is padded",
    "compute_loss_func": "leave it out: method says which loss",
    "preprocess_logits_for_metrics": "leave it out: compute_metrics gets token ids, not logits",
    "quantization_config": "give it with the base, as base={'model': ..., 'quantize': 'nf4'}",
    **dict.fromkeys(
        ("dtype", "torch_dtype"), "give it with the base, as base={'model': ..., 'dtype': ...}"
    ),
    **dict.fromkeys(("bf16", "fp16"), "the base has it, as base={'model': ..., 'dtype': ...}"),
}


def hint(key: str, names: Mapping[str, str]) -> str:
    """Hint for a key that another trainer has; empty where none has it."""
    known = names.get(key.lower())
    if known is not None:
        return f"it is called '{known}' here"
    return ELSEWHERE.get(key.lower(), "")
