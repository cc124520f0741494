"""A sweep in a job file becomes jobs: which, how they are called, and mistakes with their lines."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.test_job_file import RIGHT, load, mistakes
from tlora_fx.config.halving import HalvingSpec
from tlora_fx.config.sweep import MAX_JOBS, SweptJob, expand
from tlora_fx.config.validation import Mistake

FIELDS = ("learning_rate", "lora.r", "lora.lora_alpha", "seed", "optim", "warmup_ratio")
VALUES = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=50),
    st.booleans(),
    st.none(),
    st.lists(st.sampled_from(["q_proj", "v_proj"]), max_size=2),
)
CHOICES = st.lists(VALUES, min_size=1, max_size=4, unique_by=repr)
GRIDS = st.dictionaries(st.sampled_from(FIELDS), CHOICES, min_size=1, max_size=4)
NUMBERS = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6))
SWEEP = """
  - name: tune
    sweep:
      parameters:
        learning_rate: [1e-4, 2e-4]
        lora.r: [4, 8]
"""


def right(name: str, sweep: object) -> list[SweptJob]:
    """Jobs of a sweep without a mistake."""
    jobs, found = expand(name, sweep)
    assert found == []
    return jobs


def wrong(sweep: object) -> Mistake:
    """The one mistake of a sweep."""
    jobs, [mistake] = expand("a", sweep)
    assert jobs == []
    return mistake


def randoms(**parameters: Any) -> dict[str, Any]:
    return {"method": "random", "parameters": parameters, "count": 5}


@given(GRIDS)
def test_a_grid_has_each_combination_once(parameters: dict[str, list[Any]]) -> None:
    """As many jobs as combinations; names differ and are valid; the same ones each time."""
    jobs = right("a", {"parameters": parameters})

    assert len(jobs) == math.prod(map(len, parameters.values()))
    assert len({repr(job.values) for job in jobs}) == len(jobs)
    assert len({job.name for job in jobs}) == len(jobs)
    assert all(job.name.startswith("a-") and len(job.name) <= 100 for job in jobs)
    assert right("a", {"parameters": parameters}) == jobs


@given(st.integers(1, 30), st.integers(0, 2**32 - 1), NUMBERS, NUMBERS)
def test_draws_lie_in_their_range_and_repeat(count: int, seed: int, low: Any, high: Any) -> None:
    """Equal seeds draw equal jobs; whole bounds draw whole numbers."""
    low, high = sorted((low, high))
    if high - low < 100:
        high = low + 100
    sweep = randoms(x={"min": low, "max": high}) | {"count": count, "seed": seed}
    jobs = right("a", sweep)
    drawn = [job.values["x"] for job in jobs]

    assert right("a", sweep) == jobs
    assert len({*drawn}) == count
    assert all(low <= number <= high for number in drawn)
    if isinstance(low, int) and isinstance(high, int):
        assert {type(number) for number in drawn} == {int}


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 100))
def test_more_draws_go_on_where_fewer_ended(few: int, more: int, seed: int) -> None:
    """A larger count, or another field, changes no value and no name of the first jobs."""
    rate = {"min": 1e-5, "max": 1e-3, "distribution": "log_uniform"}
    sweep = randoms(learning_rate=rate) | {"seed": seed}
    jobs = right("a", sweep | {"count": few})
    longer = right("a", sweep | {"count": few + more})
    wider = randoms(learning_rate=rate, seed=[1, 2]) | {"seed": seed, "count": few}

    assert longer[:few] == jobs
    rates = [job.values["learning_rate"] for job in jobs]
    assert [job.values["learning_rate"] for job in right("a", wider)] == rates


def test_logarithms_are_drawn_evenly() -> None:
    """Of a range over two powers of ten, half the draws lie in each."""
    rate = {"min": 1e-5, "max": 1e-3, "distribution": "log_uniform"}
    jobs = right("a", randoms(x=rate) | {"count": 1000})

    assert 450 < sum(job.values["x"] < 1e-4 for job in jobs) < 550


def test_random_choices_never_repeat() -> None:
    """Of a list, each combination is drawn once at most; all of them can be."""
    jobs = right("a", randoms(x=[1, 2, 3], y=["a", "b"]) | {"count": 6})

    assert len({(job.values["x"], job.values["y"]) for job in jobs}) == 6
    few = wrong(randoms(x=[1, 2]))
    assert few.what == "the sweep has too few different combinations"


NAMES = [
    ({"learning_rate": [1e-4, 1e-5]}, ["a-learning_rate-0.0001", "a-learning_rate-1e-05"]),
    ({"lora.r": [4], "optim": ["adamw"]}, ["a-r-4-optim-adamw"]),
    ({"data.path": ["x.jsonl", "y/z.jsonl"]}, ["a-path-1", "a-path-2"]),
    ({"data.path": ["x"], "eval_data.path": ["y"]}, ["a-data.path-x-eval_data.path-y"]),
    ({"packing": [True], "beta": [None]}, ["a-packing-true-beta-null"]),
    ({"lora.target_modules": [["q_proj"], ["v_proj"]]},
     ["a-target_modules-1", "a-target_modules-2"]),
    ({"x": ["l" * 40], "y": ["l" * 40], "z": ["l" * 40]}, ["a-001"]),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "names"), NAMES, ids=lambda each: str(each)[:40])
def test_names_tell_the_values(parameters: dict[str, list[Any]], names: list[str]) -> None:
    """By the last key and the value, or its number in the list; numbered where that is too long."""
    assert [job.name for job in right("a", {"parameters": parameters})] == names


MISTAKES: list[tuple[Any, tuple[str | int, ...], str]] = [
    (None, (), "wrong value of 'the job'"),
    ({}, ("parameters",), "'parameters' is missing"),
    ({"parameters": {}}, ("parameters",), "the sweep names no field"),
    ({"learning_rate": [1], "parameters": {"seed": [1]}}, ("learning_rate",), "unknown key"),
    ({"parameters": {"name": ["b"]}}, ("parameters", "name"), "'name' cannot be swept"),
    ({"parameters": {"base.model": ["b"]}}, ("parameters", "base.model"), "'base' cannot be"),
    ({"parameters": {"lora.": [1]}}, ("parameters", "lora."), "'lora.' names no field"),
    ({"parameters": {"seed": 3}}, ("parameters", "seed"), "'seed' has no values"),
    ({"parameters": {"seed": []}}, ("parameters", "seed"), "'seed' has no values"),
    ({"parameters": {"seed": [1, 2, 1]}}, ("parameters", "seed", 2), "a value of 'seed' stands"),
    ({"parameters": {"seed": {"min": 1, "max": 2}}}, ("parameters", "seed"), "a grid needs a list"),
    ({"parameters": {"lora.r": [1], "lora": [{}]}}, ("parameters", "lora"), "'lora' holds"),
    ({"parameters": {"seed": [*range(1001)]}}, (), "the grid has 1001 combinations"),
    ({"parameters": {"seed": [1]}, "count": 3}, ("count",), "'count' is of random sweeps"),
    ({"method": "random", "parameters": {"seed": [1]}}, ("count",), "a random sweep needs 'count'"),
    (randoms(x={"min": 2, "max": 1}), ("parameters", "x", "max"), "'max' is not above 'min'"),
    (randoms(x={"min": 2}), ("parameters", "x", "max"), "'max' is missing"),
    (randoms(x={"min": True, "max": 2}), ("parameters", "x", "min"), "a bound of the range is"),
    (randoms(x={"min": 0, "max": 10**400}), ("parameters", "x", "max"), "a bound of the range is"),
    (randoms(x={"min": -1e308, "max": 1e308}), ("parameters", "x", "max"), "the range is too wide"),
    (randoms(x={"min": 0, "max": 1, "distribution": "log_uniform"}),
     ("parameters", "x", "distribution"), "'log_uniform' needs a 'min' above 0"),
    (randoms(x={"min": 1.0, "max": math.nextafter(1, 2)}), ("count",), "the sweep has too few"),
]  # fmt: skip


@pytest.mark.parametrize(("sweep", "loc", "what"), MISTAKES, ids=lambda each: str(each)[:40])
def test_a_mistake_says_its_place(sweep: Any, loc: tuple[str | int, ...], what: str) -> None:
    """Each mistake of a sweep is found before any job is made."""
    mistake = wrong(sweep)

    assert (mistake.loc, mistake.what[: len(what)]) == (loc, what)


def test_a_file_with_a_sweep_has_the_jobs_of_a_file_without(tmp_path: Path) -> None:
    """The same jobs, written one by one, are equal; what stands beside them stays as it was."""
    swept = load(tmp_path, RIGHT + SWEEP.strip("\n")).jobs
    written = "".join(
        f"  - {{name: tune-learning_rate-{name}-r-{r}, learning_rate: {rate}, lora: {{r: {r}}}}}\n"
        for rate, name in ((1e-4, "0.0001"), (2e-4, "0.0002"))
        for r in (4, 8)
    )

    assert swept == load(tmp_path, RIGHT + written).jobs
    assert swept[:2] == load(tmp_path, RIGHT).jobs


def test_defaults_may_hold_a_sweep(tmp_path: Path) -> None:
    """Each job has it, unless it says null."""
    sweep = "defaults:\n  sweep: {parameters: {seed: [1, 2]}}"
    text = RIGHT.replace("defaults:", sweep) + "    sweep: null\n"

    assert [job.name for job in load(tmp_path, text).jobs] == [
        "first-seed-1",
        "first-seed-2",
        "second",
    ]


def test_paths_of_a_sweep_start_at_the_file(tmp_path: Path) -> None:
    """Values that are paths are read as those of a job."""
    sweep = "    sweep: {parameters: {data.path: [a.jsonl, b.jsonl]}}\n"
    first, second = load(tmp_path, RIGHT + sweep).jobs[1:]

    assert (first.data.path, second.data.path) == (
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "b.jsonl"),
    )


def test_swept_steps_replace_the_epochs_of_the_defaults(tmp_path: Path) -> None:
    """What a sweep says replaces what excludes it."""
    text = RIGHT.replace("defaults:", "defaults:\n  num_train_epochs: 2.0")
    jobs = load(tmp_path, f"{text}    sweep: {{parameters: {{max_steps: [3, 5]}}}}\n").jobs

    assert [(job.max_steps, job.num_train_epochs) for job in jobs[1:]] == [(3, None), (5, None)]


@given(count=st.integers(1, 5))
def test_swept_jobs_can_be_written_down(
    count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As a service does: a drawn number reads the same again."""
    folder = tmp_path_factory.mktemp("jobs")
    rate = "{min: 1e-5, max: 1e-3, distribution: log_uniform}"
    sweep = f"{{method: random, count: {count}, parameters: {{learning_rate: {rate}}}}}"
    jobs = load(folder, f"{RIGHT}    sweep: {sweep}\n").jobs[1:]
    rates = json.loads(json.dumps([job.learning_rate for job in jobs]))

    assert rates == [job.learning_rate for job in jobs]
    assert [job.name for job in jobs] == [f"second-{number:03}" for number in range(1, count + 1)]


