"""All jobs' A and B, cast, padded job by job, non-finite values set aside.

Each program takes one block of packed rows and one strip of columns of either A or B. A block
belongs to one job, because each job's rows begin at a multiple of the rank block. What is not
finite after the cast becomes 0, and the block's flag NaN: the kernels that read a job's rows add
its flags to that job's results, so no tile that jobs share ever multiplies a NaN.

With `extend` it also writes the tail of the weight of concat-K, where the rows of a and b stand in
their own order, cleaned too: Bᵀ behind W's columns, A below W's rows.
"""

from __future__ import annotations

from itertools import accumulate

from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.codegen.template import (
    common_values,
    constants_of,
    either,
    fill,
    module,
    of_sites,
    short,
)
from tlora_fx.errors import KernelSpecError

STRIP = 512  # columns that share a flag; the kernels that read flags rely on it
_ELEMENTS = 8192  # of one step of a program: at 8 warps 32 a thread, moved 16 bytes at a time
_WIDEST_TAIL_BLOCK = 64  # tails are multiples of it, or of narrower rank blocks

_BODY = '''
@triton.jit
def clean(source, first, count, columns, WIDTH: tl.constexpr):
    """A tile of A or B in the compute type, with 0 for what is not finite there; and what is.

    source   [rows, WIDTH], from whose row `first` the tile takes `count` rows at most
    columns  indices of the tile's columns
    """
    rows = tl.arange(0, RANK_BLOCK)
    inside = (rows < count)[:, None] & (columns < WIDTH)[None, :]
    where = (first + rows).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    values = tl.load(source + where, mask=inside, other=0.0).to(tl.$dtype)
    finite = tl.abs(values.to($wide)) < float("inf")
    return tl.where(finite, values, 0.0).to(tl.$dtype), finite


@triton.jit
def pack_strip(source, target, flag, block, strip, first, count, WIDTH: tl.constexpr):
    """One strip of columns of one packed block, and its flag."""
    rows = (block * RANK_BLOCK + tl.arange(0, RANK_BLOCK)).to(tl.int64)
    faults = 0
    for step in range(0, STRIP, COLUMNS):
        columns = strip * STRIP + step + tl.arange(0, COLUMNS)
        values, finite = clean(source, first, count, columns, WIDTH)
        faults += tl.sum(1 - finite.to(tl.int32))
        where = rows[:, None] * WIDTH + columns[None, :]
        tl.store(target + where, values, mask=(columns < WIDTH)[None, :])
    tl.store(flag, tl.where(faults > 0, float("nan"), 0.0))


#? extend [
@triton.jit
def extend_rows(source, tail, stride, first, count, strip, WIDTH: tl.constexpr):
    """Rows `first` on of `source`, as rows that begin at `tail`."""
    rows = tl.arange(0, RANK_BLOCK).to(tl.int64)
    for step in range(0, STRIP, COLUMNS):
        columns = strip * STRIP + step + tl.arange(0, COLUMNS)
        values, _ = clean(source, first, count, columns, WIDTH)
        where = rows[:, None] * stride + columns[None, :]
        tl.store(tail + where, values, mask=(columns < WIDTH)[None, :])


@triton.jit
def extend_columns(source, tail, stride, first, count, strip, WIDTH: tl.constexpr):
    """Rows `first` on of `source`, as columns that begin at `tail`."""
    rows = tl.arange(0, RANK_BLOCK)
    for step in range(0, STRIP, COLUMNS):
        columns = strip * STRIP + step + tl.arange(0, COLUMNS)
        values, _ = clean(source, first, count, columns, WIDTH)
        where = rows[:, None] + columns.to(tl.int64)[None, :] * stride
        tl.store(tail + where, values, mask=(columns < WIDTH)[None, :])


#]
@triton.jit
def pack_site(
    a,  # [R, INNER]
    b,  # [R, OUTER]
    ranks,  # [jobs + 1], rows of a and b
    slots,  # [jobs + 1], packed rows
    jobs,
    a_packed,  # [P, INNER]
    b_packed,  # [P, OUTER]
    flags,  # [P / RANK_BLOCK, A_STRIPS + B_STRIPS]
    blocks,  # P / RANK_BLOCK
    #? extend [
    tail,  # where the weight begins
    stride,  # of its rows
    below,  # rows from there to the tail's
    beside,  # columns from there to the tail's
    ends,  # blocks, and those of the tail
    #]
    strip,
    OUTER: tl.constexpr,
    B_STRIPS: tl.constexpr,
):
    """A strip of one block of a site; waits for the kernel before."""
    block = tl.program_id(0)
    # The job of this block's rows; blocks behind the last job's have none and become zeros.
    job = job_of(block * RANK_BLOCK, slots, jobs, JOBS)
    owned = job < jobs
    done = block * RANK_BLOCK - tl.load(slots + job, mask=owned, other=0)
    first = tl.load(ranks + job, mask=owned, other=0) + done
    count = tl.load(ranks + job + 1, mask=owned, other=0) - first
    all_ranks = tl.load(ranks + jobs)  #? extend
    await_previous(OVERLAP)  #? overlap
    if block < blocks:
        flag = flags + block * (A_STRIPS + B_STRIPS) + strip
        if strip < A_STRIPS:
            pack_strip(a, a_packed, flag, block, strip, first, count, INNER)
        else:
            pack_strip(b, b_packed, flag, block, strip - A_STRIPS, first, count, OUTER)
    #? extend [
    elif block < ends:
        first = (block - blocks) * RANK_BLOCK
        first_row = (first + below).to(tl.int64)
        left = all_ranks - first
        if strip < A_STRIPS:
            $extend_a
        else:
            $extend_b
    #]


@triton.jit(
    do_not_specialize=[
        "jobs",
        #* sites [
        "blocks_$k",
        "ends_$k",  #? extend
        #]
    ],
    do_not_specialize_on_alignment=[
        #* sites [
        "ranks_$k",
        "slots_$k",
        #]
    ],
)
def kernel(
    jobs,
    #* sites [
    a_$k,  # [R, INNER]
    b_$k,  # [R, OUTER]
    ranks_$k,  # [jobs + 1], rows of a and b
    slots_$k,  # [jobs + 1], packed rows
    a_packed_$k,  # [P, INNER]
    b_packed_$k,  # [P, OUTER]
    flags_$k,  # [P / RANK_BLOCK, A_STRIPS + B_STRIPS]
    blocks_$k,  # P / RANK_BLOCK
    #? extend [
    tail_$k,  # where the weight begins
    stride_$k,  # of its rows
    below_$k,
    beside_$k,
    ends_$k,  # blocks, and those of the tail
    #]
    #]
):
    start_next(OVERLAP)  #? overlap
    strip = tl.program_id(1)
    #* sites [
    if (strip >= FIRST_$k) & (strip < END_$k):
        pack_site(
            a_$k,
            b_$k,
            ranks_$k,
            slots_$k,
            jobs,
            a_packed_$k,
            b_packed_$k,
            flags_$k,
            blocks_$k,
            #? extend [
            tail_$k,
            stride_$k,
            below_$k,
            beside_$k,
            ends_$k,
            #]
            strip - FIRST_$k,
            OUTER_$k,
            END_$k - FIRST_$k - A_STRIPS,
        )
    #]


def launch(
    a,
    b,
    ranks,
    slots,
    jobs,
    a_packed,
    b_packed,
    flags,
    tail=None,
    below=None,
    beside=None,
    width=None,
):
    """Fill packed adapters and flags$and_tail of $count.

    a, b                per site [R, $inner], [R, $outers] in $adapter_dtype
    ranks, slots        per site int32 [jobs + 1]
    a_packed, b_packed  per site [P, $inner], [P, $outers] in $dtype, P a multiple of $rank_block
    flags               per site float32 [P / $rank_block, $strips]
    tail                $tail_doc
    below, beside       $place_doc
    width               $width_doc
    """
    blocks = [rows.shape[0] // $rank_block for rows in a_packed]
    ends = blocks  #? not extend
    #? extend [
    ends = [count + rows // $rank_block for count, rows in zip(blocks, width, strict=True)]
    #]
    grid = (max(ends), $all_strips)
    if grid[0] > 0:
        kernel[grid](
            jobs,
            #* sites [
            a[$k],
            b[$k],
            ranks[$k],
            slots[$k],
            a_packed[$k],
            b_packed[$k],
            flags[$k],
            blocks[$k],
            #? extend [
            tail[$k],
            tail[$k].stride(0),
            below[$k],
            beside[$k],
            ends[$k],
            #]
            #]
            **META,
        )
'''


