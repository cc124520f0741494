"""Rows: packed and padded forms of the same sequences."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.model.batch import IGNORED, JobTokens, pack, pad, repeating_form
from tlora_fx.model.row_ladder import repeating_length

TOKEN = st.integers(1, 50)
SEQUENCE = st.lists(st.tuples(TOKEN, st.booleans()), min_size=1, max_size=6)
JOB = st.lists(SEQUENCE, max_size=3)
ROW = st.lists(JOB, min_size=1, max_size=4)


def jobs_of(drawn):
    """Jobs whose labels are their tokens where the flag is set."""
    made = []
    for number, sequences in enumerate(drawn):
        ids = [[token for token, _ in sequence] for sequence in sequences]
        labels = [[t if kept else IGNORED for t, kept in sequence] for sequence in sequences]
        made.append(JobTokens(ids, labels, seed=number, step=number + 5, offset=10 * number))
    return made


def expected_targets(jobs):
    """(token, its target) of each job, in order."""
    return [
        [
            (ids[place], labels[place + 1])
            for ids, labels in zip(job.sequences, job.labels, strict=True)
            for place in range(len(ids) - 1)
            if labels[place + 1] != IGNORED
        ]
        for job in jobs
    ]


def found_targets(row):
    """The same, read from a row."""
    tokens = row.input_ids.reshape(-1)[row.target_rows].tolist()
    pairs = list(zip(tokens, row.targets.tolist(), strict=True))
    bounds = row.target_segments.tolist()
    return [pairs[a:b] for a, b in itertools.pairwise(bounds)]


@given(ROW)
def test_both_forms_predict_the_same_targets(drawn):
    """Labels are shifted inside each sequence; the last token of one never predicts the next."""
    jobs = jobs_of(drawn)

    assert found_targets(pack(jobs)) == expected_targets(jobs) == found_targets(pad(jobs))


@given(ROW, st.integers(0, 9))
def test_padding_adds_tokens_and_nothing_else(drawn, more):
    """It stands behind all sequences, is of the last job that has any, and has no target."""
    jobs = jobs_of(drawn)
    plain = pack(jobs)
    tokens = plain.input_ids.shape[1]
    row = pack(jobs, tokens + more)

    assert row.input_ids.shape[1] == tokens + more == row.segments[-1] == row.cu_seqlens[-1]
    assert torch.equal(row.input_ids[:, :tokens], plain.input_ids)
    assert torch.equal(row.token_index[:, :tokens], plain.token_index)
    assert torch.equal(row.target_rows, plain.target_rows)
    assert torch.equal(row.target_segments, plain.target_segments)
    if any(job.sequences for job in jobs):
        grown = row.segments.diff() - plain.segments.diff()
        owner = max(place for place, job in enumerate(jobs) if job.sequences)
        assert grown.nonzero().flatten().tolist() == ([owner] if more else [])
        assert int(row.max_seqlen) == int(plain.max_seqlen)


@given(st.integers(1, 200_000))
def test_lengths_that_repeat_are_few_and_near(tokens):
    """At most a thirty-second above, or 15 tokens, and the next of what they give themselves."""
    found = repeating_length(tokens)

    assert tokens <= found <= tokens + max(15, tokens // 32)
    assert repeating_length(found) == found


@given(ROW)
def test_packed_rows_lay_sequences_end_to_end(drawn):
    """Positions restart, boundaries and segments count tokens, indices count within the job."""
    jobs = jobs_of(drawn)
    row = pack(jobs)

    lengths = [len(ids) for job in jobs for ids in job.sequences]
    tokens = sum(lengths)
    starts = [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]
    assert row.cu_seqlens.tolist()[: len(starts)] == starts
    assert row.input_ids.shape == (1, max(tokens, 2))
    assert row.cu_seqlens[-1] == row.segments[-1] == row.input_ids.shape[1]
    assert int(row.max_seqlen) == int(row.cu_seqlens.diff().max())
    flat = [t for job in jobs for ids in job.sequences for t in ids]
    assert row.input_ids[0, :tokens].tolist() == flat
    places = [p for length in lengths for p in range(length)]
    assert row.position_ids[0, :tokens].tolist() == places
    indices = [
        job.offset + n for job in jobs for n in range(sum(len(ids) for ids in job.sequences))
    ]
    assert row.token_index[0, :tokens].tolist() == indices


@given(ROW)
def test_padded_rows_give_each_sequence_a_line(drawn):
    """Padded on the right to the longest; at least two lines of two tokens."""
    jobs = jobs_of(drawn)
    row = pad(jobs, padding=0)

    sequences = [ids for job in jobs for ids in job.sequences]
    assert row.input_ids.shape[0] == max(2, len(sequences)) == row.segments[-1]
    assert row.input_ids.shape[1] == max([2, *map(len, sequences)])
    for line, ids in enumerate(sequences):
        assert row.input_ids[line, : len(ids)].tolist() == list(ids)
        assert not row.input_ids[line, len(ids) :].any()
        own = torch.arange(row.input_ids.shape[1]) < len(ids)
        assert torch.equal(row.token_index[line] >= 0, own)
    assert (row.token_index[len(sequences) :] < 0).all()


@given(ROW)
def test_a_token_has_one_index_in_both_forms(drawn):
    """Dropout masks follow the token, not the form."""
    jobs = jobs_of(drawn)
    packed, padded = pack(jobs), pad(jobs)

    lengths = [len(ids) for job in jobs for ids in job.sequences]
    lines = [padded.token_index[line, :length] for line, length in enumerate(lengths)]
    flat = torch.cat(lines) if lines else torch.empty(0, dtype=torch.int32)
    assert torch.equal(flat, packed.token_index[0, : len(flat)])


def test_small_tables_stay_on_the_cpu():
    """A row moves to a device but for what the host reads."""
    row = pack([JobTokens([[1, 2, 3]], [[1, 2, 3]])]).to("meta")

    assert row.input_ids.is_meta
    assert row.target_rows.is_meta
    assert not row.segments.is_meta
    assert not row.keys.is_meta
    assert not row.max_seqlen.is_meta
    assert not row.target_segments.is_meta


@given(ROW)
def test_a_repeating_form_has_the_same_tokens_and_targets(drawn):
    """Sizes rise to one of few; what rises holds no token and no label, and rises no further."""
    jobs = jobs_of(drawn)
    plain = pack(jobs)
    if not len(plain.target_rows):
        return
    row = repeating_form(plain)

    assert torch.equal(row.input_ids, plain.input_ids)
    sequences, count = len(plain.cu_seqlens), len(plain.target_rows)
    assert torch.equal(row.cu_seqlens[:sequences], plain.cu_seqlens)
    assert (row.cu_seqlens[sequences:] == plain.input_ids.numel()).all()
    assert (len(row.cu_seqlens) - 1).bit_count() == int(row.max_seqlen).bit_count() == 1
    assert int(plain.max_seqlen) <= int(row.max_seqlen) < 2 * int(plain.max_seqlen)
    assert torch.equal(row.targets[:count], plain.targets)
    assert (row.targets[count:] == IGNORED).all()
    assert row.target_segments[-1] == len(row.target_rows) == len(row.targets)
    assert (row.target_rows[count:] == plain.target_rows[-1]).all()
    grown = (row.target_segments.diff() - plain.target_segments.diff()).nonzero().flatten()
    assert grown.tolist() in ([], [int(plain.target_segments.diff().nonzero()[-1])])
    assert len(row.target_rows) - count < max(2, plain.input_ids.numel() // 8)
    again = repeating_form(row)
    assert all(torch.equal(one, again.tensors()[name]) for name, one in row.tensors().items())
