"""A frozen matrix product that carries every job's rank block: `forward` and `input_gradient`.

out[M, N] = left[M, K] · weight (+ bias) + Σ_j mask_j ∘ (low_j high_j), low [M, W], high [P, N].

The grid is persistent: each program walks over tiles of `out`. A job's packed rows stand beside
its neighbours', so all jobs of a tile together own one run of packed rows. The rank block of a
tile is therefore one short product over that run: in each row of `low` the columns of the row's
own job are shifted to where that job's packed rows lie, and zeros are loaded, never multiplied,
everywhere else. Its length is run-time data; up to GATHER packed rows take one step.

That step's operands are small and on a long way: tables, then addresses, then memory. So they are
asked for one tile ahead and arrive in registers while the main loop of the tile before runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from tlora_fx.codegen.spec import SHARED_BYTES, KernelSpec, Tile
from tlora_fx.codegen.template import (
    common_values,
    constants_of,
    fill,
    mask_word,
    module,
    short,
    size,
)
from tlora_fx.errors import KernelSpecError

GROUP = 8  # rows of tiles that are walked down before the next column of tiles
BULK = 90  # from this compute capability on tiles are copied in bulk, by descriptors
AHEAD = (90, 100, 103)  # accumulators that leave registers for the next tile's rank block
GRANULE = 16  # slots are multiples of it
# rows, columns, warps, stages
_SHAPES = (
    (128, 256, 8, 3),
    (128, 256, 8, 4),
    (256, 128, 8, 3),
    (256, 128, 8, 4),
    (128, 128, 8, 4),
    (128, 128, 8, 3),
    (128, 128, 4, 3),
    (128, 128, 4, 4),
    (64, 256, 4, 3),
    (64, 256, 4, 4),
    (64, 128, 4, 4),
    (64, 128, 4, 3),
    (64, 64, 4, 4),
)
_SHAPES_OF_WIDE_TYPES = ((64, 32, 4, 2), (32, 32, 4, 2))  # summed without tensor cores


_BODY = '''
@triton.jit
def rank_run(row, ends, segments, slots$thresholds, jobs):
    """The run of packed rows that the jobs of a tile own, and each row's place in it.

    row      first of the tile's ROWS rows
    ends     the jobs' last rows, exclusive, [JOBS]
    returns  first packed row and how many; then for each of the tile's rows where in the run its
             own job's part begins and ends, in granules, as two 15-bit numbers$and_drops
    """
    # Both numbers of ended jobs in one sum: threads meet once.
    ended = (ends <= row).to(tl.int32) + ((ends < row + ROWS).to(tl.int32) << 16)
    counts = tl.sum(ended)
    first = counts & 65535
    last = tl.minimum(counts >> 16, jobs - 1)
    base = tl.load(slots + first)
    rows = row + tl.arange(0, ROWS)
    # One number a row: it goes to other threads once. Rows without an adapter keep 0, 0.
    places = tl.zeros((ROWS,), dtype=tl.int32)
    stop = base
    for job in tl.range(first, last + 1, num_stages=1):
        own = (rows >= tl.load(segments + job)) & (rows < tl.load(segments + job + 1))
        start = stop
        stop = tl.load(slots + job + 1)
        place = ((start - base) // GRANULE << 16) | ((stop - base) // GRANULE << 1)
        place |= (tl.load(thresholds + job) > 0).to(tl.int32)  #? dropout
        places = tl.where(own, place, places)
    return base, stop - base, places


@triton.jit
def low_columns($low, row, step, places, stride):
    """Columns `step` on of the rank run: $low of each row's own job, zeros elsewhere."""
    # Multiples of a granule: the compiler may load 16 bytes at once.
    begin = (places >> 16) * GRANULE
    end = (places >> 1 & 32767) * GRANULE
    column = step + tl.arange(0, GATHER)
    own = (column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None])
    where = tl.arange(0, ROWS)[:, None] * stride + (column[None, :] - begin[:, None])
    return tl.load($low + row.to(tl.int64) * stride + where, mask=own, other=0.0)


@triton.jit
def high_rows($high, base, step, count, column):
    """Packed rows `step` on of a rank run that begins at packed row `base`."""
    row = tl.arange(0, GATHER)
    columns = column + tl.arange(0, COLUMNS)
    inside = (row < count - step)[:, None] & (columns < WIDTH)[None, :]
    where = row[:, None] * WIDTH + columns[None, :]
    return tl.load($high + (base + step).to(tl.int64) * WIDTH + where, mask=inside, other=0.0)


