"""Names that other tools have for the commands of `tlora-fx`, and for their options."""

from __future__ import annotations

from collections.abc import Mapping

from tlora_fx.errors import nearest

#: By another tool's command, ours for the same purpose.
SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(
        ("finetune", "fine-tune", "finetuning", "fit", "sft", "dpo", "orpo", "resume"), "train"
    ),
    **dict.fromkeys(("infer", "inference", "predict", "sample", "complete"), "generate"),
    **dict.fromkeys(("export", "fuse", "merge-lora", "merge-adapter", "merge-weights"), "merge"),
    **dict.fromkeys(("preprocess", "preview", "dataset", "datasets", "tokenize"), "data"),
    **dict.fromkeys(("convert", "migrate"), "import"),
    **dict.fromkeys(("logs", "log", "monitor", "tail", "status", "progress"), "watch"),
    **dict.fromkeys(("submit", "list", "ls", "ps"), "client"),
    **dict.fromkeys(("cancel", "kill"), "stop"),
    **dict.fromkeys(("api", "server", "serving"), "serve"),
    **dict.fromkeys(("bench", "benchmark"), "profile"),
    **dict.fromkeys(("dry-run", "estimate"), "plan"),
    **dict.fromkeys(("check", "validate", "test"), "verify"),
    **dict.fromkeys(("schedules", "scheduler"), "schedule"),
    **dict.fromkeys(("token", "auth", "login"), "tokens"),
    **dict.fromkeys(("help",), "--help"),
    **dict.fromkeys(("version",), "--version"),
}
#: A name that is less like a command is no misspelling of it.
_LIKENESS = 0.7


def suggested(asked: str, commands: Mapping[str, str]) -> str | None:
    """The command that a user who typed another name most likely wants, or None."""
    asked = asked.lower().replace("_", "-")
    known = SYNONYMS.get(asked)
    if asked in commands or known is not None:
        return known or asked
    return nearest(asked, commands, _LIKENESS) or SYNONYMS.get(
        nearest(asked, SYNONYMS, _LIKENESS) or ""
    )


def in_job_file(option: str) -> str:
    """Where a job file says what somebody gave as an option, or what to write; empty if nowhere.

    option    as given, such as "--learning_rate"
    """
    # What a command that is given rightly need not wait for.
    from tlora_fx.config.job import BaseSpec, Job
    from tlora_fx.config.job_file import SHARED
    from tlora_fx.config.other_names import BASE_KEYS, ELSEWHERE, JOB_KEYS, LORA_KEYS

    key = option.removeprefix("--").replace("-", "_")
    job, lora, base = JOB_KEYS.get(key, key), LORA_KEYS.get(key, key), BASE_KEYS.get(key, key)
    if key in ELSEWHERE and key not in BaseSpec.model_fields:
        return ELSEWHERE[key]
    if job in ("base", *SHARED):
        return f"write {job} into the job file, beside 'jobs'"
    if job == "name":
        return "write name into the job file, in a job"
    if job in Job.model_fields:
        return f"write {job} into the job file, in a job or under 'defaults'"
    if base in BaseSpec.model_fields:
        return f"write {base} into the job file, under 'base'"
    if key in LORA_KEYS or key.startswith("lora_") or key in LORA_KEYS.values():
        return f"write {lora} into the job file, under 'lora' in a job or under 'defaults'"
    return ""
