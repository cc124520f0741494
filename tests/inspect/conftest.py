"""Compiled models that the tests of this folder look into; each is compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import base_of, job, plain
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.inspect.listing import make_listing
from tlora_fx.inspect.program import Recorder
from tlora_fx.inspect.schema import Listing, PassStage
from tlora_fx.model.supermodel import SuperModel

ROOT = Path(__file__).parents[2]
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
# The same at a sixteenth of the width, with two layers.
NARROW = LLAMA_8B | {
    "vocab_size": 8016,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TARGETS = (
    ["q_proj", "v_proj"],
    ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all-linear",
    ["gate_proj", "up_proj", "down_proj"],
    ["q_proj", "v_proj", "down_proj"],
)
RANKS = (2, 4, 8, 16, 32, 64, 128)


@pytest.fixture(scope="session")
def quickstart_recorded() -> tuple[SuperModel, list[PassStage]]:
    """The three jobs of the quickstart, and what every pass left of them."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        model = compile(ROOT / "examples/quickstart/jobs.yaml", instruments=[recorder])
    return model, recorder.stages


@pytest.fixture(scope="session")
def quickstart(quickstart_recorded) -> SuperModel:
    """The three jobs of the quickstart."""
    return quickstart_recorded[0]


@pytest.fixture(scope="session")
def quickstart_stages(quickstart_recorded) -> list[PassStage]:
    """What every pass left of them."""
    return quickstart_recorded[1]


@pytest.fixture(scope="session")
def quickstart_listing(quickstart) -> Listing:
    """Its listing, made in the repository's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return make_listing(quickstart)


@pytest.fixture(scope="session")
def odd(tmp_path_factory) -> SuperModel:
    """Jobs of which most have branches that no pattern lowers, on interleaved layers."""
    base = base_of(tmp_path_factory.mktemp("odd"), "gemma2", dtype="float32")
    two = ["q_proj", "v_proj"]
    return compile(
        [
            job("plain", base, r=8, target_modules="all-linear"),
            job("dropout", base, r=4, lora_dropout=0.1, target_modules="all-linear"),
            job("dora", base, r=3, target_modules=two, use_dora=True, lora_dropout=0.1),
            job("extras", base, r=3, target_modules=["q_proj", "embed_tokens"],
                modules_to_save=["lm_head"]),
            job("one-layer", base, r=3, target_modules=["q_proj"], layers_to_transform=[1]),
        ]
    )  # fmt: skip


@pytest.fixture(scope="session")
def odd_listing(odd, tmp_path_factory) -> Listing:
    """Its listing, made in the folder that holds the base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(odd.backbone.title).parent)
        return make_listing(odd)


@pytest.fixture(scope="session")
def many(tmp_path_factory) -> SuperModel:
    """32 jobs of seven ranks and five target sets on a Llama-3-8B config, for slow tests."""
    base = base_of(tmp_path_factory.mktemp("many"), "llama", dtype="bfloat16", **LLAMA_8B)
    return compile(
        [
            job(f"job-{number:02d}", base, r=RANKS[number % 7], lora_alpha=2 * RANKS[number % 7],
                lora_dropout=0.05 * (number % 3), target_modules=TARGETS[number % 5])
            for number in range(32)
        ]
    )  # fmt: skip


@pytest.fixture(scope="session")
def many_listing(many) -> Listing:
    """Their listing, made in the folder that holds the base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(many.backbone.title).parent)
        return make_listing(many)


@pytest.fixture(scope="session")
def narrow_listing(tmp_path_factory) -> Listing:
    """The listing of two jobs on two narrow layers."""
    folder = tmp_path_factory.mktemp("narrow")
    base = base_of(folder, "llama", dtype="bfloat16", **NARROW)
    jobs = [
        job("all", base, r=8, target_modules="all-linear"),
        job("less", base, r=2, target_modules="all-linear"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return make_listing(compile(jobs))


@pytest.fixture(scope="session")
def padded_listing() -> Listing:
    """A hand-written module with dropout in batch form."""
    base = BaseSpec(module=plain(rate=0.1), dtype="float64")
    names = {"one": ["qkv"], "two": ["qkv", "out"]}
    return make_listing(
        compile([job(name, base, r=2, target_modules=to) for name, to in names.items()])
    )
