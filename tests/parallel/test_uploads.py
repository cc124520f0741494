"""Which tensors of a base threads copy ahead, and what the end waits for; on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.groups import make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.model import late_tensors
from tlora_fx.model.late_tensors import LateTensor, LoadedTensors, MergesLater
from tlora_fx.parallel import uploads
from tlora_fx.parallel.uploads import UploadedTensors
from tlora_fx.runtime.adapters.files import base_tensors

LAYERS = range(30)
CPU = torch.device("cpu")
PARTS = {"norm": 4, "query": 1000, "key": 1000}


class Stream:
    """Stands for a GPU's stream; `behind` holds those that it has waited for."""

    def __init__(self):
        self.behind = []

    def record_event(self):
        return None

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        self.behind.append(stream)


@pytest.fixture
def current(monkeypatch):
    """The current stream; a thread has one too, and copies at once."""
    stream = Stream()

    def copy(self, pairs, free):
        if not hasattr(self._own, "stream"):
            self._own.stream = Stream()
            self._streams.append(self._own.stream)
        for source, target in pairs:
            target.copy_(source)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(UploadedTensors, "_copy", copy)
    monkeypatch.setattr(uploads, "MIN_BYTES", 1000)
    monkeypatch.setattr(uploads, "AHEAD_BYTES", 20_000)
    return stream


@pytest.fixture
def tensors():
    """Two matrices and a norm a layer, and the embedding at the end."""
    sizes = {f"{layer}.{name}": size for layer in LAYERS for name, size in PARTS.items()}
    return {name: torch.ones(size) for name, size in {**sizes, "embedding": 1000}.items()}


def sent(base, tensors, names):
    return [name for name in names if base[name] is not tensors[name]]


def test_each_matrix_is_sent_whatever_lies_between(current, tensors):
    """Norms, which are too small, stand before their layer's matrices and are asked for behind."""
    names = [f"{layer}.{name}" for layer in LAYERS for name in ("query", "key", "norm")]

    with UploadedTensors(tensors, CPU, tensors) as base:
        assert sent(base, tensors, names) == [name for name in names if "norm" not in name]


def test_tensors_are_sent_in_the_order_that_was_told(current, tensors):
    """Those of which nothing was told come from main memory."""
    names = ["embedding", "7.key", "3.query"]

    with UploadedTensors(tensors, CPU, names) as base:
        assert sent(base, tensors, [*names, "0.query"]) == names


def test_a_tensor_in_pieces_is_sent_piece_by_piece(current, monkeypatch):
    """Into the memory of the whole, which is put together nowhere else."""
    monkeypatch.setattr(late_tensors, "LATE_BYTES", 0)
    monkeypatch.setattr(LateTensor, "whole", None)
    monkeypatch.setattr(uploads, "PART_BYTES", 5000)
    experts = list(torch.randn(6, 30, 20))
    with MergesLater() as later:
        merged = torch.stack(experts)

    with UploadedTensors(LoadedTensors({"experts": later.late(merged)}), CPU, ["experts"]) as base:
        assert torch.equal(base["experts"], torch.stack(experts))
    assert base._bytes == 0


def test_pieces_that_lie_apart_in_the_whole_are_put_together_before(current, monkeypatch):
    """A thread fills memory that lies together."""
    monkeypatch.setattr(late_tensors, "LATE_BYTES", 0)
    parts = list(torch.randn(6, 30, 20))
    with MergesLater() as later:
        merged = torch.cat(parts, dim=1)

    with UploadedTensors(LoadedTensors({"all": later.late(merged)}), CPU, ["all"]) as base:
        assert torch.equal(base["all"], torch.cat(parts, dim=1))
        assert not base._streams


def test_without_memory_nothing_is_sent_ahead(current, tensors, monkeypatch):
    """What is asked for is, as before; the next one is tried again."""
    start, asked = UploadedTensors._start, []

    def refuse(self, name):
        asked.append(name)
        if len(asked) in (2, 4):
            raise torch.OutOfMemoryError
        start(self, name)

    monkeypatch.setattr(UploadedTensors, "_start", refuse)
    with UploadedTensors(tensors, CPU, ["0.query", "0.key", "1.query"]) as base:
        found = sent(base, tensors, ["0.query", "0.key", "1.query"])

    assert found == ["0.query", "0.key", "1.query"]
    assert asked == ["0.query", "0.key", "0.key", "1.query", "1.query"]


def test_a_tensor_that_is_asked_for_again_ends_no_copies(current, tensors):
    """It comes from main memory, and those behind it are sent."""
    with UploadedTensors(tensors, CPU, tensors) as base:
        assert sent(base, tensors, ["0.query", "0.query", "1.query"]) == ["0.query", "1.query"]


def test_memory_of_tensors_that_nobody_took_is_used_behind_their_copies(current, tensors):
    """The current stream waits for each thread's: a copy may still run when threads have ended."""
    with UploadedTensors(tensors, CPU, tensors) as base:
        assert base["0.query"] is not tensors["0.query"]
        assert base._on_way

    assert base._streams
    assert current.behind == base._streams


class Asked(dict):
    """A base that notes what it is asked for."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.names = []

    def get(self, name, default=None):
        self.names.append(name)
        return super().get(name, default)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_tells_the_order_in_which_it_takes_its_base(tmp_path, tied):
    """Each name once, also one that stands for the embedding and the head."""
    base = tiny_base(tmp_path, tie_word_embeddings=tied)
    model = compile([make_job(base, "a", seed=1, max_steps=1)])
    tensors = Asked(base_tensors(model.backbone))
    names = model.base_names()
    model.materialize(tensors, "cpu")

    assert len(set(names)) == len(names) > 10
    assert [name for name in dict.fromkeys(tensors.names) if name in names] == names
