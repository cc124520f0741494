"""Operators were given tables or tensors that do not fit."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class SegmentError(TloraError):
    """Job segments do not cover the tokens of a tensor; build them with `PackedBatch`."""

    code = "T0501"


class AdapterTableError(TloraError):
    """Adapter tables do not fit each other or the layer."""

    code = "T0502"


class MaskKeyError(TloraError):
    """A dropout rate, key or token index is out of range; rates lie in [0, 1), keys in 32 bits."""

    code = "T0503"


class AttentionShapeError(TloraError):
    """Packed attention got tensors or bounds that do not fit; give q, k, v as [T, heads, dim]."""

    code = "T0504"


class FrozenGradientError(TloraError):
    """An operator has no gradient for this input; freeze it, or leave the layer unfused."""

    code = "T0505"


class QuantizedLinearError(TloraError):
    """A linear with a quantised matrix got tensors that do not fit its form."""

    code = "T0506"


class TableNotOnDevice(TloraError):
    """While a CUDA graph is captured, a table is on the host.

    Run the step once first, or without CUDA graphs.
    """

    code = "T0507"


# Generating, storing and compiling kernels.


class UnknownKernel(TloraError):
    """A kernel kind that does not exist; `tlora-fx kernels list` lists them."""

    code = "T0701"


class KernelSpecError(TloraError):
    """No kernel can be generated for this specialisation."""

    code = "T0702"


class KernelCacheError(TloraError):
    """Kernels cannot be written to the cache folder or a temporary one.

    Set TLORA_FX_CACHE to a writable folder.
    """

    code = "T0703"


class TooManyJobs(TloraError):
    """A row holds more jobs than the kernels' tables."""

    code = "T0704"


class KernelToolMissing(TloraError):
    """Triton, or a tool in its wheel, is not installed (`pip install triton`)."""

    code = "T0705"


class KernelNotCompilable(TloraError):
    """Triton does not compile a generated kernel for this architecture.

    Another tile may do: `tlora-fx kernels explain`.
    """

    code = "T0706"
