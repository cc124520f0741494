"""The text of kernel `shrink`, which codegen/emit/shrink.py fills."""

from __future__ import annotations

BODY = '''
@triton.jit
def project(
    x,
    x_stride,
    row,  # int64 [ROWS]
    inside,  # [ROWS], of the job's rows
    begin,  # first rank of this panel
    share,  # first column of x  #? split
    #* sites [
    a_$k,
    first_$k,
    width_$k,
    scale_$k,  #? not split
    faults_$k,  #? not split
    s_$k,
    s_stride_$k,
    #? dropout [
    threshold_$k,
    site_$k,
    octet_$k,
    bits_$k,
    #]
    #]
    #? dropout [
    token,  # uint32 [ROWS]
    seed,
    step,
    #]
    #? copy [
    extended,
    extended_stride,
    #]
    DROPS: tl.constexpr,  #? dropout
):
    """Ranks begin:begin + PANEL of S for one tile of rows."""
    ranks = begin + tl.arange(0, PANEL)
    sum_$k = tl.zeros((ROWS, PANEL), $wide)  #* sites
    for column in range(0, INNER, DEPTH):  #? not split
    for place in range(0, SLAB, DEPTH):  #? split
        column = share + place  #? split
        columns = column + tl.arange(0, DEPTH)
        here = inside[:, None]  #? not ragged
        here = inside[:, None] & (columns < INNER)[None, :]  #? ragged
        tile = tl.load(x + row[:, None] * x_stride + columns[None, :], mask=here, other=0.0)
        #? copy [
        to = extended + row[:, None] * extended_stride + columns[None, :]
        tl.store(to, tile, mask=here & (begin == 0))
        #]
        #* sites [
        where = (first_$k + ranks).to(tl.int64)[:, None] * INNER + columns[None, :]
        owned = (ranks < width_$k)[:, None]  #? not ragged
        owned = (ranks < width_$k)[:, None] & (columns < INNER)[None, :]  #? ragged
        a_tile = tl.load(a_$k + where, mask=owned, other=0.0)
        kept = tile
        #? dropout [
        if DROPS:
            byte = column // 8 + tl.arange(0, DEPTH // 8)
            counter = (octet_$k + byte).to(tl.uint32)[None, :]
            bits = draw_bits(token[:, None], counter, site_$k, seed, step, threshold_$k)
            fresh = inside[:, None] & (begin == 0)  #? not ragged
            fresh = inside[:, None] & (byte < BYTES)[None, :] & (begin == 0)  #? ragged
            to = bits_$k + row[:, None] * BYTES + byte[None, :]
            tl.store(to, bits.to(tl.uint8), mask=fresh)
            kept = tl.where(spread_bits(bits, ROWS, DEPTH // 8), tile, 0.0)
        #]
        sum_$k = tl.dot(kept, tl.trans(a_tile), sum_$k$precision)
        #]
    #* sites [
    #? split [
    written = inside[:, None] & (ranks < width_$k)[None, :]
    tl.store(s_$k + row[:, None] * s_stride_$k + ranks[None, :], sum_$k, mask=written)
    #]
    #? not split [
    # Ranks that this job has not are zero, whatever its neighbours hold.
    value = tl.where((ranks < width_$k)[None, :], sum_$k * scale_$k + tl.sum(faults_$k), 0.0)
    value = value.to(tl.$dtype)
    written = inside[:, None] & (ranks < s_stride_$k)[None, :]
    tl.store(s_$k + row[:, None] * s_stride_$k + ranks[None, :], value, mask=written)
    #]
    #]


#? tails [
@triton.jit
def extend(target, stride, width, s, s_stride, row, inside, before, rank):
    """The tile's rows of S as columns before:before + rank of a tail of `width`, zeros beside."""
    for column in range(0, width, 32):
        columns = column + tl.arange(0, 32)
        own = columns - before
        mine = inside[:, None] & ((own >= 0) & (own < rank))[None, :]
        value = tl.load(s + row[:, None] * s_stride + own[None, :], mask=mine, other=0.0)
        within = inside[:, None] & (columns < width)[None, :]
        tl.store(target + row[:, None] * stride + columns[None, :], value, mask=within)


#]
@triton.jit(
    do_not_specialize=[
        "tokens",
        "jobs",
        "strips_$k",  #* whole_sites
        "site_$k",  #* dropout_sites
        "octet_$k",  #* dropout_sites
    ],
    do_not_specialize_on_alignment=[
        "segments",
        #* sites [
        "slots_$k",
        "scales_$k",  #? not split
        "thresholds_$k",  #? dropout
        "ranks_$k",  #? tails
        #]
        "keys",  #? dropout
        "token_index",  #? dropout
    ],
)
def kernel(
    x,  # [tokens, INNER]
    x_stride,
    tokens,
    segments,  # [jobs + 1]
    jobs,
    #* sites [
    a_$k,  # [P, INNER]
    flags_$k,  # [P / RANK_BLOCK, strips]  #? not split
    strips_$k,  #? not split
    slots_$k,  # [jobs + 1]
    scales_$k,  # [jobs]  #? not split
    s_$k,  # [tokens, s_stride]  #? not split
    s_$k,  # [shares, tokens, s_stride]  #? split
    s_stride_$k,
    #? dropout [
    thresholds_$k,  # [jobs]
    site_$k,
    octet_$k,  # where column 0 stands in the site's own input, in eights
    bits_$k,  # [tokens, BYTES]
    #]
    #? tails [
    ranks_$k,  # [jobs + 1]
    tail_$k,  # first column of this site's tail in `extended`
    tail_width_$k,
    #]
    #]
    #? dropout [
    keys,  # [jobs, 2]
    token_index,  # [tokens]
    #]
    #? extended [
    extended,  # [tokens, extended_stride]
    extended_stride,
    #]
):
    start_next(OVERLAP)  #? overlap
    job, place = segment_tile(tl.program_id(0), segments, jobs, ROWS, JOBS)
    owned = job < jobs
    # Rows behind the last segment count as a job without adapters.
    start = tl.load(segments + job) + place * ROWS
    end = tl.load(segments + job + 1, mask=owned, other=tokens)
    #* sites [
    first_$k = tl.load(slots_$k + job, mask=owned, other=0)
    width_$k = tl.load(slots_$k + job + 1, mask=owned, other=0) - first_$k
    scale_$k = tl.load(scales_$k + job, mask=owned, other=0.0)  #? not split
    #? dropout [
    threshold_$k = tl.load(thresholds_$k + job, mask=owned, other=0)
    #]
    #? tails [
    before_$k = tl.load(ranks_$k + job, mask=owned, other=0)
    rank_$k = tl.load(ranks_$k + job + 1, mask=owned, other=0) - before_$k
    #]
    #]
    #? dropout [
    seed = tl.load(keys + 2 * job, mask=owned, other=0).to(tl.uint32)
    step = tl.load(keys + 2 * job + 1, mask=owned, other=0).to(tl.uint32)
    #]
    await_previous(OVERLAP)  #? overlap
    if start >= end:
        return
    rows = start + tl.arange(0, ROWS)
    inside = rows < end
    row = rows.to(tl.int64)
    #? split [
    share = tl.program_id(1)
    s_$k += share.to(tl.int64) * tokens * s_stride_$k  #* sites
    share *= SLAB
    #]
    #* whole_sites [
    faults_$k = fault_flags(flags_$k, first_$k, first_$k + width_$k, strips_$k, RANK_BLOCK)
    #]
    #? dropout [
    drops = $some_drop
    token = tl.load(token_index + rows, mask=inside, other=0).to(tl.uint32)
    #]
    widest = $widest
$dispatch
    #? not split [
    done = tl.cdiv($least, PANEL) * PANEL
    #* sites [
    for column in range(done, s_stride_$k, RANK_BLOCK):
        to = s_$k + row[:, None] * s_stride_$k + column + tl.arange(0, RANK_BLOCK)[None, :]
        tl.store(to, tl.zeros((ROWS, RANK_BLOCK), tl.$dtype), mask=inside[:, None])
    #]
    #]
    #? tails [
    # S is read back by other threads than wrote it: a job's first column may lie anywhere, and a
    # 16-byte store may not.
    tl.debug_barrier()
    #* sites [
    target_$k = extended + tail_$k
    extend(
        target_$k,
        extended_stride,
        tail_width_$k,
        s_$k,
        s_stride_$k,
        row,
        inside,
        before_$k,
        rank_$k,
    )
    #]
    #]


def launch(
    x,
    a_packed,
    flags,
    segments,
    keys,
    token_index,
    slots,
    scales,
    thresholds,
    sites,
    jobs,
    s,
    bits,
    extended=None,
    ranks=None,
    tail_offsets=None,
    tail_widths=None,
):
    """Fill $s_name$and_bits$and_tail of $count.

    x             [M, $inner] in $dtype, elements of a row contiguous
    a_packed      per site [P, $inner] in $dtype
    flags         $flags_told
    segments      int32 [jobs + 1]
    keys          int32 [jobs, 2]$unread
    token_index   int32 [M]$unread
    slots         per site int32 [jobs + 1]
    scales        per site float32 [jobs]$unscaled
    thresholds    per site int32 [jobs]$unread
    sites         per site its number; bits from 32 on count the eights of columns before x's first
                  where x is a piece of the site's input$unread
    s             $s_told
    bits          $bits_told
    extended      $extended_told
    ranks         per site int32 [jobs + 1]$untailed
    tail_offsets  per site its tail's first column, counted from column $inner; multiples of 16
                  spare a compilation$untailed
    tail_widths   per site its tail's columns, written whole; alike$untailed
    """
    tokens = x.shape[0]
    grid = (triton.cdiv(tokens, $rows) + jobs, $slabs)
    if tokens > 0:
        kernel[grid](
            x,
            x.stride(0),
            tokens,
            segments,
            jobs,
            #* sites [
            a_packed[$k],
            flags[$k],  #? not split
            flags[$k].shape[1],  #? not split
            slots[$k],
            scales[$k],  #? not split
            s[$k],
            s[$k].shape[-1],
            #? dropout [
            thresholds[$k],
            sites[$k] & 0x7FFFFFFF,
            sites[$k] >> 32,
            bits[$k],
            #]
            #? tails [
            ranks[$k],
            $inner + tail_offsets[$k],
            tail_widths[$k],
            #]
            #]
            #? dropout [
            keys,
            token_index,
            #]
            #? extended [
            extended,
            extended.stride(0),
            #]
            **META,
        )
'''

# Runs for the dropout of the tile's job, or without any.
CALL = """
for begin in range(0, $least, PANEL):
    project(
        x,
        x_stride,
        row,
        inside,
        begin,
        share,  #? split
        #* sites [
        a_$k,
        first_$k,
        width_$k,
        scale_$k,  #? not split
        faults_$k,  #? not split
        s_$k,
        s_stride_$k,
        #? dropout [
        threshold_$k,
        site_$k.to(tl.uint32),
        octet_$k,
        bits_$k,
        #]
        #]
        #? dropout [
        token,
        seed,
        step,
        #]
        #? copy [
        extended,
        extended_stride,
        #]
        drawn,  #? dropout
    )
"""