#? dropout [
@triton.jit
def mask_words(bits, row, column, places, tokens):
    """Dropout's bits of a tile, a word for BITS columns; all set where a row drops nothing."""
    rows = tl.arange(0, ROWS)
    words = column // BITS + tl.arange(0, COLUMNS // BITS)
    drops = (places & 1 != 0) & (rows < tokens - row)
    inside = drops[:, None] & (words < WIDTH // BITS)[None, :]
    where = rows[:, None] * (WIDTH // BITS) + words[None, :]
    return tl.load(bits + row.to(tl.int64) * (WIDTH // BITS) + where, mask=inside, other=$all_set)


#]
#? bias [
@triton.jit
def bias_of(bias, column):
    """The bias of a tile's columns."""
    columns = column + tl.arange(0, COLUMNS)
    return tl.load(bias + columns, mask=columns < WIDTH, other=0.0)


#]
#? bulk [
@triton.jit
def put(part, $out, row, column):
    """Round a part of a tile's columns and $write_it."""
    part += $out.load([row, column]).to($wide)  #? accumulate
    $out.store([row, column], part.to(tl.$dtype))


#]
#? not bulk [
@triton.jit
def tile_of(matrix, stride, row, column, height, width, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """A tile [DOWN, ACROSS] of a matrix [height, width], zeros outside of it."""
    rows = row + tl.arange(0, DOWN)
    columns = column + tl.arange(0, ACROSS)
    where = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    return tl.load(matrix + where, mask=inside, other=0.0)


@triton.jit
def put(part, $out, stride, row, column, tokens):
    """Round a part of a tile's columns and $write_it."""
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, PART)
    where = $out + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < tokens)[:, None] & (columns < WIDTH)[None, :]
    part += tl.load(where, mask=inside, other=0.0).to($wide)  #? accumulate
    tl.store(where, part.to(tl.$dtype), mask=inside)


#]
@triton.jit(do_not_specialize=["jobs", "tokens"])
def kernel(
    $left,  # [tokens, SUMMED]
    left_stride,  #? not bulk
    weight,  # $weight_shape
    weight_stride,  #? not bulk
    $out,  # [tokens, WIDTH]
    out_stride,  #? not bulk
    bias,  # [WIDTH]  #? bias
    $low,  # [tokens, stride]
    stride,
    $high,  # [P, WIDTH]
    segments,  # [jobs + 1], rows of $left
    slots,  # [jobs + 1], packed rows
    thresholds,  # [jobs]  #? dropout
    bits,  # [tokens, WIDTH / BITS]  #? dropout
    jobs,
    tokens,
):
    start_next(OVERLAP)  #? overlap
    tiles = tl.cdiv(tokens, ROWS) * tl.cdiv(WIDTH, COLUMNS)
    index = tl.arange(0, JOBS)
    ends = tl.load(segments + 1 + index, mask=index < jobs, other=2147483647)
    #? ahead [
    # The first tile's rank block; later ones are on their way before their turn comes.
    row, column = tile_corner(tl.program_id(0), tokens, ROWS, COLUMNS, WIDTH, GROUP)
    base, count, places = rank_run(row, $tables)
    #]
    await_previous(OVERLAP)  #? overlap
    #? ahead [
    low = low_columns($low, row, 0, places, stride)
    high = high_rows($high, base, 0, count, column)
    words = mask_words(bits, row, column, places, tokens)  #? dropout
    added = bias_of(bias, column)  #? bias
    #]
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile_corner(tile, tokens, ROWS, COLUMNS, WIDTH, GROUP)
        #? not ahead [
        base, count, places = rank_run(row, $tables)
        words = mask_words(bits, row, column, places, tokens)  #? dropout
        added = bias_of(bias, column)  #? bias
        #]
        total = tl.zeros((ROWS, COLUMNS), dtype=$wide)
        total += added[None, :].to($wide)  #? bias
        total = tl.dot(low, high, total$precision)  #? ahead
        for step in tl.range($first_step, count, GATHER, num_stages=1):
            low = low_columns($low, row, step, places, stride)
            high = high_rows($high, base, step, count, column)
            total = tl.dot(low, high, total$precision)
        #? dropout [
        # What follows, W's part, has no dropout.
        total = tl.where(expand_words(words, ROWS, COLUMNS, BITS), total, 0.0)
        #]
        #? ahead [
        following = tl.minimum(tile + tl.num_programs(0), tiles - 1)
        next_row, next_column = tile_corner(following, tokens, ROWS, COLUMNS, WIDTH, GROUP)
        base, count, places = rank_run(next_row, $tables)
        low = low_columns($low, next_row, 0, places, stride)
        high = high_rows($high, base, 0, count, next_column)
        words = mask_words(bits, next_row, next_column, places, tokens)  #? dropout
        added = bias_of(bias, next_column)  #? bias
        #]
        for depth in tl.range(0, SUMMED, DEPTH):
            part = $part
            frozen = $frozen
            total = tl.dot(part, $turned, total$precision)
        # In parts: the whole tile would need twice the shared memory.
        left_part, right_part = column_halves(total, ROWS, COLUMNS)
        #? not quarters [
        put(left_part, $out, ${stride_of}row, column$height)
        put(right_part, $out, ${stride_of}row, column + PART$height)
        #]
        #? quarters [
        part_0, part_1 = column_halves(left_part, ROWS, COLUMNS // 2)
        put(part_0, $out, ${stride_of}row, column$height)
        put(part_1, $out, ${stride_of}row, column + PART$height)
        part_2, part_3 = column_halves(right_part, ROWS, COLUMNS // 2)
        put(part_2, $out, ${stride_of}row, column + 2 * PART$height)
        put(part_3, $out, ${stride_of}row, column + 3 * PART$height)
        #]


def launch($arguments):
    """Write $out = $formula.

    $left  [M, $summed] in $dtype, rows may be strided by a multiple of 16 bytes
    weight  $weight_doc in $dtype
    bias  $bias_doc  #? forward
    $low  [M, W] in $dtype: row m holds its job's values from column 0 on
    $high  [P, $width]: the jobs' packed rows
    segments, slots  int32 [jobs + 1]
    thresholds  int32 [jobs], 0 where a job drops nothing  #? dropout
    bits  uint8 [M, $mask_bytes]; rows of jobs that drop nothing are not read  #? dropout
    thresholds, bits  not read  #? not dropout and not forward
    $out  [M, $width]
    """
    tokens = $left.shape[0]
    if tokens == 0:
        return
    tiles = triton.cdiv(tokens, $rows) * $across
    kernel[(min(tiles, ${twice}processors($left.device)),)](
        TensorDescriptor.from_tensor($left, [$rows, $depth]),  #? bulk
        TensorDescriptor.from_tensor(weight, [$weight_box]),  #? bulk
        TensorDescriptor.from_tensor($out, [$rows, $part_width]),  #? bulk
        $left,  #? not bulk
        $left.stride(0),  #? not bulk
        weight,  #? not bulk
        weight.stride(0),  #? not bulk
        $out,  #? not bulk
        $out.stride(0),  #? not bulk
        bias,  #? bias
        $low,
        $low.stride(0),
        $high,
        segments,
        slots,
        thresholds,  #? dropout
        bits.view(torch.int32),  #? dropout and words
        bits,  #? dropout and not words
        jobs,
        tokens,
        **META,
    )


def processors(device):
    """How many programs run side by side; the interpreter runs them one after the other."""
    if device.type == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
'''


@dataclass(frozen=True, slots=True)
class Roles:
    """Names of the matrices of a product, and its sizes.

    left, low, high, out   names; out = left · weight + low high
    summed, width          K and N
    turned                 the weight's stored rows are columns of the product
    bias, dropout          whether the product has them
    arguments, formula     of `launch`, and what it writes
    """

    left: str
    low: str
    high: str
    out: str
    summed: int
    width: int
    turned: bool
    bias: bool
    dropout: bool
    arguments: str
    formula: str


class _Gemm:
    """The emitter of a product with these roles."""

    def roles(self, spec: KernelSpec) -> Roles:
        """Names and sizes of the matrices for a spec."""
        raise NotImplementedError

    def default_tile(self, spec: KernelSpec) -> Tile:
        """Large tiles, smaller for a narrow output."""
        return _tiles(spec, narrow=self.roles(spec).width <= 1024)[0]

    def candidates(self, spec: KernelSpec) -> tuple[Tile, ...]:
        """Tiles that fit, by falling size; for narrow outputs those of 128 columns come first."""
        return _tiles(spec, narrow=self.roles(spec).width <= 1024)

    def source(self, spec: KernelSpec) -> str:
        """The module's text; raises KernelSpecError where rows are no multiple of 16 bytes."""
        roles = self.roles(spec)
        return _source(replace(spec, bias=roles.bias, dropout=roles.dropout), roles)


class _Forward(_Gemm):
    """The frozen linear and every job's branch: y = x Wᵀ + bias + S B."""

    def roles(self, spec: KernelSpec) -> Roles:
        """Dropout is in S already."""
        formula = f"x Wᵀ{' + bias' if spec.bias else ''} + S B"
        return Roles(
            left="x",
            low="s",
            high="b_packed",
            out="y",
            summed=spec.inner,
            width=spec.outer,
            turned=spec.weight_layout == "out_in",
            bias=spec.bias,
            dropout=False,
            arguments="x, weight, bias, s, b_packed, segments, slots, jobs, y",
            formula=f"y + {formula}" if spec.accumulate else formula,
        )


class _InputGradient(_Gemm):
    """The input's gradient through frozen weight and branches: dx = dy W + mask ∘ (dS A).

    `forward` with inner and outer exchanged. With dropout the rank block, which comes first, is
    masked by the bits that `shrink` drew, before W's part is added.
    """

    def roles(self, spec: KernelSpec) -> Roles:
        """The bias has no part in it."""
        formula = f"dy W + {'mask ∘ (dS A)' if spec.dropout else 'dS A'}"
        return Roles(
            left="dy",
            low="ds",
            high="a_packed",
            out="dx",
            summed=spec.outer,
            width=spec.inner,
            turned=spec.weight_layout == "in_out",
            bias=False,
            dropout=spec.dropout,
            arguments="dy, weight, ds, a_packed, segments, slots, thresholds, bits, jobs, dx",
            formula=f"dx + {formula}" if spec.accumulate else formula,
        )


forward = _Forward()
input_gradient = _InputGradient()


def _tiles(spec: KernelSpec, *, narrow: bool) -> tuple[Tile, ...]:
    # A function of the type alone: a job's numbers do not change with the rest of a tile.
    depth = max(16, 128 // size(spec.dtype))
    shapes = _SHAPES if size(spec.dtype) == 2 else _SHAPES_OF_WIDE_TYPES
    tiles = [Tile(r, c, depth, warps, stages) for r, c, warps, stages in shapes]
    tiles = [tile for tile in tiles if _shared(spec, tile, 4) <= _limit(spec.arch)]
    if spec.arch != BULK:
        # Operands of older tensor cores are in registers too; newer ones sum in 512 columns.
        tiles = [tile for tile in tiles if max(tile.rows, tile.columns) <= 128]
    if spec.arch < BULK:
        tiles = [tile for tile in tiles if tile.rows * tile.columns <= tile.warps << 11]
    return tuple(sorted(tiles, key=lambda tile: narrow and tile.rows * tile.columns > 128 * 128))


def _gather(spec: KernelSpec, tile: Tile) -> int:
    """Packed rows of a tile's first step: two jobs of rank 16, or one of rank 64.

    They wait in registers beside the accumulator while a main loop runs; where there are too few
    for 64, higher ranks take more steps. The order of a sum is the same.
    """
    threads = 32 * tile.warps
    held = (tile.rows * tile.columns + 64 * (tile.rows + tile.columns) // 2) // threads
    return 64 if spec.rank_block > GRANULE and held <= 176 and tile.rows <= 128 else 32


def _shared(spec: KernelSpec, tile: Tile, parts: int) -> int:
    """Bytes of shared memory: the pipeline, a part of the output, the rank block's operands."""
    pipeline = tile.stages * (tile.rows + tile.columns) * tile.depth
    rank_block = _gather(spec, tile) * (tile.rows + tile.columns)
    elements = pipeline + tile.rows * tile.columns // parts + rank_block
    return elements * size(spec.dtype) + 1024


def _limit(arch: int) -> int:
    return SHARED_BYTES.get(arch, max(SHARED_BYTES.values()))


def _parts(spec: KernelSpec) -> int:
    """Two parts of a tile's columns are stored one after the other, four where space is short."""
    crowded = _shared(spec, spec.cut, 2) > _limit(spec.arch)
    return 4 if crowded or (_pairs(spec, 4) and not _pairs(spec, 2)) else 2


def _pairs(spec: KernelSpec, parts: int) -> bool:
    """Whether two programs of four warps share a processor: one computes while one stores."""
    return spec.cut.warps == 4 and 2 * _shared(spec, spec.cut, parts) <= _limit(spec.arch)


def _source(spec: KernelSpec, roles: Roles) -> str:
    step = 16 // size(spec.dtype)
    for field, columns in (("inner", spec.inner), ("outer", spec.outer)):
        if columns % step:
            raise KernelSpecError(
                f"tiles are copied by rows of a multiple of 16 bytes: {field} does not fit",
                expected=f"a multiple of {step} in {spec.dtype}",
                found=columns,
                help="the operators use the sidecar plan for such a layer",
            )
    tile = spec.cut
    names = "SUMMED WIDTH ROWS COLUMNS PART DEPTH GATHER GRANULE GROUP JOBS"
    return module(
        spec,
        constants=constants_of(
            spec,
            names + " BITS" * spec.dropout,
            SUMMED=roles.summed,
            WIDTH=roles.width,
            PART=tile.columns // _parts(spec),
            GATHER=_gather(spec, tile),
            GRANULE=GRANULE,
            GROUP=GROUP,
            BITS=mask_word(roles.width, tile.columns),
        ),
        functions=["tile_corner", "column_halves", *(["expand_words"] if spec.dropout else [])],
        body=fill(_BODY, _values(spec, roles)),
        types=_types(spec, roles),
    )


def _box(spec: KernelSpec, roles: Roles) -> tuple[int, int]:
    tile = spec.cut
    return (tile.columns, tile.depth) if roles.turned else (tile.depth, tile.columns)


def _values(spec: KernelSpec, roles: Roles) -> dict[str, object]:
    tile, drop = spec.cut, spec.dropout
    word = mask_word(roles.width, tile.columns)
    bulk, ahead = spec.arch >= BULK, spec.arch in AHEAD
    stored = "WIDTH, SUMMED" if roles.turned else "SUMMED, WIDTH"
    corner = "column, depth" if roles.turned else "depth, column"
    box = "COLUMNS, DEPTH" if roles.turned else "DEPTH, COLUMNS"
    part = f"{roles.left}.load([row, depth])"
    frozen = f"weight.load([{corner}])"
    if not bulk:
        part = f"tile_of({roles.left}, left_stride, row, depth, tokens, SUMMED, ROWS, DEPTH)"
        frozen = f"tile_of(weight, weight_stride, {corner}, {stored}, {box})"
    return (
        common_values(spec)
        | asdict(roles)
        | {
            "forward": spec.kind == "forward",
            "bias_doc": f"[{roles.width}]" if spec.bias else "not read",
            "write_it": "add it to what is there" if spec.accumulate else "store it",
            "quarters": _parts(spec) == 4,
            "words": word == 32,
            "all_set": -1 if word == 32 else 255,
            "thresholds": ", thresholds" if drop else "",
            "and_drops": ", and\n             in the last bit whether it drops anything"
            if drop
            else "",
            "tables": "ends, segments, slots, " + ("thresholds, " if drop else "") + "jobs",
            "bulk": bulk,
            "ahead": ahead,
            "first_step": "GATHER" if ahead else "0",
            "stride_of": "" if bulk else "out_stride, ",
            "height": "" if bulk else ", tokens",
            "part": part,
            "frozen": frozen,
            "turned": "frozen.T" if roles.turned else "frozen",
            "weight_shape": f"[{stored}]",
            "weight_doc": str(
                [roles.width, roles.summed] if roles.turned else [roles.summed, roles.width]
            ),
            "weight_box": ", ".join(str(side) for side in _box(spec, roles)),
            "mask_bytes": -(-roles.width // 8),
            "depth": tile.depth,
            "part_width": tile.columns // _parts(spec),
            "across": -(-roles.width // tile.columns),
            "twice": "2 * " if _pairs(spec, _parts(spec)) else "",
        }
    )


def _types(spec: KernelSpec, roles: Roles) -> dict[str, str]:
    """Tiles that are copied in bulk come by descriptors; masks may be read by whole words."""
    tile = spec.cut
    types = {"bits": "*i32"} if mask_word(roles.width, tile.columns) == 32 else {}
    if spec.arch < BULK:
        return types
    boxes = {
        roles.left: (tile.rows, tile.depth),
        "weight": _box(spec, roles),
        roles.out: (tile.rows, tile.columns // _parts(spec)),
    }
    return types | {
        name: f"tensordesc<{short(spec.dtype)}[{box[0]}, {box[1]}]>" for name, box in boxes.items()
    }
