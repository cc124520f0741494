"""What is read from a profiler's trace: kernels, their operators, and classes of a step's time."""

from __future__ import annotations

import pytest

from benchmarks.kernel_times import Kernel, busy, kernels_of, table
from benchmarks.step_profile import classes


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


EVENTS = [
    event("cpu_op", "aten::mm", 10, 5, **{"External id": 1, "Input Dims": [[8, 4], [4, 9], []]}),
    event("cpu_op", "aten::add", 120, 5, **{"External id": 2, "Input Dims": [[8]]}),
    event("kernel", "nvjet", 30, 20, **{"External id": 1}),
    event(
        "kernel", "kernel", 45, 10, **{"External id": 1, "registers per thread": 90, "grid": [2]}
    ),
    event("gpu_memset", "Memset", 130, 3, **{"External id": 2}),
    event("gpu_user_annotation", "step", 0, 999),
    {"ph": "M", "name": "process_name"},
]


def kernel(name, op="", sizes=(), kind="kernel"):
    return Kernel(name, kind, 0.0, 1000.0, op, sizes)


def test_kernels_know_the_operator_that_started_them():
    """By the profiler's ids: name and sizes of inputs."""
    first, second, third = kernels_of(EVENTS)

    assert (first.name, first.op, first.sizes) == ("nvjet", "aten::mm", (8, 4, 4, 9))
    assert second.name == "kernel registers=90 grid=[2]"
    assert (third.kind, third.op) == ("fill", "aten::add")


def test_busy_time_counts_what_overlaps_once():
    """30 to 55, and 130 to 133."""
    kernels = kernels_of(EVENTS)

    assert busy(kernels) == 28


def test_the_table_has_microseconds_a_call():
    """Launches of one kernel by one operator are added up."""
    rows = table([*kernels_of(EVENTS), *kernels_of(EVENTS)], calls=2)

    assert rows[0] == {"kernel": "nvjet", "op": "aten::mm", "launches": 1, "microseconds": 20}


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (kernel("nvjet_tst", "aten::mm", (4800, 4096, 4096, 4096)), "frozen products"),
        (kernel("nvjet_tst", "aten::mm", (4800, 4096, 4096, 60)), "adapter kernels"),
        (kernel("nvjet_tst", "aten::mm", (2048, 4096, 4096, 999)), "lm_head and loss"),
        (kernel("nvjet_tst", "tlora_fx::multi_lora_forward"), "frozen products"),
        (kernel("shrink_4096x4096", "tlora_fx::multi_lora_forward"), "adapter kernels"),
        (kernel("flash_fwd_kernel", "tlora_fx::packed_attention"), "attention"),
        (kernel("triton_poi_fused_silu_mul_0"), "norms and pointwise"),
        (kernel("_settle"), "optimizer"),
        (kernel("multi_tensor_apply_kernel<fused_adam>"), "optimizer"),
        (kernel("Memcpy HtoD", kind="copy"), "copies and fills"),
    ],
)
def test_a_kernel_counts_for_one_class(one, expected):
    """A millisecond of it stands in that class, and what no kernel filled is idle."""
    found = classes([one], vocabulary=999, ranks=(2, 58), wall_ms=3.0)

    assert {name: ms for name, ms in found.items() if ms} == {expected: 1.0, "idle": 2.0}
