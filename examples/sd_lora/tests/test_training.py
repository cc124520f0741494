"""Two tasks of two jobs in one model, against the formula in plain PyTorch."""

import pytest
import torch
from conftest import DECAY, JOBS, MAX_NORM, PREFIX, RATE, batches_of, job_of, starts_of, train
from oracle import Oracle

import tlora_fx
from tlora_fx.model.backbone import load_backbone
from tlora_fx.model.batch import JobTokens, pack
from tlora_fx.runtime.adapters.files import base_tensors, plain_base, start_adapters

BOUND = 1e-10


@pytest.fixture(scope="module")
def alone(base, sequence):
    """By job, for each task: the losses by formula, and what it ended with."""
    backbone = load_backbone(base)
    results = {}
    for name in JOBS:
        before, results[name] = None, []
        for task, group in enumerate((sequence[0], sequence[2])):
            oracle = Oracle(plain_base(backbone), starts_of(group.starts[name]), before)
            losses = oracle.train(batches_of(name, task), RATE, DECAY, MAX_NORM)
            before = oracle.ended()
            results[name].append((losses, oracle.sites, before))
    return results


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("task", [0, 1])
def test_losses_are_those_of_the_formula(sequence, alone, name, task):
    """In both tasks, of every step; and the job learns something."""
    found, wanted = (sequence[0], sequence[2])[task].losses[name], alone[name][task][0]

    assert found == pytest.approx(wanted, rel=BOUND)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("task", [0, 1])
def test_adapters_are_those_of_the_formula(sequence, alone, name, task):
    """A, B and all magnitudes after the steps of a task."""
    ends = (sequence[0], sequence[2])[task].ends[name]

    for path, site in alone[name][task][1].items():
        for part, wanted in {"A": site.a, "B": site.b, "magnitudes": site.alphas}.items():
            torch.testing.assert_close(
                ends[f"{PREFIX}{path}.sdlora_{part}"], wanted.detach(), rtol=BOUND, atol=BOUND
            )


def test_gradients_are_those_of_the_formula(base, sequence, alone):
    """In the second task, of the magnitudes too; frozen directions have none."""
    jobs = [job_of(base, name, 1, sequence[1][name]) for name in JOBS]
    model = tlora_fx.compile(jobs)
    model.materialize(base_tensors(model.backbone), "cpu")
    start_adapters(model)
    batches = {name: batches_of(name, 1)[0] for name in JOBS}
    rows = [JobTokens(*zip(*batches[job.name], strict=True), seed=0) for job in jobs]

    # The model gives each job's sum over its targets.
    counts = [sum(x != -100 for _, labels in batches[name] for x in labels[1:]) for name in JOBS]
    (model(pack(rows)) / torch.tensor(counts)).sum().backward()

    for job in jobs:
        starts = starts_of(sequence[2].starts[job.name])
        oracle = Oracle(plain_base(model.backbone), starts, alone[job.name][0][2])
        parameters = model.job_parameters(job.name)
        for path, wanted in oracle.gradients(batches[job.name]).items():
            for part, gradient in zip(("A", "B", "magnitudes"), wanted, strict=True):
                found = parameters[f"{PREFIX}{path}.sdlora_{part}.default"].grad
                torch.testing.assert_close(found, gradient, rtol=BOUND, atol=BOUND)
        frozen = [param.grad for name, param in parameters.items() if "_earlier_" in name]
        assert frozen
        assert not any(gradient is not None and gradient.any() for gradient in frozen)


@pytest.mark.parametrize("task", [0, 1])
def test_a_job_trains_as_without_its_neighbour(base, sequence, tmp_path, task):
    """Losses and adapters, up to the order of sums."""
    group = (sequence[0], sequence[2])[task]
    for name in JOBS:
        job = job_of(base, name, task, sequence[1][name] if task else None)
        single = train([job], task, tmp_path / name)

        assert single.losses[name] == pytest.approx(group.losses[name], rel=BOUND)
        for key, tensor in single.ends[name].items():
            torch.testing.assert_close(tensor, group.ends[name][key], rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", JOBS)
def test_frozen_directions_keep_their_bits(sequence, name):
    """Weight decay does not reach them either; magnitudes of earlier tasks move."""
    starts, ends = sequence[2].starts[name], sequence[2].ends[name]
    frozen = [key for key in ends if "_earlier_" in key]
    magnitudes = [key for key in ends if key.endswith("_magnitudes")]

    assert len(frozen) == 2 * len(magnitudes) > 0
    assert all(torch.equal(starts[key], ends[key]) for key in frozen)
    assert all((starts[key] != ends[key]).all() for key in magnitudes)
