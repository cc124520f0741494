"""Push adapters and merged models to the Hugging Face Hub, by its own client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tlora_fx.errors import HubError, errors_as

#: Of an adapter's folder: what PEFT and transformers read, and the card. What else lies there
#: (metrics, the job with its paths) is nobody's business.
ADAPTER_FILES = (
    "adapter_*", "README.md", "tokenizer*", "chat_template*", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "*.model",
)  # fmt: skip


def push(folder: Path, repository: str, files: Sequence[str] | None = None) -> str:
    """Upload a folder as a model; a repository that is not there is made, private.

    repository   such as user/name
    files        patterns of what is uploaded; None: all
    returns      the commit's address
    raises       HubError
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    with errors_as(
        HubError, "nothing is pushed to the hub", Exception, named=True,
        folder=folder, repository=repository,
        help="log in by `hf auth login` or HF_TOKEN, and name USER/NAME",
    ):  # fmt: skip
        made = api.create_repo(repository, private=True, exist_ok=True)
        told = api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            allow_patterns=None if files is None else list(files),
            commit_message=f"Upload {folder.name} by tlora-fx",
        )
    return str(told)
