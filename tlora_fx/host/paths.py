"""The folders of the user in which tlora-fx keeps files."""

from __future__ import annotations

import os
from pathlib import Path

from tlora_fx.errors import EnvironmentVariableWrong
from tlora_fx.host.environment import CACHE, PROFILES, folder_in


def cache_folder() -> Path:
    """$TLORA_FX_CACHE, else `tlora-fx` in $XDG_CACHE_HOME or ~/.cache."""
    return folder_in(CACHE) or _default_folder()


def profile_folder() -> Path:
    """Where `tlora-fx profile` writes: $TLORA_FX_PROFILES, else `profiles` in the cache folder."""
    return folder_in(PROFILES) or cache_folder() / "profiles"


def profile_folders() -> list[Path]:
    """Where the user's profiles are looked for, the first one first.

    Earlier versions wrote profiles to the default cache folder though $TLORA_FX_CACHE was set.
    """
    if given := folder_in(PROFILES):
        return [given]
    return list(dict.fromkeys([profile_folder(), _default_folder() / "profiles"]))


def why_unwritable(folder: Path) -> str:
    """Reason why nothing can be written into a folder, which need not be there; "": it can be."""
    # Path.exists raises, up to Python 3.11, for what lies in a folder that may not be entered.
    there = next(
        each
        for each in (folder, *folder.absolute().parents)
        if os.path.exists(each)  # noqa: PTH110
    )
    if not there.is_dir():
        return "a file of that name" if there == folder else f"{there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written to, or is read-only"
    return ""


def _default_folder() -> Path:
    base = folder_in("XDG_CACHE_HOME")
    try:
        return (base or Path.home() / ".cache") / "tlora-fx"
    except RuntimeError as error:
        raise EnvironmentVariableWrong(
            "there is no folder for the cache", found=error, help=f"set {CACHE} to a folder"
        ) from error
