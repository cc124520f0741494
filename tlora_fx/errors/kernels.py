"""Generating, storing and compiling kernels."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


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
