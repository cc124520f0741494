"""A profile from two rows of a layer and two sizes of a collective, and the plans chosen by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cost.facts import LINEARS, layer_cost, load, small_round
from tests.models import base_of, job
from tlora_fx.compiler import compile
from tlora_fx.cost.calibration import calibrated_profile, sheet_of
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import GPUS, Gpu
from tlora_fx.cost.load import Load, Round, work_of
from tlora_fx.cost.model_facts import CAPTURED_TOKENS
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.profile import (
    Captured,
    CollectivePoint,
    LayerPoint,
    LayerProfile,
    Operation,
    Profile,
)
from tlora_fx.cost.profile_sources import LAYER_MS, Size, layer_ms, roofline_profile
from tlora_fx.cost.step_time import CostModel, step_time
from tlora_fx.planners.auto import search

RANKS = {"one": 4, "two": 8}
FEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Large enough that compute is worth dividing."""
    base = base_of(
        tmp_path_factory.mktemp("base"), "llama", dtype="bfloat16",
        hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=8,
        head_dim=64, num_hidden_layers=4,
    )  # fmt: skip
    return compile([job(name, base, r=r, target_modules=LINEARS) for name, r in RANKS.items()])


def true_profile(
    gpu: Gpu, model, *, small_tokens: float, host_ms: float, start_ms: float, gbps: float
) -> Profile:
    """What nobody knows: rows below some size are less efficient, and the host takes its time."""
    facts = facts_of(model)
    roof = roofline_profile(gpu, facts)

    def point(layer: LayerProfile, one: LayerPoint) -> LayerPoint:
        slower = 1 + small_tokens * layer.tp / one.tokens
        scaled = one.scaled(slower, slower)
        if one.tokens > CAPTURED_TOKENS * layer.tp:
            return scaled
        names = ("forward_ms", "backward_ms", "first_ms", "frozen_ms")
        times = {name: getattr(scaled, name) for name in names}
        hosts = {name: max(ms, host_ms) for name, ms in times.items() if ms is not None}
        return scaled.model_copy(update={"captured": Captured(**times), **hosts})

    layers = [
        layer.model_copy(update={"points": [point(layer, one) for one in layer.points]})
        for layer in roof.layers
    ]
    return roof.model_copy(update={
        "layers": layers, "collectives": collectives(start_ms, gbps, (2**14, 2**20, 2**26)),
    })  # fmt: skip


def collectives(start_ms: float, gbps: float, sizes: Sequence[int]) -> list[CollectivePoint]:
    """All that four processes say to each other, over one link."""
    parts: dict[Operation, float] = {"all-reduce": 2, "all-gather": 1, "send": 2}
    return [
        CollectivePoint(
            operation=operation,
            tier="node",
            processes=count,
            payload_bytes=size,
            ms=start_ms + part * (count - 1) / count * size / (gbps * 1e6),
        )
        for operation, part in parts.items()
        for count in ((2,) if operation == "send" else (2, 4))
        for size in sizes
    ]


def sampled(cost: CostModel, rows: Sequence[Load]) -> list[LayerPoint]:
    """What two rows of a layer take, as a calibration measures it."""
    layer = cost.facts.layers[1]
    points = []
    for row in rows:
        graph, host = (layer_cost(cost, 1, row, launched=launched) for launched in (False, True))
        work = work_of([layer], [row], cost.facts.hidden)
        points.append(LayerPoint(
            tokens=row.total,
            **{name: float(values[0, 0, 0]) for name, values in work._asdict().items()},
            forward_ms=host.forward, backward_ms=host.backward,
            captured=Captured(forward_ms=graph.forward, backward_ms=graph.backward),
            saved_bytes=host.saved,
        ))  # fmt: skip
    return points


