"""Folders of models and their versions below the log's; without torch, for who answers HTTP."""

from __future__ import annotations

import filecmp
import shutil
import threading
from pathlib import Path

from tlora_fx.errors import RequestConflict
from tlora_fx.host.durable import link_or_copy, sync_folder

MODELS = "models"
#: In which the trainer says what of its base adapters fit.
LAYOUT = "layout.json"
#: Of a version: the file that says what the others are, and its format.
STATE, FORMAT = "state.json", 1
#: Who asks again while a copy is made waits for it.
_COPYING = threading.Lock()


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
    raises    OSError, RequestConflict where the copy that is there is another version's
    """
    target = root / MODELS / folder_name(model) / f"copy-{folder_name(name)}"
    fresh = target.with_name(f".{target.name}.tmp")
    source = root / folder
    with _COPYING:
        if not target.is_dir():
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            for file in source.iterdir():
                link_or_copy(file, fresh / file.name)
            fresh.rename(target)
            sync_folder(target.parent)
    if not _has_same_weights(source, target):
        raise RequestConflict(
            "there is a checkpoint of this name", model=model, found=name,
            help="copy it to another model_seq_id or session",
        )  # fmt: skip
    return str(target.relative_to(root))


def _has_same_weights(source: Path, copy: Path) -> bool:
    """Whether a copy has the files of a version; who wrote `state.json` may differ."""
    names = {file.name for file in source.iterdir()} - {STATE}
    _, other, unreadable = filecmp.cmpfiles(source, copy, names, shallow=False)
    return not (other or unreadable)
