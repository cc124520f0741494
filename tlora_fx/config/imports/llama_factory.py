"""Config files of LLaMA-Factory: `llamafactory-cli train FILE`.

A file names its data sets; where they are, and which columns they have, stands in dataset_info.json
of another folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlora_fx.config.imports.draft import OFF, Draft, names, truth
from tlora_fx.config.imports.parts import (
    carry_dtype,
    carry_model,
    carry_quantisation,
    carry_share,
    carry_targets,
    put_data,
)
from tlora_fx.config.imports.trainer import DEFAULTS, carry_trainer
from tlora_fx.config.paths import with_home

TYPICAL = frozenset({
    "stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "lora_target",
    "lora_rank", "dataset", "overwrite_cache", "preprocessing_num_workers", "val_size",
    "plot_loss", "flash_attn", "quantization_bit", "adapter_name_or_path", "pref_beta",
})  # fmt: skip
#: The largest file of data sets that is read, in bytes.
_INFO_BYTES = 1 << 24
_STAGES = {"sft": "sft", "dpo": "dpo"}
_TRAINER_NAMES = {
    "cutoff_len": "max_length", "early_stopping_steps": "early_stopping_patience",
}  # fmt: skip
#: Keys that would change numbers, and why they have no equal.
_CHANGES: Mapping[str, str] = {
    "resize_vocab": "the vocabulary of the base stays as it is",
    "split_special_tokens": "the tokenizer stays as it is",
    "add_tokens": "the tokenizer stays as it is",
    "add_special_tokens": "the tokenizer stays as it is",
    "new_special_tokens_config": "the tokenizer stays as it is",
    "model_revision": "a job takes the newest revision",
    "rope_scaling": "write it into the base's config.json",
    "shift_attn": "there is no S2-attention",
    "mixture_of_depths": "the layers of the base stay as they are",
    "moe_aux_loss_coef": "auxiliary losses of routers are not trained",
    "upcast_layernorm": "the base has one dtype, in which it computes",
    "upcast_lmhead_output": "the base has one dtype, in which it computes",
    "train_from_scratch": "the base is frozen",
    "mask_history": "all turns of the assistant are trained, but for those of a loss_mask",
    "max_samples": "a job reads whole data sets",
    "tool_format": "the tokenizer's chat template says how tools are written",
    "default_system": "write the system message into the data",
    "enable_thinking": "the tokenizer's chat template says how thoughts are written",
    "efficient_eos": "the tokenizer's chat template says where turns end",
    "pissa_iter": "init_lora_weights takes it",
    "create_new_adapter": "the adapter itself is continued",
    "pref_ftx": "the loss of dpo has no part of sft",
    "pref_bco_weight": "there is no BCO",
    "dpo_label_smoothing": "there is no label smoothing",
    "simpo_gamma": "there is no SimPO",
    "ld_alpha": "there is no LD-DPO",
    "ref_model": "the reference is the base of the job itself",
    "ref_model_adapters": "the reference is the base of the job itself",
    "use_galore": "GaLore trains the base, which is frozen",
    "use_apollo": "APOLLO trains the base, which is frozen",
    "use_badam": "BAdam trains the base, which is frozen",
    "use_llama_pro": "the layers of the base stay as they are",
    "use_adam_mini": "there is no Adam-mini here, and the job trains with the named optimizer",
    "use_dft_loss": "method sft has the loss 'nll' alone",
    "use_eaft_loss": "method sft has the loss 'nll' alone",
    "use_asft_loss": "method sft has the loss 'nll' alone",
    "use_muon": "write optim: muon into the job",
    "fp8": "the pass quantize-base has products in float8: docs/quantised-base.md",
    "freeze_language_model": "only adapters are trained",
    "train_on_prompt_and_response": "see loss_on",
    "mix_strategy": "see mixing and weight",
    "eval_on_each_dataset": "a job has one evaluation",
    "buffer_size": "a stream is read in its order",
}
#: Keys that change no number.
_IDLE = frozenset({
    "cache_dir", "use_fast_tokenizer", "low_cpu_mem_usage", "flash_attn", "use_unsloth",
    "use_unsloth_gc", "enable_liger_kernel", "disable_gradient_checkpointing", "use_reentrant_gc",
    "infer_backend", "offload_folder", "use_kv_cache", "use_v1_kernels", "use_kt", "infer_dtype",
    "hf_hub_token", "ms_hub_token", "om_hub_token", "print_param_status", "media_dir",
    "overwrite_cache", "preprocessing_batch_size", "preprocessing_num_workers", "eval_num_beams",
    "ignore_pad_token_for_loss", "tokenized_path", "data_shared_file_system", "pissa_convert",
    "compute_accuracy", "plot_loss", "include_effective_tokens_per_second", "use_mca",
    "freeze_vision_tower", "freeze_multi_modal_projector", "use_swanlab", "ray_run_name",
    "ray_num_workers", "resources_per_worker", "placement_strategy", "ray_storage_path",
    "ray_storage_filesystem", "ray_init_kwargs", "do_sample", "temperature", "top_p", "top_k",
    "num_beams", "max_new_tokens", "repetition_penalty", "length_penalty", "skip_special_tokens",
    "export_dir", "export_size", "export_device", "export_quantization_bit",
    "export_quantization_dataset", "export_quantization_nsamples", "export_quantization_maxlen",
    "export_legacy_format", "export_hub_model_id", "use_audio_in_video", "video_fps",
    "video_maxlen", "image_max_pixels", "image_min_pixels", "video_max_pixels",
    "video_min_pixels", "audio_sampling_rate", "quantization_device_map", "fp8_backend",
    "fp8_enable_fsdp_float8_all_gather", "kto_chosen_weight", "kto_rejected_weight",
})  # fmt: skip
_IDLE_PREFIXES = (
    "swanlab_", "ppo_", "reward_model", "galore_", "apollo_", "badam_", "freeze_", "oft_", "vllm_",
    "sglang_", "kt_",
)  # fmt: skip
#: By name of dataset_info.json, ours of a column.
_ALPACA = {
    "prompt": "instruction", "query": "input", "response": "output", "system": "system",
    "history": "history",
}  # fmt: skip
_SHAREGPT = {"messages": "conversations", "system": "system", "tools": "tools"}
_RANKED = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"}
_OPENAI_TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user",
    "assistant_tag": "assistant", "system_tag": "system",
}  # fmt: skip
_SHAREGPT_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "system_tag": "system", "observation_tag": "observation", "function_tag": "function_call",
}  # fmt: skip


def carry(draft: Draft) -> None:
    """Carry all keys of a config file of LLaMA-Factory."""
    output = draft.rest.get("output_dir")
    folder = output.strip("/").replace("/", "-") if isinstance(output, str) else None
    draft.name(draft.rest.get("run_name"), folder)
    draft.leave_key("run_name", "it names the job")
    carry_model(draft, "model_name_or_path")
    draft.move_flag("trust_remote_code", "base.trust_remote_code")
    carry_dtype(draft)
    if draft.rest.get("model_revision") == "main":
        draft.leave_key("model_revision", OFF)
    carry_quantisation(
        draft, "quantization_bit",
        options=("quantization_method", "quantization_type", "double_quantization"),
        nested="double_quantization", nests=True,
    )  # fmt: skip
    _carry_method(draft)
    _carry_lora(draft)
    _carry_data(draft)
    if truth(draft.rest.get("disable_shuffling")) is True:
        draft.put("disable_shuffling", "shuffle", False)
        draft.rest.pop("disable_shuffling")
    draft.leave_key("disable_shuffling", OFF)
    draft.leave_known(_CHANGES, _IDLE, _IDLE_PREFIXES)
    carry_trainer(draft, {**DEFAULTS, "max_length": 2048, "packing": False}, _TRAINER_NAMES)


def _carry_method(draft: Draft) -> None:
    kind = draft.take("finetuning_type")
    if kind not in (None, "lora"):
        draft.refuse("finetuning_type", f"tlora-fx trains adapters of LoRA, found {kind!r}")
    elif kind:
        draft.put("finetuning_type", "lora", {})
    given = draft.take("stage")
    stage = given or "sft"
    if not isinstance(stage, str) or stage not in _STAGES:
        draft.refuse("stage", f"expected sft or dpo, found {stage!r}")
        stage = "sft"
    loss = draft.take("pref_loss")
    if stage == "dpo" and loss not in (None, "sigmoid", "orpo"):
        draft.refuse("pref_loss", f"expected sigmoid or orpo, found {loss!r}")
    method = "orpo" if stage == "dpo" and loss == "orpo" else _STAGES[stage]
    if given is not None:
        draft.put("stage", "method", method)
    if loss is not None:
        draft.leave("pref_loss", loss, "see method" if stage == "dpo" else "it is of stage dpo")
    if stage == "dpo":
        draft.move("pref_beta", "beta")
    draft.leave_key("pref_beta", "it is of stage dpo")


def _carry_lora(draft: Draft) -> None:
    folder = draft.take("adapter_name_or_path")
    inside = draft.take("adapter_folder")
    if folder is not None:
        where = f"{inside}/{folder}" if isinstance(inside, str) else folder
        draft.put("adapter_name_or_path", "adapter", draft.path(where))
        if inside is not None:
            draft.put("adapter_folder", "adapter", draft.job["adapter"])
        draft.job.pop("lora", None)
        for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora",
                    "use_dora", "pissa_init", "additional_target"):  # fmt: skip
            draft.leave_key(key, "the adapter's folder says it")
        return
    if inside is not None:
        draft.leave("adapter_folder", inside, "there is no adapter_name_or_path")
    rank = draft.rest.get("lora_rank", 8)
    draft.job["lora"] = {"r": 8, "lora_alpha": 2 * rank if type(rank) is int else 16}
    draft.move("lora_rank", "lora.r")
    draft.move("lora_alpha", "lora.lora_alpha")
    draft.move("lora_dropout", "lora.lora_dropout")
    draft.job["lora"]["target_modules"] = "all-linear"
    carry_targets(draft, "lora_target", all_names=("all",))
    if (trained := draft.take("additional_target")) is not None:
        draft.put("additional_target", "lora.modules_to_save", names(trained))
    draft.move_flag("use_rslora", "lora.use_rslora")
    draft.move_flag("use_dora", "lora.use_dora")
    start = truth(draft.take("pissa_init"))
    steps = draft.take("pissa_iter")
    if start is not None:
        times = 16 if steps is None else steps
        init = "pissa" if times == -1 else f"pissa_niter_{times}"
        draft.put("pissa_init", "lora.init_lora_weights", init if start is True else True)
    if steps is not None:
        draft.leave("pissa_iter", steps, "see init_lora_weights" if start is True else OFF)


def _carry_data(draft: Draft) -> None:
    info, unknown = _dataset_info(draft)
    for key, where in (("dataset", "data"), ("eval_dataset", "eval_data")):
        _carry_sets(draft, key, where, info, unknown)
    template = draft.take("template")
    if template is not None:
        why = "the tokenizer's own chat template is used, which may write turns otherwise"
        draft.leave("template", template, why, changes=True)
    if "data" not in draft.job:
        draft.refuse("dataset", "the data is not named")
        return
    _carry_mixing(draft)
    carry_share(draft, "val_size")
    trains_prompts = truth(draft.take("train_on_prompt"))
    if trains_prompts is True and draft.job.get("method") == "sft":
        draft.put("train_on_prompt", "completion_only_loss", False)
        draft.put("train_on_prompt", "assistant_only_loss", False)
    elif trains_prompts is not None:
        draft.leave("train_on_prompt", trains_prompts, OFF)
    streams = truth(draft.take("streaming"))
    if streams is not None and isinstance(draft.job["data"], dict):
        draft.put("streaming", "data.streaming", streams)
    elif streams is not None:
        draft.leave("streaming", streams, "several data sets are read whole")
    _carry_packing(draft)


def _carry_sets(draft: Draft, key: str, where: str, info: Mapping[str, Any], unknown: str) -> None:
    """Carry the data sets that a key names."""
    value = draft.take(key)
    if value is None:
        return
    wanted = names(value)
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        draft.refuse(key, f"expected names of data sets, found {value!r}")
        return
    for name in wanted:
        if name not in info:
            draft.refuse(key, f"the data set '{name}' is not known: {unknown}")
    entries = [_entry(draft, f"{key}.{name}", info[name]) for name in wanted if name in info]
    if where == "eval_data" and len(entries) > 1:
        draft.leave(f"{key}.{wanted[1]}", ", ".join(wanted[1:]), "'eval_data' is one data set")
        entries = entries[:1]
    put_data(draft, key, entries, where)


def _carry_packing(draft: Draft) -> None:
    neat, packs = truth(draft.take("neat_packing")), truth(draft.take("packing"))
    if packs is not None:
        draft.put("packing", "packing", packs)
    if neat is True:
        draft.put("neat_packing", "packing", True)
    elif neat is not None:
        draft.leave("neat_packing", neat, OFF)
    if packs is True and neat is not True:
        why = "samples of a sequence do not see each other here, as with neat_packing"
        draft.leave("packing", packs, why, changes=True)


def _carry_mixing(draft: Draft) -> None:
    strategy, shares = draft.take("mix_strategy"), draft.take("interleave_probs")
    parts = names(shares) if isinstance(shares, str) else shares
    data = draft.job["data"]
    if shares is None and strategy in (None, "concat"):
        if strategy is not None:
            draft.leave("mix_strategy", strategy, OFF)
    elif isinstance(data, list) and isinstance(parts, list) and len(parts) == len(data):
        for entry, share in zip(data, parts, strict=True):
            try:
                entry["weight"] = float(share)
            except (TypeError, ValueError):
                draft.refuse("interleave_probs", f"expected numbers, found {shares!r}")
                return
        ends = "all_exhausted" if strategy == "interleave_over" else "first_exhausted"
        for key, value, where in (
            ("interleave_probs", shares, "data.weight"),
            ("mix_strategy", strategy, "mixing"),
        ):
            if value is not None:
                draft.note(key, where)
        draft.job["mixing"] = ends
    else:
        why = "data sets are interleaved by weights, and stand one after the other without"
        for key, value in (("mix_strategy", strategy), ("interleave_probs", shares)):
            if value is not None:
                draft.leave(key, value, why, changes=True)


def _dataset_info(draft: Draft) -> tuple[Mapping[str, Any], str]:
    """Entries of dataset_info.json by name, and why others are not known."""
    folder = draft.take("dataset_dir")
    if folder is not None:
        draft.leave("dataset_dir", folder, "the paths of the data sets hold it")
    if isinstance(folder, dict):
        return {str(key): value for key, value in folder.items()}, "'dataset_dir' has no such entry"
    written = folder if isinstance(folder, str) and "\0" not in folder else "data"
    roots = (Path.cwd(), draft.source.absolute().parent)
    for root in roots:
        file = root / with_home(written) / "dataset_info.json"
        try:
            if not file.is_file() or file.stat().st_size > _INFO_BYTES:
                continue
            content = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"{file} cannot be read ({error})"
        if not isinstance(content, dict):
            return {}, f"{file} is no mapping"
        seen = os.path.relpath(file.parent)
        entries = {
            key: {**value, _FOLDER: seen}
            for key, value in content.items()
            if isinstance(value, dict)
        }
        return entries, f"{file} has no such entry"
    return {}, f"there is no {written}/dataset_info.json; run the command where LLaMA-Factory runs"


#: A column that LLaMA-Factory does not read, unless it is named.
_UNREAD = "\0unread"
#: Where an entry remembers the folder of its file.
_FOLDER = "\0folder"


def _entry(draft: Draft, key: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A data set of a job, of an entry of dataset_info.json."""
    entry = {name: value for name, value in entry.items() if value is not None}
    folder, made = entry.pop(_FOLDER, ""), dict[str, Any]()
    for name in ("file_name", "hf_hub_url"):
        if name in entry and "path" not in made:
            value = entry.pop(name)
            if name == "file_name" and isinstance(value, str) and "\0" not in value:
                value = str(Path(folder) / value)
            made["path"] = draft.path(value)
    if "path" not in made:
        found = ", ".join(entry) or "nothing"
        draft.refuse(key, f"expected file_name or hf_hub_url in dataset_info.json, found {found}")
    formatting, is_ranked = entry.pop("formatting", "alpaca"), entry.pop("ranking", False)
    columns, tags = entry.pop("columns", {}), entry.pop("tags", {})
    columns = columns if isinstance(columns, dict) else {}
    if columns and formatting == "alpaca" and "input" not in columns.values():
        columns = {"query": _UNREAD, **columns}
    made |= _format(draft, key, formatting, columns, tags, is_ranked=truth(is_ranked) is True)
    for name, ours in (("subset", "name"), ("split", "split")):
        if name in entry:
            made[ours] = entry.pop(name)
    for name, value in entry.items():
        same = name in ("ms_hub_url", "om_hub_url", "script_url")
        why = "the data is read from file_name or hf_hub_url" if same else "a job has no such key"
        draft.leave(f"{key}.{name}", value, why, changes=not same)
    return made


