"""Config files of TRL: `--config FILE` of `trl sft`, `trl dpo`, `trl kto` and `trl reward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_fx.config.imports.draft import NO_VALUE, OFF, Draft, truth
from tlora_fx.config.imports.parts import (
    FILE,
    carry_dtype,
    carry_model,
    carry_quantisation,
    carry_targets,
    data_list,
    is_data_file,
    put_data,
)
from tlora_fx.config.imports.trainer import SFT_DEFAULTS, carry_trainer
from tlora_fx.config.trl_arguments import REFUSED_OF_PREFERENCES

TYPICAL = frozenset({
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "use_peft",
    "lora_r", "lora_target_modules", "lora_modules_to_save", "dataset_text_field", "max_length",
    "model_name_or_path", "lora_task_type", "dataset_num_proc", "completion_only_loss",
    "assistant_only_loss", "eos_token", "attn_implementation", "model_revision",
})  # fmt: skip
#: Keys of DPOConfig that have no equal: their value that changes nothing, and why.
_DPO: Mapping[str, tuple[Any, str]] = {
    **{key: told for key, told in REFUSED_OF_PREFERENCES.items() if key != "is_encoder_decoder"},
    "f_alpha_divergence_coef": (0.5, "the divergence is the reverse KL"),
    "discopop_tau": (0.05, "there is no DiscoPOP"),
    "ref_model_mixup_alpha": (0.6, "the reference stays as it is"),
    "ref_model_sync_steps": (512, "the reference stays as it is"),
    "precompute_ref_log_probs": (False, ""),
    "precompute_ref_batch_size": (None, ""),
}
#: Keys of `trl kto` alone.
_KTO = ("desirable_weight", "undesirable_weight")
#: And of `trl reward` alone.
_CENTER = "center_rewards_coefficient"


def carry(draft: Draft) -> None:
    """Carry all keys of a config file of TRL."""
    is_kto = draft.rest.get("loss_type") == "kto" or any(draft.has(key) for key in _KTO)
    is_reward = draft.rest.get("lora_task_type") == "SEQ_CLS" or draft.has(_CENTER)
    is_dpo = not is_kto and not is_reward and any(draft.has(key) for key in ("beta", *_DPO))
    draft.name(draft.rest.get("run_name"), _folder(draft.rest.get("output_dir")))
    draft.leave_key("run_name", "it names the job")
    carry_model(draft, "model_name_or_path")
    draft.move_flag("trust_remote_code", "base.trust_remote_code")
    draft.leave_key("attn_implementation", "the base's own attention is rewritten for packed rows")
    if draft.rest.get("model_revision") == "main":
        draft.leave_key("model_revision", OFF)
    draft.leave_key("model_revision", "a job takes the newest revision", changes=True)
    carry_dtype(draft, ("dtype", "torch_dtype"))
    _carry_lora(draft)
    carry_quantisation(
        draft,
        "load_in_4bit", "load_in_8bit",
        options=("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
        nested="use_bnb_nested_quant",
    )  # fmt: skip
    _carry_data(draft)
    draft.leave_key("ignore_bias_buffers", "it is of distributed training alone")
    draft.leave_key("env", "set the variables in the shell")
    defaults: dict[str, Any] = dict(SFT_DEFAULTS)
    if is_dpo:
        _carry_dpo(draft)
        defaults |= {"learning_rate": 1e-6}
    if is_kto:
        draft.job["method"] = "kto"
        for key in ("beta", *_KTO):
            draft.move(key, key)
        if (loss := draft.take("loss_type")) is not None:
            draft.leave("loss_type", loss, "see method", changes=loss != "kto")
        defaults |= {"learning_rate": 1e-6, "train_sampling_strategy": "sequential"}
    if is_reward:
        draft.job["method"] = "reward"
        draft.base |= {"task": "SEQ_CLS", "labels": 1}
        draft.move(_CENTER, _CENTER)
        defaults |= {"learning_rate": 1e-4}
    if draft.job.get("method", "sft") != "sft":
        _carry_dropout(draft)
    carry_trainer(draft, defaults)


def _folder(path: Any) -> Any:
    return path.rstrip("/").rpartition("/")[2] if isinstance(path, str) else None


def _carry_lora(draft: Draft) -> None:
    if truth(draft.rest.get("use_peft")) is True:
        draft.put("use_peft", "lora", {})
        draft.rest.pop("use_peft")
    else:
        draft.take("use_peft")
        draft.refuse("use_peft", "without it TRL trains the whole model; set use_peft: true")
    draft.job["lora"] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
    for key, field in (
        ("lora_r", "r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout"),
        ("lora_target_parameters", "target_parameters"),
        ("lora_modules_to_save", "modules_to_save"),
    ):  # fmt: skip
        draft.move(key, f"lora.{field}")
    carry_targets(draft, "lora_target_modules")
    draft.move_flag("use_rslora", "lora.use_rslora")
    draft.move_flag("use_dora", "lora.use_dora")
    draft.move("lora_task_type", "base.task")


def _carry_dropout(draft: Draft) -> None:
    """Turn dropout off, as TRL does for preferences unless it is told otherwise."""
    told = draft.take("disable_dropout")
    is_off = truth(told) is not False
    if told is not None:
        draft.leave("disable_dropout", told, "see lora_dropout")
    if not is_off:
        return
    dropout = draft.job["lora"].pop("lora_dropout")
    if draft.carried.pop("lora_dropout", None):
        why = "TRL turns dropout off for preferences, unless disable_dropout is false"
        draft.leave("lora_dropout", dropout, why)


def _carry_dpo(draft: Draft) -> None:
    draft.job["method"] = "dpo"
    draft.move("beta", "beta")
    loss = draft.take("loss_type")
    if loss in ("sigmoid", ["sigmoid"]):
        draft.leave("loss_type", loss, OFF)
    elif loss is not None:
        draft.refuse("loss_type", f"method dpo has the loss 'sigmoid' alone, found {loss!r}")
    for key, (neutral, why) in _DPO.items():
        value = draft.take(key)
        if value is not None:
            is_off = value == neutral or not why
            draft.leave(key, value, OFF if value == neutral else why or "it is of memory alone",
                        changes=not is_off)  # fmt: skip


def _carry_data(draft: Draft) -> None:
    text = draft.take("dataset_text_field")
    if text is not None:
        draft.leave("dataset_text_field", text, OFF if text == "text" else "see data.columns")
    columns = {"columns": {"text": text}} if text not in (None, "text") else {}
    if draft.has("datasets"):
        _carry_mixture(draft, columns)
        for key in ("dataset_name", "dataset_config", "dataset_streaming"):
            draft.leave_key(key, "'datasets' counts")
        for key in ("dataset_train_split", "dataset_test_split"):
            draft.leave_key(key, "'datasets' counts")
        return
    draft.take("datasets")
    draft.leave_key("test_split_size", "it is of 'datasets'")
    path = draft.take("dataset_name")
    if path is None:
        draft.refuse("dataset_name", "the data is not named")
        return
    draft.put("dataset_name", "data.path", draft.path(path))
    draft.job["data"] |= columns
    draft.move_flag("dataset_streaming", "data.streaming")
    draft.leave_key("streaming", "it is of 'datasets'")
    if is_data_file(path):
        if draft.rest.get("dataset_train_split") == "train":
            draft.leave_key("dataset_train_split", OFF)
        for key in ("dataset_config", "dataset_train_split", "dataset_test_split"):
            draft.leave_key(key, FILE, changes=True)
    else:
        draft.move("dataset_config", "data.name")
        draft.move("dataset_train_split", "data.split")
        _carry_test_split(draft)


def _carry_test_split(draft: Draft) -> None:
    """Evaluate on the other split, if `trl sft` does."""
    split = draft.take("dataset_test_split")
    evaluates = draft.rest.get("eval_strategy", draft.rest.get("evaluation_strategy", "no"))
    if evaluates not in ("no", False, None):
        draft.job["eval_split"] = "test"
        if split is not None:
            draft.put("dataset_test_split", "eval_split", split)
    elif split is not None:
        draft.leave("dataset_test_split", split, "eval_strategy says that nothing is evaluated")


def _carry_mixture(draft: Draft, columns: Mapping[str, Any]) -> None:
    entries = [
        {**columns, **_mixed(draft, key, entry)} for key, entry in data_list(draft, "datasets")
    ]
    put_data(draft, "datasets", entries)
    streaming = truth(draft.take("streaming"))
    if streaming is not None and len(entries) == 1:
        draft.put("streaming", "data.streaming", streaming)
    elif streaming is not None:
        draft.leave("streaming", streaming, "several data sets are read whole")
    draft.move("test_split_size", "eval_split")


def _mixed(draft: Draft, key: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A data set of a mixture."""
    made: dict[str, Any] = {}
    for name, value in entry.items():
        at = f"{key}.{name}"
        if value is None:
            draft.leave(at, None, NO_VALUE)
        elif name in ("name", "split"):
            made[name] = value
        elif name == "path" or (name == "data_files" and isinstance(value, str)):
            made["path"] = draft.path(value)
        elif name == "columns":
            draft.leave(at, value, "columns are recognised by their names")
        else:
            whole = "a job reads whole data sets; weight draws from each by a probability"
            known = name in ("data_files", "data_dir", "fraction")
            draft.leave(at, value, whole if known else "TRL has no such key", changes=True)
    return made
