"""Arguments of transformers' Trainer, by which all three tools train, as fields of a job.

The tables are those of `Job.from_trl`. What stands here is what a file has beside an object: its
keys may be missing, and their values may be of any type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from tlora_fx.config.fields import OPTIMIZER_ALIASES, OPTIMIZERS, SCHEDULE_ARGUMENTS
from tlora_fx.config.imports.draft import NO_NUMBER, OFF, Draft, truth
from tlora_fx.config.job import Job, TrackerName
from tlora_fx.config.trl_arguments import (
    INSTEAD,
    OTHER_OPTIMIZERS,
    READ,
    REFUSED,
    SAME,
    SILENT,
    is_like,
    mapped_fields,
)

#: Defaults of transformers' Trainer.
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 5e-5,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0, "lr_scheduler_type": "linear", "optim": "adamw_torch_fused", "seed": 42,
    "per_device_eval_batch_size": 8, "eval_strategy": "no", "load_best_model_at_end": False,
    "metric_for_best_model": None, "greater_is_better": None, "report_to": [],
    "max_steps": -1, "num_train_epochs": 3.0, "warmup_steps": 0, "lr_scheduler_kwargs": None,
    "optim_args": None, "eval_steps": None, "save_steps": 500, "save_strategy": "steps",
    "train_sampling_strategy": "random", "logging_steps": 500,
}  # fmt: skip
#: And those that TRL's SFTConfig has otherwise, or beside them.
SFT_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS, "learning_rate": 2e-5, "logging_steps": 10, "max_length": 1024, "packing": False,
    "completion_only_loss": None, "assistant_only_loss": False,
}  # fmt: skip
#: Fields of the Trainer that change no number and that no table of `Job.from_trl` names.
IDLE = frozenset({
    "average_tokens_across_devices", "tf32", "torch_compile_backend", "torch_compile_mode",
    "use_liger_kernel", "liger_kernel_config", "torch_empty_cache_steps", "logging_first_step",
    "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level",
    "log_level_replica", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object",
    "eval_accumulation_steps", "save_only_model", "save_on_each_node", "enable_jit_checkpoint",
    "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
    "restore_callback_states_from_checkpoint", "full_determinism", "dataloader_num_workers",
    "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns",
    "length_column_name", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout",
    "skip_memory_metrics", "do_predict", "dataset_num_proc", "predict_with_generate",
    "generation_max_length", "generation_num_beams", "overwrite_output_dir", "save_safetensors",
    "no_remove_unused_columns", "use_reentrant", "ddp", "group_by_length", "no_cuda", "use_ipex",
    "use_mps_device",
})  # fmt: skip
#: Where something else says what a key says, in a file.
INSTEAD_IN_FILES: Mapping[str, str] = {
    **INSTEAD,
    "output_dir": "give it on the command line: train -o FOLDER",
    "resume_from_checkpoint": "give it on the command line: train --resume",
    "torch_compile": "it is an option of the command line: train --compile",
    "push_to_hub": "it is an option of the command line: train --push-to-hub",
}
_IN_TOKENIZER = "write it into the tokenizer's folder, and name that under 'base'"
#: Why arguments are left out, where `Job.from_trl` says it in Python's words.
_REASONS: Mapping[str, str] = {
    "chat_template_path": _IN_TOKENIZER,
    "eos_token": _IN_TOKENIZER,
    "shuffle_dataset": "samples are shuffled in each epoch",
    "label_names": "the columns of the data say what is trained",
}
#: Fields of a job that no argument of the Trainer is, and that the tools call the same.
DIRECT = (
    "early_stopping_patience", "early_stopping_threshold", "loraplus_lr_ratio",
    "loraplus_lr_embedding",
)  # fmt: skip
#: Former names of arguments.
FORMER: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy", "max_seq_length": "max_length",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}  # fmt: skip
#: Names by which the tools have another optimizer than a job has: Axolotl's Muon trains what is no
#: matrix with AdamW, and scales its rates otherwise.
_OTHER_OPTIMIZERS = frozenset({*OTHER_OPTIMIZERS, "muon"})
_MEMORY = "it is of memory or of the process alone"
_NO_DATA = "there is nothing to evaluate"
_EVALUATION = (
    "eval_strategy", "eval_steps", "metric_for_best_model", "load_best_model_at_end",
    "greater_is_better", "early_stopping_patience", "early_stopping_threshold",
)  # fmt: skip
#: Of `READ`, what the tools' own modules carry, or what only a trainer in Python has.
_ELSEWHERE = {
    "output_dir", "run_name", "bf16", "fp16", "model_init_kwargs", "trust_remote_code",
    "dataset_text_field",
}  # fmt: skip
_CARRIED = {*SAME, *READ, *DIRECT, "warmup_ratio", "logging_steps"} - _ELSEWHERE
_WHOLE = ("max_steps", "eval_steps", "save_steps", "logging_steps")
_FLAGS = (
    "load_best_model_at_end", "greater_is_better", "packing", "completion_only_loss",
    "assistant_only_loss",
)  # fmt: skip
#: More steps than any job has.
_LARGEST = 1 << 40
#: Arguments by which evaluations change what is trained, or kept.
JUDGED_BY = ("early_stopping_patience", "load_best_model_at_end")
#: Keys of `mapped_fields` that say something else than a job's field of that name.
_FIELD_OF: Mapping[str, str] = {"train_sampling_strategy": "shuffle"}


def carry_trainer(
    draft: Draft, defaults: Mapping[str, Any], renamed: Mapping[str, str] | None = None
) -> None:
    """Carry all keys that are arguments of the Trainer.

    defaults   of the tool, by the Trainer's names
    renamed    names of the tool, by which the Trainer has others
    """
    sources: dict[str, str] = {}
    given: dict[str, Any] = {}
    renames = {**FORMER, **(renamed or {})}
    for key in list(draft.rest):
        name = renames.get(key, key)
        if name in given and key in draft.rest:
            draft.leave_key(key, f"'{sources[name]}' says the same", changes=True)
        elif _is_known(name) and (value := _given(draft, key, name)) is not None:
            given[name], sources[name] = value, key
    _join_warmup(draft, given, sources)
    values = {**defaults, **_checked(draft, given, sources, defaults)}
    _settle_evaluation(draft, values, sources)
    _settle_optimizer(draft, values, sources)
    told: dict[str, Any] = {}
    fields = mapped_fields(values, {}, told)
    fields |= {name: values[name] for name in DIRECT if values.get(name) is not None}
    for name in told.keys() & sources.keys():
        draft.leave(sources[name], given[name], INSTEAD_IN_FILES.get(name, NO_NUMBER))
    for name in ("max_steps", "num_train_epochs"):
        if name in sources and name not in fields:
            why = "-1 says that epochs count" if name == "max_steps" else "max_steps counts"
            draft.leave(sources[name], given[name], why)
    _put_fields(draft, fields, sources)
    if "logging_steps" in sources and not draft.is_left(sources["logging_steps"]):
        draft.leave(sources["logging_steps"], given["logging_steps"], INSTEAD["logging_steps"])
    for name, key in sources.items():
        if key not in draft.carried and not draft.is_left(key):
            draft.leave(key, given[name], OFF)


def _is_known(name: str) -> bool:
    return any(name in table for table in (_CARRIED, REFUSED, SILENT, IDLE, INSTEAD_IN_FILES))


def _given(draft: Draft, key: str, name: str) -> Any:
    """The value of a key that `mapped_fields` reads; all others are left out here."""
    if name == "max_length" and draft.rest[key] is None:
        draft.rest.pop(key)
        return 0  # nothing is cut
    if name in REFUSED:
        neutral, why = REFUSED[name]
        value = draft.take(key)
        if value is not None:
            is_off = is_like(truth(value), neutral)
            why = OFF if is_off else _REASONS.get(name, why)
            draft.leave(key, value, why, changes=not is_off)
    elif name in _CARRIED:
        return draft.take(key)
    elif name in SILENT:
        draft.leave_key(key, _MEMORY)
    else:
        draft.leave_key(key, INSTEAD_IN_FILES.get(name, NO_NUMBER))
    return None


def _join_warmup(draft: Draft, given: dict[str, Any], sources: dict[str, str]) -> None:
    """Make one of `warmup_steps` and `warmup_ratio`, of which steps count."""
    ratio, key = given.pop("warmup_ratio", None), sources.pop("warmup_ratio", "")
    if ratio is None:
        return
    if given.get("warmup_steps"):
        draft.leave(key, ratio, "warmup_steps count")
    elif not _is_number(ratio) or not 0 <= number(ratio) <= 1:
        draft.refuse(key, f"expected a number n with 0 <= n <= 1, found {ratio!r}")
    else:
        if "warmup_steps" in sources:
            draft.leave(sources.pop("warmup_steps"), given.pop("warmup_steps"), OFF)
        if number(ratio) == 1:
            draft.put(key, "warmup_ratio", 1.0)
            return
        given["warmup_steps"], sources["warmup_steps"] = number(ratio), key


def _checked(
    draft: Draft, given: Mapping[str, Any], sources: Mapping[str, str], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """What was given, numbers as numbers; what `mapped_fields` could not read is a mistake."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        default = defaults.get(name)
        is_numeric = isinstance(default, int | float) and not isinstance(default, bool)
        if name in _FLAGS:
            values[name] = truth(value)
        elif is_numeric or name in (*_WHOLE, *DIRECT, "max_length"):
            if not _is_number(value):
                draft.refuse(sources[name], f"expected a number, found {value!r}")
                continue
            values[name] = number(value)
        elif name in ("lr_scheduler_kwargs", "optim_args"):
            values[name] = _mapping(draft, sources[name], name, value)
        elif name == "eval_strategy":
            plain = isinstance(value, str | int | float | bool)
            values[name] = {True: "yes", False: "no"}.get(value, value) if plain else ""
        else:
            values[name] = value
    for name in ("max_steps", "logging_steps", "warmup_steps", "save_steps"):
        value = values.get(name)
        if value is not None and abs(value) > _LARGEST:
            draft.refuse(sources[name], f"expected a number of steps, found {given[name]!r}")
            del values[name]
    return values


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number, or text of one, as the tools' parsers read it."""
    try:
        return not isinstance(value, bool) and abs(float(value)) < float("inf")
    except (TypeError, ValueError, OverflowError):
        return False


