"""Profiles: their file, and the functions that are fitted to their points."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.facts import small_model, term_at
from tests.models import SHALLOW, base_of, job, ready, tokens
from tests.parallel.processes import run_processes
from tests.runtime.groups import make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.cost import profile_sources
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.fit import CollectiveTimes, Curve, LayerTimes, Term, fit_nonnegative
from tlora_fx.cost.hardware import GPUS, find_gpu
from tlora_fx.cost.load import Work
from tlora_fx.cost.profile import CollectivePoint, LayerPoint, LayerProfile, Profile
from tlora_fx.cost.profile_sources import covers, own_file, profile_for, roofline_profile, scaled
from tlora_fx.errors import NotProfilable, ProfileFileError, ProfileMissing, UnknownGpu
from tlora_fx.ir.graph import LOSS
from tlora_fx.model.batch import pack
from tlora_fx.runtime.profiling import profiler
from tlora_fx.runtime.profiling.profiler import (
    ProfileRequest,
    calls_of,
    joined,
    loss_points,
    profile_jobs,
)
from tlora_fx.runtime.profiling.timing import TimedPass, collective_points, measure

AMOUNTS, COUNTS = st.floats(0, 1e6, allow_nan=False), st.integers(0, 100)
WORKS = st.builds(
    LayerPoint, tokens=st.integers(1, 10**5), squares=AMOUNTS, sites=COUNTS, job_sites=COUNTS,
    site_tokens=AMOUNTS, rank_tokens=AMOUNTS, forward_ms=st.just(0.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A profile of a tiny model, measured here: its times mean nothing, its form is what counts."""
    base = tiny_base(tmp_path_factory.mktemp("tiny"), "float32")
    jobs = [make_job(base, "one"), make_job(base, "two", lora={"r": 2})]
    request = ProfileRequest(
        torch.device("cpu"), tokens=(16, 32), lengths=(8, 16), tp=(1, 2), rounds=1, compiled=False,
        command="tlora-fx profile jobs.yaml",
    )  # fmt: skip
    return profile_jobs(jobs, request)


def test_measuring_says_what_it_does_and_how_far_it_is():
    """Every turn of every layer is counted, the first one warms up."""
    turns = []
    piece = TimedPass(lambda: torch.zeros(1))
    measure([piece, piece], torch.device("cpu"), 2, lambda done, of: turns.append((done, of)))

    assert turns == [(done, 6) for done in range(1, 7)]


def test_a_profile_survives_its_file(measured, tmp_path):
    """What is read back is what was written."""
    measured.save(tmp_path / "new" / "profile.json")

    assert Profile.load(tmp_path / "new" / "profile.json") == measured