def test_the_page_shows_sweeps_that_read(tmp_path: Path) -> None:
    """The grid has the names that the page tells; the random sweep as many jobs as it says."""
    page = (Path(__file__).parents[2] / "docs" / "job-file.md").read_text("utf-8")
    section = page.partition("## Sweeps")[2].partition("\n## ")[0]
    grid, draws, halved = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    jobs = load(tmp_path, f"base: {{model: org/model}}\n{grid}").jobs
    text = f"base: {{model: org/model}}\n{grid.partition('    sweep:')[0]}{draws}"

    assert len(jobs) == 6
    assert all(f"`{job.name}`" in section for job in (jobs[0], jobs[-1]))
    assert len(load(tmp_path, text).jobs) == 20
    head = grid.partition("    sweep:")[0] + "    eval_split: 0.1\n    max_steps: 1000\n"
    *_, last = load(tmp_path, f"base: {{model: org/model}}\n{head}{halved}").jobs
    assert last.halving is not None
    assert last.halving.rungs(1000) == [50, 150, 450]
    kept = [
        last.halving.compare(dict.fromkeys(map(str, range(jobs)), 0.0))[0] for jobs in (15, 5, 2)
    ]
    assert list(map(len, kept)) == [5, 2, 1]


def test_a_wrong_value_names_its_line(tmp_path: Path) -> None:
    """Once for all jobs that have it."""
    text = RIGHT + SWEEP.strip("\n").replace("[4, 8]", "\n        - 4\n        - -1")

    assert mistakes(tmp_path, text) == (
        "error[T0102] wrong value of 'lora.r'\n"
        "  file      /jobs.yaml:21\n"
        "  job       tune\n"
        "  expected  a whole number n with 1 <= n\n"
        "  found     -1"
    )


