"""Which plan serves a site, and where what was measured is read from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.ops.kernels import select
from tlora_fx.ops.kernels.support import Site

SITE = Site(16, 32, "float32", "float32", 16, 16, 5, "out_in", False, 64, 90)


@pytest.fixture
def own_table(tmp_path, monkeypatch):
    """Writes the user's table of measurements."""
    path = tmp_path / "own.json"
    monkeypatch.setattr(select, "own_table", lambda gpu: path)
    monkeypatch.setattr(select, "SHIPPED", tmp_path)

    def write(path=path, **document):
        path.write_text(json.dumps(document))
        select.forget()
        return path

    yield write
    select.forget()


def test_a_table_of_another_format_is_left_out_with_a_warning(own_table, caplog):
    """Kernels had other names when it was measured."""
    path = own_table(format=select.FORMAT - 1, entries=[])

    assert select.plan_times("some GPU", "forward", SITE, 128) == {}
    assert f"{path} has another format and is left out; tune again" in caplog.text


def test_the_nearest_measurement_of_a_family_counts(own_table):
    """By tokens, width and tail; another family's does not."""
    family = select.family("forward", SITE)
    points = {128: 1.0, 4096: 2.0}
    entries = [
        {"family": family, "at": [tokens, 16, 64], "plans": {"sidecar": {"us": time}}}
        for tokens, time in points.items()
    ]
    own_table(format=select.FORMAT, entries=entries)

    (measured,) = select.plan_times("some GPU", "forward", SITE, 2048).values()
    assert measured.microseconds == 2.0
    assert select.plan_times("some GPU", "input_gradient", SITE, 2048) == {}


def test_between_powers_of_two_what_was_measured_there_is_chosen(own_table):
    """A plan that wins at 1,024 and at 2,048 tokens may lose at 1,280."""
    fused, sidecar = {"us": 1.0}, {"us": 2.0}
    plans = {1024: (fused, sidecar), 1280: (sidecar, fused), 2048: (fused, sidecar)}
    entries = [
        {
            "family": select.family("forward", SITE),
            "at": [tokens, 16, 64],
            "plans": dict(zip(("fused", "sidecar"), each, strict=True)),
        }
        for tokens, each in plans.items()
    ]
    own_table(format=select.FORMAT, entries=entries)

    def plan(tokens):
        return select.choose("forward", SITE, tokens, False, "some GPU").plan

    assert [plan(tokens) for tokens in (1024, 1279, 1280, 1900)] == [
        "fused", "sidecar", "sidecar", "fused",
    ]  # fmt: skip


@pytest.mark.parametrize(("fused", "expected"), [(93.0, "concat"), (89.0, "fused")])
def test_our_gemm_must_be_well_ahead_where_cublas_can_carry_the_ranks(own_table, fused, expected):
    """In a round it loses the few hundredths that it was ahead by when measured alone."""
    plans = {"fused": {"us": fused}, "sidecar": {"us": 104.0}, "concat": {"us": 100.0}}
    entry = {"family": select.family("forward", SITE), "at": [1024, 16, 64], "plans": plans}
    own_table(format=select.FORMAT, entries=[entry])

    behind = select.choose("forward", SITE, 1024, True, "some GPU", behind=True)
    plain = select.choose("forward", SITE, 1024, True, "some GPU")

    assert (behind.plan, plain.plan) == (expected, "fused")


@pytest.mark.parametrize(("fused", "expected"), [(93.0, "sidecar"), (89.0, "fused")])
def test_our_gemm_must_be_well_ahead_where_masks_part_cublas_from_the_ranks(
    own_table, fused, expected
):
    """With dropout no rank can go behind dY; the branches are added beside a GEMM of cuBLAS."""
    site = replace(SITE, drops=True)
    plans = {"fused": {"us": fused}, "sidecar": {"us": 100.0}}
    family = select.family("input_gradient", site)
    entry = {"family": family, "at": [1024, 16, 64], "plans": plans}
    own_table(format=select.FORMAT, entries=[entry])

    assert select.choose("input_gradient", site, 1024, True, "some GPU").plan == expected


def test_one_point_of_the_users_own_does_not_hide_those_of_ours(own_table, tmp_path):
    """The nearest of both tables counts, and the own one where both are as near."""
    family = select.family("forward", SITE)

    def entry(tokens, time):
        return {"family": family, "at": [tokens, 16, 64], "plans": {"sidecar": {"us": time}}}

    own_table(format=select.FORMAT, entries=[entry(1280, 1.0)])
    shipped = [entry(1280, 2.0), entry(8192, 3.0)]
    own_table(tmp_path / select.file_name("some GPU"), format=select.FORMAT, entries=shipped)

    times = [
        select.plan_times("some GPU", "forward", SITE, tokens)["sidecar"].microseconds
        for tokens in (1280, 8192)
    ]
    assert times == [1.0, 3.0]


@pytest.mark.parametrize(("arch", "found"), [(90, [2.0]), (80, [])])
def test_a_gpu_without_a_table_takes_ours_of_its_architecture(own_table, tmp_path, arch, found):
    """An H100 is cut as an H200 is, until its own user has measured it."""
    entry = {
        "family": select.family("forward", SITE),
        "at": [1280, 16, 64],
        "plans": {"sidecar": {"us": 2.0}},
    }
    shipped = tmp_path / "shipped.json"
    own_table(shipped, format=select.FORMAT, arch=arch, entries=[entry])

    times = select.plan_times("another GPU", "forward", SITE, 1280)

    assert [time.microseconds for time in times.values()] == found


@given(st.integers(0, 65536))
def test_a_bucket_is_at_most_a_quarter_above_its_tokens(tokens):
    """Four steps a doubling; a bucket is its own."""
    bucket = select.bucket(tokens)

    assert tokens <= bucket <= max(128, tokens * 1.25)
    assert select.bucket(bucket) == bucket
