"""Rows as CUDA graphs: what can be known of them without a GPU."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tests.runtime.groups import VOCABULARY, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import PlanNotRunnable, TableNotOnDevice
from tlora_fx.ir.graph import HEAD
from tlora_fx.model.batch import IGNORED, JobTokens, pack, repeating_form, size_of, size_of_jobs
from tlora_fx.model.loss import _segments_of_chunk, segments_of_chunks
from tlora_fx.model.row_ladder import RowLadder, RowSize
from tlora_fx.ops import dora, segment_read, segment_sum, tables
from tlora_fx.ops.dora import Norms
from tlora_fx.ops.kernels.select import may_cut_by_jobs
from tlora_fx.parallel import apply as apply_module
from tlora_fx.parallel import cuda_graphs
from tlora_fx.parallel.apply import apply, each_structure_once, load
from tlora_fx.parallel.cuda_graphs import NormGraph, RowGraphs
from tlora_fx.parallel.mesh import Mesh
from tlora_fx.parallel.peer_copies import SideStreams
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters


def row_of(seed, counts=(2, 0, 3)):
    """A row of a few sequences for each job; a part of the tokens are targets."""
    generator = torch.Generator().manual_seed(seed)
    jobs = []
    for place, count in enumerate(counts):
        lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
        ids = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
        labels = [[IGNORED, *one[1:]] for one in ids]
        jobs.append(JobTokens(ids, labels, seed=place, step=seed))
    return pack(jobs)


@pytest.mark.parametrize("dora", [False, True])
def test_a_repeating_form_has_the_losses_and_gradients_of_its_row(tmp_path, dora):
    """With dropout, a job without tokens, and branches that nothing lowers."""
    lora = {"r": 4, "lora_dropout": 0.2, "target_modules": "all-linear", "use_dora": dora}
    base = tiny_base(tmp_path)
    jobs = [make_job(base, name, seed=place, lora=lora) for place, name in enumerate("abc")]
    model, plan, mesh = compile(jobs), Plan(planner="single"), Mesh.alone("cpu")
    load(model, plan, mesh, base_tensors(model.backbone, mesh.device))
    start_adapters(model)
    runner = apply(model, plan, mesh)
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)

    found = []
    for row in (row_of(3), repeating_form(row_of(3))):
        losses = runner.run([row], weights)
        found.append([losses, *(leaf.grad.clone() for leaf in leaves)])
        for leaf in leaves:
            leaf.grad.zero_()

    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
    assert any(one.abs().sum() > 0 for one in found[0][1:])


def test_tables_of_chunks_follow_the_table_that_they_were_made_of():
    """A captured head reads copies of them; one that stays as it is has no new version."""
    segments = torch.tensor([0, 3, 9], dtype=torch.int32)
    own = _segments_of_chunk(segments, 2, 6)
    version = own._version
    assert _segments_of_chunk(segments, 2, 6) is own
    assert own._version == version
    segments.copy_(torch.tensor([0, 5, 9]))

    [again] = segments_of_chunks(segments)
    assert again is own
    assert own.tolist() == [0, 3, 4]
    assert segments_of_chunks(segments.clone()) == []


@pytest.mark.parametrize(("watched", "kept"), [(False, 10**6), (False, 0), (True, 10**6)])
def test_gradients_are_added_in_place_as_a_backward_adds_them(monkeypatch, watched, kept):
    """To the same bits, parameters without one left alone; hooks behind a sum still run."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(1, 1))
    model[0].bias.requires_grad_(False)
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    before = [torch.randn_like(leaf) for leaf in leaves]
    x, seen, found = torch.randn(5, 3), [], []
    if watched:
        leaves[0].register_post_accumulate_grad_hook(seen.append)
    summed = []
    together = torch._foreach_add_
    monkeypatch.setattr(torch, "_foreach_add_", lambda *args: summed.append(together(*args)))
    for add in (cuda_graphs.add_gradients, lambda losses, *_: losses.sum().backward()):
        for leaf, value in zip(leaves, before, strict=True):
            leaf.grad = value.clone()
        addresses = [leaf.grad.data_ptr() for leaf in leaves]
        add(model[1](model[0](x)).square().sum(1), model, kept)
        found.append([leaf.grad for leaf in leaves])
        assert [leaf.grad.data_ptr() for leaf in leaves] == addresses

    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][0], before[0])
    assert torch.equal(found[0][-1], before[-1])
    assert len(seen) == 2 * watched
    assert len(summed) == (kept > 0 and not watched)


