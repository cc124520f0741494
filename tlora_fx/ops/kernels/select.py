"""Select the plan that serves a site at run time, by token count.

Chosen by what was measured on this GPU for this shape (`tlora-fx kernels tune` writes it), else by
an estimate of what each plan moves. Strict mode always takes the fused plan with one tile, so that
a job's numbers do not depend on how many tokens its neighbours bring.

Measurements stand in tables, a JSON file a GPU. Ours lie beside this module; the user's own, in
the cache folder, comes first. A GPU without a table takes ours of the same architecture: an H100
is an H200 with slower memory. Keys hold what a plan's time depends on; the next smaller or larger
measured token count, width and tail stand in for those that were not measured.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from tlora_fx.codegen.spec import Kind, Tile
from tlora_fx.errors import AdapterTableError
from tlora_fx.host.durable import replace_file
from tlora_fx.host.environment import wants_strict_kernels
from tlora_fx.host.paths import cache_folder
from tlora_fx.ops.kernels.support import Site

logger = logging.getLogger(__name__)
FORMAT = 2
SHIPPED = Path(__file__).parent / "tables"

Plan = Literal["fused", "sidecar", "concat"]
Direction = Literal["forward", "input_gradient"]
PLANS: tuple[Plan, ...] = get_args(Plan)

# Of an H200, where nothing was measured: FLOP/s of a large GEMM, bytes/s of a write.
_FLOPS, _WRITE = 700e12, 3.0e12
# What a generated GEMM with a rank block takes over cuBLAS: large, and where tiles are few.
_FUSED, _FUSED_SMALL = 1.06, 1.25
_MANY_TILES = 512
# Few tiles are as good as many where they fill the SMs: of 1,280 tokens and 3,072 columns the fused
# plans took 2 to 9 % less than the sidecar (H200).
_SMS, _FILLED = 132, 0.9
_FUSED_WIDE = 20.0  # float32 is multiplied exactly, without tensor cores
# In whole rounds our GEMM takes so much more over cuBLAS than tables say, which time one product
# after itself. Of an H200, 4,800 tokens: tables have the forward of gate and up 8 % ahead, and a
# round took 269.8 ms with it, 267.0 in another process without; a round with masks took 278.3 ms
# with dX by it, 275.9 in the same process by cuBLAS. Of ranks above 32 (3,072 columns) a round took
# 139.3 ms with dX of o and down by it, 137.4 in the same process by cuBLAS.
_IN_ROUNDS = 1.1
_SMALL_RANK_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, the tile of its GEMM (None: the rule's), and where both come from."""

    plan: Plan
    tile: Tile | None = None
    source: str = "rule"


@dataclass(slots=True)
class _Settings:
    forced: Plan | None = None
    strict: bool | None = None
    """None: not yet asked for; the environment decides."""
    cut_by_jobs: bool = False
    tiles: dict[Kind, Tile] = field(default_factory=dict)
    read: int = 0
    """How often tables were read anew."""
    facts: tuple[object, ...] = ()

    def settle(self) -> None:
        """Note in one value what choices follow from."""
        tiles = tuple(self.tiles.items())
        self.facts = (self.forced, self.strict, tiles, self.read)


# Of the process, not of a context: autograd runs backwards in threads of its own.
_settings = _Settings()
_settings.settle()


@contextmanager
def force_plan(plan: Plan | None) -> Iterator[None]:
    """Force one plan on every site that can take it; None: as measured."""
    if plan is not None and plan not in PLANS:
        raise AdapterTableError("no such plan", expected=", ".join(PLANS), found=plan)
    with _set(forced=plan):
        yield


@contextmanager
def force_tiles(tiles: dict[Kind, Tile]) -> Iterator[None]:
    """Force tiles on kernels of these kinds."""
    with _set(tiles=tiles):
        yield


@contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Whether numbers of a job may not depend on neighbours; TLORA_FX_STRICT=1 is the default."""
    with _set(strict=on):
        yield


@contextmanager
def cut_by_jobs(on: bool = True) -> Iterator[None]:
    """Whether rows may be cut by what their tables say on the host: no graph will hold them."""
    with _set(cut_by_jobs=on):
        yield


def may_cut_by_jobs() -> bool:
    """Whether a kernel may be started for each job."""
    return _settings.cut_by_jobs


def may_copy_weights() -> bool:
    """Whether a plan may make a copy of a weight."""
    return _settings.forced == "concat"


def may_join() -> bool:
    """Whether sites whose weights stand in one buffer may share products."""
    return not is_strict() and _settings.forced in (None, "concat")


def facts() -> tuple[object, ...]:
    """Facts that all choices follow from, beside the site and the row."""
    is_strict()  # may settle them
    return _settings.facts


def is_strict() -> bool:
    """Whether strict mode is on.

    Every launch asks, so the environment variable is read once a process.
    """
    if _settings.strict is None:
        _settings.strict = wants_strict_kernels()
        _settings.settle()
    return _settings.strict


@contextmanager
def _set(**values: object) -> Iterator[None]:
    before = {name: getattr(_settings, name) for name in values}
    for name, value in values.items():
        setattr(_settings, name, value)
    _settings.settle()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(_settings, name, value)
        _settings.settle()


def choose(
    direction: Direction,
    site: Site,
    tokens: int,
    extended: bool,
    gpu: str,
    sharing: int = 1,
    behind: bool = False,
) -> Choice:
    """The plan of a site.

    extended  whether concat-K can be had: an extended weight
    behind    whether x or dy has columns behind it too; else concat-K copies it, which never pays
    gpu       the device's name, "" for the CPU
    sharing   sites on this x, whose branches one kernel adds up in dx
    """
    settings = _settings
    if is_strict():
        return Choice("fused", settings.tiles.get(direction), "strict")
    if settings.forced in able_plans(direction, site, extended):
        tile = tile_for(direction, site, tokens, gpu) if settings.forced == "fused" else None
        return Choice(settings.forced, tile, "forced")
    able = able_plans(direction, site, extended and behind)
    return _chosen(direction, site, bucket(tokens), able, gpu, sharing)


def able_plans(direction: Direction, site: Site, extended: bool) -> tuple[Plan, ...]:
    """The plans that can serve; cuBLAS and bias make no difference to that."""
    concat = extended and not (direction == "input_gradient" and site.drops)
    return ("fused", "sidecar", "concat") if concat else ("fused", "sidecar")


@lru_cache(maxsize=4096)
def _chosen(
    direction: Direction,
    site: Site,
    tokens: int,
    able: tuple[Plan, ...],
    gpu: str,
    sharing: int,
) -> Choice:
    times = plan_times(gpu, direction, site, tokens)
    costs = measured_costs(times, direction, site, tokens, able, sharing)
    if costs:
        plan = min(costs, key=lambda candidate: costs[candidate])
        return Choice(plan, times[plan].tile, times[plan].source)
    _say(gpu, direction, site.inner, site.outer)
    expected = estimates(direction, site, tokens, sharing)
    return Choice(min(able, key=lambda candidate: expected[candidate]))


def measured_costs(
    times: Mapping[str, Measured],
    direction: Direction,
    site: Site,
    tokens: int,
    able: tuple[Plan, ...],
    sharing: int = 1,
) -> dict[Plan, float]:
    """Microseconds that plans which were measured are reckoned to take in a round.

    times   of one site alone, one plan after itself; see `plan_times`
    able    plans that can serve
    """
    costs = {plan: times[plan].microseconds for plan in able if plan in times}
    if "sidecar" in costs and direction == "input_gradient":
        # Several sites pay for a part of one write each.
        costs["sidecar"] -= 1e6 * _write_seconds(direction, site, tokens) * (1 - 1 / sharing)
    # Rounds could use concat-K, or had masks in dX or larger ranks; elsewhere tables count as they
    # are.
    masked = direction == "input_gradient" and site.drops
    larger = site.rank_block > _SMALL_RANK_BLOCK
    if "fused" in costs and ("concat" in costs or masked or larger):
        costs["fused"] *= _IN_ROUNDS
    return costs


def _write_seconds(direction: Direction, site: Site, tokens: int) -> float:
    written = site.outer if direction == "forward" else site.inner
    return 2 * tokens * written / _WRITE


def estimates(direction: Direction, site: Site, tokens: int, sharing: int = 1) -> dict[Plan, float]:
    """Seconds that each plan is expected to take, frozen product included."""
    summed, written = site.inner, site.outer
    if direction == "input_gradient":
        summed, written = written, summed
    beside = _write_seconds(direction, site, tokens)
    beside /= sharing if direction == "input_gradient" else 1
    frozen = 2 * tokens * summed * written / _FLOPS
    tiles = -(-tokens // 128) * -(-written // 256)
    filled = tiles / (_SMS * -(-tiles // _SMS))
    fused = _FUSED if tiles >= _MANY_TILES or filled >= _FILLED else _FUSED_SMALL
    if site.dtype not in ("bfloat16", "float16"):
        fused = _FUSED_WIDE
    ranks = 2 * tokens * site.width * written / _FLOPS
    return {
        "fused": frozen * fused + ranks,
        "sidecar": frozen * 1.01 + beside,
        "concat": frozen * (1 + site.tail / summed),
    }


def tile_for(kind: Kind, site: Site, tokens: int, gpu: str, sites: int = 1) -> Tile | None:
    """The measured tile of a kernel, or None: the kind's rule; in strict mode the rule.

    sites   that the kernel serves at once
    """
    if kind in _settings.tiles:
        return _settings.tiles[kind]
    if is_strict():
        return None
    return measured_tile(gpu, kind, site, bucket(tokens), sites)


def bucket(tokens: int) -> int:
    """The next of four steps a doubling, from 128 to 65,536: what tables tell token counts by.

    A GEMM's tiles fill the last round of SMs or leave it nearly empty: at 1,280 tokens cuBLAS can
    be half as fast again as one tile of ours that is ahead of it at 2,048.
    """
    step = 1 << max((max(tokens, 1) - 1).bit_length() - 3, 4)
    return min(max(-(-tokens // step) * step, 128), 65536)


@lru_cache(maxsize=1024)
def _say(gpu: str, direction: str, inner: int, outer: int) -> None:
    """Log once a shape that nothing was measured."""
    logger.info(
        "no measurement for the %s of %d→%d on %s: rules choose the plan; "
        "`tlora-fx kernels tune` measures",
        direction,
        inner,
        outer,
        gpu or "the CPU",
    )


def forget() -> None:
    """Read tables and settings anew."""
    for known in (_chosen, _read, measured_tile):
        known.cache_clear()
    _settings.read += 1
    _settings.settle()


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan's best time, frozen product included, and the tile that reached it."""

    microseconds: float
    tile: Tile | None
    source: str


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Coordinates of a measurement: numbers in which neighbours stand in for each other."""

    tokens: int
    width: int
    tail: int

    def distance(self, other: Coordinates) -> float:
        """Distance of two points; a wrong width costs more than a wrong token count."""
        pairs = zip(astuple(self), astuple(other), (1.0, 2.0, 1.5), strict=True)
        return sum(weight * abs(math.log2(here / there)) for here, there, weight in pairs)


def file_name(gpu: str) -> str:
    """The table's file of a GPU."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def own_table(gpu: str) -> Path:
    """Default file that `tlora-fx kernels tune` writes to."""
    return cache_folder() / "tables" / file_name(gpu)


