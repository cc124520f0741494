"""What other tools call the commands of `tlora-fx`."""

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