def default_tile(spec: KernelSpec) -> Tile:
    """Steps of a fixed number of elements: the pass is short and bound by latency."""
    return Tile(
        rows=spec.rank_block, columns=_ELEMENTS // spec.rank_block, depth=0, warps=8, stages=2
    )


def candidates(spec: KernelSpec) -> tuple[Tile, ...]:
    """The rule's tile alone: packing takes microseconds, so there is nothing to tune."""
    return (default_tile(spec),)


def source(spec: KernelSpec) -> str:
    """The module's text."""
    if spec.extend and spec.rank_block > _WIDEST_TAIL_BLOCK:
        raise KernelSpecError(
            "the tail of a weight is no multiple of this rank block",
            expected=f"rank_block up to {_WIDEST_TAIL_BLOCK}",
            found=spec.rank_block,
        )
    adapters = f"*{short(spec.adapter_dtype)}"
    ends = _ends(spec)
    own = of_sites(OUTER=spec.outers, FIRST=[0, *ends[:-1]], END=ends)
    return module(
        spec,
        constants=constants_of(
            spec,
            f"INNER RANK_BLOCK STRIP COLUMNS A_STRIPS JOBS {' '.join(own)}",
            STRIP=STRIP,
            A_STRIPS=_strips(spec.inner),
            **own,
        ),
        functions=["job_of"],
        body=fill(_BODY, _values(spec)),
        types={"a": adapters, "b": adapters, "tail": f"*{short(spec.dtype)}"},
    )


