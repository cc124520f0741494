"""Time plans and tiles on this machine's GPU, and write the table that the selection reads.

For each site: first the tiles of the kernels that all plans share, then each plan, the fused one
with every tile of its GEMM. Of sites that share an x the kernels that serve them at once. What does
not compile or does not fit is left out and noted. The table is written after every entry, so that
a run that is cut short is worth what it measured. Kernels of dA and dB are timed as they leave
shares, also at sizes where rows of one process add whole gradients.

Kernels are compiled ahead in processes of their own: a compiler takes a second or more a kernel on
one core, the measurement of it milliseconds.
"""

from __future__ import annotations

import datetime
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from tlora_fx.codegen.kernels import emitter, shrink
from tlora_fx.codegen.spec import Dtype, KernelSpec, Kind, Tile
from tlora_fx.errors import KernelToolMissing
from tlora_fx.host.memory import usable_cpus
from tlora_fx.ops.kernels import dispatch, launch, packed, select, support
from tlora_fx.ops.kernels.launch import KernelCall, gpu_name
from tlora_fx.ops.kernels.support import KernelGroup, Site
from tlora_fx.ops.tables import SiteGroup

logger = logging.getLogger(__name__)

#: A Llama-3-8B layer; the rows of a step; jobs as they come: few and small, many, large.
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024))
TOKENS = (8192, 1024, 4096, 2048)
#: Where only plans are measured: between powers of two tiles fill the SMs more and less well.
BETWEEN = (1280, 1536, 1792, 2560, 3072, 3584, 5120, 6144)
MIXES = ((2, 4, 8, 16) * 2, (2, 4, 8, 16) * 8, (16, 32, 64, 128))
#: q, k, v and gate, up of such a layer: outputs that share an x.
GROUPS = ((4096, 4096, 1024, 1024), (4096, 14336, 14336))
GROUPED: tuple[Kind, ...] = ("shrink", "lora_a_backward")
SHARED: tuple[Kind, ...] = ("shrink", "expand", "lora_b_backward", "lora_a_backward")
DIRECTIONS: tuple[select.Direction, ...] = ("forward", "input_gradient")
# Of the time: what compiling may take before the first measurement.
_COMPILING = 0.4
_RATE = 0.05
_WARM = 2
# Products before the first measurement.
_HEAT = 150
# What takes so much longer than the fastest is not timed again.
_FAR = 1.5
Call = Callable[[], object]
# To compile a kernel it runs once on so short a row.
_SHORT = 256
_MAX_WORKERS = 12
_TOGETHER = 3


