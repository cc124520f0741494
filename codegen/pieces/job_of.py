"""Which job owns a row."""

import triton
import triton.language as tl


@triton.jit
def job_of(row, bounds, jobs, JOBS: tl.constexpr):
    """The job that owns `row`: the number of jobs that end at or before it; `jobs` if none does.

    row     a scalar
    bounds  int32 [jobs + 1], job j owns bounds[j]:bounds[j + 1]
    JOBS    room for jobs in one vector, a power of two
    """
    index = tl.arange(0, JOBS)
    ends = tl.load(bounds + 1 + index, mask=index < jobs, other=2147483647)
    return tl.sum((ends <= row).to(tl.int32))
