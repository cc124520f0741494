"""`dora_scale`: DoRA's columns behind a lowered site, against the whole adapted matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.scaled import arguments, magnitudes_of, norms, others, reference, results
from tlora_fx.codegen.ahead import ahead
from tlora_fx.errors import AdapterTableError
from tlora_fx.ops import dora, dora_scale, norms_kept
from tlora_fx.ops.dora import norms_at_once
from tlora_fx.ops.kernels import strict

JOB = st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans())


def drawn(made):
    """What the linear gave, and a gradient."""
    draw = torch.Generator().manual_seed(5)
    shape = (*made.x.shape[:-1], made.weight.shape[0])
    y, dy = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    return y.to(made.x.dtype), dy.to(made.x.dtype)


@given(
    jobs=st.lists(JOB, min_size=1, max_size=5).filter(lambda jobs: any(job[2] for job in jobs)),
    bias=st.booleans(),
    batch=st.sampled_from([0, 3]),
)
def test_any_mix_of_jobs_equals_each_alone(lora, jobs, bias, batch):
    """Output and gradients; those of jobs without DoRA keep their bits."""
    lengths, ranks, scaled = zip(*jobs, strict=True)
    chosen = [job for job, own in enumerate(scaled) if own]
    made = lora(lengths, ranks, bias=bias, batch=batch)
    y, dy = drawn(made)
    magnitudes = magnitudes_of(made, chosen)

    found = results(lambda y, m: dora_scale(*arguments(made, y, m, chosen)), y, magnitudes, dy)
    wanted = results(lambda y, m: reference(made, y, m, chosen), y, magnitudes, dy)

    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    rest = others(made, chosen)
    for mine, given_ in ((found[0], y), (found[1], dy)):
        flat = mine.reshape(-1, mine.shape[-1])[rest]
        assert torch.equal(flat, given_.reshape(-1, mine.shape[-1])[rest])


@pytest.mark.parametrize("where", ["y", "dy", "a", "b", "magnitude"])
def test_a_nan_stays_in_its_job(lora, where):
    """In a job's tokens, gradient, adapters or magnitudes: the neighbours keep their bits."""
    made = lora((4, 5, 3), (3, 2, 4), dtype=torch.float32, features=(16, 8))
    jobs = [0, 1, 2]

    def run(poison):
        y, dy = drawn(made)
        magnitudes, a, b = magnitudes_of(made, jobs), made.a.clone(), made.b.clone()
        if poison:
            target, rows = {
                "y": (y[0], slice(4, 9)), "dy": (dy[0], slice(4, 9)), "a": (a, slice(3, 5)),
                "b": (b, slice(3, 5)), "magnitude": (magnitudes[1], slice(None)),
            }[where]  # fmt: skip
            target[rows] = float("nan")
        found, grad, *sums = results(
            lambda y, m: dora_scale(*arguments(made, y, m, jobs, a=a, b=b)), y, magnitudes, dy
        )
        tokens = others(made, [1])
        return found[0, tokens], grad[0, tokens], sums[0], sums[2]

    for clean, beside in zip(run(False), run(True), strict=True):
        assert torch.equal(clean, beside)


@pytest.mark.parametrize("rank", [8, 40])
def test_in_strict_mode_norms_do_not_depend_on_neighbours(lora, rank):
    """Whatever their ranks, bit for bit."""
    made = lora((3, 3), (8, rank), features=(512, 1024), dtype=torch.bfloat16)
    ranks, scales, rates, *_, site, _ = made.arguments()[5:]

    def norms_of(jobs):
        tables = made.a, made.b, ranks, scales, rates, site
        return torch.ops.tlora_fx.dora_norms(made.weight, *tables, jobs, max(8, rank))

    with strict():
        both, alone = norms_of([0, 1]), norms_of([0])

    assert torch.equal(both[0], alone[0])


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_norms_in_float32_are_those_of_the_sum(lora, size):
    """By products of A and W alone: to some roundings, however large the adapter is."""
    made = lora((3, 3), (8, 40), features=(96, 64), dtype=torch.float32)
    made.b *= size
    ranks, scales, rates, *_, site, _ = made.arguments()[5:]

    found = torch.ops.tlora_fx.dora_norms(
        made.weight, made.a, made.b, ranks, scales, rates, site, [0, 1], 40
    )

    wanted = torch.stack([norms(made, job) for job in (0, 1)])
    assert ((found - wanted).abs() / wanted).max() <= 1e-6


def test_norms_are_told_no_smaller_than_they_can_be_told(lora):
    """An adapter that takes its weight's rows away leaves roundings, never a NaN."""
    made = lora((3,), (6,), features=(6, 5), dtype=torch.float32)
    made.a, made.scales = torch.eye(6), (1.0,)
    made.b = -made.weight.t().contiguous()
    bounds, jobs = [0, 6], [0]

    (found,) = dora.norms_of(made.weight, made.a, made.b, bounds, made.scales, jobs)

    length = made.weight.norm(dim=1)
    assert torch.all(found > 0)
    assert torch.all(found <= 1e-3 * length)