@dataclass(frozen=True, slots=True)
class Point:
    """Measuring point of one site.

    beside       outputs of others on its x
    plans_only   kernels are cut as tables know them
    """

    shape: tuple[int, int]
    tokens: int
    ranks: tuple[int, ...]
    drops: bool
    beside: tuple[int, ...] = ()
    plans_only: bool = False

    def __str__(self) -> str:
        jobs = f"{len(self.ranks)} jobs of rank {min(self.ranks)} to {max(self.ranks)}"
        inner, *outers = *self.shape, *self.beside
        shape = f"{inner}→{' '.join(map(str, outers))}"
        return f"{shape}, {self.tokens} tokens, {jobs}{', dropout' * self.drops}"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kernels with tiles of their own to be found here."""
        if self.plans_only:
            return DIRECTIONS
        kinds = GROUPED if self.beside else (*SHARED, *DIRECTIONS)
        # With masks `expand` is measured nowhere: the rule cuts it.
        return tuple(kind for kind in kinds if not (kind == "expand" and self.drops))


@dataclass(slots=True)
class _Log:
    path: Path
    gpu: str
    arch: int
    until: float
    entries: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.until

    def resume(self) -> None:
        """Take over what a table of the same versions holds."""
        self.entries = select.entries_of(self.path, versions())

    def enter(self, entry: dict[str, Any]) -> None:
        """Add an entry, or put it in the place of the one of its point, and write all."""
        key = entry["family"], entry["at"]
        others = [other for other in self.entries if (other["family"], other["at"]) != key]
        self.entries = [*others, entry]
        now = datetime.datetime.now(datetime.UTC)
        facts = {"arch": self.arch, **versions(), "date": now.strftime("%Y-%m-%d")}
        facts["left_out"] = self.failures
        select.write_table(self.path, self.gpu, facts, self.entries)


def tune(
    shapes: Sequence[tuple[int, int]] | None = None,
    tokens: Sequence[int] | None = None,
    ranks: Sequence[int] | Sequence[Sequence[int]] | None = None,
    dtype: Dtype = "bfloat16",
    out_path: Path | None = None,
    budget_seconds: float = 540,
    device: torch.device | None = None,
    groups: Sequence[tuple[int, ...]] | None = None,
    ship: bool = False,
    plans_only: bool = False,
) -> Path:
    """Measure and add to a table; prints what won.

    What the table holds of other points stays, unless other versions of PyTorch or Triton
    measured it.

    shapes           (in, out) of linears; None: those of a Llama-3-8B layer
    tokens           of a row; None: `TOKENS`, then the plans at `BETWEEN`
    ranks            of the jobs of a row, or several such mixes
    out_path         None: the user's own table, which comes before ours
    budget_seconds   nothing is begun later; it holds for the whole call
    groups           (in, out, out, ...) of linears that share an x; None: those of such a layer,
                     unless shapes are given
    ship             write into this package by default, not into the cache folder
    plans_only       measure plans, with the tiles that tables have for the other kernels
    raises           KernelToolMissing where there is no GPU
    """
    device = device or gpu_device()
    until = time.monotonic() + budget_seconds
    gpu = gpu_name(device) or "cpu"
    path = out_path or (select.SHIPPED / select.file_name(gpu) if ship else select.own_table(gpu))
    console, log = Console(highlight=False), _Log(path, gpu, support.arch_of(device), until)
    log.resume()
    if groups is None:
        groups = () if shapes else GROUPS
    points: list[Point] = []
    if not plans_only:
        points += _points(shapes or SHAPES, groups, tokens or TOKENS, _mixes(ranks))
    if plans_only or not tokens:
        between = _points(shapes or SHAPES, (), tokens or BETWEEN, _mixes(ranks))
        points += [replace(point, plans_only=True) for point in between]
    if device.type == "cuda":
        tasks = list(_tasks(points, dtype, device))
        console.print(f"{len(points)} sites; compiling up to {len(tasks)} kernels")
        precompile(tasks, _COMPILING * budget_seconds)
    for number, point in enumerate(points):
        if log.is_over:
            console.print(f"the time is up: {len(points) - number} of {len(points)} left out")
            break
        left = until - time.monotonic()
        console.print(f"[bold]{point}[/bold]  ({number + 1} of {len(points)}, {left:.0f} s left)")
        _measure(point, dtype, device, log, console)
    select.forget()
    console.print(f"{len(log.entries)} entries, {len(log.failures)} tiles left out: {path}")
    return path


def gpu_device() -> torch.device:
    """The GPU that is measured; raises KernelToolMissing where there is none."""
    if not torch.cuda.is_available():
        raise KernelToolMissing(
            "tuning needs a CUDA device", help="run it on the machine that will train"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _mixes(ranks: Sequence[int] | Sequence[Sequence[int]] | None) -> list[tuple[int, ...]]:
    if not ranks:
        return list(MIXES)
    if isinstance(ranks[0], int):
        return [tuple(ranks)]  # type: ignore[arg-type]
    return [tuple(mix) for mix in ranks]  # type: ignore[arg-type]


def _points(
    shapes: Sequence[tuple[int, int]],
    groups: Sequence[tuple[int, ...]],
    tokens: Sequence[int],
    mixes: Sequence[tuple[int, ...]],
) -> Iterator[Point]:
    """What matters most comes first: the first mix everywhere, without dropout."""
    for mix, drops, count in product(mixes, (False, True), tokens):
        for shape in shapes:
            yield Point(shape, count, mix, drops)
        for inner, outer, *beside in groups:
            yield Point((inner, outer), count, mix, drops, tuple(beside))


def _measure(point: Point, dtype: Dtype, device: torch.device, log: _Log, console: Console) -> None:
    """All that is to be known of one site."""
    with select.force_plan("fused"):
        case = Case.make(point, dtype, device)
    tiles: dict[Kind, Tile] = {}
    for kind in point.kinds:
        if log.is_over:
            break
        if kind in DIRECTIONS:
            times = _plans(kind, case, tiles, log)
            if times:
                log.enter(_entry(kind, case, point, {"plans": times}))
                console.print(f"  {kind:<15} " + "  ".join(map(_described, times.items())))
        elif (best := _best_tile(kind, case, tiles, log)) is not None:
            tiles[kind], micro = best
            measured = {"tile": select.tile_fields(tiles[kind]), "us": round(micro, 2)}
            log.enter(_entry(kind, case, point, measured))
            console.print(f"  {kind:<15} {micro:8.1f} µs  {_short(tiles[kind])}")
    packed.forget()


def _best_tile(
    kind: Kind, case: Case, tiles: dict[Kind, Tile], log: _Log
) -> tuple[Tile, float] | None:
    able: list[tuple[Tile, Call]] = []
    kernel, name = case.kernel(kind), select.family(kind, case.site, len(case.s))
    for tile in _candidates(kind, case.site, len(case.s), len(case.x)):
        call = _forced(kernel, tiles | {kind: tile}, None)
        if _runs(call, f"{name} {_short(tile)}", log):
            able.append((tile, call))
    if not able:
        return None
    times = microseconds([call for _, call in able], case.x.device)
    best = min(range(len(able)), key=times.__getitem__)
    return able[best][0], times[best]


def _plans(
    direction: select.Direction, case: Case, tiles: dict[Kind, Tile], log: _Log
) -> dict[str, dict[str, Any]]:
    """The time of every plan that can serve, the fused one with its best tile."""
    tried: list[tuple[select.Plan, Tile | None, Call]] = []
    for plan in select.able_plans(direction, case.site, extended=True):
        cuts: Sequence[Tile | None] = (
            _candidates(direction, case.site) if plan == "fused" else [None]
        )
        for cut in cuts:
            forced = tiles | ({direction: cut} if cut else {})
            call = _forced(case.direction(direction, extended=plan == "concat"), forced, plan)
            name = f"{select.family(direction, case.site)} {plan} {_short(cut)}"
            if _runs(call, name, log):
                tried.append((plan, cut, call))
    times = microseconds([call for *_, call in tried], case.x.device)
    best: dict[str, dict[str, Any]] = {}
    for (plan, cut, _), micro in zip(tried, times, strict=True):
        if plan not in best or micro < best[plan]["us"]:
            best[plan] = {"us": round(micro, 2), "tile": select.tile_fields(cut)}
    return best


def _forced(call: Call, tiles: dict[Kind, Tile], plan: select.Plan | None) -> Call:
    """The call with these tiles and this plan."""

    def run() -> object:
        with ExitStack() as stack:
            stack.enter_context(select.force_tiles(tiles))
            stack.enter_context(select.force_plan(plan))
            return call()

    return run


def _runs(call: Call, name: str, log: _Log) -> bool:
    """Whether a call works at all; why not goes into the select."""
    if name in log.failures:
        return False
    try:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # compilers and drivers raise what they like
        log.failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        logger.info("left out: %s: %s", name, log.failures[name])
        return False
    return True


def _candidates(kind: Kind, site: Site, sites: int = 1, tokens: int = 0) -> tuple[Tile, ...]:
    spec = _spec(kind, site, sites)
    tiles = [emitter(kind).default_tile(spec), *emitter(kind).candidates(spec)]
    if kind == "shrink" and tokens <= shrink.few_tokens(spec):
        tiles += shrink.split_candidates(spec)
    return tuple(dict.fromkeys(tiles))


def _spec(kind: Kind, site: Site, sites: int = 1) -> KernelSpec:
    """The spec whose tiles are tried: of the site, masks included where it drops."""
    drops = site.drops and kind not in ("forward", "lora_b_backward")
    shape = (site.outer, site.outer) if kind == "expand" else (site.inner, site.outer)
    return KernelSpec(
        kind, *shape, site.dtype, rank_block=site.rank_block, dropout=drops,
        weight_layout=site.layout, arch=site.arch, sites=sites,
    )  # fmt: skip


def _tasks(points: Sequence[Point], dtype: Dtype, device: torch.device) -> Iterator[Task]:
    """Every kernel that will be tried, each once, in the order of need."""
    arch, tried = support.arch_of(device), set()
    for point, kind in ((measured, kind) for measured in points for kind in measured.kinds):
        most = max(point.ranks)
        block = support.rank_block(most)
        site = Site(
            *point.shape, dtype, "float32", block, -(-most // block) * block, sum(point.ranks),
            "out_in", point.drops, 64, arch,
        )  # fmt: skip
        sites = 1 + len(point.beside)
        for tile in _candidates(kind, site, sites, point.tokens):
            # Short rows have a form of their own of some kernels.
            tokens = point.tokens if point.tokens <= launch.SHORT_ROW else _SHORT
            task = Task(kind, replace(point, tokens=tokens), dtype, tile)
            form = tokens > _SHORT and kind in ("lora_a_backward", "lora_b_backward")
            if (name := (_spec(kind, site, sites), tile, form)) not in tried:
                tried.add(name)
                yield task


def _entry(kind: str, case: Case, point: Point, best: dict[str, Any]) -> dict[str, Any]:
    site, sites = case.site, len(case.s)
    at = [select.bucket(point.tokens), site.width, max(site.tail, 1)]
    return {"family": select.family(kind, site, sites), "at": at, **best}


def versions() -> dict[str, str]:
    """Versions of what compiles and starts kernels: times of others are not comparable."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


