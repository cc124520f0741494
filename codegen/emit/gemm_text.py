"""The text of a matrix product with a rank block; gemm.py tells how it works."""

BODY = '''
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
    weight  $weight_told in $dtype
    bias  $bias_told  #? forward
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