def test_the_users_profiles_of_bases_of_one_name_stand_beside_each_other(
    measured, tmp_path, monkeypatch
):
    """One that is measured again takes the place of the one before, and of what is no profile."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path))
    first, second = (
        measured.model_copy(update={"shape": measured.shape.model_copy(update=update)})
        for update in ({"title": "here/base"}, {"title": "there/base", "vocabulary": 96})
    )

    for profile, name in ((first, "base-cpu.json"), (second, "base-cpu-2.json")) * 2:
        assert own_file(profile).name == name
        profile.save(own_file(profile))
    (tmp_path / "base-cpu.json").write_text("{")
    assert own_file(second).name == "base-cpu.json"


def test_what_is_measured_has_every_part(measured):
    """Layers whole and cut, with adapters and bare; what stands before and behind them."""
    sizes = {layer.tp for layer in measured.layers}
    points = measured.layers[0].points

    assert sizes == {1, 2}
    assert {one.sites for one in points} == {0, 2}
    assert {one.tokens for one in points} == {16, 32}
    assert all((one.first_ms is None) == (one.sites == 0) for one in points)
    assert all(one.saved_bytes > 0 for one in points)
    assert [one.tokens for one in measured.root] == [16, 32]
    assert all(one.backward_ms > 0 for one in measured.loss)
    assert measured.versions["torch"] == version("torch")
    assert not measured.estimated


def test_only_pieces_may_be_measured(tmp_path):
    """Head and loss are those of a whole model: a piece of the head knows a part of the targets."""
    base = tiny_base(tmp_path, "float32", vocab_size=64)
    request = ProfileRequest(
        torch.device("cpu"), tokens=(64,), lengths=(16,), tp=(2,), rounds=1, compiled=False
    )

    found = profile_jobs([make_job(base, "one")], request)

    assert {layer.tp for layer in found.layers} == {2}
    assert all(one.forward_ms > 0 for one in (*found.loss, *found.root))


def test_pieces_of_matrices_do_less(measured):
    """Half of the columns are half of the numbers."""
    whole, half = measured.layers

    assert whole.elements == 2 * half.elements
    assert half.attention_width == whole.attention_width // 2
    assert half.points[0].site_tokens < whole.points[0].site_tokens


def test_processes_measure_what_they_say():
    """All-reduce, all-gather and send of several sizes, the same numbers on both."""
    first, second = run_processes(2, measured_collectives)

    assert {point["operation"] for point in first} == {"all-reduce", "all-gather", "send"}
    assert all(point["ms"] > 0 and point["tier"] == "node" for point in first)
    assert [point["ms"] for point in first] == [point["ms"] for point in second]


def measured_collectives():
    """What one of two processes measures."""
    return [point.model_dump() for point in collective_points(torch.device("cpu"), 2, 1)]


def test_measured_links_replace_the_data_sheet(model):
    """A fit of what was measured; other distances stay estimates."""
    facts = facts_of(model)
    points = [
        CollectivePoint(
            operation="all-reduce", tier="node", processes=p, payload_bytes=size,
            ms=0.02 + 2 * (p - 1) / p * size / 3e8,
        )
        for p in (2, 4) for size in (2**20, 2**24)
    ]  # fmt: skip
    given = roofline_profile(GPUS["h100"], facts).model_copy(update={"collectives": points})
    times = CollectiveTimes(given)

    assert times.ms("all-reduce", "node", 4, 2**24) == pytest.approx(points[-1].ms, rel=1e-6)
    assert not times.estimated
    assert times.ms("all-reduce", "network", 4, 2**24) > points[-1].ms
    assert times.estimated


def test_measurements_can_be_added(measured, tmp_path):
    """The layers of a later run join those of an earlier one; of other models they do not."""
    only = measured.model_copy(update={"layers": measured.layers[1:]})
    both = joined(measured.model_copy(update={"layers": measured.layers[:1]}), only, tmp_path)
    other = measured.model_copy(update={"compiled": True})

    assert both.layers == measured.layers
    with pytest.raises(ProfileFileError, match="one model on one device"):
        joined(measured, other, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "Invalid JSON"), ('{"schema": 1}', "name: Field required"), ("", "EOF")],
)
def test_a_broken_file_is_refused(tmp_path, text, said):
    """By its name, with what is wrong."""
    path = tmp_path / "profile.json"
    path.write_text(text)

    with pytest.raises(ProfileFileError, match=said) as error:
        Profile.load(path)
    assert str(path) in str(error.value)


def test_a_file_of_another_version_is_refused(measured, tmp_path):
    """Its numbers may mean something else."""
    measured.save(tmp_path / "profile.json")
    data = json.loads((tmp_path / "profile.json").read_text()) | {"schema": 99}
    (tmp_path / "profile.json").write_text(json.dumps(data))

    with pytest.raises(ProfileFileError, match="schema 99"):
        Profile.load(tmp_path / "profile.json")


@given(
    features=st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=8),
    seed=st.integers(0, 100),
)
def test_the_fit_is_the_best_without_negatives(features, seed):
    """No coefficient is negative, and none could change for the better."""
    matrix = np.array(features)
    values = np.random.default_rng(seed).uniform(0, 10, len(features))
    found = fit_nonnegative(matrix, values)

    gradient = matrix.T @ (values - matrix @ found)
    limit = 1e-6 * (1 + np.abs(matrix).max() ** 2 * np.abs(values).max())
    assert (found >= 0).all()
    assert (gradient <= limit).all()
    assert (np.abs(gradient[found > 1e-9]) <= limit).all()


@given(
    points=st.dictionaries(st.integers(1, 1000), st.floats(0, 100), min_size=1, max_size=6),
    places=st.tuples(st.floats(0, 2000), st.floats(0, 2000)),
)
def test_a_curve_never_falls(points, places):
    """Whatever the noise of its points."""
    curve = Curve.through([(float(x), y) for x, y in points.items()])
    low, high = sorted(places)

    assert 0 <= curve(low) <= curve(high) + 1e-9


@given(less=WORKS, more=WORKS)
def test_more_work_never_costs_less(less, more):
    """More tokens, ranks, sites and longer sequences all add."""
    points = [
        LayerPoint(
            tokens=n, squares=n * s, sites=k, job_sites=k, site_tokens=n * k,
            rank_tokens=n * k * 4, forward_ms=1.0 + 0.01 * n + 1e-5 * n * s + 0.1 * k,
        )
        for n in (100, 1000, 5000) for s in (10, 100) for k in (0, 3)
    ]  # fmt: skip
    term = Term.fitted(points, [point.forward_ms for point in points])
    fields = ("tokens", *Work._fields)
    both = less.model_copy(
        update={name: getattr(less, name) + getattr(more, name) for name in fields}
    )

    assert term_at(term, less) <= term_at(term, both) + 1e-9


def test_measured_points_come_out_again():
    """Where no noise is in them."""
    points = [
        LayerPoint(
            tokens=n, squares=n * s, sites=k, job_sites=2 * k, site_tokens=n * k * 64,
            rank_tokens=n * k * 512, forward_ms=0.5 + n * 1e-3 + n * s * 1e-7 + k * 0.01,
            backward_ms=1.0 + n * 2e-3, saved_bytes=100.0 * n,
        )
        for n in (512, 2048, 8192) for s in (128, 1024) for k in (0, 7)
    ]  # fmt: skip
    profile = LayerProfile(structure="s", elements=1, attention_width=1, hidden=1, points=points)
    times = LayerTimes.of(profile)

    for point in points:
        assert term_at(times.forward, point) == pytest.approx(point.forward_ms, rel=1e-6)
        assert term_at(times.backward, point) == pytest.approx(point.backward_ms, rel=1e-6)
        assert term_at(times.saved, point) == pytest.approx(point.saved_bytes, rel=1e-6)


def test_a_scaled_profile_is_marked(model):
    """With its origin; on a GPU with twice the peaks it is faster."""
    facts = facts_of(model)
    given = roofline_profile(GPUS["a100"], facts).model_copy(update={"source": "measured"})
    found = scaled(given, GPUS["b200"], facts)

    assert found.estimated
    assert found.origin == given.name
    assert found.hardware.gpu == "NVIDIA B200"
    pairs = zip(given.layers[0].points, found.layers[0].points, strict=True)
    assert all(new.forward_ms < old.forward_ms for old, new in pairs)


def test_scaling_to_itself_changes_nothing(model):
    """All ratios are one."""
    facts = facts_of(model)
    given = roofline_profile(GPUS["h100"], facts)

    found = scaled(given, GPUS["h100"], facts)
    assert found.layers == given.layers
    assert found.collectives == given.collectives


def test_estimates_must_be_allowed(model, monkeypatch, tmp_path):
    """Without a measured profile planning stops, and says how to go on."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path))
    monkeypatch.setattr(profile_sources, "SHIPPED", tmp_path)
    facts = facts_of(model)

    with pytest.raises(ProfileMissing, match="--allow-estimated"):
        profile_for(facts, "h200", allow_estimated=False)
    assert profile_for(facts, "h200", allow_estimated=True).source == "roofline"


