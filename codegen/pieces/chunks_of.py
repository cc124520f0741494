"""Which chunks are a job's."""

import triton
import triton.language as tl


@triton.jit
def chunks_of(job, segments, jobs, CHUNK: tl.constexpr, JOBS: tl.constexpr):
    """The number of a job's first chunk and how many it has; none for a job that is not there.

    segments  int32 [jobs + 1]
    CHUNK     tokens of a chunk, the last of a segment fewer: numbered as `segment_tile` does
    JOBS      room for jobs in one vector, a power of two
    """
    index = tl.arange(0, JOBS)
    first = tl.load(segments + index, mask=index < jobs, other=0)
    end = tl.load(segments + 1 + index, mask=index < jobs, other=0)
    chunks = tl.cdiv(end - first, CHUNK)
    before = tl.sum(tl.where(index < job, chunks, 0))
    return before, tl.sum(tl.where(index == job, chunks, 0))