def test_norms_are_kept_while_no_adapter_changes(lora, monkeypatch):
    """One computation a site inside of `norms_kept`, nested too; each call's own outside."""
    made = lora((3, 4), (2, 3))
    y, _ = drawn(made)
    calls, real = [], dora._norms
    monkeypatch.setattr(dora, "_norms", lambda *given: (calls.append(1), real(*given))[1])
    given_ = arguments(made, y, magnitudes_of(made, [1]), [1])

    with norms_kept():
        first = dora_scale(*given_)
        with norms_kept():
            again = dora_scale(*given_)
    made.b *= 2
    changed = dora_scale(*arguments(made, y, magnitudes_of(made, [1]), [1]))

    assert len(calls) == 2
    assert torch.equal(first, again)
    assert not torch.equal(first, changed)


def test_nothing_is_kept_of_what_is_computed_ahead(lora, monkeypatch):
    """The round that keeps norms has its kernels compiled ahead: norms are not computed then."""
    made = lora((3, 4), (2, 3))
    y, _ = drawn(made)
    given = arguments(made, y, magnitudes_of(made, [1]), [1])
    expected, real = dora_scale(*given), dora._norms
    monkeypatch.setattr(dora, "_norms", lambda *given: real(*given) * (2 if ahead.is_on else 1))

    with norms_kept():
        with ahead.asking():
            dora_scale(*given)
        found = dora_scale(*given)

    assert torch.equal(found, expected)


class Together:
    """Gives what it knows, and hears what is asked for."""

    def __init__(self):
        self.known, self.asked, self.rounds = {}, {}, 0

    def give(self, kept):
        self.rounds += 1
        kept.update(self.known)

    def note(self, key, compute):
        self.asked[key] = compute


def test_norms_that_were_asked_for_are_given_at_once(lora):
    """Those of the round before, by the same weight and adapters; others are computed."""
    made, other = lora((3, 4), (2, 3)), lora((3, 4), (2, 3))
    y, _ = drawn(made)
    given = arguments(made, y, magnitudes_of(made, [1]), [1])
    moved = [given[0], given[1].clone(), *given[2:]]
    unlike = arguments(other, y, magnitudes_of(made, [1]), [1])
    together = Together()

    with norms_kept(), norms_at_once(together):
        plain = dora_scale(*given)
        dora_scale(*given)
    assert len(together.asked) == 1
    ((key, compute),) = together.asked.items()
    together.known = {key: (2 * compute(), None)}
    with norms_kept(), norms_at_once(together):
        halved, of_others = dora_scale(*given), dora_scale(*unlike)
        at_another_place = dora_scale(*moved)
    with norms_at_once(together):
        outside = dora_scale(*given)

    span = slice(3, 7)
    torch.testing.assert_close(halved[span], plain[span] / 2 + given[2] / 2)
    assert torch.equal(at_another_place, plain)
    assert torch.equal(outside, plain)
    assert torch.equal(of_others, dora_scale(*unlike))
    assert together.rounds == 2


def test_it_passes_opcheck_and_gradcheck(lora):
    """Schema, fake, autograd registration and AOT dispatch; numbers by differences."""
    made = lora((2, 0, 3), (2, 4, 1))
    y, dy = drawn(made)
    jobs, magnitudes = [0, 2], magnitudes_of(made, [0, 2])
    _, weight, bias, _, *tables, segments, keys, _, largest = arguments(made, y, magnitudes, jobs)
    ops, stacked = torch.ops.tlora_fx, torch.stack(magnitudes)
    norms_ = ops.dora_norms(weight, *tables, jobs, largest)
    row = segments, keys, jobs

    torch.library.opcheck(ops.dora_norms.default, (weight, *tables, jobs, largest))
    asked = y.clone().requires_grad_(), bias, stacked.clone().requires_grad_(), norms_
    torch.library.opcheck(ops.dora_columns.default, (*asked, *row))
    torch.library.opcheck(ops.dora_columns_backward.default, (dy, y, bias, stacked, norms_, *row))
    leaves = [t.detach().clone().requires_grad_() for t in (y, *magnitudes)]
    assert torch.autograd.gradcheck(
        lambda y, *m: dora_scale(*arguments(made, y, list(m), jobs)), leaves
    )


def test_magnitudes_must_fit(lora):
    """One a column, of each job."""
    made = lora((2, 3), (2, 4))
    y, _ = drawn(made)

    with pytest.raises(AdapterTableError, match="one magnitude a column"):
        dora_scale(*arguments(made, y, [torch.ones(3).double()], [1]))
