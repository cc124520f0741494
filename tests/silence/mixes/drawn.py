"""Jobs of all kinds on one base, drawn by a seed: adapters, optimizers, data, joins and leaves."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import transformers

from tests.models import Wide
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample

VOCABULARY = 41
LABELS = 3
#: Each of these drops, by keyed masks.
_DROPS = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.15,
}  # fmt: skip
_WITH_BIAS = {"attention_bias": True, "mlp_bias": True}


@dataclass(frozen=True)
class Family:
    """A base.

    config    its class in transformers, and arguments
    targets   modules that jobs adapt
    kinds     of adapters that its jobs draw from
    experts   parameters that `target_parameters` may name
    """

    config: tuple[str, dict[str, Any]]
    targets: tuple[str, ...]
    kinds: tuple[str, ...]
    head: str = "lm_head"
    embedding: str = "embed_tokens"
    experts: tuple[str, ...] = ()
    classifies: bool = False


ANY = ("lora", "lora", "loraplus", "bias", "lora-fa", "pissa", "olora", "dora", "lora_bias",
       "head", "tokens", "ia3", "adalora", "vera", "loha", "lokr", "oft")  # fmt: skip
#: Kinds that a running model takes.
JOINING = ("lora", "loraplus", "lora-fa")
_CONV1D = ("lora", "bias", "lora-fa", "dora", "ia3", "adalora", "vera", "head", "tokens")
_LLAMA = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
_NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
FAMILIES: Mapping[str, Family] = {
    "gpt-neox": Family(("GPTNeoXConfig", _SIZES), _NEOX, ANY, "embed_out", "embed_in"),
    "llama": Family(
        ("LlamaConfig", {**_SIZES, **_WITH_BIAS, "num_key_value_heads": 2}), _LLAMA, ANY
    ),
    "gpt2": Family(
        (
            "GPT2Config",
            {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 1, **_DROPS},
        ),
        ("c_attn", "c_proj", "c_fc"), _CONV1D, embedding="wte",
    ),
    "mixtral": Family(
        (
            "MixtralConfig",
            {**_SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        ("q_proj", "v_proj", "o_proj"), ("experts", "experts", *ANY),
        experts=("experts.gate_up_proj", "experts.down_proj", "gate.weight"),
    ),
    "classifier": Family(
        ("GPTNeoXConfig", _SIZES), _NEOX, tuple(kind for kind in ANY if kind != "head"),
        embedding="embed_in", classifies=True,
    ),
}  # fmt: skip
OPTIMIZERS = ("adamw", "adamw", "adam", "sgd", "rmsprop", "adagrad", "nadam", "radam", "adamax")
SCHEDULES = ("constant", "linear", "cosine", "constant_with_warmup", "polynomial")
PLANS = {"replicated": "dp=2", "fsdp": "dp=2", "tensor": "tp=2", "pipeline": "pp=2"}
#: How the jobs of a mix run; a plan is one of two processes.
COMING = "come and go"
WAYS = ("together", "together", COMING, COMING, "killed", "killed", "plan")
#: Of a gradient that is zero but for rounding, Adam and its like else make a step.
EPSILON = 1e-3


@dataclass(frozen=True)
class Mix:
    """What a seed draws.

    first    so many jobs begin; the others come
    script   (rounds done, "admit", "pause" or "release", name of a job)
    kill     at which rename of a file, or step, the process is killed
    """

    seed: int
    family: str
    way: str
    jobs: dict[str, Job]
    data: dict[str, JobData]
    kinds: dict[str, str]
    first: int
    script: list[tuple[int, str, str]] = field(default_factory=list)
    kill: int = 0

    def __str__(self) -> str:
        own = ", ".join(f"{self.kinds[name]} by {job.optim}" for name, job in self.jobs.items())
        return f"seed {self.seed}: {self.family}, {self.way}: {own}"


def draw(seed: int, folder: Path) -> Mix:
    """The mix of a seed; its base's config is written below the folder."""
    source = random.Random(f"mix {seed}")
    way = source.choice(WAYS)
    way = source.choice(list(PLANS)) if way == "plan" else way
    # No classifier is open for jobs that come.
    family = source.choice([each for each in FAMILIES if way != COMING or each != "classifier"])
    base = base_of(family, folder)
    kinds, jobs, data = {}, {}, {}
    for name in "abcd"[: source.randint(2, 4)]:
        few = way == COMING and (not jobs or source.random() < 0.8)
        kinds[name] = source.choice(JOINING if few else FAMILIES[family].kinds)
        jobs[name] = _job(source, base, FAMILIES[family], name, kinds[name])
        data[name] = _data(source, jobs[name])
    first = 1 if way == COMING else len(jobs)
    return Mix(
        seed, family, way, jobs, data, kinds, first,
        _script(source, list(jobs), first) if way == COMING else [], source.randint(1, 50),
    )  # fmt: skip


def base_of(family: str, folder: Path) -> BaseSpec:
    """A family's base in float64."""
    name, arguments = FAMILIES[family].config
    path = folder / family
    if not path.exists():
        getattr(transformers, name)(**arguments).save_pretrained(path)
    task = {"task": "SEQ_CLS", "labels": LABELS} if FAMILIES[family].classifies else {}
    return BaseSpec(config=path, dtype="float64", seed=7, **task)


@contextmanager
def wide(family: str) -> Iterator[None]:
    """Within this, the code of a family computes in float64 where it asks for torch.float32."""
    config = getattr(transformers, FAMILIES[family].config[0])
    code = importlib.import_module(config.__module__.replace("configuration", "modeling"))
    with mock.patch.object(code, "torch", Wide()):
        yield