def test_a_measured_profile_is_found_and_the_nearest_is_scaled(model, monkeypatch, tmp_path):
    """The same GPU and shape as it is; for another GPU marked."""
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path))
    monkeypatch.setattr(profile_sources, "SHIPPED", tmp_path)
    facts = facts_of(model)
    given = roofline_profile(GPUS["h200"], facts).model_copy(
        update={"source": "measured", "name": "here"}
    )
    given.save(tmp_path / "here.json")

    assert covers(given, facts)
    assert profile_for(facts, "NVIDIA H200", allow_estimated=False).name == "here"
    other = profile_for(facts, "h100", allow_estimated=True)
    assert (other.source, other.origin) == ("scaled", "here")


def test_an_unknown_gpu_has_a_nearest(model):
    """And the list of those that are known."""
    with pytest.raises(UnknownGpu, match="nearest  h100"):
        find_gpu("h1000")


def test_shipped_profiles_were_measured():
    """Nothing invented lies among them."""
    for path in profile_sources.SHIPPED.glob("*.json"):
        assert not Profile.load(path).estimated


def test_a_compiled_models_loss_is_timed_with_its_last_norm(tmp_path):
    """It is called as the root calls it; without the norm it gives something else."""
    base = base_of(tmp_path, "llama", **SHALLOW["llama"])
    model = ready([job("one", base, r=4, target_modules=["q_proj"])])
    row, cpu = pack([tokens([10])]), torch.device("cpu")
    loss = model.net.get_submodule(LOSS)
    expected = loss(*calls_of(model, row, cpu).loss)
    model.compile(backend="eager")
    called = calls_of(model, row, cpu).loss

    assert model.finish is not None
    torch.testing.assert_close(loss(*called, finish=model.finish), expected)
    assert not torch.allclose(loss(*called), expected)
    (point,) = loss_points(model, [calls_of(model, row, cpu)], cpu, 1)
    assert point.targets == len(row.targets)


