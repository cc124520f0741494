"""From a spec to the module that launches its kernel.

From Hopper on a kernel starts while the one before it ends (programmatic dependent launch); with
TLORA_FX_PDL=0 in the environment when a module is loaded it does not.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import Any, Protocol, cast

from tlora_fx.codegen.cache import stored
from tlora_fx.codegen.launching import Interpreted, Launcher
from tlora_fx.codegen.source import build
from tlora_fx.codegen.spec import KernelSpec
from tlora_fx.errors import KernelToolMissing

_PACKAGE = "tlora_fx_kernels"
_lock = threading.Lock()
_loaded: dict[KernelSpec, GeneratedModule] = {}


class GeneratedModule(Protocol):
    """What a generated file offers; `launch` has the arguments of its kind."""

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
    if found := _loaded.get(spec):
        return found
    with _lock:
        if spec not in _loaded:
            _loaded[spec] = _imported(stored(build(spec)))
        return _loaded[spec]


def load_count() -> int:
    """How many specs this process has loaded: what must not grow while only the job mix changes."""
    return len(_loaded)


def _imported(path: Path) -> GeneratedModule:
    name = f"{_PACKAGE}.{path.stem}"
    if name in sys.modules:
        return cast(GeneratedModule, sys.modules[name])
    if importlib.util.find_spec("triton") is None:
        raise KernelToolMissing(
            "kernels need Triton, which is not installed",
            help="pip install triton, or set TLORA_FX_KERNELS=off to use PyTorch",
        )
    described = importlib.util.spec_from_file_location(name, path)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules[name] = module
    try:
        described.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    made = cast(GeneratedModule, module)
    if not (_may_overlap() and _is_compiled(made.kernel)):
        _keep_apart(made)
    made.kernel = _started_fast(made.kernel)
    return made


def _keep_apart(module: GeneratedModule) -> None:
    """Let a module's kernel start when the one before is done, as kernels usually do."""
    import triton.language as tl

    module.OVERLAP = tl.constexpr(False)
    module.META.pop("launch_pdl", None)


def _may_overlap() -> bool:
    return os.environ.get("TLORA_FX_PDL", "1") != "0"


def _is_compiled(kernel: Any) -> bool:
    """Whether Triton compiles a kernel; an interpreted one knows no launch options."""
    return hasattr(kernel, "device_caches")


def _started_fast(kernel: Any) -> Any:
    """What `launch` starts: a stand-in for the kernel, which can start it again."""
    return Launcher(kernel) if _is_compiled(kernel) else Interpreted(kernel)
