"""Whether a job's adapters hold what is not finite."""

import triton
import triton.language as tl


@triton.jit
def fault_flags(flags, first, end, strips, BLOCK: tl.constexpr):
    """The flags of packed rows first:end, added up to float32 [128]; their sum is 0 or NaN.

    flags       float32 [packed rows / BLOCK, strips], of kernel `pack`
    first, end  multiples of BLOCK

    A vector, so that the caller may sum it when the loads have had time to arrive.
    """
    lane = tl.arange(0, 128)
    begin = first // BLOCK * strips
    count = (end - first) // BLOCK * strips
    faults = tl.load(flags + begin + lane, mask=lane < count, other=0.0)
    for done in tl.range(128, count, 128, num_stages=1):
        faults += tl.load(flags + begin + done + lane, mask=lane < count - done, other=0.0)
    return faults
