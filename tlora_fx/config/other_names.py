"""Names of a job file's keys in other trainers, with the key that says the same here.

Names of TRL's and transformers' arguments, of Axolotl, LLaMA-Factory and torchtune.
"""

from __future__ import annotations

from collections.abc import Mapping

#: By their key, our key of a job.
JOB_KEYS: Mapping[str, str] = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "steps": "max_steps",
    "num_steps": "max_steps",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "model_max_length": "max_length",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "scheduler": "lr_scheduler_type",
    "warmup": "warmup_steps",
    "gradient_clipping": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "grad_accum": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "random_seed": "seed",
    "save_interval": "save_steps",
    "eval_dataset": "eval_data",
    "val_data": "eval_data",
    "test_data": "eval_data",
    "val_set_size": "eval_split",
    "val_size": "eval_split",
    "eval_every": "eval_steps",
    "evaluation_strategy": "eval_strategy",
    "early_stopping": "early_stopping_patience",
    "train_dataset": "data",
    "dataset": "data",
    "datasets": "data",
    "train_data": "data",
    "peft_config": "lora",
    "sample_packing": "packing",
    "rl": "method",
    "trainer": "method",
    "dpo_beta": "beta",
    "pref_beta": "beta",
    "betas": "adam_beta1",
    "eps": "adam_epsilon",
    "wd": "weight_decay",
    "loraplus_ratio": "loraplus_lr_ratio",
}
#: By their key, our key under `lora`.
LORA_KEYS: Mapping[str, str] = {
    "rank": "r",
    "lora_r": "r",
    "lora_rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "lora_target": "target_modules",
    "lora_target_modules": "target_modules",
    "targets": "target_modules",
    "modules": "target_modules",
    "peft_use_dora": "use_dora",
    "dora": "use_dora",
    "rslora": "use_rslora",
    "init": "init_lora_weights",
}
#: By their key, our key under `base`.
BASE_KEYS: Mapping[str, str] = {
    "name": "model",
    "base_model": "model",
    "model_name": "model",
    "model_name_or_path": "model",
    "model_id": "model",
    "path": "model",
    "tokenizer_name": "tokenizer",
    "tokenizer_config": "tokenizer",
    "torch_dtype": "dtype",
    "precision": "dtype",
    "quantization": "quantize",
    "quantise": "quantize",
    "attn_implementation": "attention",
    "task_type": "task",
}
#: By their key, our key under `data`.
DATA_KEYS: Mapping[str, str] = {
    "file": "path",
    "files": "path",
    "data_files": "path",
    "train_file": "path",
    "dataset": "path",
    "dataset_name": "path",
    "source": "path",
    "config": "name",
    "config_name": "name",
    "subset": "name",
    "type": "format",
    "dataset_text_field": "columns",
    "field_messages": "columns",
    "field": "columns",
    "mapping": "columns",
    "column_mapping": "columns",
    "train_on": "loss_on",
}
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
