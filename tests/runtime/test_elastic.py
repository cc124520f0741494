"""Jobs join, leave and pause while others train on, and none can tell by its numbers."""

from __future__ import annotations

import gc
import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.processes import run_processes
from tests.runtime.elastic import (
    SLOTS,
    Watch,
    coming_and_going,
    coming_jobs,
    empty,
    other_words,
    train,
    train_under,
    unused,
)
from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx import compiler
from tlora_fx.cli import main
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import JobsDiffer, NotAdmitted
from tlora_fx.ir.graph import OpenSlots
from tlora_fx.ops.kernels import strict
from tlora_fx.runtime.checkpoints.store import CheckpointStore
from tlora_fx.runtime.rounds import elastic
from tlora_fx.runtime.rounds.run_checkpoints import Commits
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.runtime.trainer import Trainer, TrainerOptions
from tlora_fx.runtime.verification.verify import adapter_difference


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("elastic")
    tiny_base(made / "base")
    return made


@pytest.fixture(scope="module")
def jobs(folder):
    return coming_jobs(BaseSpec(config=folder / "base", dtype="float64", seed=7))


@pytest.fixture(scope="module")
def data(jobs):
    return make_data(list(jobs.values()))


@dataclass
class Alone:
    """What a job makes in a model of its own, which is not open."""

    losses: list[float]
    adapters: dict[Any, Any]
    optimizer: dict[str, Any]


@pytest.fixture(scope="module")
def alone(jobs, data, folder):
    results = {}
    for name, job in jobs.items():
        path = folder / "alone" / name
        _, watch = train(compile([job]), path, data)
        state = CheckpointStore(path).load().jobs[name]
        results[name] = Alone(losses_of(path, [job])[name], watch.adapters, state.optimizer)
    return results


@pytest.fixture(scope="module")
def model(jobs):
    """One open model for all tests, as a process keeps it."""
    return compile([jobs["a"]], open=SLOTS)


def assert_as_alone(folder, names, alone, adapters):
    """Losses to 1e-9; adapters after each step, and the optimizer's state, to 1e-7."""
    states = CheckpointStore(folder).load().jobs
    for name in names:
        own = alone[name]
        losses = [row["loss"] for row in read_metrics(folder / name / "metrics.jsonl")]
        assert losses == pytest.approx(own.losses[: len(losses)], rel=1e-9), (folder, name)
        for step in range(1, len(losses) + 1):
            if (name, step) in adapters:
                theirs = own.adapters[name, step]
                assert adapter_difference(adapters[name, step], theirs) <= 1e-7
        if len(losses) == len(own.losses):
            for kind, tensor in own.optimizer.items():
                found = states[name].optimizer[kind]
                torch.testing.assert_close(found, tensor, rtol=1e-7, atol=1e-12)


