"""Steps that rows of a mix are padded to: few, close above each row, the same on every process."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.groups import make_job, tiny_base
from tlora_fx.config.job import Job
from tlora_fx.model.batch import (
    IGNORED,
    JobTokens,
    example_row,
    pack,
    padded_by,
    size_of,
    size_of_jobs,
)
from tlora_fx.model.row_ladder import MAX_STEPS, RowLadder, RowSize
from tlora_fx.runtime.data.batching import (
    FEW_STEPS,
    Cutting,
    RowBucketer,
    _whole_rows,
    cut_round,
    ladder_of,
    rows_of_round,
    size_abreast,
)
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample

SIZES = st.builds(
    lambda sequences, length, spread, part: RowSize(
        tokens := sequences * length,
        sequences,
        min(tokens, length + spread),
        max(1, int(tokens * part)),
    ),
    st.integers(1, 40),
    st.integers(2, 600),
    st.integers(0, 400),
    st.floats(0.05, 1),
)


def test_micro_batches_of_a_pipeline_all_have_a_step():
    """Parts of about equal cost, whose share of targets differs more than that of whole rounds."""
    generator = torch.Generator().manual_seed(1)
    sizes = []
    for _ in range(1000):
        tokens = int(torch.randint(480, 680, (1,), generator=generator))
        sequences = int(torch.randint(3, 6, (1,), generator=generator))
        part = 0.45 + 0.15 * float(torch.rand(2, generator=generator).sum())
        sizes.append(RowSize(tokens, sequences, 240, int(tokens * part)))
    ladder = RowLadder.of(sizes)

    assert [size for size in sizes if ladder.step_for(size) is None] == []


@given(st.lists(SIZES, max_size=60))
def test_a_step_holds_its_rows_with_little_padding(sizes):
    """Steps are few; a row that has none is one of those that had to be left out."""
    ladder = RowLadder.of(sizes)

    assert len(ladder.steps) <= MAX_STEPS
    assert list(ladder.steps) == sorted(set(ladder.steps))
    for size in sizes:
        step = ladder.step_for(size)
        if step is None:
            assert len(ladder.steps) == MAX_STEPS
            continue
        assert step.holds(size)
        part = 1 / 4 if step.tokens <= 1024 else 1 / 8 if step.tokens <= 2048 else 1 / 16
        assert step.tokens - size.tokens <= max(32, step.tokens * part)
        assert step.targets - size.targets <= step.tokens * (max(part, 1 / 8) + 1 / 64) + 32


def test_rows_of_one_mix_have_sixteen_steps_at_most():
    """Thirty sequences of 60 to 420 tokens, more than half of them targets, as GSM8K's are."""
    generator = torch.Generator().manual_seed(1)
    sizes = []
    for _ in range(256):
        lengths = torch.randint(60, 240, (30,), generator=generator)
        lengths[0] = torch.randint(240, 420, (1,), generator=generator)
        total = int(lengths.sum())
        sizes.append(RowSize(total, 30, int(lengths.max()), int(total * 0.56)))
    ladder = RowLadder.of(sizes)

    steps = [ladder.step_for(size) for size in sizes]
    assert None not in steps
    padding = sum(s.tokens - size.tokens for s, size in zip(steps, sizes, strict=True))
    assert padding < 0.02 * sum(size.tokens for size in sizes)
    assert len({step[1:3] for step in ladder.steps}) == 1


def test_a_padded_row_has_the_sizes_of_its_step():
    """Tokens too, where it was packed to them; else it is padded by rule."""
    jobs = [JobTokens([[1] * 70, [2] * 30], [[1] * 70, [2] * 30]), JobTokens([[3] * 9], [[3] * 9])]
    size = size_of_jobs(jobs)
    ladder = RowLadder.of([size, RowSize(4000, 3, 2000, 3000)])
    step = ladder.step_for(size)
    row = padded_by(ladder, pack(jobs, step.tokens))
    other = padded_by(ladder, pack(jobs, step.tokens + 16))

    assert size == RowSize(109, 3, 70, 106)
    assert size_of(row) == step
    assert size_of(other) not in ladder.steps
    assert (row.targets[106:] == IGNORED).all()


def test_rows_that_run_at_the_same_time_are_of_one_step():
    """Also where one has far fewer targets: else only one of two replicas would replay its row."""

    def row_of(targets):
        labels = [IGNORED] * (400 - targets) + [1] * targets
        return [JobTokens([[1] * 100] * 4, [labels[at : at + 100] for at in range(0, 400, 100)])]

    many, few = row_of(360), row_of(100)
    together = size_abreast([many, few])
    ladder = RowLadder.of([together])
    bucketer = RowBucketer(packed=True, lengthened=True, abreast=2, ladder=ladder)

    rows = [padded_by(ladder, row) for row in bucketer.made([many, few])]

    assert ladder.step_for(size_of_jobs(few)) is None
    assert [size_of(row) for row in rows] == [*ladder.steps] * 2


