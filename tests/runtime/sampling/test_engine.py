"""Places and pages of growing completions, by a model that only counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runtime.groups import make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.sampling.draw import DrawOptions
from tlora_fx.runtime.sampling.engine import Engine, GrowingSequence, PageAllocation, Request


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    base = tiny_base(tmp_path_factory.mktemp("base"))
    group = GroupStep(compile([make_job(base, name) for name in "ab"]), device="cpu")
    group.prepare()
    return group.model


def engine_of(model, pages, stops=lambda tokens: False, max_sequences=8):
    settled = {"pages": pages, "max_sequences": max_sequences, "max_row_tokens": 64}
    return Engine(model, torch.device("cpu"), DrawOptions(), stops=stops, **settled)


def sequences_of(request, count):
    return [GrowingSequence(request, np.full(request.limit, 0.5)) for _ in range(count)]


def test_a_page_is_free_when_its_last_reader_lets_go():
    """A page of two readers and one of one."""
    pages = PageAllocation(3)
    first, second = pages.take(2)
    pages.share([first])

    pages.release([first, second])
    assert sorted(pages.free) == sorted({0, 1, 2} - {first})
    pages.release([first])
    assert sorted(pages.free) == [0, 1, 2]


def test_all_pages_are_free_at_the_end(model):
    """Of more sequences than places and pages, that end at different times."""
    ends = iter(range(1000))
    engine = engine_of(model, pages=7, stops=lambda _: next(ends) % 3 == 0, max_sequences=3)
    requests = [Request(job, (1,) * length, 20) for length in (1, 16, 20, 40) for job in (0, 1)]
    sequences = [each for request in requests for each in sequences_of(request, 3)]

    engine.run(sequences)

    assert sorted(engine.pages.free) == list(range(7))
    assert engine.growing == []
    assert {each.finish_reason for each in sequences} <= {"stop", "length"}


def test_a_place_is_taken_in_the_round_in_which_it_is_free(model):
    """Two places; the first completion ends at once, and a third begins beside the second."""
    engine = engine_of(model, pages=9, max_sequences=2)
    requests = [Request(0, (1, 2), limit) for limit in (1, 4, 3)]
    rounds = []
    draw = engine._draw
    engine._draw = lambda given, count, *graphs: (
        rounds.append(count),
        draw(given, count, *graphs),
    )[1]

    engine.run([sequences_of(request, 1)[0] for request in requests])

    # Two prompts; the third's prompt; the last two go on together.
    assert rounds == [2, 1, 2, 2, 1]


def test_completions_of_one_prompt_share_its_whole_pages(model):
    """Of 40 tokens two pages are whole; each completion has two of its own besides."""
    engine = engine_of(model, pages=8)
    sequences = sequences_of(Request(0, (3,) * 40, 20), 3)
    taken = []
    copy = engine._copy_last_pages
    engine._copy_last_pages = lambda groups: (
        taken.append([s.pages for s in groups[0]]),
        copy(groups),
    )

    engine.run(sequences)

    [[first, second, third]] = taken
    assert first[:2] == second[:2] == third[:2]
    assert len({*first[2:], *second[2:], *third[2:]}) == 6
    assert sequences[0].tokens == sequences[1].tokens == sequences[2].tokens
