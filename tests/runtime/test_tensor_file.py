"""Files of safetensors in main memory: the library reads what we write, and we what it writes."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext

import pytest
import safetensors.torch
import torch

from tlora_fx.runtime.checkpoints import tensor_file
from tlora_fx.runtime.checkpoints.tensor_file import (
    as_file,
    file_tensors,
    moved,
    read_tensors,
    tensor_bytes,
)


def plain() -> dict[str, torch.Tensor]:
    """Of one dtype: views of one storage, a scalar, and an empty one."""
    whole = torch.arange(24.0).reshape(4, 6)
    return {
        "b.ü": whole[1:3],
        "a": whole.t(),
        "none": torch.empty(0, 3),
        "one": torch.tensor(3.0),
    }


def mixed() -> dict[str, torch.Tensor]:
    """Of several."""
    return {
        **plain(), "odd": torch.tensor([1, 2, 3], dtype=torch.uint8), "long": torch.arange(3),
        "half": torch.ones(3, dtype=torch.bfloat16), "flag": torch.tensor([True]),
    }  # fmt: skip


def read(content):
    return file_tensors(memoryview(bytearray(content)))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_tensors_are_written_as_safetensors_writes_them(tmp_path):
    """Byte for byte where they are of one dtype."""
    alone = {name: tensor.contiguous().clone() for name, tensor in plain().items()}

    assert bytes(tensor_bytes(plain())) == safetensors.torch.save(alone, {"format": "pt"})
    assert safetensors.torch.load(bytes(tensor_bytes({}))) == {}
    (tmp_path / "mixed").write_bytes(tensor_bytes(mixed()))
    assert_same(safetensors.torch.load_file(tmp_path / "mixed"), mixed())


@pytest.mark.parametrize("piece", [1, 7, 1 << 24])
def test_threads_read_a_file_in_pieces(tmp_path, monkeypatch, piece):
    """All of it, whatever the size of a piece; one that is cut short is none."""
    monkeypatch.setattr(tensor_file, "STAGED", piece)
    content = bytes(tensor_bytes(mixed()))
    file = tmp_path / "file"
    file.write_bytes(content)
    assert_same(read_tensors(file), mixed())

    for size in (0, 5, 60, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises((ValueError, RuntimeError)):
            read_tensors(file)


def test_what_lies_as_in_a_file_is_written_without_a_copy():
    """Also what was read from one; other tensors, or others' names for these, are copied."""
    lying = as_file(mixed())
    content = tensor_bytes(lying)

    assert_same(lying, mixed())
    assert bytes(content) == bytes(tensor_bytes(mixed()))
    lying["long"].fill_(7)
    assert bytes(content) == bytes(tensor_bytes(lying))
    again = read(bytes(content))
    again["long"].fill_(8)
    written = tensor_bytes(again)
    assert read(bytes(written))["long"].tolist() == [8, 8, 8]
    swapped = {{"odd": "add", "one": "two"}.get(name, name): each for name, each in lying.items()}
    assert_same(read(bytes(tensor_bytes(swapped))), swapped)
    turned = lying | {"a": lying["a"].t().contiguous().t()}
    assert_same(read(bytes(tensor_bytes(turned))), turned)
    assert_same(read(bytes(tensor_bytes({"a": lying["a"]}))), {"a": lying["a"]})


@pytest.mark.parametrize("most", [0, 17, 64])
def test_large_tensors_come_one_by_one(monkeypatch, most):
    """What is put together is bounded; the file is the same."""
    expected = bytes(tensor_bytes(mixed()))
    monkeypatch.setattr(tensor_file, "TOGETHER", most)

    assert bytes(tensor_bytes(mixed())) == expected


class Device:
    """A GPU that copies late: when somebody waits for an event, or at the end."""

    def __init__(self):
        self.asked, self.done, self.lock = [], 0, threading.Lock()

    def copy(self, target, source, *, non_blocking):
        assert non_blocking
        with self.lock:
            self.asked.append((target, source))
        return target

    def finish(self, count):
        """Do the first so many of all copies that it was ever asked for."""
        with self.lock:
            while self.done < count:
                target, source = self.asked[self.done]
                target.numpy()[...] = source.numpy()
                self.done += 1


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 127, 128, 129, 1000])
@pytest.mark.parametrize("way", ["up", "down"])
def test_pieces_are_copied_in_their_order(monkeypatch, size, way):
    """By threads, from and to a device that copies as late as it may."""
    device = Device()

    class Event:
        """The end of all that the device was asked for before."""

        before = 0

        def record(self):
            self.before = len(device.asked)

        def synchronize(self):
            device.finish(self.before)

    def empty(size, *, dtype, pin_memory):
        return torch.zeros(size, dtype=dtype)

    def copy(target, source, *, non_blocking):
        return device.copy(target, source, non_blocking=non_blocking)

    source, target = (torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(2))
    monkeypatch.setattr(tensor_file, "STAGED", 16)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "empty", empty)
    stage = tensor_file._Stage(torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "copy_", copy)

    for _ in range(3):
        getattr(stage, way)(source, target)
        device.finish(len(device.asked))
        assert torch.equal(source, target)
        source.add_(1)


def test_files_are_read_that_others_wrote():
    """Whatever their order is: a tensor may begin where its dtype may not."""
    theirs = {name: tensor.contiguous().clone() for name, tensor in mixed().items()}
    assert_same(read(bytes(safetensors.torch.save(theirs))), theirs)

    header = json.dumps({
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "wide": {"dtype": "F64", "shape": [1, 2], "data_offsets": [1, 17]},
    }).encode()  # fmt: skip
    wide = torch.tensor([[1.5, -2.0]], dtype=torch.float64)
    content = len(header).to_bytes(8, "little") + header + b"x" + wide.numpy().tobytes()
    assert torch.equal(read(bytes(content))["wide"], wide)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        (2**40).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"[[]]",
        (62).to_bytes(8, "little")
        + b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
        (61).to_bytes(8, "little")
        + b'{"x": {"dtype": "F99", "shape": [0], "data_offsets": [0, 0]}}',
    ],
)
def test_what_is_no_file_is_refused(content):
    """By errors that a checkpoint's reader knows."""
    with pytest.raises((
        ValueError, KeyError, TypeError, AttributeError, RuntimeError, safetensors.SafetensorError,
    )):  # fmt: skip
        read(bytes(content))


def test_tensors_that_share_a_storage_are_moved_together():
    """The others come as they are; on the device itself nothing is copied."""
    tensors = as_file(plain()) | {"apart": torch.ones(2)}
    there = moved(tensors, torch.device("meta"))

    assert [each.shape for each in there.values()] == [each.shape for each in tensors.values()]
    assert all(each.device.type == "meta" for each in there.values())
    assert all(there[name].stride() == tensors[name].stride() for name in tensors)
    same = moved(tensors, torch.device("cpu"))
    assert all(same[name] is tensor for name, tensor in tensors.items())