def number(value: Any) -> int | float:
    """A number, or the number that a text is."""
    if not isinstance(value, str):
        return value  # type: ignore[no-any-return]
    return int(value) if value.strip().lstrip("+-").isdecimal() else float(value)


def _mapping(draft: Draft, key: str, name: str, value: Any) -> Any:
    """Arguments of a schedule or an optimizer, which may be written as text."""
    if name == "optim_args" and isinstance(value, str):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        draft.refuse(key, "expected a mapping (key: value)")
        return None
    return dict(value)


def _settle_evaluation(draft: Draft, values: dict[str, Any], sources: Mapping[str, str]) -> None:
    """Say when evaluations come, as far as a job can."""
    if "eval_data" not in draft.job and "eval_split" not in draft.job:
        for name in _EVALUATION:
            if name in sources:
                draft.leave(sources[name], values.get(name), _NO_DATA)
            values[name] = "no" if name == "eval_strategy" else None
        return
    steps = values.get("eval_steps")
    if values["eval_strategy"] != "steps":
        if "eval_steps" in sources:
            draft.leave(sources["eval_steps"], steps, "it counts with eval_strategy 'steps' alone")
        values["eval_steps"] = None
        return
    if not steps:
        steps = max(1, int(values["logging_steps"]))
    if steps % 1 or steps < 1:
        why = f"evaluations come each epoch, not each {steps:g} of all steps"
        changes = any(values.get(name) for name in JUDGED_BY)
        draft.leave(sources["eval_steps"], steps, why, changes=changes)
        values["eval_strategy"], values["eval_steps"] = "epoch", None
    else:
        values["eval_steps"] = int(steps)


