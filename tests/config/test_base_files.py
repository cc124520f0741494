"""A base whose files are cut, damaged, missing or somebody else's is told before it is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.models import error_of
from tlora_fx.config import base_files
from tlora_fx.config.base_files import (
    require_base_files,
    require_weight_files,
    safetensors_header,
    weight_files,
)
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import (
    BaseFileDamaged,
    BaseFileRefused,
    RemoteCodeRefused,
    TokenizerNotLoadable,
)
from tlora_fx.model.backbone import load_config
from tlora_fx.runtime.data.tokenizer import load_tokenizer

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def base(tmp_path):
    """A folder with a config, a tokenizer, and weights in two files."""
    folder = tmp_path / "base"
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    safetensors.torch.save_file({"a": torch.ones(16, 8), "b": torch.ones(8)}, folder / FIRST)
    safetensors.torch.save_file({"c": torch.ones(3).bfloat16()}, folder / SECOND)
    named = {"a": FIRST, "b": FIRST, "c": SECOND}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return folder


def told(folder, kind=BaseFileDamaged):
    return error_of(lambda: require_base_files(BaseSpec(model=str(folder))), kind)


def with_header(path, header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def renamed(folder, name):
    index = {"metadata": {}, "weight_map": {"a": name}}
    (folder / INDEX).write_text(json.dumps(index))


def test_a_whole_base_passes_and_is_not_read_twice(base, monkeypatch):
    """Not one of its files, as long as none has changed."""
    spec = BaseSpec(model=str(base))
    require_base_files(spec)
    read = []
    monkeypatch.setattr(base_files, "safetensors_header", read.append)
    require_base_files(spec)

    assert read == []
    assert weight_files(spec) == [base / FIRST, base / SECOND]


def test_a_header_is_that_of_the_library(base):
    """Names, dtypes, shapes, and bytes that are those of the tensors."""
    header = safetensors_header(base / SECOND)
    tensor = header["c"]

    assert (list(header), tensor.dtype, tensor.shape) == (["c"], "BF16", (3,))
    assert (base / SECOND).read_bytes()[tensor.begin : tensor.end] == b"\x80\x3f" * 3


@pytest.mark.parametrize("length", [0, 5, 40, -1])
def test_a_cut_file_is_named(base, length):
    """Before, within and after its header."""
    whole = (base / SECOND).read_bytes()
    (base / SECOND).write_bytes(whole[:length])

    assert SECOND in told(base)


def test_a_longer_file_is_told_with_both_sizes(base):
    """What was appended would be read as nothing, but the file is another than was written."""
    size = (base / SECOND).stat().st_size
    with (base / SECOND).open("ab") as file:
        file.write(b"\0" * 7)

    text = told(base)
    assert f"{size} bytes, as its header says" in text
    assert f"{size + 7} bytes" in text


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"\xff{}", "JSON"),
        (b"[" * 100_000, "nested too deep"),
        ([], "a JSON object"),
        ({"c": None}, "a known dtype"),
        ({"c": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, "a known dtype"),
        ({"c": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "a known dtype"),
        ({"c": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4]}}, "a known dtype"),
        ({"c": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "8 bytes of tensor 'c'"),
        ({"c": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "a gap at byte"),
        ({"c": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, "is cut"),
    ],
)
def test_a_wrong_header_is_told(base, header, expected):
    """Whatever it claims; no memory is taken for what it claims."""
    with_header(base / SECOND, header, bytes(4))

    text = told(base)
    assert SECOND in text
    assert expected in text


def test_a_header_that_claims_to_be_longer_than_its_file_is_not_read(base):
    """Its length is compared with the size of the file."""
    (base / SECOND).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")

    assert f"{1 << 62} bytes" in told(base)


def test_an_index_is_compared_with_the_headers(base):
    """A tensor that no file has is named; so is a file that is not there."""
    index = json.loads((base / INDEX).read_text())
    index["weight_map"]["d"] = SECOND
    (base / INDEX).write_text(json.dumps(index))
    assert "expected  d" in told(base)

    (base / SECOND).unlink()
    assert SECOND in told(base)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..", "", 3, None]
)
def test_an_index_cannot_name_a_file_elsewhere(base, name):
    """Whether there is one or not."""
    safetensors.torch.save_file({"a": torch.ones(1)}, base.parent / "x.safetensors")
    renamed(base, name)

    assert "outside its folder" in told(base, BaseFileRefused)


def test_files_of_weights_without_their_index_are_told(base):
    """transformers would not know which to load."""
    (base / INDEX).unlink()

    text = told(base)
    assert "and no index" in text
    assert f"{FIRST}, {SECOND}" in text


def test_pickled_weights_are_refused(base):
    """Named by an index, or alone in the folder."""
    renamed(base, "pytorch_model.bin")
    assert "no safetensors file" in told(base, BaseFileRefused)

    for name in (INDEX, FIRST, SECOND):
        (base / name).unlink()
    (base / "pytorch_model.bin").write_bytes(b"")
    assert "a pickle may run any code" in told(base, BaseFileRefused)

    (base / "pytorch_model.bin").unlink()
    assert "holds no weights" in told(base)


def test_a_folder_that_would_bring_another_base_is_refused(base):
    """transformers would follow an adapter's config to whatever folder that names."""
    (base / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')

    assert "holds an adapter" in told(base, BaseFileRefused)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX])
