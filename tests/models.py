"""Small bases, jobs on them, and one comparison: fused against plain transformers and PEFT."""

from __future__ import annotations

import copy
import importlib
import logging
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn

from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.model.batch import JobTokens, PackedBatch, pack, pad
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.runtime.adapters.files import base_tensors, canonical_names, start_adapters
from tlora_fx.testing.equivalence import SIZES

# torch writes a record a traced tensor; pytest would keep them all.
logging.getLogger("torch.__trace").propagate = False

VOCABULARY = SIZES["vocab_size"]
# Older transformers draw random numbers in OPT and number lines in Bloom's masks, older torch
# specialises an einsum: the compiler refuses them there by name.
OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.20")
OLD_TORCH = Version(torch.__version__) < Version("2.13")
FEW: dict[str, Any] = {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LONG_LIMIT = 6
LONGROPE = {
    "rope_type": "longrope",
    "type": "longrope",
    "long_factor": [2.0 + 0.5 * i for i in range(4)],
    "short_factor": [1.0 + 0.01 * i for i in range(4)],
    "original_max_position_embeddings": LONG_LIMIT,
}


@dataclass(frozen=True)
class Family:
    """An architecture at small size.

    config    its class in transformers and the arguments
    targets   two or three of its linears
    form      how its rows lie
    """

    config: tuple[str, dict[str, Any]]
    targets: tuple[str, ...] = ("q_proj", "v_proj", "up_proj")
    form: str = "packed"


_FUSED = ("query_key_value", "dense_h_to_4h")
FAMILIES: Mapping[str, Family] = {
    "llama": Family(("LlamaConfig", SIZES)),
    "qwen2": Family(("Qwen2Config", SIZES)),
    "qwen3": Family(("Qwen3Config", {**SIZES, "head_dim": 8})),
    "mistral": Family(("MistralConfig", {**SIZES, "sliding_window": 4})),
    "gemma2": Family(
        (
            "Gemma2Config",
            {**SIZES, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8,
             "attn_logit_softcapping": 0.5, "num_hidden_layers": 4},
        )
    ),
    "phi3": Family(("Phi3Config", SIZES), ("qkv_proj", "down_proj")),
    "phi3-longrope": Family(
        (
            "Phi3Config",
            {**SIZES, "rope_scaling": LONGROPE, "original_max_position_embeddings": LONG_LIMIT},
        ),
        ("qkv_proj", "down_proj"),
    ),
    "gpt2": Family(("GPT2Config", {**GPT2, **STILL}), ("c_attn", "c_fc")),
    "gpt-neox": Family(("GPTNeoXConfig", FEW), _FUSED),
    "olmo2": Family(("Olmo2Config", SIZES)),
    "opt": Family(
        (
            "OPTConfig",
            {**FEW, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 0},
        ),
        ("q_proj", "fc1"),
    ),
    "stablelm": Family(("StableLmConfig", SIZES)),
    "bloom": Family(
        ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
        _FUSED,
    ),
    "falcon": Family(("FalconConfig", FEW), _FUSED),
    "falcon-alibi": Family(("FalconConfig", {**FEW, "alibi": True}), _FUSED),
    "lfm2": Family(
        (
            "Lfm2Config",
            {**SIZES, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
        ),
        ("in_proj", "q_proj", "w1"),
    ),
}  # fmt: skip

#: Mixtures of experts; every expert has its matrices in one parameter of three dimensions.
_ROUTED: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "num_experts_per_tok": 2}
_FOUR = {**_ROUTED, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
_LOCAL = {**_ROUTED, "num_local_experts": 4}
_GROUPS = {
    **_ROUTED, "n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 8,
}  # fmt: skip
_LATENT = {
    **_GROUPS, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
_LLAMA4 = {
    **_LOCAL, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size": 24,
    "intermediate_size_mlp": 24, "interleave_moe_layer_step": 1, "no_rope_layers": [1, 0],
}  # fmt: skip
MIXTURES: Mapping[str, Family] = {
    "qwen3-moe": Family(("Qwen3MoeConfig", {**_FOUR, "head_dim": 8})),
    "qwen2-moe": Family(("Qwen2MoeConfig", {**_FOUR, "shared_expert_intermediate_size": 24})),
    "mixtral": Family(("MixtralConfig", _LOCAL)),
    "olmoe": Family(("OlmoeConfig", _FOUR)),
    "gpt-oss": Family(("GptOssConfig", {**_LOCAL, "head_dim": 8, "sliding_window": 4})),
    "granitemoe": Family(("GraniteMoeConfig", _LOCAL)),
    "deepseek-v3": Family(("DeepseekV3Config", _LATENT), ("q_b_proj", "o_proj")),
    "deepseek-v2": Family(
        ("DeepseekV2Config", {**_LATENT, "topk_method": "group_limited_greedy"}),
        ("q_b_proj", "o_proj"),
    ),
    "glm4-moe": Family(("Glm4MoeConfig", _GROUPS)),
    "llama4": Family(
        ("Llama4TextConfig", {**_LLAMA4, "attention_chunk_size": 4, "floor_scale": 4}),
        form="batch",
    ),
    "llama4-packed": Family(("Llama4TextConfig", {**_LLAMA4, "attn_temperature_tuning": False})),
    "ernie4.5-moe": Family(
        (
            "Ernie4_5_MoeConfig",
            {**_ROUTED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24,
             "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
        )
    ),
    "dots1": Family(("Dots1Config", _GROUPS)),
    "hunyuan-moe": Family(("HunYuanMoEV1Config", {**_FOUR, "moe_topk": 2, "head_dim": 8})),
    "minimax-m2": Family(("MiniMaxM2Config", {**_LOCAL, "head_dim": 8})),
    "flex-olmo": Family(("FlexOlmoConfig", {**_ROUTED, "num_experts": 4})),
    "granitemoe-shared": Family(
        ("GraniteMoeSharedConfig", {**_LOCAL, "shared_intermediate_size": 24})
    ),
    "qwen3-next": Family(
        (
            "Qwen3NextConfig",
            {**_FOUR, "head_dim": 8, "shared_expert_intermediate_size": 24,
             "layer_types": ["full_attention"] * 2},
        )
    ),
    "longcat-flash": Family(
        (
            "LongcatFlashConfig",
            {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "ffn_hidden_size": 48,
             "num_attention_heads": 4, "max_position_embeddings": 64, "q_lora_rank": 8,
             "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16,
             "head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "zero_expert_num": 2,
             "moe_topk": 2, "expert_ffn_hidden_size": 24},
        ),
        ("q_b_proj", "o_proj"),
    ),
}  # fmt: skip


#: Changes to the families that most tests trace with fewer layers; who takes them shares traces.
SHALLOW: Mapping[str, dict[str, int]] = {"llama": {"num_hidden_layers": 2}}


class Wide:
    """torch for a model's code, in which float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def in_float64(monkeypatch: Any, family: str) -> None:
    """Let a mixture's code compute in float64 where it asks for torch.float32.

    A base that other tests trace needs another config: graphs are kept by it.
    """
    config = getattr(transformers, MIXTURES[family].config[0])
    code = importlib.import_module(config.__module__.replace("configuration", "modeling"))
    monkeypatch.setattr(code, "torch", Wide())


class Plain(nn.Module):
    """A hand-written causal model: ids [B, S] to logits [B, S, V].

    ahead   how many later tokens each token sees too; above 0 it is no language model
    """

    def __init__(self, layers: int = 3, ahead: int = 0, rate: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(PlainLayer(ahead, rate) for _ in range(layers))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed, attend, predict."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class PlainLayer(nn.Module):
    """One head of attention and one linear."""

    def __init__(self, ahead: int, rate: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.drop = nn.Dropout(rate)
        self.ahead = ahead

    def forward(self, hidden: Tensor) -> Tensor:
        """Residual attention; the mask depends on the length alone."""
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / 32**0.5
        place = torch.arange(hidden.shape[1], device=hidden.device)
        seen = place[None, :] <= place[:, None] + self.ahead
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return hidden + self.drop(self.out(torch.tanh(weights @ v)))


def plain(**options: Any) -> nn.Module:
    """A hand-written model with seeded weights, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Plain(**options).double()


def save(config: transformers.PretrainedConfig, folder: Path) -> None:
    """Write a config where other processes may read, or write the same, meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as beside:
        config.save_pretrained(beside)
        for path in Path(beside).iterdir():
            path.replace(folder / path.name)


def save_config(folder: Path, family: str, **changes: Any) -> Path:
    """Write a family's config.json; returns its folder."""
    name, arguments = (MIXTURES.get(family) or FAMILIES[family]).config
    make: Any = getattr(transformers, name)
    path = folder / family
    save(make(**{**arguments, **changes}), path)
    return path


def base_of(folder: Path, family: str, dtype: Any = "float64", **changes: Any) -> BaseSpec:
    """A family's base; `attention` goes to the base, all else to its config."""
    attention = changes.pop("attention", "auto")
    return BaseSpec(config=save_config(folder, family, **changes), dtype=dtype, attention=attention)


def job(name: str, base: BaseSpec, seed: int = 0, **lora: Any) -> Job:
    """A job that only matters for its adapter."""
    return Job(name=name, base=base, lora=lora, data={"path": "unused.jsonl"}, seed=seed)


def hand_written(
    module: nn.Module, attention: Any = "auto", targets: Sequence[str] = ("out",)
) -> list[Job]:
    """A job on a module given from Python."""
    base = BaseSpec(module=module.double(), dtype="float64", attention=attention)
    return [job("one", base, r=4, target_modules=list(targets))]


def mixed_jobs(base: BaseSpec, targets: Sequence[str]) -> list[Job]:
    """Three plain LoRA jobs: all linears, a few, and other ranks by pattern with rslora."""
    pattern = {targets[0]: 3}
    return [
        job("all", base, r=8, target_modules="all-linear"),
        job("few", base, r=4, lora_alpha=9, target_modules=list(targets[:2])),
        job("pattern", base, r=16, target_modules="all-linear", use_rslora=True,
            rank_pattern=pattern),
    ]  # fmt: skip


def ready(jobs: Sequence[Job], seed: int = 1) -> SuperModel:
    """Compile, load the base, start the adapters and give every adapter of them random values."""
    model = compile(list(jobs))
    model.materialize(base_tensors(model.backbone), "cpu")
    restart(model, seed)
    return model


def restart(model: SuperModel, seed: int = 1) -> None:
    """The adapters that `ready` gives."""
    start_adapters(model)
    randomise(model, seed)


def randomise(model: SuperModel, seed: int) -> None:
    """Random A and B, a function of job and name: where B is zero, A would get no gradient."""
    for own in model.jobs:
        for name, parameter in model.job_parameters(own.name).items():
            if "lora_" in name and "magnitude" not in name:
                generator = torch.Generator().manual_seed(_number(f"{seed} {own.name} {name}"))
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data.copy_(drawn * 0.1)


def _number(text: str) -> int:
    return random.Random(text).getrandbits(48)


def tokens(
    lengths: Sequence[int], seed: int = 0, step: int = 0, key: int | None = None
) -> JobTokens:
    """One job's part of a row: sequences of these lengths, every token a target."""
    source = random.Random(f"tokens {seed}")
    drawn = [[source.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]
    return JobTokens(drawn, drawn, seed=seed if key is None else key, step=step)


def row_of(model: SuperModel, parts: Sequence[JobTokens]) -> PackedBatch:
    """A row in the model's form."""
    return (pack if model.group.form == "packed" else pad)(parts)


@dataclass
class Outcome:
    """A job's loss sum and its gradients by PEFT's names."""

    loss: Tensor
    gradients: dict[str, Tensor]


def run_fused(model: SuperModel, parts: Sequence[JobTokens]) -> dict[str, Outcome]:
    """One forward and backward of a row; what each job gets."""
    for own in model.jobs:
        for parameter in model.job_parameters(own.name).values():
            assert parameter.grad is not None
            parameter.grad.zero_()
    losses = model(row_of(model, parts))
    if losses.requires_grad:  # an empty row of jobs that adapt the head alone has nothing to learn
        losses.sum().backward()
    return {
        own.name: Outcome(losses[place].detach(), _gradients(model.job_parameters(own.name)))
        for place, own in enumerate(model.jobs)
    }


def _gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in parameters.items()
    }


def peft_model(model: SuperModel, name: str) -> Any:
    """A job's model by transformers and PEFT alone, with the fused model's numbers in it."""
    from peft import get_peft_model

    own = next(candidate for candidate in model.jobs if candidate.name == name)
    base = plain_model(model)
    config = own.lora_config()
    if own.base.module is not None:
        config.task_type = None
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        wrapped: Any = get_peft_model(base, config)
    wrapped.train()
    theirs = dict(wrapped.named_parameters())
    mine = model.job_parameters(name)
    assert {key for key, p in theirs.items() if p.requires_grad} == set(mine)
    with torch.no_grad():
        for key, parameter in mine.items():
            theirs[key].copy_(parameter)
    return wrapped


def plain_model(model: SuperModel) -> nn.Module:
    spec = model.backbone.spec
    if spec.module is not None:
        return copy.deepcopy(spec.module)
    config = transformers.AutoConfig.from_pretrained(spec.config)
    config.use_cache = False
    sees = hasattr(config, "vision_config")
    factory: Any = (
        transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    )
    base: nn.Module = factory.from_config(
        config, dtype=getattr(torch, spec.dtype), attn_implementation="eager",
        experts_implementation="eager",
    )  # fmt: skip
    values, canonical = base_tensors(model.backbone), canonical_names(model.backbone)
    with torch.no_grad():
        for name, parameter in base.named_parameters(remove_duplicate=False):
            parameter.copy_(values[canonical[name]])
    return base


def run_alone(wrapped: Any, part: JobTokens) -> Outcome:
    """One forward and backward of a job's sequences, padded on the right, by PEFT alone."""
    sequences = part.sequences
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for line, (sequence, wanted) in enumerate(zip(sequences, part.labels, strict=True)):
        ids[line, : len(sequence)] = torch.tensor(sequence)
        labels[line, : len(sequence)] = torch.tensor(wanted)
    if hasattr(wrapped.get_base_model(), "config"):
        attended = torch.zeros_like(ids)
        for line, sequence in enumerate(sequences):
            attended[line, : len(sequence)] = 1
        logits = wrapped(input_ids=ids, attention_mask=attended).logits
    else:
        logits = wrapped(ids)
    flat, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = F.cross_entropy(flat, targets, ignore_index=-100, reduction="sum")
    loss.backward()
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    return Outcome(loss.detach(), _gradients(trained))


def assert_same(found: Outcome, expected: Outcome, bound: float, what: str = "") -> None:
    """Loss and every gradient agree, relative to the larger of what was expected."""
    assert_close(found.loss, expected.loss, bound, f"{what} loss")
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(g.norm() for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        floor = float(largest) * 1e-6
        assert_close(found.gradients[name], gradient, bound, f"{what} {name}", floor)


def assert_close(
    found: Tensor, expected: Tensor, bound: float, what: str, floor: float = 0
) -> None:
    """The norm of the difference is at most `bound` times what was expected."""
    difference = (found - expected).detach().norm()
    limit = bound * max(float(expected.detach().norm()), floor)
    assert torch.isfinite(difference), f"{what}: {difference}"
    assert difference <= limit, f"{what}: {difference} > {limit}"


def assert_equals_peft(
    model: SuperModel, parts: Sequence[JobTokens], bound: float, names: Sequence[str] = ()
) -> None:
    """Every job of a row (or those named) gets what it gets alone from transformers and PEFT."""
    fused = run_fused(model, parts)
    for own, part in zip(model.jobs, parts, strict=True):
        if part.sequences and (not names or own.name in names):
            alone = run_alone(peft_model(model, own.name), part)
            assert_same(fused[own.name], alone, bound, own.name)


def error_of(function: Callable[[], Any], kind: type[Exception]) -> str:
    """The text of the error that a call must raise."""
    try:
        function()
    except kind as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError(f"no {kind.__name__}")