def _format(
    draft: Draft, key: str, formatting: Any, columns: Mapping[str, Any], tags: Any, *,
    is_ranked: bool,
) -> dict[str, Any]:  # fmt: skip
    """The format and the columns of a data set."""
    is_chat = formatting == "sharegpt"
    if formatting not in ("alpaca", "sharegpt"):
        draft.refuse(key, f"formatting: expected alpaca or sharegpt, found {formatting!r}")
    format, known = ("sharegpt", _SHAREGPT) if is_chat else ("alpaca", _ALPACA)
    tags = tags if isinstance(tags, dict) else {}
    if is_ranked:
        format, known = "preference", _RANKED
        known = {**known, "messages": "prompt"} if is_chat else known
    elif is_chat and tags and _is_like(tags, _OPENAI_TAGS):
        format, known = "messages", {**_SHAREGPT, "messages": "messages"}
    elif is_chat and not _is_like(tags, _SHAREGPT_TAGS):
        why = "messages have the keys and roles of sharegpt, or role and content"
        draft.leave(f"{key}.tags", dict(tags), why, changes=True)
    mapped: dict[str, Any] = {}
    for theirs, column in columns.items():
        if column is None:
            continue
        if column is _UNREAD:
            mapped |= {"input": None} if format == "alpaca" else {}
        elif theirs not in known:
            draft.leave(f"{key}.{theirs}", column, f"the format '{format}' has no such column",
                        changes=True)  # fmt: skip
        elif known[theirs] != column:
            mapped[known[theirs]] = column
    return {"format": format} | ({"columns": mapped} if mapped else {})


def _is_like(tags: Mapping[str, Any], known: Mapping[str, str]) -> bool:
    """Whether tags say what is known, as far as they say anything."""
    return all(tags.get(name, tag) == tag for name, tag in known.items())
