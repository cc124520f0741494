"""What was measured: times of plans and tiles by GPU, shape and token count.

A table is a JSON file a GPU. Ours lie beside this module; the user's own, in the cache folder,
comes first. Keys hold what a plan's time depends on; the next smaller or larger measured token
count, width and tail stand in for those that were not measured.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tlora_fx.codegen.loading import cache_folder
from tlora_fx.codegen.spec import Tile
from tlora_fx.ops.kernels.support import Site

logger = logging.getLogger("tlora_fx.kernels")
FORMAT = 2
SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan's best time, frozen product included, and the tile that reached it."""

    microseconds: float
    tile: Tile | None
    source: str


@dataclass(frozen=True, slots=True)
class Point:
    """Where something was measured: numbers in which neighbours stand in for each other."""

    tokens: int
    width: int
    tail: int

    def distance(self, other: Point) -> float:
        """How unlike two points are; a wrong width costs more than a wrong token count."""
        pairs = zip(astuple(self), astuple(other), (1.0, 2.0, 1.5), strict=True)
        return sum(weight * abs(math.log2(one / two)) for one, two, weight in pairs)


def file_name(gpu: str) -> str:
    """The table's file of a GPU."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def own_table(gpu: str) -> Path:
    """Where `tlora-fx kernels tune` writes by default."""
    return cache_folder().parent / "tables" / file_name(gpu)


def family(kind: str, site: Site, sites: int = 1) -> str:
    """What must be equal for a measurement to tell anything.

    sites   that a kernel serves at once, of which `site` is the first
    """
    parts = [kind, f"{site.inner}x{site.outer}", site.dtype, f"r{site.rank_block}", site.layout]
    parts += [f"x{sites}"] if sites > 1 else []
    return " ".join([*parts, "drop" if site.drops else "keep"])


def plan_times(gpu: str, direction: str, site: Site, tokens: int) -> dict[str, Measured]:
    """The measured plans of a site nearest to so many tokens, empty where none was."""
    found = _nearest(gpu, direction, site, tokens)
    if found is None:
        return {}
    entry, source = found
    return {
        plan: Measured(one["us"], _tile(one.get("tile")), source)
        for plan, one in entry["plans"].items()
    }


@lru_cache(maxsize=4096)
def tile(gpu: str, kind: str, site: Site, tokens: int, sites: int = 1) -> Tile | None:
    """The best measured tile of a kernel, or None."""
    found = _nearest(gpu, kind, site, tokens, sites)
    if found is None:
        return None
    entry, _ = found
    if "plans" in entry:
        fused = entry["plans"].get("fused", {})
        return _tile(fused.get("tile"))
    return _tile(entry.get("tile"))


def _nearest(
    gpu: str, kind: str, site: Site, tokens: int, sites: int = 1
) -> tuple[dict[str, Any], str] | None:
    here = Point(tokens, site.width, max(site.tail, 1))
    wanted = family(kind, site, sites)
    for source, entries in _tables(gpu):
        near = [entry for entry in entries if entry["family"] == wanted]
        if near:
            best = min(near, key=lambda entry: here.distance(Point(*entry["at"])))
            return best, source
    return None


def _tables(gpu: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    if not gpu:
        return
    for path in (own_table(gpu), SHIPPED / file_name(gpu)):
        if entries := _read(path):
            yield str(path), entries


@lru_cache(maxsize=16)
def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["format"] == FORMAT:
            entries: list[dict[str, Any]] = document["entries"]
            return entries
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read and is left out: %s", path, error)
        return []
    logger.warning("%s has another format and is left out; tune again", path)
    return []


def write(path: Path, gpu: str, facts: dict[str, str], entries: list[dict[str, Any]]) -> None:
    """Write a table whole or not at all.

    facts   versions and date
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, "gpu": gpu, **facts, "entries": entries}
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fresh.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    fresh.replace(path)


def tile_fields(one: Tile | None) -> dict[str, int] | None:
    """A tile as a table holds it."""
    return None if one is None else asdict(one)


def _tile(fields: dict[str, int] | None) -> Tile | None:
    return None if fields is None else Tile(**fields)


def forget() -> None:
    """Read the files anew."""
    _read.cache_clear()
    tile.cache_clear()
