"""Digests tell other content from the same, and are made once."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
import safetensors.torch
import torch

from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BaseNotLoadable
from tlora_fx.runtime.checkpoints import digests
from tlora_fx.runtime.checkpoints.digests import base_digests, file_digest

OLD = 10**18


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "cache"))


def tensors():
    return {"a": torch.zeros(4, 8), "b": torch.zeros(400, 64), "c": torch.zeros(3)}


def weights(folder, *parts):
    """A base whose tensors lie in so many files."""
    folder.mkdir()
    names = [f"model-{number}.safetensors" for number in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        safetensors.torch.save_file(part, folder / name)
    index = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    whole = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    return BaseSpec(model=str(folder))


def test_the_same_tensors_in_other_files_are_the_same_base(tmp_path):
    """How a checkpoint is cut into files says nothing of what it holds."""
    all_of_them = tensors()
    one = weights(tmp_path / "one", all_of_them)
    two = weights(
        tmp_path / "two", {"b": all_of_them["b"]}, {n: all_of_them[n] for n in ("a", "c")}
    )

    assert base_digests(one) == base_digests(two)


def test_a_changed_tensor_is_told_by_its_name(tmp_path):
    """The others' digests are as before."""
    changed = tensors()
    changed["b"][0, 0] = 1
    before = base_digests(weights(tmp_path / "one", tensors()))
    after = base_digests(weights(tmp_path / "two", changed))

    assert {name for name in before if before[name] != after[name]} == {"b"}


def test_all_bytes_of_a_base_are_read_on_request_only(tmp_path):
    """One number between the sampled blocks changes the whole digest alone."""
    changed = tensors()
    changed["b"].view(-1)[digests.BLOCK_BYTES // 4 + 1] = 1
    one, two = weights(tmp_path / "one", tensors()), weights(tmp_path / "two", changed)

    assert base_digests(one) == base_digests(two)
    assert base_digests(one, whole=True) != base_digests(two, whole=True)


def test_a_large_file_is_read_again_only_after_it_was_written(tmp_path, monkeypatch):
    """Two looks at one content read it once; the next content is read."""
    read = []
    plain = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *words: read.append(1) or plain(*words))
    path = tmp_path / "data.jsonl"
    path.write_bytes(bytes(digests.KEPT_FROM_BYTES))
    os.utime(path, ns=(OLD, OLD))
    first = [file_digest(path), file_digest(path)]
    written = path.stat().st_ctime_ns
    path.write_bytes(b"1" * digests.KEPT_FROM_BYTES)
    # A file system counts in ticks of some milliseconds, and this may be the same one.
    while path.stat().st_ctime_ns == written:
        os.utime(path, ns=(OLD, OLD))
    os.utime(path, ns=(OLD, OLD))

    assert first[0] == first[1]
    assert len(read) == 1
    assert file_digest(path) != first[0]


def test_half_a_file_of_weights_is_refused(tmp_path):
    """The message names the file."""
    spec = weights(tmp_path / "base", tensors())
    path = tmp_path / "base" / "model-0.safetensors"
    path.write_bytes(path.read_bytes()[:-9])

    with pytest.raises(BaseNotLoadable, match=r"model-0\.safetensors"):
        base_digests(spec)