def _described(plan: tuple[str, dict[str, Any]]) -> str:
    name, best = plan
    cut = "" if best["tile"] is None else f" ({_short(Tile(**best['tile']))})"
    return f"{name} {best['us']:.1f} µs{cut}"


def _short(tile: Tile | None) -> str:
    if tile is None:
        return ""
    parts = f"{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
    return parts + (f" slab {tile.slab}" if tile.slab else "")


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel: the site that runs it, on a short row, and how it cuts its work."""

    kind: Kind
    point: Point
    dtype: Dtype
    tile: Tile


def precompile(tasks: Sequence[Task], seconds: float) -> None:
    """Run every kernel once on a short row, in several processes, for so long at most.

    What fails here fails again where it is measured, and is noted there.
    """
    workers = min(_MAX_WORKERS, max(1, usable_cpus() - 2))
    until = time.monotonic() + seconds
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        groups = [tasks[start : start + _TOGETHER] for start in range(0, len(tasks), _TOGETHER)]
        futures = [pool.submit(_compile, group) for group in groups]
        done, late = wait(futures, timeout=max(0.0, until - time.monotonic()))
        for future in late:
            future.cancel()
        for future in done:
            if error := future.exception():
                logger.info("precompiling stopped in one process: %s", error)


def _compile(tasks: Sequence[Task]) -> None:
    for task in tasks:
        try:
            case = _case(task.point, task.dtype)
            call = case.direction(task.kind) if task.kind in DIRECTIONS else case.kernel(task.kind)
            with select.force_tiles({task.kind: task.tile}), select.force_plan("fused"):
                call()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  # compilers and drivers raise what they like
            logger.info("%s %s does not run: %s", task.kind, task.tile, error)


@lru_cache(maxsize=4)
def _case(point: Point, dtype: Dtype) -> Case:
    with select.force_plan("fused"):
        return Case.make(point, dtype, torch.device("cuda", torch.cuda.current_device()))


@dataclass(slots=True)
class Case:
    """A site and a row of equal jobs.

    x, dy           random; dy of the first site
    group, kernels  as the operators have them
    s, bits         of the forward
    """

    x: Tensor
    dy: Tensor
    group: SiteGroup
    kernels: KernelGroup
    s: list[Tensor]
    bits: list[Tensor]

    @classmethod
    def make(cls, point: Point, base: Dtype, device: torch.device) -> Case:
        """A point's row, whose tokens are shared out evenly among the jobs."""
        inner, *outers = *point.shape, *point.beside
        tokens, ranks, dtype = point.tokens, point.ranks, getattr(torch, base)
        jobs, rows = len(ranks), sum(ranks)
        bounds = [tokens * job // jobs for job in range(jobs + 1)]

        def normal(*sizes: int, to: torch.dtype = dtype) -> Tensor:
            return torch.randn(sizes, device=device, dtype=torch.float32).to(to)

        group = SiteGroup(
            [normal(outer, inner) / inner**0.5 for outer in outers],
            [normal(rows, inner, to=torch.float32) / inner**0.5 for _ in outers],
            [normal(rows, outer, to=torch.float32) for outer in outers],
            [torch.tensor([0, *accumulate(ranks)], dtype=torch.int32) for _ in outers],
            [torch.ones(jobs, dtype=torch.float64) for _ in outers],
            [torch.full((jobs,), _RATE * point.drops, dtype=torch.float64) for _ in outers],
            torch.tensor(bounds, dtype=torch.int32),
            torch.tensor([[job, 1] for job in range(jobs)]),
            torch.arange(tokens, dtype=torch.int32, device=device),
            [torch.tensor(7 + site) for site in range(len(outers))],
            dtype,
            max(ranks),
            point.drops,
        )
        x, dy = normal(tokens, inner), normal(tokens, outers[0])
        kernels, count = KernelGroup.of(x, group), len(outers)
        rest = dispatch.forward(x, [None] * count, group, kernels)[count:]
        return cls(x, dy, group, kernels, rest[:count], rest[count:])

    @property
    def site(self) -> Site:
        """The site as kernels see it."""
        return self.kernels.sites[0]

    def direction(self, name: str, extended: bool = False) -> Call:
        """The whole forward, or the whole of dX with dS and dB's parts.

        extended   whether x or dy has columns behind its rows, which is when concat-K is taken
        """
        tail = self.site.tail if extended else 0
        if name == "forward":
            x = _widened(self.x, tail)
            return lambda: dispatch.forward(x, [None], self.group, self.kernels, tail)
        dys = [_widened(self.dy, tail)]
        return lambda: dispatch.input_gradient(dys, self.group, self.s, self.bits, True, tail)

    def kernel(self, kind: Kind) -> Call:
        """One kernel alone: of all sites where it serves several at once, else of the first."""
        call = KernelCall.open(self.kernels, self.group, len(self.x), self.x.device)
        helds, site = [call.packed(index) for index in range(len(self.s))], self.site
        held = helds[0]
        wide = torch.promote_types(torch.float32, self.x.dtype)
        chunks = site.chunks(len(self.x), self.kernels.jobs)
        if kind == "shrink":
            return lambda: call.shrink(self.x, helds, self.s, self.bits)
        if kind == "expand":
            y = torch.empty_like(self.dy)
            return lambda: call.expand([0], self.s, [held.b], None, y, accumulate=False)
        if kind == "lora_b_backward":
            parts = call.empty(chunks, site.width, site.outer, dtype=wide)
            ds = torch.empty_like(self.s[0])
            return lambda: call.lora_b_backward(
                [self.dy], self.s[:1], helds[:1], [parts], [ds], [None], [False], [(0, 0)]
            )
        assert kind == "lora_a_backward"
        sums = [call.empty(chunks, site.width, site.inner, dtype=wide) for _ in self.s]
        return lambda: call.lora_a_backward(self.x, self.s, self.bits, sums)


def _widened(rows: Tensor, columns: int) -> Tensor:
    """[tokens, n + columns]: the rows with so many columns behind them."""
    return torch.cat([rows, rows.new_zeros(len(rows), columns)], 1) if columns else rows


def microseconds(calls: Sequence[Call], device: torch.device, rounds: int = 5) -> list[float]:
    """The median time of each call, in turns, so that a slow moment hits all alike.

    On CUDA each call is captured into a graph first: what is timed is the device, not Python. It
    follows products there, as in a round: they keep the card at its limit of power, where clocks
    are lower, and an H200's L2 cache holds what they wrote.
    """
    if device.type == "cuda":
        return _on_cuda(calls, rounds)
    return [_by_the_clock(call) for call in calls]


def _by_the_clock(call: Call) -> float:
    """One launch: what tests take, under the interpreter."""
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def _products() -> Call:
    """A product of 8,192 rows that writes 64 MiB."""
    rows = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.mm(rows, weight)


def _on_cuda(calls: Sequence[Call], rounds: int) -> list[float]:
    graphs, pool = [], torch.cuda.graph_pool_handle()
    for call in calls:
        for _ in range(_WARM):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            kept = call()
        del kept
        graphs.append(graph)
    measured: list[list[float]] = [[] for _ in graphs]
    products = _products()
    for _ in range(_HEAT):
        products()
    for done in range(rounds):
        far = _FAR * min((times[0] for times in measured if times), default=0.0)
        for graph, times in zip(graphs, measured, strict=True):
            if done and times[0] > far:
                continue
            first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            products()
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(1e3 * first.elapsed_time(last))
    return [statistics.median(times) for times in measured]