@pytest.mark.parametrize(("processes", "known"), [(1, 0), (2, 1)])
def test_rows_may_be_larger_where_processes_share_their_work(monkeypatch, processes, known):
    """Each has less to compute and as much to launch."""
    row = row_of(3)
    monkeypatch.setattr(cuda_graphs, "CAPTURED_TOKENS", row.input_ids.numel() - 1)
    monkeypatch.setattr(cuda_graphs.dist, "get_world_size", lambda group: processes)
    graphs = RowGraphs(None, torch.device("cpu"), 1, group="tp" if processes > 1 else None)

    assert graphs.run(row, torch.ones(3)) is None
    assert len(graphs._seen) == known


def test_memory_stays_free_for_rows_that_came_where_others_may_free_the_graphs():
    """Else for the largest that may come."""
    graphs, weights = RowGraphs(None, torch.device("cpu"), 16384), torch.ones(3)
    small, large = row_of(1), row_of(1, (9, 9, 9))
    for row in (small, large):
        assert graphs.run(row, weights) is None
    assert graphs.beside == 16384

    graphs.retries = True
    assert graphs.beside == large.input_ids.numel()
    for _ in range(cuda_graphs.RECENT_ROWS):
        graphs.largest_row = 0  # no row is captured, and all are counted
        graphs.run(small, weights)
    assert graphs.beside == small.input_ids.numel()


def test_tables_are_not_read_on_the_host_while_a_graph_is_captured(monkeypatch):
    """A graph would keep for all rows what one row's tables say."""
    segments = torch.tensor([0, 2, 5], dtype=torch.int32)
    monkeypatch.setattr(tables, "_is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    for read in (
        lambda: segment_read(torch.zeros(5), segments, 0, 0),
        lambda: segment_sum(torch.zeros(5), segments),
    ):
        with pytest.raises(TableNotOnDevice, match="while a CUDA graph is captured"):
            read()


def test_without_a_gpu_nothing_is_captured(tmp_path):
    """The trainer asks for graphs wherever it runs."""
    model, mesh = compile([make_job(tiny_base(tmp_path), "a")]), Mesh.alone("cpu")
    plan = Plan(planner="single")
    load(model, plan, mesh, base_tensors(model.backbone, mesh.device))

    assert apply(model, plan, mesh, largest_row=4096).graphs is None


class Pretended:
    """Stands for a graph: notes what it is asked for."""

    made: ClassVar[list[Pretended]] = []
    fails: ClassVar[Exception | None] = None

    def __init__(self, model, row, weights, device, lengths, gathering):
        self.replays, self.loaded, self.released = 0, [row], False
        self.kept, self.runs = 8, []
        self.adapted_sites = model.adapted_sites
        self.made.append(self)

    def run(self, *, adds=True):
        self.runs.append(adds)
        return torch.ones(3), self.kept

    def capture(self, pool, stream):
        self.pool = pool
        if self.fails is not None:
            raise self.fails

    def load(self, row, weights):
        self.loaded.append(row)

    def replay(self):
        self.replays += 1
        return torch.zeros(3)

    def release(self):
        self.released = True


