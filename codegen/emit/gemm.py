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

from collections.abc import Mapping
from dataclasses import dataclass

from tlora_fx.codegen.emit.gemm_text import BODY
from tlora_fx.codegen.source import accumulator, fill, module, overlaps, precision, short, size
from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.errors import KernelSpecError

GROUP = 8  # rows of tiles that are walked down before the next column of tiles
BULK = 90  # from this compute capability on tiles are copied in bulk, by descriptors
AHEAD = (90, 100, 103)  # accumulators that leave registers for the next tile's rank block
GRANULE = 16  # slots are multiples of it
_SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 120: 99 << 10}  # bytes a program may use
_SHARED_ELSE = 227 << 10
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


@dataclass(frozen=True, slots=True)
class Roles:
    """What the matrices of a product are called, and its sizes.

    left, low, high, out   names; out = left · weight + low high
    summed, width          K and N
    turned                 the weight's stored rows are columns of the product
    """

    left: str
    low: str
    high: str
    out: str
    summed: int
    width: int
    turned: bool


def default_tile(spec: KernelSpec, roles: Roles) -> Tile:
    """Tiles as large as registers and shared memory permit; smaller where the output is narrow.

    depth is a function of the type alone: a job's numbers do not change with the rest of a tile.
    """
    return candidates(spec, roles)[0]


def candidates(spec: KernelSpec, roles: Roles) -> tuple[Tile, ...]:
    """Tiles that fit, by falling size; for narrow outputs those of 128 columns come first."""
    depth = max(16, 128 // size(spec.dtype))
    shapes = _SHAPES if size(spec.dtype) == 2 else _SHAPES_OF_WIDE_TYPES
    tiles = [Tile(r, c, depth, warps, stages) for r, c, warps, stages in shapes]
    tiles = [tile for tile in tiles if _shared(spec, tile, 4) <= _limit(spec.arch)]
    if spec.arch != BULK:
        # Operands of older tensor cores are in registers too; newer ones sum in 512 columns.
        tiles = [tile for tile in tiles if max(tile.rows, tile.columns) <= 128]
    if spec.arch < BULK:
        tiles = [tile for tile in tiles if tile.rows * tile.columns <= tile.warps << 11]
    narrow = roles.width <= 1024
    return tuple(sorted(tiles, key=lambda tile: narrow and tile.rows * tile.columns > 128 * 128))


def _gather(spec: KernelSpec, tile: Tile) -> int:
    """Packed rows of a tile's first step: two jobs of rank 16, or one of rank 64.

    They wait in registers beside the accumulator while a main loop runs; where there is no room
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
    return _SHARED.get(arch, _SHARED_ELSE)


def _parts(spec: KernelSpec) -> int:
    """Two parts of a tile's columns are stored one after the other, four where space is short."""
    crowded = _shared(spec, spec.cut, 2) > _limit(spec.arch)
    return 4 if crowded or (_pairs(spec, 4) and not _pairs(spec, 2)) else 2


def _pairs(spec: KernelSpec, parts: int) -> bool:
    """Whether two programs of four warps share a processor: one computes while one stores."""
    return spec.cut.warps == 4 and 2 * _shared(spec, spec.cut, parts) <= _limit(spec.arch)


def source(spec: KernelSpec, roles: Roles, values: Mapping[str, object]) -> str:
    """The module's text; raises KernelSpecError where rows are no multiple of 16 bytes."""
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
    constants: dict[str, object] = {
        "SUMMED": roles.summed,
        "WIDTH": roles.width,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "PART": tile.columns // _parts(spec),
        "DEPTH": tile.depth,
        "GATHER": _gather(spec, tile),
        "GRANULE": GRANULE,
        "GROUP": GROUP,
        "JOBS": spec.job_capacity,
    }
    if spec.dropout:
        constants["BITS"] = _word(roles)
    pieces = ["tile_corner", "column_halves", *(["expand_words"] if spec.dropout else [])]
    return module(
        spec,
        constants=constants,
        signature=_signature(spec, roles),
        pieces=pieces,
        body=fill(BODY, _values(spec, roles) | dict(values)),
    )


def _word(roles: Roles) -> int:
    """Bits of a word of the mask: rows of whole int32 words are read as such."""
    return 32 if roles.width % 32 == 0 else 8


def _box(spec: KernelSpec, roles: Roles) -> tuple[int, int]:
    tile = spec.cut
    return (tile.columns, tile.depth) if roles.turned else (tile.depth, tile.columns)


def _values(spec: KernelSpec, roles: Roles) -> dict[str, object]:
    tile, drop = spec.cut, spec.dropout
    bulk, ahead = spec.arch >= BULK, spec.arch in AHEAD
    stored = "WIDTH, SUMMED" if roles.turned else "SUMMED, WIDTH"
    corner = "column, depth" if roles.turned else "depth, column"
    box = "COLUMNS, DEPTH" if roles.turned else "DEPTH, COLUMNS"
    pitch = stored.split(", ")[1]
    part = f"{roles.left}.load([row, depth])"
    frozen = f"weight.load([{corner}])"
    if not bulk:
        part = f"tile_of({roles.left}, left_stride, row, depth, tokens, SUMMED, ROWS, DEPTH)"
        frozen = f"tile_of(weight, {pitch}, {corner}, {stored}, {box})"
    return {
        "left": roles.left,
        "low": roles.low,
        "high": roles.high,
        "out": roles.out,
        "summed": roles.summed,
        "width": roles.width,
        "dtype": spec.dtype,
        "overlap": overlaps(spec),
        "wide": accumulator(spec.dtype),
        "precision": precision(spec.dtype),
        "dropout": drop,
        "bias": spec.bias,
        "forward": spec.kind == "forward",
        "bias_told": f"[{roles.width}]" if spec.bias else "not read",
        "accumulate": spec.accumulate,
        "write_it": "add it to what is there" if spec.accumulate else "store it",
        "quarters": _parts(spec) == 4,
        "words": _word(roles) == 32,
        "all_set": -1 if _word(roles) == 32 else 255,
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
        "weight_told": str(
            [roles.width, roles.summed] if roles.turned else [roles.summed, roles.width]
        ),
        "weight_box": ", ".join(str(side) for side in _box(spec, roles)),
        "mask_bytes": -(-roles.width // 8),
        "rows": tile.rows,
        "depth": tile.depth,
        "part_width": tile.columns // _parts(spec),
        "across": -(-roles.width // tile.columns),
        "twice": "2 * " if _pairs(spec, _parts(spec)) else "",
    }


def _signature(spec: KernelSpec, roles: Roles) -> dict[str, str]:
    kind, tile = short(spec.dtype), spec.cut
    boxes = {
        roles.left: (tile.rows, tile.depth),
        "weight": _box(spec, roles),
        roles.out: (tile.rows, tile.columns // _parts(spec)),
    }
    types = {name: f"tensordesc<{kind}[{box[0]}, {box[1]}]>" for name, box in boxes.items()}
    if spec.arch < BULK:
        pointer = f"*{kind}"
        types = {roles.left: pointer, "left_stride": "i32", "weight": pointer}
        types |= {roles.out: pointer, "out_stride": "i32"}
    types |= {"bias": f"*{kind}"} if spec.bias else {}
    types |= {roles.low: f"*{kind}", "stride": "i32", roles.high: f"*{kind}"}
    types |= {"segments": "*i32", "slots": "*i32"}
    if spec.dropout:
        types |= {"thresholds": "*i32", "bits": "*i32" if _word(roles) == 32 else "*u8"}
    return types | {"jobs": "i32", "tokens": "i32"}
