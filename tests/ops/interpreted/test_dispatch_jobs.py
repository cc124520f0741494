"""On kernels, a job's numbers are its own, and what does not fit is an error before any launch."""

import pytest
import torch

from tests.ops.batches import batch, jobs_of, run, split
from tlora_fx.errors import AdapterTableError, SegmentError, TooManyJobs
from tlora_fx.ops import multi_lora_linear, site_id
from tlora_fx.ops.kernels import extend_weight, packed, refresh, select

SHAPE = (32, 48)


@pytest.fixture(autouse=True)
def strict():
    """One plan for every number of tokens."""
    with select.strict():
        yield


@pytest.mark.parametrize("where", ["x", "dy", "a", "b"])
def test_a_nan_stays_in_its_job(lora, where):
    """NaN in a job's rows, gradient or adapters leaves neighbours bitwise, and spoils the job."""
    made = lora((4, 5, 3), (3, 2, 4), (0.3, 0.3, 0.0), dtype=torch.float32, features=SHAPE)

    def parts(poison):
        given = {name: getattr(made, name).clone() for name in ("x", "a", "b")}
        given["dy"] = torch.ones(1, 12, SHAPE[1])
        if poison:
            rows = given[where][0, 4:9] if where in ("x", "dy") else given[where][3:5]
            rows.fill_(float("nan"))
        y, dx, da, db = run(made, given.pop("dy"), **given)
        tokens, ranks = [0, 1, 2, 3, 9, 10, 11], [0, 1, 2, 5, 6, 7, 8]
        others = y[0, tokens], dx[0, tokens], da[ranks], db[ranks]
        return others, (y[0, 4:9], dx[0, 4:9])

    (clean, _), (beside, (y, dx)) = parts(False), parts(True)
    assert all(torch.equal(one, other) for one, other in zip(clean, beside, strict=True))
    assert y.isnan().all() or where == "dy"
    assert dx.isnan().any() or where == "x"


def test_a_job_is_the_same_alone_beside_others_and_reordered(lora):
    """In strict mode neither company nor order changes a job's gradients by a bit.

    Nor y and dx, but NumPy's products, which stand for the GPU's here, depend on a row's place in
    its tile: test_gpu_kernels.py compares them bitwise.
    """
    lengths, ranks, rates = (40, 1, 0, 7), (5, 2, 3, 9), (0.3, 0.0, 0.1, 0.2)
    made = lora(lengths, ranks, rates, dtype=torch.float16, features=SHAPE)
    dy = torch.randn(1, sum(lengths), SHAPE[1]).half()
    jobs = list(jobs_of(made, dy))
    whole = split(batch(made, jobs), jobs)
    order = [3, 0, 2, 1]
    turned = split(batch(made, [jobs[j] for j in order]), [jobs[j] for j in order])
    for place, job in enumerate(jobs):
        if not lengths[place]:
            continue
        (alone,) = split(batch(made, [job]), [job])
        again = turned[order.index(place)]
        for one, other, third in zip(whole[place][2:], alone[2:], again[2:], strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, third)
        for one, other, third in zip(whole[place][:2], alone[:2], again[:2], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(one, third, rtol=2e-3, atol=2e-3)


def test_other_jobs_reach_the_same_device_tables(lora):
    """A table changed in place and refreshed lies where a captured graph reads it."""
    made = lora((4, 5), (3, 2), dtype=torch.float32, features=SHAPE)
    x, weight, bias, a, b, ranks, scales, rates, segments, keys, index, site, kind = (
        made.arguments()
    )
    tables = ranks, scales, rates, segments, keys, index, site, kind
    first = multi_lora_linear(x, weight, bias, a, b, *tables)
    from tlora_fx.ops.kernels import device_tables

    def buffers():
        rows, sites = device_tables._rows, device_tables._sites
        return [mirror.words.data_ptr() for mirror in (*rows.values(), *sites.values())]

    before = buffers()
    segments[1], scales[0] = 0, 9.0
    refresh(segments, scales)
    second = multi_lora_linear(x, weight, bias, a, b, *tables)
    made.row.segments[1], made.row.lengths, made.scales = 0, (0, 9), (9.0, made.scales[1])

    assert buffers() == before
    assert not torch.equal(first, second)
    torch.testing.assert_close(second.double(), made.reference(made.x, a, b), rtol=1e-5, atol=1e-5)


def test_a_weight_with_room_is_used_as_it_lies(lora):
    """concat-K copies no weight that `with_room` made, and leaves the weight's numbers alone."""
    made = lora((4, 5), (3, 2), dtype=torch.float32, features=SHAPE)
    expected = made.reference(made.x, made.a, made.b)
    made.weight = extend_weight(made.weight, 64)
    before = made.weight.clone()
    packed.forget()
    with select.strict(False), select.force_plan("concat"):
        y = multi_lora_linear(*made.arguments())

    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(made.weight, before)
    assert all(room.copy is None for room in packed._extended.values())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"max_rank": 4}, AdapterTableError),
        ({"drops": False}, AdapterTableError),
        ({"segments": torch.tensor([0, 4, 8], dtype=torch.int32)}, SegmentError),
        ({"segments": torch.tensor([0, 4, 5, 9], dtype=torch.int32)}, AdapterTableError),
    ],
    ids=["rank", "drops", "segments", "jobs"],
)
def test_what_does_not_fit_is_an_error_that_names_the_site(lora, change, error):
    """Before any launch, with the module's path."""
    made = lora((4, 5), (3, 6), (0.1, 0.0), dtype=torch.float32, features=SHAPE)
    names = ("ranks", "scales", "rates", "segments", "keys", "token_index", "site", "kind")
    head, tables = made.arguments()[:5], dict(zip(names, made.arguments()[5:], strict=True))
    tables["site"] = torch.tensor(site_id("layers.3.q_proj"))
    settings = {key: change[key] for key in ("max_rank", "drops") if key in change}
    tables |= {key: value for key, value in change.items() if key not in settings}

    with pytest.raises(error, match=r"layers\.3\.q_proj"):
        multi_lora_linear(*head, *tables.values(), **settings)


def test_more_jobs_than_the_tables_hold_are_refused(lora):
    """The largest table has room for 1,024 jobs."""
    made = lora((1,) * 1025, (1,) * 1025, dtype=torch.float32, features=(16, 16))

    with pytest.raises(TooManyJobs):
        multi_lora_linear(*made.arguments())


def test_served_sites_pass_opcheck(lora):
    """The fake tells the shapes that kernels fill; AOT gives the same gradients."""
    made = lora((2, 0, 3), (2, 1, 0), (0.4, 0.0, 0.2), dtype=torch.float32, features=(16, 16))

    torch.library.opcheck(
        torch.ops.tlora_fx.multi_lora_linear.default,
        made.arguments(**dict(zip("xab", made.leaves(), strict=True))),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_a_row_without_tokens_is_served(lora):
    """Nothing to launch: empty outputs, gradients of zero."""
    made = lora((0, 0), (3, 2), dtype=torch.float32, features=(16, 16))
    y, dx, da, db = run(made, torch.ones(1, 0, 16))

    assert y.shape == (1, 0, 16)
    assert dx.shape == (1, 0, 16)
    assert not da.any()
    assert not db.any()
