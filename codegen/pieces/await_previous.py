"""Wait for the kernel before."""

import triton
import triton.language as tl


@triton.jit
def await_previous(OVERLAP: tl.constexpr):
    """Wait until the kernel before is done: now its results are there, and what it read is free.

    Every program comes by here before it ends, also where it has nothing to do. That kernel did so
    too, so all kernels before it are done as well. Ahead of this only the tables of jobs and sites
    are read, which no kernel writes.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
