"""PEFT folders that users send: what PEFT makes of them is what models here make of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.training.clients import Client, cycle_of, datum, engine, run_all
from tlora_fx.errors import AdapterFolderError
from tlora_fx.runtime.adapters.files import plain_base
from tlora_fx.training.peft_folders import HEADER_BYTES, adopt, largest_bytes
from tlora_fx.training.records import Checkpoint
from tlora_fx.training.versions import read_version

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENS = [5, 6, 7, 8, 9, 10]
GOOD = [datum(TOKENS)]


def base():
    return plain_base(engine().step.model.backbone)


def peft_folder(folder, dtype=torch.float64, **how):
    """An adapter of PEFT's own whose numbers are all random."""
    torch.manual_seed(3)
    model = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", **how))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1).data = parameter.data.to(dtype)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def loss_by_peft(folder):
    model = PeftModel.from_pretrained(base(), str(folder)).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
    return -sum(float(logits[at, token]) for at, token in enumerate(TOKENS[1:]))


def adopted(folder):
    own = engine()
    return adopt(folder, json.loads(json.dumps(own.layout)), own.options.max_rank)


def sent(log, folder, name="mine"):
    """A checkpoint of a folder, as the route makes one; its path."""
    session = log.open_session("ada", {})
    model = f"{session}:train:0"
    place = f"models/{session}"
    target = log.folder / place
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("state.json"))
    path = f"tinker://{model}/weights/{name}"
    log.copy(
        Checkpoint(path, model, "ada", "weights", place, 1, time.time(), None, adopted(target)),
        "ada", session,
    )  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ({"r": 4, "lora_alpha": 32, "target_modules": "all-linear"}, {"train_attn", "train_mlp"}),
        ({"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]}, {"train_attn"}),
        (
            {"r": 3, "lora_alpha": 5, "use_rslora": True, "lora_dropout": 0.5,
             "target_modules": ["k_proj", "lm_head"]},
            {"train_attn", "train_unembed"},
        ),
        (
            {"r": 8, "lora_alpha": 16, "target_modules": r".*\.1\.mlp\.up_proj"}, {"train_mlp"},
        ),
        (
            {"r": 8, "lora_alpha": 16, "target_modules": ["up_proj"], "layers_to_transform": [0]},
            {"train_mlp"},
        ),
    ],
)  # fmt: skip
def test_a_folder_of_pefts_goes_on_here(tmp_path, how, parts):
    """With another alpha, and without some of the linears that models here have."""
    folder = peft_folder(tmp_path / "mine", **how)
    cycle = cycle_of(tmp_path / "log")
    path = sent(cycle.log, folder)
    client = Client(cycle.log, load=path, optimizer=False)
    before = client.forward_backward(GOOD)
    client.optim_step(learning_rate=1e-2)
    after = client.forward_backward(GOOD, forward_only=True)
    saved = client.send("save_weights_external", path="out")
    with_optimizer = Client(cycle.log, load=path)
    run_all(cycle)

    config = cycle.log.checkpoint(path).config
    assert {name for name in config if config[name] is True} == parts
    losses = [client.result(each)[0]["loss:sum"] for each in (before, after)]
    assert losses[0] == pytest.approx(loss_by_peft(folder), rel=1e-9)
    assert losses[1] < losses[0]
    out = tmp_path / "log" / cycle.log.checkpoint(client.result(saved)["path"]).folder
    assert losses[1] == pytest.approx(loss_by_peft(out), rel=1e-9)
    # What the adapter leaves out stays out.
    mine, trained = load_file(folder / WEIGHTS), load_file(out / WEIGHTS)
    assert trained.keys() >= mine.keys()
    for name, tensor in trained.items():
        assert bool(tensor.any()) == (name in mine)
    assert "no optimizer state" in with_optimizer.result(with_optimizer.created)["error"]