@settings(FEW, max_examples=2)  # each looks at all plans, in half a second
@given(
    slower=st.floats(0.2, 1.0),
    narrower=st.floats(0.2, 1.0),
    small_tokens=st.floats(0, 1500),
    host_ms=st.floats(0.01, 3),
    start_ms=st.floats(0.01, 0.3),
    gbps=st.floats(2, 300),
    sequences=st.integers(2, 32),
    length=st.sampled_from([32, 128, 512]),
    processes=st.sampled_from([2, 4]),
)
def test_a_plan_by_a_calibration_is_nearly_the_best(
    model, slower, narrower, small_tokens, host_ms, start_ms, gbps, sequences, length, processes
):
    """Of all plans, by times that the calibration has seen at two sizes alone."""
    sheet = GPUS["h100"]
    hidden = replace(
        sheet,
        tflops={name: peak * slower for name, peak in sheet.tflops.items()},
        memory_gbps=sheet.memory_gbps * narrower,
    )
    truth = true_profile(
        hidden, model, small_tokens=small_tokens, host_ms=host_ms, start_ms=start_ms, gbps=gbps
    )
    cost = CostModel(facts_of(model), truth)
    work = small_round(sequences, length)
    whole = work.load.total
    rows = [load(max(whole // processes, 64), length), load(max(whole, 128), length)]
    two = [
        one
        for one in collectives(start_ms, gbps, (2**16, 2**24))
        if one.operation != "send" and one.processes == processes
    ]
    structure = cost.facts.layers[1].structure
    found = calibrated_profile(sheet, cost.facts, {structure: sampled(cost, rows)}, two)

    chosen = search(model, found, work, processes).best()
    plans = [candidate.plan for candidate in search(model, truth, work, processes).running]
    best = min(true_seconds(cost, plan, work) for plan in plans)

    assert true_seconds(cost, chosen, work) <= 1.1 * best


def true_seconds(cost: CostModel, plan: Plan, work: Round) -> float:
    return step_time(cost, plan, work).seconds


def two_points(cost: CostModel) -> dict[str, list[LayerPoint]]:
    """What two rows took, by the layers' structure."""
    return {cost.facts.layers[1].structure: sampled(cost, [load(256), load(2048)])}


@pytest.fixture(scope="module")
def slow(model):
    """A machine that is slower than its data sheet, more so on small rows."""
    truth = true_profile(GPUS["h100"], model, small_tokens=700, host_ms=0.4, start_ms=0.05, gbps=50)
    return CostModel(facts_of(model), truth)


def test_measured_rows_take_what_was_measured(model, slow):
    """As CUDA graphs, and where the host launches them."""
    found = CostModel(
        facts_of(model), calibrated_profile(GPUS["h100"], slow.facts, two_points(slow))
    )

    for tokens in (256, 2048):
        for launched in (False, True):
            expected = layer_cost(slow, 1, load(tokens), launched=launched)
            took = layer_cost(found, 1, load(tokens), launched=launched)
            assert took.forward == pytest.approx(expected.forward, rel=0.1)
            assert took.backward == pytest.approx(expected.backward, rel=0.1)


def test_layers_of_another_structure_are_as_much_slower(model, slow):
    """Nobody has measured them."""
    points = {"measured": two_points(slow)[slow.facts.layers[1].structure]}
    layers = (replace(slow.facts.layers[0], structure="measured"), *slow.facts.layers[1:])
    found = calibrated_profile(GPUS["h100"], replace(slow.facts, layers=layers), points)
    by_structure = {layer.structure: layer.points for layer in found.layers if layer.tp == 1}
    one, other = by_structure.values()

    assert [point.forward_ms for point in one] == [point.forward_ms for point in other]


def test_a_device_without_a_data_sheet_gets_one_by_which_it_takes_what_it_took():
    """A product of 10 TFLOP/s, a copy of 20 GB/s."""
    sheet = sheet_of("cpu", "bfloat16", product_tflops=10, copy_gbps=20)
    size = Size(elements=4096.0**2, attention_width=0, hidden=0, dtype="bfloat16")
    row = LayerPoint(tokens=8192, squares=0, forward_ms=0)

    product = layer_ms(sheet, size, row, "forward") - LAYER_MS
    assert product == pytest.approx(2 * 4096**2 * 8192 / 10e9)


def test_compiled_layers_keep_what_the_roofline_says(model, slow):
    """Uncompiled ones keep what was measured."""
    points = {
        name: [one.model_copy(update={"saved_bytes": 7.0 * one.tokens}) for one in measured]
        for name, measured in two_points(slow).items()
    }
    roof = roofline_profile(GPUS["h100"], slow.facts)
    eager, compiled = (
        calibrated_profile(GPUS["h100"], slow.facts, points, compiled=compiled)
        for compiled in (False, True)
    )

    a_token = roof.layers[0].points[0].saved_bytes / roof.layers[0].points[0].tokens
    assert compiled.layers[0].points[0].saved_bytes == pytest.approx(
        a_token * compiled.layers[0].points[0].tokens
    )
    assert eager.layers[0].points[0].saved_bytes == pytest.approx(
        7.0 * eager.layers[0].points[0].tokens
    )
