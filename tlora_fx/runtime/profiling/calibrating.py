"""Measure the little that `auto` needs where nobody has profiled a base: seconds at the start.

One process times a layer of each structure, with the jobs' adapters and random weights, on rows of
two sizes: what one process gets of a round, and a whole round. All processes then time collectives
of two sizes. A device without a data sheet first times a product and a copy.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from tlora_fx.cost.calibration import calibrated_profile, sheet_of
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import Gpu, LinkTier, gpu_of_device
from tlora_fx.cost.load import Round
from tlora_fx.cost.model_facts import CAPTURED_TOKENS, ModelFacts
from tlora_fx.cost.profile import CollectivePoint, LayerPoint, Profile
from tlora_fx.cost.profile_sources import without_layers
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.shallow import fill_at_random
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.launching.launch import Launch
from tlora_fx.runtime.profiling.profiler import (
    RowCalls,
    TimedLayer,
    calls_of,
    hardware_of,
    layer_pass,
    layers_to_time,
    mixes_of,
    row_of,
    run_once,
    some_layers,
)
from tlora_fx.runtime.profiling.timing import (
    TimedPass,
    bytes_of,
    group_points,
    measure,
    measure_captured,
)

#: For layers; not counted are kernels that are compiled on the way, which training needs too.
LAYER_SECONDS = 3.0
MIN_TOKENS, MAX_TOKENS = 64, 8192
ROUNDS = 2
#: Payloads of a collective, in bytes.
PAYLOADS = {"cuda": (2**16, 2**25), "cpu": (2**16, 2**20)}
COLLECTIVE_ROUNDS = 3
#: Columns of a square product, and numbers of a copy.
PRODUCT = {"cuda": 4096, "cpu": 512}
COPIED = {"cuda": 2**27, "cpu": 2**22}


def calibrate(
    model: SuperModel,
    ranks: Ranks,
    launch: Launch,
    work: Round,
    device: torch.device,
    *,
    compiled: bool = False,
) -> Profile:
    """A profile of a model on the devices of a run, the same on every process.

    All processes call this together. The model stays without weights.

    work        a round as it will come
    compiled    layers will be compiled; they are timed as they are
    raises      NotProfilable where the base has no layers; RankFailed, TloraError, on every process
    """
    facts = facts_of(model)
    ranks.together(lambda: _require_layers(facts))
    sheet = ranks.together(lambda: _sheet(facts, device) if ranks.mesh.leader else None)
    points = ranks.together(
        lambda: layer_points(model, facts, work, launch.size, device) if ranks.mesh.leader else {}
    )
    collectives = _collective_points(device, launch)
    profile = None
    if sheet is not None:
        profile = calibrated_profile(sheet, facts, points, collectives, compiled=compiled)
    found = ranks.from_leader(profile)
    assert found is not None
    return found


def _require_layers(facts: ModelFacts) -> None:
    if not facts.layers:
        raise without_layers(facts)


def _sheet(facts: ModelFacts, device: torch.device) -> Gpu:
    """The data sheet of a device; measured, where there is none, with the memory that it has."""
    hardware = hardware_of(device)
    known = gpu_of_device(hardware.gpu)
    if known is not None:
        return known
    size, numbers = PRODUCT[device.type], COPIED[device.type]
    dtype = getattr(torch, facts.dtype)
    one, other = (torch.zeros(size, size, dtype=dtype, device=device) for _ in range(2))
    source, target = (torch.zeros(numbers, dtype=torch.uint8, device=device) for _ in range(2))
    product = TimedPass(lambda: one @ other)
    copy = TimedPass(lambda: target.copy_(source))
    measure([product, copy], device, ROUNDS)
    return sheet_of(
        hardware.gpu,
        facts.dtype,
        product_tflops=2 * size**3 / product.forward_ms / 1e9,
        copy_gbps=2 * numbers / copy.forward_ms / 1e6,
        memory_gib=hardware.memory_gib,
        processors=hardware.processors,
    )


def row_sizes(work: Round, processes: int) -> tuple[int, int]:
    """Tokens of the rows to measure: one process's part of a round, and a whole one."""
    whole = min(max(work.load.total, 2 * MIN_TOKENS), MAX_TOKENS, work.max_row_tokens)
    return max(MIN_TOKENS, min(whole // processes, whole // 2)), whole


def layer_points(
    model: SuperModel, facts: ModelFacts, work: Round, processes: int, device: torch.device
) -> dict[str, list[LayerPoint]]:
    """Times and memory of a layer of each structure, by structure.

    A row for which there is no time is made shorter, or left out.
    """
    sampled = _sampled(model, facts, device)
    length = max(2, round(work.load.total / max(work.load.sequences, 1)))
    points: dict[str, list[LayerPoint]] = {layer.structure: [] for layer in facts.layers}
    end, seconds_a_token = time.monotonic() + LAYER_SECONDS, 0.0
    small, whole = row_sizes(work, processes)
    for tokens in (small, whole):
        affordable = tokens
        if seconds_a_token:
            affordable = min(tokens, int((end - time.monotonic()) / seconds_a_token))
            if affordable < 2 * small:
                break
        row = row_of(sampled, mixes_of(facts)[0], affordable, min(length, affordable))
        called = calls_of(sampled, row, device)
        for index in layers_to_time(facts):
            point, seconds = _point(sampled, facts, index, called, device)
            points[facts.layers[index].structure].append(point)
            seconds_a_token += seconds / affordable
    del sampled
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return points


def _point(
    sampled: SuperModel, facts: ModelFacts, index: int, called: RowCalls, device: torch.device
) -> tuple[LayerPoint, float]:
    """A layer on a row, and the seconds that measuring it took, without what was compiled."""
    layer = facts.layers[index]
    piece = layer_pass(sampled.net.get_submodule(layer.path), called, layer.path)
    run_once(piece)
    started = time.monotonic()
    memory = bytes_of(piece, device, list(sampled.net.parameters()))
    measure([piece], device, ROUNDS)
    if called.load.total <= CAPTURED_TOKENS and facts.captures:
        measure_captured([piece], device, ROUNDS)
    point = TimedLayer(layer, called.load, memory, piece).point(facts.hidden)
    return point, time.monotonic() - started


def _sampled(model: SuperModel, facts: ModelFacts, device: torch.device) -> SuperModel:
    """Another model over the same graphs, with random weights in what is timed and before it."""
    sampled = SuperModel(model.group, model.backbone, model.jobs, model.resolve)
    held = some_layers(sampled, layers_to_time(facts), loss=False)
    fill_at_random(sampled, device, held)
    return sampled


def _collective_points(device: torch.device, launch: Launch) -> list[CollectivePoint]:
    """All-reduces and all-gathers of two sizes, within a machine and over all."""
    if launch.size == 1:
        return []
    groups: list[tuple[LinkTier, dist.ProcessGroup | None, int]] = []
    if 1 < launch.per_machine < launch.size and launch.size % launch.per_machine == 0:
        own, _ = dist.new_subgroups(launch.per_machine)  # type: ignore[no-untyped-call]
        groups.append(("node", own, launch.per_machine))
    tier: LinkTier = "node" if launch.per_machine >= launch.size else "network"
    groups.append((tier, dist.group.WORLD, launch.size))
    payloads = PAYLOADS[device.type]
    return [
        point
        for tier, group, size in groups
        for point in group_points(
            device, group, size, tier, payloads, COLLECTIVE_ROUNDS, sends=False
        )
    ]
