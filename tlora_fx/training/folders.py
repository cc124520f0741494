"""Folders of models and their versions below the log's; without torch, for who answers HTTP."""

from __future__ import annotations

import shutil
from pathlib import Path

from tlora_fx.host.durable import link_or_copy, sync_folder

MODELS = "models"
#: In which the trainer says what of its base adapters fit.
LAYOUT = "layout.json"
#: Of a version: the file that says what the others are, and its format.
STATE, FORMAT = "state.json", 1


def folder_name(key: str) -> str:
    """A job's and folder's name of a model's id or a version's folder."""
    return key.replace(":", ".").replace("/", ".")


def version_folder(model: str, seq: int) -> str:
    """Where the version lies that a model's command makes, below the log's folder."""
    return f"{MODELS}/{folder_name(model)}/version-{seq}"


def copy_version(root: Path, folder: str, model: str, name: str) -> str:
    """Copy a version to another model, by links where the file system can.

    root      the log's folder, below which the others lie
    name      of the copy; one that is there is complete
    returns   the copy's folder
    raises    OSError
    """
    target = root / MODELS / folder_name(model) / f"copy-{folder_name(name)}"
    fresh = target.with_name(f".{target.name}.tmp")
    if not target.is_dir():
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        for file in (root / folder).iterdir():
            link_or_copy(file, fresh / file.name)
        fresh.rename(target)
        sync_folder(target.parent)
    return str(target.relative_to(root))
