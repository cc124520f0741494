"""Import the file of a generated kernel.

From Hopper on a kernel starts while the one before it ends (programmatic dependent launch); with
TLORA_FX_PDL=0 in the environment when a module is imported it does not.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from tlora_fx.errors import KernelToolMissing
from tlora_fx.host.environment import overlaps_kernels

#: Package of generated modules.
GENERATED = "tlora_fx_kernels"
#: Environment variable of the folder where Triton and Inductor keep compiled kernels.
TRITON_CACHE = "TRITON_CACHE_DIR"


def import_generated(path: Path) -> Any:
    """The module of a generated file, once a process; raises KernelToolMissing without Triton."""
    name = f"{GENERATED}.{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if importlib.util.find_spec("triton") is None:
        raise KernelToolMissing(
            "kernels need Triton, which is not installed",
            help="pip install triton, or set TLORA_FX_KERNELS=off to use PyTorch",
        )
    described = importlib.util.spec_from_file_location(name, path)
    assert described is not None
    assert described.loader is not None
    module: Any = importlib.util.module_from_spec(described)
    sys.modules[name] = module
    try:
        described.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    # An interpreted kernel knows no launch options.
    if not hasattr(module.kernel, "device_caches") or not overlaps_kernels():
        # The kernel starts when the one before is done, as kernels usually do.
        import triton.language as tl

        module.OVERLAP = tl.constexpr(False)
        module.META.pop("launch_pdl", None)
    return module
