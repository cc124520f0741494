"""Let the kernel that follows start before this one is done."""

import triton
import triton.language as tl


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Allow the next kernel's programs onto processors that this one's leave free.

    They look up their work in tables meanwhile and stop at `await_previous`, where all of this
    kernel's programs are waited for: it does not matter how early this is said.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
