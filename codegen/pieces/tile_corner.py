"""Which tile of a matrix product comes next."""

import triton
import triton.language as tl


@triton.jit
def tile_corner(
    tile,
    height,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """First row and first column of tile `tile` of a matrix [height, WIDTH].

    Tiles are numbered down GROUP rows of tiles, then to the right: tiles that run side by side
    share their operands in the L2 cache.
    """
    down = tl.cdiv(height, ROWS)
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    group = tile // (GROUP * across)
    inside = tile - group * (GROUP * across)
    # The last group may be lower.
    rows = tl.minimum(down - group * GROUP, GROUP)
    return (group * GROUP + inside % rows) * ROWS, inside // rows * COLUMNS