def family(kind: str, site: Site, sites: int = 1) -> str:
    """Key of the measurements that can stand in for each other.

    sites   that a kernel serves at once, of which `site` is the first
    """
    # `expand` reads neither x nor W: what it writes decides.
    shape = f"{site.outer}" if kind == "expand" else f"{site.inner}x{site.outer}"
    parts = [kind, shape, site.dtype, f"r{site.rank_block}", site.layout]
    parts += [f"x{sites}"] if sites > 1 else []
    return " ".join([*parts, "drop" if site.drops else "keep"])


def plan_times(gpu: str, direction: str, site: Site, tokens: int) -> dict[str, Measured]:
    """The measured plans of a site nearest to so many tokens, empty where none was."""
    nearest = _nearest(gpu, direction, site, tokens)
    if nearest is None:
        return {}
    entry, source = nearest
    return {
        plan: Measured(best["us"], _tile(best.get("tile")), source)
        for plan, best in entry["plans"].items()
    }


@lru_cache(maxsize=4096)
def measured_tile(gpu: str, kind: str, site: Site, tokens: int, sites: int = 1) -> Tile | None:
    """The best measured tile of a kernel, or None."""
    nearest = _nearest(gpu, kind, site, tokens, sites)
    if nearest is None:
        return None
    entry, _ = nearest
    if "plans" in entry:
        fused = entry["plans"].get("fused", {})
        return _tile(fused.get("tile"))
    return _tile(entry.get("tile"))


def _nearest(
    gpu: str, kind: str, site: Site, tokens: int, sites: int = 1
) -> tuple[dict[str, Any], str] | None:
    """Of all tables the entry nearest to a point; the user's own of two that are equally near."""
    here = Coordinates(tokens, site.width, max(site.tail, 1))
    wanted = family(kind, site, sites)
    near = [
        (here.distance(Coordinates(*entry["at"])), entry, source)
        for source, entries in _tables(gpu, site.arch)
        for entry in entries
        if entry["family"] == wanted
    ]
    if not near:
        return None
    _, entry, source = min(near, key=lambda found: found[0])
    return entry, source


def _tables(gpu: str, arch: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    if not gpu:
        return
    shipped = [SHIPPED / file_name(gpu)]
    if not shipped[0].is_file():
        tables = sorted(SHIPPED.glob("*.json"))
        shipped = [path for path in tables if _read(path).get("arch") == arch]
    for path in (own_table(gpu), *shipped):
        if entries := entries_in(path):
            yield str(path), entries


def entries_in(path: Path) -> list[dict[str, Any]]:
    """Entries of a table, of whichever versions; none where it is not there."""
    entries: list[dict[str, Any]] = _read(path).get("entries", [])
    return entries


def entries_of(path: Path, versions: dict[str, str]) -> list[dict[str, Any]]:
    """Entries of a table, if these versions measured it; a list of the caller's own."""
    _read.cache_clear()
    document = _read(path)
    same = all(document.get(name) == version for name, version in versions.items())
    return list(entries_in(path)) if same else []


@lru_cache(maxsize=16)
def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if document["format"] == FORMAT and isinstance(document["entries"], list):
            return document
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read and is left out: %s", path, error)
        return {}
    logger.warning("%s has another format and is left out; tune again", path)
    return {}


def write_table(
    path: Path, gpu: str, facts: Mapping[str, object], entries: list[dict[str, Any]]
) -> None:
    """Write a table whole or not at all.

    facts   versions, date, and what did not run
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, "gpu": gpu, **facts, "entries": entries}
    replace_file(path, (json.dumps(document, indent=1) + "\n").encode())


def tile_fields(tile: Tile | None) -> dict[str, int] | None:
    """A tile as a table holds it."""
    return None if tile is None else asdict(tile)


def _tile(fields: dict[str, int] | None) -> Tile | None:
    return None if fields is None else Tile(**fields)
