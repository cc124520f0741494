"""GPUs of this machine by NVML, for what is asked before torch is imported: no process starts CUDA.

source    https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from itertools import takewhile

NVML = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong),
                ("used", ctypes.c_ulonglong))  # fmt: skip


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Number of GPUs that a process may use; 0 where there is no driver."""
    there = len(_memory_sizes())
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not there:
        return there
    # As CUDA reads it: whatever stands behind a wrong entry is not seen.
    words = [word.strip() for word in listed.split(",")]
    return len(list(takewhile(lambda word: _is_gpu(word, there), words)))


def largest_gpu_bytes() -> int:
    """Memory of the largest GPU of this machine; 0 where there is none, or it does not say."""
    return max(_memory_sizes(), default=0)


def _is_gpu(word: str, there: int) -> bool:
    return word.startswith(("GPU-", "MIG-")) or (word.isdecimal() and int(word) < there)


def _memory_sizes() -> list[int]:
    """Bytes of each GPU's memory; 0 where NVML does not know."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return [_memory_of(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def _memory_of(nvml: ctypes.CDLL, index: int) -> int:
    handle, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return 0
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return 0
    return int(memory.total)