@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe{}", b"[]", b"[" * 100_000])
def test_a_damaged_json_file_is_named(base, name, content):
    """Cut, of another encoding, no object, nested too deep."""
    (base / name).write_bytes(content)

    assert name in told(base)


@pytest.mark.parametrize(
    ("field", "value"),
    [("architectures", 5), ("architectures", [None]), ("auto_map", []), ("model_type", 3)],
)
def test_a_field_of_the_config_of_another_kind_is_told(base, field, value):
    """With the field, and what it should be."""
    (base / "config.json").write_text(json.dumps({field: value}))

    assert f"wrong '{field}'" in told(base)


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "hidden_size", "vocab_size", "head_dim", "num_experts"]
)
def test_a_config_that_asks_for_more_than_the_weights_hold_is_told(base, field):
    """Before a model of that size is built."""
    config = json.loads((base / "config.json").read_text()) | {field: 10**9}
    (base / "config.json").write_text(json.dumps(config))

    assert field in told(base)
    for path in base.glob("model*"):
        path.unlink()
    alone = BaseSpec(config=base / "config.json")
    assert field in error_of(lambda: load_config(alone), BaseFileDamaged)


def test_a_file_that_is_none_is_not_opened(base):
    """A pipe would keep its reader waiting for ever."""
    (base / "config.json").unlink()
    os.mkfifo(base / "config.json")

    assert "is missing" in told(base)


def test_code_that_comes_with_a_base_is_refused_unless_it_is_trusted(base):
    """A class that transformers lacks is not loaded from the folder; one that it has is its own."""
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (base / "evil.py").write_text("raise SystemExit('it ran')")
    (base / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": code}))
    spec = BaseSpec(model=str(base))
    assert "base.trust_remote_code" in error_of(lambda: load_config(spec), RemoteCodeRefused)

    (base / "config.json").write_text(json.dumps({"model_type": "llama", "auto_map": code}))
    assert type(load_config(spec)).__name__ == "LlamaConfig"
    tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.T", None]}}
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (base / "config.json").write_text(json.dumps({"model_type": "evil"}))
    assert "trust" in error_of(lambda: load_tokenizer(spec), RemoteCodeRefused)


def test_of_a_base_of_the_hub_what_is_cached_is_checked(base, tmp_path, monkeypatch):
    """A file that is still to be downloaded is not missed."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    stored = tmp_path / "hub" / "models--some--base"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("abc")
    (stored / "snapshots").mkdir()
    base.rename(stored / "snapshots" / "abc")
    folder, spec = stored / "snapshots" / "abc", BaseSpec(model="some/base")
    require_base_files(spec)
    (folder / SECOND).unlink()
    require_weight_files(spec)
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1])

    assert "is cut" in error_of(lambda: require_weight_files(spec), BaseFileDamaged)


@pytest.mark.parametrize("command", ["train", "run"])
def test_commands_refuse_a_damaged_base_before_torch_is_imported(base, command, tmp_path):
    """With exit code 1, in our words, and nothing is left behind."""
    (base / SECOND).write_bytes((base / SECOND).read_bytes()[:-1])
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "jobs.yaml").write_text(
        "base: {model: ./base}\n"
        "jobs: [{name: a, lora: {}, max_steps: 1, data: {path: data.jsonl}}]\n"
    )
    program = (
        "import sys\nfrom tlora_fx.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, command, "jobs.yaml", "-o", "out"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert ended.stdout == "1 False\n", ended.stderr
    assert "error[T0257] a file of the base is cut" in ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "tokenizer.model"])
def test_a_folder_without_a_tokenizer_is_told_from_one_that_cannot_be_loaded(tmp_path, name):
    """Of the second, the library's own words are given."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if name:
        (tmp_path / name).write_text("no such thing")
    spec = BaseSpec(config=tmp_path)
    text = error_of(lambda: load_tokenizer(spec), TokenizerNotLoadable)

    assert ("found      no file of a tokenizer in the folder\n" in text) == (not name)