@pytest.mark.parametrize("launched", [(), ("packed_attention",)])
def test_layers_that_no_cuda_graph_can_hold_are_not_captured(tmp_path, monkeypatch, launched):
    """To try it leaves warnings of torch on the terminal."""
    asked = []
    monkeypatch.setattr(profiler, "measure_captured", lambda pieces, *_: asked.extend(pieces))
    request = ProfileRequest(
        torch.device("cpu"), tokens=(16,), lengths=(8,), rounds=1, compiled=False
    )
    jobs = [make_job(tiny_base(tmp_path, "float32"), "one")]
    sampled = profiler._sampled_model(compile(jobs), request, 1, (0,))
    facts = replace(sampled.facts, launched=launched)
    profiler._layer_profiles([replace(sampled, facts=facts)], request)

    assert bool(asked) == (not launched)


@pytest.mark.parametrize("gpu", ["h200", "roofline:h200", "cpu"])
def test_no_profile_is_of_a_model_without_layers(tmp_path, gpu):
    """Of one layer none folds; a profile of another base with such a head must not serve for it."""
    base = tiny_base(tmp_path, "float32", num_hidden_layers=1)
    facts = facts_of(compile([make_job(base, "one")]))
    layered = facts_of(small_model(tmp_path / "layered"))
    other = roofline_profile(GPUS["h200"], layered)
    shape = other.shape.model_copy(
        update={"vocabulary": facts.vocabulary, "hidden": facts.hidden, "dtype": facts.dtype}
    )

    assert not facts.layers
    assert not covers(other.model_copy(update={"shape": shape}), facts)
    with pytest.raises(NotProfilable) as refused:
        profile_for(facts, gpu, allow_estimated=True)
    assert "--plan single" in refused.value.help
