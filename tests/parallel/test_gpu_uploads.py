"""A base's tensors arrive on a GPU whole, in whatever order they are asked for."""

from __future__ import annotations

import pytest
import torch

from tlora_fx.model import late_tensors
from tlora_fx.model.late_tensors import LoadedTensors, MergesLater
from tlora_fx.parallel import uploads
from tlora_fx.parallel.uploads import UploadedTensors

pytestmark = pytest.mark.gpu


@pytest.fixture
def tensors(monkeypatch):
    """Sizes below, at and above a buffer; some are no candidates for a copy ahead."""
    monkeypatch.setattr(uploads, "BUFFER_BYTES", 2**16)
    monkeypatch.setattr(uploads, "MIN_BYTES", 2**12)
    monkeypatch.setattr(uploads, "AHEAD_BYTES", 2**18)
    draw = torch.Generator().manual_seed(0)
    sizes = [(3,), (2**15, 2), (77, 1001), (2**16,), (5, 2**16), (257, 33), (1,)]
    made = {
        f"{index}-{dtype}": torch.randn(size, generator=draw).to(dtype)
        for index, size in enumerate(sizes * 3)
        for dtype in (torch.float32, torch.bfloat16)
    }
    made["turned"] = torch.randn(300, 200, generator=draw).t()
    made["integers"] = torch.randint(0, 99, (4096,), generator=draw)
    return made


@pytest.mark.parametrize("order", ["forward", "every other", "backward"])
def test_tensors_arrive_whole(tensors, order):
    """Also where memory that a kernel still reads is given to the next one."""
    device = torch.device("cuda", 0)
    names = {"forward": list(tensors), "every other": [*tensors][::2]}
    names["backward"] = names["forward"][::-1]
    with UploadedTensors(tensors, device, tensors) as base:
        for name in names[order]:
            found = base[name].to(device)
            assert torch.equal(found.cpu(), tensors[name]), name
            del found
        assert torch.equal(base[names[order][0]].cpu(), tensors[names[order][0]])
        assert list(base) == list(tensors)
    assert base._bytes >= 0


def test_tensors_that_nobody_takes_are_left(tensors):
    """The context ends with tensors on their way."""
    with UploadedTensors(tensors, torch.device("cuda", 0), tensors) as base:
        assert base[next(iter(tensors))] is not None


def test_small_tensors_between_large_ones_end_no_copies(tensors):
    """A norm between matrices: every matrix is on the GPU when it is asked for."""
    sent = [
        name
        for name, tensor in tensors.items()
        if tensor.nbytes >= uploads.MIN_BYTES and tensor.is_contiguous()
    ]
    with UploadedTensors(tensors, torch.device("cuda", 0), tensors) as base:
        assert [name for name in tensors if base[name].is_cuda] == sent


def test_memory_of_tensors_that_nobody_took_is_used_behind_their_copies(monkeypatch):
    """A copy that still runs at the context's end does not write into its next owner's tensor."""
    device = torch.device("cuda", 0)
    tensors = {str(index): torch.ones(2**24) for index in range(9)}
    with torch.cuda.device(device):
        begin = UploadedTensors._copy

        def late(self, source, target, free):
            begin(self, torch.ones(1), target[:1], free)  # makes the thread's stream
            with torch.cuda.stream(self._own.stream):
                torch.cuda._sleep(10**9)
            return begin(self, source[: 2**12], target[: 2**12], free)

        monkeypatch.setattr(UploadedTensors, "_copy", late)
        whole = {"small": torch.ones(1), **tensors}
        with UploadedTensors(whole, device, whole) as base:
            assert not base["small"].is_cuda
        after = [torch.zeros(2**24, device=device) for _ in range(9)]
        torch.cuda.synchronize()

        assert sum(int(each.count_nonzero()) for each in after) == 0


@pytest.mark.parametrize("part", [1, 2**40], ids=["many threads", "one thread"])
def test_a_tensor_in_pieces_arrives_whole(monkeypatch, tensors, part):
    """Experts with two matrices each, larger and smaller than a buffer."""
    monkeypatch.setattr(late_tensors, "LATE_BYTES", 0)
    monkeypatch.setattr(uploads, "PART_BYTES", part)
    experts = [list(torch.randn(5, 40, width)) for width in (300, 2000)]
    with MergesLater() as later:
        late = {
            str(number): later.late(torch.cat([torch.stack(each), torch.stack(each)], dim=1))
            for number, each in enumerate(experts)
        }

    with UploadedTensors(LoadedTensors(late), torch.device("cuda", 0), late) as base:
        for number, each in enumerate(experts):
            found = base[str(number)]
            assert found.is_cuda
            both = torch.stack(each)
            assert torch.equal(found.cpu(), torch.cat([both, both], dim=1))
