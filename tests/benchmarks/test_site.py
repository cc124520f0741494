"""The arms of `benchmarks.site` compute what float64 does, and its table tells what was found."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.site import main
from benchmarks.site_arms import PEERS, CannotError, expand_first, frozen, peft_eager
from benchmarks.site_check import errors, least_saved_bytes, reference, results, saved_bytes
from benchmarks.site_inputs import Built, draw
from benchmarks.site_loads import MIXED as MIXED_LENGTHS
from benchmarks.site_loads import STEPS, Load, Row, bound_rows, further_rows
from benchmarks.site_ours import ours
from benchmarks.site_run import Settings, measure

GROUPS = ((32, (48, 16)), (48, (32,)))
MIXED = Load(GROUPS, (5, 1, 8), (2, 4, 16))
ALONE = Load(GROUPS, (14,), (4,))
ROW = Row("tiny", "a tiny load", MIXED, bound=1.5, aim=1.1)


def settings(**arms):
    return Settings("cpu", torch.float64, rounds=2, arms=arms)


@pytest.mark.parametrize(
    ("arm", "load", "dtype", "limit"),
    [
        ("expand-first", MIXED, torch.float64, 1e-12),
        ("stacked", MIXED, torch.float64, 1e-12),
        ("loop", MIXED, torch.float64, 1e-12),
        ("peft", ALONE, torch.float64, 1e-12),
        ("grouped-mm", MIXED, torch.float32, 1e-5),
    ],
)
def test_what_ours_is_compared_with_is_right(arm, load, dtype, limit):
    """y, dX and every adapter's gradients, of linears that share an input and one that does not."""
    inputs = draw(load, dtype, "cpu", seed=1)

    found = errors(results(PEERS[arm](inputs)), reference(inputs))

    assert set(found) == {"y", "dx", "da", "db"}
    assert max(found.values()) < limit


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_our_arm_draws_the_masks_of_the_reference(rate):
    """With dropout the reference has our keyed masks, site by site."""
    inputs = draw(Load(GROUPS, (5, 1, 8), (2, 4, 16), rate), torch.float64, "cpu", seed=1)

    found = errors(results(ours(inputs)), reference(inputs))

    assert max(found.values()) < 1e-12


def test_an_arm_with_wrong_numbers_is_not_timed():
    """It says how wrong it is, and the others go on."""

    def wrong(inputs):
        built = expand_first(inputs)
        return Built(
            inputs, lambda: [y * 1.01 for y in built.forward()], built.leaves, built.gradients
        )

    found = measure(ROW, settings(ours=ours, wrong=wrong)).found

    assert "wrong numbers: error 1.0e-02" in found["wrong"].why_not[""]
    assert not found["wrong"].times
    assert len(found["ours"].times["eager"]) == 2


def test_an_arm_that_fails_says_why():
    """Whatever an arm raises stands beside its name."""

    def broken(inputs):
        raise ValueError("no such thing\nand more")

    found = measure(ROW, settings(ours=ours, broken=broken)).found

    assert found["broken"].why_not == {"": "ValueError: no such thing"}


def test_peft_does_one_job_at_a_time():
    """Several jobs are not silently made one."""
    with pytest.raises(CannotError, match="one adapter at a time"):
        peft_eager(draw(MIXED, torch.float64, "cpu", seed=1))


def test_saved_bytes_count_each_storage_once_and_no_parameter():
    """Stacked adapters keep x, the mask, and S of every linear; frozen ones keep nothing."""
    inputs = draw(MIXED, torch.float64, "cpu", seed=1)

    tokens, ranks = 14, 22
    xs, mask, hidden = tokens * (32 + 48), tokens * ranks, 3 * tokens * ranks
    assert saved_bytes(expand_first(inputs)) == 8 * (xs + mask + hidden)
    assert saved_bytes(frozen(inputs)) == 0


def test_the_least_to_save_is_x_s_and_a_bit_an_element():
    """S is padded to blocks of 16 ranks; bits come with dropout only."""
    load = Load(((64, (32, 32)),), (8, 2), (4, 20))

    plain = least_saved_bytes(load, torch.bfloat16)
    dropped = least_saved_bytes(Load(load.groups, load.lengths, load.ranks, 0.1), torch.bfloat16)

    assert plain == 10 * (2 * 64 + 4 + 2 * 2 * 32)
    assert dropped - plain == 10 * 2 * 64 // 8


def test_rows_have_names_of_their_own_and_fit_their_jobs():
    """As many ranks as segments, in the rows' bases too, also where they are made small."""
    rows = [*bound_rows(), *further_rows()]

    assert len({row.name for row in rows}) == len(rows)
    for row in [*rows, *(row.shrunk(64) for row in rows)]:
        for load in filter(None, (row.load, row.base)):
            assert len(load.ranks) == len(load.lengths)
    assert {row.load.tokens for row in rows} == {1024, sum(MIXED_LENGTHS), 8192, *STEPS}


def test_a_result_file_compares_with_the_base_and_the_bound(tmp_path):
    """The row of dropout is divided by ours without dropout, of the same rounds."""
    arguments = ["--rows", "dropout,square-4", "--device", "cpu", "--shrink", "128"]
    main(
        [
            *arguments,
            "--dtype",
            "float32",
            "--rounds",
            "2",
            "--arms",
            "stacked",
            "--out",
            str(tmp_path),
        ]
    )

    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    plain, dropped = found["rows"]
    assert (plain["over"], dropped["over"]) == ("frozen", "ours-on-base")
    assert dropped["arms"]["ours-on-base"]["over"]["eager"]["median"] == 1
    assert plain["holds"]["eager"] == (plain["ours"]["eager"]["median"] <= 1.12)
    assert {"frozen", "ours", "stacked"} == set(plain["arms"])
    assert found["versions"]["torch"]