def _job(source: random.Random, base: BaseSpec, family: Family, name: str, kind: str) -> Job:
    steps = source.randint(2, 6)
    optim = "lorafa" if kind == "lora-fa" else source.choice(OPTIMIZERS)
    fields: dict[str, Any] = {
        "per_device_train_batch_size": source.randint(1, 3),
        "gradient_accumulation_steps": source.choice([1, 1, 2]),
        "max_steps": steps, "seed": source.randrange(2**31), "shuffle": False, "optim": optim,
        "learning_rate": 0.3 if optim == "sgd" else 0.01,
        "save_steps": source.choice([1, 2, 100]), "weight_decay": source.choice([0.0, 0.1]),
        "max_grad_norm": source.choice([None, 1.0, 0.02]), "adam_epsilon": EPSILON,
        "lr_scheduler_type": source.choice(SCHEDULES),
        "warmup_steps": source.choice([0, 1, steps - 1]),
    }  # fmt: skip
    if optim in ("rmsprop", "adagrad"):
        fields["optim_args"] = {"eps": EPSILON}
    if source.random() < 0.4:
        fields |= {"eval_data": {"path": "unused.jsonl"}, "eval_steps": source.randint(1, 3)}
    if kind == "loraplus":
        fields["loraplus_lr_ratio"] = 4.0
    lora = _adapter(source, family, kind, steps)
    return Job(name=name, base=base, lora=lora, data={"path": "unused.jsonl"}, **fields)


def _adapter(source: random.Random, family: Family, kind: str, steps: int) -> dict[str, Any]:
    """Fields of PEFT's config of a kind."""
    count = source.randint(1, len(family.targets))
    rank, targets = source.randint(1, 9), source.sample(family.targets, count)
    drop = source.choice([0.0, 0.0, 0.3])
    lora: dict[str, Any] = {
        "r": rank, "lora_alpha": source.randint(1, 16), "use_rslora": source.random() < 0.3,
        "target_modules": targets, "lora_dropout": drop,
    }  # fmt: skip
    if source.random() < 0.3:
        lora["rank_pattern"] = {targets[0]: source.randint(1, 9)}
    at = {"target_modules": targets}
    others: dict[str, dict[str, Any]] = {
        "ia3": at | {"feedforward_modules": targets[: source.randint(0, count)]},
        "adalora": at | {
            "init_r": rank + 1, "target_r": source.randint(1, rank), "total_step": steps,
            "tfinal": source.randint(0, steps - 1), "lora_alpha": source.randint(1, 16),
            "lora_dropout": drop, "orth_reg_weight": source.choice([0.0, 0.5]),
        },
        "vera": at | {
            "r": rank, "projection_prng_key": source.randrange(99), "vera_dropout": drop,
            "d_initial": 0.2,
        },
        "loha": at | {"r": rank, "alpha": source.randint(1, 16)},
        "lokr": at | {"r": rank, "alpha": 4, "decompose_both": source.random() < 0.5},
        "oft": at | {"oft_block_size": source.choice([4, 8]), "block_share": source.random() < 0.3},
    }  # fmt: skip
    if kind in others:
        return {"peft_type": kind.upper()} | others[kind]
    more: dict[str, Any] = {
        "bias": {"bias": source.choice(["all", "lora_only"])},
        "pissa": {"init_lora_weights": "pissa", "lora_dropout": 0.0},
        "olora": {"init_lora_weights": "olora", "lora_dropout": 0.0},
        "dora": {"use_dora": True},
        "lora_bias": {"lora_bias": True},
        "head": {"modules_to_save": [family.head]},
        "tokens": {"trainable_token_indices": {family.embedding: source.sample(range(41), 3)}},
        "experts": {
            "target_modules": source.choice([[], targets]), "lora_dropout": 0.0,
            "target_parameters": source.sample(family.experts, source.randint(1, 2)),
            "rank_pattern": {},
        } if family.experts else {},
    }.get(kind, {})  # fmt: skip
    return lora | more


def _data(source: random.Random, job: Job) -> JobData:
    """As many samples as the job's steps take, and five to evaluate on."""
    assert job.max_steps is not None
    count = job.max_steps * job.per_device_train_batch_size * job.gradient_accumulation_steps
    longest = source.choice([4, 9, 40])

    def sample() -> Sample:
        length = source.randint(2, longest)
        ids = tuple(source.randrange(1, VOCABULARY) for _ in range(length))
        if job.base.is_classifier:
            return Sample(ids, (-100,) * (length - 1) + (source.randrange(LABELS),))
        prompt = source.randint(0, length - 2)
        return Sample(ids, (-100,) * prompt + ids[prompt:])

    evaluation = [sample() for _ in range(5 if job.eval_data is not None else 0)]
    return JobData(job, [sample() for _ in range(count)], DataReport(), evaluation)


def _script(source: random.Random, names: list[str], first: int) -> list[tuple[int, str, str]]:
    """Every other job comes; some jobs pause, return, or leave."""
    events = [(source.randint(1, 3), "admit", name) for name in names[first:]]
    for name in names:
        if source.random() < 0.3:
            events.append((source.randint(1, 4), source.choice(["pause", "release"]), name))
            if events[-1][1] == "pause":
                events.append((events[-1][0] + 1, "admit", name))
    return sorted(events, key=lambda event: event[0])
