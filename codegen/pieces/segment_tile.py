"""Which tile of which segment a program takes."""

import triton
import triton.language as tl


@triton.jit
def segment_tile(number, segments, jobs, ROWS: tl.constexpr, JOBS: tl.constexpr):
    """The job of tile `number` and the tile's place in that job, both counted from 0.

    Tiles have ROWS rows, the last of a segment fewer, and are counted from the segment's start:
    a job's tiles do not depend on its neighbours. Behind the last job's tiles the job is `jobs`.

    segments  int32 [jobs + 1]
    JOBS      room for jobs in one vector, a power of two
    """
    index = tl.arange(0, JOBS)
    first = tl.load(segments + index, mask=index < jobs, other=0)
    end = tl.load(segments + 1 + index, mask=index < jobs, other=0)
    tiles = tl.cdiv(end - first, ROWS)
    passed = (tl.cumsum(tiles) <= number) & (index < jobs)
    return tl.sum(passed.to(tl.int32)), number - tl.sum(tl.where(passed, tiles, 0))
