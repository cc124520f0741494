"""What is pushed to the hub is what PEFT and transformers load from there."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from huggingface_hub import HfApi, constants

from tests.runtime.groups import READING, make_job, tiny_base
from tests.runtime.hub_here import COMMIT, hub
from tlora_fx.cli import main
from tlora_fx.compiler import compile
from tlora_fx.errors import HubError
from tlora_fx.runtime.adapters.hub import ADAPTER_FILES, push
from tlora_fx.runtime.trainer import Trainer


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub() as (address, kept):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        yield address, kept


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_tokenizer):
    """A job trained on a file."""
    folder = tmp_path_factory.mktemp("hub")
    base = tiny_base(folder / "base", **READING)
    make_tokenizer().save_pretrained(folder / "base")
    (folder / "data.jsonl").write_text(json.dumps({"text": "1+1=2"}) + "\n")
    job = make_job(base, "a", max_steps=2, report_to="tensorboard")
    data = job.data.model_copy(update={"path": str(folder / "data.jsonl")})
    Trainer(
        compile([job.model_copy(update={"data": data})]), output=folder / "run", device="cpu"
    ).run()
    return folder / "run"


def test_a_pushed_adapter_comes_back_as_it_was(run, served, tmp_path):
    """By the hub's own client; the repository is private, and nothing else of the run is in it."""
    address, kept = served
    url = push(run / "a", "me/sums", ADAPTER_FILES)
    fetched = HfApi(endpoint=address).snapshot_download("me/sums", local_dir=tmp_path / "fetched")

    assert url.startswith(f"{address}/me/sums")
    assert kept.settings["me/sums"]["visibility"] == "private"
    assert sorted(kept.repositories["me/sums"]) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    name = "adapter_model.safetensors"
    mine, theirs = (
        safetensors.torch.load_file(f"{folder}/{name}") for folder in (run / "a", fetched)
    )
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert len(kept.objects) == 1


def test_a_merged_model_is_pushed_by_the_command(run, served, tmp_path, capsys):
    """Whole, with its tokenizer; the command prints folder and address."""
    address, kept = served
    with pytest.raises(SystemExit) as end:
        main(["merge", str(run), "-o", str(tmp_path / "merged"), "--push-to-hub", "me/merged"])

    assert not end.value.code
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "merged"), f"{address}/me/merged/commit/{COMMIT}",
    ]  # fmt: skip
    files = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir()}
    assert kept.repositories["me/merged"] == files


def test_a_hub_that_refuses_is_told(run, served, monkeypatch):
    """The adapter stays where it is."""
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="401"):
        push(run / "a", "me/sums", ADAPTER_FILES)

    assert (run / "a" / "adapter_model.safetensors").is_file()


# vLLM does not install beside this torch, so its rules for adapter folders stand here: of its
# PEFTHelper (config), and of the names and shapes that LoRAModel.from_lora_tensors takes.

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def test_an_adapter_follows_the_rules_of_vllm(run):
    """No DoRA, no bias, no trained modules; A and B of linears, in pairs of one rank."""
    config = json.loads((run / "a" / "adapter_config.json").read_text())
    tensors = safetensors.torch.load_file(run / "a" / "adapter_model.safetensors")

    assert (config["peft_type"], config["bias"]) == ("LORA", "none")
    assert not config["use_dora"]
    assert config["modules_to_save"] is None
    assert config["r"] <= max(VLLM_RANKS)
    halves = {"lora_A": {}, "lora_B": {}}
    for name, tensor in tensors.items():
        prefix, *module, half, kind = name.split(".")
        assert (prefix, module[0], kind) == ("base_model", "model", "weight")
        assert module[-1] in config["target_modules"]
        halves[half][".".join(module)] = tensor
    assert halves["lora_A"].keys() == halves["lora_B"].keys()
    for module, a in halves["lora_A"].items():
        assert a.shape[0] == halves["lora_B"][module].shape[1] == config["r"]
