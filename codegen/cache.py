"""Where generated kernels lie, and how they get there.

Triton reads a kernel's source from its file, so every kernel that runs is a file first. Files are
never changed in place: their names hold a hash of what they were generated from.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from functools import cache
from pathlib import Path

from tlora_fx.codegen.header import intact
from tlora_fx.codegen.source import Generated
from tlora_fx.errors import KernelCacheError


class KernelCacheWarning(UserWarning):
    """A cached kernel was altered, or the cache folder cannot be written."""


def cache_folder() -> Path:
    """$TLORA_FX_CACHE/kernels, or tlora-fx/kernels in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("TLORA_FX_CACHE"):
        return Path(own).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tlora-fx" / "kernels"


def stored(generated: Generated) -> Path:
    """The file of a generated kernel, written unless it is there already.

    raises   KernelCacheError when neither the cache nor a temporary folder can be written
    """
    try:
        return _stored(generated, cache_folder())
    except OSError as error:
        try:
            return _stored(generated, _instead(str(cache_folder()), str(error)))
        except OSError as second:
            raise KernelCacheError(
                "generated kernels cannot be written anywhere",
                file=cache_folder(),
                found=f"{error}; then {second}",
                help="point TLORA_FX_CACHE to a folder that can be written",
            ) from second


def _stored(generated: Generated, folder: Path) -> Path:
    path = folder / f"{generated.name}.py"
    if path.is_file():
        text = path.read_text("utf-8", errors="replace")
        if text == generated.text:
            return path
        if not intact(text):
            warnings.warn(
                f"{path} was altered by hand and is generated anew; "
                "to change a kernel, change its emitter in codegen/emit",
                KernelCacheWarning,
                stacklevel=2,
            )
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes may write the same kernel at once: each its own file, the last rename wins.
    handle, fresh = tempfile.mkstemp(dir=folder, prefix=f".{generated.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(generated.text)
        Path(fresh).replace(path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise
    return path


@cache
def _instead(folder: str, reason: str) -> Path:
    """A folder of this process, where the cache cannot be written; says so once."""
    path = Path(tempfile.mkdtemp(prefix="tlora-fx-kernels-"))
    warnings.warn(
        f"kernels cannot be kept in {folder} ({reason}); this process writes them to {path}. "
        "Set TLORA_FX_CACHE to a folder that can be written",
        KernelCacheWarning,
        stacklevel=3,
    )
    return path
