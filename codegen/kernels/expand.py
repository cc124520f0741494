"""y = mask∘(S B) + bias, the adapters' part of an output, beside a library's GEMM.

Serves both directions: y from S and B, and dx from dS and A with dropout's bits; the output's
columns are `outer`, so the spec for dx has I there. With several sites it is the sum of their
parts, as dx of linears that read one x is. A program takes one tile of rows of one segment and a
slab of columns, and writes each element once: the pass moves y and little else. Where it adds, what
is there may stand in another tensor: an operator that may not change its input needs no copy first.
"""

from __future__ import annotations

from dataclasses import replace

from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.codegen.template import common_values, constants_of, fill, mask_word, module, size
from tlora_fx.errors import KernelSpecError

# Rows, columns, slab and warps of a tile that tuning tries.
_TRIED = (
    (32, 256, 512, 4),
    (64, 64, 512, 4),
    (64, 128, 128, 4),
    (64, 128, 1024, 4),
    (64, 256, 256, 8),
    (128, 128, 512, 8),
)
# Slabs, the widest first, of which there should be so many programs: a Hopper runs eight an SM.
_SLABS, _NARROWEST, _PROGRAMS = (512, 256), 128, 1024

_BODY = '''
@triton.jit(
    do_not_specialize=["tokens", "jobs"],  #? not accumulate
    do_not_specialize=["tokens", "jobs", "in_place"],  #? accumulate
    do_not_specialize_on_alignment=[
        "segments",
        #* sites [
        "slots_$k",
        "thresholds_$k",  #? dropout
        #]
    ],
)
def kernel(
    y,  # [tokens, OUTER]
    y_stride,
    #? accumulate [
    before,  # [tokens, OUTER]
    before_stride,
    in_place,
    #]
    tokens,
    segments,  # [jobs + 1]
    jobs,
    bias,  # [OUTER]  #? bias
    #* sites [
    s_$k,  # [tokens, s_stride]
    s_stride_$k,
    b_$k,  # [P, OUTER]
    slots_$k,  # [jobs + 1]
    #? dropout [
    thresholds_$k,  # [jobs]
    bits_$k,  # [tokens, WORDS]
    #]
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
    threshold_$k = tl.load(thresholds_$k + job, mask=owned, other=0)  #? dropout
    #]
    await_previous(OVERLAP)  #? overlap
    if start >= end:
        return
    #? accumulate and not bias [
    if (in_place != 0) & ($empty):
        return
    #]
    rows = start + tl.arange(0, ROWS)
    inside = (rows < end)[:, None]
    row = rows.to(tl.int64)[:, None]
    ranks = tl.arange(0, RANK_BLOCK)
    #* sites [
    any_$k = width_$k > 0
    s_first_$k = tl.load(s_$k + row * s_stride_$k + ranks[None, :], mask=inside & any_$k, other=0.0)
    #]
    widest = $widest
    # Triton loads ahead only in a loop without another in it, and most jobs have one rank block:
    # both forms stand in the code, one runs.
    for further in tl.static_range(2):
        if (widest > RANK_BLOCK) == (further == 1):
            for step in tl.range(0, SLAB, COLUMNS):
                column = tl.program_id(1) * SLAB + step
                columns = column + tl.arange(0, COLUMNS)
                there = (columns < OUTER)[None, :]  #? ragged
                # What all products need is asked for ahead of the first one, so that it comes at
                # once. Bits of jobs that drop nothing were not written.
                #? dropout [
                word = column // BITS + tl.arange(0, COLUMNS // BITS)
                where = row * WORDS + word[None, :]
                drawn = inside  #? not ragged
                drawn = inside & (word < WORDS)[None, :]  #? ragged
                #* sites [
                drops = drawn & (threshold_$k > 0)
                words_$k = tl.load(bits_$k + where, mask=drops, other=$all_set)
                #]
                #]
                #* sites [
                b_row = (first_$k + ranks).to(tl.int64)[:, None] * OUTER
                filled = any_$k  #? not ragged
                filled = any_$k & there  #? ragged
                b_first_$k = tl.load(b_$k + b_row + columns[None, :], mask=filled, other=0.0)
                #]
                total = tl.zeros((ROWS, COLUMNS), $wide)
                #* sites [
                total = tl.dot(s_first_$k, b_first_$k, total$precision)  #? not several
                part = tl.zeros((ROWS, COLUMNS), $wide)  #? several
                part = tl.dot(s_first_$k, b_first_$k, part$precision)  #? several
                if further:
                    for rank in tl.range(RANK_BLOCK, width_$k, RANK_BLOCK, num_stages=1):
                        at_s = s_$k + row * s_stride_$k + (rank + ranks)[None, :]
                        s_tile = tl.load(at_s, mask=inside, other=0.0)
                        b_row = (first_$k + rank + ranks).to(tl.int64)[:, None] * OUTER
                        at_b = b_$k + b_row + columns[None, :]
                        b_tile = tl.load(at_b)  #? not ragged
                        b_tile = tl.load(at_b, mask=there, other=0.0)  #? ragged
                        total = tl.dot(s_tile, b_tile, total$precision)  #? not several
                        part = tl.dot(s_tile, b_tile, part$precision)  #? several
                #? dropout [
                kept = expand_words(words_$k, ROWS, COLUMNS, BITS)
                total = tl.where(kept, total, 0.0)  #? not several
                part = tl.where(kept, part, 0.0)  #? several
                #]
                total += part  #? several
                #]
                #? bias [
                total += tl.load(bias + columns[None, :]).to($wide)  #? not ragged
                total += tl.load(bias + columns[None, :], mask=there).to($wide)  #? ragged
                #]
                to = y + row * y_stride + columns[None, :]
                here = inside  #? not ragged
                here = inside & there  #? ragged
                #? accumulate [
                read = before + row * before_stride + columns[None, :]
                total += tl.load(read, mask=here, other=0.0).to($wide)
                #]
                tl.store(to, total.to(tl.$dtype), mask=here)


def launch(s, b_packed, bias, segments, slots, thresholds, bits, jobs, y):  #? not accumulate
#? accumulate [
def launch(s, b_packed, bias, segments, slots, thresholds, bits, jobs, y, before=None):
#]
    """$does

    s           $per_site[M, W] in $dtype, contiguous
    b_packed    $per_site[P, $outer] in $dtype
    bias        $bias_doc
    segments    int32 [jobs + 1]
    slots       ${per_site}int32 [jobs + 1]
    thresholds  ${per_site}int32 [jobs]$unread
    bits        ${per_site}uint8 [M, $bytes]$unread
    y           [M, $outer] in $dtype, elements of a row contiguous
    before      like y, what is added to; None: y  #? accumulate
    """
    before = y if before is None else before  #? accumulate
    tokens = y.shape[0]
    grid = (triton.cdiv(tokens, $rows) + jobs, $slabs)
    if tokens > 0:
        kernel[grid](
            y,
            y.stride(0),
            #? accumulate [
            before,
            before.stride(0),
            int(before is y),
            #]
            tokens,
            segments,
            jobs,
            bias,  #? bias
            #* sites [
            #? several [
            s[$k],
            s[$k].shape[1],
            b_packed[$k],
            slots[$k],
            thresholds[$k],  #? dropout
            bits[$k]$as_words,  #? dropout
            #]
            #? not several [
            s,
            s.shape[1],
            b_packed,
            slots,
            thresholds,  #? dropout
            bits$as_words,  #? dropout
            #]
            #]
            **META,
        )
'''


