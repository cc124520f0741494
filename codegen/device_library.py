"""Functions that several generated kernels share, in plain Triton.

Each is a `@triton.jit` function that reads no globals: what it is specialised on are its
`tl.constexpr` arguments. The generator copies a function's text into each module that uses it,
with the functions that it calls (see template.py). tlora-fx itself imports nothing from here.
"""

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


@triton.jit
def await_previous(OVERLAP: tl.constexpr):
    """Wait until the kernel before is done: now its results are there, and what it read is free.

    Every program comes by here before it ends, also where it has nothing to do. That kernel did so
    too, so all kernels before it are done as well. Ahead of this only the tables of jobs and sites
    are read, which no kernel writes.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def computed_once(tile, COMPILED: tl.constexpr):
    """The same tile of a 2-byte type; who stores it and multiplies it does not compute it twice.

    The compiler would make it in the layout of each reader, from the loads on: activations too.
    """
    if COMPILED:
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2
        )
    return tile


@triton.jit
def job_of(row, bounds, jobs, JOBS: tl.constexpr):
    """The job that owns `row`: the number of jobs that end at or before it; `jobs` if none does.

    row     a scalar
    bounds  int32 [jobs + 1], job j owns bounds[j]:bounds[j + 1]
    JOBS    jobs that fit in one vector, a power of two
    """
    index = tl.arange(0, JOBS)
    ends = tl.load(bounds + 1 + index, mask=index < jobs, other=2147483647)
    return tl.sum((ends <= row).to(tl.int32))


@triton.jit
def segment_tile(number, segments, jobs, ROWS: tl.constexpr, JOBS: tl.constexpr):
    """The job of tile `number` and the tile's place in that job, both counted from 0.

    Tiles have ROWS rows, the last of a segment fewer, and are counted from the segment's start:
    a job's tiles do not depend on its neighbours. Behind the last job's tiles the job is `jobs`.

    segments  int32 [jobs + 1]
    JOBS      jobs that fit in one vector, a power of two
    """
    index = tl.arange(0, JOBS)
    first = tl.load(segments + index, mask=index < jobs, other=0)
    end = tl.load(segments + 1 + index, mask=index < jobs, other=0)
    tiles = tl.cdiv(end - first, ROWS)
    passed = (tl.cumsum(tiles) <= number) & (index < jobs)
    return tl.sum(passed.to(tl.int32)), number - tl.sum(tl.where(passed, tiles, 0))


@triton.jit
def chunks_of(job, segments, jobs, CHUNK: tl.constexpr, JOBS: tl.constexpr):
    """The number of a job's first chunk and how many it has; none for a job that is not there.

    segments  int32 [jobs + 1]
    CHUNK     tokens of a chunk, the last of a segment fewer: numbered as `segment_tile` does
    JOBS      jobs that fit in one vector, a power of two
    """
    index = tl.arange(0, JOBS)
    first = tl.load(segments + index, mask=index < jobs, other=0)
    end = tl.load(segments + 1 + index, mask=index < jobs, other=0)
    chunks = tl.cdiv(end - first, CHUNK)
    before = tl.sum(tl.where(index < job, chunks, 0))
    return before, tl.sum(tl.where(index == job, chunks, 0))


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


@triton.jit
def column_halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile [ROWS, COLUMNS], both [ROWS, COLUMNS // 2].

    Threads that hold an accumulator of a tensor core hold whole halves: nothing moves.
    """
    parts = tl.reshape(tile, (ROWS, 2, COLUMNS // 2))
    return tl.split(tl.permute(parts, (0, 2, 1)))


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


@triton.jit
def philox_multiply(word, FACTOR: tl.constexpr):
    """The high and the low half of a 32-bit word times FACTOR: one wide multiplication."""
    product = word.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox_words(token, block, site, seed, step):
    """Philox4x32 with seven rounds: four uint32 words a counter (token, block, site, 0).

    token       uint32 [rows, 1]
    block       uint32 [1, blocks], columns divided by 8
    site        uint32 scalar
    seed, step  uint32 scalars, the key
    returns     [rows, blocks] each
    source      Salmon et al., 2011; equal to tlora_fx.ops.philox
    """
    c0, c1, c2 = token, block, site
    c3 = site ^ site
    # Words keep the shape of what they depend on: of 14 multiplications a counter, five belong
    # to a row or a column and leave the loop or are shared.
    for _ in tl.static_range(7):
        high0, low0 = philox_multiply(c0, 0xD2511F53)
        high2, low2 = philox_multiply(c2, 0xCD9E8D57)
        c0 = high2 ^ c1 ^ seed
        c2 = high0 ^ c3 ^ step
        c1 = low2
        c3 = low0
        seed += 0x9E3779B9
        step += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def draw_bits(token, block, site, seed, step, threshold):
    """int32 [rows, blocks]: bit i says that column 8 * block + i of a token is kept.

    Value i of a counter is half of word i // 2, the low half for even i; kept are values that
    reach the threshold (1..65535; at 0 all are kept). Arguments are those of `philox_words`.
    """
    word0, word1, word2, word3 = philox_words(token, block, site, seed, step)
    # A low half is compared in the upper one's place: no word needs to be taken apart.
    least = threshold.to(tl.uint32) << 16
    bits = tl.where((word0 << 16) >= least, 1, 0) | tl.where(word0 >= least, 2, 0)
    bits |= tl.where((word1 << 16) >= least, 4, 0) | tl.where(word1 >= least, 8, 0)
    bits |= tl.where((word2 << 16) >= least, 16, 0) | tl.where(word2 >= least, 32, 0)
    bits |= tl.where((word3 << 16) >= least, 64, 0) | tl.where(word3 >= least, 128, 0)
    return bits


@triton.jit
def spread_bits(bits, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Bool [ROWS, 8 * BYTES]: bit i of byte c of a row is its column 8 * c + i.

    bits  int32 [ROWS, BYTES], below 256

    `expand_bits` of bytes that this program drew: `join` keeps a byte's eight columns in the
    thread that drew it, which is how rows are loaded in 16-byte pieces. Broadcasting instead
    lets the compiler draw twice, for the tile and for the store (145 to 98 instructions a byte).
    """
    # Each join appends the bit of the column's number that it decides: 4, 2, then 1.
    even = tl.join(
        tl.join((bits & 1) != 0, (bits & 16) != 0), tl.join((bits & 4) != 0, (bits & 64) != 0)
    )
    odd = tl.join(
        tl.join((bits & 2) != 0, (bits & 32) != 0), tl.join((bits & 8) != 0, (bits & 128) != 0)
    )
    return tl.reshape(tl.join(even, odd), (ROWS, 8 * BYTES))


@triton.jit
def expand_bits(bits, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Bool [ROWS, 8 * BYTES]: bit i of byte c of a row is its column 8 * c + i.

    bits  uint8 [ROWS, BYTES]

    The compiler moves only the bytes to the threads that hold the columns, whatever the layout of
    the tile that the mask is for, a tensor core's accumulator among them.
    """
    bit = tl.arange(0, 8)
    kept = (bits[:, :, None].to(tl.int32) >> bit[None, None, :]) & 1
    return tl.reshape(kept != 0, (ROWS, 8 * BYTES))


@triton.jit
def expand_words(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Bool [ROWS, COLUMNS]: bit i of word c of a row is its column BITS * c + i.

    words  an integer type of at least BITS bits, [ROWS, COLUMNS // BITS]

    As `expand_bits` for words of any width: a thread keeps few of them while it waits for a mask.
    """
    bit = tl.arange(0, BITS)
    kept = (words[:, :, None] >> bit[None, None, :]) & 1
    return tl.reshape(kept != 0, (ROWS, COLUMNS))
