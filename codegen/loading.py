"""Load the module that launches a spec's kernel: its file, its module, its launcher.

Triton reads a kernel's source from its file, so every kernel that runs is a file first. Files are
never changed in place: their names hold a hash of what they were generated from.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from tlora_fx.codegen.importing import TRITON_CACHE, import_generated
from tlora_fx.codegen.kernels import build, intact
from tlora_fx.codegen.launching import Interpreted, Launcher
from tlora_fx.codegen.spec import KernelSpec
from tlora_fx.errors import KernelCacheError
from tlora_fx.host.paths import cache_folder

_lock = threading.Lock()
_loaded: dict[KernelSpec, GeneratedModule] = {}


class KernelCacheWarning(UserWarning):
    """A cached kernel was altered, or the cache folder cannot be written."""


def kernel_folder() -> Path:
    """Where generated kernels are kept."""
    return cache_folder() / "kernels"


class KernelText(Protocol):
    """A generated module."""

    @property
    def name(self) -> str:
        """Its file's name, without the ending."""

    @property
    def text(self) -> str:
        """Text of the file."""


def stored(generated: KernelText) -> Path:
    """The file of a generated kernel, written unless it is there already.

    raises   KernelCacheError when neither the cache nor a temporary folder can be written
    """
    try:
        return _stored(generated, kernel_folder())
    except OSError as error:
        try:
            return _stored(generated, _instead(str(kernel_folder()), str(error)))
        except OSError as second:
            raise KernelCacheError(
                "generated kernels cannot be written anywhere",
                file=kernel_folder(),
                found=f"{error}; then {second}",
                help="point TLORA_FX_CACHE to a folder that can be written",
            ) from second


def _stored(generated: KernelText, folder: Path) -> Path:
    path = folder / f"{generated.name}.py"
    if path.is_file():
        text = path.read_text("utf-8", errors="replace")
        if text == generated.text:
            return path
        if not intact(text):
            warnings.warn(
                f"{path} was altered by hand and is generated anew; "
                "to change a kernel, change its emitter in codegen/kernels",
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


class GeneratedModule(Protocol):
    """Interface of a generated module; `launch` has the arguments of its kind."""

    __file__: str
    SIGNATURE: dict[str, str]
    META: dict[str, int]
    OVERLAP: Any
    kernel: Any

    def launch(self, *args: Any, **options: Any) -> None:
        """Start the kernel."""


def load(spec: KernelSpec) -> GeneratedModule:
    """The module of a spec, generated, stored and imported where it is asked for first.

    raises   KernelSpecError, KernelCacheError, KernelToolMissing where Triton is not there
    """
    if module := _loaded.get(spec):
        return module
    with _lock:
        if spec not in _loaded:
            _loaded[spec] = _started(stored(build(spec)))
        return _loaded[spec]


def load_file(path: Path, spec: KernelSpec) -> GeneratedModule:
    """The module of a file, from now on a spec's, whatever was generated for it.

    raises   KernelToolMissing where Triton is not there
    """
    with _lock:
        module = _loaded[spec] = _started(path)
    return module


def loaded_specs() -> list[KernelSpec]:
    """The specs whose modules were loaded."""
    return list(_loaded)


def keep_triton_cache() -> None:
    """Keep all kernels where Triton keeps its own, unless the user says where.

    Inductor sets another folder when it loads its first kernel, so that of kernels of ours some
    would be kept here and some there, and a next process would look for them in the wrong one.

    source   torch 2.11 and 2.13, `triton_cache_dir` in _inductor/runtime/cache_dir_utils.py
    """
    from triton import knobs

    os.environ.setdefault(TRITON_CACHE, knobs.cache.dir)


def _started(path: Path) -> GeneratedModule:
    """The module of a file, whose `launch` starts a stand-in for the kernel."""
    module = cast(GeneratedModule, import_generated(path))
    keep_triton_cache()
    if not isinstance(module.kernel, Launcher | Interpreted):
        compiled = hasattr(module.kernel, "device_caches")
        module.kernel = (Launcher if compiled else Interpreted)(module.kernel)
    return module