def _values(spec: KernelSpec) -> dict[str, object]:
    # W is stored [O, I] or [I, O]: what lies below it and what lies beside it change places.
    upright = spec.weight_layout == "out_in"
    rows, columns = (spec.outers, (spec.inner,)) if upright else ((spec.inner,), spec.outers)
    as_rows = "extend_rows({0}, tail + first_row * stride, stride, first, left, {1}, {2})"
    as_columns = "extend_columns({0}, tail + beside + first, stride, first, left, {1}, {2})"
    a_form, b_form = (as_rows, as_columns) if upright else (as_columns, as_rows)
    return common_values(spec) | {
        "strips": either([_strips(spec.inner) + _strips(outer) for outer in spec.outers]),
        "all_strips": _ends(spec)[-1],
        "extend_a": a_form.format("a", "strip", "INNER"),
        "extend_b": b_form.format("b", "strip - A_STRIPS", "OUTER"),
        "and_tail": ", and the tail of the weight" if spec.extend else "",
        "tail_doc": f"per site W [{either(rows)}, {either(columns)}], in a buffer with more"
        if spec.extend
        else "not read",
        "place_doc": "per site rows and columns from W's first to those of its tail"
        if spec.extend
        else "not read",
        "width_doc": "per site T, the tail's rows" if spec.extend else "not read",
    }


def _ends(spec: KernelSpec) -> list[int]:
    """Behind which strip of the launch each site's last one stands."""
    return [*accumulate(_strips(spec.inner) + _strips(outer) for outer in spec.outers)]


def _strips(columns: int) -> int:
    return -(-columns // STRIP)