@pytest.fixture
def graphs(monkeypatch):
    """Graphs of no model, without a GPU."""
    monkeypatch.setattr(cuda_graphs, "RowGraph", Pretended)
    monkeypatch.setattr(cuda_graphs, "forget_capture", lambda device, stream, pool: None)
    pools = itertools.count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(RowGraphs, "_fits_memory", lambda self, *_: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(Pretended, "made", [])
    monkeypatch.setattr(Pretended, "fails", None)
    return RowGraphs(
        SimpleNamespace(adapted_sites=frozenset("a"), is_open=False), torch.device("cpu"), 4096
    )


def test_graphs_share_a_pool_while_one_of_them_lives(graphs):
    """A pool of which no graph is left is gone: torch refuses to allocate in it."""

    def captured(*lengths):
        for row in rows_of_lengths(*lengths):
            for _ in range(2):
                graphs.run(row, torch.ones(3))
        return Pretended.made[-1].pool

    assert captured(16) == captured(300) == 0
    graphs.clear()
    assert captured(16) == captured(300) == 1


def rows_of_lengths(*lengths):
    ids = [[[1] * length] for length in lengths]
    return [pack([JobTokens(one, one)] * 3) for one in ids]


def test_a_form_is_captured_the_second_time_and_replayed_then(graphs):
    """The first row runs as it is, and rows of another form too."""
    one, other = rows_of_lengths(16, 300)
    told = [graphs.run(row, torch.ones(3)) for row in (one, other, one, one)]

    assert [None if one is None else one.tolist() for one in told] == [
        None, None, [1, 1, 1], [0, 0, 0],
    ]  # fmt: skip
    (made,) = Pretended.made
    assert made.replays == 1
    assert len(made.loaded) == 2


def test_rows_that_were_replayed_are_counted(graphs):
    """The row that is captured is launched itself."""
    (row,) = rows_of_lengths(16)
    for _ in range(5):
        graphs.run(row, torch.ones(3))

    assert graphs.rows_replayed == 3


def test_a_site_that_is_adapted_later_is_captured_anew(graphs):
    """One that is adapted no more may stay in a graph: its kernels find no rows."""
    (row,) = rows_of_lengths(16)
    for filled, captured in (("a", 1), ("ab", 2), ("b", 2), ("abc", 3)):
        graphs.model.adapted_sites = frozenset(filled)
        for _ in range(3):
            graphs.run(row, torch.ones(3))
        assert graphs.captured == captured

    assert [one.released for one in Pretended.made] == [True, True, False]
    assert len(graphs.keys) == 1


def test_a_rare_form_takes_no_place_from_a_frequent_one(graphs):
    """Capturing costs more than launching: a place goes to a form that comes far more often."""
    rows = rows_of_lengths(16, 100, 300)
    for row in (*rows[:2], *rows[:2], rows[1]):
        graphs.run(row, torch.ones(3))
    first = graphs.keys

    for _ in range(4):
        graphs.run(rows[2], torch.ones(3))
    assert graphs.keys == first
    graphs.run(rows[2], torch.ones(3))

    assert len(graphs.keys) == 2
    assert graphs.keys != first
    assert [one.released for one in Pretended.made] == [True, False, False]


def test_no_memory_leaves_one_form_and_a_refusal_all(graphs, monkeypatch):
    """A model that cannot be captured is not tried again; what was captured is let go of."""
    small, large, other = rows_of_lengths(16, 100, 300)
    for row in (small, small):
        graphs.run(row, torch.ones(3))
    monkeypatch.setattr(Pretended, "fails", torch.cuda.OutOfMemoryError("no memory"))
    for row in (large, large):
        graphs.run(row, torch.ones(3))
    assert graphs.refused == ""
    assert graphs.skipped_no_memory == 1
    assert len(graphs.keys) == 1

    monkeypatch.setattr(Pretended, "fails", TableNotOnDevice("reads a table"))
    for row in (other, other):
        graphs.run(row, torch.ones(3))

    assert "reads a table" in graphs.refused
    assert graphs.keys == []
    assert all(one.released for one in Pretended.made)
    assert graphs.run(small, torch.ones(3)) is None


def test_a_capture_that_fails_among_processes_ends_the_run(graphs, monkeypatch):
    """Others wait for its sums, or FSDP2 stands in the middle of a gather: nothing can go on."""
    (row,) = rows_of_lengths(16)
    graphs.gathering = SideStreams()
    graphs.run(row, torch.ones(3))
    monkeypatch.setattr(Pretended, "fails", RuntimeError("operation not permitted"))

    with pytest.raises(PlanNotRunnable, match="--no-cuda-graphs"):
        graphs.run(row, torch.ones(3))


def test_the_steps_of_a_ladder_are_captured_at_once(graphs, monkeypatch):
    """The largest first; one that no row has come to runs without leaving gradients."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 48)
    graphs.model.jobs = [None] * 3
    rows = rows_of_lengths(16, 300)
    graphs.use(RowLadder.of([*map(size_of, rows), RowSize(2000, 4, 1000, 1500)]))
    rows = [pack_to(graphs.ladder, length) for length in (16, 300)]
    told = [graphs.run(row, torch.ones(3)) for row in (*rows, *rows)]
    assert [one.tolist() for one in told] == [[1, 1, 1]] * 4
    assert graphs.keys == []
    graphs.capture_steps(0)

    assert graphs.keys == sorted(graphs.ladder.steps, reverse=True)
    assert [one.runs for one in Pretended.made] == [[True, True], [True, True], [False]]
    assert len({one.pool for one in Pretended.made}) == 1
    assert [graphs.run(row, torch.ones(3)).tolist() for row in rows] == [[0, 0, 0]] * 2
    graphs.capture_steps(0)
    assert graphs.captured == 3
    graphs.use(RowLadder())
    assert graphs.keys == []
    assert all(one.released for one in Pretended.made)


def test_rows_of_an_open_model_are_captured_when_they_come_again(graphs):
    """Whoever comes next changes the ladder: nothing is captured for all of it."""
    graphs.model.is_open, graphs.model.jobs = True, [None] * 3
    rows = rows_of_lengths(16, 300)
    graphs.use(RowLadder.of(map(size_of, rows)))
    row = pack_to(graphs.ladder, 300)
    told = [graphs.run(row, torch.ones(3)) for _ in range(3)]
    graphs.capture_steps(0)

    assert [None if one is None else one.tolist() for one in told] == [None, [1, 1, 1], [0, 0, 0]]
    assert graphs.captured == 1


def pack_to(ladder, length):
    """A row of three sequences, as long as its step."""
    jobs = [JobTokens([[1] * length], [[1] * length])] * 3
    return pack(jobs, ladder.step_for(size_of_jobs(jobs)).tokens)


def test_a_step_without_memory_leaves_its_place_to_smaller_ones(graphs, monkeypatch):
    """What a graph's pool has already counts for the next."""
    graphs.model.jobs = [None] * 3
    asked = []
    monkeypatch.setattr(
        RowGraphs, "_fits_memory", lambda self, *given: asked.append(given) or given[0] < 50
    )
    sizes = [RowSize(tokens, 3, 100, tokens) for tokens in (64, 900, 2000)]
    graphs.use(RowLadder.of(sizes))
    kept = {2000: 70, 900: 40, 64: 8}
    monkeypatch.setattr(
        Pretended, "run", lambda self, *, adds=True: setattr(
            self, "kept", kept[self.loaded[0].input_ids.numel()]
        ),
    )  # fmt: skip
    kept |= {
        step.tokens: kept[size.tokens]
        for step, size in zip(graphs.ladder.steps, sizes, strict=True)
    }
    graphs.capture_steps(7)

    assert [given[:2] for given in asked] == [(70, 70), (40, 40), (8, 0)]
    assert {given[3] for given in asked} == {7}
    assert len(graphs.keys) == 2
    assert graphs.skipped_no_memory == 1


class Replayed:
    """In a graph's place: what it leaves is what was computed when it was made."""

    def replay(self):
        """Nothing is computed again."""


def asked_by(graph, rounds):
    """The keys that are given in rounds that ask for some, one after the other."""
    given = []
    for asked in rounds:
        kept = Norms()
        graph.give(kept)
        given.append("".join(key for (key,) in kept))
        for key in asked:
            graph.note((key,), partial(torch.ones, 1))
    return given


def test_norms_are_computed_at_once_where_two_rounds_asked_for_the_same(monkeypatch):
    """Others, or more, are let go of and made anew."""
    made = lambda _, asked: (Replayed(), [compute() for compute in asked.values()])  # noqa: E731
    monkeypatch.setattr(NormGraph, "_record", made)
    graph = NormGraph(torch.device("cpu"), {})

    given = asked_by(graph, ["ab", "ab", "ab", "ac", "ac", "acd", "acd", "acd"])

    assert given == ["", "", "ab", "ab", "", "ac", "", "acd"]
    graph.clear()
    assert asked_by(graph, ["a", "a", "a"]) == ["", "", "a"]


@pytest.mark.parametrize("memory", [False, True])
def test_a_graph_of_norms_that_cannot_be_made_is_tried_again_for_memory_alone(monkeypatch, memory):
    """After two more rounds; for another reason after everything was let go of."""
    tried = []

    def record(_, asked):
        tried.append("".join(key for (key,) in asked))
        raise torch.cuda.OutOfMemoryError if memory else RuntimeError("it cannot be captured")

    monkeypatch.setattr(NormGraph, "_record", record)
    graph = NormGraph(torch.device("cpu"), {})

    assert asked_by(graph, ["a"] * 6) == [""] * 6
    assert tried == (["a", "a"] if memory else ["a"])
    graph.clear()
    asked_by(graph, ["a"] * 3)
    assert tried == ["a"] * (3 if memory else 2)


def test_nothing_is_kept_of_a_base_that_is_sharded(monkeypatch):
    """Its weights lie somewhere else each time, by whatever they are gathered."""
    monkeypatch.setattr(apply_module, "gathered_bytes", lambda _: 0)
    monkeypatch.setattr(apply_module, "why_launched", lambda group: [])
    mesh = SimpleNamespace(device=torch.device("cpu"), tp=None)
    model = SimpleNamespace(group=None)

    whole, *sharded = (
        apply_module._graphs(model, mesh, 1, part)
        for part in (None, SimpleNamespace(gathering=None), SimpleNamespace(gathering=object()))
    )

    assert whole.norms is not None
    assert [graphs.norms for graphs in sharded] == [None, None]


def test_norms_are_computed_at_once_for_rows_too_large_to_be_captured():
    """Unless no graph can be made; what is kept of weights serves all rows."""
    graphs, row = RowGraphs(None, torch.device("cpu"), 0), row_of(1)
    seen = []
    for graphs.most, graphs.refused in ((10**6, ""), (1, ""), (1, "read on the host")):
        with graphs.launching(row):
            seen.append((dora._lengths is graphs._lengths, dora._at_once is graphs.norms))

    assert seen == [(True, False), (True, True), (True, False)]


def test_rows_that_are_launched_are_cut_by_jobs_and_add_gradients_at_once(tmp_path, monkeypatch):
    """Told how many bytes the forward kept; evaluation is no graph's either."""
    base = tiny_base(tmp_path)
    model, plan, mesh = compile([make_job(base, "a")]), Plan(planner="single"), Mesh.alone("cpu")
    load(model, plan, mesh, base_tensors(model.backbone, mesh.device))
    start_adapters(model)
    runner, weights = apply(model, plan, mesh), torch.ones(1, dtype=torch.float64)
    added, cut, bytes_allocated = [], [], iter((100, 350))
    monkeypatch.setattr(apply_module, "_allocated", lambda _: next(bytes_allocated))
    monkeypatch.setattr(apply_module, "add_gradients", lambda *call: added.append(call[1:]))
    weighted, forward = model.weighted, model.forward
    monkeypatch.setattr(
        model, "weighted", lambda *call: cut.append(may_cut_by_jobs()) or weighted(*call)
    )
    runner.run([row_of(1, (2,))], weights)
    monkeypatch.setattr(
        model, "forward", lambda *call: cut.append(may_cut_by_jobs()) or forward(*call)
    )
    runner.evaluate([row_of(2, (2,))])

    assert added == [(model, 250)]
    assert cut == [True, True]


def test_rows_are_cut_by_jobs_only_where_no_graph_will_hold_them():
    """What is launched before a capture must be what is captured: a capture loads no kernel."""
    graphs, row = RowGraphs(None, torch.device("cpu"), 0), row_of(1)
    seen = []
    for graphs.most, graphs.refused in ((10**6, ""), (1, ""), (10**6, "read on the host")):
        with graphs.launching(row):
            seen.append(may_cut_by_jobs())

    assert seen == [False, True, True]
    assert not may_cut_by_jobs()


def test_kernels_are_asked_for_of_all_rows_that_will_be_captured(graphs):
    """Of the row itself alone where it is no step of the ladder, or where rows come and go."""
    graphs.model.jobs = [None] * 3
    rows = rows_of_lengths(16, 300)
    graphs.use(RowLadder.of([*map(size_of, rows), RowSize(2000, 4, 1000, 1500)]))
    row = pack_to(graphs.ladder, 300)

    asked = [size_of(form) for form in graphs.forms(row)]
    assert asked[0].tokens == row.input_ids.numel()
    assert sorted(asked) == sorted(graphs.ladder.steps)

    graphs.model.is_open = True
    assert [size_of(form) for form in graphs.forms(row)] == asked[:1]
    graphs.use(RowLadder())
    assert len([*graphs.forms(row)]) == 1


def test_a_layer_of_each_structure_stands_for_all_others(tmp_path):
    """One whose inputs ask for a gradient is another; afterwards all layers run."""
    base = tiny_base(tmp_path, num_hidden_layers=4)
    model, plan, mesh = compile([make_job(base, "a")]), Plan(planner="single"), Mesh.alone("cpu")
    load(model, plan, mesh, base_tensors(model.backbone, mesh.device))
    start_adapters(model)
    row = row_of(1, (2,))
    (layers,) = (block.instances for block in model.group.blocks.values() if block.name != HEAD)
    first, *others = (model.net.get_submodule(path) for path in layers)
    ran, whole = [], model(row)
    for layer in (first, *others):
        layer.register_forward_hook(lambda layer, *_: ran.append(layer))

    with each_structure_once(model) as idle:
        losses = model(row)
        losses.sum().backward()

    assert idle == others[1:]
    assert losses.shape == whole.shape
    trained = [layer for layer in (first, *others) if any(gradients_of(layer))]
    assert trained == [first, others[0]]
    assert torch.equal(model(row), whole)
    assert ran.count(first) == 2


def gradients_of(layer):
    return [each.grad.any() for each in layer.parameters() if each.grad is not None]