def default_tile(spec: KernelSpec) -> Tile:
    """Thousands of small programs, of which an SM holds several: each waits for its few loads."""
    several = spec.sites > 1
    if spec.dropout and spec.rank_block <= 16 and size(spec.dtype) == 2:
        # Among products masks of one to three sites, of 4,800 to 8,192 tokens, took 5 to 16 % less
        # than in the tiles below (H200). Wider blocks and types would spill registers.
        return Tile(rows=64, columns=64, depth=0, warps=4, stages=3, slab=512)
    rows, columns, slab = (64, 64 if several else 128, 512)
    if spec.dropout:
        # A thread of a wide tile would hold masks and sums of several sites at once.
        rows, columns, slab = (64, 64, 256) if several else (32, 128, 512)
    if spec.sites > 3 and spec.rank_block > 16:
        columns = 32  # What four sites ask for ahead leaves few registers.
    return Tile(rows=rows, columns=columns, depth=0, warps=4, stages=1, slab=slab)


def tile_for(spec: KernelSpec, tokens: int) -> Tile:
    """Tile for so many tokens: where wide slabs would be few programs, narrower ones.

    At 1,280 tokens they take a quarter less time for 3,072 columns and two fifths less for 1,024
    (H200). With masks slabs stay as they are.
    """
    rule = default_tile(spec)
    if spec.dropout or size(spec.dtype) > 2:
        return rule
    tiles = -(-tokens // rule.rows)
    slabs = (slab for slab in _SLABS if tiles * -(-spec.outer // slab) >= _PROGRAMS)
    return replace(rule, slab=min(rule.slab, next(slabs, _NARROWEST)))


def candidates(spec: KernelSpec) -> tuple[Tile, ...]:
    """Taller and wider tiles, and more or less of a row in one program; sums stay the same."""
    rule = default_tile(spec)
    tiles = [rule, *(replace(rule, slab=slab) for slab in (*_SLABS, _NARROWEST))]
    for rows, columns, slab, warps in _TRIED:
        tile = replace(rule, rows=rows, columns=columns, slab=slab, warps=warps)
        tiles += [tile] if spec.sites == 1 or rows * columns <= 4096 else []
    return tuple(dict.fromkeys(tiles))


def source(spec: KernelSpec) -> str:
    """The module's text; raises KernelSpecError for a tile that it cannot have."""
    tile = spec.cut
    if tile.slab < tile.columns or tile.slab % tile.columns or tile.columns % 8:
        raise KernelSpecError(
            "expand's slab is a whole number of its tiles, of eight columns and more",
            expected="tile.slab a multiple of tile.columns",
            found=tile,
        )
    word = mask_word(spec.outer, tile.columns)
    names = "OUTER ROWS COLUMNS SLAB RANK_BLOCK JOBS" + " BITS WORDS" * spec.dropout
    return module(
        spec,
        constants=constants_of(spec, names, BITS=word, WORDS=-(-spec.outer // word)),
        functions=["segment_tile"] + ["expand_words"] * spec.dropout,
        body=fill(_BODY, _values(spec)),
        types={"bits": "*i32"} if word == 32 else {},
    )


def _values(spec: KernelSpec) -> dict[str, object]:
    several, word = spec.sites > 1, mask_word(spec.outer, spec.cut.columns)
    sign = "= before +" if spec.accumulate else "="
    parts = "Σ mask∘(S B) of the sites" if several else "mask∘(S B)"
    empty = " + ".join(f"width_{k}" for k in range(spec.sites))
    return common_values(spec) | {
        "slabs": -(-spec.outer // spec.cut.slab),
        "bytes": -(-spec.outer // 8),
        "all_set": -1 if word == 32 else 255,
        "as_words": ".view(torch.int32)" if word == 32 else "",
        "ragged": spec.outer % spec.cut.slab,
        "empty": f"{empty} == 0",
        "widest": _widest(spec.sites),
        "does": f"y {sign} {parts if spec.dropout else parts.replace('mask∘', '')}"
        + (" + bias" if spec.bias else "")
        + ".",
        "per_site": "per site " if several else "",
        "bias_doc": f"[{spec.outer}] in {spec.dtype}" if spec.bias else "not read",
        "unread": "" if spec.dropout else "; not read",
    }


def _widest(sites: int) -> str:
    """The most ranks that the tile's job has at any site."""
    text = "width_0"
    for site in range(1, sites):
        text = f"tl.maximum({text}, width_{site})"
    return text