@given(SIZES, st.integers(1, 5))
def test_an_example_has_the_size_that_is_asked_for(size, jobs):
    """So that what is captured of it serves rows."""
    (step,) = RowLadder.of([size]).steps
    row = example_row(step, jobs)

    assert size_of(row) == step
    assert row.segments.tolist()[-1] == step.tokens
    assert len(row.segments) == jobs + 1


LENGTHS = st.lists(st.integers(2, 60), min_size=3, max_size=20)


def data_of(job: Job, lengths, packing=False) -> JobData:
    """Samples of these lengths; of each the second half is trained."""
    samples = []
    for length in lengths:
        ids = tuple(range(length))
        samples.append(Sample(ids, (IGNORED,) * (length // 2) + ids[length // 2 :]))
    units = [tuple(range(at, min(at + 2, len(samples)))) for at in range(0, len(samples), 2)]
    return JobData(job, samples, DataReport(), units=units if packing else None)


@given(st.lists(LENGTHS, min_size=1, max_size=3), st.integers(1, 3), st.booleans())
def test_sizes_of_rows_are_known_without_their_tokens(lengths, accumulated, packing):
    """The same as those of the rows that a round makes."""
    base = {"model": "a folder"}
    jobs = [
        Job(
            name=f"job{number}", base=base, data={"path": "none"}, max_steps=8, lora={"r": 4},
            per_device_train_batch_size=2, gradient_accumulation_steps=accumulated, seed=number,
        )
        for number in range(len(lengths))
    ]  # fmt: skip
    data = {i: data_of(job, lengths[i], packing) for i, job in enumerate(jobs)}
    for number in range(8):
        batches = {index: own.step(number) for index, own in data.items()}
        rows = list(rows_of_round(jobs, batches, dict.fromkeys(data, number), 150))
        expected = [size_of_jobs(row) for row in rows]
        assert list(_whole_rows([own.sizes(number) for own in data.values()], 150)) == expected


@pytest.mark.parametrize(("parts", "abreast"), [(1, 1), (2, 2), (4, 2)])
def test_rows_of_a_run_fit_its_ladder(tmp_path, parts, abreast):
    """Those that run at the same time are padded to one step."""
    base = tiny_base(tmp_path)
    jobs = [make_job(base, name, seed=place) for place, name in enumerate("ab")]
    jobs = [
        job.model_copy(update={"max_steps": 30, "per_device_train_batch_size": 6}) for job in jobs
    ]
    drawn = torch.Generator().manual_seed(2)
    data = {
        place: data_of(job, torch.randint(40, 90, (64,), generator=drawn).tolist())
        for place, job in enumerate(jobs)
    }
    cutting = Cutting(whole=False, square_tokens=1e9, max_row_tokens=4096)
    ladder = ladder_of(jobs, data, cutting, parts, abreast)
    bucketer = RowBucketer(packed=True, lengthened=True, abreast=abreast, ladder=ladder)

    for number in range(30):
        batches = {index: own.step(number) for index, own in data.items()}
        rows = cut_round(
            rows_of_round(jobs, batches, dict.fromkeys(data, number), 4096), parts, cutting
        )
        step = ladder.step_for(size_abreast(rows[:abreast]))
        made = bucketer.made(rows)
        assert step is not None
        assert [row.input_ids.numel() for row in made[:abreast]] == [step.tokens] * abreast


@pytest.mark.parametrize(
    ("steps", "length", "shared", "few"),
    [(60, 70, 1, True), (3000, 70, 1, False), (60, 140, 1, False), (60, 140, 2, True)],
)
def test_half_of_the_steps_suffice_for_short_rows_of_a_run_that_ends_soon(
    tmp_path, steps, length, shared, few
):
    """Captured in half the time; every row has a step all the same."""
    job = make_job(tiny_base(tmp_path), "a").model_copy(
        update={"max_steps": steps, "per_device_train_batch_size": 32}
    )
    drawn = torch.Generator().manual_seed(3)
    lengths = torch.randint(length // 2, length * 3 // 2, (2000,), generator=drawn).tolist()
    own = data_of(job, lengths)
    cutting = Cutting(whole=False, square_tokens=1e9, max_row_tokens=16384)

    ladder = ladder_of([job], {0: own}, cutting, 1, 1, shared)

    assert (len(ladder.steps) <= FEW_STEPS) == few
    rows = [row for number in range(60) for row in _whole_rows([own.sizes(number)], 16384)]
    assert all(ladder.step_for(row) for row in rows)


def test_a_ladder_follows_from_jobs_and_data_alone(tmp_path):
    """And not from the epoch that somebody asked for last."""
    job = make_job(tiny_base(tmp_path), "a").model_copy(update={"max_steps": 300})
    first, second = (data_of(job, range(2, 40)) for _ in range(2))
    for step in (299, 7):
        second.step(step)
    cutting = Cutting(whole=False, square_tokens=1e9, max_row_tokens=4096)
    ladders = [ladder_of([job], {0: own}, cutting, 1, 1) for own in (first, second)]

    assert ladders[0] == ladders[1]
    assert list(islice(ladders[0].steps, 1))