ACTION = st.tuples(
    st.integers(1, 5), st.sampled_from(["admit", "pause", "release"]), st.sampled_from("abcd")
)
SCRIPT = {"order": st.permutations("abcd"), "events": st.lists(ACTION, min_size=2, max_size=12)}
SETTINGS = {
    "phases": [Phase.explicit, Phase.generate],
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


def test_a_model_that_is_kept_is_tried_on_its_base_though_sites_have_no_rows(tmp_path, jobs, data):
    """A run of its next jobs begins as any other: they adapt few of the sites that are open."""
    model = empty(compile([jobs["c"]], open=SLOTS), jobs["b"])
    _, watch = train(model, tmp_path, {"b": data["b"]})

    assert any(not any(bank.table.ranks) for bank in model.banks.values())
    assert watch.warnings == []


@pytest.mark.parametrize(
    ("device", "dtype", "layers", "watched"),
    [
        ("cpu", "bfloat16", 1, "a"),
        pytest.param("cuda", "float32", 2, "ac", marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", 2, "ac", marks=pytest.mark.gpu),
    ],
)
def test_jobs_that_come_and_go_leave_no_bit_of_each_other(tmp_path, device, dtype, layers, watched):
    """Strict, in rows of the same lengths: whatever the others read and learn, nothing differs.

    watched   job a, which pauses and comes back, and c, which comes later
    """
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    base = tiny_base(tmp_path, dtype, num_hidden_layers=layers, **sizes)
    jobs = coming_jobs(base)
    data = make_data(list(jobs.values()))
    faster = {name: job.model_copy(update={"learning_rate": 3e-2}) for name, job in jobs.items()}
    others = {name: replace(other_words(each), job=faster[name]) for name, each in data.items()}
    with strict():
        found = {}
        for own in ("", *watched):
            group = {name: jobs[name] if own in ("", name) else faster[name] for name in jobs}
            words = {name: data[name] if own in ("", name) else others[name] for name in jobs}
            model = compile([group["a"], group["b"]], open=SLOTS)
            script = coming_and_going(group, words)
            _, watch = train(model, tmp_path / f"of-{own}", words, script, device=device)
            found[own] = watch.adapters, losses_of(tmp_path / f"of-{own}", list(jobs.values()))
    adapters, losses = found[""]
    for name in watched:
        theirs, apart = found[name]
        assert apart[name] == losses[name]
        assert any(apart[other] != losses[other] for other in jobs if other != name)
        for step in [step for job, step in adapters if job == name]:
            for key, tensor in adapters[name, step].items():
                assert torch.equal(theirs[name, step][key], tensor)


def test_a_model_that_has_changed_is_not_run_as_before(tmp_path, jobs, data):
    """By larger banks a trainer goes on itself, and so does the next one; other code is new."""
    model = compile([jobs["a"]], open=replace(SLOTS, jobs=1))
    train(model, tmp_path / "one", {"a": data["a"]})
    first = model.applied
    assert first is not None
    model.admit(jobs["b"])
    assert model.applied is None
    model.release("a")
    train(model, tmp_path / "two", {"b": data["b"]})
    second = model.applied
    assert second.runner is not first.runner
    model.release("b")
    script = [(1, "admit", jobs["c"], data["c"])]
    trainer, _ = train(empty(model, jobs["a"]), tmp_path / "three", data, script)
    assert model.applied.runner is trainer.group.runner is second.runner
    model.compile(backend="eager")
    assert model.applied is None


def come_and_go(model, jobs, data, alone, folder, order, events):
    script = [
        (when, do, *((jobs[name], data[name]) if do == "admit" else (name,)))
        for when, do, name in sorted(events)
    ]
    trainer, watch = train(empty(model, jobs[order[0]]), folder, data, script)

    names = [run.job.name for run in trainer.runs]
    assert_as_alone(folder, names, alone, watch.adapters)
    assert not unused(model).any()


# A job is asked to leave in the round in which it ends.
ENDING = [
    (1, "admit", "c"), (1, "admit", "d"), (2, "release", "c"), (3, "admit", "a"),
    (5, "pause", "d"), (5, "release", "b"),
]  # fmt: skip


@settings(max_examples=1, **SETTINGS)
@example(order=list("adbc"), events=ENDING)
@given(**SCRIPT)
def test_a_job_among_those_who_come_and_go_trains_as_it_does_alone(
    model, jobs, data, alone, tmp_path_factory, order, events
):
    """Random joins, leaves and pauses, dropout on, in fewer rows than all need at once."""
    come_and_go(model, jobs, data, alone, tmp_path_factory.mktemp("run"), order, events)


@pytest.mark.slow
@settings(max_examples=100, **SETTINGS)
@given(**SCRIPT)
def test_a_job_among_many_who_come_and_go_trains_as_it_does_alone(
    model, jobs, data, alone, tmp_path_factory, order, events
):
    """The same, of a hundred scripts."""
    come_and_go(model, jobs, data, alone, tmp_path_factory.mktemp("run"), order, events)


def test_a_job_that_pauses_goes_on_where_it_was(model, jobs, data, alone, tmp_path):
    """Its rows are another's in the meantime, and others move up when it comes back."""
    script = coming_and_going(jobs, data)
    model = empty(model, jobs["a"], jobs["b"])
    trainer, watch = train(model, tmp_path / "run", data, script)

    assert {run.job.name: run.step for run in trainer.runs} == {"a": 5, "b": 3, "c": 4, "d": 4}
    assert_as_alone(tmp_path / "run", "abcd", alone, watch.adapters)


def test_a_job_that_pauses_goes_on_in_another_run(model, jobs, data, alone, tmp_path, monkeypatch):
    """From the checkpoint that its pause left; the row's checkpoint holds who was in it.

    The first checkpoint there has the files of that, and later ones its own.
    """
    train(empty(model, jobs["a"], jobs["b"]), tmp_path / "one", data, [(2, "pause", "a")])
    held, linked = CheckpointStore(tmp_path / "one").load(), []
    save = CheckpointStore.save

    def spy(store, step, states, described, *, elsewhere, **others):
        linked.append(elsewhere)
        return save(store, step, states, described, elsewhere=elsewhere, **others)

    monkeypatch.setattr(CheckpointStore, "save", spy)
    watch = Watch()
    trainer = Trainer(
        empty(model, jobs["c"]), output=tmp_path / "two", device="cpu", data=data, callback=watch
    )
    watch.trainer = trainer
    trainer.admit(jobs["a"], data["a"], resume=tmp_path / "one")
    trainer.run()

    assert [each for each in linked if each] == [{"a": held.path}]
    assert {name: (state.step, state.status) for name, state in held.jobs.items()} == {
        "a": (2, "running"),
        "b": (4, "done"),
    }
    assert adapter_difference(watch.adapters["a", 5], alone["a"].adapters["a", 5]) <= 1e-7
    losses = losses_of(tmp_path / "two", [jobs["a"]])["a"]
    assert losses == pytest.approx(alone["a"].losses[2:], rel=1e-9)


def test_a_job_that_was_done_and_goes_on_elsewhere_is_written_anew(model, jobs, data, tmp_path):
    """Its old files say that it is done, and whoever reads them would believe it."""
    train(empty(model, jobs["b"]), tmp_path / "one", data)
    longer = jobs["b"].model_copy(update={"max_steps": 9})
    more = make_data([longer])["b"]
    other = Trainer(
        empty(model, jobs["a"]), output=tmp_path / "two", device="cpu", data=data,
        options=TrainerOptions(accept_changes=True),
    )  # fmt: skip
    told, plain = [], CheckpointStore.save

    def spy(store, step, states, *given, **named):
        told.append((named["elsewhere"], {name: state.status for name, state in states.items()}))
        return plain(store, step, states, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "save", spy)
        other.admit(longer, more, resume=tmp_path / "one")
        other.run()

    assert all(not elsewhere for elsewhere, _ in told)
    assert any(states.get("b") == "running" for _, states in told)
    assert {run.job.name: run.step for run in other.runs} == {"a": 5, "b": 9}


def test_a_released_job_leaves_its_adapter_and_stays_ended(model, jobs, data, alone, tmp_path):
    """Done, with the reason, and its rows are free in the next round."""
    script = [(2, "release", "a"), (2, "admit", jobs["d"], data["d"])]
    folder = tmp_path / "run"
    trainer, _ = train(empty(model, jobs["a"], jobs["b"]), folder, data, script)

    status = json.loads((folder / "a" / "status.json").read_text())
    left = safetensors.torch.load_file(folder / "a" / "adapter_model.safetensors")
    assert (status["status"], status["step"]) == ("done", 2)
    assert status["reason"] == "stopped as asked after step 2"
    assert adapter_difference(left, alone["a"].adapters["a", 2]) <= 1e-7
    assert "a" not in trainer.model.members


class Stopping(Watch):
    """Asks from outside, as `tlora-fx stop` does, after a step of job a."""

    def stepped(self, report):
        super().stepped(report)
        if (report.job, report.step) == ("a", 2):
            with pytest.raises(SystemExit, match="0"):
                main(["stop", str(self.trainer.folder.path), "a"])


@pytest.mark.parametrize("is_open", [True, False])
def test_a_job_is_stopped_from_outside(model, jobs, data, alone, tmp_path, is_open, capsys):
    """It ends where it is, in an open model or another; the others go on."""
    given = [jobs["a"], jobs["b"]]
    watch, folder = Stopping(), tmp_path / "run"
    made = empty(model, *given) if is_open else compile(given)
    trainer = Trainer(made, output=folder, device="cpu", data=data, callback=watch)
    watch.trainer = trainer
    runs = {run.job.name: run for run in trainer.run()}

    assert (runs["a"].status, runs["a"].step) == ("done", 2)
    assert (runs["b"].status, runs["b"].step) == ("done", 4)
    assert_as_alone(folder, "ab", alone, watch.adapters)
    assert CheckpointStore(folder).load().jobs["a"].reason == "stopped as asked after step 2"
    for job, text in (("a", "has ended already"), ("A", "no such job")):
        with pytest.raises(SystemExit):
            main(["stop", str(folder), job])
        assert text in capsys.readouterr().err


def pass_through(model, base, folder, count, steps):
    """Small jobs through a model; the trainer, and after each job's end what there is then.

    returns   tensors alive, files open below the folder, graphs that Dynamo compiled
    """
    many = [
        make_job(base, f"job{n}", seed=n, max_steps=steps, save_steps=1000, lora={"r": 2 + n % 7})
        for n in range(count)
    ]
    samples = make_data(many)
    held = []

    class Holding(Watch):
        def ended(self, run):
            gc.collect()
            tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            held.append((tensors, len(open_files(folder)), counters["stats"]["unique_graphs"]))

    watch = Holding([(1, "admit", job, samples[job.name]) for job in many[1:]])
    trainer = Trainer(
        empty(model, many[0]), output=folder, device="cpu", data=samples, callback=watch
    )
    watch.trainer, watch.adapters = trainer, _Nothing()
    # What is there already is neither searched nor counted: other tests leave millions of objects.
    gc.freeze()
    trainer.run()
    assert [(run.status, run.step) for run in trainer.runs] == [("done", steps)] * count
    return trainer, samples, held


def open_files(folder):
    """Files below a folder that this process has open."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        # The one that lists them is gone by now.
        with suppress(FileNotFoundError):
            links.append(fd.readlink())
    return [link for link in links if link.is_relative_to(folder)]


@pytest.fixture
def fast_disk(monkeypatch):
    """A checkpoint is written before the next round begins: nothing on its way is counted."""
    monkeypatch.setattr(Commits, "look", Commits.settle)


@pytest.mark.usefixtures("fast_disk")
def test_small_jobs_that_have_passed_through_a_model_hold_nothing(folder, tmp_path):
    """Sixteen in four slots: not one tensor or open file more when the last four end."""
    base = BaseSpec(config=folder / "base", dtype="float64", seed=7)
    like = make_job(base, "like", lora={"r": 8})
    model = compile([like], open=OpenSlots(("q_proj", "v_proj"), rows=16, jobs=2, rank=8))
    trainer, _, held = pass_through(model, base, tmp_path / "run", 16, 2)
    tensors, files, _ = zip(*held, strict=True)

    assert len(model.jobs) == 4
    assert max(tensors[12:]) <= max(tensors[8:12])
    # The lock, four that train, and those whose last adapters are still on their way to the disk.
    assert max(files) < 16
    assert open_files(tmp_path / "run") == []
    assert all(run.metrics._file is None for run in trainer.runs if run.left)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_disk")
def test_a_hundred_small_jobs_pass_through_one_model(folder, tmp_path, fresh_dynamo):
    """Ranks 2 to 8, twenty steps each, sixteen at a time; the last costs what the first did."""
    base = BaseSpec(config=folder / "base", dtype="float64", seed=7)
    like = make_job(base, "like", lora={"r": 8})
    model = compile([like], open=OpenSlots(("q_proj", "v_proj"), rows=64, jobs=8, rank=8))
    model.compile(backend="eager")
    trainer, samples, held = pass_through(model, base, tmp_path / "run", 100, 20)
    tensors, files, graphs = zip(*held, strict=True)

    assert len(model.jobs) == 16
    assert max(tensors[60:]) <= 1.1 * max(tensors[20:40])
    assert max(files) < 100
    assert open_files(tmp_path / "run") == []
    assert graphs[-1] == graphs[0] > 0
    for job in (trainer.runs[3].job, trainer.runs[97].job):
        train(compile([job]), tmp_path / "alone" / job.name, samples)
        mine = losses_of(tmp_path / "run", [job])[job.name]
        assert mine == pytest.approx(
            losses_of(tmp_path / "alone" / job.name, [job])[job.name], rel=1e-9
        )


class _Nothing(dict):
    """Keeps nothing."""

    def __setitem__(self, key, value):
        pass


def test_who_finds_no_room_waits_until_another_ends(jobs, data, alone, tmp_path):
    """One slot, and banks that have doubled once already: four jobs, two at a time."""
    model = compile([jobs["b"]], open=OpenSlots(rows=16, jobs=1, rank=16))
    script = [(1, "admit", jobs[name], data[name]) for name in "acd"]
    trainer, watch = train(model, tmp_path / "run", data, script)

    assert [run.status for run in trainer.runs] == ["done"] * 4
    assert len(model.jobs) == 2
    assert len(model.banks["model.layers.0.mlp.up_proj"].a) == 32
    assert any("banks have doubled" in note for _, note in model.group.notes)
    assert_as_alone(tmp_path / "run", "abcd", alone, watch.adapters)


def test_nothing_is_traced_and_no_code_compiled_where_jobs_come(
    jobs, data, alone, tmp_path, monkeypatch, fresh_dynamo
):
    """Three jobs come, of other ranks and at other sites: what the first round made serves all."""
    model = compile([jobs["a"]], open=SLOTS)
    model.compile(backend="eager")
    made = []

    class Counting(Watch):
        def stepped(self, report):
            super().stepped(report)
            made.append(counters["stats"]["unique_graphs"])

    def refuse(*_, **__):
        raise AssertionError("something is traced")

    watch = Counting([(2, "admit", jobs[name], data[name]) for name in "bcd"])
    trainer = Trainer(model, output=tmp_path / "run", device="cpu", data=data, callback=watch)
    watch.trainer = trainer
    for name in ("base_graph", "job_graph"):
        monkeypatch.setattr(compiler, name, refuse)
    trainer.run()

    assert made[0] > 0
    assert made[-1] == made[1]
    assert_as_alone(tmp_path / "run", "abcd", alone, watch.adapters)


class Operators(TorchDispatchMode):
    """Counts the operators that compute something."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "prim" and not any(
            word in str(func) for word in ("view", "detach", "tlora_fx.multi", ".t.", "alias")
        ):
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_round(model, jobs, data, folder):
    trainer = Trainer(model, output=folder, device="cpu", data=data)
    trainer.prepare(data)
    (run,) = trainer.runs
    with Operators() as counting:
        trainer.gradients({run.index: run.batches()})
    return counting.found


def test_a_site_without_rows_launches_nothing(model, jobs, data, tmp_path):
    """Forward and backward take as many operators as where only the adapted sites are lowered."""
    own = compile([jobs["b"]])
    few = operators_of_a_round(own, jobs, data, tmp_path / "own")
    every = operators_of_a_round(empty(model, jobs["b"]), jobs, data, tmp_path / "open")

    assert (len(own.banks), len(model.banks)) == (4, 14)
    assert every.total() <= few.total(), every - few


def test_jobs_that_do_not_fit_are_refused_with_the_difference(model, jobs):
    """Another structure, a larger rank, another base, a name that is taken."""
    base, model = jobs["a"].base, empty(model, jobs["a"])
    before = {path: bank.table for path, bank in model.banks.items()}
    wrong = {
        "dora": make_job(base, "x", lora={"use_dora": True}),
        "a rank of 16 at most": make_job(base, "x", lora={"r": 17}),
        "lm_head": make_job(base, "x", lora={"target_modules": ["lm_head"]}),
        "float32": make_job(base.model_copy(update={"dtype": "float32"}), "x"),
    }
    for text, job in wrong.items():
        with pytest.raises(NotAdmitted, match=text) as caught:
            model.admit(job)
        assert "tlora-fx train" in caught.value.help
    with pytest.raises(JobsDiffer):
        model.admit(jobs["a"])

    assert {path: bank.table for path, bank in model.banks.items()} == before
    assert model.members == {"a": 0}


def test_a_job_beyond_the_memory_is_refused_before_anything_is_written(
    model, jobs, data, tmp_path, monkeypatch
):
    """Its optimizer state alone is more than is free; the others train on, and it has no folder."""
    empty(model, jobs["a"])
    needed = model.bytes_needed(jobs["d"])
    sizes = [
        sum(getattr(model.banks[path], part).shape[1] for part in "ab")
        for path in model.group.jobs[0].sites  # of a, which has those of d and more
        if path.endswith(("v_proj", "down_proj"))
    ]
    assert needed >= 2 * 16 * 8 * sum(sizes) > 0
    monkeypatch.setattr(elastic, "free_bytes", lambda device: needed - 1)
    trainer, watch = train(model, tmp_path, data, [(1, "admit", jobs["d"], data["d"])])

    [refused] = watch.refused
    assert "MiB are free on cpu" in str(refused)
    assert "tlora-fx train JOBS.yaml" in str(refused)
    assert [run.status for run in trainer.runs] == ["done"]
    assert not (tmp_path / "d").exists()


def test_jobs_that_wait_to_join_have_their_memory_already(model, jobs, data, tmp_path, monkeypatch):
    """Of two that each fit alone the second is refused, where both do not fit."""
    empty(model, jobs["a"])
    needed = {name: model.bytes_needed(jobs[name]) for name in "bd"}
    assert all(needed.values())
    monkeypatch.setattr(elastic, "free_bytes", lambda device: sum(needed.values()) - 1)
    asked = [(1, "admit", jobs[name], data[name]) for name in "bd"]
    trainer, watch = train(model, tmp_path, data, asked)

    [refused] = watch.refused
    assert refused.facts["expected"].endswith("with 1 that wait to join")
    assert {run.job.name: run.status for run in trainer.runs} == {"a": "done", "b": "done"}


def test_rows_are_expected_to_take_what_the_largest_so_far_took(model, jobs, data, monkeypatch):
    """By the token; what the process did before says nothing, nor do smaller rows."""
    device, peak = torch.device("cuda"), [10**12]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 1000)
    )
    gathering = SimpleNamespace(mesh=SimpleNamespace(device=device))
    roster = elastic.Roster(SimpleNamespace(model=model, gathering=gathering), None)
    tokens = {name: elastic._step_tokens(jobs[name], data[name]) for name in "abc"}

    def train(names, taken):
        runs = [SimpleNamespace(job=jobs[name], data=data[name]) for name in names]
        roster._inside = dict(enumerate(runs))
        peak[0] = 1000 + taken
        roster.note_rows()
        roster.watch_rows(10**6)

    roster.note_rows()
    assert roster._row_bytes(tokens["b"]) == 0
    roster.watch_rows(10**6)
    assert roster._row_bytes(tokens["b"]) == 0
    train("a", 50 * tokens["a"])
    assert roster._row_bytes(tokens["b"]) == 50 * (tokens["a"] + tokens["b"])
    train("ab", 0)
    assert roster._row_bytes(tokens["c"]) == 50 * sum(tokens.values())
    train("ab", 40 * (tokens["a"] + tokens["b"]))
    train("b", 70 * tokens["b"])
    assert roster._row_bytes(tokens["c"]) == 40 * (tokens["b"] + tokens["c"])
    roster.watch_rows(tokens["b"])
    assert roster._row_bytes(tokens["c"]) == 40 * tokens["b"]


def test_a_model_that_is_not_open_admits_nobody(jobs):
    """What is compiled for its jobs alone says how to compile it for others."""
    with pytest.raises(NotAdmitted, match="stay as they are") as caught:
        compile([jobs["b"]]).admit(jobs["a"])
    assert "OpenSlots" in caught.value.help


@pytest.mark.slow
def test_jobs_come_and_go_on_two_processes_under_every_plan(folder, alone):
    """All processes change at the same round, whatever each of them holds."""
    shapes = {"replicated": "dp=2", "fsdp": "dp=2", "tensor": "tp=2", "pipeline": "pp=2"}
    run_processes(2, train_under, folder, shapes)

    for name in shapes:
        assert_as_alone(folder / name, "abcd", alone, {})
