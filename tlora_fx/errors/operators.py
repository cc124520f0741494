"""Operators were given tables or tensors that do not fit."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class SegmentError(TloraError):
    """Job segments do not cover the tokens of a tensor; build them with `PackedBatch`."""

    code = "T0501"


class AdapterTableError(TloraError):
    """Adapter tables do not fit each other or the layer; give one rank, scale and rate a job."""

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
    """A linear with a quantised matrix got tensors that do not fit its form.

    The pass `quantize-base` stores matrices and knows which ones have a form.
    """

    code = "T0506"


class TableNotOnDevice(TloraError):
    """A CUDA graph is being captured, and a table is not where the graph could read it.

    Either it has no copy on the device yet: run the step once with the same tables before you
    capture it. Or the operator reads it on the host, and the graph would keep what it says now:
    run such a model without CUDA graphs.
    """

    code = "T0507"


# Generating, storing and compiling kernels.


class UnknownKernel(TloraError):
    """A kernel kind that does not exist.

    `tlora-fx kernels list` lists the kinds.
    """

    code = "T0701"


class KernelSpecError(TloraError):
    """No kernel can be generated for this specialisation.

    The error names the field and what it may be. The operators fall back to another plan by
    themselves; you see this where you ask for a kernel by hand.
    """

    code = "T0702"


class KernelCacheError(TloraError):
    """Generated kernels can be written neither into the cache folder nor into a temporary one.

    Triton reads kernels from files. Point TLORA_FX_CACHE to a folder that can be written.
    """

    code = "T0703"


class TooManyJobs(TloraError):
    """A row holds more jobs than the kernels' tables have room for.

    Put fewer jobs into a group.
    """

    code = "T0704"


class KernelToolMissing(TloraError):
    """Triton, or a tool that comes in Triton's wheel, is not there.

    Install Triton (`pip install triton`); its wheel brings the disassembler too.
    """

    code = "T0705"


class KernelNotCompilable(TloraError):
    """Triton does not compile a generated kernel for this architecture.

    The error holds what the compiler said. Another tile may do: `tlora-fx kernels explain`.
    """

    code = "T0706"
