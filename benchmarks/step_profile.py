"""Where a step's time goes on the GPU, by class of kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from benchmarks.kernel_times import Kernel, busy

FROZEN = "frozen products"
ADAPTERS = "adapter kernels"
ATTENTION = "attention"
POINTWISE = "norms and pointwise"
LOSS = "lm_head and loss"
UPDATE = "optimizer"
COPIES = "copies and fills"
IDLE = "idle"
CLASSES = (FROZEN, ADAPTERS, ATTENTION, POINTWISE, LOSS, UPDATE, COPIES, IDLE)

_PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitkreduce", "wgmma", "triton_tem")
# Our kernels whose main part is the frozen product; they carry the rank block along.
_OUR_PRODUCTS = ("forward", "input_gradient")
_OPTIMIZER = ("adam", "multi_tensor_apply", "lpnorm")
# Of `ops.kernels.adam`.
_OUR_UPDATE = ("_squares", "_settle", "_update")
_LOSS = ("softmax", "nll_loss", "cross_entropy", "logsumexp")
_ATTENTION = ("flash", "fmha", "attention")


def class_of(kernel: Kernel, vocabulary: int, ranks: Sequence[int]) -> str:
    """The class of one kernel.

    vocabulary   a product with this size is the head's
    ranks        a product with one of them, or with their sum, is the adapters'
    """
    name, op = kernel.name.lower(), kernel.op.lower()
    if name in _OUR_UPDATE or _has(name, _OPTIMIZER):
        return UPDATE
    if kernel.kind != "kernel":
        return COPIES
    if _has(name + op, _ATTENTION):
        return ATTENTION
    if "multi_lora" in op:
        return FROZEN if _has(name, _PRODUCTS + _OUR_PRODUCTS) else ADAPTERS
    product = _has(name, _PRODUCTS)
    if (product and vocabulary in kernel.sizes) or _has(name + op, _LOSS):
        return LOSS
    if vocabulary in kernel.sizes and "embedding" not in op:
        return LOSS
    if product:
        return ADAPTERS if _is_thin(kernel, ranks) else FROZEN
    return POINTWISE


def _has(text: str, words: Sequence[str]) -> bool:
    return any(word in text for word in words)


def _is_thin(kernel: Kernel, ranks: Sequence[int]) -> bool:
    """A product with a rank as one of its sizes."""
    return any(rank in kernel.sizes for rank in (*ranks, sum(ranks)) if rank > 1)


def classes(
    kernels: Sequence[Kernel], vocabulary: int, ranks: Sequence[int], wall_ms: float
) -> dict[str, float]:
    """Milliseconds by class; idle is what is left of the wall time of a step without profiler."""
    found: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        found[class_of(kernel, vocabulary, ranks)] += kernel.duration / 1e3
    found[IDLE] = wall_ms - busy(kernels) / 1e3
    return {name: round(found.get(name, 0.0), 3) for name in CLASSES}