def test_an_unknown_field_names_its_line(tmp_path: Path) -> None:
    """With the nearest right one, as in a job."""
    text = RIGHT + SWEEP.strip("\n").replace("lora.r", "lora.rr")

    found = mistakes(tmp_path, text)
    assert "unknown key 'rr'" in found
    assert "jobs.yaml:19" in found


def test_a_path_through_a_list_is_refused(tmp_path: Path) -> None:
    """A list of data sets has no one path."""
    text = RIGHT.replace("    data: {path: org/data, split: test}", "    data: [{path: x}]")

    found = mistakes(tmp_path, text + "    sweep: {parameters: {data.path: [a, b]}}\n")
    assert "'data.path' leads through 'data', which is no mapping" in found
    assert "sweep over 'data' itself" in found


def test_a_sweep_beside_the_jobs_is_told_where_it_goes(tmp_path: Path) -> None:
    """It is a key of a job or of the defaults."""
    found = mistakes(tmp_path, RIGHT + "sweep: {parameters: {seed: [1]}}\n")

    assert "it belongs into a job, or into 'defaults'" in found


def test_halving_stands_in_each_job_of_the_sweep(tmp_path: Path) -> None:
    """Its group is the job that is swept; a mistake names its line."""
    evaluated = "    eval_split: 0.1\n    sweep:\n      parameters: {seed: [1, 2]}\n"
    halving = "      halving: {min_steps: 5}\n"
    jobs = load(tmp_path, RIGHT.replace("split: test", "name: x") + evaluated + halving).jobs[1:]

    assert [job.halving for job in jobs] == [HalvingSpec(group="second", min_steps=5)] * 2
    text = RIGHT + evaluated.replace("    eval_split: 0.1\n", "") + halving
    found = mistakes(tmp_path, text)
    assert "'halving' needs 'eval_data' or 'eval_split'" in found
    assert "jobs.yaml:17" in found
    wrong = mistakes(tmp_path, RIGHT + evaluated + "      halving: {min_steps: 0}\n")
    assert "wrong value of 'halving.min_steps'" in wrong
    assert "jobs.yaml:18" in wrong


def test_names_of_sweeps_are_taken_too(tmp_path: Path) -> None:
    """Two sweeps, or a sweep and a job, cannot make one name."""
    sweep = "    sweep: {parameters: {seed: [1]}}\n  - {name: second-seed-1}\n"

    assert "the name 'second-seed-1' is taken" in mistakes(tmp_path, RIGHT + sweep)


def test_the_sweeps_of_a_file_have_a_bound(tmp_path: Path) -> None:
    """Together they make no more jobs than one may."""
    sweep = f"defaults:\n  sweep: {{parameters: {{seed: {[*range(MAX_JOBS // 2 + 1)]}}}}}"

    found = mistakes(tmp_path, RIGHT.replace("defaults:", sweep))
    assert "the sweeps make too many jobs" in found