def _settle_optimizer(draft: Draft, values: dict[str, Any], sources: Mapping[str, str]) -> None:
    """Leave out what no job has: other optimizers, schedules and trackers."""
    optim, schedule = values["optim"], values["lr_scheduler_type"]
    is_known = isinstance(optim, str) and optim in {**OPTIMIZERS, **OPTIMIZER_ALIASES}
    if not is_known or optim in _OTHER_OPTIMIZERS:
        which = "the optimizer of this name is another one" if is_known else "no such optimizer is"
        why = f"{which} here, and the job trains with adamw"
        draft.leave(sources["optim"], optim, why, changes=True)
        values["optim"] = "adamw"
        if "optim_args" in sources:
            why = "they are of an optimizer that is left out"
            draft.leave(sources["optim_args"], values["optim_args"], why, changes=True)
            values["optim_args"] = None
    if not isinstance(schedule, str) or schedule not in SCHEDULE_ARGUMENTS:
        why = "there is no such schedule here, and the job takes linear"
        draft.leave(sources["lr_scheduler_type"], schedule, why, changes=True)
        values["lr_scheduler_type"] = "linear"
        if "lr_scheduler_kwargs" in sources:
            why, key = "they are of a schedule that is left out", "lr_scheduler_kwargs"
            draft.leave(sources[key], values[key], why, changes=True)
            values[key] = None
    if isinstance(steps := values.get("save_steps"), float) and steps % 1:
        draft.leave(sources["save_steps"], steps, "give a number of steps, not a part of them")
        values["save_steps"] = Job.model_fields["save_steps"].default
    _settle_trackers(draft, values, sources)


def _settle_trackers(draft: Draft, values: dict[str, Any], sources: Mapping[str, str]) -> None:
    trackers = values.get("report_to")
    listed = trackers if isinstance(trackers, list) else [trackers or "none"]
    known = [one for one in listed if isinstance(one, str) and one in get_args(TrackerName)]
    if listed in (["all"], ["none"]) or listed == known:
        return
    key = sources.get("report_to", "report_to")
    draft.leave(key, trackers, f"trackers are {', '.join(get_args(TrackerName))}")
    values["report_to"] = known or "none"


def _put_fields(draft: Draft, fields: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Write what was given, and what the tool has otherwise by default than a job."""
    keys = {_FIELD_OF.get(name, name): key for name, key in sources.items()}
    keys["warmup_ratio"] = keys.get("warmup_steps", "")
    evaluates = "eval_data" in draft.job or "eval_split" in draft.job
    for name, value in fields.items():
        if name == "report_to" and "report_to" not in keys and value == "none":
            continue
        key, default = keys.get(name, ""), Job.model_fields[name].get_default()
        if key and not draft.is_left(key):
            draft.put(key, name, value)
        elif name == "eval_strategy":
            # A job evaluates what there is, unless it is told.
            draft.job |= {name: value} if evaluates else {}
        elif value not in (None, {}, []) and OPTIMIZER_ALIASES.get(str(value), value) != default:
            draft.job[name] = value