def test_an_export_comes_back_to_the_bit(tmp_path):
    """And PEFT, the model that was exported, and the one that came back agree."""
    cycle = cycle_of(tmp_path / "log")
    client = Client(cycle.log, config={"rank": 4, "seed": 1})
    client.forward_backward(GOOD)
    client.optim_step(learning_rate=1e-2)
    own = client.forward_backward(GOOD, forward_only=True)
    saved = client.send("save_weights_external", path="out")
    run_all(cycle)
    first = tmp_path / "log" / cycle.log.checkpoint(client.result(saved)["path"]).folder
    path = sent(cycle.log, first)
    again = Client(cycle.log, load=path, optimizer=False)
    same = again.forward_backward(GOOD, forward_only=True)
    back = again.send("save_weights_external", path="back")
    sampler = cycle.log.add_sampler("ada", again.session, 0, path)
    drawn = again.sample(sampler.id, 0, TOKENS)
    run_all(cycle)

    second = tmp_path / "log" / cycle.log.checkpoint(again.result(back)["path"]).folder
    for name in (CONFIG, WEIGHTS):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    losses = [client.result(own)[0]["loss:sum"], again.result(same)[0]["loss:sum"]]
    assert losses[0] == losses[1] == pytest.approx(loss_by_peft(second), rel=1e-9)
    answer = cycle.log.answer("ada", drawn)
    assert answer is not None
    assert not answer.failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_folders(tmp_path, dtype):
    folder = peft_folder(tmp_path / "mine", r=4, lora_alpha=5, target_modules=["q_proj"])
    tensors = {name: each.to(dtype) for name, each in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    cycle = cycle_of(tmp_path / "log")
    client = Client(cycle.log, load=sent(cycle.log, folder), optimizer=False)
    number = client.forward_backward(GOOD, forward_only=True)
    run_all(cycle)

    assert client.result(number)[0]["loss:sum"] == pytest.approx(loss_by_peft(folder), rel=1e-6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder that is right."""
    return peft_folder(
        tmp_path_factory.mktemp("peft") / "mine", r=4, lora_alpha=8, target_modules=["q_proj"]
    )


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "mine")
    return tmp_path / "mine"


def _configured(**fields):
    def change(folder):
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(content | fields))

    return change


def _tensors(change):
    def changed(folder):
        tensors = load_file(folder / WEIGHTS)
        change(tensors, next(iter(tensors)))
        save_file(tensors, folder / WEIGHTS)

    return changed


def _written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def _one(value):
    def change(tensors, name):
        tensors[name][-1, -1] = value

    return _tensors(change)


def _without(half):
    def change(tensors, name):
        for each in [each for each in tensors if half in each and "layers.1." in each]:
            del tensors[each]

    return _tensors(change)


WRONG = {
    "a rank that is too large": _configured(r=4096),
    "an alpha that is too large": _configured(lora_alpha=10**400),
    "of 5 rows": _configured(r=5),
    "another base": _tensors(lambda own, name: own.update({name: torch.zeros(4, 65)})),
    "whole numbers": _tensors(lambda own, name: own.update({name: own[name].int()})),
    "another linear": _tensors(lambda own, name: own.update({f"{name}x": own[name].clone()})),
    "another path": _tensors(
        lambda own, name: own.update({name.replace("layers.0", "layers.9"): own[name].clone()})
    ),
    "A alone": _without("lora_B"),
    "half of the targets": _without("lora_"),
    "nothing": _tensors(lambda own, name: own.clear()),
    "not finite": _one(float("nan")),
    "infinite": _one(float("-inf")),
    "no safetensors": _written(WEIGHTS, b"\x80\x04pickle"),
    "empty": _written(WEIGHTS, b""),
    "a huge header": _written(WEIGHTS, (1 << 40).to_bytes(8, "little") + b"{}"),
    "no JSON": _written(CONFIG, b"{"),
    "much JSON": _written(CONFIG, b" " * (2 << 20) + b"{}"),
    "a pickle": lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
    "deep JSON": _written(CONFIG, b"[" * 100_000),
    "no LoRA": _configured(peft_type="IA3"),
    "no kind": _configured(peft_type="WHATEVER"),
    "magnitudes": _configured(use_dora=True),
    "ranks": _configured(rank_pattern={"q_proj": 4}),
    "a start that changed the base": _configured(init_lora_weights="pissa"),
    "whole modules": _configured(modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_folder_is_refused(folder, what):
    """Saying what and where, and nothing of where it lies here."""
    WRONG[what](folder)
    with pytest.raises(AdapterFolderError) as caught:
        adopted(folder)

    assert str(folder) not in str(caught.value)
    assert caught.value.facts or caught.value.help
    assert not (folder / "state.json").exists()


_ALONE = """
import json, sys
from pathlib import Path
from tlora_fx.training.peft_folders import HEADER_BYTES, adopt, largest_bytes
print(adopt(Path(sys.argv[1]), json.loads(sys.argv[2]), 64)["rank"], "torch" in sys.modules)
"""


def test_a_folder_is_checked_without_torch(folder):
    """Who answers HTTP does not import it."""
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, folder, json.dumps(engine().layout)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "4 False\n", done.stderr


NOT_FINITE = rf"not finite\n +file +{WEIGHTS}\n +tensor +base_model.*lora_A.*\n +found +nan"


def test_refusals_name_what_is_wrong(folder):
    _one(float("nan"))(folder)
    with pytest.raises(AdapterFolderError, match=NOT_FINITE):
        adopted(folder)
    _tensors(lambda own, name: own.update({name: torch.zeros(4, 65)}))(folder)
    with pytest.raises(AdapterFolderError, match=r"expected +\[4, 64\].*\n +found +\[4, 65\]"):
        adopted(folder)


@pytest.mark.parametrize(
    ("half", "dtype", "value", "alpha"),
    [
        ("lora_A", torch.float64, -1e39, 128),
        ("lora_B", torch.float64, 1e39, 128),
        # The same number fits float32 until B takes the difference of the scalings.
        ("lora_B", torch.float32, 2e38, 1024),
        ("lora_B", torch.bfloat16, 2.0**127, 1024),
    ],
)
def test_a_number_beyond_float32_is_refused_with_its_tensor_and_value(
    folder, half, dtype, value, alpha
):
    """Loaded, it would be infinite."""

    def change(tensors, _):
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)
        tensors[next(name for name in tensors if half in name)][1, 1] = value

    _tensors(change)(folder)
    _configured(lora_alpha=alpha)(folder)
    pattern = rf"float32.*\n +file +{WEIGHTS}\n +tensor +base_model.*{half}.weight\n"
    with pytest.raises(AdapterFolderError, match=pattern) as caught:
        adopted(folder)

    assert float(caught.value.facts["found"]) == pytest.approx(value, rel=1e-6)


def test_the_bytes_of_the_largest_adapter_hold_it(tmp_path):
    """All linears, in float32."""
    rank = engine().options.max_rank
    how = {"r": rank, "target_modules": r".*(_proj|lm_head)"}
    folder = peft_folder(tmp_path / "mine", torch.float32, **how)
    adopted(folder)
    size = (folder / WEIGHTS).stat().st_size

    assert size <= largest_bytes(engine().layout, rank) <= size + HEADER_BYTES


def test_a_number_that_fits_float32_is_kept(folder):
    def change(tensors, name):
        tensors[name] = tensors[name].double()
        tensors[name][1, 1] = 3e38

    _tensors(change)(folder)
    adopted(folder)

    assert max(each.max() for each in read_version(folder).adapter.values()) == 3e38


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_folder_is_refused_or_what_it_was(whole, tmp_path_factory, data):
    """Cut, or with other bytes anywhere, mostly where a file says what it has."""
    folder = tmp_path_factory.mktemp("damaged") / "mine"
    shutil.copytree(whole, folder)
    file = folder / data.draw(st.sampled_from([CONFIG, WEIGHTS]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(
            st.integers(0, min(len(content), 700) - 1) | st.integers(0, len(content) - 1)
        )
        content[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
    file.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) // 2, 9]))])
    try:
        config = adopted(folder)
    except AdapterFolderError:
        assert not (folder / "state.json").exists()
        return
    for tensor in read_version(folder).adapter.values():
        assert tensor.isfinite().all()
        assert config["rank"] in tensor.shape
